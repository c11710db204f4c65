// train/large_batch/bf16_split.cuh: floats as sums of PARTS bf16 terms: three hold all 24 bits, two 16 of them. bf16
// has the exponent range of a float, so no scale is needed.
#pragma once

#include "train/large_batch/epilogue.cuh"

// Upper halves of two floats: exact bf16 for values from uint8.
__device__ __forceinline__ u32 upper_halves(float first, float second) {
    return __byte_perm(__float_as_uint(first), __float_as_uint(second), 0x7632u);
}

// Splits floats into PARTS sets of packed bf16 pairs. All terms but the last truncate, so the remainder is exact; the
// last one rounds.
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

// Splits 8 floats into PARTS 16 B chunks.
template <int PARTS>
__device__ __forceinline__ void split_eight(uint4 (&parts)[PARTS], float (&v)[8]) {
    u32 words[PARTS][4];
    split_numbers(words, v);
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
        parts[part] = {words[part][0], words[part][1], words[part][2], words[part][3]};
}

// c += a b over 16 K elements, in 16 x 8 tiles: term products, smallest first; those below fp32 precision are skipped.
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
