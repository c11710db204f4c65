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

template <int PAD>
__global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
forward(const float* RESTRICT x, const float* RESTRICT w, const float* RESTRICT b, float* RESTRICT z, int B, int K,
        int N) {
    const auto [row, column] = in_matrix();
    const float sum = gemm_tile<PAD, false, false>(x, w, first_in_matrix(), B, K, N);
    if (row < B && column < N) z[row * N + column] = sum + b[column];
}

template <int PAD>
__global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
forward_relu(const float* RESTRICT x, const float* RESTRICT w, const float* RESTRICT b, float* RESTRICT a, int B, int K,
             int N) {
    const auto [row, column] = in_matrix();
    const float sum = gemm_tile<PAD, false, false>(x, w, first_in_matrix(), B, K, N);
    if (row < B && column < N) a[row * N + column] = relu(sum + b[column]);
}

template <int PAD>
__global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
forward_softmax(const float* RESTRICT x, const float* RESTRICT w, const float* RESTRICT b, float* RESTRICT p, int B,
                int K, int N) {
    const auto [row, column] = in_matrix();
    const bool is_valid = row < B && column < N;
    const float sum = gemm_tile<PAD, false, false>(x, w, first_in_matrix(), B, K, N);
    const float probability = softmax_in_tile(is_valid ? sum + b[column] : 0.0f, N);
    if (is_valid) p[row * N + column] = probability;
}

// dz (B, K) = dz_next (B, N) @ w^T where a > 0, else 0
template <int PAD>
__global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
z_grad(const float* RESTRICT dz_next, const float* RESTRICT w, const float* RESTRICT a, float* RESTRICT dz, int B,
       int K, int N) {
    const auto [row, column] = in_matrix();
    const float sum = gemm_tile<PAD, false, true>(dz_next, w, first_in_matrix(), B, N, K);
    if (row < B && column < K) dz[row * K + column] = a[row * K + column] > 0.0f ? sum : 0.0f;
}

template <int PAD>
__global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
update_weights(const float* RESTRICT x, const float* RESTRICT dz, float* RESTRICT w, float rate, int B, int K, int N) {
    const auto [row, column] = in_matrix();
    const float sum = gemm_tile<PAD, true, false>(x, dz, first_in_matrix(), K, B, N);
    if (row < K && column < N) w[row * N + column] -= rate * sum;
}

// Weights and bias at once: in the blocks of the first row, 16 threads add to each element of b.
template <int PAD>
__global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
update_layer(const float* RESTRICT x, const float* RESTRICT dz, float* RESTRICT w, float* RESTRICT b, float rate, int B,
             int K, int N) {
    const auto [row, column] = in_matrix();
    const float sum = gemm_tile<PAD, true, false>(x, dz, first_in_matrix(), K, B, N);
    if (row < K && column < N) w[row * N + column] -= rate * sum;
    if (blockIdx.y > 0 || column >= N) return;
    float share = 0.0f;
    for (int k = in_tile().row; k < B; k += TILE) share += dz[k * N + column];
    atomicAdd(b + column, -rate * share);
}
