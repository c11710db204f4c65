// conv/pixel.cu: 1x1 convolution of few channels at memory bandwidth. Sizes are run-time values.
//
// Idea    A thread computes BN channels of PX pixels in NHWC. It loads 16 bytes of each pixel at a time, prefetches the
//         next 16, and multiplies by weights broadcast from shared memory. Adjacent threads have the channel slices of
//         one pixel, then adjacent pixels.
// Floor   8 -> 16 channels of float16, 48x48, B = 4096: 453 MB / 4.8 TB/s = 94 us; 2.4 Gflop of FFMA are 36 us.
// Order   fma over the channels from zero, then bias and activation.
// Layout  x (pixels, C) NHWC, 16 B aligned, C a multiple of 16 B; y NHWC or NCHW, `places` pixels per image; w (C, N);
//         bias (N) or nullptr.
// Shared  C * N floats, N padded to a multiple of BN: 512 B for 8 -> 16.
// Limits  x, y float32, float16 or bfloat16, w float32; C * N (padded) up to 8,192; Index holds thread and pixel
//         counts; sm_80 up.
#include "common/fast_divide.cuh"
#include "common/epilogue.cuh"
#include "common/accumulator.cuh"

constexpr int THREADS = 256;

// Stores of V elements, for N a multiple of V.
template <int V, class Y, int BN>
__device__ __forceinline__ void store_slice(Y* to, const float (&sums)[BN], int left) {
#pragma unroll
    for (int n = 0; n < BN; n += V) {
        alignas(16) float several[V];
#pragma unroll
        for (int i = 0; i < V; ++i) several[i] = sums[n + i];
        if (n < left) store_neighbours(to + n, several);
    }
}

// count   pixels of x; a thread's pixels are `apart` from each other
// slices  of BN channels of y
template <class X, class Y, class Index, int BN, int PX>
__global__ void __launch_bounds__(THREADS, 2)
    conv_pixel(const X* __restrict__ x, const float* __restrict__ w, const float* __restrict__ bias, Y* y,
               long long count, long long apart, u32 C, u32 N, Divider slices, Divider places, u32 is_last, u32 code,
               u32 a_bits, u32 b_bits) {
    constexpr int V = 16 / sizeof(X);
    extern __shared__ float4 shared[];
    float* ws = reinterpret_cast<float*>(shared);
    Index first = static_cast<Index>(blockIdx.x) * THREADS + threadIdx.x;
    const u32 n_first = take_rest(first, slices) * BN, pitch = slices.size * BN;
    const X* from[PX];
    uint4 now[PX], next[PX];
#pragma unroll
    for (int p = 0; p < PX; ++p) {
        // Out-of-range pixels read the first one.
        const bool is_there = first < apart && first + p * apart < count;
        from[p] = x + (is_there ? (first + p * apart) * C : 0);
        now[p] = *reinterpret_cast<const uint4*>(from[p]);
    }
    for (u32 i = threadIdx.x; i < C * pitch; i += THREADS) {
        const u32 c = i / pitch, n = i - c * pitch;
        ws[i] = n < N ? w[c * N + n] : 0.0f;
    }
    __syncthreads();

    float sums[PX][BN] = {};
    for (u32 c = 0; c < C; c += V) {
        if (c + V < C) {
#pragma unroll
            for (int p = 0; p < PX; ++p) next[p] = *reinterpret_cast<const uint4*>(from[p] + c + V);
        }
#pragma unroll
        for (int i = 0; i < V; ++i) {
            const float4* row = reinterpret_cast<const float4*>(ws + (c + i) * pitch + n_first);
#pragma unroll
            for (int n = 0; n < BN; n += 4) {
                const float4 weight = row[n / 4];
#pragma unroll
                for (int p = 0; p < PX; ++p) {
                    const float number = load_wide(reinterpret_cast<const X*>(now + p) + i);
                    sums[p][n] = fmaf(number, weight.x, sums[p][n]);
                    sums[p][n + 1] = fmaf(number, weight.y, sums[p][n + 1]);
                    sums[p][n + 2] = fmaf(number, weight.z, sums[p][n + 2]);
                    sums[p][n + 3] = fmaf(number, weight.w, sums[p][n + 3]);
                }
            }
        }
#pragma unroll
        for (int p = 0; p < PX; ++p) now[p] = next[p];
    }

    const Activation activation{code, __uint_as_float(a_bits), __uint_as_float(b_bits)};
    const int left = static_cast<int>(N - n_first);
#pragma unroll
    for (int n = 0; n < BN; ++n) {
        const float shift = bias && n < left ? bias[n_first + n] : 0.0f;
#pragma unroll
        for (int p = 0; p < PX; ++p) sums[p][n] += shift;
    }
#pragma unroll
    for (int p = 0; p < PX; ++p) {
        const long long pixel = first + p * apart;
        if (first >= apart || pixel >= count) break;
        finish_sums<Y>(sums[p], activation);
        if (is_last) {
            Y* to = y + pixel * N + n_first;
            if (N % 8 == 0 && sizeof(Y) == 2 && BN % 8 == 0) store_slice<BN % 8 ? 4 : 8>(to, sums[p], left);
            else if (N % 4 == 0) store_slice<4>(to, sums[p], left);
            else store_slice<1>(to, sums[p], left);
            continue;
        }
        Index image = static_cast<Index>(pixel);
        const u32 place = take_rest(image, places);
        Y* to = y + (static_cast<long long>(image) * N + n_first) * places.size + place;
#pragma unroll
        for (int n = 0; n < BN; ++n)
            if (n < left) store_wide(to + static_cast<long long>(n) * places.size, sums[p][n]);
    }
}
