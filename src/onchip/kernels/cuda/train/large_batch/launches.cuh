// train/large_batch/launches.cuh: register-tiled mma.sync gemms of a training step, and the rows of a step.
//
// Idea    A warp computes an 8 R x 8 R tile with mma.sync and loads its operands from L2, without shared memory. Both
//         operands permute K: of a chunk of 16, lane (g, q) holds K elements 4 q + i of rows R g + j, R x 4 per
//         operand, so that loads are 16 B for row-major and column-major operands. Forward, backward and dW share this
//         loop with different loaders.
// Order   Chunks of 16 K elements over Warps::k warps; CHUNKS_PER_SUM chunks per tensor core accumulator, added in
//         fp32; then the warps' sums in order. It depends only on the layer's sizes and the full batch.
#pragma once

#include "common/dtype.cuh"
#include "common/epilogue.cuh"
#include "mma/tensor_core.cuh"

constexpr int CHUNK = 16, WARPS = 8, THREADS = 32 * WARPS;

// Programmatic dependent launch: a kernel starts while its predecessor ends, and waits here before it reads its outputs
// and the weights that it updates. Writes of earlier kernels are visible, since the predecessor waited for them; reads
// before the wait go to L2. The data, the order and the progress change only between graphs.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Touches the kernel arguments, which start out uncached, so that their latency overlaps with the wait.
template <class Arguments>
__device__ __forceinline__ void touch_arguments(const Arguments& arguments) {
#ifdef __CUDA_ARCH__
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(Arguments) / 4); i += 16)
        asm volatile("" ::"r"(reinterpret_cast<const u32*>(&arguments)[i]));
#endif
}

// Optimiser values of one step: per_step_values of kernels/training.py.
struct StepValues {
    float lr, scale, root, keep, decay, clip, unused[2];
};

// Networks trained in one launch, one per blockIdx.y. Pointers refer to the first one; data and targets are shared.
struct Networks {
    long long stride_bytes;  // bytes between the memory of two networks

    // Pointer to this block's network; nullptr stays nullptr.
    template <class T>
    __device__ __forceinline__ T* local(T* pointer) const {
        return pointer ? (T*)((char*)pointer + blockIdx.y * stride_bytes) : pointer;
    }
};

// A training step. A network that finishes before the others has steps without rows.
struct Step {
    const long long* progress;  // steps done, rows of the call
    const long long* order;     // (rows,) row indices, batch by batch
    const StepValues* per_step_values;  // (steps,)
    long long offset;           // step index relative to progress
    long long batch;            // rows of a full step
    Networks networks;

    template <class T>
    __device__ __forceinline__ T* local(T* pointer) const {
        return networks.local(pointer);
    }
    __device__ __forceinline__ long long index() const { return local(progress)[0] + offset; }
    __device__ __forceinline__ const long long* rows() const { return local(order) + index() * batch; }
    __device__ __forceinline__ StepValues opt() const { return local(per_step_values)[index()]; }
    // Rows of this step; 0 after the last.
    __device__ __forceinline__ int size() const {
        const long long left = local(progress)[1] - index() * batch;
        return static_cast<int>(left < 0 ? 0 : left < batch ? left : batch);
    }
};

// Warps of a block over M, N and K.
struct Warps {
    int m, n, k;
};

// -- operands --------------------------------------------------------------------------------------------------------

// Row indices of positions `first`, `first` + step, ... below `rows`; NO_ROW past the end. Loads are unconditional
// (clamped to the last row), so that all are in flight. 32 bits suffice: no GPU holds 2^32 rows of 32 B.
constexpr u32 NO_ROW = ~0u;
template <int COUNT>
__device__ __forceinline__ void find_rows(u32 (&ids)[COUNT], const long long* order, int first, int step, int rows) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) ids[i] = first + i * step;
    if (order && rows > 0) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            ids[i] = static_cast<u32>(order[first + i * step < rows ? first + i * step : rows - 1]);
    }
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
        if (first + i * step >= rows) ids[i] = NO_ROW;
}

// Loads V adjacent values. BYPASS_L1: L1 may hold stale data of earlier launches.
template <bool BYPASS_L1, int V>
__device__ __forceinline__ void load_several(float (&v)[V], const float* from) {
    using Packed = typename Vector<4 * V>::type;
    const Packed* packed = reinterpret_cast<const Packed*>(from);
    *reinterpret_cast<Packed*>(v) = BYPASS_L1 ? __ldcg(packed) : *packed;
}

