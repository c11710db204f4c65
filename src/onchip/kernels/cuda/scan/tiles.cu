// scan/tiles.cu: deterministic single-pass scan (prefix sum) of long rows.
//
// Idea    A block loads a tile to shared memory by cp.async (16 B per thread; types below 4 bytes through registers).
//         It publishes the tile's total, then scans the tile while the total propagates. Tiles form groups of
//         128. A tile's prefix combines the total up to the end of the previous group, published by that group's last
//         tile, with the totals of the earlier tiles in its own group. It waits for exactly these and combines them in
//         a fixed order, so floats are reproducible. 5 or 6 blocks per SM hide the wait. Blocks start in index order
//         (not guaranteed by CUDA, true on every chip), so a tile only waits for running blocks. A total and its flag
//         share one 16 B access: no fence.
// Floor   Each element is read and written once: 2^28 floats are 2.15 GB / 4.8 TB/s = 447 us. A total passes from
//         group to group in some 1.4 us, less than the 2.5 us of a group's memory traffic (40 KB tiles).
// Layout  x, y: contiguous rows of N elements; y may alias x. states: per row, its groups then its tiles, cleared by
//         clear_states. carry_in, carry_out: for a row scanned in chunks that start at group boundaries.
// Limits  Any N; ints of 1 to 8 bytes, all floats; sm_80 up. Rows not aligned to a vector and partial tiles load
//         element by element.
#include "scan/scan.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32, GROUP = 128;

struct __align__(16) State {
    unsigned long long value, is_ready;
};

// -- programmatic dependent launch: clear_states lets scan_tiles start early ----------------------------------------

__device__ void launch_dependent_grids() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ void wait_on_dependent_grids() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__global__ void __launch_bounds__(THREADS) clear_states(State* states, long long count) {
    launch_dependent_grids();
    for (long long i = blockIdx.x * THREADS + threadIdx.x; i < count; i += gridDim.x * THREADS) states[i] = State{0, 0};
}

// -- totals between tiles ------------------------------------------------------------------------------------------

template <class Total> __device__ void publish(State* at, Total total) {
    unsigned long long bits = 0;
    memcpy(&bits, &total, sizeof total);
    asm volatile("{ .reg .b128 s; mov.b128 s, {%1, %2}; st.relaxed.gpu.global.b128 [%0], s; }"
                 :: "l"(at), "l"(bits), "l"(1ULL) : "memory");
}

template <class Total> __device__ Total wait_for(const State* at) {
    unsigned long long bits, is_ready;
    do {
        asm volatile("{ .reg .b128 s; ld.relaxed.gpu.global.b128 s, [%2]; mov.b128 {%0, %1}, s; }"
                     : "=l"(bits), "=l"(is_ready) : "l"(at) : "memory");
        if (!is_ready) __nanosleep(32);
    } while (!is_ready);
    Total total;
    memcpy(&total, &bits, sizeof total);
    return total;
}

template <class Op, class Total, int COUNT> __device__ Total reduce(const Total (&totals)[COUNT]) {
    Total total = totals[0];
#pragma unroll
    for (int i = 1; i < COUNT; ++i) total = Op::combine(total, totals[i]);
    return total;
}

// -- a tile in shared memory -----------------------------------------------------------------------------------------

// The total of a warp's vectors; all lanes receive it.
template <class Op, class T, int CHUNKS> __device__ T warp_total(const uint4* vectors) {
    T total = Op::template identity<T>();
#pragma unroll
    for (int j = 0; j < CHUNKS; ++j) {
        T v[VECTOR<T>];
        memcpy(v, vectors + j * THREADS, 16);
        total = Op::combine(total, vector_reduce<Op>(v));
    }
    return warp_reduce<Op>(total);
}

