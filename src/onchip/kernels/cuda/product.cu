// product.cu: y = activation(x w^T + bias), of any sizes, which are run-time values: one compilation for every network.
//
// Idea    A block makes a tile of y. Slices of x and w of the same K go through shared memory, two buffers in turns:
//         while one is multiplied the next is on its way in registers. product_fma multiplies on the ordinary cores, a
//         thread TM x TN sums, product_mma on the tensor cores, a warp 16 x 8 sums an instruction.
// Order   A sum runs over k from the first to the last, by multiply-adds that start from zero; every PART terms it is
//         added to a total (tensor cores: STEP terms an instruction, one sum). Then comes the bias. Neither the tile
//         nor M decides anything: a row has the same bits in every batch.
// Floor   2 M N K flop. 4,096 cubed in fp32: 137 Gflop / 66.9 Tflop/s = 2.05 ms; in fp16: / 989 Tflop/s = 139 us.
// Layout  x (M, K), w (N, K), y (M, N) row-major, each 16 B aligned; bias (N) or none. Rows that are not a multiple of
//         16 B long are read and written number by number.
// Shared  product_fma 2 * (BM + BN + 8) * 16 numbers: 33 792 B for 128 x 128; product_mma 2 * (BM + BN) * 80 B.
// Limits  Any M, N, K; x and y float32, float16 or bfloat16; w float32, or what the tensor cores take; sm_80 up.
#include "product.cuh"
#include "tensor_core.cuh"

// -- the ordinary cores ---------------------------------------------------------------------------------------

constexpr int DEPTH = 16;   // of a slice along k
constexpr int PART = 128;   // terms of a sum; longer ones are sums of sums, which are about as exact as a library's

__device__ __forceinline__ float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
__device__ __forceinline__ double multiply_add(double a, double b, double c) { return fma(a, b, c); }

// ROWS rows of a slice on their way: read four numbers along k at a time, written transposed.
template <int ROWS, int THREADS>
struct FmaSlice {
    static constexpr int UNITS = ROWS * DEPTH / 4, EACH = (UNITS + THREADS - 1) / THREADS;
    float4 held[EACH];

    template <class T>
    __device__ __forceinline__ void read(const T* from, long long first, long long rows, long long k, long long K) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int unit = threadIdx.x + i * THREADS;
            const long long row = first + unit / (DEPTH / 4), at = k + unit % (DEPTH / 4) * 4;
            const bool is_there = row < rows && (UNITS % THREADS == 0 || unit < UNITS);
            held[i] = read4(from + (is_there ? row * K + at : 0), is_there ? K - at : 0, K % 4 == 0);
        }
    }
    // +4: rows of k stay 16 B aligned, and four of them do not begin in the same bank
    template <class Acc>
    __device__ __forceinline__ void write(Acc (*to)[ROWS + 4]) const {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int unit = threadIdx.x + i * THREADS;
            if (UNITS % THREADS != 0 && unit >= UNITS) continue;
            const int row = unit / (DEPTH / 4), k = unit % (DEPTH / 4) * 4;
            to[k][row] = held[i].x;
            to[k + 1][row] = held[i].y;
            to[k + 2][row] = held[i].z;
            to[k + 3][row] = held[i].w;
        }
    }
};

