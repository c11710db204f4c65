// gradient/softmax_grad.cu: dx of softmax and log-softmax along an axis, from y and dy: (outer, N, inner).
//
// Idea    dx = y (dy - sum of dy y); of a log-softmax dy - exp(y) times the sum of dy. softmax_grad_lanes (inner = 1):
//         LANES threads hold a row of both in registers. softmax_grad_rows: a block per long row, two passes.
//         softmax_grad_columns: a thread per column, two passes.
// Floor   y and dy are read once, dx is written once: 2^28 elements are 3.2 GB / 4.2 TB/s = 767 us.
// Order   softmax_grad_lanes: elements in order per thread (V contiguous, stride LANES V), then a tree; in the
//         accumulator type, as a thread adds at most 32. The others in float64. Depends on N alone.
// Layout  y, dy, dx (outer, N, inner), row-major.
// Shared  One value per warp, where a block shares a row.
// Limits  Any shape with N >= 1; float32, float16, bfloat16, float64; sm_80 up.
#include "common/reduce.cuh"

constexpr int THREADS = 256;

__device__ __forceinline__ float exponential(float v) { return expf(v); }
__device__ __forceinline__ double exponential(double v) { return exp(v); }

struct Softmax {
    template <class A>
    static __device__ __forceinline__ A term(A y, A dy) {
        return y * dy;
    }
    template <class A>
    static __device__ __forceinline__ A dx(A y, A dy, A sum) {
        return y * (dy - sum);
    }
};
struct LogSoftmax {
    template <class A>
    static __device__ __forceinline__ A term(A, A dy) {
        return dy;
    }
    template <class A>
    static __device__ __forceinline__ A dx(A y, A dy, A sum) {
        return dy - exponential(y) * sum;
    }
};

// V      elements per load; divides N
// LANES  threads per row: within a warp, or a block
// ITEMS  vectors of V held per thread: N <= LANES * ITEMS * V
template <class Of, class T, int V, int LANES, int ITEMS>
__global__ void __launch_bounds__(THREADS, sizeof(acc_t<T>) == 8 ? 1 : 2)
    softmax_grad_lanes(const T* y, const T* dy, T* dx, long long outer, long long N) {
    constexpr int ROWS = THREADS / LANES;
    const int first_n = threadIdx.x % LANES * V;
    // All threads of a warp run the same number of iterations, for the shuffles.
    for (long long first = static_cast<long long>(blockIdx.x) * ROWS; first < outer;
         first += static_cast<long long>(gridDim.x) * ROWS) {
        const bool is_inside = first + threadIdx.x / LANES < outer;
        const long long at = (is_inside ? first + threadIdx.x / LANES : first) * N + first_n;
        acc_t<T> v[ITEMS][V], d[ITEMS][V], sum = 0;
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            if (first_n + i * LANES * V < N) {
                load_contiguous(y + at + i * LANES * V, v[i]);
                load_contiguous(dy + at + i * LANES * V, d[i]);
            }
        }
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            if (first_n + i * LANES * V < N) {
#pragma unroll
                for (int j = 0; j < V; ++j) sum += Of::term(v[i][j], d[i][j]);
            }
        }
        sum = reduce_lanes<Sum, LANES>(sum);
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            if (is_inside && first_n + i * LANES * V < N) {
#pragma unroll
                for (int j = 0; j < V; ++j) d[i][j] = Of::dx(v[i][j], d[i][j], sum);
                store_contiguous(dx + at + i * LANES * V, d[i]);
            }
        }
    }
}

template <class Of, class T, int V>
__global__ void __launch_bounds__(THREADS)
    softmax_grad_rows(const T* y, const T* dy, T* dx, long long outer, long long N) {
    for (long long row = blockIdx.x; row < outer; row += gridDim.x) {
        acc_t<T> v[V], d[V];
        double total = 0;
        for (long long n = threadIdx.x * V; n < N; n += THREADS * V) {
            load_contiguous(y + row * N + n, v);
            load_contiguous(dy + row * N + n, d);
#pragma unroll
            for (int j = 0; j < V; ++j) total += Of::term(v[j], d[j]);
        }
        const acc_t<T> sum = static_cast<acc_t<T>>(reduce_lanes<Sum, THREADS>(total));
        for (long long n = threadIdx.x * V; n < N; n += THREADS * V) {
            load_contiguous(y + row * N + n, v);
            load_contiguous(dy + row * N + n, d);
#pragma unroll
            for (int j = 0; j < V; ++j) d[j] = Of::dx(v[j], d[j], sum);
            store_contiguous(dx + row * N + n, d);
        }
    }
}

template <class Of, class T>
__global__ void __launch_bounds__(THREADS)
    softmax_grad_columns(const T* y, const T* dy, T* dx, long long outer, long long N, long long inner) {
    for (long long column = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x; column < outer * inner;
         column += static_cast<long long>(gridDim.x) * THREADS) {
        const long long first = column + column / inner * (N - 1) * inner;
        double total = 0;
#pragma unroll 4
        for (long long n = 0; n < N; ++n) {
            const long long at = first + n * inner;
            total += Of::term(load_acc(y + at), load_acc(dy + at));
        }
        const acc_t<T> sum = static_cast<acc_t<T>>(total);
#pragma unroll 4
        for (long long n = 0; n < N; ++n) {
            const long long at = first + n * inner;
            store_acc(dx + at, Of::dx(load_acc(y + at), load_acc(dy + at), sum));
        }
    }
}
