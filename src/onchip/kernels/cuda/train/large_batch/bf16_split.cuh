// train/large_batch/bf16_split.cuh: floats as sums of numbers of bf16.
//
// Parts   A float is the sum of PARTS numbers of bf16: three hold all of its 24 bits, two 16 of them. They have the range
//         of a float, so no scale goes with them.
#pragma once

#include "train/large_batch/epilogue.cuh"

// The upper halves of two floats: of bytes, all that is not zero.
__device__ __forceinline__ u32 upper_halves(float first, float second) {
    return __byte_perm(__float_as_uint(first), __float_as_uint(second), 0x7632u);
}

// Floats as PARTS times words of two numbers of bf16: all but the last are cut, so what is left is exact; the last is
// rounded.
template <int PARTS, int COUNT>
__device__ __forceinline__ void split_numbers(u32 (&words)[PARTS][COUNT / 2], float (&v)[COUNT]) {
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
#pragma unroll
        for (int i = 0; i < COUNT / 2; ++i)
            words[part][i] =
                part == PARTS - 1 ? pack<bf16>(v[2 * i], v[2 * i + 1]) : upper_halves(v[2 * i], v[2 * i + 1]);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) v[i] -= __uint_as_float(__float_as_uint(v[i]) & 0xffff0000u);
    }
}

// 8 floats as PARTS pieces.
template <int PARTS>
__device__ __forceinline__ void split_eight(uint4 (&parts)[PARTS], float (&v)[8]) {
    u32 words[PARTS][4];
    split_numbers(words, v);
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
        parts[part] = {words[part][0], words[part][1], words[part][2], words[part][3]};
}

// c += a b of 16 k's, 16 rows by 8 columns each: products of parts, the lowest first; none below what a float has.
template <int A_PARTS, int PARTS, int MT, int NT>
__device__ __forceinline__ void add_products(float (&c)[MT][NT][4], const u32 (&a)[MT][A_PARTS][4],
                                             const u32 (&b)[NT][PARTS][2]) {
#pragma unroll
    for (int both = PARTS - 1; both >= 0; --both)
#pragma unroll
        for (int i = 0; i < A_PARTS && i <= both; ++i)
#pragma unroll
            for (int t = 0; t < MT * NT; ++t)
                mma<Bf16>(c[t / NT][t % NT], a[t / NT][i], b[t % NT][both - i][0], b[t % NT][both - i][1]);
}
