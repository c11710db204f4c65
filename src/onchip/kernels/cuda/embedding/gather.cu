// embedding/gather.cu: embedding look-ups: gather copies rows, gather_sum sums the rows of all ids of a batch row,
// token_conv sums them along a window of ids.
//
// Idea    gather: 2^lane_bits threads copy a row, one word each, up to a block; words are as wide as rows allow, up to
//         16 B, of any dtype. token_conv: a thread owns one channel of one row of ids and loops over positions, so a
//         warp's table reads coalesce. gather_sum: a thread owns W adjacent channels and PART ids at a time; all their
//         loads are in flight at once, and the G threads with the same channels add their partial sums in order.
// Floor   gather: an id and 2 rows per position. 2^20 ids, rows of 256 float32: 2.15 GB / 4.8 TB/s = 449 us; half if
//         the table is in L2. token_conv: K rows per position, from L2 if the table fits. gather_sum: ids and rows:
//         4,096 rows of 50 ids of 64 float16 are 26 MB / 10 TB/s (L2) = 3 us. It sums PART ids at a time, in order.
// Layout  ids (count) or (B, S); table (V, row_words), (V, E) or (V, K, C); y (count, row_words), (B, E) or (B, C, P);
//         all 16 B aligned.
// Shared  gather_sum: W sums per thread, up to 4 KiB per block, if G > 1.
// Limits  Run-time sizes; int32 or int64 ids. token_conv: float32, float16, bfloat16 accumulate in float32 in tap
//         order; float64 in float64; sm_80 up.
#include "common/fast_divide.cuh"
#include "common/status.cuh"
#include "common/accumulator.cuh"

constexpr int THREADS = 256, PART = 16;

template <class Id, class Word>
__global__ void __launch_bounds__(THREADS)
    gather(const Id* ids, const Word* table, Word* y, u64* status, long long count, long long V, long long row_words,
           u32 lane_bits) {
    const u32 lanes = 1u << lane_bits, lane = threadIdx.x & (lanes - 1);
    const long long step = static_cast<long long>(gridDim.x) * THREADS >> lane_bits;
    for (long long i = (static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x) >> lane_bits; i < count;
         i += step) {
        const Word* from = table + checked_id(ids, i, V, status) * row_words;
        Word* to = y + i * row_words;
#pragma unroll 4
        for (long long w = lane; w < row_words; w += lanes) to[w] = from[w];
    }
}

// Sums the rows of `count` ids from ids[position] on. All loads are issued before the first addition.
template <class Id, class T, int W>
__device__ __forceinline__ void sum_rows(const Id* ids, long long position, int count, const T* columns, u64* status,
                                         long long V, u32 E, acc_t<T> (&sum)[W]) {
    long long id[PART];
#pragma unroll
    for (int k = 0; k < PART; ++k) id[k] = k < count ? static_cast<long long>(ids[position + k]) : 0;
    bool is_bad = false;
#pragma unroll
    for (int k = 0; k < PART; ++k) is_bad |= static_cast<u64>(id[k]) >= static_cast<u64>(V);
    if (is_bad) {
#pragma unroll
        for (int k = 0; k < PART; ++k) {
            if (static_cast<u64>(id[k]) < static_cast<u64>(V)) continue;
            report_bad_id(status, static_cast<u64>(position + k), id[k]);
            id[k] = 0;
        }
    }
    using Word = typename Vector<sizeof(T) * W>::type;
    Word rows[PART];
#pragma unroll
    for (int k = 0; k < PART; ++k) rows[k] = *reinterpret_cast<const Word*>(columns + id[k] * E);
#pragma unroll
    for (int k = 0; k < PART; ++k)
#pragma unroll
        for (int j = 0; j < W; ++j)
            if (k < count) sum[j] += load_acc(reinterpret_cast<const T*>(rows + k) + j);
}

// count  S for a mean, 1 for a sum
// G      threads that share a sum; they alternate over chunks of PART ids
template <class Id, class T, int W, int G>
__global__ void __launch_bounds__(THREADS)
    gather_sum(const Id* ids, const T* table, T* y, u64* status, long long B, long long S, long long V, Divider words,
               u32 divisor) {
    using Acc = acc_t<T>;
    constexpr int SUMS = THREADS / G;
    __shared__ __align__(16) Acc partials[G][SUMS][W];
    const u32 E = words.size * W, g = threadIdx.x / SUMS, local = threadIdx.x % SUMS;
    const long long i = static_cast<long long>(blockIdx.x) * SUMS + local;
    const bool is_valid = i < B * words.size;
    const long long b = !is_valid ? 0 : i < 1ll << 31 ? quotient(static_cast<u32>(i), words) : quotient(i, words);
    const long long e = is_valid ? (i - b * words.size) * W : 0;
    alignas(16) Acc total[W] = {};
    for (long long begin = 0; begin < S; begin += G * PART) {
        const long long at = begin + g * PART;
        Acc part[W] = {};
        if (is_valid && at < S) {
            const int count = static_cast<int>(min(S - at, static_cast<long long>(PART)));
            sum_rows(ids, b * S + at, count, table + e, status, V, E, part);
        }
        if constexpr (G > 1) {
            if (begin > 0) __syncthreads();
#pragma unroll
            for (int j = 0; j < W; ++j) partials[g][local][j] = part[j];
            __syncthreads();
            if (g > 0) continue;
        }
        // Partial sums in id order; the first always exists.
#pragma unroll
        for (int chunk = 0; chunk < G; ++chunk) {
            if (begin + chunk * PART >= S) break;
#pragma unroll
            for (int j = 0; j < W; ++j) total[j] += chunk == 0 ? part[j] : partials[chunk][local][j];
        }
    }
    if (!is_valid || g > 0) return;
#pragma unroll
    for (int j = 0; j < W; ++j) total[j] /= static_cast<Acc>(divisor);
    store_contiguous(y + b * E + e, total);
}

// bias  (C), or nullptr
template <class Id, class T, class Y>
__global__ void __launch_bounds__(THREADS)
    token_conv(const Id* ids, const T* table, const Y* bias, Y* y, u64* status, long long B, long long S, long long V,
               u32 K, u32 C, u32 P, u32 stride, u32 before) {
    const long long step = static_cast<long long>(gridDim.x) * THREADS;
    for (long long i = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x; i < B * C; i += step) {
        const long long b = i / C, c = i % C;
        const acc_t<Y> shift = bias == nullptr ? 0 : load_acc(bias + c);
        for (u32 p = 0; p < P; ++p) {
            acc_t<Y> sum = 0;
            for (u32 k = 0; k < K; ++k) {
                const long long at = static_cast<long long>(p) * stride - before + k;
                if (at < 0 || at >= S) continue;  // padding
                sum += load_acc(table + (checked_id(ids, b * S + at, V, status) * K + k) * C + c);
            }
            store_acc(y + i * P + p, sum + shift);
        }
    }
}
