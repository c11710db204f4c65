// common/fp8.cuh: fp8 (e4m3): 4 significant bits, largest finite value 448, no infinity. sm_89 up.
//
// A table has one power-of-two scale per channel, which scales the channel's largest value close to LARGEST. Kernels
// sum the stored values and apply the scale once at the end.
#pragma once
#include "common/dtype.cuh"

struct e4m3 {
    unsigned char bits;
};

constexpr float LARGEST = 448.0f, LEAST = 1e-32f;  // a channel whose largest value is at most LEAST is stored as zeros

// Two e4m3 values as float16, exactly.
__device__ __forceinline__ u32 two_halves(unsigned short pair) {
    u32 halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
    return halves;
}
// Two values rounded to nearest, the first in the lower half. Overflow and infinity saturate to LARGEST.
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
    u32 result;
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}
