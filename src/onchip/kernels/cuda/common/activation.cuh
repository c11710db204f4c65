// common/activation.cuh: elementwise activations, the structs that kernels/pointwise.py names. NaNs propagate.
//
// Parameters are run-time arguments after the value; Fixed takes them as template arguments, as bits of floats.
//
// apply  float or double, accurate to a few ulp of the result, or of the argument where that is larger. Branch-free: a
//        branch makes lanes diverge and the compiler serialise wgmma. Instructions for a float on sm_90: ReLU 2,
//        TanhGELU 10, Sigmoid 13, SiLU 14, Tanh 15, GELU 23. Exponentials below 2^-126 flush to 0.
// fast   absolute error at most 2^-12 of the largest result, a few instructions: for hidden layers in 16 bits
#pragma once

// -- building blocks -------------------------------------------------------------------------------------------------

// 2^v and 1 / v by one instruction each, with relative errors of 2^-22 and 2^-23.
__device__ __forceinline__ float exp2_of(float v) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(v));
    return result;
}
__device__ __forceinline__ float reciprocal_of(float v) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(v));
    return result;
}
// 1 / v to one ulp for finite v (one Newton step); 0 above 2^126.
__device__ __forceinline__ float exact_reciprocal(float v) {
    const float approx = reciprocal_of(v);
    return fmaf(approx, fmaf(-v, approx, 1.0f), approx);
}
// min and max that propagate NaNs.
__device__ __forceinline__ float at_most(float v, float most) {
    float result;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(v), "f"(most));
    return result;
}
__device__ __forceinline__ float at_least(float v, float least) {
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(v), "f"(least));
    return result;
}

__device__ __forceinline__ float fast_tanh(float v) {
    float result;
    asm("tanh.approx.f32 %0, %1;" : "=f"(result) : "f"(v));
    return result;
}
// Near 0: v + v^3 P(v^2), a degree-4 fit at Chebyshev points with error 2e-8. Elsewhere: 1 - 2 / (exp(2 |v|) + 1).
__device__ __forceinline__ float exact_tanh(float v) {
    const float a = fabsf(v), s = a * a;
    const float far = fmaf(-2.0f, reciprocal_of(1.0f + exp2_of(2.88539008f * a)), 1.0f);
    const float p = fmaf(s, fmaf(s, fmaf(s, fmaf(s, -0.00610494983f, 0.0210036428f), -0.0538524979f), 0.133327823f),
                         -0.333333291f);
    return copysignf(a < 0.625f ? fmaf(a, s * p, a) : far, v);
}
__device__ __forceinline__ double exact_tanh(double v) { return tanh(v); }

__device__ __forceinline__ float fast_sigmoid(float v) { return fmaf(0.5f, fast_tanh(0.5f * v), 0.5f); }
// Corrects the exponential for the rounding error of v log2(e). v is clamped: the error of an infinity would be a NaN.
__device__ __forceinline__ float exact_sigmoid(float v) {
    const float x = at_most(at_least(v, -88.0f), 150.0f), power = -1.44269504f * x;
    const float error = fmaf(-1.92596299e-8f, x, fmaf(-1.44269504f, x, -power));
    const float e = exp2_of(power);
    return exact_reciprocal(1.0f + fmaf(e, 0.693147181f * error, e));
}
__device__ __forceinline__ double exact_sigmoid(double v) {
    const double e = exp(-fabs(v));
    return (v >= 0.0 ? 1.0 : e) / (1.0 + e);
}

// max(v, 0) - |v| erfc(z) / 2, z = |v| / sqrt 2. erfc(z) is t exp(-z^2) times a polynomial of 2 t - 1,
// t = 1 / (1 + z / 2): that of kernels/cpu/microkernels/activation.py, with halved coefficients.
__device__ __forceinline__ float exact_gelu(float v) {
    // The clamp avoids inf - inf * 0 = NaN for +infinity; -infinity gives a NaN, as v erfc(-v / sqrt 2) does.
    const float a = fabsf(fminf(v, 3e38f));
    const float t = exact_reciprocal(fmaf(0.353553391f, a, 1.0f)), u = fmaf(2.0f, t, -1.0f);
    const float high = fmaf(u, fmaf(u, fmaf(u, 2.10915202e-5f, -1.83168228e-5f), -1.49721898e-4f), 2.15370713e-4f);
    const float middle = fmaf(u, fmaf(u, fmaf(u, high, 7.64608948e-4f), -1.62175229e-3f), -5.37582567e-3f);
    const float low = fmaf(u, fmaf(u, fmaf(u, fmaf(u, middle, 9.11084192e-3f), 0.0698678686f), 0.171790159f),
                           0.255395678f);
    const float half_tail = t * exp2_of(v * v * -0.72134752f) * low;
    return fmaf(-a, half_tail, fmaxf(v, 0.0f));
}
__device__ __forceinline__ double exact_gelu(double v) { return 0.5 * v * erfc(-0.70710678118654752 * v); }

