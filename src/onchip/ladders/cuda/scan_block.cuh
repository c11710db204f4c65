// scan_block.cuh: one block slides along a row, 1024 numbers at a time: the three kernels of the report, as functions.
#pragma once

constexpr int LANES = 32;
constexpr int BLOCK = 1024;  // threads; as many warps as a warp has lanes

// The sum of `value` over the lanes before this one, by an up-sweep and a down-sweep: a tree over the lanes, first
// towards its root, then back to its leaves. *total: the sum over all lanes, written by the last one.
__device__ __forceinline__ float warp_prefix_sum(float value, float* total) {
    const int lane = threadIdx.x % LANES;
#pragma unroll
    for (int d = 1; d < LANES; d *= 2) {
        const float left = __shfl_up_sync(~0u, value, d);
        if ((lane & (2 * d - 1)) == 2 * d - 1) value += left;
    }
    if (lane == LANES - 1) {
        *total = value;
        value = 0.0f;
    }
#pragma unroll
    for (int d = LANES / 2; d > 0; d /= 2) {
        const float other = __shfl_xor_sync(~0u, value, d);
        const int place = lane & (2 * d - 1);
        if (place == 2 * d - 1)
            value += other;  // the right child: what its parent got, and the sum of the left one
        else if (place == d - 1)
            value = other;  // the left child: what its parent got
    }
    return value;
}

// The sum of `value` over this lane and those before it.
__device__ __forceinline__ float warp_reduction(float value) {
    const int lane = threadIdx.x % LANES;
#pragma unroll
    for (int d = 1; d < LANES; d *= 2) {
        const float left = __shfl_up_sync(~0u, value, d);
        if (lane >= d) value += left;
    }
    return value;
}

// y[i] = x[0] + ... + x[i], without x[i] if exclusive; x may be y. All BLOCK threads of a block call it.
template <bool is_exclusive>
__device__ __forceinline__ void block_prefix_sum(const float* x, float* y, long long N) {
    __shared__ float totals[LANES], first;  // of the warps; of all steps before this one
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    if (threadIdx.x == 0) first = 0.0f;
    for (long long start = 0; start < N; start += BLOCK) {
        const long long i = start + threadIdx.x;
        const float value = i < N ? x[i] : 0.0f;
        const float before = warp_prefix_sum(value, totals + warp);
        __syncthreads();
        if (warp == 0) totals[lane] = warp_reduction(totals[lane]);
        __syncthreads();
        const float others = (warp > 0 ? totals[warp - 1] : 0.0f) + first;
        const float sum = before + value + others;
        if (i < N) y[i] = is_exclusive ? before + others : sum;
        __syncthreads();  // all have read `first` and the totals
        if (threadIdx.x == BLOCK - 1) first = sum;
    }
}
