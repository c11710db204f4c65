// gradient/step_rows.cu: the rows of a step from a data set on the GPU, and the step's row of a table, in one launch.
//
// Idea    2^lane_bits threads copy a row of one array, one word each, up to a block; words are as wide as its rows
//         allow, up to 16 B. The blocks of all arrays are one grid; each row's id is read from the order again.
// Floor   Every row is read and written once: 16,384 rows of 784 floats are 103 MB / 4.2 TB/s = 24 us.
// Layout  order (ids) int64; position: the step, and its first row in the order; data (rows, ...), y (B, ...)
//         contiguous and 16 B aligned. An index outside its array counts as the nearest one inside.
// Limits  MAX_ARRAYS per launch; any dtype; sm_80 up.
#include "common/dtype.cuh"

constexpr int THREADS = 256, MAX_ARRAYS = 24;
enum Kind : u32 { IDS, ROWS, ROW };  // the ids themselves; rows of the data by id; one row by the number of the step

struct DataArray {
    const void* data;
    void* y;
    long long rows, row_words;
    u32 first_block, kind, word_bytes, lane_bits;
};
struct DataArrays {
    DataArray array[MAX_ARRAYS];
};

__device__ __forceinline__ long long inside(long long index, long long count) {
    return index < 0 ? 0 : index < count ? index : count - 1;
}

template <class Word>
__device__ __forceinline__ void copy_row(const DataArray& a, long long from, long long to, u32 lane) {
    const Word* x = static_cast<const Word*>(a.data) + from * a.row_words;
    Word* y = static_cast<Word*>(a.y) + to * a.row_words;
#pragma unroll 4
    for (long long i = lane; i < a.row_words; i += 1u << a.lane_bits) y[i] = x[i];
}

__global__ void __launch_bounds__(THREADS)
    step_rows(const __grid_constant__ DataArrays all, int arrays, const long long* order, const long long* position,
              long long ids, long long B) {
    int index = 0;
    while (index + 1 < arrays && blockIdx.x >= all.array[index + 1].first_block) ++index;
    const DataArray& a = all.array[index];
    const u32 lane = threadIdx.x & ((1u << a.lane_bits) - 1);
    const long long row = (static_cast<long long>(blockIdx.x - a.first_block) * THREADS + threadIdx.x) >> a.lane_bits;
    if (row >= (a.kind == ROW ? 1 : B)) return;
    const long long id = a.kind == ROW ? position[0] : order[inside(position[1] + row, ids)];
    if (a.kind == IDS) {
        static_cast<long long*>(a.y)[row] = id;
        return;
    }
    const long long from = inside(id, a.rows);
    switch (a.word_bytes) {
        case 16: return copy_row<uint4>(a, from, row, lane);
        case 8: return copy_row<uint2>(a, from, row, lane);
        case 4: return copy_row<u32>(a, from, row, lane);
        case 2: return copy_row<unsigned short>(a, from, row, lane);
        default: return copy_row<unsigned char>(a, from, row, lane);
    }
}
