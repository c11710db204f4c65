// gradient/embedding.cu: the gradient of a table of V rows: row v is the sum of the rows of dy whose id is v, or zero.
//
// Idea    The ids are sorted (gradient/sort_ids.cu). sum_rows: a warp sums ROWS rows of the table, the rows of one id
//         in the order of the batch. An id that occurs often would keep one warp busy: blocks sum the chunks of sorted
//         ids that have one id, and sum_long_rows, a block per such id, adds them up with the rows before and after.
// Order   Lines (threads with the same columns) alternate over rows, or over chunks; then a tree. Where chunks begin
//         depends on the ids alone.
// Floor   ids * E elements are read, V * E written: 4,096 x 56 ids, V = 20,000, E = 128, float32: 128 MB / 4.2 TB/s =
//         30 us.
// Layout  dw (V, E); keys, order, ranges as in gradient/sort_ids.cu. TableRows: dy (ids, E). WindowRows, of a
//         TokenConv: dy (B, C, P), ids (B, S), E = (K, C).
// Shared  A partial sum per thread: up to 8 KB.
// Limits  Sizes at run time; float32, float16 and bfloat16 are summed in float32, float64 in float64; sm_80 up.
#include "common/accumulator.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32, ROWS = 4;

template <class T, int WIDTH>
struct TableRows {
    const T* dy;
    long long E;
    using Element = T;
    static constexpr int W = WIDTH;  // adjacent columns per thread
    // Columns W word to W word + W - 1 of the row at this position of the batch.
    __device__ __forceinline__ void load(acc_t<T> (&v)[W], u32 position, u32 word) const {
        load_contiguous(dy + position * E + word * W, v);
    }
};
template <class T>
struct WindowRows {
    const T* dy;
    u32 S, C, P, stride, before;
    using Element = T;
    static constexpr int W = 1;
    // Tap k of position p reads id p * stride - before + k.
    __device__ __forceinline__ void load(acc_t<T> (&v)[1], u32 position, u32 word) const {
        const u32 k = word / C, c = word % C, at = position % S + before - k, p = at / stride;
        const bool is_read = position % S + before >= k && p * stride == at && p < P;
        v[0] = is_read ? load_acc(dy + (static_cast<long long>(position / S) * C + c) * P + p) : acc_t<T>(0);
    }
};

struct Table {
    u32 V, words, lane_bits, tiles;  // words of W columns per row; 2^lane_bits lanes share a row, `tiles` times
    u32 chunk_bits, chunks;          // log2 of the ids per chunk; whole chunks
};

// Which columns a thread sums, and its line among threads with the same columns.
struct Place {
    u32 word, line, lines;
    bool is_inside;
};
__device__ __forceinline__ Place place_of(const Table& table, u32 tile, u32 thread, u32 threads) {
    const u32 lanes = 1u << table.lane_bits, word = tile * lanes + (thread & lanes - 1);
    return {word, thread >> table.lane_bits, threads >> table.lane_bits, word < table.words};
}

template <class Rows>
__device__ __forceinline__ void add_rows(acc_t<typename Rows::Element> (&sum)[Rows::W], const Rows& rows,
                                         const u32* order, u32 begin, u32 end, const Place& place) {
    if (!place.is_inside) return;
#pragma unroll 4
    for (u32 i = begin + place.line; i < end; i += place.lines) {
        acc_t<typename Rows::Element> v[Rows::W];
        rows.load(v, order[i], place.word);
#pragma unroll
        for (int j = 0; j < Rows::W; ++j) sum[j] += v[j];
    }
}

// The sums of a warp's lines; all of them get it.
template <class W, int N>
__device__ __forceinline__ void join_lines(W (&sum)[N], u32 lane_bits) {
    for (u32 mask = 1u << lane_bits; mask < 32; mask *= 2)
#pragma unroll
        for (int j = 0; j < N; ++j) sum[j] += __shfl_xor_sync(~0u, sum[j], mask);
}
// The sums of a block's lines; those of the first warp get it.
template <class W, int N>
__device__ __forceinline__ void join_warps(W (&sum)[N], u32 lane_bits) {
    __shared__ W partials[WARPS][32][N];
    join_lines(sum, lane_bits);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int j = 0; j < N; ++j) partials[warp][lane][j] = sum[j];
    __syncthreads();
    if (warp > 0) return;
    for (int other = 1; other < WARPS; ++other)
#pragma unroll
        for (int j = 0; j < N; ++j) sum[j] += partials[other][lane][j];
}

