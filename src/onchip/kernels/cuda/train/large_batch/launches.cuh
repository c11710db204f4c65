// train/large_batch/launches.cuh: the products of a training step, and which rows a step has.
//
// Idea    A warp makes 8 R x 8 R numbers of a product by mma.sync, its operands straight from L2, without shared
//         memory. The order in which k is summed up is ours, so of 16 k's a lane takes four neighbours: an operand's
//         8 R x 16 numbers are R x 4 for each lane, (row R g + j, k 4 q + i), loaded 16 bytes at a time whether rows
//         or columns lie side by side. Both operands number k alike, so each instruction multiplies what belongs
//         together. Forward, backward and gradients are this one loop with other loads.
// Order   A sum goes over chunks of 16 k's, `deep` warps taking turns; PART chunks in the tensor core's own sum, those
//         in float; then the warps' sums first to last. It depends on the sizes of the layer and of a full batch alone.
#pragma once

#include "common/dtype.cuh"
#include "common/epilogue.cuh"
#include "mma/tensor_core.cuh"

constexpr int CHUNK = 16, WARPS = 8, THREADS = 32 * WARPS;

// Programmatic launch: a kernel begins while the one before ends, and waits here before it reads what that one writes.
// What earlier ones write is there: the one before has waited for them before it let this one begin. So only weights
// right behind their update wait, and what a launch hands to the next; what is read before comes from L2. The data, the
// order and the step's place in it change where a graph ends.
__device__ __forceinline__ void wait_for_step_before() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// A launch's arguments are in no cache when it begins: whoever asks for them before it has to wait need not wait for them.
template <class Arguments>
__device__ __forceinline__ void touch_arguments(const Arguments& arguments) {
#ifdef __CUDA_ARCH__
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(Arguments) / 4); i += 16)
        asm volatile("" ::"r"(reinterpret_cast<const u32*>(&arguments)[i]));
#endif
}

// How weights follow from gradients in one step, as kernels/training.py writes it down.
struct Rule {
    float lr, scale, root, keep, decay, clip, unused[2];
};

// Networks that train in one launch: along y of the grid. All have the same memory, but for data and targets, which they
// share; a launch is told the first one's.
struct Networks {
    long long apart;  // bytes from a network's memory to the next one's

    // What this block's network has there; nullptr stays.
    template <class T>
    __device__ __forceinline__ T* mine(T* of_first) const {
        return of_first ? (T*)((char*)of_first + blockIdx.y * apart) : of_first;
    }
};

// A step of a call: which of its rows. A network that is done before others has steps without rows.
struct Step {
    const long long* progress;  // steps that went before, rows of the call
    const long long* order;     // (rows,) row numbers, batch by batch
    const Rule* rules;          // (steps,)
    long long number;           // of the step, counted from progress
    long long batch;            // rows of a full step
    Networks networks;

    template <class T>
    __device__ __forceinline__ T* mine(T* of_first) const {
        return networks.mine(of_first);
    }
    __device__ __forceinline__ long long at() const { return mine(progress)[0] + number; }
    __device__ __forceinline__ const long long* rows() const { return mine(order) + at() * batch; }
    __device__ __forceinline__ Rule rule() const { return mine(rules)[at()]; }
    // Rows of this step; 0 behind the last one.
    __device__ __forceinline__ int size() const {
        const long long left = mine(progress)[1] - at() * batch;
        return static_cast<int>(left < 0 ? 0 : left < batch ? left : batch);
    }
};

// Warps of a block: tiles down and across, and how many of them share a tile's sums.
struct Warps {
    int down, across, deep;
};

// -- operands --------------------------------------------------------------------------------------------------------

// Which rows lie at `first`, `first` + step, ... of `rows`: NO_ROW behind the last. All are asked for at once, the last
// one in place of those that are not there: with a branch for each they would wait for each other. No chip has room for
// 2^32 rows of 32 bytes and what they should give.
constexpr u32 NO_ROW = ~0u;
template <int COUNT>
__device__ __forceinline__ void find_rows(u32 (&found)[COUNT], const long long* order, int first, int step, int rows) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) found[i] = first + i * step;
    if (order && rows > 0) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            found[i] = static_cast<u32>(order[first + i * step < rows ? first + i * step : rows - 1]);
    }
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
        if (first + i * step >= rows) found[i] = NO_ROW;
}

