// common/fast_math.cuh: faster activations for results stored in 16 bits; relative error at most 2^-15.
//
// FastMath<F> is F itself where F is already short. Instructions on sm_90: Sigmoid 4, SiLU 5, TanhGELU 7, Tanh 11, GELU
// 15; two of them run on the SFU. NaNs propagate.
#pragma once
#include "common/elementwise.cuh"

template <class Function>
struct FastMath : Function {};

template <>
struct FastMath<Sigmoid> {
    static __device__ __forceinline__ float apply(float v) { return reciprocal_of(1.0f + exp2_of(-1.44269504f * v)); }
};
template <>
struct FastMath<SiLU> {
    static __device__ __forceinline__ float apply(float v) { return v * FastMath<Sigmoid>::apply(v); }
};
template <>
struct FastMath<TanhGELU> {
    static __device__ __forceinline__ float apply(float v) {
        const float power = fmaf(-0.102943240f, v * v, -2.30220820f) * v;  // -inner(v) log2(e)
        return v * reciprocal_of(1.0f + exp2_of(power));
    }
};
// v - v^3 / 3 near 0, where 1 - 2 / (exp(2 v) + 1) cancels.
template <>
struct FastMath<Tanh> {
    static __device__ __forceinline__ float apply(float v) {
        const float far = fmaf(-2.0f, reciprocal_of(1.0f + exp2_of(2.88539008f * v)), 1.0f);
        const float near = fmaf(v * v, -0.333333333f * v, v);
        return fabsf(v) < 0.0625f ? near : far;
    }
};
// As exact_gelu, with a degree-5 fit to erfc(z) exp(z^2) / (2 t), t = 1 / (1 + 0.47047 z); error 2^-15.8.
template <>
struct FastMath<GELU> {
    static __device__ __forceinline__ float apply(float v) {
        const float a = fabsf(fminf(v, 3e38f)), t = reciprocal_of(fmaf(0.332672527f, a, 1.0f));
        const float high = fmaf(t, fmaf(t, fmaf(t, -0.0533446222f, 0.0819633780f), 0.0948804300f), 0.108782790f);
        const float low = fmaf(t, fmaf(t, high, 0.135200550f), 0.132508830f);
        return fmaf(-a, t * exp2_of(v * v * -0.72134752f) * low, fmaxf(v, 0.0f));
    }
};
