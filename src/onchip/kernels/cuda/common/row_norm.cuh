// common/row_norm.cuh: the segments of a row that are normalised separately, and their weights.
//
// Segment r of a batch uses weights from (r % groups) * each on, one per `run` elements.
#pragma once
#include "common/accumulator.cuh"
#include "common/fast_divide.cuh"

struct Norm {
    Divider run;
    u32 groups, each, is_centred;
    double eps;
};

__device__ __forceinline__ float sqrt_of(float v) { return sqrtf(v); }
__device__ __forceinline__ double sqrt_of(double v) { return sqrt(v); }

// The weights of elements n to n + V - 1.
template <class W, int V>
__device__ __forceinline__ void load_weights(const W* part_weights, u32 n, const Divider& run, W (&w)[V]) {
    if (run.size == 1) {
#pragma unroll
        for (int j = 0; j < V; ++j) w[j] = part_weights[n + j];
    } else {
#pragma unroll
        for (int j = 0; j < V; ++j) w[j] = part_weights[quotient(n + j, run)];
    }
}
// The weights of a part.
template <class W>
__device__ __forceinline__ const W* part_weights(const W* weights, long long part, const Norm& norm) {
    return weights == nullptr || norm.groups == 1 ? weights : weights + part % norm.groups * norm.each;
}
