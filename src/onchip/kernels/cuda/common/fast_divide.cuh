// common/fast_divide.cuh: division by launch-time constants; a multiplication for 31-bit indices.
#pragma once
#include "common/dtype.cuh"

struct Divider {
    u32 size, magic, shift;  // n / size == n * magic >> 32 + shift for n < 2^31 (common/fast_divide.py)
};
__device__ __forceinline__ u32 quotient(u32 n, const Divider& by) {
    return by.size == 1 ? n : __umulhi(n, by.magic) >> by.shift;
}
__device__ __forceinline__ long long quotient(long long n, const Divider& by) { return n / by.size; }

// Index along the innermost axis: returns n % size; n becomes n / size.
template <class Index>
__device__ __forceinline__ u32 pop_index(Index& n, const Divider& by) {
    const Index divided = quotient(n, by);
    const u32 remainder = static_cast<u32>(n - divided * by.size);
    n = divided;
    return remainder;
}

// n / size as (2 n + 1) magic / 2^32 / 2, exact for n < 2^15, without a special case for size 1.
struct SmallDivider {
    u32 size, magic;  // magic: 2^32 / size, at most 2^32 - 1
};
__device__ __forceinline__ int quotient(int n, const SmallDivider& by) { return __umulhi(2 * n + 1, by.magic) / 2; }
