// common/elementwise.cuh: functions for the C++ expressions of elementwise layers (network/layers/). NaNs propagate.
//
// common/layers.cuh, which common/layers.py generates, has a struct per layer. Its functions:
//
// apply  float or double, accurate to a few ulp of the result, or of the argument where that is larger. Branch-free: a
//        branch makes lanes diverge and the compiler serialise wgmma. Instructions for a float on sm_90: ReLU 2,
//        TanhGELU 10, Sigmoid 13, SiLU 14, Tanh 15, GELU 23. Exponentials below 2^-126 flush to 0.
//        Parameters are run-time arguments after the value; Fixed takes them as template arguments, as bits of floats.
// fast   absolute error at most 2^-12 of the largest result, a few instructions: for hidden layers in 16 bits
//
// Functions of more than about twenty instructions that only elementwise/pointwise.cu calls, and all of float64, are
// not inlined: a thread would have sixteen copies of each.
#pragma once

// -- arithmetic ------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float abs_of(float v) { return fabsf(v); }
__device__ __forceinline__ double abs_of(double v) { return fabs(v); }
template <class Element>
__device__ __forceinline__ Element sign_of(Element v) {
    const Element zero_or_nan = v == Element(0) ? Element(0) : v;  // v is 0 or NaN
    return v > Element(0) ? Element(1) : v < Element(0) ? Element(-1) : zero_or_nan;
}
// Integers wrap.
template <class Element>
__device__ __forceinline__ Element sum_of(Element a, Element b) { return a + b; }
__device__ __forceinline__ long long sum_of(long long a, long long b) {
    return static_cast<unsigned long long>(a) + static_cast<unsigned long long>(b);
}
template <class Element>
__device__ __forceinline__ Element difference_of(Element a, Element b) { return a - b; }
__device__ __forceinline__ long long difference_of(long long a, long long b) {
    return static_cast<unsigned long long>(a) - static_cast<unsigned long long>(b);
}
template <class Element>
__device__ __forceinline__ Element product_of(Element a, Element b) { return a * b; }
__device__ __forceinline__ long long product_of(long long a, long long b) {
    return static_cast<unsigned long long>(a) * static_cast<unsigned long long>(b);
}
template <class Element>
__device__ __noinline__ Element quotient_of(Element a, Element b) { return a / b; }
// Integer division truncates towards 0. Division by 0 returns 0, and elementwise/pointwise.cu reports it to the host.
// The most negative value divided by -1 is unchanged: it cannot be negated.
__device__ __noinline__ long long quotient_of(long long a, long long b) {
    if (b == -1) return 0ull - static_cast<unsigned long long>(a);
    return b == 0 ? 0 : a / b;
}
// The remainder with the sign of a.
__device__ __noinline__ float fmod_of(float a, float b) { return fmodf(a, b); }
__device__ __noinline__ double fmod_of(double a, double b) { return fmod(a, b); }
__device__ __noinline__ long long fmod_of(long long a, long long b) { return b == 0 || b == -1 ? 0 : a % b; }
// The remainder with the sign of b.
template <class Element>
__device__ __forceinline__ Element remainder_of(Element a, Element b) {
    const Element remainder = fmod_of(a, b);
    return remainder != Element(0) && (remainder < Element(0)) != (b < Element(0)) ? remainder + b : remainder;
}

