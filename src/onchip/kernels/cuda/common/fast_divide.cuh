// common/fast_divide.cuh: division by numbers that are known when a kernel is launched: a multiplication, where 31 bits count all.
#pragma once
#include "common/dtype.cuh"

struct Divider {
    u32 size, magic, shift;  // n / size is n * magic >> 32 + shift, for n < 2^31 (common/fast_divide.py)
};
__device__ __forceinline__ u32 quotient(u32 n, const Divider& by) {
    return by.size == 1 ? n : __umulhi(n, by.magic) >> by.shift;
}
__device__ __forceinline__ long long quotient(long long n, const Divider& by) { return n / by.size; }

// What is left of n, which becomes the quotient.
template <class Index>
__device__ __forceinline__ u32 take_rest(Index& n, const Divider& by) {
    const Index above = quotient(n, by);
    const u32 rest = static_cast<u32>(n - above * by.size);
    n = above;
    return rest;
}

// Numbers in parts of `size`: number n is in part (2 n + 1) magic / 2^32 / 2, exactly for n < 2^15, and parts of one
// number are no case by themselves.
struct Parts {
    u32 size, magic;  // magic: 2^32 / size, at most 2^32 - 1
};
__device__ __forceinline__ int part_of(int n, const Parts& parts) { return __umulhi(2 * n + 1, parts.magic) / 2; }
