// mlp_train_rows.cu: of a training step of many rows, all layers behind the first: forward, loss and back, in one launch.
//
// Idea    Narrow layers are too little work for a launch each. A warp takes 16 rows through all of them and back by
//         mma.sync: what the layers give waits in shared memory, a few floats a row, where the gradients replace it;
//         rows come and go as lines. A float is the sum of PARTS numbers of bf16; those of the weights are made once a
//         block, which then walks over tiles of rows.
// Floor   784-56-28-10, 60,000 rows: 15 + 7 MB come or go as activations and 15 + 7 + 4 MB as gradients: 48 MB / 4.8
//         TB/s = 10 us, less where they are still in L2; 3,696 multiplications a row, six times over in fp32, are 2.7
//         Tflop: 3 us at 989 Tflop/s of bf16.
// Order   A sum goes over steps of 16 terms; of each the lowest products first. It is the tensor core's own.
// Layout  As mlp_train.cu. Parts: pieces of 8 k's, 16 B; 8 NT of them, a column each, are 8 k's of all columns.
// Shared  Rows of 8 warps, 128 floats for each of a layer's columns, padded; parts of all weights, forward and back: with
//         three parts 98,816 B here.
// Limits  Two to four widths of at most 64, the last at most 32. PARTS is 3 (fp32), 2 (tf32, fp16) or 1 (bf16). sm_80 up.
#include "mlp_train_layers.cuh"
#include "mlp_train_parts.cuh"

constexpr int ROWS = 16 * WARPS;

__device__ constexpr int steps_of(int K) { return (K + 15) / 16; }
__device__ constexpr int eights_of(int N) { return (N + 7) / 8; }
// Floats from row to row of W numbers, and the 1 of a bias: 8 more than steps have, so that rows begin 8 banks apart.
__device__ constexpr int pitch_of(int W) { return 16 * steps_of(W + 1) + 8; }
// Pieces of one part of weights: K terms a sum, N columns.
__device__ constexpr int pieces_of(int K, int N) { return steps_of(K) * 2 * 8 * eights_of(N); }

// A warp's 16 rows of `columns` numbers from memory, or to it; `size` of them are there.
template <int W, bool IS_LOAD>
__device__ __forceinline__ void move_rows(float* tile, float* rows, int stride, int size) {
    constexpr int FOURS = (W + 3) / 4;
#pragma unroll
    for (int i = 0; i < (16 * FOURS + 31) / 32; ++i) {
        const int item = threadIdx.x % 32 + 32 * i, row = item / FOURS, n = item % FOURS * 4;
        if (item >= 16 * FOURS || row >= size) continue;
        float *at = rows + static_cast<long long>(row) * stride + n, *here = tile + row * pitch_of(W) + n;
        const float4 four = IS_LOAD ? __ldcg(reinterpret_cast<const float4*>(at)) : load4(here);
        const float v[4] = {four.x, four.y, four.z, four.w};
        if (W % 4 == 0) store_several(IS_LOAD ? here : at, v);
        else store_first(IS_LOAD ? here : at, v, W - n);
    }
}

// c (16 rows, 8 NT columns) = rows (16, K) times weights, K terms a sum.
template <int PARTS, int K, int NT>
__device__ __forceinline__ void multiply_rows(float (&c)[NT][4], const float* rows, int pitch, const u32* weights) {
    constexpr int PART_WORDS = steps_of(K) * 2 * 8 * NT * 4;
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < NT; ++j) c[j][0] = c[j][1] = c[j][2] = c[j][3] = 0.0f;
#pragma unroll
    for (int step = 0; step < steps_of(K); ++step) {
        float v[8];
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // rows g and g + 8, the first eight k's and then the others
            const float2 two = load2(rows + (g + i % 2 * 8) * pitch + 16 * step + i / 2 * 8 + 2 * q);
            v[2 * i] = two.x, v[2 * i + 1] = two.y;
        }
        uint4 split[PARTS];
        split_eight(split, v);
#pragma unroll
        for (int sum = PARTS - 1; sum >= 0; --sum)  // parts i of the rows and sum - i of the weights
#pragma unroll
            for (int i = 0; i <= sum; ++i) {
                const u32 a[4] = {split[i].x, split[i].y, split[i].z, split[i].w};
                const u32* words = weights + (sum - i) * PART_WORDS + step * 2 * 8 * NT * 4 + threadIdx.x % 32;
#pragma unroll
                for (int j = 0; j < NT; ++j) mma<Bf16>(c[j], a, words[32 * j], words[32 * j + 8 * NT * 4]);
            }
    }
}

