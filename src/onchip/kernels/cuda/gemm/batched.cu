// gemm/batched.cu: batched GEMM y = a b on CUDA cores (FFMA); sizes are run-time values.
//
// Idea    A block computes a SIDE x SIDE tile of one matrix of y, a thread 4 x 4 outputs. Slices of a and b go through
//         shared memory. Broadcast axes and weights are addressed by batch strides: nothing is copied.
// Floor   2 M N K flop per matrix; 4 heads of 1,024 rows with 64 x 32 times 32 x 64: 1.07 Gflop / 66.9 Tflop/s = 16 us,
//         and 134 MB / 4.8 TB/s = 28 us: memory-bound at small K.
// Order   fma over k in order from zero; every PART elements the partial sum is added to a total. The tile and the
//         number of matrices do not change it.
// Layout  a (..., M, K), b (..., K, N), y (..., M, N) row-major.
// Shared  2 * 16 * (SIDE + 4) elements: 8 704 B for 64 x 64 floats.
// Limits  Any M, N, K >= 1, up to 4 batch axes; all of one type: float32, float16, bfloat16 or float64; sm_80 up.
#include "gemm/batched.cuh"
#include "common/accumulator.cuh"

constexpr int DEPTH = 16, PART = 128;

// The SIDE x SIDE tile at (first_m, first_n) of one matrix.
template <class T, int SIDE>
__device__ __forceinline__ void compute_tile(const T* a, const T* b, T* y, long long M, long long N, long long K,
                                             long long first_m, long long first_n) {
    using W = acc_t<T>;
    constexpr int THREADS = SIDE * SIDE / 16;
    // +4: rows of a slice stay 16 B aligned and begin in different banks
    __shared__ __align__(16) W as[DEPTH][SIDE + 4];
    __shared__ __align__(16) W bs[DEPTH][SIDE + 4];
    const int tm = threadIdx.x / (SIDE / 4) * 4, tn = threadIdx.x % (SIDE / 4) * 4;
    W sums[4][4] = {}, totals[4][4] = {};
    for (long long k = 0; k < K; k += DEPTH) {
        // Coalesced: adjacent threads read adjacent k of a, and adjacent n of b.
        for (int i = threadIdx.x; i < SIDE * DEPTH; i += THREADS) {
            const int row = i / DEPTH, d = i % DEPTH;
            const bool is_valid = first_m + row < M && k + d < K;
            as[d][row] = is_valid ? load_acc(a + (first_m + row) * K + k + d) : W(0);
        }
        for (int i = threadIdx.x; i < SIDE * DEPTH; i += THREADS) {
            const int d = i / SIDE, column = i % SIDE;
            const bool is_valid = first_n + column < N && k + d < K;
            bs[d][column] = is_valid ? load_acc(b + (k + d) * N + first_n + column) : W(0);
        }
        __syncthreads();
#pragma unroll 4
        for (int d = 0; d < DEPTH; ++d) {  // zeros past K
            W av[4], bv[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) av[i] = as[d][tm + i], bv[i] = bs[d][tn + i];
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) sums[i][j] = multiply_add(av[i], bv[j], sums[i][j]);
        }
        if ((k + DEPTH) % PART == 0 || k + DEPTH >= K) {
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    totals[i][j] += sums[i][j];
                    sums[i][j] = 0;
                }
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const long long m = first_m + tm + i, n = first_n + tn + j;
            if (m < M && n < N) store_acc(y + m * N + n, totals[i][j]);
        }
}

template <class T, int SIDE>
__global__ void __launch_bounds__(SIDE * SIDE / 16)
    matmul(const T* a, const T* b, T* y, long long count, long long M, long long N, long long K,
           const __grid_constant__ BatchAxes batch) {
    const long long tiles_n = (N + SIDE - 1) / SIDE, tiles = (M + SIDE - 1) / SIDE * tiles_n;
    for (long long block = blockIdx.x; block < count * tiles; block += gridDim.x) {
        const long long matrix = block / tiles, tile = block % tiles;
        const Matrices at = batch.matrices(matrix);
        compute_tile<T, SIDE>(a + at.a, b + at.b, y + matrix * M * N, M, N, K, tile / tiles_n * SIDE,
                              tile % tiles_n * SIDE);
    }
}
