// train/large_batch/rows.cu: all layers after the first of a training step for many rows: forward to dW.
//
// Idea    Narrow layers are too little work for one launch each. A warp runs 16 rows forward and backward through all
//         of them with mma.sync; activations stay in shared memory and gradients replace them. The warps share each dW.
//         It reads the first layer's activations and writes its dz as the bf16 split that its dW gemm reads. A block
//         splits the weights once and loops over row tiles. Activations and loss are compile-time: a switch per element
//         took most of the time.
// Floor   784-56-28-10, 60,000 rows: 15 MB of activations in, 23 MB of gradients out (8 in bf16): 38 MB / 4.8 TB/s = 8
//         us, less from L2; 5,600 multiplications per row, 6x in fp32, are 4 Gflop: 4 us at 989 Tflop/s bf16.
// Order   K steps of 16, smallest products first, in the tensor core; dW sums 16 rows at a time, then blocks.
// Layout  As train/large_batch/launches.cu; dz of the first layer split as in train/large_batch/bytes.cuh.
// Shared  Rows of 8 warps, 128 padded floats per column; split weights, both ways; dW sums: 111,104 B here in fp32.
// Limits  2 to 4 widths of at most 64, the last at most 32. SPLITS is 3 (fp32), 2 (tf32, fp16) or 1 (bf16). sm_80 up.
#include "train/large_batch/bytes.cuh"
#include "train/large_batch/targets.cuh"

constexpr int ROWS = 16 * WARPS;

__device__ constexpr int steps_of(int K) { return (K + 15) / 16; }
__device__ constexpr int tiles_of(int N) { return (N + 7) / 8; }
// Row pitch of W values and the bias 1, in floats: +8, so that rows start 8 banks apart.
__device__ constexpr int pitch_of(int W) { return 16 * steps_of(W + 1) + 8; }
// 16 B vectors of one split term of weights (K, N).
__device__ constexpr int vectors_of(int K, int N) { return steps_of(K) * 2 * 8 * tiles_of(N); }

// Loads a warp's 16 rows of W values; rows from `size` on are 0. All loads are in flight before the first store.
template <int W>
__device__ __forceinline__ void load_rows(float* tile, const float* rows, int stride, int size) {
    constexpr int FOURS = (W + 3) / 4, ITEMS = (16 * FOURS + 31) / 32;  // per lane
    float4 values[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int item = threadIdx.x % 32 + 32 * i, row = item / FOURS;
        const float4* const at = reinterpret_cast<const float4*>(rows + static_cast<long long>(row) * stride);
        values[i] = row < 16 && row < size ? __ldcg(at + item % FOURS) : float4{0.0f, 0.0f, 0.0f, 0.0f};
    }
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int item = threadIdx.x % 32 + 32 * i, row = item / FOURS, n = item % FOURS * 4;
        const float v[4] = {values[i].x, values[i].y, values[i].z, values[i].w};
        if (16 * FOURS % 32 == 0 || row < 16) {
            if (W % 4 == 0) store_vector(tile + row * pitch_of(W) + n, v);
            else store_first(tile + row * pitch_of(W) + n, v, W - n);
        }
    }
}

// c (16 rows, 8 NT columns) = rows (16, K) times weights.
template <int SPLITS, int K, int NT>
__device__ __forceinline__ void multiply_rows(float (&c)[NT][4], const float* rows, int pitch, const u32* weights) {
    constexpr int SPLIT_WORDS = steps_of(K) * 2 * 8 * NT * 4;
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < NT; ++j) c[j][0] = c[j][1] = c[j][2] = c[j][3] = 0.0f;
#pragma unroll
    for (int step = 0; step < steps_of(K); ++step) {
        float v[8];
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // rows g and g + 8, first eight K elements, then the others
            const float2 two = load2(rows + (g + i % 2 * 8) * pitch + 16 * step + i / 2 * 8 + 2 * q);
            v[2 * i] = two.x, v[2 * i + 1] = two.y;
        }
        uint4 split[SPLITS];
        split_eight(split, v);
