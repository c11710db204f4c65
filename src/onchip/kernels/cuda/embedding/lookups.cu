// embedding/lookups.cu: rows of several embedding tables in one launch, stored in one concatenated value or in several.
//
// Idea    Every part gets the same number of blocks. 2^lane_bits threads copy a row, word by word. Strides address the
//         ids, so Slices of ids need no copy. A part without ids copies a value unchanged.
// Floor   Each id is read once, each row read and written once: 4,096 rows of 8 ids, tables of 16 float32:
//         4.5 MB / 4.8 TB/s = 0.9 us.
// Layout  Item j of row b of part p is stored at to[b * to_row + to_first + j * words]. Its source is the table row
//         ids[b * row + first + j * each], or from[b * row + first + j * each]. Units: ids, or words.
// Limits  Up to 16 parts and 8 status words per launch; words of 1, 2, 4, 8 or 16 B, aligned; int32 or int64 ids;
//         sm_80 up.
#include "common/status.cuh"

constexpr int THREADS = 256, MOST = 16;

using u32 = unsigned int;

struct Part {
    long long each, row, first, V, to_row, to_first;
    u32 count, words, lane_bits, status;  // items per batch row, words and log2 threads per item, status index
};
struct Parts {
    const void* from[MOST];
    const void* ids[MOST];
    void* to[MOST];
    Part part[MOST];
};

// blocks  per part
template <class Id, class Word>
__global__ void __launch_bounds__(THREADS)
    lookups(const __grid_constant__ Parts parts, u64* s0, u64* s1, u64* s2, u64* s3, u64* s4, u64* s5, u64* s6, u64* s7,
            long long B, u32 blocks) {
    const u32 which = blockIdx.x / blocks;
    const Part& part = parts.part[which];
    const Word* const from = static_cast<const Word*>(parts.from[which]);
    const Id* const ids = static_cast<const Id*>(parts.ids[which]);
    Word* const to = static_cast<Word*>(parts.to[which]);
    u64* const low = part.status & 1 ? (part.status & 2 ? s3 : s1) : (part.status & 2 ? s2 : s0);
    u64* const high = part.status & 1 ? (part.status & 2 ? s7 : s5) : (part.status & 2 ? s6 : s4);
    u64* const status = part.status & 4 ? high : low;
    const u32 lanes = 1u << part.lane_bits, lane = threadIdx.x & (lanes - 1);
    const long long step = static_cast<long long>(blocks) * THREADS >> part.lane_bits;
    long long i = (static_cast<long long>(blockIdx.x % blocks) * THREADS + threadIdx.x) >> part.lane_bits;
    for (; i < B * part.count; i += step) {
        const long long b = i / part.count, j = i % part.count, place = b * part.row + part.first + j * part.each;
        const Word* const x = from + (ids != nullptr ? checked_id(ids, place, part.V, status) * part.words : place);
        Word* const y = to + b * part.to_row + part.to_first + j * part.words;
#pragma unroll 4
        for (u32 w = lane; w < part.words; w += lanes) y[w] = x[w];
    }
}
