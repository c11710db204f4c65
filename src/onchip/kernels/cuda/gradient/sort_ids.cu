// gradient/sort_ids.cu: the positions of all ids of a batch, sorted by id; equal ids stay in the order of the batch.
//
// Idea    Up to MAX_RANKED ids: rank_ids compares each id with all others, one launch. More: a radix sort from the low
//         digits up, three launches per digit: count_digits, scan_digits, scatter_ids; then find_rows. Ranks in a tile
//         follow from warp votes in the order of the tile, so no atomic decides the order.
// Floor   N ids are read, N positions and V ranges written. rank_ids: N^2 comparisons, 8,192 ids: 67 M / 8 T/s = 8 us.
//         Radix: some 24 B per id and digit: 2^21 ids below 100,000, two digits: 100 MB / 4.2 TB/s = 24 us.
// Layout  ids (N); keys, order (N); ranges (V): [x, y) of each id in `order`, cleared before. An id that is not in
//         0 .. V - 1 becomes the key V, the last one; the forward pass reports it.
// Shared  rank_ids 35 KB, scatter_ids 37 KB.
// Limits  N, V < 2^31; int32 or int64 ids; sm_80 up.
#include "common/dtype.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32, MAX_RANKED = 8192;
constexpr int ROUNDS = 16, TILE = THREADS * ROUNDS, MAX_DIGITS = 1024;

template <class Id>
__device__ __forceinline__ u32 key_of(Id id, u32 V) {
    return static_cast<unsigned long long>(id) < V ? static_cast<u32>(id) : V;
}

template <class Id>
__global__ void __launch_bounds__(THREADS) rank_ids(const Id* ids, u32* keys, u32* order, uint2* ranges, u32 N, u32 V) {
    __shared__ u32 all[MAX_RANKED], counts[3][WARPS][32];
    for (u32 j = threadIdx.x; j < N; j += THREADS) all[j] = key_of(ids[j], V);
    __syncthreads();
    // A warp compares 32 ids with an eighth of all.
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, i = blockIdx.x * 32 + lane;
    const u32 key = i < N ? all[i] : 0, share = (N + WARPS - 1) / WARPS, end = min((warp + 1) * share, N);
    u32 less = 0, equal = 0, before = 0;
#pragma unroll 4
    for (u32 j = warp * share; j < end; ++j) {
        const u32 other = all[j];
        less += other < key;
        equal += other == key;
        before += other == key && j < i;
    }
    counts[0][warp][lane] = less;
    counts[1][warp][lane] = equal;
    counts[2][warp][lane] = before;
    __syncthreads();
    if (warp > 0 || i >= N) return;
    for (int other = 1; other < WARPS; ++other) {
        less += counts[0][other][lane];
        equal += counts[1][other][lane];
        before += counts[2][other][lane];
    }
    keys[less + before] = key;
    order[less + before] = i;
    if (before == 0 && key < V) ranges[key] = uint2{less, less + equal};
}

// The sum of `v` over the threads before this one.
__device__ __forceinline__ u32 sum_before(u32 v) {
    __shared__ u32 warp_sums[WARPS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 sum = v;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
        const u32 other = __shfl_up_sync(~0u, sum, by);
        if (lane >= by) sum += other;
    }
    __syncthreads();  // all reads of the previous call are done
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
    for (int other = 0; other < warp; ++other) sum += warp_sums[other];
    return sum - v;
}

// ids     the ids, or the keys that the previous digit has sorted
// counts  (digits, tiles)
template <class Id>
__global__ void __launch_bounds__(THREADS)
    count_digits(const Id* ids, u32* counts, u32 N, u32 V, u32 shift, u32 digits) {
    __shared__ u32 count[MAX_DIGITS];
    for (u32 d = threadIdx.x; d < digits; d += THREADS) count[d] = 0;
    __syncthreads();
    const u32 begin = blockIdx.x * TILE + threadIdx.x;
#pragma unroll 4
    for (u32 i = begin; i < N && i < begin + TILE; i += THREADS)
        atomicAdd(&count[key_of(ids[i], V) >> shift & digits - 1], 1u);
    __syncthreads();
    for (u32 d = threadIdx.x; d < digits; d += THREADS) counts[d * gridDim.x + blockIdx.x] = count[d];
}

