// reduction/reduce.cu: max, min, sum, mean or L2 norm along an axis: (outer, N, inner) -> (outer, inner).
//
// Idea    reduce_short (inner = 1): a warp stages short rows in shared memory (reduction/short_rows.cuh), a thread per
//         row. reduce_rows: a warp per row, a block per long row, V elements per load. reduce_columns: LINES threads,
//         more for long columns, share V adjacent columns.
// Floor   Each element is read once: 2^28 floats are 1.07 GB / 4.8 TB/s = 224 us. An H200 issues 28 instructions per
//         float in that time. On sm_90a, reduce_rows<.., 32, 4> has 250 instructions in all, reduce_short<.., 1> 402: 3
//         per element, and a quarter of a 16 B copy.
// Order   Sums are float64: short rows in order; others per thread with stride LANES V (columns: LINES), then a tree.
//         Depends on N alone.
// Layout  x (outer, N, inner), y (outer, inner), row-major.
// Shared  reduce_short: reduction/short_rows.cuh, 10 KB for rows of 10 floats. reduce_columns: 256 V totals, 8 KB.
// Limits  Any shape with N >= 1; float32, float16, bfloat16, float64; sm_80 up.
#include "common/reduce.cuh"
#include "reduction/short_rows.cuh"

constexpr int THREADS = 256;

// join    accumulates the next element
// finish  the result from the total of N elements; inverse_N is 1 / N
template <class Extreme>
struct ExtremeOf {
    using Op = Extreme;
    template <class T>
    using Total = acc_t<T>;
    template <class W>
    static __device__ __forceinline__ W join(W total, W v) {
        return Op::join(total, v);
    }
    template <class T>
    static __device__ __forceinline__ acc_t<T> finish(acc_t<T> total, long long, double) {
        return total;
    }
};
using Max = ExtremeOf<Largest>;
using Min = ExtremeOf<Smallest>;
struct Plus {
    using Op = Sum;
    template <class T>
    using Total = double;
    static __device__ __forceinline__ double join(double total, double v) { return total + v; }
    template <class T>
    static __device__ __forceinline__ acc_t<T> finish(double total, long long, double) {
        return static_cast<acc_t<T>>(total);
    }
};
struct Mean : Plus {
    // Multiplying by 1 / N is as accurate as dividing, once rounded to float32, at a thirtieth of the cost.
    template <class T>
    static __device__ __forceinline__ acc_t<T> finish(double total, long long N, double inverse_N) {
        return static_cast<acc_t<T>>(is_same<T, double> ? total / N : total * inverse_N);
    }
};
struct Norm : Plus {
    static __device__ __forceinline__ double join(double total, double v) { return fma(v, v, total); }
    template <class T>
    static __device__ __forceinline__ acc_t<T> finish(double total, long long, double) {
        return static_cast<acc_t<T>>(sqrt(total));
    }
};

// V  elements per load; divides N
template <class Reduction, class T, int V>
__global__ void __launch_bounds__(SHORT_THREADS, 12)
    reduce_short(const T* x, T* y, long long outer, int N, int warp_rows, SmallDivider row_chunks) {
    using Total = typename Reduction::template Total<T>;
    extern __shared__ uint4 shared[];
    const ShortRows<T> rows(shared, N, warp_rows, row_chunks);
    const double inverse_N = 1.0 / N;
    for (long long first = rows.first(); first < outer; first += rows.step()) {
        const int height = rows.height(outer - first);
        rows.load(x + first * N, height * N);
#pragma unroll 1
        for (int row = threadIdx.x % 32; row < height; row += 32) {
            const T* row_start = rows.row(row);
            Total total = Reduction::Op::template identity<Total>();
#pragma unroll 8 / V
            for (int n = 0; n < N; n += V) {
                acc_t<T> v[V];
                load_contiguous(row_start + n, v);
#pragma unroll
                for (int j = 0; j < V; ++j) total = Reduction::join(total, static_cast<Total>(v[j]));
            }
            store_acc(y + first + row, Reduction::template finish<T>(total, N, inverse_N));
        }
        __syncwarp();
    }
}

// LANES  threads per row: a warp, or a block
// V      elements per load; divides N
template <class Reduction, class T, int LANES, int V>
__global__ void __launch_bounds__(THREADS) reduce_rows(const T* x, T* y, long long outer, long long N) {
    using Total = typename Reduction::template Total<T>;
    constexpr int ROWS = THREADS / LANES;
    const int lane = threadIdx.x % LANES;
    const double inverse_N = 1.0 / N;
    for (long long row = static_cast<long long>(blockIdx.x) * ROWS + threadIdx.x / LANES; row < outer;
         row += static_cast<long long>(gridDim.x) * ROWS) {
        const T* end = x + (row + 1) * N;
        Total total = Reduction::Op::template identity<Total>();
#pragma unroll 4
        for (const T* from = x + row * N + lane * V; from < end; from += LANES * V) {
            acc_t<T> v[V];
            load_contiguous(from, v);
#pragma unroll
            for (int j = 0; j < V; ++j) total = Reduction::join(total, static_cast<Total>(v[j]));
        }
        total = reduce_lanes<typename Reduction::Op, LANES>(total);
        if (lane == 0) store_acc(y + row, Reduction::template finish<T>(total, N, inverse_N));
    }
}

// V      adjacent columns per thread; divides inner
// LINES  threads per column: one, one of each warp, or four of each
template <class Reduction, class T, int V, int LINES>
__global__ void __launch_bounds__(THREADS)
    reduce_columns(const T* x, T* y, long long outer, long long N, long long inner) {
    using Total = typename Reduction::template Total<T>;
    constexpr int SPAN = THREADS / LINES * V;  // columns per block
    __shared__ Total totals[LINES][SPAN];
    const int lane = threadIdx.x % (SPAN / V) * V, line = threadIdx.x / (SPAN / V);
    const long long columns = outer * inner, step = LINES * inner;
    const double inverse_N = 1.0 / N;
    for (long long begin = static_cast<long long>(blockIdx.x) * SPAN; begin < columns;
         begin += static_cast<long long>(gridDim.x) * SPAN) {
        const long long column = begin + lane < columns ? begin + lane : 0;
        const T* from = x + column + column / inner * (N - 1) * inner + line * inner;
        Total total[V];
#pragma unroll
        for (int j = 0; j < V; ++j) total[j] = Reduction::Op::template identity<Total>();
#pragma unroll 4
        for (long long n = line; n < N; n += LINES, from += step) {
            acc_t<T> v[V];
            load_contiguous(from, v);
#pragma unroll
            for (int j = 0; j < V; ++j) total[j] = Reduction::join(total[j], static_cast<Total>(v[j]));
        }
        if constexpr (LINES == 1) {
            acc_t<T> result[V];
#pragma unroll
            for (int j = 0; j < V; ++j) result[j] = Reduction::template finish<T>(total[j], N, inverse_N);
            if (begin + lane < columns) store_contiguous(y + column, result);
        } else {
#pragma unroll
            for (int j = 0; j < V; ++j) totals[line][lane + j] = total[j];
            __syncthreads();
            const int index = threadIdx.x;  // one column per thread
            if (index < SPAN && begin + index < columns) {
                Total sum = totals[0][index];
#pragma unroll
                for (int other = 1; other < LINES; ++other) sum = Reduction::Op::join(sum, totals[other][index]);
                store_acc(y + begin + index, Reduction::template finish<T>(sum, N, inverse_N));
            }
            __syncthreads();
        }
    }
}
