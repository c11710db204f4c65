// common/fp8.cuh: numbers of 8 bits, of 4 significant ones each: 448 is the largest, and there is no infinity. sm_89 up.
//
// A table of them has a factor for each channel, the power of two that brings its largest number next to LARGEST; what is
// added up is without it.
#pragma once
#include "common/dtype.cuh"

struct e4m3 {
    unsigned char bits;
};

constexpr float LARGEST = 448.0f, LEAST = 1e-32f;  // a channel whose largest number is not above LEAST is zeros

// Two numbers as float16: both exact.
__device__ __forceinline__ u32 two_halves(unsigned short pair) {
    u32 halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
    return halves;
}
// Two numbers rounded to the nearest, the first in the lower half. What is too large, or infinite, is LARGEST.
__device__ __forceinline__ unsigned short pack_e4m3(float first, float second) {
    unsigned short pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
    return pair;
}

__device__ __forceinline__ u32 add_halves(u32 a, u32 b) {
    u32 sum;
    asm("add.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
    return sum;
}
__device__ __forceinline__ u32 larger_halves(u32 a, u32 b) {
    u32 found;
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(found) : "r"(a), "r"(b));
    return found;
}
