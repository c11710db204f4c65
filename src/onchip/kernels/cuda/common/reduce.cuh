// common/reduce.cuh: the largest, the smallest, or the sum, of numbers that the threads of a warp, or of a block, hold.
//
// Order   Lane by lane in a tree, then warp by warp: which thread holds what decides it, and nothing else.
#pragma once
#include "common/accumulator.cuh"

// nothing  before the first number
struct Largest {
    template <class W>
    static __device__ __forceinline__ W join(W a, W b) {
        return larger(a, b);
    }
    template <class W>
    static __device__ __forceinline__ W nothing() {
        return -__int_as_float(0x7f800000);
    }
};
struct Smallest {
    template <class W>
    static __device__ __forceinline__ W join(W a, W b) {
        return -larger(-a, -b);
    }
    template <class W>
    static __device__ __forceinline__ W nothing() {
        return __int_as_float(0x7f800000);
    }
};
struct Sum {
    template <class W>
    static __device__ __forceinline__ W join(W a, W b) {
        return a + b;
    }
    template <class W>
    static __device__ __forceinline__ W nothing() {
        return 0;
    }
};

// Of all threads that share a row, LANES of a warp or the THREADS of a block. Every one of them gets it.
template <class Op, int LANES, class W>
__device__ __forceinline__ W reduce_lanes(W v) {
#pragma unroll
    for (int mask = (LANES < 32 ? LANES : 32) / 2; mask > 0; mask /= 2) v = Op::join(v, __shfl_xor_sync(~0u, v, mask));
    if constexpr (LANES > 32) {
        __shared__ W of_warps[LANES / 32];
        __syncthreads();  // nobody still reads what the last one left
        if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = v;
        __syncthreads();
        v = of_warps[0];
#pragma unroll
        for (int warp = 1; warp < LANES / 32; ++warp) v = Op::join(v, of_warps[warp]);
    }
    return v;
}