__device__ __forceinline__ const float* row_at(const float* matrix, u32 row, int stride) {
    return matrix + static_cast<long long>(row) * stride;
}

// Operand of up to 8 R rows, K contiguous. k_end is a multiple of 4.
template <int R>
struct KMajor {
    const float* at[R];  // nullptr past the last row
    int k_end;

    __device__ __forceinline__ KMajor(const float* from, int stride, int first, int rows, int k_end,
                                      const long long* order = nullptr)
        : k_end(k_end) {
        u32 ids[R];
        find_rows(ids, order, first + threadIdx.x % 32 / 4 * R, 1, rows);
#pragma unroll
        for (int j = 0; j < R; ++j) at[j] = ids[j] == NO_ROW ? nullptr : row_at(from, ids[j], stride);
    }
    template <bool BYPASS_L1>
    __device__ __forceinline__ void load(float (&v)[R][4], int chunk) const {
        const int k = chunk * CHUNK + threadIdx.x % 4 * 4;
#pragma unroll
        for (int j = 0; j < R; ++j) {
            float four[4] = {};
            if (at[j] && k < k_end) load_several<BYPASS_L1>(four, at[j] + k);
#pragma unroll
            for (int i = 0; i < 4; ++i) v[j][i] = four[i];
        }
    }
};

// Operand of 8 R columns of a matrix whose rows are K. `columns` is a multiple of 4.
template <int R>
struct MnMajor {
    const float* from;
    const long long* order;  // row index of K element k; nullptr: k
    int stride, k_end;
    bool is_valid;

    __device__ __forceinline__ MnMajor(const float* matrix, int stride, int first, int columns, int k_end,
                                       const long long* order = nullptr)
        : order(order), stride(stride), k_end(k_end) {
        const int column = first + threadIdx.x % 32 / 4 * R;
        is_valid = column < columns;
        from = matrix + column;
    }
    template <bool BYPASS_L1>
    __device__ __forceinline__ void load(float (&v)[R][4], int chunk) const {
        u32 rows[4];
        find_rows(rows, order, chunk * CHUNK + threadIdx.x % 4 * 4, 1, k_end);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float values[R] = {};
            if (is_valid && rows[i] != NO_ROW) load_several<BYPASS_L1>(values, row_at(from, rows[i], stride));
#pragma unroll
            for (int j = 0; j < R; ++j) v[j][i] = values[j];
        }
    }
};

// Chunks per tensor core accumulator. Tensor cores truncate when they accumulate, too inexact for fp32.
template <class P>
constexpr int CHUNKS_PER_SUM = is_same<P, Fp32> ? 1 : 8;

// -- gemm ------------------------------------------------------------------------------------------------------------

// Rounds v to tf32: adds half an ulp, then truncates. Same as cvt.rna with half the instructions, but not NaN-safe.
constexpr u32 TF32_HALF = 1u << 12, TF32_BITS = ~(2 * TF32_HALF - 1);
__device__ __forceinline__ u32 round_finite(float v) { return (__float_as_uint(v) + TF32_HALF) & TF32_BITS; }

// NaN-safe: non-finite or overflowing values become NaN.
__device__ __forceinline__ u32 round_tf32(float v) {
    return __float_as_uint(fmaf(v, 0.0f, __uint_as_float(__float_as_uint(v) + TF32_HALF))) & TF32_BITS;
}

// 3xTF32 split of v; `low` preserves NaN. `low` has one bit beyond tf32, so truncation is as exact as rounding.
__device__ __forceinline__ void split(float v, u32& high, u32& low) {
    high = round_finite(v);
    low = __float_as_uint(v - __uint_as_float(high)) & TF32_BITS;
}

// A lane's operand fragments. Fp32 splits each value into two tf32 terms, unless tf32 holds all its bits (IS_EXACT).
template <class P, int R, bool IS_EXACT = false>
struct Fragment {
    static constexpr int COUNT = 4 / P::PER_WORD;
    static constexpr bool IS_SPLIT = is_same<P, Fp32> && !IS_EXACT;
    u32 high[R][COUNT], low[IS_SPLIT ? R : 1][COUNT];

