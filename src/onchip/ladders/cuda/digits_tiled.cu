// digits_tiled.cu: the gemms from tiles in shared memory; the report's kernels, with their padding and directives.
//
// Idea    A block loads a 16 x 16 tile of each operand with neighbouring threads on neighbouring addresses, then each
//         thread does 16 multiply-adds from shared memory: a value is read from global memory once per 16 uses. A
//         transposed operand is loaded in its own order and read transposed from the tile.
//         PAD floats at the end of each row of a tile shift the banks. Only z_grad needs it: its 16 threads of a
//         half-warp read 16 rows of one column. Bank conflicts of that read: 8-way for PAD 0, 1-way for 1 and 2, 2-way
//         for 4, 4-way for 8. All other reads are a broadcast or a row: no conflict with any PAD.
// Order   update_layer: 16 threads add their share of a bias gradient to b by atomicAdd, in any order:
//         non-deterministic. All other sums have a fixed order.
// Shared  2 * 16 * (16 + PAD) * 4 B: 2 048 B for PAD 0, 3 072 B for 8; forward_softmax 1 024 B more.
// Limits  forward_softmax: at most 16 classes. Any B; fp32; sm_80 up.
#include "digits.cuh"

// The 16 x 16 tile of m (rows, columns) that begins at `first`; zeros outside the matrix.
template <int PAD>
__device__ __forceinline__ void load_tile(float (&tile)[TILE][TILE + PAD], const float* RESTRICT m, Position first,
                                          int rows, int columns) {
    const Position at = in_tile();
    const int row = first.row + at.row, column = first.column + at.column;
    tile[at.row][at.column] = row < rows && column < columns ? m[row * columns + column] : 0.0f;
}

// This thread's element of the product of a (M, K) and b (K, N); transposed, they are stored as (K, M) and (N, K).
template <int PAD, bool IS_A_TRANSPOSED, bool IS_B_TRANSPOSED>
__device__ __forceinline__ float gemm_tile(const float* RESTRICT a, const float* RESTRICT b, int M, int K, int N) {
    __shared__ float as[TILE][TILE + PAD], bs[TILE][TILE + PAD];
    const int first_row = TILE * blockIdx.y, first_column = TILE * blockIdx.x;
    const Position at = in_tile();
    float sum = 0.0f;
    for (int first = 0; first < K; first += TILE) {
        if (IS_A_TRANSPOSED) load_tile<PAD>(as, a, {first, first_row}, K, M);
        else load_tile<PAD>(as, a, {first_row, first}, M, K);
        if (IS_B_TRANSPOSED) load_tile<PAD>(bs, b, {first_column, first}, N, K);
        else load_tile<PAD>(bs, b, {first, first_column}, K, N);
        __syncthreads();
#pragma unroll UNROLLED
        for (int k = 0; k < TILE; ++k)
            sum += (IS_A_TRANSPOSED ? as[k][at.row] : as[at.row][k]) *
                   (IS_B_TRANSPOSED ? bs[at.column][k] : bs[k][at.column]);
        __syncthreads();
    }
    return sum;
}

template <int PAD>
__global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
forward(const float* RESTRICT x, const float* RESTRICT w, const float* RESTRICT b, float* RESTRICT z, int B, int K,
        int N) {
    const auto [row, column] = in_matrix();
    const float sum = gemm_tile<PAD, false, false>(x, w, B, K, N);
    if (row < B && column < N) z[row * N + column] = sum + b[column];
}

template <int PAD>
__global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
forward_relu(const float* RESTRICT x, const float* RESTRICT w, const float* RESTRICT b, float* RESTRICT a, int B, int K,
             int N) {
    const auto [row, column] = in_matrix();
    const float sum = gemm_tile<PAD, false, false>(x, w, B, K, N);
    if (row < B && column < N) a[row * N + column] = relu(sum + b[column]);
}

template <int PAD>
__global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
forward_softmax(const float* RESTRICT x, const float* RESTRICT w, const float* RESTRICT b, float* RESTRICT p, int B,
                int K, int N) {
    const auto [row, column] = in_matrix();
    const bool is_valid = row < B && column < N;
    const float sum = gemm_tile<PAD, false, false>(x, w, B, K, N);
    const float probability = softmax_in_tile(is_valid ? sum + b[column] : 0.0f, N);
    if (is_valid) p[row * N + column] = probability;
}

// dz (B, K) = dz_next (B, N) @ w^T where a > 0, else 0
template <int PAD>
__global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
z_grad(const float* RESTRICT dz_next, const float* RESTRICT w, const float* RESTRICT a, float* RESTRICT dz, int B,
       int K, int N) {
    const auto [row, column] = in_matrix();
    const float sum = gemm_tile<PAD, false, true>(dz_next, w, B, N, K);
    if (row < B && column < K) dz[row * K + column] = a[row * K + column] > 0.0f ? sum : 0.0f;
}

template <int PAD>
__global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
update_weights(const float* RESTRICT x, const float* RESTRICT dz, float* RESTRICT w, float rate, int B, int K, int N) {
    const auto [row, column] = in_matrix();
    const float sum = gemm_tile<PAD, true, false>(x, dz, K, B, N);
    if (row < K && column < N) w[row * N + column] -= rate * sum;
}

// Weights and bias at once: in the blocks of the first row, 16 threads add to each element of b.
template <int PAD>
__global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
update_layer(const float* RESTRICT x, const float* RESTRICT dz, float* RESTRICT w, float* RESTRICT b, float rate, int B,
             int K, int N) {
    const auto [row, column] = in_matrix();
    const float sum = gemm_tile<PAD, true, false>(x, dz, K, B, N);
    if (row < K && column < N) w[row * N + column] -= rate * sum;
    if (blockIdx.y > 0 || column >= N) return;
    float share = 0.0f;
    for (int k = in_tile().row; k < B; k += TILE) share += dz[k * N + column];
    atomicAdd(b + column, -rate * share);
}
