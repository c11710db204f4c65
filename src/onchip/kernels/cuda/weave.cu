// weave.cu: several values put where they belong in their union: side by side (Concat), or every so many pixels
// (Interleave).
//
// Idea    As many blocks for each value. Threads move words that lie next to each other in it, each as large as what stays
//         together in all of them allows, and divide to find where they go.
// Floor   Every number is read once and written once: 2^28 floats are 2.15 GB / 4.8 TB/s = 447 us.
// Layout  x (outer, h, w, inner), y (outer, H, W, inner), row-major: x's (o, i, j, c) goes to
//         (o, at_h + i * step_h, at_w + j * step_w, c).
// Limits  Up to 8 values a launch; words of 1, 2, 4, 8 or 16 bytes, aligned; Index counts those of a value; sm_80 up.
#include "divide.cuh"

constexpr int THREADS = 256, TOGETHER = 4, MOST = 8;

struct Value {
    long long count, H, W, step_h, step_w, at_h, at_w;
    Divider h, w, inner;
};

struct Values {
    const void* x[MOST];
    Value value[MOST];
};

// blocks  for each value
template <class T, class Index>
__global__ void __launch_bounds__(THREADS) weave(const __grid_constant__ Values values, T* y, u32 blocks) {
    const Value& at = values.value[blockIdx.x / blocks];
    const T* x = static_cast<const T*>(values.x[blockIdx.x / blocks]);
    const long long step = static_cast<long long>(blocks) * THREADS * TOGETHER;
    for (long long begin = static_cast<long long>(blockIdx.x % blocks) * THREADS * TOGETHER + threadIdx.x;
         begin < at.count; begin += step) {
        T words[TOGETHER];
#pragma unroll
        for (int k = 0; k < TOGETHER; ++k) {
            if (begin + k * THREADS < at.count) words[k] = x[begin + k * THREADS];
        }
#pragma unroll
        for (int k = 0; k < TOGETHER; ++k) {
            if (begin + k * THREADS >= at.count) break;
            Index n = static_cast<Index>(begin + k * THREADS);
            const u32 c = take_rest(n, at.inner), j = take_rest(n, at.w), i = take_rest(n, at.h);
            y[((n * at.H + at.at_h + i * at.step_h) * at.W + at.at_w + j * at.step_w) * at.inner.size + c] = words[k];
        }
    }
}
