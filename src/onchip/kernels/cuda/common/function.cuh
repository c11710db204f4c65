// common/function.cuh: unary and binary functions of kernels/pointwise.py that only elementwise/pointwise.cu uses.
//
// float or double, accurate to a few ulp, as CUDA's own functions are. NaNs propagate. Functions of more than about
// twenty instructions, and all in float64, are called: inlined, a thread would have sixteen copies of each.
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
__device__ __noinline__ float rest_of(float a, float b) { return fmodf(a, b); }
__device__ __noinline__ double rest_of(double a, double b) { return fmod(a, b); }
__device__ __noinline__ float root_of(float v) { return sqrtf(v); }
__device__ __noinline__ double root_of(double v) { return sqrt(v); }
__device__ __noinline__ float general_power(float a, float b) { return powf(a, b); }
__device__ __noinline__ double general_power(double a, double b) { return pow(a, b); }
// sqrt is exact and faster than pow. As pow does, it maps -0 to 0 and -infinity to infinity.
template <class Number>
__device__ __forceinline__ Number power_of(Number a, Number b) {
    if (size_of(b) != Number(0.5)) return general_power(a, b);
    const Number root = root_of(a + a == a ? size_of(a) : a);
    return b > Number(0) ? root : quotient_of(Number(1), root);
}
// Integer division, towards 0. Division by 0 returns 0 and elementwise/pointwise.cu reports it to the host. The most
// negative value has no negation: divided by -1 it stays as it is.
__device__ __noinline__ long long whole_quotient(long long a, long long b) {
    if (b == -1) return 0ull - static_cast<unsigned long long>(a);
    return b == 0 ? 0 : a / b;
}
__device__ __noinline__ long long whole_rest(long long a, long long b) { return b == 0 || b == -1 ? 0 : a % b; }

// -- unary -----------------------------------------------------------------------------------------------------------

struct Abs {
    template <class Number>
    static __device__ __forceinline__ Number apply(Number v) { return size_of(v); }
};
struct Sign {
    template <class Number>
    static __device__ __forceinline__ Number apply(Number v) {
        const Number beside = v == Number(0) ? Number(0) : v;  // v is 0 or NaN
        return v > Number(0) ? Number(1) : v < Number(0) ? Number(-1) : beside;
    }
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
struct Atan {
    template <class Number>
    static __device__ __forceinline__ Number apply(Number v) { return atan_of(v); }
};
struct Erf {
    template <class Number>
    static __device__ __forceinline__ Number apply(Number v) { return erf_of(v); }
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
    static __device__ __forceinline__ long long apply(long long a, long long b) { return whole_quotient(a, b); }
};
struct TruncatedMod {
    template <class Number>
    static __device__ __forceinline__ Number apply(Number a, Number b) { return rest_of(a, b); }
    static __device__ __forceinline__ long long apply(long long a, long long b) { return whole_rest(a, b); }
};
struct Mod {
    template <class Number>
    static __device__ __forceinline__ Number apply(Number a, Number b) {
        const Number rest = rest_of(a, b);
        return rest != Number(0) && (rest < Number(0)) != (b < Number(0)) ? rest + b : rest;
    }
    static __device__ __forceinline__ long long apply(long long a, long long b) {
        const long long rest = whole_rest(a, b);
        return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
    }
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
struct Greater {
    template <class Number>
    static __device__ __forceinline__ Number apply(Number a, Number b) { return a > b ? Number(1) : Number(0); }
};
struct GreaterOrEqual {
    template <class Number>
    static __device__ __forceinline__ Number apply(Number a, Number b) { return a >= b ? Number(1) : Number(0); }
};
struct Equal {
    template <class Number>
    static __device__ __forceinline__ Number apply(Number a, Number b) { return a == b ? Number(1) : Number(0); }
};
// Swapped operands: the accumulator holds the second operand.
template <class Function>
struct Turned {
    template <class Number>
    static __device__ __forceinline__ Number apply(Number b, Number a) { return Function::apply(a, b); }
};