// V neighbours. PAST_L1: straight from L2, where what earlier launches wrote is, whatever a multiprocessor still holds.
template <bool PAST_L1, int V>
__device__ __forceinline__ void load_several(float (&v)[V], const float* from) {
    using Word = typename Vector<4 * V>::type;
    const Word* word = reinterpret_cast<const Word*>(from);
    *reinterpret_cast<Word*>(v) = PAST_L1 ? __ldcg(word) : *word;
}

__device__ __forceinline__ const float* row_at(const float* matrix, u32 row, int stride) {
    return matrix + static_cast<long long>(row) * stride;
}

// 8 R rows, or fewer: their numbers along k lie side by side. k_end is a multiple of 4.
template <int R>
struct AlongK {
    const float* at[R];  // nullptr: no such row
    int k_end;

    __device__ __forceinline__ AlongK(const float* from, int stride, int first, int rows, int k_end,
                                      const long long* order = nullptr)
        : k_end(k_end) {
        u32 found[R];
        find_rows(found, order, first + threadIdx.x % 32 / 4 * R, 1, rows);
#pragma unroll
        for (int j = 0; j < R; ++j) at[j] = found[j] == NO_ROW ? nullptr : row_at(from, found[j], stride);
    }
    template <bool PAST_L1>
    __device__ __forceinline__ void load(float (&v)[R][4], int chunk) const {
        const int k = chunk * CHUNK + threadIdx.x % 4 * 4;
#pragma unroll
        for (int j = 0; j < R; ++j) {
            float four[4] = {};
            if (at[j] && k < k_end) load_several<PAST_L1>(four, at[j] + k);
#pragma unroll
            for (int i = 0; i < 4; ++i) v[j][i] = four[i];
        }
    }
};

// 8 R columns of a matrix whose rows are the k's. `columns` is a multiple of 4.
template <int R>
struct AcrossK {
    const float* from;
    const long long* order;  // which row is k; nullptr: row k
    int stride, k_end;
    bool is_there;

    __device__ __forceinline__ AcrossK(const float* matrix, int stride, int first, int columns, int k_end,
                                       const long long* order = nullptr)
        : order(order), stride(stride), k_end(k_end) {
        const int column = first + threadIdx.x % 32 / 4 * R;
        is_there = column < columns;
        from = matrix + column;
    }
    template <bool PAST_L1>
    __device__ __forceinline__ void load(float (&v)[R][4], int chunk) const {
        u32 rows[4];
        find_rows(rows, order, chunk * CHUNK + threadIdx.x % 4 * 4, 1, k_end);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float some[R] = {};
            if (is_there && rows[i] != NO_ROW) load_several<PAST_L1>(some, row_at(from, rows[i], stride));
#pragma unroll
            for (int j = 0; j < R; ++j) v[j][i] = some[j];
        }
    }
};

// Chunks that the tensor core sums up by itself. It cuts sums off where float32 ends, a share that fp32 would notice.
template <class P>
constexpr int PART = is_same<P, Fp32> ? 1 : 8;

// -- products --------------------------------------------------------------------------------------------------------

// v rounded to tf32: half a unit more, then cut. So does cvt.rna, by twice the instructions lest it lose a NaN.
constexpr u32 TF32_HALF = 1u << 12, TF32_BITS = ~(2 * TF32_HALF - 1);
__device__ __forceinline__ u32 round_finite(float v) { return (__float_as_uint(v) + TF32_HALF) & TF32_BITS; }

// What is not finite, or would not be, becomes NaN.
__device__ __forceinline__ u32 round_tf32(float v) {
    return __float_as_uint(fmaf(v, 0.0f, __uint_as_float(__float_as_uint(v) + TF32_HALF))) & TF32_BITS;
}

