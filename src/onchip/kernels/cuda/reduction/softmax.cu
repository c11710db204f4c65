// reduction/softmax.cu: Softmax and LogSoftmax along an axis of (outer, N, inner).
//
// Idea    softmax_short (inner = 1): a warp stages short rows in shared memory (reduction/short_rows.cuh); a thread
//         holds a row in registers. softmax_lanes: a warp or a block holds a row in registers. softmax_columns: a
//         thread, or eight warps for longer columns, hold V adjacent columns in registers. Longer columns, and rows
//         (softmax_rows, a block each), take three passes (max, sum, result), the second and third from cache.
// Floor   Each element is read and written once: 2^28 floats are 2.15 GB / 4.8 TB/s = 447 us. An H200 issues 57
//         instructions per float in that time, half in 16 bits. sm_90a: softmax_columns<.., 4, 8, 8> 887 for 32 floats
//         of a thread, softmax_lanes<.., 256, 32> 864 for 32, softmax_short<.., 4, 64> 1,304 for 64, f16 983.
// Order   In registers: accumulator type, a thread adds at most 32 (short rows in 8 chains, float64 in 2; lanes in 4),
//         then a tree; columns line by line. All others: float64 per thread, then a tree. Depends on N alone.
// Layout  x, y (outer, N, inner), row-major; may alias.
// Shared  softmax_short: short_rows.cuh, 10 KB for rows of 10 floats. softmax_columns: 16 * 32 V values, 8 KB.
// Limits  Any shape with N >= 1; float32, float16, bfloat16, float64; sm_80 up.
#include "common/activation.cuh"
#include "common/reduce.cuh"
#include "reduction/short_rows.cuh"

constexpr int THREADS = 256;

