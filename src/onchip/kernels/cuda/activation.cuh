// activation.cuh: one number in, one number out: the structs that kernels/pointwise.py names. NaNs stay NaNs.
//
// Parameters come at run time, behind the number; Fixed makes template arguments of them, as the bits of floats.
//
// apply  exact to a few ulp of float32, without branches: tensor cores bear none, and lanes would part
// fast   an absolute error of 2^-12 or less of the largest result: for hidden layers in 16 bits; a few instructions
#pragma once

__device__ __forceinline__ float fast_tanh(float v) {
    float result;
    asm("tanh.approx.f32 %0, %1;" : "=f"(result) : "f"(v));
    return result;
}
__device__ __forceinline__ float exact_tanh(float v) {
    const float less = expm1f(-2.0f * fabsf(v));
    return copysignf(-less / (2.0f + less), v);
}
__device__ __forceinline__ float fast_sigmoid(float v) { return fmaf(0.5f, fast_tanh(0.5f * v), 0.5f); }
__device__ __forceinline__ float exact_sigmoid(float v) {
    const float e = expf(-fabsf(v));  // at most 1
    return (v >= 0.0f ? 1.0f : e) / (1.0f + e);
}

template <class Function, unsigned... bits>
struct Fixed {
    static __device__ __forceinline__ float apply(float v) { return Function::apply(v, __uint_as_float(bits)...); }
    static __device__ __forceinline__ float fast(float v) { return apply(v); }
};

struct Identity {
    static __device__ __forceinline__ float apply(float v) { return v; }
    static __device__ __forceinline__ float fast(float v) { return v; }
};
struct ReLU {
    // Not fmaxf(v, 0), which makes 0 of a NaN.
    static __device__ __forceinline__ float apply(float v) { return v < 0.0f ? 0.0f : v; }
    static __device__ __forceinline__ float fast(float v) { return apply(v); }
};
struct LeakyReLU {
    static __device__ __forceinline__ float apply(float v, float slope) { return v >= 0.0f ? v : slope * v; }
};
// A bound that is not there is an infinity.
struct Clip {
    static __device__ __forceinline__ float apply(float v, float low, float high) {
        v = v < low ? low : v;
        return v > high ? high : v;
    }
};
struct Sigmoid {
    static __device__ __forceinline__ float apply(float v) { return exact_sigmoid(v); }
    static __device__ __forceinline__ float fast(float v) { return fast_sigmoid(v); }
};
struct Tanh {
    static __device__ __forceinline__ float apply(float v) { return exact_tanh(v); }
    static __device__ __forceinline__ float fast(float v) { return fast_tanh(v); }
};
struct SiLU {
    static __device__ __forceinline__ float apply(float v) { return v * exact_sigmoid(v); }
    static __device__ __forceinline__ float fast(float v) { return v * fast_sigmoid(v); }
};
struct GELU {
    static __device__ __forceinline__ float apply(float v) { return 0.5f * v * erfcf(-0.70710678f * v); }
    // erf by a polynomial of t = 1 / (1 + p z) times exp(-z^2), z >= 0: Abramowitz and Stegun 7.1.25, error 2.5e-5.
    static __device__ __forceinline__ float fast(float v) {
        const float z = 0.70710678f * fabsf(v), t = __fdividef(1.0f, fmaf(0.47047f, z, 1.0f));
        const float tail = t * fmaf(t, fmaf(t, 0.7478556f, -0.0958798f), 0.3480242f) * __expf(-z * z);
        return 0.5f * v * (v < 0.0f ? tail : 2.0f - tail);
    }
};
struct TanhGELU {
    static __device__ __forceinline__ float apply(float v) {
        return v * exact_sigmoid(1.5957691f * (v + 0.044715f * v * v * v));
    }
    static __device__ __forceinline__ float fast(float v) {
        return v * fast_sigmoid(1.5957691f * (v + 0.044715f * v * v * v));
    }
};
