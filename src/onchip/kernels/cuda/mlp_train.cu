// mlp_train.cu: a training step of an MLP: forward, loss, backward, gradients and update.
//
// Idea    A step is a launch for each layer forward, one for the head (last layer, loss, its gradient and that of what
//         went in), one for each layer backward, and one for all gradients, in which each block owns a tile of some
//         weights, sums up its gradient over the batch and updates it on the spot: no gradient reaches memory. Rows
//         of x are read where the order says. Of a large batch blocks sum up slices; apply_parts adds them in order.
//         Many steps are one graph: which rows a step has follows from a counter on the GPU.
// Floor   A row costs 6 flop a weight, 4 in the first layer. 784-320-160-10, batch 64: 85 Mflop and 1.2 MB of weights
//         read twice and written once a step: 0.5 us at H200's tf32 (three products a term), 0.2 us of L2; a launch
//         in a graph is 0.7 us, five of them 3.5 us. 784-56-28-10, 60,000 rows: x read twice, 376 MB / 4.8 TB/s
//         = 78 us; 11.2 Gflop times 3 / 494 Tflop/s = 68 us.
// Order   mlp_train.cuh. The head's dots go lane by lane, then through a tree of the lanes; losses thread by thread, then
//         through a tree. Slices of a batch first to last.
// Layout  Rows begin at multiples of 32 bytes. x and activations (rows, width, 1 if the layer that reads them has a
//         bias, zeros); w (D_out, D_in, bias, zeros): a bias is a weight of that 1. So are mean and square, what the
//         optimiser keeps. dz, the gradients by what goes into activations, lie like the activations.
// Shared  8 tiles of 32 x 36 floats, 36 864 B, or of 16 x 20, 10 240 B.
// Limits  float32 in memory; products in fp32 (three of tf32), tf32, bf16 or fp16. Any widths and batch below 2^30.
//         sm_80 up.
#include "mlp_train.cuh"
#include "reduce.cuh"

using u8 = unsigned char;

// A product of the rows of a step: y = x w, K terms a sum, N numbers a row of y.
struct Shape {
    int x_stride, w_stride, y_stride, K, N;
    u32 is_gathered;  // x is the data, whose rows the order tells
    u32 code, a;      // the activation: of y forward, of what lies there backward
    Warps warps;
};

__device__ __forceinline__ Activation activation_of(u32 code, u32 a) { return {code, __uint_as_float(a), 0.0f}; }

// grad times the slope of an activation that gave `out`: ReLU, LeakyReLU, Sigmoid, Tanh.
__device__ __forceinline__ float through(u32 code, float a, float grad, float out) {
    switch (code) {
        case 1: return out > 0.0f ? grad : 0.0f;
        case 2: return out > 0.0f ? grad : grad * a;
        case 4: return grad * out * (1.0f - out);
        case 5: return grad * (1.0f - out * out);
    }
    return grad;
}

// Out of line, as `activated`: a thread has many fours, and a copy for each would be most of the kernel.
__device__ __noinline__ float4 through(u32 code, float a, float4 grad, float4 out) {
    return {through(code, a, grad.x, out.x), through(code, a, grad.y, out.y), through(code, a, grad.z, out.z),
            through(code, a, grad.w, out.w)};
}

// The first `left` of four numbers; a row has room for all of them.
__device__ __forceinline__ void store_first(float* to, const float (&v)[4], int left) {
    if (left >= 4) {
        store_several(to, v);
    } else {
#pragma unroll
        for (int i = 0; i < 3; ++i)  // by constants: a register has no run-time index
            if (i < left) to[i] = v[i];
    }
}

struct Nothing {};

