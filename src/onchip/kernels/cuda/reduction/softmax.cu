// reduction/softmax.cu: Softmax and LogSoftmax along an axis of (outer, N, inner).
//
// Idea    softmax_short (inner = 1): a warp stages short rows in shared memory (reduction/short_rows.cuh); a thread
//         holds a row in registers. softmax_lanes: a warp or a block holds a row in registers. softmax_columns: a
//         thread, or eight warps for longer columns, hold V adjacent columns in registers. Longer columns, and rows
//         (softmax_rows, a block each), take three passes (max, sum, result), the second and third from cache.
// Floor   Each element is read and written once: 2^28 floats are 2.15 GB / 4.8 TB/s = 447 us. An H200 issues 57
//         instructions per float in that time, half for 16-bit dtypes. On sm_90a a thread issues, for 32 floats, 887 in
//         softmax_columns<.., 4, 8, 8> and 864 in softmax_lanes<.., 256, 32>; for 64, 1,304 (f16: 983) in softmax_short.
// Order   In registers: at most 64 elements per thread, in the accumulator type, in 8 partial sums (softmax_short;
//         float64: 2) or 4 (softmax_lanes), then a tree; columns line by line. Else float64 per thread, then a tree.
//         Depends on N alone.
// Layout  x, y (outer, N, inner), row-major; may alias.
// Shared  softmax_short: short_rows.cuh, 10 KB for rows of 10 floats. softmax_columns: 16 * 32 V values, 8 KB.
// Limits  Any shape with N >= 1; float32, float16, bfloat16, float64; sm_80 up.
#include "common/elementwise.cuh"
#include "common/reduce.cuh"
#include "reduction/short_rows.cuh"

constexpr int THREADS = 256;

// cached      what a thread keeps of an element: the shifted value, or its exponential
// normaliser  per-row term computed from the sum
// finish      the result
struct Softmax {
    template <class W>
    static __device__ __forceinline__ W cached(W, W exponential) {
        return exponential;
    }
    static __device__ __forceinline__ double normaliser(double total) { return 1 / total; }
    // total is between 1 and some thousands: one Newton step is exact to the last place, without a path for subnormals.
    static __device__ __forceinline__ float normaliser(float total) {
        const float estimate = __fdividef(1, total);
        return estimate + estimate * (1 - total * estimate);
    }
    template <class W>
    static __device__ __forceinline__ W finish(W cached, W normaliser) {
        return cached * normaliser;
    }
};
struct LogSoftmax {
    template <class W>
    static __device__ __forceinline__ W cached(W shifted, W) {
        return shifted;
    }
    static __device__ __forceinline__ double normaliser(double total) { return log(total); }
    static __device__ __forceinline__ float normaliser(float total) { return logf(total); }
    template <class W>
    static __device__ __forceinline__ W finish(W cached, W normaliser) {
        return cached - normaliser;
    }
};
// 16-bit dtypes: ex2 and a multiplication. Relative error |v| 2^-24, far below the storage rounding.
template <class T>
__device__ __forceinline__ acc_t<T> exponential(acc_t<T> v) {
    if constexpr (sizeof(T) == 2) return exp2_of(1.44269504f * v);
    else return exp_of(v);
}
// The result of an element that was not cached in registers.
template <class Mode, class T, class W>
__device__ __forceinline__ W finish_uncached(W shifted, W normaliser) {
    return Mode::finish(Mode::cached(shifted, is_same<Mode, Softmax> ? exponential<T>(shifted) : shifted), normaliser);
}

