// backprop_error.cu: the error by warp and block reductions.
//
// Idea    The grid strides over the error matrix; each warp reduces its threads' sums by shuffles, the first warp
//         reduces the warps' sums, and one thread per block adds the result to the total by atomicAdd.
// Floor   600,000 errors, 2.4 MB: in the L2 cache, where the last layer wrote them.
// Order   A hundred atomic adds in any order: non-deterministic. In double, so no digit of a float changes.
// Shared  64 B
// Limits  The total is zero before; sm_80 up.
#include "backprop.cuh"

constexpr int WARPS = THREADS / LANES;

__device__ __forceinline__ double reduce_warp(double v) {
#pragma unroll
    for (int mask = LANES / 2; mask > 0; mask /= 2) v += __shfl_xor_sync(~0u, v, mask);
    return v;
}

// Of the first warp's threads, each gets the sum of the block.
__device__ __forceinline__ double reduce_block(double v) {
    __shared__ double sums[WARPS];
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    v = reduce_warp(v);
    if (lane == 0) sums[warp] = v;
    __syncthreads();
    return reduce_warp(warp == 0 && lane < WARPS ? sums[lane] : 0.0);
}

__global__ void __launch_bounds__(THREADS) reduce_error(const float* error, double* losses, int count) {
    double sum = 0.0;
    for (int i = THREADS * blockIdx.x + threadIdx.x; i < count; i += THREADS * gridDim.x) sum += error[i];
    sum = reduce_block(sum);
    if (threadIdx.x == 0) atomicAdd(losses, sum);
}