// -- activations -----------------------------------------------------------------------------------------------------

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
__device__ __forceinline__ Element elu(Element v, Element alpha) {
    return v >= Element(0) ? v : alpha * expm1_below(v);
}
template <class Element>
__device__ __forceinline__ Element hard_sigmoid(Element v, Element slope, Element shift) {
    v = slope * v + shift;
    v = v < Element(0) ? Element(0) : v;
    return v > Element(1) ? Element(1) : v;
}
template <class Element>
__device__ __forceinline__ Element clip(Element v, Element low, Element high) {
    v = v < low ? low : v;
    return v > high ? high : v;
}
// erf: a polynomial of t = 1 / (1 + p z) times exp(-z^2), z >= 0. Abramowitz and Stegun 7.1.25, error 2.5e-5.
__device__ __forceinline__ float fast_gelu(float v) {
    const float z = 0.70710678f * fabsf(v), t = __fdividef(1.0f, fmaf(0.47047f, z, 1.0f));
    const float tail = t * fmaf(t, fmaf(t, 0.7478556f, -0.0958798f), 0.3480242f) * __expf(-z * z);
    return 0.5f * v * (v < 0.0f ? tail : 2.0f - tail);
}
// v sigmoid(2 u), u = sqrt(2 / pi) (v + 0.044715 v^3), since (1 + tanh u) / 2 = sigmoid(2 u).
template <class Element>
__device__ __forceinline__ Element twice_tanh_argument(Element v) {
    return Element(1.5957691216057308) * (v + Element(0.044715) * v * v * v);
}
__device__ __forceinline__ float tanh_gelu(float v) {
    const float power = fmaf(-0.102943240f, v * v, -2.30220820f) * v;  // -2 u log2(e)
    return v * exact_reciprocal(1.0f + exp2_of(at_most(power, 127.0f)));
}
__device__ __forceinline__ double tanh_gelu(double v) { return v * exact_sigmoid(twice_tanh_argument(v)); }
__device__ __forceinline__ float fast_tanh_gelu(float v) { return v * fast_sigmoid(twice_tanh_argument(v)); }
// Inverts (1 + |v|) / 8, since exact_reciprocal returns 0 above 2^126.
__device__ __forceinline__ float softsign(float v) {
    return v * exact_reciprocal(fmaf(0.125f, fabsf(v), 0.125f)) * 0.125f;
}
__device__ __forceinline__ double softsign(double v) { return quotient_of(v, 1.0 + abs_of(v)); }
// v tanh(log(1 + e)), e = exp(v): tanh is ((1 + e)^2 - 1) / ((1 + e)^2 + 1); v >= 0 uses exp(-v): no overflow.
__device__ __forceinline__ float mish(float v) {
    const float e = exp_of(-fabsf(v)), numerator = v >= 0.0f ? fmaf(2.0f, e, 1.0f) : e * (e + 2.0f);
    return v * (numerator * exact_reciprocal(numerator + (v >= 0.0f ? 2.0f * e * e : 2.0f)));
}
__device__ __forceinline__ double mish(double v) {
    const double e = exp_of(-abs_of(v)), numerator = v >= 0.0 ? 1.0 + 2.0 * e : e * (e + 2.0);
    return v * quotient_of(numerator, numerator + (v >= 0.0 ? 2.0 * e * e : 2.0));
}

// -- derivatives of activations --------------------------------------------------------------------------------------

template <class Element>
__device__ __forceinline__ Element silu_derivative(Element v) {
    const Element low = exact_sigmoid(-abs_of(v)), high = Element(1) - low;
    return (v < Element(0) ? low : high) * (Element(1) + v * (v < Element(0) ? high : low));
}
__device__ __forceinline__ float erfc_of(float v) { return erfcf(v); }
__device__ __forceinline__ double erfc_of(double v) { return erfc(v); }
// The normal distribution, erfc(-v / sqrt 2) / 2, and v times its density.
template <class Element>
__device__ __noinline__ Element gelu_derivative(Element v) {
    return Element(0.5) * erfc_of(Element(-0.70710678118654752) * v) +
           v * (Element(0.39894228040143268) * exp_of(Element(-0.5) * v * v));
}
// s + v s (1 - s) 2 u', s = sigmoid(2 u).
template <class Element>
__device__ __forceinline__ Element tanh_gelu_derivative(Element v) {
    const Element q = Element(0.044715) * v * v;
    const Element low = exact_sigmoid(-abs_of(twice_tanh_argument(v))), high = Element(1) - low;
    const Element rest = (v < Element(0) ? high : low) * (Element(1.5957691216057308) * (Element(1) + Element(3) * q));
    return (v < Element(0) ? low : high) * (Element(1) + v * rest);
}
// tanh + v (1 - tanh^2) sigmoid with the quotient of mish: the second term is 4 v e (1 + e) / denominator^2 for v < 0,
// else 4 v e^2 (1 + e) / denominator^2.
template <class Element>
__device__ __forceinline__ Element mish_derivative(Element v) {
    const Element e = exp_of(-abs_of(v)), one = Element(1), two = Element(2);
    const Element numerator = v >= Element(0) ? one + two * e : e * (e + two);
    const Element denominator = numerator + (v >= Element(0) ? two * e * e : two);
    const Element rest = Element(4) * e * (one + e) * (v >= Element(0) ? e : one);
    return quotient_of(numerator + quotient_of(v * rest, denominator), denominator);
}