// A block per digit: `counts` of each tile becomes that of the tiles before it; totals (digits).
__global__ void __launch_bounds__(THREADS) scan_digits(u32* counts, u32* totals, u32 tiles) {
    __shared__ u32 next;
    counts += blockIdx.x * tiles;
    u32 total = 0;
    for (u32 first = 0; first < tiles; first += THREADS) {
        const u32 tile = first + threadIdx.x, count = tile < tiles ? counts[tile] : 0;
        const u32 before = total + sum_before(count);
        if (tile < tiles) counts[tile] = before;
        if (threadIdx.x == THREADS - 1) next = before + count;
        __syncthreads();
        total = next;
    }
    if (threadIdx.x == 0) totals[blockIdx.x] = total;
}

// positions  null: an id's own
template <class Id>
__global__ void __launch_bounds__(THREADS)
    scatter_ids(const Id* ids, const u32* positions, const u32* counts, const u32* totals, u32* keys, u32* order, u32 N,
                u32 V, u32 shift, u32 digits) {
    constexpr int EACH = MAX_DIGITS / THREADS;
    __shared__ u32 starts[WARPS][MAX_DIGITS];  // by digit: ids of the warp so far, then where its first one goes
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (u32 d = threadIdx.x; d < digits; d += THREADS)
        for (int w = 0; w < WARPS; ++w) starts[w][d] = 0;
    __syncthreads();
    const u32 begin = blockIdx.x * TILE + warp * (TILE / WARPS) + lane;
    u32 key[ROUNDS], rank[ROUNDS];
#pragma unroll
    for (int k = 0; k < ROUNDS; ++k) key[k] = begin + 32 * k < N ? key_of(ids[begin + 32 * k], V) : 0;
#pragma unroll
    for (int k = 0; k < ROUNDS; ++k) {
        const bool is_inside = begin + 32 * k < N;
        const u32 digit = key[k] >> shift & digits - 1;
        const u32 same = __match_any_sync(~0u, is_inside ? digit : MAX_DIGITS);
        const u32 count = is_inside ? starts[warp][digit] : 0;
        __syncwarp();
        if (is_inside && same >> lane == 1) starts[warp][digit] = count + __popc(same);  // the last of them
        __syncwarp();
        rank[k] = count + __popc(same & (1u << lane) - 1);
    }
    u32 total[EACH], sum = 0;
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
        const u32 d = threadIdx.x * EACH + j;
        total[j] = d < digits ? totals[d] : 0;
        sum += total[j];
    }
    u32 start = sum_before(sum);
    __syncthreads();
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
        const u32 d = threadIdx.x * EACH + j;
        if (d < digits) {
            u32 at = start + counts[d * gridDim.x + blockIdx.x];
            for (int w = 0; w < WARPS; ++w) {
                const u32 count = starts[w][d];
                starts[w][d] = at;
                at += count;
            }
        }
        start += total[j];
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < ROUNDS; ++k) {
        const u32 i = begin + 32 * k;
        if (i >= N) break;
        const u32 at = starts[warp][key[k] >> shift & digits - 1] + rank[k];
        keys[at] = key[k];
        order[at] = positions == nullptr ? i : positions[i];
    }
}

__global__ void __launch_bounds__(THREADS) find_rows(const u32* keys, uint2* ranges, u32 N, u32 V) {
    const u32 i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= N || keys[i] >= V) return;
    if (i == 0 || keys[i - 1] != keys[i]) ranges[keys[i]].x = i;
    if (i == N - 1 || keys[i + 1] != keys[i]) ranges[keys[i]].y = i + 1;
}