// CHUNKS  16-byte vectors per thread; more of them mean fewer blocks per SM.
template <class Op, class S, bool EXCLUSIVE, int CHUNKS>
__global__ void __launch_bounds__(THREADS, 50 / CHUNKS)
scan_tiles(const S* x, S* y, State* states, const typename Op::template Total<computed_t<S>>* carry_in,
           typename Op::template Total<computed_t<S>>* carry_out, long long N, unsigned tiles) {
    using T = computed_t<S>;
    using Total = typename Op::template Total<T>;
    constexpr int V = VECTOR<T>, STEP = 32 * V, TILE = CHUNKS * THREADS * V, GROUP_WARPS = GROUP / 32;
    __shared__ uint4 smem[CHUNKS * THREADS];
    __shared__ Total warp_totals[WARPS], partial_totals[GROUP_WARPS], groups_before;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const unsigned row = blockIdx.x / tiles, tile = blockIdx.x - row * tiles;
    const long long begin = tile * static_cast<long long>(TILE);
    const int size = static_cast<int>(min(N - begin, static_cast<long long>(TILE)));
    const int at = (warp * CHUNKS * 32 + lane) * V, left = size - at;  // the thread's first element
    x += row * N + begin + at;
    y += row * N + begin + at;
    const bool is_whole = size == TILE && is_aligned(x, y);
    uint4* vectors = smem + threadIdx.x;
#pragma unroll
    for (int j = 0; j < CHUNKS; ++j) {
        if (is_whole && is_same<S, T>) {
            const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(vectors + j * THREADS));
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"(x + j * STEP) : "memory");
        } else {
            T v[V];
            if (is_whole) {
                load_streaming(v, x + j * STEP);
            } else {
#pragma unroll
                for (int k = 0; k < V; ++k) {
                    v[k] = j * STEP + k < left ? to_computed(x[j * STEP + k]) : Op::template identity<T>();
                }
            }
            memcpy(vectors + j * THREADS, v, 16);
        }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");

    const T total_of_warp = warp_total<Op, T, CHUNKS>(vectors);
    if (lane == 0) warp_totals[warp] = total_of_warp;
    wait_on_dependent_grids();
    __syncthreads();
    const unsigned groups = (tiles + GROUP - 1) / GROUP, group = tile / GROUP, index = tile % GROUP;
    State* group_states = states + static_cast<long long>(row) * (groups + tiles);
    State* tile_states = group_states + groups + group * GROUP;
    const bool is_last = tile == tiles - 1, ends_group = index == GROUP - 1;
    if (threadIdx.x == THREADS - 1 && !is_last && !ends_group) publish(tile_states + index, reduce<Op>(warp_totals));

    T running = Op::template identity<T>();  // prefix over the warp's chunks so far
#pragma unroll
    for (int j = 0; j < CHUNKS; ++j) {
        T v[V];
        memcpy(v, vectors + j * THREADS, 16);
        scan_chunk<Op, 32, EXCLUSIVE>(v, running);
        memcpy(vectors + j * THREADS, v, 16);
    }
    if (warp < GROUP_WARPS) {  // one thread per tile of the group
        Total sum = Op::template identity<Total>();
        if (threadIdx.x < index) sum = wait_for<Total>(tile_states + threadIdx.x);
#pragma unroll
        for (int step = 1; step < 32; step *= 2) sum = Op::combine(sum, __shfl_xor_sync(0xffffffffu, sum, step));
        if (lane == 0) partial_totals[warp] = sum;
    } else if (threadIdx.x == GROUP) {
        groups_before = group ? wait_for<Total>(group_states + group - 1)
                      : carry_in ? *carry_in : Op::template identity<Total>();
    }
    __syncthreads();
    Total total = Op::combine(groups_before, reduce<Op>(partial_totals));
    for (int i = 0; i < warp; ++i) total = Op::combine(total, warp_totals[i]);
    if (threadIdx.x == THREADS - 1 && (ends_group || is_last)) {
        const Total row_total = Op::combine(total, warp_totals[WARPS - 1]);
        if (!is_last) {
            publish(group_states + group, row_total);
        } else if (carry_out) {
            *carry_out = row_total;
        }
    }
    const T offset = static_cast<T>(total);
#pragma unroll
    for (int j = 0; j < CHUNKS; ++j) {
        T v[V];
        memcpy(v, vectors + j * THREADS, 16);
#pragma unroll
        for (int k = 0; k < V; ++k) v[k] = Op::combine(offset, v[k]);
        if (is_whole) {
            store_streaming(y + j * STEP, v);
        } else {
#pragma unroll
            for (int k = 0; k < V; ++k) {
                if (j * STEP + k < left) y[j * STEP + k] = to_stored<S>(v[k]);
            }
        }
    }
}
