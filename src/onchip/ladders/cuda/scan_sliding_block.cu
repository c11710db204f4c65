// scan_sliding_block.cu: prefix sum by one block of 1024 threads that slides over the row: the report's kernel.
//
// Idea    A step scans 1024 values, one per thread. Each warp scans its 32 by an up-sweep and a down-sweep of shuffles
//         and writes its total to shared memory. The first warp scans the 32 totals. Each thread adds the total of the
//         previous warps and `first`, the sum of all previous steps; the last thread updates `first`.
// Floor   8*N B, 28.0 us at N = 2^24, as on every rung. But the block waits for its 4 KB of x, and stores before it
//         loads more: 16 384 sequential steps, each a memory latency (about 0.6 us) and three barriers. At most 4 KB
//         are in flight, on 1 of 132 SMs. The sweeps take 10 shuffles per thread; 31 warps wait while the first one
//         scans the totals with 5 more.
// Layout  x, y (N,) float32.
// Shared  (32 + 1)*4 = 132 B
// Limits  Any N (values past N are zero and not written); one block; fp32; sm_80 up.
#include "scan_block.cuh"

__global__ void __launch_bounds__(BLOCK)
sliding_block(const float* __restrict__ x, float* __restrict__ y, long long N) {
    block_prefix_sum<false>(x, y, N);
}