    __device__ __forceinline__ explicit Fragment(const float (&v)[R][4]) {
#pragma unroll
        for (int j = 0; j < R; ++j) {
            if constexpr (P::PER_WORD == 2) {
                high[j][0] = pack<typename P::Element>(v[j][0], v[j][1]);
                high[j][1] = pack<typename P::Element>(v[j][2], v[j][3]);
            } else {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    if constexpr (IS_SPLIT) split(v[j][i], high[j][i], low[j][i]);
                    else if constexpr (IS_EXACT) high[j][i] = __float_as_uint(v[j][i]);
                    else if constexpr (R == 4) high[j][i] = round_tf32(v[j][i]);
                    else high[j][i] = Tf32::word(v[j][i]);  // small tiles are latency-bound; round_tf32 spilled
                }
            }
        }
    }
};

// Fragment t: rows R g + 2 t and R g + 2 t + 1 are the instruction's rows g and g + 8.
template <int COUNT, int R>
__device__ __forceinline__ void select_fragment(u32 (&a)[4], const u32 (&operand)[R][COUNT], int t, int step) {
    a[0] = operand[2 * t][2 * step], a[1] = operand[2 * t + 1][2 * step];
    a[2] = operand[2 * t][2 * step + 1], a[3] = operand[2 * t + 1][2 * step + 1];
}

// sums += a * b over one chunk. sums[t][j][2 h + w] is at row R g + 2 t + h, column R (2 q + w) + j.
template <class P, int R>
__device__ __forceinline__ void multiply(float (&sums)[R / 2][R][4], const Fragment<P, R>& a, const Fragment<P, R>& b) {
#pragma unroll
    for (int step = 0; step < Fragment<P, R>::COUNT / 2; ++step)
#pragma unroll
        for (int t = 0; t < R / 2; ++t) {
            u32 x[4], x_low[4];
            select_fragment(x, a.high, t, step);
            if constexpr (is_same<P, Fp32>) select_fragment(x_low, a.low, t, step);
#pragma unroll
            for (int j = 0; j < R; ++j) {
                if constexpr (is_same<P, Fp32>) {
                    mma<Tf32>(sums[t][j], x_low, b.high[j][2 * step], b.high[j][2 * step + 1]);
                    mma<Tf32>(sums[t][j], x, b.low[j][2 * step], b.low[j][2 * step + 1]);
                    mma<Tf32>(sums[t][j], x, b.high[j][2 * step], b.high[j][2 * step + 1]);
                } else {
                    mma<P>(sums[t][j], x, b.high[j][2 * step], b.high[j][2 * step + 1]);
                }
            }
        }
}

template <int R>
__device__ __forceinline__ void flush_sums(float (&totals)[R / 2][R][4], float (&sums)[R / 2][R][4]) {
#pragma unroll
    for (int t = 0; t < R / 2; ++t)
#pragma unroll
        for (int j = 0; j < R; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) totals[t][j][i] += sums[t][j][i], sums[t][j][i] = 0.0f;
}

// Accumulator tiles of a block's warps. +4: rows stay 16 B aligned and start in different banks.
template <int R>
struct Tiles {
    float at[WARPS][8 * R][8 * R + 4];
};

// Stores a lane's accumulators to its warp's tile.
template <int R>
__device__ __forceinline__ void store_tile(float (&tile)[8 * R][8 * R + 4], const float (&totals)[R / 2][R][4]) {
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll
    for (int t = 0; t < R / 2; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float values[R];
#pragma unroll
            for (int j = 0; j < R; ++j) values[j] = totals[t][j][i];
            store_vector(&tile[R * g + 2 * t + i / 2][R * (2 * q + i % 2)], values);
        }
}

// K chunks of one warp: first, first + step, ... below last.
struct Chunks {
    int first, last, step;
};

// Register pipeline of an operand's next chunks, deeper for small tiles.
template <int R>
struct Prefetch {
    static constexpr int DEPTH = R == 2 ? 3 : 2;
    float v[DEPTH][R][4];

