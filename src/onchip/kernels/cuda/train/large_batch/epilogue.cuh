// train/large_batch/epilogue.cuh: epilogues of a training step's gemms: activation, derivative, optimiser update.
#pragma once

#include "train/large_batch/launches.cuh"
#include "common/reduce.cuh"

// A gemm over the rows of a step: y = x w, with K and N as usual.
struct Shape {
    int x_stride, w_stride, y_stride, K, N;
    u32 is_gathered;  // x is the data, gathered by the order
    u32 code, a;      // activation: of y forward, of the stored values backward
    Warps warps;
};

__device__ __forceinline__ Activation activation_of(u32 code, u32 a) { return {code, __uint_as_float(a), 0.0f}; }

// grad times the derivative of the activation that produced `out`: ReLU, LeakyReLU, Sigmoid, Tanh.
__device__ __forceinline__ float through(u32 code, float a, float grad, float out) {
    switch (code) {
        case 1: return out > 0.0f ? grad : 0.0f;
        case 2: return out > 0.0f ? grad : grad * a;
        case 4: return grad * out * (1.0f - out);
        case 5: return grad * (1.0f - out * out);
    }
    return grad;
}

// Not inlined, as `activated`: a thread calls it many times, and inlined copies would dominate the code size.
__device__ __noinline__ float4 through(u32 code, float a, float4 grad, float4 out) {
    return {through(code, a, grad.x, out.x), through(code, a, grad.y, out.y), through(code, a, grad.z, out.z),
            through(code, a, grad.w, out.w)};
}

// Inlined versions for an activation known at compile time: in a kernel that runs once through its code, a call and a
// switch cost a fifth of the time.
template <u32 CODE>
__device__ __forceinline__ float4 activated(const float4& v, u32 a) {
    float four[4] = {v.x, v.y, v.z, v.w};
    activation_of(CODE, a).apply<float>(four);
    return {four[0], four[1], four[2], four[3]};
}
template <u32 CODE>
__device__ __forceinline__ float4 through(u32 a, const float4& grad, const float4& out) {
    const float slope = __uint_as_float(a);
    return {through(CODE, slope, grad.x, out.x), through(CODE, slope, grad.y, out.y), through(CODE, slope, grad.z, out.z),
            through(CODE, slope, grad.w, out.w)};
}

// Loads or stores the first `left` of V adjacent elements of a row, in one access if all belong to the row. The
// elements after those may belong to another thread.
template <int V>
__device__ __forceinline__ void load_first(float (&v)[V], const float* from, int left) {
    if (left >= V) {
        load_several<true>(v, from);
    } else {
#pragma unroll
        for (int i = 0; i < V - 1; ++i)  // compile-time indices keep v in registers
            if (i < left) v[i] = __ldcg(from + i);
    }
}
template <int V>
__device__ __forceinline__ void store_first(float* to, const float (&v)[V], int left) {
    if (left >= V) {
        store_several(to, v);
    } else {
#pragma unroll
        for (int i = 0; i < V - 1; ++i)
            if (i < left) to[i] = v[i];
    }
}

struct Nothing {};

// y = activation(sums), for a block at row first_m and column first_n.
template <int R, class Activate>
__device__ __forceinline__ void finish_forward(const Tiles<R>& tiles, const Warps& warps, const Shape& shape, float* y,
                                               int size, int first_m, int first_n, const Activate& activate) {
    const auto fetch = [](int, int) { return Nothing{}; };
    finish_tiles<R>(tiles, warps, fetch, [&](int row, int column, float4 sum, Nothing) {
        const int m = first_m + row, n = first_n + column;
        if (m >= size || n >= shape.N) return;
        const float4 made = activate(sum);
        const float four[4] = {made.x, made.y, made.z, made.w};
        store_first(y + static_cast<long long>(m) * shape.y_stride + n, four, shape.N - n);
    });
}

// Same, with the activation selected at run time.
template <int R>
__device__ __forceinline__ void finish_forward(const Tiles<R>& tiles, const Warps& warps, const Shape& shape, float* y,
                                               int size, int first_m, int first_n) {
    const Activation activation = activation_of(shape.code, shape.a);
    const auto activate = [&](const float4& sum) { return activated(sum, activation); };
    finish_forward<R>(tiles, warps, shape, y, size, first_m, first_n, activate);
}

