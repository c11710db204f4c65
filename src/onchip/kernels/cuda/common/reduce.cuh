// common/reduce.cuh: warp and block reductions: max, min, sum.
//
// Order   A shuffle tree over lanes, then warp by warp; it depends only on which thread holds which value.
#pragma once
#include "common/accumulator.cuh"

// nothing  the identity element
struct Largest {
    template <class W>
    static __device__ __forceinline__ W join(W a, W b) {
        return larger(a, b);
    }
    template <class W>
    static __device__ __forceinline__ W identity() {
        return -__int_as_float(0x7f800000);
    }
};
struct Smallest {
    template <class W>
    static __device__ __forceinline__ W join(W a, W b) {
        return -larger(-a, -b);
    }
    template <class W>
    static __device__ __forceinline__ W identity() {
        return __int_as_float(0x7f800000);
    }
};
struct Sum {
    template <class W>
    static __device__ __forceinline__ W join(W a, W b) {
        return a + b;
    }
    template <class W>
    static __device__ __forceinline__ W identity() {
        return 0;
    }
};

// Reduces over LANES threads that share a row: lanes of a warp, or a whole block. All of them get the result.
template <class Op, int LANES, class W>
__device__ __forceinline__ W reduce_lanes(W v) {
#pragma unroll
    for (int mask = (LANES < 32 ? LANES : 32) / 2; mask > 0; mask /= 2) v = Op::join(v, __shfl_xor_sync(~0u, v, mask));
    if constexpr (LANES > 32) {
        __shared__ W warp_values[LANES / 32];
        __syncthreads();  // all reads of the previous reduction are done
        if (threadIdx.x % 32 == 0) warp_values[threadIdx.x / 32] = v;
        __syncthreads();
        v = warp_values[0];
#pragma unroll
        for (int warp = 1; warp < LANES / 32; ++warp) v = Op::join(v, warp_values[warp]);
    }
    return v;
}
