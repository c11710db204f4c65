// gemm/simt.cu: GEMM on CUDA cores (FFMA), y = activation(x w^T + bias); M, N, K are run-time values.
//
// Idea    A block computes a tile of y, a thread TM x TN outputs. Slices of x and w go through double-buffered shared
//         memory: while one is multiplied, the next is in flight to registers.
// Order   fma over k in order from zero; every PART elements the partial sum is added to a total. Then the bias.
//         The tile and M do not change it: batch-invariant.
// Floor   2 M N K flop. 4,096 cubed: 137 Gflop / 66.9 Tflop/s = 2.05 ms.
// Layout  x (M, K), w (N, K), y (M, N) row-major, each 16 B aligned; bias (N) or none. Rows that are not multiples of
//         16 B are read and written element by element.
// Shared  2 * (BM + BN + 8) * 16 elements: 33 792 B for 128 x 128.
// Limits  Any M, N, K; x and y float32, float16 or bfloat16; w float32; sm_80 up.
#include "common/epilogue.cuh"

constexpr int DEPTH = 16;  // elements of k per slice
constexpr int PART = 128;  // elements of k per partial sum: about as accurate as a library

__device__ __forceinline__ float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
__device__ __forceinline__ double multiply_add(double a, double b, double c) { return fma(a, b, c); }

// ROWS rows of a slice in registers: read four elements of k at a time, written to shared memory transposed.
template <int ROWS, int THREADS>
struct FmaSlice {
    static constexpr int UNITS = ROWS * DEPTH / 4, EACH = (UNITS + THREADS - 1) / THREADS;
    float4 values[EACH];

    template <class T>
    __device__ __forceinline__ void read(const T* from, long long first, long long rows, long long k, long long K) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int unit = threadIdx.x + i * THREADS;
            const long long row = first + unit / (DEPTH / 4), at = k + unit % (DEPTH / 4) * 4;
            const bool is_valid = row < rows && (UNITS % THREADS == 0 || unit < UNITS);
            values[i] = read4(from + (is_valid ? row * K + at : 0), is_valid ? K - at : 0, K % 4 == 0);
        }
    }
    // +4: rows of `to` stay 16 B aligned, and four of them begin in different banks
    template <class Acc>
    __device__ __forceinline__ void write(Acc (*to)[ROWS + 4]) const {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int unit = threadIdx.x + i * THREADS;
            if (UNITS % THREADS != 0 && unit >= UNITS) continue;
            const int row = unit / (DEPTH / 4), k = unit % (DEPTH / 4) * 4;
            to[k][row] = values[i].x;
            to[k + 1][row] = values[i].y;
            to[k + 2][row] = values[i].z;
            to[k + 3][row] = values[i].w;
        }
    }
};

// IS_LONG: K > PART, which needs totals: as many registers as the partial sums.
template <class Acc, class X, class Y, int BM, int BN, int TM, int TN, bool IS_LONG>
__global__ void __launch_bounds__(BM / TM * (BN / TN), IS_LONG ? 1 : 2)
gemm_simt(const X* x, const float* w, const float* bias, Y* y, long long M, long long N, long long K, u32 code,
            u32 a_bits, u32 b_bits) {
    constexpr int THREADS = BM / TM * (BN / TN);
    // Lanes form a rectangle: a warp reads at most 128 bytes of a slice at a time.
    constexpr int THREADS_N = BN / TN, LANES_N = THREADS_N < 8 ? THREADS_N : 8, LANES_M = 32 / LANES_N;
    static_assert(TM % 4 == 0 && TN % 4 == 0 && THREADS_N % LANES_N == 0 && BM / TM % LANES_M == 0, "whole warps");
    __shared__ __align__(16) Acc xs[2][DEPTH][BM + 4];
    __shared__ __align__(16) Acc ws[2][DEPTH][BN + 4];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int tm = (warp / (THREADS_N / LANES_N) * LANES_M + lane / LANES_N) * 4;
    const int tn = (warp % (THREADS_N / LANES_N) * LANES_N + lane % LANES_N) * 4;
    const TileOrigin<BM, BN> tile(M, N, blockIdx.x);

    Acc sums[TM][TN] = {}, totals[IS_LONG ? TM : 1][IS_LONG ? TN : 1] = {};
    FmaSlice<BM, THREADS> x_slice;
    FmaSlice<BN, THREADS> w_slice;
    x_slice.read(x, tile.m, M, 0, K);
    w_slice.read(w, tile.n, N, 0, K);
    x_slice.write(xs[0]);
    w_slice.write(ws[0]);
    __syncthreads();
    int current = 0;
    for (long long k = 0; k < K; k += DEPTH, current ^= 1) {
        const bool is_more = k + DEPTH < K;
        if (is_more) {
            x_slice.read(x, tile.m, M, k + DEPTH, K);
            w_slice.read(w, tile.n, N, k + DEPTH, K);
        }
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
            // A thread's rows and columns come in fours, adjacent to those of the next thread: no bank conflicts.
            Acc xv[TM], wv[TN];
#pragma unroll
            for (int i = 0; i < TM; ++i) xv[i] = xs[current][d][i / 4 * (BM / (TM / 4)) + tm + i % 4];
#pragma unroll
            for (int j = 0; j < TN; ++j) wv[j] = ws[current][d][j / 4 * (BN / (TN / 4)) + tn + j % 4];
#pragma unroll
            for (int i = 0; i < TM; ++i)
#pragma unroll
                for (int j = 0; j < TN; ++j) sums[i][j] = multiply_add(xv[i], wv[j], sums[i][j]);
        }
        if constexpr (IS_LONG) {
            if ((k + DEPTH) % PART == 0 || !is_more) {
#pragma unroll
                for (int i = 0; i < TM; ++i)
#pragma unroll
                    for (int j = 0; j < TN; ++j) {
                        totals[i][j] += sums[i][j];
                        sums[i][j] = 0;
                    }
            }
        }
        if (is_more) {
            x_slice.write(xs[current ^ 1]);  // last read before the previous barrier
            w_slice.write(ws[current ^ 1]);
            __syncthreads();
        }
    }
    const Activation activation{code, __uint_as_float(a_bits), __uint_as_float(b_bits)};
#pragma unroll
    for (int i = 0; i < TM; ++i) {
        const long long m = tile.m + i / 4 * (BM / (TM / 4)) + tm + i % 4;
        if (m >= M) continue;
#pragma unroll
        for (int j = 0; j < TN; j += 4) {
            const long long n = tile.n + j / 4 * (BN / (TN / 4)) + tn;
            Acc four[4];
#pragma unroll
            for (int l = 0; l < 4; ++l) {
                if constexpr (IS_LONG) four[l] = totals[i][j + l];
                else four[l] = sums[i][j + l];
            }
            if (n < N) finish(four, y + m * N + n, bias ? bias + n : nullptr, N - n, N % 4 == 0, activation);
        }
    }
}
