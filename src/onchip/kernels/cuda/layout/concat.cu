// layout/concat.cu: Concat (values side by side) and Interleave (values at strided pixels).
//
// Idea    concat: threads compute adjacent words of y, so stores coalesce; a few comparisons find the source value.
//         Each thread has four words in flight. interleave: the same number of blocks per value; threads load adjacent
//         words and divide to find their destination. Words are as wide as the contiguous runs of all values allow.
// Floor   Each element is read and written once: 2^28 floats are 2.15 GB / 4.8 TB/s = 447 us.
// Layout  concat: x (outer, its words), y (outer, words of all values = `pitch`). interleave: x (outer, h, w, inner),
//         y (outer, H, W, inner), row-major: x's (o, i, j, c) goes to (o, at_h + i * step_h, at_w + j * step_w, c).
// Limits  Up to 8 values per launch; words of 1, 2, 4, 8 or 16 B, aligned; Index counts the words of a launch, or of a
//         value; fewer than 2^32 words per line of y; sm_80 up.
#include "common/fast_divide.cuh"

constexpr int THREADS = 256, UNROLL = 4, MAX_VALUES = 8;

struct Value {
    long long count, H, W, step_h, step_w, at_h, at_w;
    Divider h, w, inner;
};

struct Values {
    const void* x[MAX_VALUES];
    Value value[MAX_VALUES];
};

// Concat: value v holds words begin[v] to begin[v + 1] of a line of y.
struct Lines {
    const void* x[MAX_VALUES];
    u32 begin[MAX_VALUES + 1];
    Divider words;  // per line, all values
};

// count  words of y to compute
// at     offset of the first value in a line
template <class T, class Index>
__global__ void __launch_bounds__(THREADS)
    concat(const __grid_constant__ Lines lines, T* y, long long count, long long pitch, long long at) {
    const long long begin = static_cast<long long>(blockIdx.x) * THREADS * UNROLL + threadIdx.x;
    T words[UNROLL];
    T* to[UNROLL];
#pragma unroll
    for (int k = 0; k < UNROLL; ++k) {
        if (begin + k * THREADS >= count) break;
        Index line = static_cast<Index>(begin + k * THREADS);
        const u32 word = pop_index(line, lines.words);
        int v = 0;
#pragma unroll
        for (int i = 1; i < MAX_VALUES; ++i) v += word >= lines.begin[i];
        const T* x = static_cast<const T*>(lines.x[v]);
        words[k] = x[line * static_cast<long long>(lines.begin[v + 1] - lines.begin[v]) + (word - lines.begin[v])];
        to[k] = y + line * pitch + at + word;
    }
#pragma unroll
    for (int k = 0; k < UNROLL; ++k) {
        if (begin + k * THREADS < count) *to[k] = words[k];
    }
}

// blocks  per value
template <class T, class Index>
__global__ void __launch_bounds__(THREADS) interleave(const __grid_constant__ Values values, T* y, u32 blocks) {
    const Value& at = values.value[blockIdx.x / blocks];
    const T* x = static_cast<const T*>(values.x[blockIdx.x / blocks]);
    const long long step = static_cast<long long>(blocks) * THREADS * UNROLL;
    for (long long begin = static_cast<long long>(blockIdx.x % blocks) * THREADS * UNROLL + threadIdx.x;
         begin < at.count; begin += step) {
        T words[UNROLL];
#pragma unroll
        for (int k = 0; k < UNROLL; ++k) {
            if (begin + k * THREADS < at.count) words[k] = x[begin + k * THREADS];
        }
#pragma unroll
        for (int k = 0; k < UNROLL; ++k) {
            if (begin + k * THREADS >= at.count) break;
            Index n = static_cast<Index>(begin + k * THREADS);
            const u32 c = pop_index(n, at.inner), j = pop_index(n, at.w), i = pop_index(n, at.h);
            y[((n * at.H + at.at_h + i * at.step_h) * at.W + at.at_w + j * at.step_w) * at.inner.size + c] = words[k];
        }
    }
}
