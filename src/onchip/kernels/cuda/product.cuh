// product.cuh: what the kernels of product.cu share: which tile a block makes, and what becomes of a sum.
#pragma once

#include "activation.cuh"
#include "number.cuh"

// Blocks that run at the same time share rows of x and of w through L2: they go down GROUP tiles before one to the right.
constexpr int GROUP = 8;

template <int BM, int BN>
struct Place {
    long long m, n;  // the tile's first row and column of y

    __device__ __forceinline__ Place(long long M, long long N) {
        const long long tiles_m = (M + BM - 1) / BM, tiles_n = (N + BN - 1) / BN, block = blockIdx.x;
        const long long first = block / (GROUP * tiles_n) * GROUP, at = block % (GROUP * tiles_n);
        const long long rows = tiles_m - first < GROUP ? tiles_m - first : GROUP;
        m = (first + at % rows) * BM;
        n = at / rows * BN;
    }
};

// Four neighbours of a row, of which `left` are there; zeros stand for the others.
template <class T>
__device__ __forceinline__ float4 read4(const T* from, long long left, bool is_aligned) {
    if (is_aligned && left >= 4) return load4(from);
    return {left > 0 ? to_float(from[0]) : 0.0f, left > 1 ? to_float(from[1]) : 0.0f,
            left > 2 ? to_float(from[2]) : 0.0f, left > 3 ? to_float(from[3]) : 0.0f};
}

// -- what becomes of a sum ------------------------------------------------------------------------------------

// Known when a kernel is launched, not when it is compiled: 0 is none, and 1 the first of activation.cuh's in the order
// of kernels/pointwise.py.
struct Activation {
    u32 code;
    float a, b;  // the slope of a LeakyReLU; the bounds of a Clip

    __device__ __forceinline__ float operator()(float v) const {
        switch (code) {
            case 1: return ReLU::apply(v);
            case 2: return LeakyReLU::apply(v, a);
            case 3: return Clip::apply(v, a, b);
            case 4: return Sigmoid::apply(v);
            case 5: return Tanh::apply(v);
            case 6: return SiLU::apply(v);
            case 7: return GELU::apply(v);
            case 8: return TanhGELU::apply(v);
        }
        return v;
    }
};

// Out of line: a thread has many sums, and a copy for each would be most of the kernel.
template <class Y>
__device__ __noinline__ void finish_one(float v, Y* y, const Activation activation) {
    store1(y, activation(v));
}

// V neighbours of a row of y, of which `left` are in it: the sums, the bias, the activation.
template <int V, class Acc, class Y>
__device__ __forceinline__ void finish(const Acc (&sums)[V], Y* y, const float* bias, long long left, bool is_aligned,
                                       const Activation& activation) {
    float v[V];
#pragma unroll
    for (int i = 0; i < V; ++i) {
        v[i] = static_cast<float>(sums[i]);
        if (bias != nullptr && i < left) v[i] += bias[i];
    }
    if (activation.code <= 1 && is_aligned && left >= V) {
        if (activation.code == 1) {
#pragma unroll
            for (int i = 0; i < V; ++i) v[i] = ReLU::apply(v[i]);
        }
        store_several(y, v);
    } else {
#pragma unroll
        for (int i = 0; i < V; ++i)
            if (i < left) finish_one(v[i], y + i, activation);
    }
}