__device__ __forceinline__ float exp_of(float v) { return expf(v); }
__device__ __noinline__ double exp_of(double v) { return exp(v); }
// exp(v) - 1 = 2 t / (1 - t), t = tanh(v / 2): no cancellation for v <= 0. Near 0 it is v, since v / 2 may underflow.
__device__ __forceinline__ float expm1_below(float v) {
    const float t = exact_tanh(0.5f * v);
    return v > -1e-10f ? v : 2.0f * t * exact_reciprocal(1.0f - t);
}
__device__ __noinline__ double expm1_below(double v) { return expm1(v); }
// log(1 + e) for 0 <= e <= 1: 2 atanh(s), s = e / (2 + e), as its series up to s^15. Relative error at most 2^-26.
__device__ __forceinline__ float log1p_of(float e) {
    const float s = e * exact_reciprocal(2.0f + e), q = s * s;
    const float high = fmaf(q, fmaf(q, fmaf(q, fmaf(q, 1.0f / 15, 1.0f / 13), 1.0f / 11), 1.0f / 9), 1.0f / 7);
    return 2.0f * fmaf(s * q, fmaf(q, fmaf(q, high, 0.2f), 1.0f / 3), s);
}
__device__ __noinline__ double log1p_of(double e) { return log1p(e); }
template <class Element>
__device__ __noinline__ Element quotient_of(Element a, Element b) { return a / b; }
__device__ __forceinline__ float abs_of(float v) { return fabsf(v); }
__device__ __forceinline__ double abs_of(double v) { return fabs(v); }
template <class Element>
__device__ __forceinline__ Element elu(Element v, Element alpha) {
    return v >= Element(0) ? v : alpha * expm1_below(v);
}
template <class Element>
__device__ __forceinline__ Element hard_sigmoid(Element v, Element slope, Element shift) {
    v = slope * v + shift;
    v = v < Element(0) ? Element(0) : v;
    return v > Element(1) ? Element(1) : v;
}

// -- activations ---------------------------------------------------------------------------------------------------

template <class Function, unsigned... bits>
struct Fixed {
    static __device__ __forceinline__ float apply(float v) { return Function::apply(v, __uint_as_float(bits)...); }
    static __device__ __forceinline__ float fast(float v) { return apply(v); }
};

