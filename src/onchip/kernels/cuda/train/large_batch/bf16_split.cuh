// train/large_batch/bf16_split.cuh: floats as sums of SPLITS bf16 terms: three hold all 24 bits, two hold 16.
#pragma once

#include "train/large_batch/epilogue.cuh"

// Upper halves of two floats: exact bf16 for values from uint8.
__device__ __forceinline__ u32 upper_halves(float first, float second) {
    return __byte_perm(__float_as_uint(first), __float_as_uint(second), 0x7632u);
}

// Splits floats into SPLITS sets of packed bf16 pairs. The last term rounds; others truncate, so remainders are exact.
template <int SPLITS, int COUNT>
__device__ __forceinline__ void split_floats(u32 (&packed)[SPLITS][COUNT / 2], float (&v)[COUNT]) {
#pragma unroll
    for (int term = 0; term < SPLITS; ++term) {
#pragma unroll
        for (int i = 0; i < COUNT / 2; ++i)
            packed[term][i] =
                term == SPLITS - 1 ? pack<bf16>(v[2 * i], v[2 * i + 1]) : upper_halves(v[2 * i], v[2 * i + 1]);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) v[i] -= __uint_as_float(__float_as_uint(v[i]) & 0xffff0000u);
    }
}

// Splits 8 floats into SPLITS 16 B vectors.
template <int SPLITS>
__device__ __forceinline__ void split_eight(uint4 (&splits)[SPLITS], float (&v)[8]) {
    u32 packed[SPLITS][4];
    split_floats(packed, v);
#pragma unroll
    for (int term = 0; term < SPLITS; ++term)
        splits[term] = {packed[term][0], packed[term][1], packed[term][2], packed[term][3]};
}

// c += a b over 16 K elements, in 16 x 8 tiles: products of terms, smallest first, without those below fp32 precision.
template <int A_SPLITS, int SPLITS, int MT, int NT>
__device__ __forceinline__ void mma_splits(float (&c)[MT][NT][4], const u32 (&a)[MT][A_SPLITS][4],
                                           const u32 (&b)[NT][SPLITS][2]) {
#pragma unroll
    for (int terms = SPLITS - 1; terms >= 0; --terms)
#pragma unroll
        for (int i = 0; i < A_SPLITS && i <= terms; ++i)
#pragma unroll
            for (int t = 0; t < MT * NT; ++t)
                mma<Bf16>(c[t / NT][t % NT], a[t / NT][i], b[t % NT][terms - i][0], b[t % NT][terms - i][1]);
}
