// scan_two_level.cu: prefix sum in three launches: scan each tile, scan the tile totals, add each tile's prefix.
//
// Idea    scan_tiles: each block scans 4096 values, and writes their prefix sums and the tile's total.
//         scan_totals: one block scans the totals exclusively (scan_block.cuh).
//         add_prefixes: each block adds its tile's prefix to its 4096 sums.
//         All SMs work, and the reduction order is fixed.
// Floor   x in, sums out, sums in, y out: four passes, 16*N B where 8*N would do. N = 2^24 at 4.8 TB/s: 268 MB,
//         55.9 us of memory time against a floor of 28.0 us; 3*N additions. The 4096 totals are only 16 KB, in and out,
//         but cost four steps of one block, with every other SM idle, and two more launches.
// Layout  x, y (N,) float32, 16 B aligned; totals (ceil(N / 4096),) float32.
// Shared  scan_tiles 32 B, scan_totals 132 B
// Limits  Any N (values past N are zero and not written); fp32; sm_80 up.
#include "scan_tile.cuh"

__global__ void __launch_bounds__(THREADS)
scan_tiles(const float* __restrict__ x, float* __restrict__ totals, float* __restrict__ y, long long N) {
    __shared__ float warp_totals[WARPS];
    const long long first = 1LL * TILE * blockIdx.x;
    Quad tile[LINES];
    load_tile(x, tile, first, N);
    const float total = scan_tile(tile, warp_totals);
    store_tile(y, tile, 0.0f, first, N);
    if (threadIdx.x == 0) totals[blockIdx.x] = total;
}

__global__ void __launch_bounds__(BLOCK) scan_totals(float* totals, long long tiles) {
    block_prefix_sum<true>(totals, totals, tiles);
}

__global__ void __launch_bounds__(THREADS)
add_prefixes(const float* __restrict__ totals, float* __restrict__ y, long long N) {
    const long long first = 1LL * TILE * blockIdx.x;
    Quad tile[LINES];
    load_tile(y, tile, first, N);
    store_tile(y, tile, totals[blockIdx.x], first, N);
}