// y (size, N) = activation(x w^T), x (size, K), w (N, K).
template <class P, int R>
__global__ void __launch_bounds__(THREADS, R == 2 ? 2 : 1)
train_forward(const Step step, const float* x, const float* w, float* y, const Shape shape) {
    __shared__ __align__(16) Tiles<R> tiles;
    if (!shape.is_gathered) wait_for_step_before();
    const Warps warps = shape.warps;
    const int across = 8 * R * warps.across, blocks_across = (shape.N + across - 1) / across;
    const int first_m = blockIdx.x / blocks_across * 8 * R * warps.down, first_n = blockIdx.x % blocks_across * across;
    const int size = step.size();
    const WarpPlace<R> place(warps);
    const AlongK<R> a(x, shape.x_stride, first_m + place.row, size, shape.x_stride,
                      shape.is_gathered ? step.rows() : nullptr);
    const Chunks chunks = {place.part, (shape.K + CHUNK - 1) / CHUNK, warps.deep};
    Ahead<R> of_a, of_b;
    of_a.begin(a, chunks);
    if (shape.is_gathered) wait_for_step_before();
    if (first_m >= size) return;
    const AlongK<R> b(w, shape.w_stride, first_n + place.column, shape.N, shape.w_stride);
    of_b.begin(b, chunks);
    sum_up<P, R>(tiles.at[threadIdx.x / 32], a, of_a, b, of_b, chunks);
    const Activation activation = activation_of(shape.code, shape.a);
    const auto fetch = [](int, int) { return Nothing{}; };
    finish_tiles<R>(tiles, warps, fetch, [&](int row, int column, float4 sum, Nothing) {
        const int m = first_m + row, n = first_n + column;
        if (m >= size || n >= shape.N) return;
        const float4 made = activated(sum, activation);
        const float four[4] = {made.x, made.y, made.z, made.w};
        store_first(y + static_cast<long long>(m) * shape.y_stride + n, four, shape.N - n);
    });
}

// before (size, N) = (dz w) times the slope of what gave `out` (size, N); dz (size, K), w (K, N).
template <class P, int R>
__global__ void __launch_bounds__(THREADS, R == 2 ? 2 : 1)
train_backward(const Step step, const float* dz, const float* w, const float* out, float* before, const Shape shape) {
    __shared__ __align__(16) Tiles<R> tiles;
    wait_for_step_before();
    const Warps warps = shape.warps;
    const int across = 8 * R * warps.across, blocks_across = (shape.N + across - 1) / across;
    const int first_m = blockIdx.x / blocks_across * 8 * R * warps.down, first_n = blockIdx.x % blocks_across * across;
    const int size = step.size();
    if (first_m >= size) return;
    const WarpPlace<R> place(warps);
    const AlongK<R> a(dz, shape.x_stride, first_m + place.row, size, shape.x_stride);
    const AcrossK<R> b(w, shape.w_stride, first_n + place.column, shape.w_stride, shape.K);
    const Chunks chunks = {place.part, (shape.K + CHUNK - 1) / CHUNK, warps.deep};
    Ahead<R> of_a, of_b;
    of_a.begin(a, chunks);
    of_b.begin(b, chunks);
    sum_up<P, R>(tiles.at[threadIdx.x / 32], a, of_a, b, of_b, chunks);
    const float slope = __uint_as_float(shape.a);
    const auto fetch = [&](int row, int column) {
        const int m = first_m + row, n = first_n + column;
        if (m >= size || n >= shape.N) return float4{0.0f, 0.0f, 0.0f, 0.0f};
        return load4(out + static_cast<long long>(m) * shape.y_stride + n);
    };
    finish_tiles<R>(tiles, warps, fetch, [&](int row, int column, float4 sum, float4 given) {
        const int m = first_m + row, n = first_n + column;
        if (m >= size || n >= shape.N) return;
        const long long at = static_cast<long long>(m) * shape.y_stride + n;
        const float4 made = through(shape.code, slope, sum, given);
        const float four[4] = {made.x, made.y, made.z, made.w};
        store_first(before + at, four, shape.N - n);
    });
}

// -- the head ----------------------------------------------------------------------------------------------------------

constexpr u32 CROSS_ENTROPY = 0, HALF_SSE = 1, MSE = 2;

struct Head {
    const float* a;       // (size, K): what goes into the last layer
    const float* w;       // (N, K), N <= 32; nullptr: z is there already
    const float* z;       // (size, N): the network's output, where w is nullptr
    const void* targets;  // (n,) int64 classes, or (n, N) float32
    float* dz;            // (size, N); nullptr: losses alone
    float* before;        // (size, D): the gradient by what went into `a`, its bias's 1 aside; nullptr: not asked for
    double* losses;       // (size,)
    int* hits;            // (size,)
    int a_stride, w_stride, z_stride, K, N, D;
    u32 is_gathered, loss, code, slope, before_code, before_slope;
};

