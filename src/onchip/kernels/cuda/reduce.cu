// reduce.cu: the largest number or the mean along an axis: (outer, N, inner) becomes (outer, inner).
//
// Idea    reduce_rows (inner = 1): some lanes of a warp walk over a short row, a block over a long one, side by side.
//         reduce_columns: a warp's lanes stand next to each other, eight warps share 32 columns.
// Floor   Every number is read once: 2^28 floats are 1.07 GB / 4.8 TB/s = 224 us.
// Order   Sums are float64, thread by thread every LANES-th number (of a column every 8th), then in a tree: N alone
//         decides.
// Layout  x (outer, N, inner), y (outer, inner), row-major.
// Limits  Any shape with N >= 1; float32, float16, bfloat16, float64; sm_80 up.
#include "reduce.cuh"

constexpr int THREADS = 256, COLUMNS = 32, LINES = THREADS / COLUMNS;

struct Max {
    using Op = Largest;
    template <class T>
    using Total = wide_t<T>;
    template <class W>
    static __device__ __forceinline__ W finish(W total, long long) {
        return total;
    }
};
struct Mean {
    using Op = Sum;
    template <class T>
    using Total = double;
    static __device__ __forceinline__ double finish(double total, long long N) { return total / N; }
};

// LANES  threads that share a row: some of a warp, or a block
template <class How, class T, int LANES>
__global__ void __launch_bounds__(THREADS) reduce_rows(const T* x, T* y, long long outer, long long N) {
    using Total = typename How::template Total<T>;
    constexpr int ROWS = THREADS / LANES;
    const int me = threadIdx.x % LANES;
    for (long long first = static_cast<long long>(blockIdx.x) * ROWS; first < outer; first += gridDim.x * ROWS) {
        const long long row = first + threadIdx.x / LANES;
        const T* from = x + (row < outer ? row : outer - 1) * N;  // all lanes take part in the tree
        // A thread without a number holds the row's first for a maximum, nothing for a sum.
        Total total = is_same<How, Max> ? static_cast<Total>(load_wide(from)) : Total(0);
        for (long long n = me; n < N; n += LANES) total = How::Op::join(total, static_cast<Total>(load_wide(from + n)));
        total = reduce_lanes<typename How::Op, LANES>(total);
        if (me == 0 && row < outer) store_wide(y + row, static_cast<wide_t<T>>(How::finish(total, N)));
    }
}

template <class How, class T>
__global__ void __launch_bounds__(THREADS)
    reduce_columns(const T* x, T* y, long long outer, long long N, long long inner) {
    using Total = typename How::template Total<T>;
    __shared__ Total totals[LINES][COLUMNS];
    const int lane = threadIdx.x % COLUMNS, line = threadIdx.x / COLUMNS;
    const long long across = (inner + COLUMNS - 1) / COLUMNS;
    for (long long tile = blockIdx.x; tile < outer * across; tile += gridDim.x) {
        const long long row = tile / across, column = tile % across * COLUMNS + lane;
        const T* from = x + row * N * inner + (column < inner ? column : inner - 1);
        Total total = is_same<How, Max> ? static_cast<Total>(load_wide(from)) : Total(0);
        for (long long n = line; n < N; n += LINES) {
            total = How::Op::join(total, static_cast<Total>(load_wide(from + n * inner)));
        }
        totals[line][lane] = total;
        __syncthreads();
        if (line == 0) {
#pragma unroll
            for (int other = 1; other < LINES; ++other) total = How::Op::join(total, totals[other][lane]);
            if (column < inner) store_wide(y + row * inner + column, static_cast<wide_t<T>>(How::finish(total, N)));
        }
        __syncthreads();
    }
}
