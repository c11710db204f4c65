// train/resident/weights.cuh: per-layer state in global memory, and the optimiser update of a block's weights.
#pragma once

#include "train/resident/resident.cuh"

struct LayerState {
    float *w, *mean, *square;
    float *own_mean, *own_square;  // moments of the weight columns; for the output layer (blocks, N): of the biases
    // Exchange buffers. forward: activations; for the output layer, the values broadcast per row. backward: gradients
    // of hidden layers; for the output layer, its weights (outputs, inputs).
    float *forward, *backward;
};
struct LayerFacts {
    int stride;  // row stride of w, mean and square; the bias is at column at(l - 1)
    u32 has_bias, slope;  // slope: float bits, of a LeakyReLU
};

// Optimiser moments of V adjacent weights, `left` of them in the row. They stay in global memory, and one thread loads
// and stores each: the element after a row's weights is its bias, which belongs to another thread.
template <u32 OPTIMISER, int V>
struct KeptHere {
    float mean[V] = {}, square[V] = {};
    __device__ __forceinline__ KeptHere(const float* mean_at, const float* square_at, long long at, int left = V) {
        if constexpr (OPTIMISER != SGD) load_first(mean, mean_at + at, left);
        if constexpr (OPTIMISER == ADAM) load_first(square, square_at + at, left);
    }
    __device__ __forceinline__ void store(float* mean_at, float* square_at, long long at, int left = V) const {
        if constexpr (OPTIMISER != SGD) store_first(mean_at + at, mean, left);
        if constexpr (OPTIMISER == ADAM) store_first(square_at + at, square, left);
    }
};

// Updates weight rows (units, pitch) and biases of own units, from the layer's unit `first_unit` on.
template <u32 OPTIMISER, class P, int R, int INPUTS, int UNITS>
__device__ __forceinline__ void move_rows(const Gradients<P, R, INPUTS, UNITS>& gradients, const Rule& rule, float scale,
                                          float* weights, int pitch, float* biases, const LayerState& state,
                                          const LayerFacts& facts, int first_unit, int N) {
    using G = Gradients<P, R, INPUTS, UNITS>;
    const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
#pragma unroll
    for (int i = 0; i < G::COUNT; ++i) {
        if (G::item(i) >= G::ITEMS) break;
        const int tile = G::item(i) % G::DOWN, mine = G::item(i) / G::DOWN;
        const int first = first_unit + mine * 8, input = tile * 8 * R + R * g;
#pragma unroll
        for (int w = 0; w < 2; ++w) {
            const int unit = first + 2 * q + w;
            if (unit >= N || input >= INPUTS) continue;
            const long long at = static_cast<long long>(unit) * facts.stride + input;
            const int left = INPUTS % R ? INPUTS - input : R;
            KeptHere<OPTIMISER, R> kept(state.mean, state.square, at, left);
            float* const here = weights + (mine * 8 + 2 * q + w) * pitch + input;
            float now[R], by[R];
            load_across<R>(now, here);
#pragma unroll
            for (int j = 0; j < R; ++j) by[j] = scale * gradients.sums[i][j / 2][j % 2 * 2 + w];
            move(OPTIMISER, rule, by, now, kept.mean, kept.square, left);
            store_several(here, now);
            kept.store(state.mean, state.square, at, left);
        }
        if (tile > 0) continue;
        float by[1] = {gradients.shifts[i]};
        by[0] += __shfl_xor_sync(~0u, by[0], 1);
        by[0] += __shfl_xor_sync(~0u, by[0], 2);
        if (q > 0 || !facts.has_bias || first + g >= N) continue;
        const long long at = static_cast<long long>(first + g) * facts.stride + INPUTS;
        KeptHere<OPTIMISER, 1> kept(state.mean, state.square, at);
        float now[1] = {biases[mine * 8 + g]};
        move(OPTIMISER, rule, by, now, kept.mean, kept.square, 1);
        biases[mine * 8 + g] = now[0];
        kept.store(state.mean, state.square, at);
    }
}

// Updates weight columns (INPUTS, pitch) of own inputs, from the layer's input `first_input` on, of `inputs`.
template <u32 OPTIMISER, class P, int INPUTS, int UNITS>
__device__ __forceinline__ void move_columns(const Gradients<P, 2, INPUTS, UNITS>& gradients, const Rule& rule,
                                             float* columns, int pitch, float* means, float* squares, int stride,
                                             int first_input, int inputs) {
    using G = Gradients<P, 2, INPUTS, UNITS>;
    const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
#pragma unroll
    for (int i = 0; i < G::COUNT; ++i) {
        if (G::item(i) >= G::ITEMS) break;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int mine = G::item(i) % G::DOWN * 16 + 2 * g + j / 2, unit = G::item(i) / G::DOWN * 8 + 2 * q + j % 2;
            if (mine >= INPUTS || first_input + mine >= inputs || unit >= UNITS) continue;
            const long long at = static_cast<long long>(unit) * stride + first_input + mine;
            KeptHere<OPTIMISER, 1> kept(means, squares, at);
            float now[1] = {columns[mine * pitch + unit]};
            const float by[1] = {gradients.sums[i][0][j]};
            move(OPTIMISER, rule, by, now, kept.mean, kept.square, 1);
            columns[mine * pitch + unit] = now[0];
            kept.store(means, squares, at);
        }
    }
}

// Updates the output layer's biases. Every block has a copy of them and of their moments, (N,) per block.
template <u32 OPTIMISER, class P, int INPUTS, int N>
__device__ __forceinline__ void move_biases(const Gradients<P, 2, INPUTS, N>& gradients, const Rule& rule, float* biases,
                                            float* means, float* squares) {
    using G = Gradients<P, 2, INPUTS, N>;
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < G::COUNT; ++i) {
        if (G::item(i) >= G::ITEMS || G::item(i) % G::DOWN > 0) continue;
        float by[1] = {gradients.shifts[i]};
        by[0] += __shfl_xor_sync(~0u, by[0], 1);
        by[0] += __shfl_xor_sync(~0u, by[0], 2);
        const int unit = G::item(i) / G::DOWN * 8 + g;
        if (q > 0 || unit >= N) continue;
        KeptHere<OPTIMISER, 1> kept(means, squares, unit);
        float now[1] = {biases[unit]};
        move(OPTIMISER, rule, by, now, kept.mean, kept.square, 1);
        biases[unit] = now[0];
        kept.store(means, squares, unit);
    }
}