// held    what a thread keeps per element: the shifted value, or its exponential
// share   per-row term computed from the sum
// finish  the result
struct Softmax {
    template <class W>
    static __device__ __forceinline__ W held(W, W exponential) {
        return exponential;
    }
    static __device__ __forceinline__ double share(double total) { return 1 / total; }
    // total is between 1 and some thousands: one Newton step is exact to the last place, without a path for subnormals.
    static __device__ __forceinline__ float share(float total) {
        const float near = __fdividef(1, total);
        return near + near * (1 - total * near);
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
    template <class Total>
    static __device__ __forceinline__ Total share(Total total) {
        return log_of(total);
    }
    template <class W>
    static __device__ __forceinline__ W finish(W held, W share) {
        return held - share;
    }
};
// 16-bit dtypes: ex2 and a multiplication. Relative error |v| 2^-24, far below the storage rounding.
template <class T>
__device__ __forceinline__ acc_t<T> exponential(acc_t<T> v) {
    if constexpr (sizeof(T) == 2) return exp2_of(1.44269504f * v);
    else return exp_of(v);
}
// The result of an element that was not held.
template <class How, class T, class W>
__device__ __forceinline__ W finish_again(W shifted, W share) {
    return How::finish(How::held(shifted, is_same<How, Softmax> ? exponential<T>(shifted) : shifted), share);
}

// V      elements per load; divides N
// ITEMS  elements held per thread: N <= ITEMS
template <class How, class T, int V, int ITEMS>
__global__ void __launch_bounds__(SHORT_THREADS,
                                  sizeof(acc_t<T>) * ITEMS <= 64 ? 9 : sizeof(acc_t<T>) * ITEMS <= 128 ? 7 : 4)
    softmax_short(const T* x, T* y, long long outer, int N, int together, Parts closed) {
    using W = acc_t<T>;
    extern __shared__ uint4 shared[];
    const ShortRows<T> rows(shared, N, together, closed);
    for (long long first = rows.first(); first < outer; first += rows.step()) {
        const int height = rows.height(outer - first);
        rows.load(x + first * N, height * N);
#pragma unroll 1
        for (int row = threadIdx.x % 32; row < height; row += 32) {
            constexpr int SUMS = sizeof(W) == 4 ? 8 : 2;  // 8 float64 exponentials at once need too many registers
            T* mine = rows.row(row);
            W v[ITEMS / V][V], highest = -__int_as_float(0x7f800000), sums[SUMS] = {};  // -infinity
#pragma unroll
            for (int i = 0; i < ITEMS / V; ++i) {
                if (i * V < N) load_neighbours(mine + i * V, v[i]);
            }
#pragma unroll
            for (int i = 0; i < ITEMS / V; ++i) {
#pragma unroll
                for (int j = 0; j < V; ++j) {
                    if (i * V < N) highest = larger(highest, v[i][j]);
                }
            }
#pragma unroll
            for (int i = 0; i < ITEMS / V; ++i) {
                if (i * V < N) {
#pragma unroll
                    for (int j = 0; j < V; ++j) {
                        const W shifted = v[i][j] - highest, e = exponential<T>(shifted);
                        v[i][j] = How::held(shifted, e);
                        sums[(i * V + j) % SUMS] += e;
                    }
                }
            }
#pragma unroll
            for (int apart = 1; apart < SUMS; apart *= 2) {
#pragma unroll
                for (int j = 0; j < SUMS; j += 2 * apart) sums[j] += sums[j + apart];
            }
            const W share = How::share(sums[0]);
#pragma unroll
            for (int i = 0; i < ITEMS / V; ++i) {
                if (i * V < N) {
#pragma unroll
                    for (int j = 0; j < V; ++j) v[i][j] = How::finish(v[i][j], share);
                    store_neighbours(mine + i * V, v[i]);
                }
            }
        }
        rows.store(y + first * N, height * N);
    }
}

// LANES threads, a warp or a block, hold a row in registers: N <= LANES * ITEMS.
template <class How, class T, int LANES, int ITEMS>
__global__ void __launch_bounds__(THREADS, sizeof(acc_t<T>) == 8 ? 2 : 3)
    softmax_lanes(const T* x, T* y, long long outer, int N) {
    using W = acc_t<T>;
    constexpr int ROWS = THREADS / LANES;
    const int me = threadIdx.x % LANES;
    for (long long row = static_cast<long long>(blockIdx.x) * ROWS + threadIdx.x / LANES; row < outer;
         row += static_cast<long long>(gridDim.x) * ROWS) {
        const T* from = x + row * N + me;
        T* to = y + row * N + me;
        W v[ITEMS], highest = -__int_as_float(0x7f800000), sums[4] = {};  // -infinity
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) v[i] = me + i * LANES < N ? load_acc(from + i * LANES) : highest;
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) highest = larger(highest, v[i]);
        highest = reduce_lanes<Largest, LANES>(highest);
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const W shifted = v[i] - highest, e = exponential<T>(shifted);
            v[i] = How::held(shifted, e);
            if (me + i * LANES < N) sums[i % 4] += e;
        }
        const W sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
        const W share = How::share(reduce_lanes<Sum, LANES>(sum));
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            if (me + i * LANES < N) store_acc(to + i * LANES, How::finish(v[i], share));
        }
    }
}

// A block per row of any length; three passes.
template <class How, class T>
__global__ void __launch_bounds__(THREADS) softmax_rows(const T* x, T* y, long long outer, long long N) {
    using W = acc_t<T>;
    for (long long row = blockIdx.x; row < outer; row += gridDim.x) {
        const T* from = x + row * N;
        W highest = load_acc(from);
        for (long long n = threadIdx.x; n < N; n += THREADS) highest = larger(highest, load_acc(from + n));
        highest = reduce_lanes<Largest, THREADS>(highest);
        double sum = 0;
        for (long long n = threadIdx.x; n < N; n += THREADS) sum += exponential<T>(load_acc(from + n) - highest);
        const W share = static_cast<W>(How::share(reduce_lanes<Sum, THREADS>(sum)));
        for (long long n = threadIdx.x; n < N; n += THREADS) {
            store_acc(y + row * N + n, finish_again<How, T>(load_acc(from + n) - highest, share));
        }
    }
}

// Held columns sum in their accumulator type, others in double.
template <class W, int ITEMS>
struct TotalOf {
    using type = W;
};
template <class W>
struct TotalOf<W, 0> {
    using type = double;
};
template <class W, int V>
__device__ __forceinline__ void keep_larger(W (&highest)[V], const W (&v)[V]) {
#pragma unroll
    for (int j = 0; j < V; ++j) highest[j] = larger(highest[j], v[j]);
}

