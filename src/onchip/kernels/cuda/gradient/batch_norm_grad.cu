// gradient/batch_norm_grad.cu: the gradients of a batch norm in training: dx, d_weight and d_bias of x and dy.
//
// Idea    After channel_sums of dy and dy x, each block of batch_norm_grad adds up the partial sums of its channels, and
//         computes dx of the elements that it summed. One block per channel also writes d_weight and d_bias. The
//         gradient of a ReLU after the norm is fused: its y masks dy.
// Floor   x, dy and a mask are read twice, dx is written once: B = 128 of (16, 32, 32) are 42 MB / 4.2 TB/s = 10 us, 14
//         with a mask, less where L2 still has them.
// Order   gradient/channels.cuh. d_weight = (sum of dy x - mean d_bias) / sqrt(var + eps), in float64.
// Layout  x, dy and dx NCHW or NHWC, or (B, C); statistics and weights (C,), float32.
// Shared  channel_sums: 8 KB for NCHW, up to 32 KB for NHWC. batch_norm_grad: 512 B.
// Limits  float32; any shape; sm_80 up.
#include "gradient/channels.cuh"

struct BatchNormGrad {
    const Sums* partial;  // of dy and dy x; null: d_weight and d_bias are given
    const float *mean, *var, *weight, *d_weight, *d_bias;  // a weight of null: 1
    float *new_d_weight, *new_d_bias;  // null: not wanted
    double eps;
};
// dx = (dy - shift - (x - mean) slope) factor
struct Gradient {
    float mean, shift, slope, factor;
};

// dx may be null: d_weight and d_bias only.
template <class Covered, bool IS_MASKED>
__global__ void __launch_bounds__(CHANNEL_THREADS, 2)
    batch_norm_grad(const float* x, const float* dy, const float* mask, float* dx, BatchNormGrad norm, Slices slices) {
    constexpr int V = Covered::VECTOR, OWN = Covered::OWN;
    __shared__ Gradient gradients[MAX_COLUMNS];
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
            if (norm.new_d_weight != nullptr) norm.new_d_weight[c] = static_cast<float>(d_weight);
            if (norm.new_d_bias != nullptr) norm.new_d_bias[c] = static_cast<float>(d_bias);
        }
        const double n = static_cast<double>(slices.count), weight = norm.weight == nullptr ? 1 : norm.weight[c];
        gradients[summed.column] = {norm.mean[c], static_cast<float>(d_bias / n),
                                    static_cast<float>(d_weight / n * inverse), static_cast<float>(weight * inverse)};
    }
    if (dx == nullptr) return;
    __syncthreads();
    Gradient own[OWN];
#pragma unroll
    for (int j = 0; j < OWN; ++j) own[j] = gradients[covered.own_column() + j];
    covered.each([&](long long at) {
        float v[V], d[V];
        load_contiguous(x + at, v);
        load_masked<IS_MASKED>(dy, mask, at, d);
#pragma unroll
        for (int j = 0; j < V; ++j) {
            const Gradient& by = own[j % OWN];
            d[j] = (d[j] - by.shift - (v[j] - by.mean) * by.slope) * by.factor;
        }
        store_contiguous(dx + at, d);
    });
}