// W warps a row: maybe the last layer, an output a warp at a time; then the loss, which each of them works out, and the
// gradients by it. W = 8: few rows, which should not wait for their loads one after the other.
template <int W>
__global__ void __launch_bounds__(THREADS) train_head(const Step step, const Head head) {
    __shared__ float outputs[WARPS / W][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % W, of_block = threadIdx.x / 32 / W, N = head.N;
    const int row = blockIdx.x * (WARPS / W) + of_block, size = step.size();
    const long long number = row < size ? step.rows()[row] : 0;
    wait_for_step_before();
    if (row >= size) return;  // with W = 8 all of the block
    const long long at = static_cast<long long>(row) * head.z_stride;
    const float* a = head.a + (head.is_gathered ? number : static_cast<long long>(row)) * head.a_stride;
    const float* z = head.z + at;
    if (head.w) {
        constexpr int AT_ONCE = 4;  // sums of a warp: shuffles take long, and these do not wait for each other
        const Activation activation = activation_of(head.code, head.slope);
        for (int first = warp; first < N; first += AT_ONCE * W) {
            const float* w = head.w + static_cast<long long>(first) * head.w_stride;
            float sums[AT_ONCE] = {};
#pragma unroll 4
            for (int k = lane; k < head.K; k += 32) {
                const float given = a[k];
#pragma unroll
                for (int j = 0; j < AT_ONCE; ++j)
                    if (first + j * W < N)
                        sums[j] = fmaf(given, w[static_cast<long long>(j * W) * head.w_stride + k], sums[j]);
            }
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j) {
                const float sum = reduce_lanes<Sum, 32>(sums[j]);
                if (lane == 0 && first + j * W < N) outputs[of_block][first + j * W] = activation(sum);
            }
        }
        if (W > 1) __syncthreads();
        else __syncwarp();
        z = outputs[of_block];
    }
    const bool tells = warp == 0;  // to memory
    double loss = 0.0;
    float gradient = 0.0f;  // of the last z that this lane has: of the only one where head.w is there
    if (head.loss == CROSS_ENTROPY) {
        float most = __uint_as_float(0xff800000u);
        int best = N;
        for (int n = lane; n < N; n += 32)
            if (z[n] > most || best == N) most = z[n], best = n;
#pragma unroll
        for (int mask = 16; mask > 0; mask /= 2) {  // the first of the largest
            const float other = __shfl_xor_sync(~0u, most, mask);
            const int where = __shfl_xor_sync(~0u, best, mask);
            if (where < N && (best == N || other > most || (other == most && where < best))) most = other, best = where;
        }
        double total = 0.0;
        for (int n = lane; n < N; n += 32) total += static_cast<double>(expf(z[n] - most));
        total = reduce_lanes<Sum, 32>(total);
        const float scale = static_cast<float>(total);
        const int truth = static_cast<int>(static_cast<const long long*>(head.targets)[number]);
        float at_truth = 0.0f;
        for (int n = lane; n < N; n += 32) {
            gradient = expf(z[n] - most) / scale - (n == truth ? 1.0f : 0.0f);
            if (n == truth) at_truth = z[n] - most;
            if (head.dz && tells) head.dz[at + n] = gradient;
        }
        at_truth = __shfl_sync(~0u, at_truth, truth % 32);
        loss = log(total) - static_cast<double>(at_truth);
        if (lane == 0 && tells) head.hits[row] = best == truth;
    } else {
        const float* target = static_cast<const float*>(head.targets) + number * N;
        for (int n = lane; n < N; n += 32) {
            const float difference = z[n] - target[n];
            loss += static_cast<double>(difference) * static_cast<double>(difference);
            gradient = through(head.code, __uint_as_float(head.slope), difference, z[n]);
            if (head.dz && tells) head.dz[at + n] = gradient;
        }
        loss = reduce_lanes<Sum, 32>(loss) * (head.loss == HALF_SSE ? 0.5 : 1.0 / N);
        if (lane == 0 && tells) head.hits[row] = 0;
    }
    if (lane == 0 && tells) head.losses[row] = loss;
    if (!head.before) return;
    for (int first = 32 * warp; first < head.D; first += 32 * W) {  // all lanes take part: each has one of the gradients
        const int k = first + lane;
        float sum = 0.0f;
#pragma unroll 4
        for (int n = 0; n < N; ++n) {
            const float of_n = __shfl_sync(~0u, gradient, n);
            if (k < head.D) sum = fmaf(of_n, head.w[static_cast<long long>(n) * head.w_stride + k], sum);
        }
        if (k < head.D)
            head.before[static_cast<long long>(row) * head.a_stride + k] =
                through(head.before_code, __uint_as_float(head.before_slope), sum, a[k]);
    }
}

