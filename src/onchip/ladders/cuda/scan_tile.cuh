// scan_tile.cuh: a block scans a tile of 4096 values in registers.
// A warp holds 512 contiguous values as 4 lines of 128. Of each line, a lane holds 4 contiguous values: a 16-byte load.
#pragma once
#include "scan_block.cuh"

constexpr int THREADS = 256, WARPS = THREADS / LANES;
constexpr int LINES = 4, QUAD = 4;
constexpr int TILE = THREADS * LINES * QUAD;  // 4096 values

struct alignas(16) Quad {
    float v[QUAD];
};

// Offset in the tile of this lane's quad of line `line`.
__device__ __forceinline__ int offset_in_tile(int line) {
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    return (warp * LINES + line) * LANES * QUAD + lane * QUAD;
}

// Load x[first : first + TILE], zeros past N. x is 16 B aligned, first a multiple of 4.
__device__ __forceinline__ void load_tile(const float* x, Quad (&tile)[LINES], long long first, long long N) {
#pragma unroll
    for (int line = 0; line < LINES; ++line) {
        const long long i = first + offset_in_tile(line);
        if (i + QUAD <= N) {
            tile[line] = *reinterpret_cast<const Quad*>(x + i);
        } else {
#pragma unroll
            for (int j = 0; j < QUAD; ++j) tile[line].v[j] = i + j < N ? x[i + j] : 0.0f;
        }
    }
}

// Store the tile, `prefix` added to each value, to y[first : first + TILE]; nothing past N.
__device__ __forceinline__ void store_tile(float* y, const Quad (&tile)[LINES], float prefix, long long first,
                                           long long N) {
#pragma unroll
    for (int line = 0; line < LINES; ++line) {
        const long long i = first + offset_in_tile(line);
        Quad sums;
#pragma unroll
        for (int j = 0; j < QUAD; ++j) sums.v[j] = prefix + tile[line].v[j];
        if (i + QUAD <= N) {
            *reinterpret_cast<Quad*>(y + i) = sums;
        } else {
#pragma unroll
            for (int j = 0; j < QUAD; ++j)
                if (i + j < N) y[i + j] = sums.v[j];
        }
    }
}

// Inclusive prefix sum of the tile, in place; every thread returns the sum of the tile.
// `totals` is shared memory for WARPS values; it may be overwritten after the next barrier.
__device__ __forceinline__ float scan_tile(Quad (&tile)[LINES], float* totals) {
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    float line_prefix = 0.0f;
#pragma unroll
    for (int line = 0; line < LINES; ++line) {
        float (&v)[QUAD] = tile[line].v;
#pragma unroll
        for (int j = 1; j < QUAD; ++j) v[j] += v[j - 1];
        const float lane_sum = warp_reduction(v[QUAD - 1]);  // up to and including this lane
        float prefix = __shfl_up_sync(~0u, lane_sum, 1);
        prefix = lane == 0 ? line_prefix : line_prefix + prefix;
#pragma unroll
        for (int j = 0; j < QUAD; ++j) v[j] += prefix;
        line_prefix += __shfl_sync(~0u, lane_sum, LANES - 1);
    }
    if (lane == 0) totals[warp] = line_prefix;
    __syncthreads();
    float warp_prefix = 0.0f, total = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        if (w == warp) warp_prefix = total;
        total += totals[w];
    }
#pragma unroll
    for (int line = 0; line < LINES; ++line)
#pragma unroll
        for (int j = 0; j < QUAD; ++j) tile[line].v[j] += warp_prefix;
    return total;
}