// Pieces of weights with N columns and K terms a sum, of which `rows` and `columns` of the matrix are there.
template <int PARTS, int K, int N, bool IS_TURNED>
__device__ __forceinline__ void make_pieces(uint4* to, const float* w, int stride, int terms) {
    constexpr int COUNT = pieces_of(K, N), EIGHT = 8 * eights_of(N);
    for (int piece = threadIdx.x; piece < COUNT; piece += THREADS) {
        const int n = piece % EIGHT, first_k = piece / EIGHT * 8;
        float v[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int k = first_k + i;
            v[i] = n < N && k < terms ? __ldcg(w + (IS_TURNED ? k * stride + n : n * stride + k)) : 0.0f;
        }
        uint4 parts[PARTS];
        split_eight(parts, v);
#pragma unroll
        for (int part = 0; part < PARTS; ++part) to[part * COUNT + piece] = parts[part];
    }
}
// Those of the layers from AT on, from D numbers to N: forward, then back. A bias is a weight of the 1 behind the D.
template <int PARTS, int AT, int D, int N, int... MORE>
__device__ __forceinline__ uint4* bring_weights(const Step& step, const RowLayers& layers, uint4* to) {
    const RowLayer& layer = layers.of[AT];
    const float* const w = step.mine(layers.memory[AT].w);
    make_pieces<PARTS, D + 1, N, false>(to, w, layer.w_stride, D + (layer.has_bias ? 1 : 0));
    to += PARTS * pieces_of(D + 1, N);
    make_pieces<PARTS, N, D, true>(to, w, layer.w_stride, N);
    to += PARTS * pieces_of(N, D);
    if constexpr (sizeof...(MORE) > 0) return bring_weights<PARTS, AT + 1, N, MORE...>(step, layers, to);
    else return to;
}

// The loss of a row whose last layer gave the N numbers `made`, which their dz replaces; both times the row's weight.
template <int N>
__device__ __forceinline__ double loss_of_row(const RowLayers& layers, const RowLayer& layer, float* made,
                                              long long number, float weight, int& hit) {
    if (layers.loss != CROSS_ENTROPY) {
        const float* target = static_cast<const float*>(layers.targets) + number * N;
        double loss = 0.0;
        float wanted[N];
#pragma unroll
        for (int n = 0; n < N; ++n) wanted[n] = target[n];
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const float out = made[n], difference = out - wanted[n];
            loss += static_cast<double>(difference) * static_cast<double>(difference);
            made[n] = through(layer.code, __uint_as_float(layer.slope), weight * difference, out);
        }
        hit = 0;
        return loss * (layers.loss == HALF_SSE ? 0.5 : 1.0 / N) * weight;
    }
    const int truth = static_cast<int>(static_cast<const long long*>(layers.targets)[number]);
    int best = 0;  // the first of the largest
    for (int n = 1; n < N; ++n)
        if (made[n] > made[best]) best = n;
    const float most = made[best], at_truth = made[truth] - most;
    double total = 0.0, all = 0.0;
    for (int n = 0; n < N; ++n) {
        const float share = expf(made[n] - most);
        if (layers.smoothing > 0.0f) all += static_cast<double>(made[n] - most);
        total += static_cast<double>(share);
        made[n] = share;
    }
    const float scale = static_cast<float>(total), rest = layers.smoothing / N;
    for (int n = 0; n < N; ++n)
        made[n] = weight * (made[n] / scale - (n == truth ? 1.0f - layers.smoothing + rest : rest));
    hit = best == truth;
    const double smoothing = layers.smoothing;
    return (log(total) - (1.0 - smoothing) * static_cast<double>(at_truth) - smoothing / N * all) * weight;
}

