// tile_gemm.cuh: a gemm from 16 x 16 tiles in shared memory, for the ladders that train. Matrices are row-major
// float32; weights are (D_in, D_out), so a layer is x @ w + b. A block has 256 threads, one per element of a tile.
#pragma once

// The compiler directives of the digits rungs restrict, unrolled and register-cap: options -D of the program.
#ifndef RESTRICT
#define RESTRICT
#endif
#ifndef UNROLL
#define UNROLL 1
#endif
#ifndef MIN_BLOCKS
#define MIN_BLOCKS 1
#endif

constexpr int TILE = 16, THREADS = TILE * TILE;
constexpr int UNROLLED = UNROLL;  // #pragma unroll takes a constant expression

struct Position {
    int row, column;
};

__device__ __forceinline__ Position in_tile() {
    return {static_cast<int>(threadIdx.x) / TILE, static_cast<int>(threadIdx.x) % TILE};
}

// The 16 x 16 tile of m (rows, columns) that begins at `first`; zeros outside the matrix.
template <int PAD>
__device__ __forceinline__ void load_tile(float (&tile)[TILE][TILE + PAD], const float* RESTRICT m, Position first,
                                          int rows, int columns) {
    const Position at = in_tile();
    const int row = first.row + at.row, column = first.column + at.column;
    tile[at.row][at.column] = row < rows && column < columns ? m[row * columns + column] : 0.0f;
}

// This thread's element, in the tile that begins at `first`, of the product of a (M, K) and b (K, N); transposed, they
// are stored as (K, M) and (N, K).
template <int PAD, bool IS_A_TRANSPOSED, bool IS_B_TRANSPOSED>
__device__ __forceinline__ float gemm_tile(const float* RESTRICT a, const float* RESTRICT b, Position first, int M,
                                           int K, int N) {
    __shared__ float as[TILE][TILE + PAD], bs[TILE][TILE + PAD];
    const Position at = in_tile();
    float sum = 0.0f;
    for (int first_k = 0; first_k < K; first_k += TILE) {
        if (IS_A_TRANSPOSED) load_tile<PAD>(as, a, {first_k, first.row}, K, M);
        else load_tile<PAD>(as, a, {first.row, first_k}, M, K);
        if (IS_B_TRANSPOSED) load_tile<PAD>(bs, b, {first.column, first_k}, N, K);
        else load_tile<PAD>(bs, b, {first_k, first.column}, K, N);
        __syncthreads();
#pragma unroll UNROLLED
        for (int k = 0; k < TILE; ++k)
            sum += (IS_A_TRANSPOSED ? as[k][at.row] : as[at.row][k]) *
                   (IS_B_TRANSPOSED ? bs[at.column][k] : bs[k][at.column]);
        __syncthreads();
    }
    return sum;
}
