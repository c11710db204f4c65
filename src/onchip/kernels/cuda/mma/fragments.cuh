// mma/fragments.cuh: mma.sync fragments built from values that lanes load themselves, for GEMMs of two activations.
// In fp32 both operands are split (3xTF32).
#pragma once

#include "mma/tensor_core.cuh"

constexpr int PART_STEPS = 4;  // k steps per fp32 partial sum

template <class P>
struct FragmentPrecision {
    using type = P;
};
template <>
struct FragmentPrecision<Fp32> {
    using type = Tf32;
};

// Fragment registers; SPLITS is 2 for 3xTF32: the upper tf32, then the lower.
template <class P, int N>
struct Fragment {
    static constexpr int SPLITS = is_same<P, Fp32> ? 2 : 1;
    u32 splits[SPLITS][N];

    // Sets register i from one element, or two in 16 bits.
    __device__ __forceinline__ void set(int i, float first, float second = 0.0f) {
        if constexpr (P::PER_WORD == 2) {
            splits[0][i] = pack<typename P::Element>(first, second);
        } else {
            splits[0][i] = Tf32::word(first);
            if constexpr (SPLITS == 2) splits[1][i] = Tf32::word(first - __uint_as_float(splits[0][i]));
        }
    }
};

template <class P>
__device__ __forceinline__ void multiply(float (&c)[4], const Fragment<P, 4>& a, const Fragment<P, 2>& b) {
    using M = typename FragmentPrecision<P>::type;
    if constexpr (is_same<P, Fp32>) {
        mma<M>(c, a.splits[1], b.splits[0][0], b.splits[0][1]);
        mma<M>(c, a.splits[0], b.splits[1][0], b.splits[1][1]);
    }
    mma<M>(c, a.splits[0], b.splits[0][0], b.splits[0][1]);
}

// fp32 partial sums move to the total every PART_STEPS steps: the tensor cores truncate when they accumulate.
template <class P>
__device__ __forceinline__ void end_partial_sum(float (&total)[4], float (&c)[4], int step, int steps) {
    if ((is_same<P, Fp32> && (step + 1) % PART_STEPS == 0) || step + 1 == steps) {
#pragma unroll
        for (int i = 0; i < 4; ++i) total[i] += c[i], c[i] = 0.0f;
    }
}
