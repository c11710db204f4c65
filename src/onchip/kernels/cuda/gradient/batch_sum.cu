// gradient/batch_sum.cu: the sum of rows: (rows, columns) -> (columns), in one or two stages.
//
// Idea    A block sums `chunk` rows of 32 columns: 8 threads share a column, each with every 8th row. Chunks are rows of
//         a second launch; it also adds the partial sums of a split-K GEMM, for a weight and its bias at once.
// Floor   Reads everything once: 64 rows of 8,192 floats are 2 MB, 0.5 us at 4.2 TB/s; a launch takes longer.
// Order   Per thread in row order, then the 8 threads in order. Chunks depend on rows and columns alone.
// Layout  x row-major; y (chunks, columns). Where y2 is set, columns from `first_columns` on are y2's.
// Limits  Any sizes; float32, float16, bfloat16, float64; partial sums float32 or float64; sm_80 up.
#include "common/accumulator.cuh"

constexpr int COLUMNS = 32, LINES = 8;

template <class T, class Y>
__global__ void __launch_bounds__(COLUMNS* LINES)
    batch_sum(const T* x, Y* y, Y* y2, long long rows, long long columns, long long first_columns, long long chunk) {
    __shared__ acc_t<T> totals[LINES][COLUMNS];
    const int lane = threadIdx.x % COLUMNS, line = threadIdx.x / COLUMNS;
    const long long column = static_cast<long long>(blockIdx.x) * COLUMNS + lane;
    const long long begin = blockIdx.y * chunk, end = begin + chunk < rows ? begin + chunk : rows;
    acc_t<T> total = 0;
    if (column < columns) {
#pragma unroll 4
        for (long long row = begin + line; row < end; row += LINES) total += load_acc(x + row * columns + column);
    }
    totals[line][lane] = total;
    __syncthreads();
    if (line > 0 || column >= columns) return;
#pragma unroll
    for (int other = 1; other < LINES; ++other) total += totals[other][lane];
    store_acc(column < first_columns ? y + blockIdx.y * columns + column : y2 + column - first_columns, total);
}
