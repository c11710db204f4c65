// softmax.cu: Softmax and LogSoftmax along an axis of (outer, N, inner).
//
// Idea    softmax_rows (inner = 1): a warp takes a short row, a block a long one; softmax_columns: a warp's lanes stand
//         next to each other and walk down, eight warps share 32 columns. The largest, the sum, the result: three walks
//         over the same numbers, of which the second and third find them in the cache.
// Floor   Every number is read once and written once: 2^28 floats are 2.15 GB / 4.8 TB/s = 447 us.
// Order   Sums are float64, thread by thread every 32nd (256th; 8th of a column) number, then in a tree: N alone decides.
// Layout  x, y (outer, N, inner), row-major; they may be the same memory.
// Limits  Any shape with N >= 1; float32, float16, bfloat16, float64; sm_80 up.
#include "reduce.cuh"

constexpr int THREADS = 256, COLUMNS = 32, LINES = THREADS / COLUMNS;

struct Softmax {
    template <class W>
    static __device__ __forceinline__ W total_as(double total) {
        return static_cast<W>(total);
    }
    template <class W>
    static __device__ __forceinline__ W finish(W shifted, W total) {
        return exp_of(shifted) / total;
    }
};
struct LogSoftmax {
    template <class W>
    static __device__ __forceinline__ W total_as(double total) {
        return static_cast<W>(log(total));
    }
    template <class W>
    static __device__ __forceinline__ W finish(W shifted, W total) {
        return shifted - total;
    }
};

template <class How, class T, bool is_block>
__global__ void __launch_bounds__(THREADS) softmax_rows(const T* x, T* y, long long outer, long long N) {
    using W = wide_t<T>;
    constexpr int TOGETHER = is_block ? THREADS : 32;
    const int me = threadIdx.x % TOGETHER;
    const long long step = static_cast<long long>(gridDim.x) * (THREADS / TOGETHER);
    for (long long row = static_cast<long long>(blockIdx.x) * (THREADS / TOGETHER) + threadIdx.x / TOGETHER; row < outer;
         row += step) {
        const T* from = x + row * N;
        W highest = load_wide(from);
        for (long long n = me; n < N; n += TOGETHER) highest = larger(highest, load_wide(from + n));
        highest = reduce_threads<Largest, THREADS, is_block>(highest);
        double sum = 0;
        for (long long n = me; n < N; n += TOGETHER) sum += exp_of(load_wide(from + n) - highest);
        const W total = How::template total_as<W>(reduce_threads<Sum, THREADS, is_block>(sum));
        for (long long n = me; n < N; n += TOGETHER) {
            store_wide(y + row * N + n, How::finish(load_wide(from + n) - highest, total));
        }
    }
}

template <class How, class T>
__global__ void __launch_bounds__(THREADS)
    softmax_columns(const T* x, T* y, long long outer, long long N, long long inner) {
    using W = wide_t<T>;
    __shared__ W highests[LINES][COLUMNS];
    __shared__ double sums[LINES][COLUMNS];
    const int lane = threadIdx.x % COLUMNS, line = threadIdx.x / COLUMNS;
    const long long across = (inner + COLUMNS - 1) / COLUMNS;
    for (long long tile = blockIdx.x; tile < outer * across; tile += gridDim.x) {
        const long long column = tile % across * COLUMNS + lane;
        const bool is_inside = column < inner;
        const long long first = tile / across * N * inner + (is_inside ? column : inner - 1);
        W highest = load_wide(x + first);
        for (long long n = line; n < N; n += LINES) highest = larger(highest, load_wide(x + first + n * inner));
        highests[line][lane] = highest;
        __syncthreads();
#pragma unroll
        for (int other = 0; other < LINES; ++other) highest = larger(highest, highests[other][lane]);
        double sum = 0;
        for (long long n = line; n < N; n += LINES) sum += exp_of(load_wide(x + first + n * inner) - highest);
        sums[line][lane] = sum;
        __syncthreads();
        sum = 0;
#pragma unroll
        for (int other = 0; other < LINES; ++other) sum += sums[other][lane];
        const W total = How::template total_as<W>(sum);
        if (is_inside) {
            for (long long n = line; n < N; n += LINES) {
                store_wide(y + first + n * inner, How::finish(load_wide(x + first + n * inner) - highest, total));
            }
        }
        __syncthreads();
    }
}
