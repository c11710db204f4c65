// train/large_batch/epilogue.cuh: epilogues of a training step's gemms: activation, derivative, optimiser update.
#pragma once

#include "train/large_batch/launches.cuh"
#include "common/reduce.cuh"

// A gemm over the rows of a step: y = x w, with K and N as usual.
struct Shape {
    int x_stride, w_stride, y_stride, K, N;
    u32 is_gathered;  // x is the data, gathered by row indices
    u32 code, a;      // activation and its parameter: of y forward, of the previous layer backward
    Warps warps;
};

__device__ __forceinline__ Activation activation_of(u32 code, u32 a) { return {code, __uint_as_float(a), 0.0f}; }

// grad times the derivative of the activation that produced `out`: ReLU, LeakyReLU, Sigmoid, Tanh.
__device__ __forceinline__ float act_grad(u32 code, float a, float grad, float out) {
    switch (code) {
        case 1: return out > 0.0f ? grad : 0.0f;
        case 2: return out > 0.0f ? grad : grad * a;
        case 4: return grad * out * (1.0f - out);
        case 5: return grad * (1.0f - out * out);
    }
    return grad;
}

// Not inlined, like `activated`: inlined copies would dominate the code size.
__device__ __noinline__ float4 act_grad(u32 code, float a, float4 grad, float4 out) {
    return {act_grad(code, a, grad.x, out.x), act_grad(code, a, grad.y, out.y), act_grad(code, a, grad.z, out.z),
            act_grad(code, a, grad.w, out.w)};
}

// Inlined for a compile-time activation: where code runs only once, a call and a switch took a fifth of the time.
template <u32 CODE>
__device__ __forceinline__ float4 activated(const float4& v, u32 a) {
    float four[4] = {v.x, v.y, v.z, v.w};
    activation_of(CODE, a).apply<float>(four);
    return {four[0], four[1], four[2], four[3]};
}
template <u32 CODE>
__device__ __forceinline__ float4 act_grad(u32 a, const float4& grad, const float4& out) {
    const float slope = __uint_as_float(a);
    return {act_grad(CODE, slope, grad.x, out.x), act_grad(CODE, slope, grad.y, out.y),
            act_grad(CODE, slope, grad.z, out.z), act_grad(CODE, slope, grad.w, out.w)};
}

// Loads or stores the first `count` of V adjacent elements, in one access if count >= V. Another thread may own the
// rest.
template <int V>
__device__ __forceinline__ void load_first(float (&v)[V], const float* from, int count) {
    if (count >= V) {
        load_several<true>(v, from);
    } else {
#pragma unroll
        for (int i = 0; i < V - 1; ++i)  // compile-time indices keep v in registers
            if (i < count) v[i] = __ldcg(from + i);
    }
}
template <int V>
__device__ __forceinline__ void store_first(float* to, const float (&v)[V], int count) {
    if (count >= V) {
        store_vector(to, v);
    } else {
#pragma unroll
        for (int i = 0; i < V - 1; ++i)
            if (i < count) to[i] = v[i];
    }
}

struct Nothing {};

// y = activation(sums), for a block at (first_m, first_n).
template <int R, class Activate>
__device__ __forceinline__ void forward_epilogue(const Tiles<R>& tiles, const Warps& warps, const Shape& shape,
                                                 float* y, int size, int first_m, int first_n,
                                                 const Activate& activate) {
    const auto fetch = [](int, int) { return Nothing{}; };
    tile_epilogue<R>(tiles, warps, fetch, [&](int row, int column, float4 sum, Nothing) {
        const int m = first_m + row, n = first_n + column;
        if (m >= size || n >= shape.N) return;
        const float4 result = activate(sum);
        const float four[4] = {result.x, result.y, result.z, result.w};
        store_first(y + static_cast<long long>(m) * shape.y_stride + n, four, shape.N - n);
    });
}

// Same, with the activation selected at run time.
template <int R>
__device__ __forceinline__ void forward_epilogue(const Tiles<R>& tiles, const Warps& warps, const Shape& shape,
                                                 float* y, int size, int first_m, int first_n) {
    const Activation activation = activation_of(shape.code, shape.a);
    const auto activate = [&](const float4& sum) { return activated(sum, activation); };
    forward_epilogue<R>(tiles, warps, shape, y, size, first_m, first_n, activate);
}

