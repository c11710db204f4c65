// train/resident/weights.cuh: per-layer state in global memory, and the optimiser update of a block's weights.
#pragma once

#include "train/resident/resident.cuh"

struct LayerState {
    float *w, *mean, *square;
    float *col_mean, *col_square;  // moments of the weight columns; for the output layer (blocks, N): of the biases
    // Exchange buffers: activations and gradients of hidden layers; broadcast values and weights of the output layer.
    float *forward, *backward;
};
struct LayerFacts {
    int stride;  // row stride of w, mean and square; the bias is at column at(l - 1)
    u32 has_bias, slope;  // LeakyReLU slope, float bits
};

// Optimiser moments of V adjacent weights in global memory, of which the thread owns the first `count`: the element
// after a row's weights is its bias, which another thread owns.
template <u32 OPTIMISER, int V>
struct Moments {
    float mean[V] = {}, square[V] = {};
    __device__ __forceinline__ Moments(const float* mean_at, const float* square_at, long long at, int count = V) {
        if constexpr (OPTIMISER != SGD) load_first(mean, mean_at + at, count);
        if constexpr (OPTIMISER == ADAM) load_first(square, square_at + at, count);
    }
    __device__ __forceinline__ void store(float* mean_at, float* square_at, long long at, int count = V) const {
        if constexpr (OPTIMISER != SGD) store_first(mean_at + at, mean, count);
        if constexpr (OPTIMISER == ADAM) store_first(square_at + at, square, count);
    }
};

// Updates weight rows (units, pitch) and biases of owned units, starting at the layer's unit `first_unit`.
template <u32 OPTIMISER, class P, int R, int INPUTS, int UNITS>
__device__ __forceinline__ void update_rows(const Gradients<P, R, INPUTS, UNITS>& gradients, const StepValues& opt,
                                            float scale, float* weights, int pitch, float* biases,
                                            const LayerState& state, const LayerFacts& facts, int first_unit, int N) {
    using G = Gradients<P, R, INPUTS, UNITS>;
    const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
#pragma unroll
    for (int i = 0; i < G::COUNT; ++i) {
        if (G::item(i) >= G::ITEMS) break;
        const int tile = G::item(i) % G::INPUT_TILES, owned_tile = G::item(i) / G::INPUT_TILES;
        const int first = first_unit + owned_tile * 8, input = tile * 8 * R + R * g;
#pragma unroll
        for (int w = 0; w < 2; ++w) {
            const int unit = first + 2 * q + w;
            if (unit >= N || input >= INPUTS) continue;
            const long long at = static_cast<long long>(unit) * facts.stride + input;
            const int count = INPUTS % R ? INPUTS - input : R;
            Moments<OPTIMISER, R> moments(state.mean, state.square, at, count);
            float* const target = weights + (owned_tile * 8 + 2 * q + w) * pitch + input;
            float weight[R], gradient[R];
            load_adjacent<R>(weight, target);
#pragma unroll
            for (int j = 0; j < R; ++j) gradient[j] = scale * gradients.sums[i][j / 2][j % 2 * 2 + w];
            optimiser_step(OPTIMISER, opt, gradient, weight, moments.mean, moments.square, count);
            store_vector(target, weight);
            moments.store(state.mean, state.square, at, count);
        }
        if (tile > 0) continue;
        float gradient[1] = {gradients.bias_sums[i]};
        gradient[0] += __shfl_xor_sync(~0u, gradient[0], 1);
        gradient[0] += __shfl_xor_sync(~0u, gradient[0], 2);
        if (q > 0 || !facts.has_bias || first + g >= N) continue;
        const long long at = static_cast<long long>(first + g) * facts.stride + INPUTS;
        Moments<OPTIMISER, 1> moments(state.mean, state.square, at);
        float weight[1] = {biases[owned_tile * 8 + g]};
        optimiser_step(OPTIMISER, opt, gradient, weight, moments.mean, moments.square, 1);
        biases[owned_tile * 8 + g] = weight[0];
        moments.store(state.mean, state.square, at);
    }
}

// Updates weight columns (INPUTS, pitch) of owned inputs, starting at input `first_input` of `inputs`.
template <u32 OPTIMISER, class P, int INPUTS, int UNITS>
__device__ __forceinline__ void update_columns(const Gradients<P, 2, INPUTS, UNITS>& gradients, const StepValues& opt,
                                               float* columns, int pitch, float* means, float* squares, int stride,
                                               int first_input, int inputs) {
    using G = Gradients<P, 2, INPUTS, UNITS>;
    const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
#pragma unroll
    for (int i = 0; i < G::COUNT; ++i) {
        if (G::item(i) >= G::ITEMS) break;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int owned_input = G::item(i) % G::INPUT_TILES * 16 + 2 * g + j / 2,
                unit = G::item(i) / G::INPUT_TILES * 8 + 2 * q + j % 2;
            if (owned_input >= INPUTS || first_input + owned_input >= inputs || unit >= UNITS) continue;
            const long long at = static_cast<long long>(unit) * stride + first_input + owned_input;
            Moments<OPTIMISER, 1> moments(means, squares, at);
            float weight[1] = {columns[owned_input * pitch + unit]};
            const float gradient[1] = {gradients.sums[i][0][j]};
            optimiser_step(OPTIMISER, opt, gradient, weight, moments.mean, moments.square, 1);
            columns[owned_input * pitch + unit] = weight[0];
            moments.store(means, squares, at);
        }
    }
}

// Updates the block's copy of the output layer's biases and their moments, (N,).
template <u32 OPTIMISER, class P, int INPUTS, int N>
__device__ __forceinline__ void update_biases(const Gradients<P, 2, INPUTS, N>& gradients, const StepValues& opt,
                                              float* biases, float* means, float* squares) {
    using G = Gradients<P, 2, INPUTS, N>;
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < G::COUNT; ++i) {
        if (G::item(i) >= G::ITEMS || G::item(i) % G::INPUT_TILES > 0) continue;
        float gradient[1] = {gradients.bias_sums[i]};
        gradient[0] += __shfl_xor_sync(~0u, gradient[0], 1);
        gradient[0] += __shfl_xor_sync(~0u, gradient[0], 2);
        const int unit = G::item(i) / G::INPUT_TILES * 8 + g;
        if (q > 0 || unit >= N) continue;
        Moments<OPTIMISER, 1> moments(means, squares, unit);
        float weight[1] = {biases[unit]};
        optimiser_step(OPTIMISER, opt, gradient, weight, moments.mean, moments.square, 1);
        biases[unit] = weight[0];
        moments.store(means, squares, unit);
    }
}
