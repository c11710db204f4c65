// scan/rows.cu: scan (prefix sum) of many short rows, a few lanes of a warp per row.
//
// Idea    LANES lanes, up to a warp, scan a row four chunks at a time, one vector per lane and chunk, so four loads are
//         in flight. Rows are independent.
// Floor   Each element is read and written once: 2^28 floats are 2.15 GB / 4.8 TB/s = 447 us.
// Layout  x, y: contiguous rows of N elements; y may alias x.
// Limits  Any N, any number of rows; ints of 1 to 8 bytes, all floats; sm_80 up. Rows not aligned to a vector
//         (scan/scan.cuh) and reverse scans load element by element.
#include "scan/scan.cuh"

constexpr int THREADS = 256, CHUNKS = 4;

template <class Op, class S, bool EXCLUSIVE, bool REVERSE, int LANES>
__device__ void scan(const S* x, S* y, long long rows, long long N) {
    using T = computed_t<S>;
    using Total = typename Op::template Total<T>;
    constexpr int V = VECTOR<T>, STEP = LANES * V;
    const long long row_step = static_cast<long long>(gridDim.x) * (THREADS / LANES);
    const long long first_row = (static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x) / LANES;
    const int lane_offset = threadIdx.x % LANES * V;
    // Rounded up: all lanes of a warp take part in its shuffles, those past the last row with length 0.
    for (long long row = first_row; row - first_row % (32 / LANES) < rows; row += row_step) {
        const long long length = row < rows ? N : 0;
        const S* from = x + row * N;
        S* to = y + row * N;
        const bool is_aligned_row = !REVERSE && is_aligned(from, to);
        Total total = Op::template identity<Total>();
        for (long long begin = 0; begin < N; begin += CHUNKS * STEP) {
            T v[CHUNKS][V];
#pragma unroll
            for (int j = 0; j < CHUNKS; ++j) {
                const long long i = begin + j * STEP + lane_offset;
                if (is_aligned_row && i + V <= length) {
                    load_streaming(v[j], from + i);
                } else {
#pragma unroll
                    for (int k = 0; k < V; ++k) {
                        v[j][k] = Op::template identity<T>();
                        if (i + k < length) v[j][k] = to_computed(from[REVERSE ? N - 1 - i - k : i + k]);
                    }
                }
            }
            const T offset = static_cast<T>(total);
            T running = Op::template identity<T>();
#pragma unroll
            for (int j = 0; j < CHUNKS; ++j) {
                if (begin + j * STEP < N) scan_chunk<Op, LANES, EXCLUSIVE>(v[j], running);
            }
            total = Op::combine(total, static_cast<Total>(running));
#pragma unroll
            for (int j = 0; j < CHUNKS; ++j) {
#pragma unroll
                for (int k = 0; k < V; ++k) v[j][k] = Op::combine(offset, v[j][k]);
                const long long i = begin + j * STEP + lane_offset;
                if (is_aligned_row && i + V <= length) {
                    store_streaming(to + i, v[j]);
                } else {
#pragma unroll
                    for (int k = 0; k < V; ++k) {
                        if (i + k < length) to[REVERSE ? N - 1 - i - k : i + k] = to_stored<S>(v[j][k]);
                    }
                }
            }
        }
    }
}

template <class Op, class S, bool EXCLUSIVE, bool REVERSE, int LANES>
__global__ void __launch_bounds__(THREADS) scan_rows(const S* x, S* y, long long rows, long long N) {
    scan<Op, S, EXCLUSIVE, REVERSE, LANES>(x, y, rows, N);
}