// prev_dz = sums times the activation's derivative at `out`.
template <int R>
__device__ __forceinline__ void backward_epilogue(const Tiles<R>& tiles, const Warps& warps, const Shape& shape,
                                                  const float* out, float* prev_dz, int size, int first_m,
                                                  int first_n) {
    const float slope = __uint_as_float(shape.a);
    const auto fetch = [&](int row, int column) {
        const int m = first_m + row, n = first_n + column;
        if (m >= size || n >= shape.N) return float4{0.0f, 0.0f, 0.0f, 0.0f};
        return load4(out + static_cast<long long>(m) * shape.y_stride + n);
    };
    tile_epilogue<R>(tiles, warps, fetch, [&](int row, int column, float4 sum, float4 activations) {
        const int m = first_m + row, n = first_n + column;
        if (m >= size || n >= shape.N) return;
        const float4 result = act_grad(shape.code, slope, sum, activations);
        const float four[4] = {result.x, result.y, result.z, result.w};
        store_first(prev_dz + static_cast<long long>(m) * shape.y_stride + n, four, shape.N - n);
    });
}

// Argmax over LANES lanes; ties take the first index. best == N: the lane has no candidate.
template <int LANES>
__device__ __forceinline__ void argmax_lanes(float& top, int& best, int N) {
#pragma unroll
    for (int mask = LANES / 2; mask > 0; mask /= 2) {
        const float other = __shfl_xor_sync(~0u, top, mask);
        const int index = __shfl_xor_sync(~0u, best, mask);
        if (index < N && (best == N || other > top || (other == top && index < best))) top = other, best = index;
    }
}

// Sums the rows' losses and correct predictions into the step's slot; one block.
struct Tally {
    const double* losses;  // nullptr: no tally
    const int* correct;
    double* step_losses;
    long long* step_correct;

    __device__ __forceinline__ void add_up(const Step& step) const {
        constexpr int AT_ONCE = 8;
        const int size = step.size();
        double sums[AT_ONCE] = {};
        int correct_count = 0;
        for (int first = threadIdx.x; first < size; first += AT_ONCE * THREADS) {
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int row = first + i * THREADS;
                if (row < size) sums[i] += step.local(losses)[row], correct_count += step.local(correct)[row];
            }
        }
#pragma unroll
        for (int i = 1; i < AT_ONCE; ++i) sums[0] += sums[i];
        const double loss = reduce_lanes<Sum, THREADS>(sums[0]);
        correct_count = reduce_lanes<Sum, THREADS>(correct_count);
        if (threadIdx.x > 0 || size == 0) return;
        step.local(step_losses)[step.index()] = loss;
        step.local(step_correct)[step.index()] = correct_count;
    }
};

// -- gradients and update ---------------------------------------------------------------------------------------------

constexpr int MAX_LAYERS = 16;  // per launch
constexpr u32 SGD = 0, MOMENTUM = 1, ADAM = 2;
constexpr u32 CROSS_ENTROPY = 0, HALF_SSE = 1, MSE = 2;

struct LayerMemory {
    float *w, *mean, *square;
    const float *a, *dz;
    float* partials;  // (slices, N, w_stride): split-K partial gradients
};
struct LayerSizes {
    int K, N, w_stride, a_stride, dz_stride;
    u32 is_gathered;
    int blocks_n;  // blocks along K
    int slices;    // split-K slices of the gradient
};
// The fields that every block reads first are adjacent, since kernel arguments start out uncached.
struct Layers {
    LayerMemory memory[MAX_LAYERS];
    int blocks, chunks;  // per slice: blocks, and chunks of rows
    u32 optimiser;
    Warps warps;
    int first_block[MAX_LAYERS];  // prefix sum of blocks per layer; above any block for missing layers
    LayerSizes sizes[MAX_LAYERS];

    __device__ __forceinline__ LayerMemory memory_of(int layer, const Step& step) const {
        const LayerMemory& pointers = memory[layer];
        return {step.local(pointers.w), step.local(pointers.mean), step.local(pointers.square),
                sizes[layer].is_gathered ? pointers.a : step.local(pointers.a), step.local(pointers.dz),
                step.local(pointers.partials)};
    }
    __device__ __forceinline__ int layer_of(int block) const {
        int layer = 0;
#pragma unroll
        for (int i = 1; i < MAX_LAYERS; ++i) layer += first_block[i] <= block;
        return layer;
    }
};