#pragma unroll
        for (int terms = SPLITS - 1; terms >= 0; --terms)  // term i of the rows, term terms - i of the weights
#pragma unroll
            for (int i = 0; i <= terms; ++i) {
                const u32 a[4] = {split[i].x, split[i].y, split[i].z, split[i].w};
                const u32* fragments = weights + (terms - i) * SPLIT_WORDS + step * 2 * 8 * NT * 4 + threadIdx.x % 32;
#pragma unroll
                for (int j = 0; j < NT; ++j) mma<Bf16>(c[j], a, fragments[32 * j], fragments[32 * j + 8 * NT * 4]);
            }
    }
}

// Splits weights (K, N) into 16 B vectors; K elements from `k_end` on are 0.
template <int SPLITS, int K, int N, bool IS_TRANSPOSED>
__device__ __forceinline__ void pack_weights(uint4* to, const float* w, int pitch, int k_end) {
    constexpr int COUNT = vectors_of(K, N), PADDED_N = 8 * tiles_of(N);
    for (int vector = threadIdx.x; vector < COUNT; vector += THREADS) {
        const int n = vector % PADDED_N, first_k = vector / PADDED_N * 8;
        float v[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int k = first_k + i;
            v[i] = n < N && k < k_end ? w[IS_TRANSPOSED ? k * pitch + n : n * pitch + k] : 0.0f;
        }
        uint4 splits[SPLITS];
        split_eight(splits, v);
#pragma unroll
        for (int term = 0; term < SPLITS; ++term) to[term * COUNT + vector] = splits[term];
    }
}
// Row pitch of unsplit weights, in floats: +4, so that rows start 4 banks apart.
__device__ constexpr int weight_pitch(int D) { return round_up(D + 1, 8) + 4; }

// Copies the weights of layers LAYER and up, in whole rows: all blocks read the same cache lines.
template <int LAYER, class In, class Out, class... MORE>
__device__ __forceinline__ void load_weights(const Step& step, const RowLayers& layers, float* to) {
    constexpr int D = In::N, N = Out::N, PITCH = weight_pitch(D);
    const int stride = layers.layer[LAYER].w_stride, fours = stride / 4;
    const float* const w = step.local(layers.memory[LAYER].w);
    for (int item = threadIdx.x; item < N * fours; item += THREADS)
        store4(to + item / fours * PITCH + item % fours * 4, __ldcg(reinterpret_cast<const float4*>(w) + item));
    if constexpr (sizeof...(MORE) > 0) load_weights<LAYER + 1, Out, MORE...>(step, layers, to + N * PITCH);
}
// Splits them, then their transposes for the backward pass. The bias is the weight of the 1 after the inputs.
template <int SPLITS, int LAYER, class In, class Out, class... MORE>
__device__ __forceinline__ void split_weights(const RowLayers& layers, const float* w, uint4* to) {
    constexpr int D = In::N, N = Out::N, PITCH = weight_pitch(D);
    pack_weights<SPLITS, D + 1, N, false>(to, w, PITCH, D + (layers.layer[LAYER].has_bias ? 1 : 0));
    to += SPLITS * vectors_of(D + 1, N);
    pack_weights<SPLITS, N, D, true>(to, w, PITCH, N);
    to += SPLITS * vectors_of(N, D);
    if constexpr (sizeof...(MORE) > 0) split_weights<SPLITS, LAYER + 1, Out, MORE...>(layers, w + N * PITCH, to);
}
// 16 B vectors of all layers.
template <int SPLITS, class In, class Out, class... MORE>
__device__ constexpr int all_vectors() {
    const int vectors = SPLITS * (vectors_of(In::N + 1, Out::N) + vectors_of(Out::N, In::N));
    if constexpr (sizeof...(MORE) > 0) return vectors + all_vectors<SPLITS, Out, MORE...>();
    else return vectors;
}

// Stores two adjacent values of a row of W, without overwriting the 1 after them.
template <int W>
__device__ __forceinline__ void store_two(float* row, int n, float first, float second) {
    const float two[2] = {first, second};
    if (n + 1 < W) store_vector(row + n, two);
    else if (n < W) row[n] = first;
}