// before = sums times the activation's derivative at `out`.
template <int R>
__device__ __forceinline__ void finish_backward(const Tiles<R>& tiles, const Warps& warps, const Shape& shape,
                                                const float* out, float* before, int size, int first_m, int first_n) {
    const float slope = __uint_as_float(shape.a);
    const auto fetch = [&](int row, int column) {
        const int m = first_m + row, n = first_n + column;
        if (m >= size || n >= shape.N) return float4{0.0f, 0.0f, 0.0f, 0.0f};
        return load4(out + static_cast<long long>(m) * shape.y_stride + n);
    };
    finish_tiles<R>(tiles, warps, fetch, [&](int row, int column, float4 sum, float4 given) {
        const int m = first_m + row, n = first_n + column;
        if (m >= size || n >= shape.N) return;
        const float4 made = through(shape.code, slope, sum, given);
        const float four[4] = {made.x, made.y, made.z, made.w};
        store_first(before + static_cast<long long>(m) * shape.y_stride + n, four, shape.N - n);
    });
}

// Argmax over LANES lanes; ties take the first index. best == N: the lane has no candidate.
template <int LANES>
__device__ __forceinline__ void join_largest(float& most, int& best, int N) {
#pragma unroll
    for (int mask = LANES / 2; mask > 0; mask /= 2) {
        const float other = __shfl_xor_sync(~0u, most, mask);
        const int where = __shfl_xor_sync(~0u, best, mask);
        if (where < N && (best == N || other > most || (other == most && where < best))) most = other, best = where;
    }
}

// Sums the rows' losses and correct predictions into the step's slot; one block.
struct Tally {
    const double* losses;  // nullptr: another launch does it
    const int* correct;
    double* step_losses;
    long long* step_correct;

    __device__ __forceinline__ void add_up(const Step& step) const {
        constexpr int AT_ONCE = 8;
        const int size = step.size();
        double sums[AT_ONCE] = {};
        int found = 0;
        for (int first = threadIdx.x; first < size; first += AT_ONCE * THREADS) {
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int row = first + i * THREADS;
                if (row < size) sums[i] += step.mine(losses)[row], found += step.mine(correct)[row];
            }
        }
#pragma unroll
        for (int i = 1; i < AT_ONCE; ++i) sums[0] += sums[i];
        const double loss = reduce_lanes<Sum, THREADS>(sums[0]);
        found = reduce_lanes<Sum, THREADS>(found);
        if (threadIdx.x > 0 || size == 0) return;
        step.mine(step_losses)[step.at()] = loss;
        step.mine(step_correct)[step.at()] = found;
    }
};

// -- gradients and update ---------------------------------------------------------------------------------------------

constexpr int MAX_LAYERS = 16;  // per launch
constexpr u32 SGD = 0, MOMENTUM = 1, ADAM = 2;
constexpr u32 CROSS_ENTROPY = 0, HALF_SSE = 1, MSE = 2;

struct LayerMemory {
    float *w, *mean, *square;
    const float *a, *dz;
    float* parts;  // (slices, N, w_stride): split-K partial gradients
};
struct LayerSizes {
    int K, N, w_stride, a_stride, dz_stride;
    u32 is_gathered;
    int blocks_across;  // blocks along K
    int slices;         // split-K slices of the gradient
};
// What every block reads first is adjacent: kernel arguments start out uncached.
struct Layers {
    LayerMemory memory[MAX_LAYERS];
    int blocks, chunks;  // per slice: blocks, and chunks of rows
    u32 optimiser;
    Warps warps;
    int first_block[MAX_LAYERS];  // prefix sum of blocks per layer; above any block for missing layers
    LayerSizes sizes[MAX_LAYERS];

    __device__ __forceinline__ LayerMemory memory_of(int layer, const Step& step) const {
        const LayerMemory& of = memory[layer];
        return {step.mine(of.w), step.mine(of.mean), step.mine(of.square),
                sizes[layer].is_gathered ? of.a : step.mine(of.a), step.mine(of.dz), step.mine(of.parts)};
    }
    __device__ __forceinline__ int layer_of(int block) const {
        int layer = 0;
#pragma unroll
        for (int i = 1; i < MAX_LAYERS; ++i) layer += first_block[i] <= block;
        return layer;
    }
};

