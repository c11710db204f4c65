// common/function.cuh: unary and binary functions of kernels/pointwise.py that only elementwise/pointwise.cu uses.
//
// float or double, accurate to a few ulp, as CUDA's own functions are. NaNs propagate. Functions of more than about
// twenty instructions, and all in float64, are not inlined: a thread would have sixteen copies of each.
#pragma once
#include "common/activation.cuh"
#include "common/dtype.cuh"

// -- building blocks -------------------------------------------------------------------------------------------------

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
__device__ __noinline__ float fmod_of(float a, float b) { return fmodf(a, b); }
__device__ __noinline__ double fmod_of(double a, double b) { return fmod(a, b); }
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
// Integer division truncates towards 0. Division by 0 returns 0, and elementwise/pointwise.cu reports it to the host.
// The most negative value divided by -1 is unchanged: it cannot be negated.
__device__ __noinline__ long long int_quotient(long long a, long long b) {
    if (b == -1) return 0ull - static_cast<unsigned long long>(a);
    return b == 0 ? 0 : a / b;
}
__device__ __noinline__ long long int_remainder(long long a, long long b) { return b == 0 || b == -1 ? 0 : a % b; }

// -- unary -----------------------------------------------------------------------------------------------------------

struct Abs {
    template <class Element>
    static __device__ __forceinline__ Element apply(Element v) { return abs_of(v); }
};
struct Sign {
    template <class Element>
    static __device__ __forceinline__ Element apply(Element v) {
        const Element zero_or_nan = v == Element(0) ? Element(0) : v;  // v is 0 or NaN
        return v > Element(0) ? Element(1) : v < Element(0) ? Element(-1) : zero_or_nan;
    }
};
struct Sqrt {
    template <class Element>
    static __device__ __forceinline__ Element apply(Element v) { return sqrt_of(v); }
};
struct Reciprocal {
    template <class Element>
    static __device__ __forceinline__ Element apply(Element v) { return quotient_of(Element(1), v); }
};
struct Exp {
    template <class Element>
    static __device__ __forceinline__ Element apply(Element v) { return exp_of(v); }
};
struct Log {
    template <class Element>
    static __device__ __forceinline__ Element apply(Element v) { return log_of(v); }
};
struct Sin {
    template <class Element>
    static __device__ __forceinline__ Element apply(Element v) { return sin_of(v); }
};
struct Cos {
    template <class Element>
    static __device__ __forceinline__ Element apply(Element v) { return cos_of(v); }
};
struct Atan {
    template <class Element>
    static __device__ __forceinline__ Element apply(Element v) { return atan_of(v); }
};
struct Erf {
    template <class Element>
    static __device__ __forceinline__ Element apply(Element v) { return erf_of(v); }
};
struct Floor {
    static __device__ __forceinline__ float apply(float v) { return floorf(v); }
    static __device__ __forceinline__ double apply(double v) { return floor(v); }
};
struct Ceil {
    static __device__ __forceinline__ float apply(float v) { return ceilf(v); }
    static __device__ __forceinline__ double apply(double v) { return ceil(v); }
};
struct Round {
    static __device__ __forceinline__ float apply(float v) { return rintf(v); }
    static __device__ __forceinline__ double apply(double v) { return rint(v); }
};

// -- binary ----------------------------------------------------------------------------------------------------------

struct Add {
    template <class Element>
    static __device__ __forceinline__ Element apply(Element a, Element b) { return a + b; }
    static __device__ __forceinline__ long long apply(long long a, long long b) {
        return static_cast<unsigned long long>(a) + static_cast<unsigned long long>(b);
    }
};
struct Mul {
    template <class Element>
    static __device__ __forceinline__ Element apply(Element a, Element b) { return a * b; }
    static __device__ __forceinline__ long long apply(long long a, long long b) {
        return static_cast<unsigned long long>(a) * static_cast<unsigned long long>(b);
    }
};
struct Max {
    template <class Element>
    static __device__ __forceinline__ Element apply(Element a, Element b) { return b > a || b != b ? b : a; }
};
struct Min {
    template <class Element>
    static __device__ __forceinline__ Element apply(Element a, Element b) { return b < a || b != b ? b : a; }
};
struct Sub {
    template <class Element>
    static __device__ __forceinline__ Element apply(Element a, Element b) { return a - b; }
    static __device__ __forceinline__ long long apply(long long a, long long b) {
        return static_cast<unsigned long long>(a) - static_cast<unsigned long long>(b);
    }
};
struct Div {
    template <class Element>
    static __device__ __forceinline__ Element apply(Element a, Element b) { return quotient_of(a, b); }
    static __device__ __forceinline__ long long apply(long long a, long long b) { return int_quotient(a, b); }
};
struct TruncatedMod {
    template <class Element>
    static __device__ __forceinline__ Element apply(Element a, Element b) { return fmod_of(a, b); }
    static __device__ __forceinline__ long long apply(long long a, long long b) { return int_remainder(a, b); }
};
struct Mod {
    template <class Element>
    static __device__ __forceinline__ Element apply(Element a, Element b) {
        const Element remainder = fmod_of(a, b);
        return remainder != Element(0) && (remainder < Element(0)) != (b < Element(0)) ? remainder + b : remainder;
    }
    static __device__ __forceinline__ long long apply(long long a, long long b) {
        const long long remainder = int_remainder(a, b);
        return remainder != 0 && (remainder < 0) != (b < 0) ? remainder + b : remainder;
    }
};
struct Pow {
    template <class Element>
    static __device__ __forceinline__ Element apply(Element a, Element b) { return power_of(a, b); }
};
struct PReLU {
    template <class Element>
    static __device__ __forceinline__ Element apply(Element a, Element b) { return a >= Element(0) ? a : a * b; }
};
struct Mask {
    template <class Element>
    static __device__ __forceinline__ Element apply(Element a, Element b) { return b != Element(0) ? a : Element(0); }
};
struct Greater {
    template <class Element>
    static __device__ __forceinline__ Element apply(Element a, Element b) { return a > b ? Element(1) : Element(0); }
};
struct GreaterOrEqual {
    template <class Element>
    static __device__ __forceinline__ Element apply(Element a, Element b) { return a >= b ? Element(1) : Element(0); }
};
struct Equal {
    template <class Element>
    static __device__ __forceinline__ Element apply(Element a, Element b) { return a == b ? Element(1) : Element(0); }
};
// Swapped operands: the accumulator holds the second operand.
template <class Function>
struct Swapped {
    template <class Element>
    static __device__ __forceinline__ Element apply(Element b, Element a) { return Function::apply(a, b); }
};