// v as two of tf32. `low` keeps a NaN; what it has behind tf32's last bit is one bit: cut or rounded, it is as far off.
__device__ __forceinline__ void split(float v, u32& high, u32& low) {
    high = round_finite(v);
    low = __float_as_uint(v - __uint_as_float(high)) & TF32_BITS;
}

// A lane's part of an operand as the tensor cores take it. Fp32: each number is the sum of two of tf32, or one of which
// all bits fit: IS_EXACT.
template <class P, int R, bool IS_EXACT = false>
struct Words {
    static constexpr int COUNT = 4 / P::PER_WORD;
    static constexpr bool IS_SPLIT = is_same<P, Fp32> && !IS_EXACT;
    u32 high[R][COUNT], low[IS_SPLIT ? R : 1][COUNT];

    __device__ __forceinline__ explicit Words(const float (&v)[R][4]) {
#pragma unroll
        for (int j = 0; j < R; ++j) {
            if constexpr (P::PER_WORD == 2) {
                high[j][0] = pack<typename P::Number>(v[j][0], v[j][1]);
                high[j][1] = pack<typename P::Number>(v[j][2], v[j][3]);
            } else {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    if constexpr (IS_SPLIT) split(v[j][i], high[j][i], low[j][i]);
                    else if constexpr (IS_EXACT) high[j][i] = __float_as_uint(v[j][i]);
                    else if constexpr (R == 4) high[j][i] = round_tf32(v[j][i]);
                    else high[j][i] = Tf32::word(v[j][i]);  // small tiles wait for loads; round_tf32 made them spill
                }
            }
        }
    }
};

// Tile t has rows R g + 2 t and R g + 2 t + 1 as the instruction's rows g and g + 8.
template <int COUNT, int R>
__device__ __forceinline__ void take_rows(u32 (&a)[4], const u32 (&words)[R][COUNT], int t, int step) {
    a[0] = words[2 * t][2 * step], a[1] = words[2 * t + 1][2 * step];
    a[2] = words[2 * t][2 * step + 1], a[3] = words[2 * t + 1][2 * step + 1];
}

