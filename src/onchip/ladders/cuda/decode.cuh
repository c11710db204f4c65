// decode.cuh: the network of the decode ladder, 72-64-64-4, ReLU, no biases, and its kernels' fp32 and fp16 helpers.
// It includes no CUDA header, so NVRTC needs no include path.
#pragma once

// The last of the 72 columns is zero. fp32 kernels skip it; fp16 kernels keep it, because 72 is divisible by 2 and 4.
constexpr int COLUMNS = 72, SIGNALS = 71, W = 64, D_out = 4;
constexpr int THREADS = 256;

struct f16 {
    unsigned short bits;
};

__device__ __forceinline__ float fma(float a, float b, float c) { return fmaf(a, b, c); }
__device__ __forceinline__ f16 fma(f16 a, f16 b, f16 c) {
    f16 d;
    asm("fma.rn.f16 %0, %1, %2, %3;" : "=h"(d.bits) : "h"(a.bits), "h"(b.bits), "h"(c.bits));
    return d;
}
__device__ __forceinline__ float add(float a, float b) { return a + b; }
__device__ __forceinline__ f16 add(f16 a, f16 b) {
    f16 c;
    asm("add.rn.f16 %0, %1, %2;" : "=h"(c.bits) : "h"(a.bits), "h"(b.bits));
    return c;
}
// NaN propagates; fmaxf(v, 0) would return 0.
__device__ __forceinline__ float relu(float v) { return v < 0.0f ? 0.0f : v; }
__device__ __forceinline__ f16 relu(f16 v) {
    f16 c;
    asm("max.NaN.f16 %0, %1, %2;" : "=h"(c.bits) : "h"(v.bits), "h"(static_cast<unsigned short>(0)));
    return c;
}

// Sum over groups of LANES consecutive lanes by butterfly shuffles; every lane gets the sum.
template <int LANES>
__device__ __forceinline__ float sum_lanes(float v) {
#pragma unroll
    for (int mask = LANES / 2; mask > 0; mask /= 2) v += __shfl_xor_sync(~0u, v, mask);
    return v;
}
template <int LANES>
__device__ __forceinline__ f16 sum_lanes(f16 v) {
#pragma unroll
    for (int mask = LANES / 2; mask > 0; mask /= 2)
        v = add(v, f16{static_cast<unsigned short>(__shfl_xor_sync(~0u, static_cast<unsigned>(v.bits), mask))});
    return v;
}

// N values loaded by one instruction; the address is aligned to N * sizeof(T).
template <class T, int N>
struct alignas(N * sizeof(T)) Vector {
    T v[N];
};

// Dot product with one accumulator, i ascending; w in registers, h in shared memory, STEP values per load.
template <int STEP, int K, class T>
__device__ __forceinline__ T dot(const T (&w)[K], const T* h) {
    static_assert(K % STEP == 0, "K must be a multiple of STEP");
    T sum{};
#pragma unroll
    for (int i = 0; i < K; i += STEP) {
        const Vector<T, STEP> values = *reinterpret_cast<const Vector<T, STEP>*>(h + i);
#pragma unroll
        for (int j = 0; j < STEP; ++j) sum = fma(w[i + j], values.v[j], sum);
    }
    return sum;
}

// Copy ROWS rows of x (B, STRIDE), from row `first`, to tile (ROWS, STRIDE) in shared memory.
// Columns from K on and rows past B are zero.
template <int ROWS, int K, int STRIDE, class T>
__device__ __forceinline__ void load_rows(const T* x, T* tile, long long first, long long B) {
    for (int i = threadIdx.x; i < ROWS * STRIDE; i += THREADS) {
        const bool is_valid = first + i / STRIDE < B && i % STRIDE < K;
        tile[i] = is_valid ? x[first * STRIDE + i] : T{};
    }
}

// Copy the first K columns of the weights w (N, STRIDE) to staged (N, odd(K)) in shared memory. With an odd row stride,
// the 32 neurons of a warp read 32 distinct banks; with a stride of 64 they would all conflict on one bank.
__device__ constexpr int odd(int K) { return K | 1; }
template <int N, int K, int STRIDE>
__device__ __forceinline__ void stage(const float* w, float* staged) {
    for (int i = threadIdx.x; i < N * K; i += THREADS) staged[i / K * odd(K) + i % K] = w[i / K * STRIDE + i % K];
}

// Dot product with one accumulator; both operands in memory, one value per load.
template <int K>
__device__ __forceinline__ float dot(const float* w, const float* h) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < K; ++i) sum = fma(w[i], h[i], sum);
    return sum;
}