// V      elements per load; divides N
// ITEMS  elements in registers per thread: N <= ITEMS
template <class Mode, class T, int V, int ITEMS>
__global__ void __launch_bounds__(SHORT_THREADS,
                                  sizeof(acc_t<T>) * ITEMS <= 64 ? 9 : sizeof(acc_t<T>) * ITEMS <= 128 ? 7 : 4)
    softmax_short(const T* x, T* y, long long outer, int N, int warp_rows, SmallDivider row_chunks) {
    using W = acc_t<T>;
    extern __shared__ uint4 shared[];
    const ShortRows<T> rows(shared, N, warp_rows, row_chunks);
    for (long long first = rows.first(); first < outer; first += rows.step()) {
        const int height = rows.height(outer - first);
        rows.load(x + first * N, height * N);
#pragma unroll 1
        for (int row = threadIdx.x % 32; row < height; row += 32) {
            constexpr int SUMS = sizeof(W) == 4 ? 8 : 2;  // 8 float64 exponentials at once need too many registers
            T* row_values = rows.row(row);
            W v[ITEMS / V][V], max_value = -__int_as_float(0x7f800000), sums[SUMS] = {};  // -infinity
#pragma unroll
            for (int i = 0; i < ITEMS / V; ++i) {
                if (i * V < N) load_contiguous(row_values + i * V, v[i]);
            }
#pragma unroll
            for (int i = 0; i < ITEMS / V; ++i) {
#pragma unroll
                for (int j = 0; j < V; ++j) {
                    if (i * V < N) max_value = larger(max_value, v[i][j]);
                }
            }
#pragma unroll
            for (int i = 0; i < ITEMS / V; ++i) {
                if (i * V < N) {
#pragma unroll
                    for (int j = 0; j < V; ++j) {
                        const W shifted = v[i][j] - max_value, e = exponential<T>(shifted);
                        v[i][j] = Mode::cached(shifted, e);
                        sums[(i * V + j) % SUMS] += e;
                    }
                }
            }
#pragma unroll
            for (int stride = 1; stride < SUMS; stride *= 2) {
#pragma unroll
                for (int j = 0; j < SUMS; j += 2 * stride) sums[j] += sums[j + stride];
            }
            const W normaliser = Mode::normaliser(sums[0]);
#pragma unroll
            for (int i = 0; i < ITEMS / V; ++i) {
                if (i * V < N) {
#pragma unroll
                    for (int j = 0; j < V; ++j) v[i][j] = Mode::finish(v[i][j], normaliser);
                    store_contiguous(row_values + i * V, v[i]);
                }
            }
        }
        rows.store(y + first * N, height * N);
    }
}

// LANES threads, a warp or a block, hold a row in registers: N <= LANES * ITEMS.
template <class Mode, class T, int LANES, int ITEMS>
__global__ void __launch_bounds__(THREADS, sizeof(acc_t<T>) == 8 ? 2 : 3)
    softmax_lanes(const T* x, T* y, long long outer, int N) {
    using W = acc_t<T>;
    constexpr int ROWS = THREADS / LANES;
    const int lane = threadIdx.x % LANES;
    for (long long row = static_cast<long long>(blockIdx.x) * ROWS + threadIdx.x / LANES; row < outer;
         row += static_cast<long long>(gridDim.x) * ROWS) {
        const T* from = x + row * N + lane;
        T* to = y + row * N + lane;
        W v[ITEMS], max_value = -__int_as_float(0x7f800000), sums[4] = {};  // -infinity
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) v[i] = lane + i * LANES < N ? load_acc(from + i * LANES) : max_value;
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) max_value = larger(max_value, v[i]);
        max_value = reduce_lanes<Largest, LANES>(max_value);
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const W shifted = v[i] - max_value, e = exponential<T>(shifted);
            v[i] = Mode::cached(shifted, e);
            if (lane + i * LANES < N) sums[i % 4] += e;
        }
        const W sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
        const W normaliser = Mode::normaliser(reduce_lanes<Sum, LANES>(sum));
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            if (lane + i * LANES < N) store_acc(to + i * LANES, Mode::finish(v[i], normaliser));
        }
    }
}

// A block per row of any length; three passes.
template <class Mode, class T>
__global__ void __launch_bounds__(THREADS) softmax_rows(const T* x, T* y, long long outer, long long N) {
    using W = acc_t<T>;
    for (long long row = blockIdx.x; row < outer; row += gridDim.x) {
        const T* from = x + row * N;
        W max_value = load_acc(from);
        for (long long n = threadIdx.x; n < N; n += THREADS) max_value = larger(max_value, load_acc(from + n));
        max_value = reduce_lanes<Largest, THREADS>(max_value);
        double sum = 0;
        for (long long n = threadIdx.x; n < N; n += THREADS) sum += exponential<T>(load_acc(from + n) - max_value);
        const W normaliser = static_cast<W>(Mode::normaliser(reduce_lanes<Sum, THREADS>(sum)));
        for (long long n = threadIdx.x; n < N; n += THREADS) {
            store_acc(y + row * N + n, finish_uncached<Mode, T>(load_acc(from + n) - max_value, normaliser));
        }
    }
}

// Columns in registers are summed in their accumulator type, others in double.
template <class W, int ITEMS>
struct SumType {
    using type = W;
};
template <class W>
struct SumType<W, 0> {
    using type = double;
};
template <class W, int V>
__device__ __forceinline__ void update_max(W (&max_value)[V], const W (&v)[V]) {
#pragma unroll
    for (int j = 0; j < V; ++j) max_value[j] = larger(max_value[j], v[j]);
}

