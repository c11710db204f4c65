// digits.cuh: shared by the kernels of the digits ladder.
#pragma once
#include "tile_gemm.cuh"

// Of the block's tile in the result matrix.
__device__ __forceinline__ Position first_in_matrix() {
    return {static_cast<int>(blockIdx.y) * TILE, static_cast<int>(blockIdx.x) * TILE};
}

// Of this thread's element in the result matrix.
__device__ __forceinline__ Position in_matrix() {
    const Position first = first_in_matrix(), at = in_tile();
    return {first.row + at.row, first.column + at.column};
}

// NaN propagates; fmaxf(v, 0) would return 0.
__device__ __forceinline__ float relu(float v) { return v < 0.0f ? 0.0f : v; }

// Sum over LANES consecutive lanes by butterfly shuffles; every lane gets the sum.
template <int LANES>
__device__ __forceinline__ float sum_lanes(float v) {
#pragma unroll
    for (int mask = LANES / 2; mask > 0; mask /= 2) v += __shfl_xor_sync(~0u, v, mask);
    return v;
}

// Softmax of the tile's rows, N <= TILE columns; z is this thread's element. Every thread of the block calls it.
__device__ __forceinline__ float softmax_in_tile(float z, int N) {
    __shared__ float logits[TILE][TILE];
    const Position at = in_tile();
    logits[at.row][at.column] = z;
    __syncthreads();
    float largest = logits[at.row][0], sum = 0.0f;
    for (int j = 1; j < N; ++j) largest = fmaxf(largest, logits[at.row][j]);
    for (int j = 0; j < N; ++j) sum += expf(logits[at.row][j] - largest);
    return expf(z - largest) / sum;
}
