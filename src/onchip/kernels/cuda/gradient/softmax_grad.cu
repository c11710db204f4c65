// gradient/softmax_grad.cu: dx of softmax and log-softmax along an axis, from y and dy: (outer, N, inner).
//
// Idea    dx = y (dy - sum of dy y); of a log-softmax dy - exp(y) times the sum of dy. softmax_grad_lanes (inner = 1):
//         LANES threads hold a row of both in registers. softmax_grad_rows: a block per long row, two passes.
//         softmax_grad_columns: a thread per column, two passes.
// Floor   y and dy are read once, dx is written once: 2^28 elements are 3.2 GB / 4.2 TB/s = 767 us.
// Order   softmax_grad_lanes: elements in order per thread (V contiguous, stride LANES V), then a tree; float32, as a
//         thread adds at most 32. The others in float64. Depends on N alone.
// Layout  y, dy, dx (outer, N, inner), row-major.
// Shared  One value per warp, where a block shares a row.
// Limits  Any shape with N >= 1; float32; sm_80 up.
#include "common/reduce.cuh"

constexpr int THREADS = 256;

struct Softmax {
    static __device__ __forceinline__ float term(float y, float dy) { return y * dy; }
    static __device__ __forceinline__ float dx(float y, float dy, float sum) { return y * (dy - sum); }
};
struct LogSoftmax {
    static __device__ __forceinline__ float term(float, float dy) { return dy; }
    static __device__ __forceinline__ float dx(float y, float dy, float sum) { return dy - expf(y) * sum; }
};

// V      elements per load; divides N
// LANES  threads per row: within a warp, or a block
// ITEMS  vectors of V held per thread: N <= LANES * ITEMS * V
template <class Of, int V, int LANES, int ITEMS>
__global__ void __launch_bounds__(THREADS, 2)
    softmax_grad_lanes(const float* y, const float* dy, float* dx, long long outer, long long N) {
    constexpr int ROWS = THREADS / LANES;
    const int first_n = threadIdx.x % LANES * V;
    // All threads of a warp run the same number of iterations, for the shuffles.
    for (long long first = static_cast<long long>(blockIdx.x) * ROWS; first < outer;
         first += static_cast<long long>(gridDim.x) * ROWS) {
        const bool is_inside = first + threadIdx.x / LANES < outer;
        const long long at = (is_inside ? first + threadIdx.x / LANES : first) * N + first_n;
        float v[ITEMS][V], d[ITEMS][V], sum = 0;
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

template <class Of, int V>
__global__ void __launch_bounds__(THREADS)
    softmax_grad_rows(const float* y, const float* dy, float* dx, long long outer, long long N) {
    for (long long row = blockIdx.x; row < outer; row += gridDim.x) {
        float v[V], d[V];
        double total = 0;
        for (long long n = threadIdx.x * V; n < N; n += THREADS * V) {
            load_contiguous(y + row * N + n, v);
            load_contiguous(dy + row * N + n, d);
#pragma unroll
            for (int j = 0; j < V; ++j) total += Of::term(v[j], d[j]);
        }
        const float sum = static_cast<float>(reduce_lanes<Sum, THREADS>(total));
        for (long long n = threadIdx.x * V; n < N; n += THREADS * V) {
            load_contiguous(y + row * N + n, v);
            load_contiguous(dy + row * N + n, d);
#pragma unroll
            for (int j = 0; j < V; ++j) d[j] = Of::dx(v[j], d[j], sum);
            store_contiguous(dx + row * N + n, d);
        }
    }
}

template <class Of>
__global__ void __launch_bounds__(THREADS)
    softmax_grad_columns(const float* y, const float* dy, float* dx, long long outer, long long N, long long inner) {
    for (long long column = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x; column < outer * inner;
         column += static_cast<long long>(gridDim.x) * THREADS) {
        const long long first = column + column / inner * (N - 1) * inner;
        double total = 0;
#pragma unroll 4
        for (long long n = 0; n < N; ++n) total += Of::term(y[first + n * inner], dy[first + n * inner]);
        const float sum = static_cast<float>(total);
#pragma unroll 4
        for (long long n = 0; n < N; ++n) {
            const long long at = first + n * inner;
            dx[at] = Of::dx(y[at], dy[at], sum);
        }
    }
}