struct Identity {
    template <class Element>
    static __device__ __forceinline__ Element apply(Element v) { return v; }
    static __device__ __forceinline__ float fast(float v) { return v; }
};
struct ReLU {
    // Not fmaxf(v, 0), which maps NaN to 0.
    template <class Element>
    static __device__ __forceinline__ Element apply(Element v) { return v < Element(0) ? Element(0) : v; }
    static __device__ __forceinline__ float fast(float v) { return apply(v); }
};
struct LeakyReLU {
    template <class Element>
    static __device__ __forceinline__ Element apply(Element v, Element a) { return v >= Element(0) ? v : a * v; }
};
// A missing bound is an infinity.
struct Clip {
    template <class Element>
    static __device__ __forceinline__ Element apply(Element v, Element low, Element high) {
        v = v < low ? low : v;
        return v > high ? high : v;
    }
};
struct Sigmoid {
    template <class Element>
    static __device__ __forceinline__ Element apply(Element v) { return exact_sigmoid(v); }
    static __device__ __forceinline__ float fast(float v) { return fast_sigmoid(v); }
};
struct Tanh {
    template <class Element>
    static __device__ __forceinline__ Element apply(Element v) { return exact_tanh(v); }
    static __device__ __forceinline__ float fast(float v) { return fast_tanh(v); }
};
struct SiLU {
    template <class Element>
    static __device__ __forceinline__ Element apply(Element v) { return v * exact_sigmoid(v); }
    static __device__ __forceinline__ float fast(float v) { return v * fast_sigmoid(v); }
};
struct GELU {
    template <class Element>
    static __device__ __forceinline__ Element apply(Element v) { return exact_gelu(v); }
    // erf: a polynomial of t = 1 / (1 + p z) times exp(-z^2), z >= 0. Abramowitz and Stegun 7.1.25, error 2.5e-5.
    static __device__ __forceinline__ float fast(float v) {
        const float z = 0.70710678f * fabsf(v), t = __fdividef(1.0f, fmaf(0.47047f, z, 1.0f));
        const float tail = t * fmaf(t, fmaf(t, 0.7478556f, -0.0958798f), 0.3480242f) * __expf(-z * z);
        return 0.5f * v * (v < 0.0f ? tail : 2.0f - tail);
    }
};
struct TanhGELU {
    // TanhGELU(v) = v sigmoid(inner(v)), since (1 + tanh u) / 2 = sigmoid(2 u).
    template <class Element>
    static __device__ __forceinline__ Element inner(Element v) {
        return Element(1.5957691216057308) * (v + Element(0.044715) * v * v * v);
    }
    static __device__ __forceinline__ float apply(float v) {
        const float power = fmaf(-0.102943240f, v * v, -2.30220820f) * v;  // -inner(v) log2(e)
        return v * exact_reciprocal(1.0f + exp2_of(at_most(power, 127.0f)));
    }
    static __device__ __forceinline__ double apply(double v) { return v * exact_sigmoid(inner(v)); }
    static __device__ __forceinline__ float fast(float v) { return v * fast_sigmoid(inner(v)); }
};
struct ELU {
    template <class Element>
    static __device__ __forceinline__ Element apply(Element v, Element alpha) { return elu(v, alpha); }
};
struct SELU {
    template <class Element>
    static __device__ __forceinline__ Element apply(Element v) {
        return Element(1.05070102214813232421875) * elu(v, Element(1.67326319217681884765625));
    }
    static __device__ __forceinline__ float fast(float v) { return apply(v); }
};
struct HardSigmoid {
    template <class Element>
    static __device__ __forceinline__ Element apply(Element v, Element slope, Element shift) {
        return hard_sigmoid(v, slope, shift);
    }
};
struct HardSwish {
    template <class Element>
    static __device__ __forceinline__ Element apply(Element v) {
        return v * hard_sigmoid(v, Element(1.0 / 6), Element(0.5));
    }
    static __device__ __forceinline__ float fast(float v) { return apply(v); }
};
struct Softplus {
    template <class Element>
    static __device__ __forceinline__ Element apply(Element v) {
        return ReLU::apply(v) + log1p_of(exp_of(-abs_of(v)));
    }
    static __device__ __forceinline__ float fast(float v) { return apply(v); }
};
struct Softsign {
    // Inverts (1 + |v|) / 8, since exact_reciprocal returns 0 above 2^126.
    static __device__ __forceinline__ float apply(float v) {
        return v * exact_reciprocal(fmaf(0.125f, fabsf(v), 0.125f)) * 0.125f;
    }
    static __device__ __forceinline__ double apply(double v) { return quotient_of(v, 1.0 + abs_of(v)); }
    static __device__ __forceinline__ float fast(float v) { return apply(v); }
};
// v tanh(log(1 + e)), e = exp(v): tanh is ((1 + e)^2 - 1) / ((1 + e)^2 + 1); v >= 0 uses exp(-v): no overflow.
struct Mish {
    static __device__ __forceinline__ float apply(float v) {
        const float e = exp_of(-fabsf(v)), numerator = v >= 0.0f ? fmaf(2.0f, e, 1.0f) : e * (e + 2.0f);
        return v * (numerator * exact_reciprocal(numerator + (v >= 0.0f ? 2.0f * e * e : 2.0f)));
    }
    static __device__ __forceinline__ double apply(double v) {
        const double e = exp_of(-abs_of(v)), numerator = v >= 0.0 ? 1.0 + 2.0 * e : e * (e + 2.0);
        return v * quotient_of(numerator, numerator + (v >= 0.0 ? 2.0 * e * e : 2.0));
    }
    static __device__ __forceinline__ float fast(float v) { return apply(v); }
};
// Maps [-1, 1] to an integer in 0 .. 255, clamped; stored as a byte.
struct ToPixels {
    template <class Element>
    static __device__ __forceinline__ Element apply(Element v) {
        const Element scaled = (v + Element(1)) / Element(2) * Element(255);
        const Element positive = scaled > Element(0) ? scaled : Element(0);  // NaN gives 0
        return static_cast<int>(positive < Element(255) ? positive : Element(255));
    }
};
