// reduction/norm.cu: LayerNorm, RMSNorm and GroupNorm: each part of a row is normalised on its own.
//
// Idea    norm_lanes: LANES threads of a warp, or a block, hold a part in registers: one read, then mean and variance
//         from registers. Short parts use few threads, so a warp covers several contiguous parts. A preceding Add of a
//         value or a constant is fused; its sum is stored if others read it. norm_rows: a block per part of any length,
//         three passes, the second and third from cache.
// Floor   Each element is read once and written once: 2^28 floats are 2.15 GB / 4.8 TB/s = 447 us.
// Order   norm_lanes: elements in order per thread (V contiguous, stride LANES V), then a tree; float32, as a thread
//         adds at most 32, or float64. norm_rows: the same in float64. Depends on the part size alone.
// Layout  x, y (outer, N), row-major, a part per row. Part r uses weights from (r % groups) * each on, one per `run`
//         elements, of the accumulator type, or null. The added value has as many parts as x, or `period` that repeat.
// Shared  One value per warp, where a block shares a part.
// Limits  1 <= N < 2^30, a multiple of V, aligned; float32, float16, bfloat16, float64; sm_80 up.
#include "common/reduce.cuh"
#include "common/row_norm.cuh"

constexpr int THREADS = 256;

// Operand of a fused Add, or null; destination of the sum, or null.
template <class T>
struct FusedAdd {
    const T* other;
    T* sum;
    long long period;
};

template <class T, int V>
__device__ __forceinline__ void finish(
    T* to, const acc_t<T> (&v)[V], acc_t<T> scale, const acc_t<T>* weight, const acc_t<T>* bias, u32 n,
    const Norm& norm) {
    acc_t<T> result[V], w[V];
#pragma unroll
    for (int j = 0; j < V; ++j) result[j] = v[j] * scale;
    if (weight != nullptr) {
        load_weights(weight, n, norm.run, w);
#pragma unroll
        for (int j = 0; j < V; ++j) result[j] *= w[j];
    }
    if (bias != nullptr) {
        load_weights(bias, n, norm.run, w);
#pragma unroll
        for (int j = 0; j < V; ++j) result[j] += w[j];
    }
    store_contiguous(to, result);
}

// V      elements per load; divides N
// LANES  threads per part: within a warp, or a block
// ITEMS  vectors of V held per thread: N <= LANES * ITEMS * V
template <class T, int V, int LANES, int ITEMS>
__global__ void __launch_bounds__(THREADS, sizeof(acc_t<T>) == 8 || (LANES == 32 && V == 1 && ITEMS > 16) ? 2 : 3)
    norm_lanes(const T* x, const acc_t<T>* weight, const acc_t<T>* bias, T* y, long long outer, int N, Norm norm,
               FusedAdd<T> fused_add) {
    using W = acc_t<T>;
    constexpr int PARTS = THREADS / LANES;
    const int first_n = threadIdx.x % LANES * V;
    // All threads of a warp run the same number of iterations, for the shuffles.
    for (long long first = static_cast<long long>(blockIdx.x) * PARTS; first < outer;
         first += static_cast<long long>(gridDim.x) * PARTS) {
        const bool is_inside = first + threadIdx.x / LANES < outer;
        const long long part = is_inside ? first + threadIdx.x / LANES : first;
        const T* from = x + part * N + first_n;
        W v[ITEMS][V], sum = 0, shift = 0;
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            if (first_n + i * LANES * V < N) load_contiguous(from + i * LANES * V, v[i]);
        }
        if (fused_add.other != nullptr) {
            const T* row = fused_add.other + (part < fused_add.period ? part : part % fused_add.period) * N + first_n;
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) {
                if (first_n + i * LANES * V < N) {
                    W terms[V];
                    load_contiguous(row + i * LANES * V, terms);
#pragma unroll
                    for (int j = 0; j < V; ++j) v[i][j] += terms[j];
                    if (fused_add.sum != nullptr && is_inside)
                        store_contiguous(fused_add.sum + part * N + first_n + i * LANES * V, v[i]);
                }
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
            shift = reduce_lanes<Sum, LANES>(sum) / N;
            sum = 0;
        }
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            if (first_n + i * LANES * V < N) {
#pragma unroll
                for (int j = 0; j < V; ++j) {
                    v[i][j] -= shift;
                    sum = multiply_add(v[i][j], v[i][j], sum);
                }
            }
        }
        const W scale = 1 / sqrt_of(reduce_lanes<Sum, LANES>(sum) / N + static_cast<W>(norm.eps));
        const W *weights = part_weights(weight, part, norm), *biases = part_weights(bias, part, norm);
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const int n = first_n + i * LANES * V;
            if (is_inside && n < N) finish(y + part * N + n, v[i], scale, weights, biases, n, norm);
        }
    }
}

// A block per part of any length; three passes.
template <class T, int V>
__global__ void __launch_bounds__(THREADS)
    norm_rows(const T* x, const acc_t<T>* weight, const acc_t<T>* bias, T* y, long long outer, int N, Norm norm) {
    using W = acc_t<T>;
    for (long long part = blockIdx.x; part < outer; part += gridDim.x) {
        const T* from = x + part * N;
        W v[V], shift = 0;
        double sum = 0;
        if (norm.is_centred) {
            for (int n = threadIdx.x * V; n < N; n += THREADS * V) {
                load_contiguous(from + n, v);
#pragma unroll
                for (int j = 0; j < V; ++j) sum += v[j];
            }
            shift = static_cast<W>(reduce_lanes<Sum, THREADS>(sum) / N);
            sum = 0;
        }
        for (int n = threadIdx.x * V; n < N; n += THREADS * V) {
            load_contiguous(from + n, v);
#pragma unroll
            for (int j = 0; j < V; ++j) {
                const double d = v[j] - shift;
                sum = multiply_add(d, d, sum);
            }
        }
        const W scale = static_cast<W>(1 / sqrt_of(reduce_lanes<Sum, THREADS>(sum) / N + norm.eps));
        const W *weights = part_weights(weight, part, norm), *biases = part_weights(bias, part, norm);
        for (int n = threadIdx.x * V; n < N; n += THREADS * V) {
            load_contiguous(from + n, v);
#pragma unroll
            for (int j = 0; j < V; ++j) v[j] -= shift;
            finish(y + part * N + n, v, scale, weights, biases, n, norm);
        }
    }
}
