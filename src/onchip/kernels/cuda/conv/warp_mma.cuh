// conv/warp_mma.cuh: weight fragments and warp accumulators of conv/first_layer.cu and conv/last_layer/mma.cu.
//
// Weights  (splits, steps, tiles of 8 columns, 32 lanes, 2 words): mma.sync B fragments (mma/tensor_core.cuh) in lane
//          order, so a warp reads 256 contiguous bytes. fp32 (3xTF32): all high halves first, then the low ones.
#pragma once

#include "common/epilogue.cuh"
#include "mma/tensor_core.cuh"

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int PART = 32;  // K elements per partial sum in fp32

template <class P>
struct MmaPrecision {
    using type = P;
};
template <>
struct MmaPrecision<Fp32> {
    using type = Tf32;
};

// A 32-bit operand register: one element, or two packed 16-bit elements.
template <class P, class X>
__device__ __forceinline__ u32 operand_word(X first, X second) {
    if constexpr (P::PER_WORD == 2) return join<typename P::Element>(first, second);
    else return P::word(to_float(first));
}

// A lane's A fragment of 16 rows and one step; fp32 split into high and low.
template <class P>
struct Step {
    u32 a[4], low[is_same<P, Fp32> ? 4 : 1];

    // word  from operand_word; fp32 is split here.
    __device__ __forceinline__ void set(int i, u32 word) {
        if constexpr (is_same<P, Fp32>) {
            a[i] = Tf32::word(__uint_as_float(word));
            low[i] = Tf32::word(__uint_as_float(word) - __uint_as_float(a[i]));
        } else {
            a[i] = word;
        }
    }
};

// Accumulators of 16 rows x 8 NT columns. Tensor cores truncate, so fp32 sums are added to a total every PART elements.
template <class P, int NT>
struct Sums {
    static constexpr bool IS_SPLIT = is_same<P, Fp32>;
    float sums[NT][4] = {}, totals[IS_SPLIT ? NT : 1][4] = {};

    // w  the lane's registers of the step and the first columns; the low halves follow `low_offset` pairs later
    __device__ __forceinline__ void add(const Step<P>& x, const uint2* w, int low_offset) {
#pragma unroll
        for (int j = 0; j < NT; ++j) add(j, x, w[32 * j], IS_SPLIT ? w[32 * j + low_offset] : uint2{});
    }
    // The same for 8 columns j: their high and low registers.
    __device__ __forceinline__ void add(int j, const Step<P>& x, uint2 upper, uint2 lower) {
        using Precision = typename MmaPrecision<P>::type;
        if constexpr (IS_SPLIT) {
            mma<Precision>(sums[j], x.low, upper.x, upper.y);
            mma<Precision>(sums[j], x.a, lower.x, lower.y);
        }
        mma<Precision>(sums[j], x.a, upper.x, upper.y);
    }
    // Called after each step.
    __device__ __forceinline__ void end_step(int step, bool is_last) {
        if constexpr (IS_SPLIT) {
            if ((step + 1) % (PART / P::STEP) != 0 && !is_last) return;
#pragma unroll
            for (int i = 0; i < 4 * NT; ++i) {
                totals[i / 4][i % 4] += sums[i / 4][i % 4];
                sums[i / 4][i % 4] = 0.0f;
            }
        }
    }
    __device__ __forceinline__ float (&result())[NT][4] {
        if constexpr (IS_SPLIT) return totals;
        else return sums;
    }
};

// Block-wide copy of `count` 16 B vectors.
__device__ __forceinline__ void copy_vectors(uint4* to, const uint4* from, int count) {
    for (int i = threadIdx.x; i < count; i += THREADS) to[i] = from[i];
}

// Prefetches LINE_BYTES into L2.
constexpr int LINE_BYTES = 128;
__device__ __forceinline__ void prefetch_line(const char* at) { asm volatile("prefetch.global.L2 [%0];" :: "l"(at)); }