// -- functions -------------------------------------------------------------------------------------------------------

__device__ __noinline__ float log_of(float v) { return logf(v); }
__device__ __noinline__ double log_of(double v) { return log(v); }
__device__ __noinline__ float sin_of(float v) { return sinf(v); }
__device__ __noinline__ double sin_of(double v) { return sin(v); }
__device__ __noinline__ float cos_of(float v) { return cosf(v); }
__device__ __noinline__ double cos_of(double v) { return cos(v); }
__device__ __noinline__ float atan_of(float v) { return atanf(v); }
__device__ __noinline__ double atan_of(double v) { return atan(v); }
__device__ __noinline__ float erf_of(float v) { return erff(v); }
__device__ __noinline__ double erf_of(double v) { return erf(v); }
__device__ __noinline__ float sqrt_of(float v) { return sqrtf(v); }
__device__ __noinline__ double sqrt_of(double v) { return sqrt(v); }
__device__ __noinline__ float general_power(float a, float b) { return powf(a, b); }
__device__ __noinline__ double general_power(double a, double b) { return pow(a, b); }
// sqrt is exact and faster than pow. As pow does, it maps -0 to 0 and -infinity to infinity.
template <class Element>
__device__ __forceinline__ Element power_of(Element a, Element b) {
    if (abs_of(b) != Element(0.5)) return general_power(a, b);
    const Element root = sqrt_of(a + a == a ? abs_of(a) : a);
    return b > Element(0) ? root : quotient_of(Element(1), root);
}
__device__ __forceinline__ float floor_of(float v) { return floorf(v); }
__device__ __forceinline__ double floor_of(double v) { return floor(v); }
__device__ __forceinline__ float ceil_of(float v) { return ceilf(v); }
__device__ __forceinline__ double ceil_of(double v) { return ceil(v); }
__device__ __forceinline__ float rint_of(float v) { return rintf(v); }
__device__ __forceinline__ double rint_of(double v) { return rint(v); }

// -- structs ---------------------------------------------------------------------------------------------------------

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
// Maps [-1, 1] to an integer in 0 .. 255, clamped; stored as a byte.
struct ToPixels {
    template <class Element>
    static __device__ __forceinline__ Element apply(Element v) {
        const Element scaled = (v + Element(1)) / Element(2) * Element(255);
        const Element positive = scaled > Element(0) ? scaled : Element(0);  // NaN gives 0
        return static_cast<int>(positive < Element(255) ? positive : Element(255));
    }
};
// Swapped operands: the accumulator holds the second operand. As many parameters follow as the function has.
template <class Function>
struct Swapped {
    template <class Element>
    static __device__ __forceinline__ auto apply(Element b, Element a) -> decltype(Function::apply(a, b)) {
        return Function::apply(a, b);
    }
    template <class Element>
    static __device__ __forceinline__ auto apply(Element b, Element a, Element p) -> decltype(Function::apply(a, b, p)) {
        return Function::apply(a, b, p);
    }
    template <class Element>
    static __device__ __forceinline__ auto apply(Element b, Element a, Element p, Element q)
        -> decltype(Function::apply(a, b, p, q)) {
        return Function::apply(a, b, p, q);
    }
};
#include "common/layers.cuh"