// All-reduce of a column over the lines, in line order.
template <class Op, class W, int V, int LINES, int SPAN>
__device__ __forceinline__ void all_reduce_lines(W (&values)[V], W (&all)[LINES][SPAN], int line, int lane) {
#pragma unroll
    for (int j = 0; j < V; ++j) all[line][lane + j] = values[j];
    __syncthreads();
#pragma unroll
    for (int j = 0; j < V; ++j) values[j] = all[0][lane + j];
#pragma unroll
    for (int other = 1; other < LINES; ++other) {
#pragma unroll
        for (int j = 0; j < V; ++j) values[j] = Op::join(values[j], all[other][lane + j]);
    }
}

// V      adjacent columns per thread; divides inner
// LINES  threads per column: one, or one of each warp
// ITEMS  elements of a column in registers per thread: N <= LINES * ITEMS; 0: any N, three passes
template <class Mode, class T, int V, int LINES, int ITEMS>
__global__ void __launch_bounds__(THREADS, sizeof(acc_t<T>) == 8 ? 2 : LINES > 1 ? 4 : 3)
    softmax_columns(const T* x, T* y, long long outer, long long N, long long inner) {
    using W = acc_t<T>;
    using Total = typename SumType<W, ITEMS>::type;
    constexpr int SPAN = THREADS / LINES * V;  // columns per block
    __shared__ W max_values[LINES][SPAN];
    __shared__ Total sums[LINES][SPAN];
    const int lane = threadIdx.x % (SPAN / V) * V, line = threadIdx.x / (SPAN / V);
    const long long columns = outer * inner, step = LINES * inner;
    const int left = ITEMS ? static_cast<int>(N) - line : 0;  // elements from this line on
    for (long long begin = static_cast<long long>(blockIdx.x) * SPAN; begin < columns;
         begin += static_cast<long long>(gridDim.x) * SPAN) {
        const bool is_inside = begin + lane < columns;
        const long long column = is_inside ? begin + lane : 0;
        const long long at = column + column / inner * (N - 1) * inner + line * inner;
        W v[ITEMS ? ITEMS : 1][V], max_value[V];
#pragma unroll
        for (int j = 0; j < V; ++j) max_value[j] = -__int_as_float(0x7f800000);  // -infinity
        if constexpr (ITEMS > 0) {
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) {
                if (i * LINES < left) load_contiguous(x + at + i * step, v[i]);
            }
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) {
                if (i * LINES < left) update_max(max_value, v[i]);
            }
        } else {
            const T* from = x + at;
            for (long long n = line; n < N; n += LINES, from += step) {
                load_contiguous(from, v[0]);
                update_max(max_value, v[0]);
            }
        }
        if constexpr (LINES > 1) all_reduce_lines<Largest>(max_value, max_values, line, lane);
        Total sum[V] = {};
        if constexpr (ITEMS > 0) {
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) {
                if (i * LINES < left) {
#pragma unroll
                    for (int j = 0; j < V; ++j) {
                        const W shifted = v[i][j] - max_value[j], e = exponential<T>(shifted);
                        v[i][j] = Mode::cached(shifted, e);
                        sum[j] += e;
                    }
                }
            }
        } else {
            const T* from = x + at;
            for (long long n = line; n < N; n += LINES, from += step) {
                load_contiguous(from, v[0]);
#pragma unroll
                for (int j = 0; j < V; ++j) sum[j] += exponential<T>(v[0][j] - max_value[j]);
            }
        }
        if constexpr (LINES > 1) all_reduce_lines<Sum>(sum, sums, line, lane);
        W normaliser[V];
#pragma unroll
        for (int j = 0; j < V; ++j) normaliser[j] = static_cast<W>(Mode::normaliser(sum[j]));
        if constexpr (ITEMS > 0) {
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) {
                if (is_inside && i * LINES < left) {
#pragma unroll
                    for (int j = 0; j < V; ++j) v[i][j] = Mode::finish(v[i][j], normaliser[j]);
                    store_contiguous(y + at + i * step, v[i]);
                }
            }
        } else if (is_inside) {
            long long offset = at;
            for (long long n = line; n < N; n += LINES, offset += step) {
                load_contiguous(x + offset, v[0]);
#pragma unroll
                for (int j = 0; j < V; ++j) v[0][j] = finish_uncached<Mode, T>(v[0][j] - max_value[j], normaliser[j]);
                store_contiguous(y + offset, v[0]);
            }
        }
    }
}