// Layer AT makes N numbers from D, and MORE layers follow. `given` are the rows' D numbers, the rest lies behind them;
// `weights` are those of this layer on; `first` is the warp's first row, of `size` that are there; `number` is the lane's
// row of the data.
template <int PARTS, int AT, int D, int N, int... MORE>
__device__ __forceinline__ void take_rows_through(const Step& step, const RowLayers& layers, float* given,
                                                  const uint4* weights, long long number, int first, int size) {
    constexpr int NT = eights_of(N), DT = eights_of(D);
    const RowLayer &layer = layers.of[AT], &before = layers.of[AT - 1];
    const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const long long at = static_cast<long long>(first) * layer.stride;
    float* made = given + 16 * pitch_of(D);
    const uint4* back = weights + PARTS * pieces_of(D + 1, N);
    const Activation activation = activation_of(layer.code, layer.slope);
    {
        float c[NT][4];
        multiply_rows<PARTS, D + 1, NT>(c, given, pitch_of(D), reinterpret_cast<const u32*>(weights));
        activate_all<float>(c, activation);
#pragma unroll
        for (int i = 0; i < 4 * NT; ++i) {
            const int n = i / 4 * 8 + 2 * q + i % 2;
            if (n < N) made[(g + i % 4 / 2 * 8) * pitch_of(N) + n] = c[i / 4][i % 4];
        }
    }
    __syncwarp();
    if constexpr (sizeof...(MORE) > 0) {
        move_rows<N, false>(made, step.mine(layers.memory[AT].a) + at, layer.stride, size);
        take_rows_through<PARTS, AT + 1, N, MORE...>(step, layers, made, back + PARTS * pieces_of(N, D), number, first,
                                                     size);
    } else {
        if (lane < 16 && lane < size) {
            const float weight = layers.weights ? step.mine(layers.weights)[number] : 1.0f;
            step.mine(layers.losses)[first + lane] = loss_of_row<N>(layers, layer, made + lane * pitch_of(N), number,
                                                                    weight, step.mine(layers.hits)[first + lane]);
        }
        __syncwarp();
    }
    move_rows<N, false>(made, step.mine(layers.memory[AT].dz) + at, layer.stride, size);
    float c[DT][4];
    multiply_rows<PARTS, N, DT>(c, made, pitch_of(N), reinterpret_cast<const u32*>(back));
#pragma unroll
    for (int i = 0; i < 4 * DT; ++i) {
        const int n = i / 4 * 8 + 2 * q + i % 2;
        float& out = given[(g + i % 4 / 2 * 8) * pitch_of(D) + n];
        if (n < D) out = through(before.code, __uint_as_float(before.slope), c[i / 4][i % 4], out);
    }
    __syncwarp();
}

// Zeros, and behind the numbers of each layer the 1 that its reader's bias is a weight of.
template <int W, int... MORE>
__device__ __forceinline__ void clear_rows(float* tile) {
    for (int i = threadIdx.x % 32; i < 16 * pitch_of(W); i += 32) tile[i] = i % pitch_of(W) == W ? 1.0f : 0.0f;
    if constexpr (sizeof...(MORE) > 0) clear_rows<MORE...>(tile + 16 * pitch_of(W));
}

// D numbers a row come, the first layer's; dz of all layers goes, and what those behind the first give.
template <int PARTS, int D, int... MORE>
__global__ void __launch_bounds__(THREADS, 2) train_rows(const Step step, const __grid_constant__ RowLayers layers) {
    extern __shared__ float4 room[];
    constexpr int PITCHES = (pitch_of(D) + ... + pitch_of(MORE));  // of all layers
    const int size = step.size(), warp = threadIdx.x / 32;
    uint4* weights = reinterpret_cast<uint4*>(room);
    // Not those that the launch before has made.
    float* tile = reinterpret_cast<float*>(bring_weights<PARTS, 1, D, MORE...>(step, layers, weights)) + warp * 16 * PITCHES;
    clear_rows<D, MORE...>(tile);
    __syncthreads();
    wait_for_step_before();
    const RowLayer& given = layers.of[0];
    for (int first = blockIdx.x * ROWS + 16 * warp; first < size; first += gridDim.x * ROWS) {
        const long long at = static_cast<long long>(first) * given.stride;
        const int row = first + static_cast<int>(threadIdx.x) % 16;
        const long long number = step.rows()[row < size ? row : size - 1];
        move_rows<D, true>(tile, step.mine(layers.memory[0].a) + at, given.stride, size - first);
        __syncwarp();
        take_rows_through<PARTS, 1, D, MORE...>(step, layers, tile, weights, number, first, size - first);
        move_rows<D, false>(tile, step.mine(layers.memory[0].dz) + at, given.stride, size - first);
        __syncwarp();
    }
}
