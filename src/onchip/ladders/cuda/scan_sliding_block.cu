// scan_sliding_block.cu: one block of 1024 threads slides along the row; the report's answer.
//
// Idea    A step takes 1024 numbers, one a thread. Each warp scans its 32 by an up-sweep and a down-sweep over shuffles
//         and leaves its total in shared memory; the first warp makes running sums of the 32 totals; each thread adds
//         what its warp has before it, and `first`, what all steps before came to. The last thread updates `first`.
// Floor   8*N B and 28.0 us at N = 2^24, as everyone's. But the block waits for its 4 KB of x before it does anything,
//         and writes before it asks for more: 16 384 steps one after the other, each as long as a trip to memory
//         (about 0.6 us) and three barriers. No more than 4 KB are on their way, on 1 of 132 multiprocessors.
//         10 shuffles a thread sweep up and down; 31 warps wait while the first makes its running sums with 5 more.
// Layout  x, y (N,) float32.
// Shared  (32 + 1)*4 = 132 B
// Limits  Any N (numbers past the end are zeros and not written); one block; fp32; sm_80 up.
#include "scan_block.cuh"

__global__ void __launch_bounds__(BLOCK)
sliding_block(const float* __restrict__ x, float* __restrict__ y, long long N) {
    block_prefix_sum<false>(x, y, N);
}
