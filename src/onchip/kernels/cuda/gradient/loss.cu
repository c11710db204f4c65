// gradient/loss.cu: the loss of each row, times its share of the batch, and the gradient of the network's output.
//
// Idea    A warp per row, a block per long row: one pass over it for the maximum, one for the sums, one for dy. The
//         losses of the batch are summed by gradient/batch_sum.cu.
// Floor   Reads y three times, from L1 after the first, and writes dy: launch time for any batch that fits L2.
// Order   Sums per thread with stride LANES, then a tree over the lanes.
// Layout  y, dy (B, N); target (B) of classes, or (B, N); share, losses, shared (B). Null pointers are left out.
// Limits  N >= 1; float32, float64; sm_80 up.
#include "common/reduce.cuh"

constexpr int THREADS = 256;

template <class T>
__device__ __forceinline__ T exponential(T v) {
    if constexpr (is_same<T, double>) return exp(v);
    else return expf(v);
}
template <class T>
__device__ __forceinline__ T logarithm(T v) {
    if constexpr (is_same<T, double>) return log(v);
    else return logf(v);
}

// Losses: `row` returns the loss of a row, `gradient` its derivative by element j of y. p: label smoothing.
struct CrossEntropy {
    template <class T>
    using Target = long long;

    template <class T>
    struct Row {
        const T* y;
        T scale, log_sum, spread;
        long long target;

        template <int LANES>
        __device__ T prepare(const T* values, const long long* targets, long long row, long long N, T p, int lane) {
            y = values, target = targets[row];
            T most = Largest::identity<T>(), sum = 0, total = 0;
            for (long long j = lane; j < N; j += LANES) most = larger(most, y[j]);
            most = reduce_lanes<Largest, LANES>(most);
            for (long long j = lane; j < N; j += LANES) {
                sum += exponential(y[j] - most);
                total += y[j] - most;
            }
            sum = reduce_lanes<Sum, LANES>(sum);
            if (p != 0) total = reduce_lanes<Sum, LANES>(total);
            log_sum = most + logarithm(sum), scale = 1 - p, spread = p / N;
            const T chosen = target >= 0 && target < N ? y[target] : T(__int_as_float(0x7fc00000));  // NaN: no class
            return log_sum - most - (scale * (chosen - most) + (p != 0 ? spread * total : 0));
        }
        __device__ __forceinline__ T gradient(long long j) const {
            return exponential(y[j] - log_sum) - (spread + (j == target ? scale : 0));
        }
    };
};

template <bool IS_MEAN>
struct SquaredError {
    template <class T>
    using Target = T;

    template <class T>
    struct Row {
        const T *y, *target;
        T scale;

        template <int LANES>
        __device__ T prepare(const T* values, const T* targets, long long row, long long N, T, int lane) {
            y = values, target = targets + row * N, scale = IS_MEAN ? T(2) / N : T(1);
            T sum = 0;
            for (long long j = lane; j < N; j += LANES) sum += (y[j] - target[j]) * (y[j] - target[j]);
            return reduce_lanes<Sum, LANES>(sum) * (IS_MEAN ? T(1) / N : T(0.5));
        }
        __device__ __forceinline__ T gradient(long long j) const { return (y[j] - target[j]) * scale; }
    };
};

// LANES  threads per row: a warp, or the block
template <class Loss, class T, int LANES>
__global__ void __launch_bounds__(THREADS)
    loss(const T* y, const typename Loss::template Target<T>* target, const T* share, T* losses, T* shared, T* dy,
         long long B, long long N, float p) {
    constexpr int ROWS = THREADS / LANES;
    const int lane = threadIdx.x % LANES;
    const long long step = static_cast<long long>(gridDim.x) * ROWS;
    for (long long row = static_cast<long long>(blockIdx.x) * ROWS + threadIdx.x / LANES; row < B; row += step) {
        typename Loss::template Row<T> of_row;
        const T value = of_row.template prepare<LANES>(y + row * N, target, row, N, T(p), lane);
        const T weight = share == nullptr ? T(1) : share[row];
        if (lane == 0 && losses != nullptr) losses[row] = value;
        if (lane == 0 && shared != nullptr) shared[row] = value * weight;
        if (dy == nullptr) continue;
        for (long long j = lane; j < N; j += LANES) dy[row * N + j] = of_row.gradient(j) * weight;
    }
}
