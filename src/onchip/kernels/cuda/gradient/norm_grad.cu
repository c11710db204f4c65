// gradient/norm_grad.cu: dx of LayerNorm, RMSNorm and GroupNorm, from x and dy.
//
// Idea    With n = (x - mean) / s and dn = dy * weight, dx = (dn - mean(dn) - n mean(dn n)) / s; RMSNorm lacks both
//         means of x and dn. norm_grad_lanes: LANES threads hold a part of x and of dn in registers: one read of both.
//         norm_grad_rows: a block per part of any length, three passes, the second and third from cache.
// Floor   x and dy are read once, dx is written once: 2^28 elements are 3.2 GB / 4.2 TB/s = 767 us.
// Order   norm_grad_lanes: elements in order per thread (V contiguous, stride LANES V), then a tree; in the accumulator
//         type, as a thread adds at most 32. norm_grad_rows: the same in float64. Depends on the part size alone.
// Layout  x, dy, dx (outer, N), row-major, a part per row; the weight as in common/row_norm.cuh, of the
//         accumulator type, or null.
// Shared  One value per warp, where a block shares a part.
// Limits  1 <= N < 2^30, a multiple of V, aligned; float32, float16, bfloat16, float64; sm_80 up.
#include "common/reduce.cuh"
#include "common/row_norm.cuh"

constexpr int THREADS = 256;

// dn, in place of dy.
template <class A, int V>
__device__ __forceinline__ void multiply_by_weights(A (&d)[V], const A* weights, u32 n, const Norm& norm) {
    if (weights == nullptr) return;
    A w[V];
    load_weights(weights, n, norm.run, w);
#pragma unroll
    for (int j = 0; j < V; ++j) d[j] *= w[j];
}

// V      elements per load; divides N
// LANES  threads per part: within a warp, or a block
// ITEMS  vectors of V held per thread: N <= LANES * ITEMS * V
template <class T, int V, int LANES, int ITEMS>
__global__ void __launch_bounds__(THREADS, sizeof(acc_t<T>) == 8 ? 1 : 2)
    norm_grad_lanes(const T* x, const T* dy, const acc_t<T>* weight, T* dx, long long outer, int N, Norm norm) {
    using A = acc_t<T>;
    constexpr int PARTS = THREADS / LANES;
    const int first_n = threadIdx.x % LANES * V;
    // All threads of a warp run the same number of iterations, for the shuffles.
    for (long long first = static_cast<long long>(blockIdx.x) * PARTS; first < outer;
         first += static_cast<long long>(gridDim.x) * PARTS) {
        const bool is_inside = first + threadIdx.x / LANES < outer;
        const long long part = is_inside ? first + threadIdx.x / LANES : first, at = part * N + first_n;
        const A* weights = part_weights(weight, part, norm);
        A v[ITEMS][V], d[ITEMS][V], sum = 0;
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const int n = first_n + i * LANES * V;
            if (n < N) {
                load_contiguous(x + at + i * LANES * V, v[i]);
                load_contiguous(dy + at + i * LANES * V, d[i]);
                multiply_by_weights(d[i], weights, n, norm);
            }
        }
        if (norm.is_centred) {
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) {
                if (first_n + i * LANES * V < N) {
#pragma unroll
                    for (int j = 0; j < V; ++j) sum += v[i][j];
                }
            }
            const A mean = reduce_lanes<Sum, LANES>(sum) / N;
            sum = 0;
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) {
                if (first_n + i * LANES * V < N) {
#pragma unroll
                    for (int j = 0; j < V; ++j) {
                        v[i][j] -= mean;
                        sum += d[i][j];
                    }
                }
            }
            sum = reduce_lanes<Sum, LANES>(sum) / N;
        }
        A squares = 0, products = 0;
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            if (first_n + i * LANES * V < N) {
#pragma unroll
                for (int j = 0; j < V; ++j) {
                    squares = multiply_add(v[i][j], v[i][j], squares);
                    products = multiply_add(d[i][j], v[i][j], products);
                }
            }
        }
        const A inverse = 1 / sqrt_of(reduce_lanes<Sum, LANES>(squares) / N + static_cast<A>(norm.eps));
        const A slope = reduce_lanes<Sum, LANES>(products) / N * inverse * inverse;
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            if (is_inside && first_n + i * LANES * V < N) {
#pragma unroll
                for (int j = 0; j < V; ++j) d[i][j] = (d[i][j] - sum - v[i][j] * slope) * inverse;
                store_contiguous(dx + at + i * LANES * V, d[i]);
            }
        }
    }
}

// A block per part of any length; three passes.
template <class T, int V>
__global__ void __launch_bounds__(THREADS)
    norm_grad_rows(const T* x, const T* dy, const acc_t<T>* weight, T* dx, long long outer, int N, Norm norm) {
    using A = acc_t<T>;
    for (long long part = blockIdx.x; part < outer; part += gridDim.x) {
        const long long at = part * N;
        const A* weights = part_weights(weight, part, norm);
        A v[V], d[V], mean = 0, d_mean = 0;
        if (norm.is_centred) {
            double sum = 0, d_sum = 0;
            for (int n = threadIdx.x * V; n < N; n += THREADS * V) {
                load_contiguous(x + at + n, v);
                load_contiguous(dy + at + n, d);
                multiply_by_weights(d, weights, n, norm);
#pragma unroll
                for (int j = 0; j < V; ++j) {
                    sum += v[j];
                    d_sum += d[j];
                }
            }
            mean = static_cast<A>(reduce_lanes<Sum, THREADS>(sum) / N);
            d_mean = static_cast<A>(reduce_lanes<Sum, THREADS>(d_sum) / N);
        }
        double squares = 0, products = 0;
        for (int n = threadIdx.x * V; n < N; n += THREADS * V) {
            load_contiguous(x + at + n, v);
            load_contiguous(dy + at + n, d);
            multiply_by_weights(d, weights, n, norm);
#pragma unroll
            for (int j = 0; j < V; ++j) {
                const double centred = v[j] - mean;
                squares = fma(centred, centred, squares);
                products = fma(static_cast<double>(d[j]), centred, products);
            }
        }
        const double exact = 1 / sqrt(reduce_lanes<Sum, THREADS>(squares) / N + norm.eps);
        const A inverse = static_cast<A>(exact);
        const A slope = static_cast<A>(reduce_lanes<Sum, THREADS>(products) / N * exact * exact);
        for (int n = threadIdx.x * V; n < N; n += THREADS * V) {
            load_contiguous(x + at + n, v);
            load_contiguous(dy + at + n, d);
            multiply_by_weights(d, weights, n, norm);
#pragma unroll
            for (int j = 0; j < V; ++j) d[j] = (d[j] - d_mean - (v[j] - mean) * slope) * inverse;
            store_contiguous(dx + at + n, d);
        }
    }
}