// The tile of a block: `number` counts blocks of rows x columns over all slices.
struct GradientBlock {
    int slice, layer, first_m, first_n;

    __device__ __forceinline__ GradientBlock(const Layers& layers, int number, int rows, int columns) {
        slice = number / layers.blocks;
        const int block = number - slice * layers.blocks;
        layer = layers.layer_of(block);
        const int of_layer = block - layers.first_block[layer], across = layers.sizes[layer].blocks_across;
        first_m = of_layer / across * rows;
        first_n = of_layer % across * columns;
    }
};

// Four adjacent weights and their optimiser moments.
struct Kept {
    float w[4], mean[4], square[4];

    __device__ __forceinline__ void load(u32 optimiser, const LayerMemory& memory, long long at) {
        load_several<true>(w, memory.w + at);
        if (optimiser != SGD) load_several<true>(mean, memory.mean + at);
        if (optimiser == ADAM) load_several<true>(square, memory.square + at);
    }
};

// Updates the first `left` of V adjacent weights and their moments; padding stays 0.
//
// SGD       w -= lr g, where g = scale gradient + decay w
// MOMENTUM  mean = keep mean + g; w -= lr mean
// ADAM      mean = 0.9 mean + 0.1 g; square = 0.999 square + 0.001 g^2;
//           w = keep w - lr mean / (root sqrt(square) + 1e-8)
template <int V>
__device__ __forceinline__ void move(u32 optimiser, const Rule& rule, const float (&gradients)[V], float (&w)[V],
                                     float (&mean)[V], float (&square)[V], int left) {
#pragma unroll
    for (int i = 0; i < V; ++i) {
        if (i >= left) continue;
        const float g = fmaf(rule.scale, gradients[i], rule.decay * w[i]);
        if (optimiser == SGD) {
            w[i] = fmaf(-rule.lr, g, w[i]);
        } else if (optimiser == MOMENTUM) {
            mean[i] = fmaf(rule.keep, mean[i], g);
            w[i] = fmaf(-rule.lr, mean[i], w[i]);
        } else {
            mean[i] = fmaf(0.9f, mean[i], 0.1f * g);
            square[i] = fmaf(0.999f, square[i], 0.001f * (g * g));
            w[i] = rule.keep * w[i] - rule.lr * mean[i] / (rule.root * sqrtf(square[i]) + 1e-8f);
        }
    }
}

__device__ __forceinline__ void update(u32 optimiser, const Rule& rule, const LayerMemory& memory, long long at,
                                       const float (&gradients)[4], Kept& kept, int left) {
    move(optimiser, rule, gradients, kept.w, kept.mean, kept.square, left);
    store_several(memory.w + at, kept.w);
    if (optimiser != SGD) store_several(memory.mean + at, kept.mean);
    if (optimiser == ADAM) store_several(memory.square + at, kept.square);
}

// Gradient epilogue: the update, or a store of the slice's partial sums.
template <int R, bool IS_WHOLE>
__device__ __forceinline__ void finish_gradients(const Tiles<R>& tiles, const Warps& warps, const Step& step,
                                                 const Layers& layers, const GradientBlock& block) {
    const LayerMemory memory = layers.memory_of(block.layer, step);
    const LayerSizes& sizes = layers.sizes[block.layer];
    const Rule rule = step.rule();
    const auto fetch = [&](int row, int column) {
        Kept kept;
        const int m = block.first_m + row, n = block.first_n + column;
        if (IS_WHOLE && m < sizes.N && n < sizes.K)
            kept.load(layers.optimiser, memory, static_cast<long long>(m) * sizes.w_stride + n);
        return kept;
    };
    finish_tiles<R>(tiles, warps, fetch, [&](int row, int column, float4 sum, Kept kept) {
        const int m = block.first_m + row, n = block.first_n + column;
        if (m >= sizes.N || n >= sizes.K) return;
        const float four[4] = {sum.x, sum.y, sum.z, sum.w};
        const long long at = static_cast<long long>(m) * sizes.w_stride + n;
        if (IS_WHOLE) update(layers.optimiser, rule, memory, at, four, kept, sizes.K - n);
        else store_several(memory.parts + static_cast<long long>(block.slice) * sizes.N * sizes.w_stride + at, four);
    });
}