// Sum of the rows' losses, and their hits, to the step's place: one block.
struct Tally {
    const double* losses;  // nullptr: another launch does it
    const int* hits;
    double* step_losses;
    long long* step_hits;

    __device__ __forceinline__ void add_up(const Step& step) const {
        constexpr int AT_ONCE = 8;
        const int size = step.size();
        double sums[AT_ONCE] = {};
        int found = 0;
        for (int first = threadIdx.x; first < size; first += AT_ONCE * THREADS) {
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int row = first + i * THREADS;
                if (row < size) sums[i] += losses[row], found += hits[row];
            }
        }
#pragma unroll
        for (int i = 1; i < AT_ONCE; ++i) sums[0] += sums[i];
        const double loss = reduce_lanes<Sum, THREADS>(sums[0]);
        found = reduce_lanes<Sum, THREADS>(found);
        if (threadIdx.x == 0 && size > 0) step_losses[step.at()] = loss, step_hits[step.at()] = found;
    }
};

__global__ void __launch_bounds__(THREADS) train_tally(const Step step, const Tally tally) {
    wait_for_step_before();
    tally.add_up(step);
}

// -- gradients and update ----------------------------------------------------------------------------------------------

constexpr int MOST_LAYERS = 16;  // of a launch
constexpr u32 SGD = 0, MOMENTUM = 1, ADAM = 2;

struct LayerMemory {
    float *w, *mean, *square;
    const float *a, *dz;
    float* parts;  // (slices, N, w_stride): gradients of slices of the batch
};
struct LayerSizes {
    int K, N, w_stride, a_stride, dz_stride;
    u32 is_gathered;
    int first_block, blocks_across;  // blocks of the layers before; blocks that share rows of w
};
struct Layers {
    LayerMemory memory[MOST_LAYERS];
    LayerSizes sizes[MOST_LAYERS];
    int count, blocks, slices, chunks;  // layers; blocks of a slice; chunks of rows that a slice has
    u32 optimiser;
    Warps warps;

    __device__ __forceinline__ int layer_of(int block) const {
        int layer = 0;
        while (layer + 1 < count && sizes[layer + 1].first_block <= block) ++layer;
        return layer;
    }
};

// Four neighbours of w and what the optimiser keeps for them.
struct Kept {
    float w[4], mean[4], square[4];

    __device__ __forceinline__ void load(u32 optimiser, const LayerMemory& memory, long long at) {
        *reinterpret_cast<float4*>(w) = load4(memory.w + at);
        if (optimiser != SGD) *reinterpret_cast<float4*>(mean) = load4(memory.mean + at);
        if (optimiser == ADAM) *reinterpret_cast<float4*>(square) = load4(memory.square + at);
    }
};

// They move, `left` of them; the zeros behind those stay.
//
// SGD       w -= lr g, where g = scale gradient + decay w
// MOMENTUM  mean = momentum mean + g; w -= lr mean
// ADAM      mean = 0.9 mean + 0.1 g; square = 0.999 square + 0.001 g^2; w -= lr mean / (root sqrt(square) + 1e-8)
__device__ __forceinline__ void update(u32 optimiser, const Rule& rule, const LayerMemory& memory, long long at,
                                       const float (&gradients)[4], Kept kept, int left) {
    float(&w)[4] = kept.w, (&mean)[4] = kept.mean, (&square)[4] = kept.square;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (i >= left) continue;
        const float g = fmaf(rule.scale, gradients[i], rule.decay * w[i]);
        if (optimiser == SGD) {
            w[i] = fmaf(-rule.lr, g, w[i]);
        } else if (optimiser == MOMENTUM) {
            mean[i] = fmaf(rule.momentum, mean[i], g);
            w[i] = fmaf(-rule.lr, mean[i], w[i]);
        } else {
            mean[i] = fmaf(0.9f, mean[i], 0.1f * g);
            square[i] = fmaf(0.999f, square[i], 0.001f * (g * g));
            w[i] -= rule.lr * mean[i] / (rule.root * sqrtf(square[i]) + 1e-8f);
        }
    }
    store_several(memory.w + at, w);
    if (optimiser != SGD) store_several(memory.mean + at, mean);
    if (optimiser == ADAM) store_several(memory.square + at, square);
}

