// conv/warp_mma.cuh: what conv/first_layer.cu and conv/last_layer/mma.cu share: fragments of weights in shared memory, and sums of a warp.
//
// Weights  (PARTS, steps, tiles of 8 columns, 32 lanes, 2 words): what a lane of mma.sync takes (mma/tensor_core.cuh) lies
//          together, so a warp reads 256 bytes in a row. Of fp32 the upper parts come first, then the lower ones.
#pragma once

#include "common/epilogue.cuh"
#include "mma/tensor_core.cuh"

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int PART = 32;  // terms of a sum of float32

template <class P>
struct MultipliedAs {
    using type = P;
};
template <>
struct MultipliedAs<Fp32> {
    using type = Tf32;
};

// A number as the tensor cores take it, with the next one where two make a word.
template <class P, class X>
__device__ __forceinline__ u32 word_of(X first, X second) {
    if constexpr (P::PER_WORD == 2) return join<typename P::Number>(first, second);
    else return P::word(to_float(first));
}

// What a lane has of a step of 16 rows; of float32 in two parts.
template <class P>
struct Step {
    u32 a[4], low[is_same<P, Fp32> ? 4 : 1];

    // What word_of made: of fp32 a number as it is.
    __device__ __forceinline__ void take(int i, u32 word) {
        if constexpr (is_same<P, Fp32>) {
            a[i] = Tf32::word(__uint_as_float(word));
            low[i] = Tf32::word(__uint_as_float(word) - __uint_as_float(a[i]));
        } else {
            a[i] = word;
        }
    }
};

// The sums of 16 rows and 8 NT columns. Tensor cores cut off what float32 does not keep: sums of fp32 are added to a total
// every PART terms.
template <class P, int NT>
struct Sums {
    static constexpr bool IS_SPLIT = is_same<P, Fp32>;
    float sums[NT][4] = {}, totals[IS_SPLIT ? NT : 1][4] = {};

    // w  the lane's words of the step and the first columns; the lower parts are `lower` pairs behind
    __device__ __forceinline__ void add(const Step<P>& x, const uint2* w, int lower) {
#pragma unroll
        for (int j = 0; j < NT; ++j) add(j, x, w[32 * j], IS_SPLIT ? w[32 * j + lower] : uint2{});
    }
    // The same of 8 columns: their words, and the lower parts.
    __device__ __forceinline__ void add(int j, const Step<P>& x, uint2 upper, uint2 rest) {
        using Multiplied = typename MultipliedAs<P>::type;
        if constexpr (IS_SPLIT) {
            mma<Multiplied>(sums[j], x.low, upper.x, upper.y);
            mma<Multiplied>(sums[j], x.a, rest.x, rest.y);
        }
        mma<Multiplied>(sums[j], x.a, upper.x, upper.y);
    }
    // Behind a step.
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
    __device__ __forceinline__ float (&made())[NT][4] {
        if constexpr (IS_SPLIT) return totals;
        else return sums;
    }
};

// All threads bring so many pieces of 16 B.
__device__ __forceinline__ void copy_pieces(uint4* to, const uint4* from, int count) {
    for (int i = threadIdx.x; i < count; i += THREADS) to[i] = from[i];
}

// Asks for what lies at `at`, so that it is in the L2 cache when it is read.
constexpr int LINE_BYTES = 128;  // that it brings
__device__ __forceinline__ void fetch_line(const char* at) { asm volatile("prefetch.global.L2 [%0];" :: "l"(at)); }
