// scan_two_level.cu: every block scans a tile, one block scans the tiles' totals, every block adds what came before.
//
// Idea    scan_tiles: a block scans 4096 numbers by itself and writes the running sums and, apart, the tile's total.
//         scan_totals: one block makes of the totals what comes before each tile (scan_block.cuh slides along them).
//         add_before: every block adds what comes before its tile to its 4096 sums. All multiprocessors work, and the
//         order of the additions is fixed.
// Floor   x in, sums out, sums in, y out: four passes, 16*N B, where 8*N would do. N = 2^24, at 4.8 TB/s: 268 MB,
//         55.9 us of memory, where the floor is 28.0 us; N additions three times over. The 4096 totals are 16 KB, in
//         and out, but they take four steps of one block, and two launches more, in which nobody else has work.
// Layout  x, y (N,) float32, 16 B aligned; totals (ceil(N / 4096),) float32.
// Shared  scan_tiles 32 B, scan_totals 132 B
// Limits  Any N (numbers past the end are zeros and not written); fp32; sm_80 up.
#include "scan_tile.cuh"

__global__ void __launch_bounds__(THREADS)
scan_tiles(const float* __restrict__ x, float* __restrict__ totals, float* __restrict__ y, long long N) {
    __shared__ float warps[WARPS];
    const long long first = 1LL * TILE * blockIdx.x;
    Quad tile[LINES];
    load_tile(x, tile, first, N);
    const float total = scan_tile(tile, warps);
    store_tile(y, tile, 0.0f, first, N);
    if (threadIdx.x == 0) totals[blockIdx.x] = total;
}

__global__ void __launch_bounds__(BLOCK) scan_totals(float* totals, long long tiles) {
    block_prefix_sum<true>(totals, totals, tiles);
}

__global__ void __launch_bounds__(THREADS)
add_before(const float* __restrict__ totals, float* __restrict__ y, long long N) {
    const long long first = 1LL * TILE * blockIdx.x;
    Quad tile[LINES];
    load_tile(y, tile, first, N);
    store_tile(y, tile, totals[blockIdx.x], first, N);
}