    // Bypasses L1, since it may run before griddepcontrol.wait.
    template <class Operand>
    __device__ __forceinline__ void begin(const Operand& operand, const Chunks& chunks) {
#pragma unroll
        for (int i = 0; i < DEPTH; ++i) load<true>(operand, i, chunks.first + i * chunks.step, chunks.last);
    }
    template <bool BYPASS_L1, class Operand>
    __device__ __forceinline__ void load(const Operand& operand, int i, int chunk, int last) {
        if (chunk < last) operand.template load<BYPASS_L1>(v[i], chunk);
    }
};

// Computes a warp's tile of a * b into `tile`. Both pipelines must be started.
template <class P, int R, bool BYPASS_L1 = false, class A, class B>
__device__ __forceinline__ void warp_gemm(float (&tile)[8 * R][8 * R + 4], const A& a, Prefetch<R>& prefetch_a,
                                          const B& b, Prefetch<R>& prefetch_b, const Chunks& chunks) {
    constexpr int DEPTH = Prefetch<R>::DEPTH;
    float totals[R / 2][R][4] = {}, sums[R / 2][R][4] = {};
    int done = 0;
#pragma unroll 1
    for (int chunk = chunks.first; chunk < chunks.last; chunk += DEPTH * chunks.step) {
#pragma unroll
        for (int i = 0; i < DEPTH; ++i) {
            const int current = chunk + i * chunks.step, next = current + DEPTH * chunks.step;
            if (current >= chunks.last) break;
            const Fragment<P, R> fragments_a(prefetch_a.v[i]), fragments_b(prefetch_b.v[i]);
            prefetch_a.template load<BYPASS_L1>(a, i, next, chunks.last);
            prefetch_b.template load<BYPASS_L1>(b, i, next, chunks.last);
            multiply<P, R>(sums, fragments_a, fragments_b);
            if (++done % CHUNKS_PER_SUM<P> == 0) flush_sums<R>(totals, sums);
        }
    }
    flush_sums<R>(totals, sums);
    store_tile<R>(tile, totals);
}

// Position of four adjacent elements in a block's output.
template <int R>
struct FourPosition {
    int tile, row, column;  // within the tile

    __device__ __forceinline__ explicit FourPosition(int item)
        : tile(item / (16 * R * R)), row(item % (16 * R * R) / (2 * R)), column(item % (2 * R) * 4) {}
    __device__ __forceinline__ int block_row(const Warps& warps) const { return tile / warps.n * 8 * R + row; }
    __device__ __forceinline__ int block_column(const Warps& warps) const {
        return tile % warps.n * 8 * R + column;
    }
};

// Epilogue after all warps stored their tiles: adds the split-K sums and calls finish(row, column, four sums,
// fetch(row, column)), with several fetches in flight.
template <int R, class Fetch, class Finish>
__device__ __forceinline__ void tile_epilogue(const Tiles<R>& tiles, const Warps& warps, const Fetch& fetch,
                                              const Finish& finish) {
    constexpr int AT_ONCE = 4;
    const int items = warps.m * warps.n * 16 * R * R;
    decltype(fetch(0, 0)) fetched[AT_ONCE];
    const auto fetch_some = [&](int first) {
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const FourPosition<R> four(first + i * THREADS);
            if (first + i * THREADS < items) fetched[i] = fetch(four.block_row(warps), four.block_column(warps));
        }
    };
    int first = threadIdx.x;
    fetch_some(first);
    __syncthreads();
    while (first < items) {
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (first + i * THREADS >= items) break;
            const FourPosition<R> four(first + i * THREADS);
            float4 sum = load4(&tiles.at[four.tile * warps.k][four.row][four.column]);
            for (int k_split = 1; k_split < warps.k; ++k_split) {
                const float4 v = load4(&tiles.at[four.tile * warps.k + k_split][four.row][four.column]);
                sum = {sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w};
            }
            finish(four.block_row(warps), four.block_column(warps), sum, fetched[i]);
        }
        first += AT_ONCE * THREADS;
        fetch_some(first);
    }
}

// Position of a warp's tile in its block, and its split of K.
template <int R>
struct WarpTile {
    int row, column, k_split;
    __device__ __forceinline__ explicit WarpTile(const Warps& warps) {
        const int warp = threadIdx.x / 32, tile = warp / warps.k;
        k_split = warp % warps.k;
        row = tile / warps.n * 8 * R;
        column = tile % warps.n * 8 * R;
    }
};
