// weave.cu: one of several values put where it belongs in their union: side by side (Concat), or every so many pixels
// (Interleave). A launch a value.
//
// Idea    Threads move words that lie next to each other in x, each as large as what stays together in both allows, and
//         divide to find where they go.
// Floor   Every number is read once and written once: 2^28 floats are 2.15 GB / 4.8 TB/s = 447 us.
// Layout  x (outer, h, w, inner), y (outer, H, W, inner), row-major: x's (o, i, j, c) goes to
//         (o, at_h + i * step_h, at_w + j * step_w, c).
// Limits  Words of 1, 2, 4, 8 or 16 bytes, aligned; Index counts those of x; sm_80 up.
#include "divide.cuh"

constexpr int THREADS = 256, TOGETHER = 4;

template <class T, class Index>
__global__ void __launch_bounds__(THREADS) weave(
    const T* x, T* y, long long count, Divider h, Divider w, Divider inner, long long H, long long W, long long step_h,
    long long step_w, long long at_h, long long at_w) {
    const long long step = static_cast<long long>(gridDim.x) * THREADS * TOGETHER;
    for (long long begin = static_cast<long long>(blockIdx.x) * THREADS * TOGETHER + threadIdx.x; begin < count;
         begin += step) {
        T words[TOGETHER];
#pragma unroll
        for (int k = 0; k < TOGETHER; ++k) {
            if (begin + k * THREADS < count) words[k] = x[begin + k * THREADS];
        }
#pragma unroll
        for (int k = 0; k < TOGETHER; ++k) {
            if (begin + k * THREADS >= count) break;
            Index n = static_cast<Index>(begin + k * THREADS);
            const u32 c = take_rest(n, inner), j = take_rest(n, w), i = take_rest(n, h);
            y[((n * H + at_h + i * step_h) * W + at_w + j * step_w) * inner.size + c] = words[k];
        }
    }
}
