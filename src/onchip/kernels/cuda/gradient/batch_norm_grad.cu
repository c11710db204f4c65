// gradient/batch_norm_grad.cu: the gradients of a batch norm in training: dx, d_weight and d_bias of x and dy.
//
// Idea    After channel_sums of dy and dy x, each block of batch_norm_grad adds up the partial sums of its channels, and
//         computes dx of the elements that it summed. One block per channel also writes d_weight and d_bias. The
//         gradient of a ReLU after the norm is fused: its y masks dy.
// Floor   x, dy and a mask are read twice, dx is written once: B = 128 of (16, 32, 32) are 42 MB / 4.2 TB/s = 10 us, 14
//         with a mask, less where L2 still has them.
// Order   gradient/channels.cuh. d_weight = (sum of dy x - mean d_bias) / sqrt(var + eps), in float64.
// Layout  x, dy and dx NCHW or NHWC, or (B, C); mean, var, weight and gradients that are given (C,),
//         of the accumulator type; new_d_weight and new_d_bias (C,), of type DW and DB.
// Shared  channel_sums: 8 KB for NCHW, up to 32 KB for NHWC. batch_norm_grad: 512 B.
// Limits  float32, float16, bfloat16, float64; any shape; sm_80 up.
#include "gradient/channels.cuh"

template <class A, class DW, class DB>
struct BatchNormGrad {
    const Sums* partial;  // of dy and dy x; null: d_weight and d_bias are given
    const A *mean, *var, *weight, *d_weight, *d_bias;  // a weight of null: 1
    DW* new_d_weight;  // null: not wanted
    DB* new_d_bias;
    double eps;
};
// dx = (dy - shift - (x - mean) slope) factor
template <class A>
struct Gradient {
    A mean, shift, slope, factor;
};

// dx may be null: d_weight and d_bias only.
template <class Covered, class T, class DW, class DB, bool IS_MASKED>
__global__ void __launch_bounds__(CHANNEL_THREADS, 2)
    batch_norm_grad(const T* x, const T* dy, const T* mask, T* dx, BatchNormGrad<acc_t<T>, DW, DB> norm,
                    Slices slices) {
    using A = acc_t<T>;
    constexpr int V = Covered::VECTOR, OWN = Covered::OWN;
    __shared__ Gradient<A> gradients[MAX_COLUMNS];
    const Covered covered(slices);
    const Summed<Covered> summed(covered);
    const u32 c = summed.channel;
    Sums total{0, 0};
    if (norm.partial != nullptr) total = channel_total(norm.partial, summed, slices);
    if (summed.is_writer) {
        const double mean = norm.mean[c], inverse = 1 / sqrt(norm.var[c] + norm.eps);
        double d_bias = total.sum, d_weight = (total.product - mean * total.sum) * inverse;
        if (norm.partial == nullptr) {
            d_bias = norm.d_bias[c];
            d_weight = norm.d_weight[c];
        } else if (blockIdx.y == 0) {
            if (norm.new_d_weight != nullptr) store_acc(norm.new_d_weight + c, static_cast<acc_t<DW>>(d_weight));
            if (norm.new_d_bias != nullptr) store_acc(norm.new_d_bias + c, static_cast<acc_t<DB>>(d_bias));
        }
        const double n = static_cast<double>(slices.count), weight = norm.weight == nullptr ? 1 : norm.weight[c];
        gradients[summed.column] = {norm.mean[c], static_cast<A>(d_bias / n),
                                    static_cast<A>(d_weight / n * inverse), static_cast<A>(weight * inverse)};
    }
    if (dx == nullptr) return;
    __syncthreads();
    Gradient<A> own[OWN];
#pragma unroll
    for (int j = 0; j < OWN; ++j) own[j] = gradients[covered.own_column() + j];
    covered.each([&](long long at) {
        A v[V], d[V];
        load_contiguous(x + at, v);
        load_masked<IS_MASKED>(dy, mask, at, d);
#pragma unroll
        for (int j = 0; j < V; ++j) {
            const Gradient<A>& by = own[j % OWN];
            d[j] = (d[j] - by.shift - (v[j] - by.mean) * by.slope) * by.factor;
        }
        store_contiguous(dx + at, d);
    });
}
