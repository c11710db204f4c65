// recipes/derived.cu: weights in the layouts and types that kernels read, all of a training step in one launch.
//
// Idea    Each weight is a rearrangement of another: element i is element index[i] - 1 of the source, or 0 for index 0.
//         The host computes the indices once. A block derives 1,024 elements of one weight.
// Floor   12 bytes per float: a million are 12 MB / 4.2 TB/s = 2.9 us.
// Layout  Sources float32; COPY16 and COPY64 move any elements of 2 or 8 bytes as they are. SPLIT has two parts of `count` elements: tf32 high, and the rest (recipes/recipes.cu).
// Limits  MAX_WEIGHTS per launch; sm_80 up.
#include "common/dtype.cuh"

constexpr int THREADS = 256, PER_THREAD = 4, MAX_WEIGHTS = 96;
enum Kind : u32 { FLOAT32, FLOAT16, BFLOAT16, TF32, SPLIT, FLOAT64, COPY16, COPY64 };

struct DerivedWeight {
    const void* x;
    const u32* index;  // null: in the source's order
    void* result;
    long long count;
    u32 first_block, kind;
};
struct DerivedWeights {
    DerivedWeight weight[MAX_WEIGHTS];
};

// To 10 mantissa bits, ties away from zero; NaN and infinity unchanged (common/precision.py: round_tf32).
__device__ __forceinline__ float round_tf32(float v) {
    const u32 bits = __float_as_uint(v);
    return (bits & 0x7f800000) == 0x7f800000 ? v : __uint_as_float((bits + 0x1000) & 0xffffe000);
}

template <typename T>
__device__ __forceinline__ T element_of(const DerivedWeight& w, long long i) {
    const T* x = static_cast<const T*>(w.x);
    if (w.index == nullptr) return x[i];
    const u32 from = w.index[i];
    return from == 0 ? T(0) : x[from - 1];
}

__device__ __forceinline__ void derive(const DerivedWeight& w, long long i, float scale) {
    if (w.kind == COPY16) {
        static_cast<unsigned short*>(w.result)[i] = element_of<unsigned short>(w, i);
        return;
    }
    if (w.kind == COPY64) {
        static_cast<unsigned long long*>(w.result)[i] = element_of<unsigned long long>(w, i);
        return;
    }
    const float v = element_of<float>(w, i);
    if (w.kind == FLOAT32) {
        static_cast<float*>(w.result)[i] = v;
    } else if (w.kind == FLOAT16) {
        static_cast<unsigned short*>(w.result)[i] = static_cast<unsigned short>(pack<f16>(v, 0));
    } else if (w.kind == BFLOAT16) {
        static_cast<unsigned short*>(w.result)[i] = static_cast<unsigned short>(pack<bf16>(v, 0));
    } else if (w.kind == FLOAT64) {
        static_cast<double*>(w.result)[i] = v;
    } else {
        const float high = round_tf32(v);
        static_cast<float*>(w.result)[i] = high;
        if (w.kind == SPLIT) static_cast<float*>(w.result)[w.count + i] = round_tf32(__fmul_rn(v, scale) - high);
    }
}

// scale  of a split weight, as bits
__global__ void __launch_bounds__(THREADS)
    derived_weights(const __grid_constant__ DerivedWeights all, u32 weights, u32 scale) {
    u32 at = 0;
    while (at + 1 < weights && blockIdx.x >= all.weight[at + 1].first_block) ++at;
    const DerivedWeight& w = all.weight[at];
    const long long first = static_cast<long long>(blockIdx.x - w.first_block) * THREADS * PER_THREAD;
#pragma unroll
    for (int j = 0; j < PER_THREAD; ++j) {
        const long long i = first + j * THREADS + threadIdx.x;
        if (i < w.count) derive(w, i, __uint_as_float(scale));
    }
}