// Whether all ids of a chunk are one id of the table.
__device__ __forceinline__ bool is_full(const u32* keys, u32 chunk, const Table& table) {
    const u32 key = keys[chunk << table.chunk_bits];
    return key < table.V && keys[(chunk + 1 << table.chunk_bits) - 1] == key;
}
// The first chunk that begins in a range, rounded up.
__device__ __forceinline__ u32 first_chunk(uint2 range, u32 chunk_bits) {
    return range.x + (1u << chunk_bits) - 1 >> chunk_bits;
}

// The first chunks * tiles blocks sum chunks, the others rows. Four blocks per SM: else the compiler spills.
template <class Rows>
__global__ void __launch_bounds__(THREADS, 4)
    sum_rows(const __grid_constant__ Rows rows, const u32* keys, const u32* order, const uint2* ranges,
             acc_t<typename Rows::Element>* chunk_sums, typename Rows::Element* dw, const __grid_constant__ Table table) {
    constexpr int W = Rows::W;
    using Acc = acc_t<typename Rows::Element>;
    const long long E = static_cast<long long>(table.words) * W;
    const u32 chunk_blocks = table.chunks * table.tiles;
    if (blockIdx.x < chunk_blocks) {
        const u32 chunk = blockIdx.x / table.tiles;
        if (!is_full(keys, chunk, table)) return;
        const Place place = place_of(table, blockIdx.x % table.tiles, threadIdx.x, THREADS);
        alignas(16) Acc sum[W] = {};
        add_rows(sum, rows, order, chunk << table.chunk_bits, chunk + 1 << table.chunk_bits, place);
        join_warps(sum, table.lane_bits);
        if (place.line == 0 && place.is_inside) store_contiguous(chunk_sums + chunk * E + place.word * W, sum);
        return;
    }
    // A warp's rows are far apart: ids that occur often tend to be neighbours.
    const u32 warp = (blockIdx.x - chunk_blocks) * WARPS + threadIdx.x / 32, step = (table.V + ROWS - 1) / ROWS;
    const u32 first = warp / table.tiles;
    if (first >= step) return;
    const Place place = place_of(table, warp % table.tiles, threadIdx.x % 32, 32);
    uint2 range[ROWS];
#pragma unroll
    for (int k = 0; k < ROWS; ++k) range[k] = first + k * step < table.V ? ranges[first + k * step] : uint2{0, 0};
#pragma unroll
    for (int k = 0; k < ROWS; ++k) {
        const u32 v = first + k * step;
        const u32 full_end = first_chunk(range[k], table.chunk_bits) + 1 << table.chunk_bits;
        if (v >= table.V || full_end <= range[k].y) continue;  // sum_long_rows
        alignas(16) Acc sum[W] = {};
        add_rows(sum, rows, order, range[k].x, range[k].y, place);
        if (range[k].y - range[k].x > 1) join_lines(sum, table.lane_bits);
        if (place.line == 0 && place.is_inside) store_contiguous(dw + v * E + place.word * W, sum);
    }
}

// A block per chunk; that of the first full chunk of an id computes its row.
template <class Rows>
__global__ void __launch_bounds__(THREADS)
    sum_long_rows(const __grid_constant__ Rows rows, const u32* keys, const u32* order, const uint2* ranges,
                  const acc_t<typename Rows::Element>* chunk_sums, typename Rows::Element* dw,
                  const __grid_constant__ Table table) {
    constexpr int W = Rows::W;
    using Acc = acc_t<typename Rows::Element>;
    const long long E = static_cast<long long>(table.words) * W;
    const u32 chunk = blockIdx.x / table.tiles;
    if (!is_full(keys, chunk, table)) return;
    const u32 key = keys[chunk << table.chunk_bits];
    const uint2 range = ranges[key];
    if (first_chunk(range, table.chunk_bits) != chunk) return;
    const Place place = place_of(table, blockIdx.x % table.tiles, threadIdx.x, THREADS);
    const u32 end = range.y >> table.chunk_bits;
    alignas(16) Acc sum[W] = {};
    add_rows(sum, rows, order, range.x, chunk << table.chunk_bits, place);
    if (place.is_inside) {
#pragma unroll 4
        for (u32 i = chunk + place.line; i < end; i += place.lines) {
            Acc v[W];
            load_contiguous(chunk_sums + i * E + place.word * W, v);
#pragma unroll
            for (int j = 0; j < W; ++j) sum[j] += v[j];
        }
    }
    add_rows(sum, rows, order, end << table.chunk_bits, range.y, place);
    join_warps(sum, table.lane_bits);
    if (place.line == 0 && place.is_inside) store_contiguous(dw + key * E + place.word * W, sum);
}
