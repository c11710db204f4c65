// gradient/batch_norm.cu: a batch norm in training, by the mean and variance of the batch: statistics and y.
//
// Idea    After channel_sums of x and x^2, each block of batch_norm adds up the partial sums of its channels, and
//         normalises the elements that it summed. One block per channel also writes the statistics. A following ReLU is
//         fused.
// Floor   x is read twice and y written once: B = 128 of (16, 32, 32) are 25 MB / 4.2 TB/s = 6 us, half of it from L2.
// Order   gradient/channels.cuh. The variance is that of float64 sums: mean of squares less square of the mean.
// Layout  x and y NCHW or NHWC, or (B, C); weights, and mean and var that are given, (C,), of
//         the accumulator type; statistics (C,), of the type of x.
// Shared  channel_sums: 8 KB for NCHW, up to 32 KB for NHWC. batch_norm: 512 B.
// Limits  float32, float16, bfloat16, float64; any shape; sm_80 up.
#include "gradient/channels.cuh"

template <class T>
struct BatchNorm {
    const Sums* partial;  // of x and x^2; null: mean and var are given
    const acc_t<T> *mean, *var, *weight, *bias;  // of the last two, null: 1 and 0
    T *new_mean, *new_var, *unbiased_var;  // null: not wanted
    double eps;
    u32 is_rectified;  // y = max(y, 0)
};
template <class A>
struct Normaliser {
    A mean, factor, bias;
};

// y may be null: statistics only.
template <class Covered, class T>
__global__ void __launch_bounds__(CHANNEL_THREADS, 2)
    batch_norm(const T* x, T* y, BatchNorm<T> norm, Slices slices) {
    using A = acc_t<T>;
    constexpr int V = Covered::VECTOR, OWN = Covered::OWN;
    __shared__ Normaliser<A> normalisers[MAX_COLUMNS];
    const Covered covered(slices);
    const Summed<Covered> summed(covered);
    const u32 c = summed.channel;
    Sums total{0, 0};
    if (norm.partial != nullptr) total = channel_total(norm.partial, summed, slices);
    if (summed.is_writer) {
        A mean, var;
        if (norm.partial != nullptr) {
            const double n = static_cast<double>(slices.count), exact_mean = total.sum / n;
            double squares = total.product - exact_mean * total.sum;
            squares = squares < 0 ? 0 : squares;
            mean = static_cast<A>(exact_mean);
            var = static_cast<A>(squares / n);
            if (blockIdx.y == 0) {
                if (norm.new_mean != nullptr) store_acc(norm.new_mean + c, mean);
                if (norm.new_var != nullptr) store_acc(norm.new_var + c, var);
                if (norm.unbiased_var != nullptr)
                    store_acc(norm.unbiased_var + c, static_cast<A>(squares / (n > 1 ? n - 1 : 1)));
            }
        } else {
            mean = norm.mean[c];
            var = norm.var[c];
        }
        const double weight = norm.weight == nullptr ? 1 : norm.weight[c];
        normalisers[summed.column] = {mean, static_cast<A>(weight / sqrt(var + norm.eps)),
                                      norm.bias == nullptr ? 0 : norm.bias[c]};
    }
    if (y == nullptr) return;
    __syncthreads();
    Normaliser<A> own[OWN];
#pragma unroll
    for (int j = 0; j < OWN; ++j) own[j] = normalisers[covered.own_column() + j];
    covered.each([&](long long at) {
        A v[V];
        load_contiguous(x + at, v);
#pragma unroll
        for (int j = 0; j < V; ++j) {
            const Normaliser<A>& by = own[j % OWN];
            v[j] = multiply_add(v[j] - by.mean, by.factor, by.bias);
            v[j] = norm.is_rectified && v[j] < 0 ? 0 : v[j];
        }
        store_contiguous(y + at, v);
    });
}
