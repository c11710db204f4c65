// softmax.cu: Softmax and LogSoftmax along an axis of (outer, N, inner).
//
// Idea    softmax_lanes (inner = 1): some lanes of a warp hold a short row in registers; softmax_rows: a block walks over
//         a long one. softmax_columns: a warp's lanes stand next to each other, eight warps share 32 columns and hold
//         them in registers if they are short. Longer ones are walked over three times: for the largest, for the sum and
//         for the result; the second and third time they are in the cache.
// Floor   Every number is read once and written once: 2^28 floats are 2.15 GB / 4.8 TB/s = 447 us.
// Order   Sums are float64, thread by thread every so many numbers, then in a tree: N alone decides.
// Layout  x, y (outer, N, inner), row-major; they may be the same memory.
// Limits  Any shape with N >= 1; float32, float16, bfloat16, float64; sm_80 up.
#include "reduce.cuh"

constexpr int THREADS = 256, COLUMNS = 32, LINES = THREADS / COLUMNS;

// held    what a thread keeps of a number: itself, or its exponential
// share   what is made of the sum, once a row
// finish  the result
struct Softmax {
    template <class W>
    static __device__ __forceinline__ W held(W, W exponential) {
        return exponential;
    }
    template <class W>
    static __device__ __forceinline__ W share(double total) {
        return static_cast<W>(1.0 / total);
    }
    template <class W>
    static __device__ __forceinline__ W finish(W held, W share) {
        return held * share;
    }
};
struct LogSoftmax {
    template <class W>
    static __device__ __forceinline__ W held(W shifted, W) {
        return shifted;
    }
    template <class W>
    static __device__ __forceinline__ W share(double total) {
        return static_cast<W>(log(total));
    }
    template <class W>
    static __device__ __forceinline__ W finish(W held, W share) {
        return held - share;
    }
};
// Of a number that was not held.
template <class How, class W>
__device__ __forceinline__ W finish_again(W shifted, W share) {
    return How::finish(How::held(shifted, is_same<How, Softmax> ? exp_of(shifted) : shifted), share);
}

// LANES of a warp share a row and hold it in registers: N <= LANES * ITEMS.
template <class How, class T, int LANES, int ITEMS>
__global__ void __launch_bounds__(THREADS) softmax_lanes(const T* x, T* y, long long outer, int N) {
    using W = wide_t<T>;
    constexpr int ROWS = THREADS / LANES;
    const int me = threadIdx.x % LANES;
    for (long long first = static_cast<long long>(blockIdx.x) * ROWS; first < outer; first += gridDim.x * ROWS) {
        const long long row = first + threadIdx.x / LANES;
        const T* from = x + (row < outer ? row : outer - 1) * N;  // all lanes take part in the trees
        W v[ITEMS], highest = load_wide(from);
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) v[i] = me + i * LANES < N ? load_wide(from + me + i * LANES) : highest;
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) highest = larger(highest, v[i]);
        highest = reduce_lanes<Largest, LANES>(highest);
        double sum = 0;
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const W e = exp_of(v[i] - highest);
            v[i] = How::held(v[i] - highest, e);
            if (me + i * LANES < N) sum += e;
        }
        const W share = How::template share<W>(reduce_lanes<Sum, LANES>(sum));
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            if (me + i * LANES < N && row < outer) store_wide(y + row * N + me + i * LANES, How::finish(v[i], share));
        }
    }
}

// A block shares a row of any length: it is read three times.
template <class How, class T>
__global__ void __launch_bounds__(THREADS) softmax_rows(const T* x, T* y, long long outer, long long N) {
    using W = wide_t<T>;
    for (long long row = blockIdx.x; row < outer; row += gridDim.x) {
        const T* from = x + row * N;
        W highest = load_wide(from);
        for (long long n = threadIdx.x; n < N; n += THREADS) highest = larger(highest, load_wide(from + n));
        highest = reduce_lanes<Largest, THREADS>(highest);
        double sum = 0;
        for (long long n = threadIdx.x; n < N; n += THREADS) sum += exp_of(load_wide(from + n) - highest);
        const W share = How::template share<W>(reduce_lanes<Sum, THREADS>(sum));
        for (long long n = threadIdx.x; n < N; n += THREADS) {
            store_wide(y + row * N + n, finish_again<How>(load_wide(from + n) - highest, share));
        }
    }
}

// ITEMS  numbers of a column that a thread holds in registers: N <= LINES * ITEMS; 0: any N, read three times
template <class How, class T, int ITEMS>
__global__ void __launch_bounds__(THREADS)
    softmax_columns(const T* x, T* y, long long outer, long long N, long long inner) {
    using W = wide_t<T>;
    __shared__ W highests[LINES][COLUMNS];
    __shared__ double sums[LINES][COLUMNS];
    const int lane = threadIdx.x % COLUMNS, line = threadIdx.x / COLUMNS;
    const long long across = (inner + COLUMNS - 1) / COLUMNS;
    for (long long tile = blockIdx.x; tile < outer * across; tile += gridDim.x) {
        const long long row = tile / across, column = (tile - row * across) * COLUMNS + lane;
        const bool is_inside = column < inner;
        const long long first = row * N * inner + (is_inside ? column : inner - 1);
        W v[ITEMS ? ITEMS : 1], highest = load_wide(x + first);
        if constexpr (ITEMS > 0) {
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) {
                const int n = line + i * LINES;
                v[i] = n < N ? load_wide(x + first + n * inner) : highest;
            }
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) highest = larger(highest, v[i]);
        } else {
            for (long long n = line; n < N; n += LINES) highest = larger(highest, load_wide(x + first + n * inner));
        }
        highests[line][lane] = highest;
        __syncthreads();
#pragma unroll
        for (int other = 0; other < LINES; ++other) highest = larger(highest, highests[other][lane]);
        double sum = 0;
        if constexpr (ITEMS > 0) {
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) {
                const W e = exp_of(v[i] - highest);
                v[i] = How::held(v[i] - highest, e);
                if (line + i * LINES < N) sum += e;
            }
        } else {
            for (long long n = line; n < N; n += LINES) sum += exp_of(load_wide(x + first + n * inner) - highest);
        }
        sums[line][lane] = sum;
        __syncthreads();
        sum = 0;
#pragma unroll
        for (int other = 0; other < LINES; ++other) sum += sums[other][lane];
        const W share = How::template share<W>(sum);
        if constexpr (ITEMS > 0) {
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) {
                const int n = line + i * LINES;
                if (is_inside && n < N) store_wide(y + first + n * inner, How::finish(v[i], share));
            }
        } else if (is_inside) {
            for (long long n = line; n < N; n += LINES) {
                store_wide(y + first + n * inner, finish_again<How>(load_wide(x + first + n * inner) - highest, share));
            }
        }
        __syncthreads();
    }
}