// dz^T a of every layer, and the update; or, of more than one slice, the slice's part. If there is a tally, it is the
// first block's, who has little to do and ends before the others.
template <class P, int R, bool IS_WHOLE>
__global__ void __launch_bounds__(THREADS, R == 2 ? 2 : 1)
train_gradients(const Step step, const __grid_constant__ Layers layers, const Tally tally) {
    __shared__ __align__(16) Tiles<R> tiles;
    const int size = step.size(), number = static_cast<int>(blockIdx.x) - (tally.losses ? 1 : 0);
    if (size == 0 || number < 0) {
        wait_for_step_before();
        if (size > 0) tally.add_up(step);
        return;
    }
    const int slice = number / layers.blocks, block = number % layers.blocks;
    const int layer = layers.layer_of(block);
    const LayerMemory& memory = layers.memory[layer];
    const LayerSizes& sizes = layers.sizes[layer];
    const Warps warps = layers.warps;
    const int of_layer = block - sizes.first_block;
    const int first_m = of_layer / sizes.blocks_across * 8 * R * warps.down;
    const int first_n = of_layer % sizes.blocks_across * 8 * R * warps.across;
    const WarpPlace<R> place(warps);
    const int all = (size + CHUNK - 1) / CHUNK, first = slice * layers.chunks;
    const Chunks chunks = {first + place.part, first + layers.chunks < all ? first + layers.chunks : all, warps.deep};
    if (!sizes.is_gathered) wait_for_step_before();
    const AcrossK<R> b(memory.a, sizes.a_stride, first_n + place.column, sizes.a_stride, size,
                       sizes.is_gathered ? step.rows() : nullptr);
    Ahead<R> of_a, of_b;
    of_b.begin(b, chunks);
    if (sizes.is_gathered) wait_for_step_before();
    const AcrossK<R> a(memory.dz, sizes.dz_stride, first_m + place.row, sizes.dz_stride, size);
    of_a.begin(a, chunks);
    sum_up<P, R>(tiles.at[threadIdx.x / 32], a, of_a, b, of_b, chunks);
    const Rule rule = step.rules[step.at()];
    const auto fetch = [&](int row, int column) {
        Kept kept;
        const int m = first_m + row, n = first_n + column;
        if (IS_WHOLE && m < sizes.N && n < sizes.K)
            kept.load(layers.optimiser, memory, static_cast<long long>(m) * sizes.w_stride + n);
        return kept;
    };
    finish_tiles<R>(tiles, warps, fetch, [&](int row, int column, float4 sum, const Kept& kept) {
        const int m = first_m + row, n = first_n + column;
        if (m >= sizes.N || n >= sizes.K) return;
        const float four[4] = {sum.x, sum.y, sum.z, sum.w};
        const long long at = static_cast<long long>(m) * sizes.w_stride + n;
        if (IS_WHOLE) update(layers.optimiser, rule, memory, at, four, kept, sizes.K - n);
        else store_several(memory.parts + static_cast<long long>(slice) * sizes.N * sizes.w_stride + at, four);
    });
}

// The slices' parts added up, first to last, and the update.
__global__ void __launch_bounds__(THREADS) train_apply(const Step step, const __grid_constant__ Layers layers) {
    wait_for_step_before();
    if (step.size() == 0) return;
    const int block = blockIdx.x, layer = layers.layer_of(block);
    const LayerMemory& memory = layers.memory[layer];
    const LayerSizes& sizes = layers.sizes[layer];
    const long long numbers = static_cast<long long>(sizes.N) * sizes.w_stride;
    const long long at = (static_cast<long long>(block - sizes.first_block) * THREADS + threadIdx.x) * 4;
    if (at >= numbers) return;
    const int left = sizes.K - static_cast<int>(at % sizes.w_stride);
    if (left <= 0) return;
    Kept kept;
    kept.load(layers.optimiser, memory, at);
    float sums[4] = {};
#pragma unroll 4
    for (int slice = 0; slice < layers.slices; ++slice) {
        const float4 part = load4(memory.parts + slice * numbers + at);
        sums[0] += part.x, sums[1] += part.y, sums[2] += part.z, sums[3] += part.w;
    }
    update(layers.optimiser, step.rules[step.at()], memory, at, sums, kept, left);
}

// The steps of a graph are done: the next one goes on behind them.
__global__ void train_advance(long long* progress, long long steps) {
    wait_for_step_before();
    if (threadIdx.x == 0) progress[0] += steps;
}