// IS_LONG: K > PART. Only then are there totals, which take as many registers as the sums.
template <class Acc, class X, class Y, int BM, int BN, int TM, int TN, bool IS_LONG>
__global__ void __launch_bounds__(BM / TM * (BN / TN), IS_LONG ? 1 : 2)
product_fma(const X* x, const float* w, const float* bias, Y* y, long long M, long long N, long long K, u32 code,
            u32 a_bits, u32 b_bits) {
    constexpr int THREADS = BM / TM * (BN / TN);
    // A warp's threads as a rectangle: what its lanes read of a slice is at most 128 bytes.
    constexpr int ACROSS = BN / TN, LANES_N = ACROSS < 8 ? ACROSS : 8, LANES_M = 32 / LANES_N;
    static_assert(TM % 4 == 0 && TN % 4 == 0 && ACROSS % LANES_N == 0 && BM / TM % LANES_M == 0, "whole warps");
    __shared__ __align__(16) Acc xs[2][DEPTH][BM + 4];
    __shared__ __align__(16) Acc ws[2][DEPTH][BN + 4];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int tm = (warp / (ACROSS / LANES_N) * LANES_M + lane / LANES_N) * 4;
    const int tn = (warp % (ACROSS / LANES_N) * LANES_N + lane % LANES_N) * 4;
    const Place<BM, BN> tile(M, N, blockIdx.x);

    Acc sums[TM][TN] = {}, totals[IS_LONG ? TM : 1][IS_LONG ? TN : 1] = {};
    FmaSlice<BM, THREADS> x_slice;
    FmaSlice<BN, THREADS> w_slice;
    x_slice.read(x, tile.m, M, 0, K);
    w_slice.read(w, tile.n, N, 0, K);
    x_slice.write(xs[0]);
    w_slice.write(ws[0]);
    __syncthreads();
    int now = 0;
    for (long long k = 0; k < K; k += DEPTH, now ^= 1) {
        const bool is_more = k + DEPTH < K;
        if (is_more) {
            x_slice.read(x, tile.m, M, k + DEPTH, K);
            w_slice.read(w, tile.n, N, k + DEPTH, K);
        }
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
            // A thread's rows and columns come in fours, the fours of all threads side by side: no bank twice.
            Acc xv[TM], wv[TN];
#pragma unroll
            for (int i = 0; i < TM; ++i) xv[i] = xs[now][d][i / 4 * (BM / (TM / 4)) + tm + i % 4];
#pragma unroll
            for (int j = 0; j < TN; ++j) wv[j] = ws[now][d][j / 4 * (BN / (TN / 4)) + tn + j % 4];
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
            x_slice.write(xs[now ^ 1]);  // read last before the barrier of the slice before
            w_slice.write(ws[now ^ 1]);
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

// -- the tensor cores -----------------------------------------------------------------------------------------

constexpr int WORDS = 16;  // of a slice along k: two steps
constexpr int STRIDE = 20;  // words from row to row: a step's 8 rows x 4 words then lie in 32 banks

// ROWS rows of a slice on their way: four words along k at a time, numbers rounded to what the tensor cores take.
template <class P, int ROWS, int THREADS>
struct MmaSlice {
    static constexpr int UNITS = ROWS * WORDS / 4, EACH = (UNITS + THREADS - 1) / THREADS;
    static constexpr int NUMBERS = 4 * P::PER_WORD;  // of four words
    uint4 held[EACH];

    template <class T>
    __device__ __forceinline__ void read(const T* from, long long first, long long rows, long long k, long long K) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int unit = threadIdx.x + i * THREADS;
            const long long row = first + unit / 4, at = k + unit % 4 * NUMBERS;
            const bool is_there = row < rows && (UNITS % THREADS == 0 || unit < UNITS);
            const long long left = is_there ? K - at : 0;
            const T* p = from + (is_there ? row * K + at : 0);
            if constexpr (P::PER_WORD == 1) {
                const float4 v = read4(p, left, K % 4 == 0);
                held[i] = {P::word(v.x), P::word(v.y), P::word(v.z), P::word(v.w)};
            } else if constexpr (is_same<T, typename P::Number>) {
                if (K % 8 == 0 && left >= 8) {
                    held[i] = *reinterpret_cast<const uint4*>(p);
                } else {
                    unsigned short bits[8];
#pragma unroll
                    for (int j = 0; j < 8; ++j) bits[j] = j < left ? p[j].bits : 0;
                    held[i] = {bits[0] | static_cast<u32>(bits[1]) << 16, bits[2] | static_cast<u32>(bits[3]) << 16,
                               bits[4] | static_cast<u32>(bits[5]) << 16, bits[6] | static_cast<u32>(bits[7]) << 16};
                }
            } else {
                using Number = typename P::Number;
                const float4 v = read4(p, left, K % 4 == 0), u = read4(left > 4 ? p + 4 : p, left - 4, K % 4 == 0);
                held[i] = {pack<Number>(v.x, v.y), pack<Number>(v.z, v.w), pack<Number>(u.x, u.y),
                           pack<Number>(u.z, u.w)};
            }
        }
    }
    __device__ __forceinline__ void write(u32 (*to)[STRIDE]) const {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int unit = threadIdx.x + i * THREADS;
            if (UNITS % THREADS == 0 || unit < UNITS) *reinterpret_cast<uint4*>(&to[unit / 4][unit % 4 * 4]) = held[i];
        }
    }
};