// sums += a * b over one chunk. sums[t][j][2 h + w] is at row R g + 2 t + h, column R (2 q + w) + j.
template <class P, int R>
__device__ __forceinline__ void multiply(float (&sums)[R / 2][R][4], const Words<P, R>& a, const Words<P, R>& b) {
#pragma unroll
    for (int step = 0; step < Words<P, R>::COUNT / 2; ++step)
#pragma unroll
        for (int t = 0; t < R / 2; ++t) {
            u32 x[4], x_low[4];
            take_rows(x, a.high, t, step);
            if constexpr (is_same<P, Fp32>) take_rows(x_low, a.low, t, step);
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
__device__ __forceinline__ void move_sums(float (&totals)[R / 2][R][4], float (&sums)[R / 2][R][4]) {
#pragma unroll
    for (int t = 0; t < R / 2; ++t)
#pragma unroll
        for (int j = 0; j < R; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) totals[t][j][i] += sums[t][j][i], sums[t][j][i] = 0.0f;
}

// The tiles of a block's warps; +4: rows stay 16 B aligned and begin in other banks.
template <int R>
struct Tiles {
    float at[WARPS][8 * R][8 * R + 4];
};

// A lane's sums to its warp's tile.
template <int R>
__device__ __forceinline__ void store_tile(float (&tile)[8 * R][8 * R + 4], const float (&totals)[R / 2][R][4]) {
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll
    for (int t = 0; t < R / 2; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float some[R];
#pragma unroll
            for (int j = 0; j < R; ++j) some[j] = totals[t][j][i];
            store_several(&tile[R * g + 2 * t + i / 2][R * (2 * q + i % 2)], some);
        }
}

// The chunks of a sum that one warp takes: first, first + step, ... below last.
struct Chunks {
    int first, last, step;
};

// An operand's next chunks, on their way while the tensor cores work: of small tiles more than of large ones.
template <int R>
struct Ahead {
    static constexpr int DEPTH = R == 2 ? 3 : 2;
    float v[DEPTH][R][4];

    // Past L1: this may be before a launch waits.
    template <class Operand>
    __device__ __forceinline__ void begin(const Operand& operand, const Chunks& chunks) {
#pragma unroll
        for (int i = 0; i < DEPTH; ++i) load<true>(operand, i, chunks.first + i * chunks.step, chunks.last);
    }
    template <bool PAST_L1, class Operand>
    __device__ __forceinline__ void load(const Operand& operand, int i, int chunk, int last) {
        if (chunk < last) operand.template load<PAST_L1>(v[i], chunk);
    }
};

// A warp's tile of a * b, to `tile`; both are begun.
template <class P, int R, bool PAST_L1 = false, class A, class B>
__device__ __forceinline__ void sum_up(float (&tile)[8 * R][8 * R + 4], const A& a, Ahead<R>& of_a, const B& b,
                                       Ahead<R>& of_b, const Chunks& chunks) {
    constexpr int DEPTH = Ahead<R>::DEPTH;
    float totals[R / 2][R][4] = {}, sums[R / 2][R][4] = {};
    int done = 0;
#pragma unroll 1
    for (int chunk = chunks.first; chunk < chunks.last; chunk += DEPTH * chunks.step) {
#pragma unroll
        for (int i = 0; i < DEPTH; ++i) {
            const int now = chunk + i * chunks.step, next = now + DEPTH * chunks.step;
            if (now >= chunks.last) break;
            const Words<P, R> words_a(of_a.v[i]), words_b(of_b.v[i]);
            of_a.template load<PAST_L1>(a, i, next, chunks.last);
            of_b.template load<PAST_L1>(b, i, next, chunks.last);
            multiply<P, R>(sums, words_a, words_b);
            if (++done % PART<P> == 0) move_sums<R>(totals, sums);
        }
    }
    move_sums<R>(totals, sums);
    store_tile<R>(tile, totals);
}

// Where four neighbours of a block's numbers lie, and which tiles they are the sum of.
template <int R>
struct Four {
    int tile, row, column;  // of the tile

    __device__ __forceinline__ explicit Four(int item)
        : tile(item / (16 * R * R)), row(item % (16 * R * R) / (2 * R)), column(item % (2 * R) * 4) {}
    __device__ __forceinline__ int block_row(const Warps& warps) const { return tile / warps.across * 8 * R + row; }
    __device__ __forceinline__ int block_column(const Warps& warps) const {
        return tile % warps.across * 8 * R + column;
    }
};

// When all warps have left their tiles: finish(row, column, four sums, fetch(row, column)) for all of the block's rows
// and columns. What several sums need is fetched first, so that none waits for another's.
template <int R, class Fetch, class Finish>
__device__ __forceinline__ void finish_tiles(const Tiles<R>& tiles, const Warps& warps, const Fetch& fetch,
                                             const Finish& finish) {
    constexpr int AT_ONCE = 4;
    const int items = warps.down * warps.across * 16 * R * R;
    decltype(fetch(0, 0)) fetched[AT_ONCE];
    const auto fetch_some = [&](int first) {
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const Four<R> four(first + i * THREADS);
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
            const Four<R> four(first + i * THREADS);
            float4 sum = load4(&tiles.at[four.tile * warps.deep][four.row][four.column]);
            for (int part = 1; part < warps.deep; ++part) {
                const float4 v = load4(&tiles.at[four.tile * warps.deep + part][four.row][four.column]);
                sum = {sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w};
            }
            finish(four.block_row(warps), four.block_column(warps), sum, fetched[i]);
        }
        first += AT_ONCE * THREADS;
        fetch_some(first);
    }
}

// Where a warp's tile lies in its block's, and which share of the sums is its own.
template <int R>
struct WarpPlace {
    int row, column, part;
    __device__ __forceinline__ explicit WarpPlace(const Warps& warps) {
        const int warp = threadIdx.x / 32, tile = warp / warps.deep;
        part = warp % warps.deep;
        row = tile / warps.across * 8 * R;
        column = tile % warps.across * 8 * R;
    }
};