// The tile of a block: `index` counts blocks of rows x columns over all slices.
struct GradientBlock {
    int slice, layer, first_m, first_n;

    __device__ __forceinline__ GradientBlock(const Layers& layers, int index, int rows, int columns) {
        slice = index / layers.blocks;
        const int block = index - slice * layers.blocks;
        layer = layers.layer_of(block);
        const int of_layer = block - layers.first_block[layer], blocks_n = layers.sizes[layer].blocks_n;
        first_m = of_layer / blocks_n * rows;
        first_n = of_layer % blocks_n * columns;
    }
};

// Four adjacent weights and their optimiser moments.
struct WeightState {
    float w[4], mean[4], square[4];

    __device__ __forceinline__ void load(u32 optimiser, const LayerMemory& memory, long long at) {
        load_several<true>(w, memory.w + at);
        if (optimiser != SGD) load_several<true>(mean, memory.mean + at);
        if (optimiser == ADAM) load_several<true>(square, memory.square + at);
    }
};

// Updates the first `count` of V adjacent weights and their moments; padding stays 0.
//
// SGD       w -= lr g, where g = scale gradient + decay w
// MOMENTUM  mean = keep mean + g; w -= lr mean
// ADAM      mean = 0.9 mean + 0.1 g; square = 0.999 square + 0.001 g^2;
//           w = keep w - lr mean / (root sqrt(square) + 1e-8)
template <int V>
__device__ __forceinline__ void optimiser_step(u32 optimiser, const StepValues& opt, const float (&gradients)[V],
                                               float (&w)[V], float (&mean)[V], float (&square)[V], int count) {
#pragma unroll
    for (int i = 0; i < V; ++i) {
        if (i >= count) continue;
        const float g = fmaf(opt.scale, gradients[i], opt.decay * w[i]);
        if (optimiser == SGD) {
            w[i] = fmaf(-opt.lr, g, w[i]);
        } else if (optimiser == MOMENTUM) {
            mean[i] = fmaf(opt.keep, mean[i], g);
            w[i] = fmaf(-opt.lr, mean[i], w[i]);
        } else {
            mean[i] = fmaf(0.9f, mean[i], 0.1f * g);
            square[i] = fmaf(0.999f, square[i], 0.001f * (g * g));
            w[i] = opt.keep * w[i] - opt.lr * mean[i] / (opt.root * sqrtf(square[i]) + 1e-8f);
        }
    }
}

__device__ __forceinline__ void update(u32 optimiser, const StepValues& opt, const LayerMemory& memory, long long at,
                                       const float (&gradients)[4], WeightState& state, int count) {
    optimiser_step(optimiser, opt, gradients, state.w, state.mean, state.square, count);
    store_vector(memory.w + at, state.w);
    if (optimiser != SGD) store_vector(memory.mean + at, state.mean);
    if (optimiser == ADAM) store_vector(memory.square + at, state.square);
}

// Gradient epilogue: the update, or a store of the slice's partial sums.
template <int R, bool HAS_UPDATE>
__device__ __forceinline__ void gradient_epilogue(const Tiles<R>& tiles, const Warps& warps, const Step& step,
                                                  const Layers& layers, const GradientBlock& block) {
    const LayerMemory memory = layers.memory_of(block.layer, step);
    const LayerSizes& sizes = layers.sizes[block.layer];
    const StepValues opt = step.opt();
    const auto fetch = [&](int row, int column) {
        WeightState state;
        const int m = block.first_m + row, n = block.first_n + column;
        if (HAS_UPDATE && m < sizes.N && n < sizes.K)
            state.load(layers.optimiser, memory, static_cast<long long>(m) * sizes.w_stride + n);
        return state;
    };
    tile_epilogue<R>(tiles, warps, fetch, [&](int row, int column, float4 sum, WeightState state) {
        const int m = block.first_m + row, n = block.first_n + column;
        if (m >= sizes.N || n >= sizes.K) return;
        const float four[4] = {sum.x, sum.y, sum.z, sum.w};
        const long long at = static_cast<long long>(m) * sizes.w_stride + n;
        if (HAS_UPDATE) update(layers.optimiser, opt, memory, at, four, state, sizes.K - n);
        else store_vector(memory.partials + static_cast<long long>(block.slice) * sizes.N * sizes.w_stride + at, four);
    });
}