// WM x WN warps share a tile. W: float for Tf32, else P's own number.
template <class P, class X, class W, class Y, int BM, int BN, int WM, int WN>
__global__ void __launch_bounds__(32 * WM * WN, 256 / (32 * WM * WN))
product_mma(const X* x, const W* w, const float* bias, Y* y, long long M, long long N, long long K, u32 code,
            u32 a_bits, u32 b_bits) {
    constexpr int THREADS = 32 * WM * WN, MT = BM / WM / 16, NT = BN / WN / 8, SLICE = WORDS * P::PER_WORD;
    static_assert(MT * WM * 16 == BM && NT * WN * 8 == BN, "whole fragments");
    __shared__ __align__(16) u32 xs[2][BM][STRIDE];
    __shared__ __align__(16) u32 ws[2][BN][STRIDE];
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    const int first_m = warp / WN * (BM / WM), first_n = warp % WN * (BN / WN);
    const Place<BM, BN> tile(M, N, blockIdx.x);

    float sums[MT][NT][4] = {};
    MmaSlice<P, BM, THREADS> x_slice;
    MmaSlice<P, BN, THREADS> w_slice;
    x_slice.read(x, tile.m, M, 0, K);
    w_slice.read(w, tile.n, N, 0, K);
    x_slice.write(xs[0]);
    w_slice.write(ws[0]);
    __syncthreads();
    int now = 0;
    for (long long k = 0; k < K; k += SLICE, now ^= 1) {
        const bool is_more = k + SLICE < K;
        if (is_more) {
            x_slice.read(x, tile.m, M, k + SLICE, K);
            w_slice.read(w, tile.n, N, k + SLICE, K);
        }
#pragma unroll
        for (int word = 0; word < WORDS; word += 8) {
            u32 a[MT][4], b[NT][2];
#pragma unroll
            for (int i = 0; i < MT; ++i) {
                const u32(*rows)[STRIDE] = &xs[now][first_m + 16 * i + g];
                a[i][0] = rows[0][word + q];
                a[i][1] = rows[8][word + q];
                a[i][2] = rows[0][word + q + 4];
                a[i][3] = rows[8][word + q + 4];
            }
#pragma unroll
            for (int j = 0; j < NT; ++j) {
                b[j][0] = ws[now][first_n + 8 * j + g][word + q];
                b[j][1] = ws[now][first_n + 8 * j + g][word + q + 4];
            }
#pragma unroll
            for (int i = 0; i < MT; ++i)
#pragma unroll
                for (int j = 0; j < NT; ++j) mma<P>(sums[i][j], a[i], b[j][0], b[j][1]);
        }
        if (is_more) {
            x_slice.write(xs[now ^ 1]);
            w_slice.write(ws[now ^ 1]);
            __syncthreads();
        }
    }
    const Activation activation{code, __uint_as_float(a_bits), __uint_as_float(b_bits)};
#pragma unroll
    for (int i = 0; i < MT; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const long long m = tile.m + first_m + 16 * i + 8 * half + g;
            if (m >= M) continue;
#pragma unroll
            for (int j = 0; j < NT; ++j) {
                const long long n = tile.n + first_n + 8 * j + 2 * q;
                const float two[2] = {sums[i][j][2 * half], sums[i][j][2 * half + 1]};
                if (n < N) finish(two, y + m * N + n, bias ? bias + n : nullptr, N - n, N % 2 == 0, activation);
            }
        }
}