// All-reduce of a column over the lines, in line order.
template <class Op, class W, int V, int LINES, int SPAN>
__device__ __forceinline__ void join_lines(W (&mine)[V], W (&all)[LINES][SPAN], int line, int lane) {
#pragma unroll
    for (int j = 0; j < V; ++j) all[line][lane + j] = mine[j];
    __syncthreads();
#pragma unroll
    for (int j = 0; j < V; ++j) mine[j] = all[0][lane + j];
#pragma unroll
    for (int other = 1; other < LINES; ++other) {
#pragma unroll
        for (int j = 0; j < V; ++j) mine[j] = Op::join(mine[j], all[other][lane + j]);
    }
}

// V      adjacent columns per thread; divides inner
// LINES  threads per column: one, or one of each warp
// ITEMS  elements of a column held per thread: N <= LINES * ITEMS; 0: any N, three passes
template <class How, class T, int V, int LINES, int ITEMS>
__global__ void __launch_bounds__(THREADS, sizeof(acc_t<T>) == 8 ? 2 : LINES > 1 ? 4 : 3)
    softmax_columns(const T* x, T* y, long long outer, long long N, long long inner) {
    using W = acc_t<T>;
    using Total = typename TotalOf<W, ITEMS>::type;
    constexpr int SPAN = THREADS / LINES * V;  // columns per block
    __shared__ W highests[LINES][SPAN];
    __shared__ Total sums[LINES][SPAN];
    const int lane = threadIdx.x % (SPAN / V) * V, line = threadIdx.x / (SPAN / V);
    const long long columns = outer * inner, step = LINES * inner;
    const int left = ITEMS ? static_cast<int>(N) - line : 0;  // elements from this line on
    for (long long begin = static_cast<long long>(blockIdx.x) * SPAN; begin < columns;
         begin += static_cast<long long>(gridDim.x) * SPAN) {
        const bool is_inside = begin + lane < columns;
        const long long column = is_inside ? begin + lane : 0;
        const long long at = column + column / inner * (N - 1) * inner + line * inner;
        W v[ITEMS ? ITEMS : 1][V], highest[V];
#pragma unroll
        for (int j = 0; j < V; ++j) highest[j] = -__int_as_float(0x7f800000);  // -infinity
        if constexpr (ITEMS > 0) {
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) {
                if (i * LINES < left) load_neighbours(x + at + i * step, v[i]);
            }
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) {
                if (i * LINES < left) keep_larger(highest, v[i]);
            }
        } else {
            const T* from = x + at;
            for (long long n = line; n < N; n += LINES, from += step) {
                load_neighbours(from, v[0]);
                keep_larger(highest, v[0]);
            }
        }
        if constexpr (LINES > 1) join_lines<Largest>(highest, highests, line, lane);
        Total sum[V] = {};
        if constexpr (ITEMS > 0) {
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) {
                if (i * LINES < left) {
#pragma unroll
                    for (int j = 0; j < V; ++j) {
                        const W shifted = v[i][j] - highest[j], e = exponential<T>(shifted);
                        v[i][j] = How::held(shifted, e);
                        sum[j] += e;
                    }
                }
            }
        } else {
            const T* from = x + at;
            for (long long n = line; n < N; n += LINES, from += step) {
                load_neighbours(from, v[0]);
#pragma unroll
                for (int j = 0; j < V; ++j) sum[j] += exponential<T>(v[0][j] - highest[j]);
            }
        }
        if constexpr (LINES > 1) join_lines<Sum>(sum, sums, line, lane);
        W share[V];
#pragma unroll
        for (int j = 0; j < V; ++j) share[j] = static_cast<W>(How::share(sum[j]));
        if constexpr (ITEMS > 0) {
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) {
                if (is_inside && i * LINES < left) {
#pragma unroll
                    for (int j = 0; j < V; ++j) v[i][j] = How::finish(v[i][j], share[j]);
                    store_neighbours(y + at + i * step, v[i]);
                }
            }
        } else if (is_inside) {
            long long here = at;
            for (long long n = line; n < N; n += LINES, here += step) {
                load_neighbours(x + here, v[0]);
#pragma unroll
                for (int j = 0; j < V; ++j) v[0][j] = finish_again<How, T>(v[0][j] - highest[j], share[j]);
                store_neighbours(y + here, v[0]);
            }
        }
    }
}
