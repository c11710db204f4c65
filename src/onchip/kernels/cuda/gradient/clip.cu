// gradient/clip.cu: what all gradients are multiplied by, so that their norm is at most clip_norm.
//
// Idea    squares: a block per 4,096 elements of a gradient adds their squares. clip_scale: one block adds the blocks'.
// Floor   Every gradient is read once: a million floats are 4 MB, 1 us at 4.2 TB/s; the two launches take longer.
// Order   Per thread with stride 256, then a tree; blocks in the same way, in float64.
// Limits  MAX_GRADIENTS per launch of squares; float32, float64; sm_80 up.
#include "common/reduce.cuh"

constexpr int THREADS = 256, BLOCK_ELEMENTS = 4096, MAX_GRADIENTS = 128;

struct Gradient {
    const void* values;
    long long count;
    u32 first_block, unused;
};
struct Gradients {
    Gradient gradient[MAX_GRADIENTS];
};

template <class T>
__global__ void __launch_bounds__(THREADS) squares(const __grid_constant__ Gradients all, int gradients, double* sums) {
    int index = 0;
    while (index + 1 < gradients && blockIdx.x >= all.gradient[index + 1].first_block) ++index;
    const Gradient& g = all.gradient[index];
    const T* values = static_cast<const T*>(g.values);
    const long long begin = static_cast<long long>(blockIdx.x - g.first_block) * BLOCK_ELEMENTS;
    const long long end = begin + BLOCK_ELEMENTS < g.count ? begin + BLOCK_ELEMENTS : g.count;
    double sum = 0;
#pragma unroll 4
    for (long long i = begin + threadIdx.x; i < end; i += THREADS) {
        const double value = values[i];
        sum = fma(value, value, sum);
    }
    sum = reduce_lanes<Sum, THREADS>(sum);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

template <class T>
__global__ void __launch_bounds__(THREADS) clip_scale(const double* sums, T* scale, long long blocks, float clip_norm) {
    double sum = 0;
    for (long long i = threadIdx.x; i < blocks; i += THREADS) sum += sums[i];
    sum = reduce_lanes<Sum, THREADS>(sum);
    const double wanted = clip_norm / (sqrt(sum) + 1e-6);
    if (threadIdx.x == 0) *scale = static_cast<T>(wanted > 1 ? 1 : wanted);
}
