// scan/warps.cu: scan (prefix sum) of many rows too long for one warp and shorter than a tile.
//
// Idea    A block per row: as many warps as needed, each with CHUNKS chunks in registers. No communication between
//         blocks, so no state to clear.
// Floor   Each element is read and written once: 2^28 floats are 2.15 GB / 4.8 TB/s = 447 us. An H200 issues 57
//         instructions per float in the time of a copy; on sm_90a a thread has 672 for 32 floats, with both load and
//         store paths.
// Order   Bit-identical to one tile of scan/tiles.cu.
// Layout  x, y: contiguous rows of N elements; y may alias x.
// Limits  N up to a tile; ints of 1 to 8 bytes, all floats; sm_80 up. Rows not aligned to a vector (scan/scan.cuh) load
//         element by element.
#include "scan/scan.cuh"

constexpr int WARPS = 8, CHUNKS = 8;  // per row at most; per warp

template <class Op, class S, bool EXCLUSIVE>
__global__ void __launch_bounds__(32 * WARPS, 4) scan_warps(const S* x, S* y, long long N) {
    using T = computed_t<S>;
    using Total = typename Op::template Total<T>;
    constexpr int V = VECTOR<T>, STEP = 32 * V;
    __shared__ Total warp_totals[WARPS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int at = (warp * CHUNKS * 32 + lane) * V, left = static_cast<int>(N) - at;
    x += blockIdx.x * N + at;
    y += blockIdx.x * N + at;
    const bool is_aligned_row = is_aligned(x, y);
    T v[CHUNKS][V], total = Op::template identity<T>(), running = total;
#pragma unroll
    for (int j = 0; j < CHUNKS; ++j) {
        if (is_aligned_row && j * STEP + V <= left) {
            load_streaming(v[j], x + j * STEP);
        } else {
#pragma unroll
            for (int k = 0; k < V; ++k) {
                v[j][k] = j * STEP + k < left ? to_computed(x[j * STEP + k]) : Op::template identity<T>();
            }
        }
    }
#pragma unroll
    for (int j = 0; j < CHUNKS; ++j) total = Op::combine(total, vector_reduce<Op>(v[j]));
    total = warp_reduce<Op>(total);
    if (lane == 0) warp_totals[warp] = total;
#pragma unroll
    for (int j = 0; j < CHUNKS; ++j) scan_chunk<Op, 32, EXCLUSIVE>(v[j], running);
    __syncthreads();
    Total before = Op::template identity<Total>();
    for (int i = 0; i < warp; ++i) before = Op::combine(before, warp_totals[i]);
    const T offset = static_cast<T>(before);
#pragma unroll
    for (int j = 0; j < CHUNKS; ++j) {
#pragma unroll
        for (int k = 0; k < V; ++k) v[j][k] = Op::combine(offset, v[j][k]);
        if (is_aligned_row && j * STEP + V <= left) {
            store_streaming(y + j * STEP, v[j]);
        } else {
#pragma unroll
            for (int k = 0; k < V; ++k) {
                if (j * STEP + k < left) y[j * STEP + k] = to_stored<S>(v[j][k]);
            }
        }
    }
}
