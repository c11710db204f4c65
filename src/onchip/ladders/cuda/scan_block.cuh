// scan_block.cuh: one block scans a row, 1024 values per step: the three kernels of the report, as device functions.
#pragma once

constexpr int LANES = 32;
constexpr int BLOCK = 1024;  // threads: 32 warps, so one warp can scan all warp totals

// Exclusive prefix sum of `value` over the lanes of a warp, by an up-sweep and a down-sweep (Blelloch scan).
// The last lane writes the sum over all lanes to *total.
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
        const int position = lane & (2 * d - 1);
        if (position == 2 * d - 1)
            value += other;  // right child: the parent's prefix plus the left child's sum
        else if (position == d - 1)
            value = other;  // left child: the parent's prefix
    }
    return value;
}

// Inclusive prefix sum of `value` over the lanes of a warp.
__device__ __forceinline__ float warp_reduction(float value) {
    const int lane = threadIdx.x % LANES;
#pragma unroll
    for (int d = 1; d < LANES; d *= 2) {
        const float left = __shfl_up_sync(~0u, value, d);
        if (lane >= d) value += left;
    }
    return value;
}

// y[i] = x[0] + ... + x[i], without x[i] if exclusive; x may alias y. Called by all BLOCK threads.
template <bool is_exclusive>
__device__ __forceinline__ void block_prefix_sum(const float* x, float* y, long long N) {
    __shared__ float totals[LANES], first;  // sum of each warp; sum of all previous steps
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    if (threadIdx.x == 0) first = 0.0f;
    for (long long start = 0; start < N; start += BLOCK) {
        const long long i = start + threadIdx.x;
        const float value = i < N ? x[i] : 0.0f;
        const float lane_prefix = warp_prefix_sum(value, totals + warp);
        __syncthreads();
        if (warp == 0) totals[lane] = warp_reduction(totals[lane]);
        __syncthreads();
        const float warp_prefix = (warp > 0 ? totals[warp - 1] : 0.0f) + first;
        const float sum = lane_prefix + value + warp_prefix;
        if (i < N) y[i] = is_exclusive ? lane_prefix + warp_prefix : sum;
        __syncthreads();  // every thread has read `first` and the totals
        if (threadIdx.x == BLOCK - 1) first = sum;
    }
}
