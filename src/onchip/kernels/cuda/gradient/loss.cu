// gradient/loss.cu: the loss of each row, times its share of the batch, and the gradient of the network's output;
// also whether the output of each row is correct.
//
// Idea    A warp per row, a block per long row: one pass over it for the maximum, one for the sums, one for dy. The
//         losses of the batch are summed by gradient/batch_sum.cu.
// Floor   Reads y three times, from L1 after the first, and writes dy: launch time for any batch that fits L2.
// Order   Sums per thread with stride LANES, then a tree over the lanes.
// Layout  y, dy (B, N); target (B) of classes, or (B, N); share, losses, shared (B). Null pointers are left out.
// Limits  N >= 1; float32, float16, bfloat16, float64; sm_80 up.
#include "common/elementwise.cuh"
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
        using A = acc_t<T>;
        const T* y;
        A most, log_sum, scale, spread;
        long long target;

        template <int LANES>
        __device__ A prepare(const T* values, const long long* targets, long long row, long long N, A p, int lane) {
            y = values, target = targets[row];
            A sum = 0, total = 0;
            most = Largest::identity<A>();
            for (long long j = lane; j < N; j += LANES) most = larger(most, load_acc(y + j));
            most = reduce_lanes<Largest, LANES>(most);
            for (long long j = lane; j < N; j += LANES) {
                sum += exponential(load_acc(y + j) - most);
                total += load_acc(y + j) - most;
            }
            sum = reduce_lanes<Sum, LANES>(sum);
            if (p != 0) total = reduce_lanes<Sum, LANES>(total);
            log_sum = logarithm(sum), scale = 1 - p, spread = p / N;
            const bool is_class = target >= 0 && target < N;
            const A chosen = is_class ? load_acc(y + target) : A(__int_as_float(0x7fc00000));  // else NaN
            return log_sum - (scale * (chosen - most) + (p != 0 ? spread * total : 0));
        }
        __device__ __forceinline__ A gradient(long long j) const {
            return exponential(load_acc(y + j) - most - log_sum) - (spread + (j == target ? scale : 0));
        }
    };
};

template <bool IS_MEAN>
struct SquaredError {
    template <class T>
    using Target = T;

    template <class T>
    struct Row {
        using A = acc_t<T>;
        const T *y, *target;
        A scale;

        template <int LANES>
        __device__ A prepare(const T* values, const T* targets, long long row, long long N, A, int lane) {
            y = values, target = targets + row * N, scale = IS_MEAN ? A(2) / N : A(1);
            A sum = 0;
            for (long long j = lane; j < N; j += LANES) sum += difference(j) * difference(j);
            return reduce_lanes<Sum, LANES>(sum) * (IS_MEAN ? A(1) / N : A(0.5));
        }
        __device__ __forceinline__ A difference(long long j) const { return load_acc(y + j) - load_acc(target + j); }
        __device__ __forceinline__ A gradient(long long j) const { return difference(j) * scale; }
    };
};

// The mean over a row. Function: the loss of an element and its target, and its derivative.
template <class Function>
struct Mean {
    template <class T>
    using Target = T;

    template <class T>
    struct Row {
        using A = acc_t<T>;
        const T *y, *target;
        A scale;

        template <int LANES>
        __device__ A prepare(const T* values, const T* targets, long long row, long long N, A, int lane) {
            y = values, target = targets + row * N, scale = A(1) / N;
            A sum = 0;
            for (long long j = lane; j < N; j += LANES) sum += Function::loss(load_acc(y + j), load_acc(target + j));
            return reduce_lanes<Sum, LANES>(sum) * scale;
        }
        __device__ __forceinline__ A gradient(long long j) const {
            return Function::derivative(load_acc(y + j), load_acc(target + j)) * scale;
        }
    };
};

struct BinaryCrossEntropy {
    template <class A>
    static __device__ __forceinline__ A loss(A y, A target) {
        const A above = y < A(0) ? A(0) : y;
        return above - y * target + log1p_of(exp_of(-abs_of(y)));
    }
    template <class A>
    static __device__ __forceinline__ A derivative(A y, A target) { return exact_sigmoid(y) - target; }
};
struct AbsoluteError {
    template <class A>
    static __device__ __forceinline__ A loss(A y, A target) { return abs_of(y - target); }
    template <class A>
    static __device__ __forceinline__ A derivative(A y, A target) { return sign_of(y - target); }
};
struct HuberLoss {
    template <class A>
    static __device__ __forceinline__ A loss(A y, A target) {
        const A inside = derivative(y, target);
        return inside * (y - target - A(0.5) * inside);
    }
    template <class A>
    static __device__ __forceinline__ A derivative(A y, A target) { return clip(y - target, A(-1), A(1)); }
};

// 1 if element `target` is the first largest one: each before it is smaller, none after it is larger. No gradient.
struct Correct {
    template <class T>
    using Target = long long;

    template <class T>
    struct Row {
        using A = acc_t<T>;

        template <int LANES>
        __device__ A prepare(const T* y, const long long* targets, long long row, long long N, A, int lane) {
            const long long target = targets[row];
            const bool is_class = target >= 0 && target < N;
            const A most = is_class ? load_acc(y + target) : A(0);
            A others = is_class ? 0 : 1;  // elements that come first
            for (long long j = lane; j < N; j += LANES) {
                const A v = load_acc(y + j);
                others += !(j < target ? v < most : v <= most);  // counts NaN
            }
            return reduce_lanes<Sum, LANES>(others) == 0 ? A(1) : A(0);
        }
        __device__ __forceinline__ A gradient(long long) const { return 0; }
    };
};

// LANES  threads per row: a warp, or the block
template <class Loss, class T, int LANES>
__global__ void __launch_bounds__(THREADS)
    loss(const T* y, const typename Loss::template Target<T>* target, const T* share, T* losses, acc_t<T>* shared, T* dy,
         long long B, long long N, double p) {
    constexpr int ROWS = THREADS / LANES;
    const int lane = threadIdx.x % LANES;
    const long long step = static_cast<long long>(gridDim.x) * ROWS;
    for (long long row = static_cast<long long>(blockIdx.x) * ROWS + threadIdx.x / LANES; row < B; row += step) {
        typename Loss::template Row<T> of_row;
        const acc_t<T> value = of_row.template prepare<LANES>(y + row * N, target, row, N, acc_t<T>(p), lane);
        const acc_t<T> weight = share == nullptr ? acc_t<T>(1) : load_acc(share + row);
        if (lane == 0 && losses != nullptr) store_acc(losses + row, value);
        if (lane == 0 && shared != nullptr) shared[row] = value * weight;
        if (dy == nullptr) continue;
        for (long long j = lane; j < N; j += LANES) store_acc(dy + row * N + j, of_row.gradient(j) * weight);
    }
}