// dW tiles of 16 units x 8 inputs. WARPS_N warps alternate tiles of the same units; with few tiles, SPLIT_K warps split
// the rows.
template <class In, class Out>
struct GradientTiles {
    static constexpr int D = In::N, N = Out::N, M_TILES = (N + 15) / 16, N_TILES = tiles_of(D + 1);
    static constexpr int WARPS_N = WARPS / M_TILES < N_TILES ? WARPS / M_TILES : N_TILES,
        SPLIT_K = WARPS / (M_TILES * WARPS_N);
    static constexpr int PER_WARP = (N_TILES + WARPS_N - 1) / WARPS_N, TILES = M_TILES * N_TILES;
    static constexpr int FLOATS = SPLIT_K * TILES * 128;  // accumulators: four per lane
};
template <class In, class Out, class... MORE>
__device__ constexpr int all_sums() {
    if constexpr (sizeof...(MORE) > 0) return GradientTiles<In, Out>::FLOATS + all_sums<Out, MORE...>();
    else return GradientTiles<In, Out>::FLOATS;
}

// sums += dz^T a over the rows of all warps; `input` (a) and `output` (dz) point to the first warp's tile.
template <int SPLITS, class In, class Out>
__device__ __forceinline__ void add_gradients(float* sums, const float* input, const float* output, int tile_floats) {
    using Tiles = GradientTiles<In, Out>;
    const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4, warp_n = threadIdx.x / 32 % Tiles::WARPS_N;
    const int m_tile = threadIdx.x / 32 / Tiles::WARPS_N % Tiles::M_TILES,
        k_split = threadIdx.x / 32 / (Tiles::WARPS_N * Tiles::M_TILES);
    if (k_split >= Tiles::SPLIT_K) return;
    float* const acc = sums + (k_split * Tiles::TILES + m_tile * Tiles::N_TILES + warp_n) * 128 + 4 * lane;
    const auto is_owned = [&](int j) { return warp_n + j * Tiles::WARPS_N < Tiles::N_TILES; };
    float c[1][Tiles::PER_WARP][4];
#pragma unroll
    for (int j = 0; j < Tiles::PER_WARP; ++j) {
        const float4 sum = is_owned(j) ? load4(acc + j * Tiles::WARPS_N * 128) : float4{0.0f, 0.0f, 0.0f, 0.0f};
        c[0][j][0] = sum.x, c[0][j][1] = sum.y, c[0][j][2] = sum.z, c[0][j][3] = sum.w;
    }
#pragma unroll 1
    for (int warp = k_split; warp < WARPS; warp += Tiles::SPLIT_K) {
        const float* const dz_rows = output + warp * tile_floats;
        float dz[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {  // rows 2 q and 2 q + 1 of units g and g + 8, then rows 8 further
            const int n = m_tile * 16 + g + i / 2 % 2 * 8, row = 2 * q + i % 2 + i / 4 * 8;
            dz[i] = n < Tiles::N ? dz_rows[row * pitch_of(Tiles::N) + n] : 0.0f;
        }
        u32 a[1][SPLITS][4];
        split_floats(a[0], dz);
#pragma unroll
        for (int j = 0; j < Tiles::PER_WARP; ++j) {
            if (!is_owned(j)) break;
            const float* const a_rows = input + warp * tile_floats + (warp_n + j * Tiles::WARPS_N) * 8 + g;
            float v[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) v[i] = a_rows[(2 * q + i % 2 + i / 2 * 8) * pitch_of(Tiles::D)];
            u32 b[1][SPLITS][2];
            split_floats(b[0], v);
            float chunk_sums[1][1][4] = {};  // tensor cores truncate: 16 rows per accumulator
            mma_splits(chunk_sums, a, b);
#pragma unroll
            for (int i = 0; i < 4; ++i) c[0][j][i] += chunk_sums[0][0][i];
        }
    }
#pragma unroll
    for (int j = 0; j < Tiles::PER_WARP; ++j)
        if (is_owned(j)) store_vector(acc + j * Tiles::WARPS_N * 128, c[0][j]);
}

// Stores dW sums of layers LAYER and up to the block's partial gradients.
template <int LAYER, class In, class Out, class... MORE>
__device__ __forceinline__ void store_gradients(const Step& step, const RowLayers& layers, const float* sums) {
    using Tiles = GradientTiles<In, Out>;
    const int stride = layers.layer[LAYER].w_stride, lane = threadIdx.x % 32;
    float* const to =
        step.local(layers.memory[LAYER].partials) + static_cast<long long>(blockIdx.x) * Tiles::N * stride;
#pragma unroll 1
    for (int tile = threadIdx.x / 32; tile < Tiles::TILES; tile += WARPS) {
        float4 sum = load4(sums + tile * 128 + 4 * lane);
#pragma unroll
        for (int k_split = 1; k_split < Tiles::SPLIT_K; ++k_split) {
            const float4 partial = load4(sums + (k_split * Tiles::TILES + tile) * 128 + 4 * lane);
            sum = {sum.x + partial.x, sum.y + partial.y, sum.z + partial.z, sum.w + partial.w};
        }
        const int unit = tile / Tiles::N_TILES * 16 + lane / 4, input = tile % Tiles::N_TILES * 8 + lane % 4 * 2;
        if (input >= stride) continue;
        const float upper[2] = {sum.x, sum.y}, lower[2] = {sum.z, sum.w};
        if (unit < Tiles::N) store_vector(to + unit * stride + input, upper);
        if (unit + 8 < Tiles::N) store_vector(to + (unit + 8) * stride + input, lower);
    }
    if constexpr (sizeof...(MORE) > 0) store_gradients<LAYER + 1, Out, MORE...>(step, layers, sums + Tiles::FLOATS);
}

// Runs layer LAYER (In to Out) and MORE after it, forward and backward. `input` is the warp's input tile, `tiles` the
// first warp's; outputs follow them. `weights` and `sums` start at this layer. Block-wide.
template <int SPLITS, int LAYER, class RowTargets, class In, class Out, class... MORE>
__device__ __forceinline__ void forward_backward(const Step& step, const RowLayers& layers, const TileRows<16>& rows,
                                                 RowTargets& targets, float* input, const float* tiles, int tile_floats,
                                                 const uint4* weights, float* sums) {
    constexpr int D = In::N, N = Out::N, NT = tiles_of(N), DT = tiles_of(D);
    const RowLayer &layer = layers.layer[LAYER], &prev = layers.layer[LAYER - 1];
    const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    float* output = input + 16 * pitch_of(D);
    const float* all_outputs = tiles + 16 * pitch_of(D);
    const uint4* back_weights = weights + SPLITS * vectors_of(D + 1, N);
    {
        float c[NT][4];
        multiply_rows<SPLITS, D + 1, NT>(c, input, pitch_of(D), reinterpret_cast<const u32*>(weights));
        const Activation activation = activation_of(Out::CODE, layer.slope);
#pragma unroll
        for (int j = 0; j < NT; ++j) {
            activation.apply<float>(c[j]);
#pragma unroll
            for (int half = 0; half < 2; ++half)
                store_two<N>(output + (g + 8 * half) * pitch_of(N), 8 * j + 2 * q, c[j][2 * half], c[j][2 * half + 1]);
        }
    }
    __syncwarp();
    if constexpr (sizeof...(MORE) > 0) {
        float* const next_sums = sums + GradientTiles<In, Out>::FLOATS;
        forward_backward<SPLITS, LAYER + 1, RowTargets, Out, MORE...>(
            step, layers, rows, targets, output, all_outputs, tile_floats, back_weights + SPLITS * vectors_of(N, D),
            next_sums);
    } else {
        targets.to_gradient(0, layers, layer.slope, output + RowTargets::row(0) * pitch_of(N));
        targets.store_losses(step, layers, rows);
    }
    __syncthreads();
    add_gradients<SPLITS, In, Out>(sums, tiles, all_outputs, tile_floats);
    float c[DT][4];
    multiply_rows<SPLITS, N, DT>(c, output, pitch_of(N), reinterpret_cast<const u32*>(back_weights));
    __syncthreads();  // before gradients overwrite activations
    const float slope = __uint_as_float(prev.slope);
#pragma unroll
    for (int i = 0; i < 2 * DT; ++i) {
        const int n = i / 2 * 8 + 2 * q, half = i % 2 * 2;
        float* const row = input + (g + 4 * half) * pitch_of(D);
        const float2 out = load2(row + n);
        store_two<D>(row, n, act_grad(In::CODE, slope, c[i / 2][half], out.x),
                     act_grad(In::CODE, slope, c[i / 2][half + 1], out.y));
    }
    __syncwarp();
}

// Writes the bias 1 after each layer's values, then zeros.
template <class Spec, class... MORE>
__device__ __forceinline__ void write_ones(float* tile) {
    constexpr int W = Spec::N, COUNT = pitch_of(W) - W;
    for (int i = threadIdx.x % 32; i < 16 * COUNT; i += 32)
        tile[i / COUNT * pitch_of(W) + W + i % COUNT] = i % COUNT == 0 ? 1.0f : 0.0f;
    if constexpr (sizeof...(MORE) > 0) write_ones<MORE...>(tile + 16 * pitch_of(W));
}

template <class First, class... MORE>
struct LastOf : LastOf<MORE...> {};
template <class Last>
struct LastOf<Last> {
    using type = Last;
};

// Reads the first layer's activations; writes its dz as dz_splits and partial dW of all later layers.
template <int SPLITS, u32 LOSS, class First, class... MORE>
__global__ void __launch_bounds__(THREADS, 2)
train_rows(const Step step, const __grid_constant__ RowLayers layers, uint4* dz_splits) {
    extern __shared__ float4 smem[];
    using Last = typename LastOf<MORE...>::type;
    using RowTargets = Targets<16, 32, LOSS, Last::N, Last::CODE, 2>;
    constexpr int D = First::N, TILE_FLOATS = 16 * (pitch_of(D) + ... + pitch_of(MORE::N));  // per warp
    constexpr int SUMS = all_sums<First, MORE...>();
    const int size = step.size(), warp = threadIdx.x / 32, stages = static_cast<int>((step.batch + 63) / 64);
    uint4* const weights = reinterpret_cast<uint4*>(smem);
    float* const sums = reinterpret_cast<float*>(weights + all_vectors<SPLITS, First, MORE...>());
    float *const tiles = sums + SUMS, *const tile = tiles + warp * TILE_FLOATS;
    // Weights are valid before the wait: the previous launch waited for their update. The tiles have space for them.
    load_weights<1, First, MORE...>(step, layers, tiles);
    for (int i = threadIdx.x; i < SUMS; i += THREADS) sums[i] = 0.0f;
    __syncthreads();
    split_weights<SPLITS, 1, First, MORE...>(layers, tiles, weights);
    __syncthreads();
    write_ones<First, MORE...>(tile);
    __syncwarp();
    bool is_first = true;
    for (int first = blockIdx.x * ROWS; first < size; first += gridDim.x * ROWS) {
        const TileRows<16> rows = {first + 16 * warp, size};
        RowTargets targets;
        targets.load(step, layers, rows);
        if (is_first) wait_for_previous_kernel();
        is_first = false;
        const long long at = static_cast<long long>(rows.first) * layers.layer[0].stride;
        load_rows<D>(tile, step.local(layers.memory[0].a) + at, layers.layer[0].stride, rows.count());
        __syncwarp();
        forward_backward<SPLITS, 1, RowTargets, First, MORE...>(step, layers, rows, targets, tile, tiles, TILE_FLOATS,
                                                                weights, sums);
        if (rows.first < round_up(size, 32))  // the dW gemm reads rows by 32
            store_split_dz<SPLITS, D, 16, 32>(step.local(dz_splits), tile, pitch_of(D), rows.first, rows.count(),
                                              stages, threadIdx.x % 32);
        __syncwarp();
    }
    if (is_first) wait_for_previous_kernel();
    __syncthreads();
    store_gradients<1, First, MORE...>(step, layers, sums);
}
