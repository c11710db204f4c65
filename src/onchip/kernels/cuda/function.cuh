// function.cuh: one or two numbers in, one number out: the structs of kernels/pointwise.py that pointwise.cu alone has.
//
// Exact to a few ulp, as CUDA's own functions are; a float or a double. NaNs stay NaNs. What takes more than some twenty
// instructions is called, not copied to each of a thread's sixteen numbers; so is all of float64.
#pragma once
#include "activation.cuh"
#include "number.cuh"

// -- parts ---------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float exp_of(float v) { return expf(v); }
__device__ __noinline__ double exp_of(double v) { return exp(v); }
__device__ __noinline__ float expm1_of(float v) { return expm1f(v); }
__device__ __noinline__ double expm1_of(double v) { return expm1(v); }
__device__ __noinline__ float log_of(float v) { return logf(v); }
__device__ __noinline__ double log_of(double v) { return log(v); }
__device__ __noinline__ float sin_of(float v) { return sinf(v); }
__device__ __noinline__ double sin_of(double v) { return sin(v); }
__device__ __noinline__ float cos_of(float v) { return cosf(v); }
__device__ __noinline__ double cos_of(double v) { return cos(v); }
__device__ __noinline__ float erf_of(float v) { return erff(v); }
__device__ __noinline__ double erf_of(double v) { return erf(v); }
__device__ __noinline__ float power_of(float a, float b) { return powf(a, b); }
__device__ __noinline__ double power_of(double a, double b) { return pow(a, b); }
__device__ __noinline__ float root_of(float v) { return sqrtf(v); }
__device__ __noinline__ double root_of(double v) { return sqrt(v); }
template <class Number>
__device__ __noinline__ Number quotient_of(Number a, Number b) { return a / b; }

// log(1 + e) of 0 <= e <= 1: twice the inverse hyperbolic tangent of s = e / (2 + e), as its series up to s^15: a float
// is off by 2^-26 of it at most.
__device__ __noinline__ float log1p_of(float e) {
    const float s = e * exact_inverse(2.0f + e), q = s * s;
    const float high = fmaf(q, fmaf(q, fmaf(q, fmaf(q, 1.0f / 15, 1.0f / 13), 1.0f / 11), 1.0f / 9), 1.0f / 7);
    return 2.0f * fmaf(s * q, fmaf(q, fmaf(q, high, 0.2f), 1.0f / 3), s);
}
__device__ __noinline__ double log1p_of(double e) { return log1p(e); }
template <class Number>
__device__ __forceinline__ Number size_of(Number v) { return v < Number(0) ? -v : v; }
template <class Number>
__device__ __forceinline__ Number elu(Number v, Number alpha) { return v >= Number(0) ? v : alpha * expm1_of(v); }
template <class Number>
__device__ __forceinline__ Number hard_sigmoid(Number v, Number slope, Number shift) {
    return Clip::apply(slope * v + shift, Number(0), Number(1));
}

// -- of one number ---------------------------------------------------------------------------------------------------

struct ELU {
    template <class Number>
    static __device__ __forceinline__ Number apply(Number v, Number alpha) { return elu(v, alpha); }
};
struct SELU {
    template <class Number>
    static __device__ __forceinline__ Number apply(Number v) {
        return Number(1.05070102214813232421875) * elu(v, Number(1.67326319217681884765625));
    }
};
struct HardSigmoid {
    template <class Number>
    static __device__ __forceinline__ Number apply(Number v, Number slope, Number shift) {
        return hard_sigmoid(v, slope, shift);
    }
};
struct HardSwish {
    template <class Number>
    static __device__ __forceinline__ Number apply(Number v) {
        return v * hard_sigmoid(v, Number(1.0 / 6), Number(0.5));
    }
};
struct Softplus {
    template <class Number>
    static __device__ __forceinline__ Number apply(Number v) {
        return ReLU::apply(v) + log1p_of(exp_of(-size_of(v)));
    }
};
struct Softsign {
    template <class Number>
    static __device__ __forceinline__ Number apply(Number v) { return quotient_of(v, Number(1) + size_of(v)); }
};
// tanh(log(1 + e)) is ((1 + e)^2 - 1) / ((1 + e)^2 + 1); above 0 that is a quotient in exp(-v), which does not overflow.
struct Mish {
    template <class Number>
    static __device__ __forceinline__ Number apply(Number v) {
        const Number e = exp_of(-size_of(v)), one = Number(1), two = Number(2);
        const Number above = v >= Number(0) ? one + two * e : e * (e + two);
        const Number below = v >= Number(0) ? above + two * e * e : above + two;
        return v * quotient_of(above, below);
    }
};
struct Abs {
    template <class Number>
    static __device__ __forceinline__ Number apply(Number v) { return size_of(v); }
};
struct Sqrt {
    template <class Number>
    static __device__ __forceinline__ Number apply(Number v) { return root_of(v); }
};
struct Reciprocal {
    template <class Number>
    static __device__ __forceinline__ Number apply(Number v) { return quotient_of(Number(1), v); }
};
struct Exp {
    template <class Number>
    static __device__ __forceinline__ Number apply(Number v) { return exp_of(v); }
};
struct Log {
    template <class Number>
    static __device__ __forceinline__ Number apply(Number v) { return log_of(v); }
};
struct Sin {
    template <class Number>
    static __device__ __forceinline__ Number apply(Number v) { return sin_of(v); }
};
struct Cos {
    template <class Number>
    static __device__ __forceinline__ Number apply(Number v) { return cos_of(v); }
};
struct Erf {
    template <class Number>
    static __device__ __forceinline__ Number apply(Number v) { return erf_of(v); }
};

// -- of two --------------------------------------------------------------------------------------------------------

struct Add {
    template <class Number>
    static __device__ __forceinline__ Number apply(Number a, Number b) { return a + b; }
    static __device__ __forceinline__ long long apply(long long a, long long b) {
        return static_cast<unsigned long long>(a) + static_cast<unsigned long long>(b);
    }
};
struct Mul {
    template <class Number>
    static __device__ __forceinline__ Number apply(Number a, Number b) { return a * b; }
    static __device__ __forceinline__ long long apply(long long a, long long b) {
        return static_cast<unsigned long long>(a) * static_cast<unsigned long long>(b);
    }
};
struct Max {
    template <class Number>
    static __device__ __forceinline__ Number apply(Number a, Number b) { return b > a || b != b ? b : a; }
};
struct Min {
    template <class Number>
    static __device__ __forceinline__ Number apply(Number a, Number b) { return b < a || b != b ? b : a; }
};
struct Sub {
    template <class Number>
    static __device__ __forceinline__ Number apply(Number a, Number b) { return a - b; }
    static __device__ __forceinline__ long long apply(long long a, long long b) {
        return static_cast<unsigned long long>(a) - static_cast<unsigned long long>(b);
    }
};
struct Div {
    template <class Number>
    static __device__ __forceinline__ Number apply(Number a, Number b) { return quotient_of(a, b); }
};
struct Pow {
    template <class Number>
    static __device__ __forceinline__ Number apply(Number a, Number b) { return power_of(a, b); }
};
struct PReLU {
    template <class Number>
    static __device__ __forceinline__ Number apply(Number a, Number b) { return a >= Number(0) ? a : a * b; }
};
struct Mask {
    template <class Number>
    static __device__ __forceinline__ Number apply(Number a, Number b) { return b != Number(0) ? a : Number(0); }
};
// The accumulator has the second operand.
template <class Function>
struct Turned {
    template <class Number>
    static __device__ __forceinline__ Number apply(Number b, Number a) { return Function::apply(a, b); }
};
