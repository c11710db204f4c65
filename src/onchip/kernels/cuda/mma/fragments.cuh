// mma/fragments.cuh: fragments that lanes make of numbers they read themselves, for products of two values: what is float32
// is split on both sides.
#pragma once

#include "mma/tensor_core.cuh"

constexpr int PART_STEPS = 4;  // of a sum of float32

template <class P>
struct Multiplied {
    using type = P;
};
template <>
struct Multiplied<Fp32> {
    using type = Tf32;
};

// Words of fragments: numbers as the tensor cores take them, in PARTS where float32 is split.
template <class P, int N>
struct Words {
    static constexpr int PARTS = is_same<P, Fp32> ? 2 : 1;
    u32 of[PARTS][N];

    // Word i: one number, or two.
    __device__ __forceinline__ void set(int i, float first, float second = 0.0f) {
        if constexpr (P::PER_WORD == 2) {
            of[0][i] = pack<typename P::Number>(first, second);
        } else {
            of[0][i] = Tf32::word(first);
            if constexpr (PARTS == 2) of[1][i] = Tf32::word(first - __uint_as_float(of[0][i]));
        }
    }
};

template <class P>
__device__ __forceinline__ void multiply(float (&c)[4], const Words<P, 4>& a, const Words<P, 2>& b) {
    using M = typename Multiplied<P>::type;
    if constexpr (is_same<P, Fp32>) {
        mma<M>(c, a.of[1], b.of[0][0], b.of[0][1]);
        mma<M>(c, a.of[0], b.of[1][0], b.of[1][1]);
    }
    mma<M>(c, a.of[0], b.of[0][0], b.of[0][1]);
}

// Sums of float32 begin anew every PART_STEPS steps: the tensor cores cut off what they do not keep.
template <class P>
__device__ __forceinline__ void close_part(float (&total)[4], float (&c)[4], int step, int steps) {
    if ((is_same<P, Fp32> && (step + 1) % PART_STEPS == 0) || step + 1 == steps) {
#pragma unroll
        for (int i = 0; i < 4; ++i) total[i] += c[i], c[i] = 0.0f;
    }
}
