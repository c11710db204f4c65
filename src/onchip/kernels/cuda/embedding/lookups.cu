// embedding/lookups.cu: rows of several embedding tables in one launch, stored in one concatenated value or in several.
//
// Idea    Every source gets as many blocks. 2^lane_bits threads copy a row, word by word. Strides address the ids, so
//         Slices of ids need no copy. A source without ids is a value, copied unchanged.
// Floor   Each id is read once, each row read and written once: 4,096 rows of 8 ids, tables of 16 float32:
//         4.5 MB / 4.8 TB/s = 0.9 us.
// Layout  Item j of row b of a source is stored at to[b * to_row + to_first + j * words]. It is the table row
//         ids[b * row + first + j * each], or from[b * row + first + j * each]. Units: ids, or words.
// Limits  Up to 16 sources and 8 status words per launch; words of 1, 2, 4, 8 or 16 B, aligned; int32 or int64 ids;
//         sm_80 up.
#include "common/status.cuh"

constexpr int THREADS = 256, MAX_SOURCES = 16;

using u32 = unsigned int;

struct Source {
    long long each, row, first, V, to_row, to_first;
    u32 count, words, lane_bits, status;  // items per batch row, words and log2 threads per item, status at
};
struct Sources {
    const void* x[MAX_SOURCES];
    const void* ids[MAX_SOURCES];
    void* y[MAX_SOURCES];
    Source src[MAX_SOURCES];
};

// blocks  per src
template <class Id, class Word>
__global__ void __launch_bounds__(THREADS)
    lookups(const __grid_constant__ Sources sources, u64* s0, u64* s1, u64* s2, u64* s3, u64* s4, u64* s5, u64* s6,
            u64* s7, long long B, u32 blocks) {
    const u32 which = blockIdx.x / blocks;
    const Source& src = sources.src[which];
    const Word* const from = static_cast<const Word*>(sources.x[which]);
    const Id* const ids = static_cast<const Id*>(sources.ids[which]);
    Word* const to = static_cast<Word*>(sources.y[which]);
    u64* const low = src.status & 1 ? (src.status & 2 ? s3 : s1) : (src.status & 2 ? s2 : s0);
    u64* const high = src.status & 1 ? (src.status & 2 ? s7 : s5) : (src.status & 2 ? s6 : s4);
    u64* const status = src.status & 4 ? high : low;
    const u32 lanes = 1u << src.lane_bits, lane = threadIdx.x & (lanes - 1);
    const long long step = static_cast<long long>(blocks) * THREADS >> src.lane_bits;
    long long i = (static_cast<long long>(blockIdx.x % blocks) * THREADS + threadIdx.x) >> src.lane_bits;
    for (; i < B * src.count; i += step) {
        const long long b = i / src.count, j = i % src.count, at = b * src.row + src.first + j * src.each;
        const Word* const x = from + (ids != nullptr ? checked_id(ids, at, src.V, status) * src.words : at);
        Word* const y = to + b * src.to_row + src.to_first + j * src.words;
#pragma unroll 4
        for (u32 w = lane; w < src.words; w += lanes) y[w] = x[w];
    }
}
