// train/large_batch/rows.cu: all layers after the first of a training step for many rows: forward to dW.
//
// Idea    Narrow layers are too little work for a launch each. A warp runs 16 rows through all of them and back with
//         mma.sync; activations stay in shared memory and gradients replace them. The warps share each dW. Only the
//         first layer's activations are read, and its dz is written as the bf16 split that its dW gemm reads. Weights
//         are split once per block, which loops over row tiles. Activations and loss are compile-time: a switch per
//         element took most of the time.
// Floor   784-56-28-10, 60,000 rows: 15 MB of activations in, 23 MB of gradients out (8 in bf16): 38 MB / 4.8 TB/s = 8
//         us, less from L2; 5,600 multiplications per row, 6x in fp32, are 4 Gflop: 4 us at 989 Tflop/s bf16.
// Order   K steps of 16, smallest term products first, in the tensor core; dW adds 16 rows at a time, then blocks.
// Layout  As train/large_batch/launches.cu; dz of the first layer split as in train/large_batch/bytes.cuh.
// Shared  Rows of 8 warps, 128 padded floats per column; split weights, both ways; dW sums: 111,104 B here in fp32.
// Limits  2 to 4 widths of at most 64, the last at most 32. PARTS is 3 (fp32), 2 (tf32, fp16) or 1 (bf16). sm_80 up.
#include "train/large_batch/bytes.cuh"
#include "train/large_batch/targets.cuh"

constexpr int ROWS = 16 * WARPS;

__device__ constexpr int steps_of(int K) { return (K + 15) / 16; }
__device__ constexpr int eights_of(int N) { return (N + 7) / 8; }
// Row pitch of W values and the bias 1, in floats: +8, so that rows start 8 banks apart.
__device__ constexpr int pitch_of(int W) { return 16 * steps_of(W + 1) + 8; }
// 16 B chunks of one split term of weights (K, N).
__device__ constexpr int pieces_of(int K, int N) { return steps_of(K) * 2 * 8 * eights_of(N); }

// Loads a warp's 16 rows of W values; rows from `size` on are 0. All loads are in flight before the first store.
template <int W>
__device__ __forceinline__ void bring_rows(float* tile, const float* rows, int stride, int size) {
    constexpr int FOURS = (W + 3) / 4, ITEMS = (16 * FOURS + 31) / 32;  // per lane
    float4 found[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int item = threadIdx.x % 32 + 32 * i, row = item / FOURS;
        const float4* const at = reinterpret_cast<const float4*>(rows + static_cast<long long>(row) * stride);
        found[i] = row < 16 && row < size ? __ldcg(at + item % FOURS) : float4{0.0f, 0.0f, 0.0f, 0.0f};
    }
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int item = threadIdx.x % 32 + 32 * i, row = item / FOURS, n = item % FOURS * 4;
        const float v[4] = {found[i].x, found[i].y, found[i].z, found[i].w};
        if (16 * FOURS % 32 == 0 || row < 16) {
            if (W % 4 == 0) store_several(tile + row * pitch_of(W) + n, v);
            else store_first(tile + row * pitch_of(W) + n, v, W - n);
        }
    }
}

// c (16 rows, 8 NT columns) = rows (16, K) times weights.
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
        for (int i = 0; i < 4; ++i) {  // rows g and g + 8, first eight K elements, then the others
            const float2 two = load2(rows + (g + i % 2 * 8) * pitch + 16 * step + i / 2 * 8 + 2 * q);
            v[2 * i] = two.x, v[2 * i + 1] = two.y;
        }
        uint4 split[PARTS];
        split_eight(split, v);
#pragma unroll
        for (int sum = PARTS - 1; sum >= 0; --sum)  // term i of the rows, term sum - i of the weights
#pragma unroll
            for (int i = 0; i <= sum; ++i) {
                const u32 a[4] = {split[i].x, split[i].y, split[i].z, split[i].w};
                const u32* words = weights + (sum - i) * PART_WORDS + step * 2 * 8 * NT * 4 + threadIdx.x % 32;
#pragma unroll
                for (int j = 0; j < NT; ++j) mma<Bf16>(c[j], a, words[32 * j], words[32 * j + 8 * NT * 4]);
            }
    }
}

// Splits weights (K, N) into 16 B chunks; K elements from `terms` on are 0.
template <int PARTS, int K, int N, bool IS_TURNED>
__device__ __forceinline__ void make_pieces(uint4* to, const float* w, int pitch, int terms) {
    constexpr int COUNT = pieces_of(K, N), EIGHT = 8 * eights_of(N);
    for (int piece = threadIdx.x; piece < COUNT; piece += THREADS) {
        const int n = piece % EIGHT, first_k = piece / EIGHT * 8;
        float v[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int k = first_k + i;
            v[i] = n < N && k < terms ? w[IS_TURNED ? k * pitch + n : n * pitch + k] : 0.0f;
        }
        uint4 parts[PARTS];
        split_eight(parts, v);
#pragma unroll
        for (int part = 0; part < PARTS; ++part) to[part * COUNT + piece] = parts[part];
    }
}
// Row pitch of unsplit weights, in floats: +4, so that rows start 4 banks apart.
__device__ constexpr int weight_pitch(int D) { return round_up(D + 1, 8) + 4; }

// Copies the weights of layers AT and up to `to`, in whole rows: all blocks read the same cache lines.
template <int AT, class Given, class Made, class... MORE>
__device__ __forceinline__ void bring_weights(const Step& step, const RowLayers& layers, float* to) {
    constexpr int D = Given::N, N = Made::N, PITCH = weight_pitch(D);
    const int stride = layers.of[AT].w_stride, fours = stride / 4;
    const float* const w = step.mine(layers.memory[AT].w);
    for (int item = threadIdx.x; item < N * fours; item += THREADS)
        store4(to + item / fours * PITCH + item % fours * 4, __ldcg(reinterpret_cast<const float4*>(w) + item));
    if constexpr (sizeof...(MORE) > 0) bring_weights<AT + 1, Made, MORE...>(step, layers, to + N * PITCH);
}
// Splits them: forward, then transposed for the backward pass. The bias is the weight of the 1 after the inputs.
template <int PARTS, int AT, class Given, class Made, class... MORE>
__device__ __forceinline__ void cut_weights(const RowLayers& layers, const float* w, uint4* to) {
    constexpr int D = Given::N, N = Made::N, PITCH = weight_pitch(D);
    make_pieces<PARTS, D + 1, N, false>(to, w, PITCH, D + (layers.of[AT].has_bias ? 1 : 0));
    to += PARTS * pieces_of(D + 1, N);
    make_pieces<PARTS, N, D, true>(to, w, PITCH, N);
    to += PARTS * pieces_of(N, D);
    if constexpr (sizeof...(MORE) > 0) cut_weights<PARTS, AT + 1, Made, MORE...>(layers, w + N * PITCH, to);
}
// Chunks of all layers.
template <int PARTS, class Given, class Made, class... MORE>
__device__ constexpr int all_pieces() {
    const int own = PARTS * (pieces_of(Given::N + 1, Made::N) + pieces_of(Made::N, Given::N));
    if constexpr (sizeof...(MORE) > 0) return own + all_pieces<PARTS, Made, MORE...>();
    else return own;
}

// Stores two adjacent values of a row of W; the 1 after them stays.
template <int W>
__device__ __forceinline__ void store_two(float* row, int n, float first, float second) {
    const float two[2] = {first, second};
    if (n + 1 < W) store_several(row + n, two);
    else if (n < W) row[n] = first;
}

// -- gradients --------------------------------------------------------------------------------------------------------

// dW tiles of 16 units x 8 inputs. ACROSS warps alternate tiles of the same units; with few tiles, DEEP warps split the
// rows.
template <class Given, class Made>
struct GradientTiles {
    static constexpr int D = Given::N, N = Made::N, DOWN = (N + 15) / 16, WIDE = eights_of(D + 1);
    static constexpr int ACROSS = WARPS / DOWN < WIDE ? WARPS / DOWN : WIDE, DEEP = WARPS / (DOWN * ACROSS);
    static constexpr int EACH = (WIDE + ACROSS - 1) / ACROSS, TILES = DOWN * WIDE;
    static constexpr int FLOATS = DEEP * TILES * 128;  // accumulators: four per lane
};
template <class Given, class Made, class... MORE>
__device__ constexpr int all_sums() {
    if constexpr (sizeof...(MORE) > 0) return GradientTiles<Given, Made>::FLOATS + all_sums<Made, MORE...>();
    else return GradientTiles<Given, Made>::FLOATS;
}

// sums += dz^T a over the rows of all warps; `given` (a) and `made` (dz) point to the first warp's tile.
template <int PARTS, class Given, class Made>
__device__ __forceinline__ void add_gradients(float* sums, const float* given, const float* made, int tile_floats) {
    using Tiles = GradientTiles<Given, Made>;
    const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4, across = threadIdx.x / 32 % Tiles::ACROSS;
    const int down = threadIdx.x / 32 / Tiles::ACROSS % Tiles::DOWN, deep = threadIdx.x / 32 / (Tiles::ACROSS * Tiles::DOWN);
    if (deep >= Tiles::DEEP) return;
    float* const mine = sums + (deep * Tiles::TILES + down * Tiles::WIDE + across) * 128 + 4 * lane;
    const auto is_mine = [&](int j) { return across + j * Tiles::ACROSS < Tiles::WIDE; };
    float c[1][Tiles::EACH][4];
#pragma unroll
    for (int j = 0; j < Tiles::EACH; ++j) {
        const float4 sum = is_mine(j) ? load4(mine + j * Tiles::ACROSS * 128) : float4{0.0f, 0.0f, 0.0f, 0.0f};
        c[0][j][0] = sum.x, c[0][j][1] = sum.y, c[0][j][2] = sum.z, c[0][j][3] = sum.w;
    }
#pragma unroll 1
    for (int warp = deep; warp < WARPS; warp += Tiles::DEEP) {
        const float* const dz_rows = made + warp * tile_floats;
        float dz[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {  // rows 2 q and 2 q + 1 of units g and g + 8, then rows 8 further
            const int n = down * 16 + g + i / 2 % 2 * 8, row = 2 * q + i % 2 + i / 4 * 8;
            dz[i] = n < Tiles::N ? dz_rows[row * pitch_of(Tiles::N) + n] : 0.0f;
        }
        u32 a[1][PARTS][4];
        split_numbers(a[0], dz);
#pragma unroll
        for (int j = 0; j < Tiles::EACH; ++j) {
            if (!is_mine(j)) break;
            const float* const a_rows = given + warp * tile_floats + (across + j * Tiles::ACROSS) * 8 + g;
            float v[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) v[i] = a_rows[(2 * q + i % 2 + i / 2 * 8) * pitch_of(Tiles::D)];
            u32 b[1][PARTS][2];
            split_numbers(b[0], v);
            float some[1][1][4] = {};  // tensor cores truncate: 16 rows per accumulator
            add_products(some, a, b);
#pragma unroll
            for (int i = 0; i < 4; ++i) c[0][j][i] += some[0][0][i];
        }
    }
#pragma unroll
    for (int j = 0; j < Tiles::EACH; ++j)
        if (is_mine(j)) store_several(mine + j * Tiles::ACROSS * 128, c[0][j]);
}

// Stores dW sums of layers AT and up to the block's partial gradients.
template <int AT, class Given, class Made, class... MORE>
__device__ __forceinline__ void store_gradients(const Step& step, const RowLayers& layers, const float* sums) {
    using Tiles = GradientTiles<Given, Made>;
    const int stride = layers.of[AT].w_stride, lane = threadIdx.x % 32;
    float* const to = step.mine(layers.memory[AT].parts) + static_cast<long long>(blockIdx.x) * Tiles::N * stride;
#pragma unroll 1
    for (int tile = threadIdx.x / 32; tile < Tiles::TILES; tile += WARPS) {
        float4 sum = load4(sums + tile * 128 + 4 * lane);
#pragma unroll
        for (int deep = 1; deep < Tiles::DEEP; ++deep) {
            const float4 more = load4(sums + (deep * Tiles::TILES + tile) * 128 + 4 * lane);
            sum = {sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w};
        }
        const int unit = tile / Tiles::WIDE * 16 + lane / 4, term = tile % Tiles::WIDE * 8 + lane % 4 * 2;
        if (term >= stride) continue;
        const float upper[2] = {sum.x, sum.y}, lower[2] = {sum.z, sum.w};
        if (unit < Tiles::N) store_several(to + unit * stride + term, upper);
        if (unit + 8 < Tiles::N) store_several(to + (unit + 8) * stride + term, lower);
    }
    if constexpr (sizeof...(MORE) > 0) store_gradients<AT + 1, Made, MORE...>(step, layers, sums + Tiles::FLOATS);
}

// -- a step -----------------------------------------------------------------------------------------------------------

// Runs layer AT (Given to Made) and MORE after it, forward and back. `given` is the warp's input tile, `tiles` the
// first warp's; outputs follow them. `weights` and `sums` start at this layer. All warps must call it.
template <int PARTS, int AT, class Goal, class Given, class Made, class... MORE>
__device__ __forceinline__ void take_rows_through(const Step& step, const RowLayers& layers, const TileRows<16>& rows,
                                                  Goal& goal, float* given, const float* tiles, int tile_floats,
                                                  const uint4* weights, float* sums) {
    constexpr int D = Given::N, N = Made::N, NT = eights_of(N), DT = eights_of(D);
    const RowLayer &layer = layers.of[AT], &before = layers.of[AT - 1];
    const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    float* made = given + 16 * pitch_of(D);
    const float* all_made = tiles + 16 * pitch_of(D);
    const uint4* back = weights + PARTS * pieces_of(D + 1, N);
    {
        float c[NT][4];
        multiply_rows<PARTS, D + 1, NT>(c, given, pitch_of(D), reinterpret_cast<const u32*>(weights));
        const Activation activation = activation_of(Made::CODE, layer.slope);
#pragma unroll
        for (int j = 0; j < NT; ++j) {
            activation.apply<float>(c[j]);
#pragma unroll
            for (int half = 0; half < 2; ++half)
                store_two<N>(made + (g + 8 * half) * pitch_of(N), 8 * j + 2 * q, c[j][2 * half], c[j][2 * half + 1]);
        }
    }
    __syncwarp();
    if constexpr (sizeof...(MORE) > 0) {
        float* const sums_behind = sums + GradientTiles<Given, Made>::FLOATS;
        take_rows_through<PARTS, AT + 1, Goal, Made, MORE...>(step, layers, rows, goal, made, all_made, tile_floats,
                                                              back + PARTS * pieces_of(N, D), sums_behind);
    } else {
        goal.to_gradient(0, layers, layer.slope, made + Goal::row(0) * pitch_of(N));
        goal.store_losses(step, layers, rows);
    }
    __syncthreads();
    add_gradients<PARTS, Given, Made>(sums, tiles, all_made, tile_floats);
    float c[DT][4];
    multiply_rows<PARTS, N, DT>(c, made, pitch_of(N), reinterpret_cast<const u32*>(back));
    __syncthreads();  // gradients overwrite what was read
    const float slope = __uint_as_float(before.slope);
#pragma unroll
    for (int i = 0; i < 2 * DT; ++i) {
        const int n = i / 2 * 8 + 2 * q, half = i % 2 * 2;
        float* const row = given + (g + 4 * half) * pitch_of(D);
        const float2 out = load2(row + n);
        store_two<D>(row, n, through(Given::CODE, slope, c[i / 2][half], out.x),
                     through(Given::CODE, slope, c[i / 2][half + 1], out.y));
    }
    __syncwarp();
}

// Writes the bias 1 after each layer's values, then zeros.
template <class Of, class... MORE>
__device__ __forceinline__ void put_ones(float* tile) {
    constexpr int W = Of::N, COUNT = pitch_of(W) - W;
    for (int i = threadIdx.x % 32; i < 16 * COUNT; i += 32)
        tile[i / COUNT * pitch_of(W) + W + i % COUNT] = i % COUNT == 0 ? 1.0f : 0.0f;
    if constexpr (sizeof...(MORE) > 0) put_ones<MORE...>(tile + 16 * pitch_of(W));
}

template <class First, class... MORE>
struct LastOf : LastOf<MORE...> {};
template <class Last>
struct LastOf<Last> {
    using type = Last;
};

// Reads the first layer's activations; writes its dz as dz_parts and partial dW of all later layers.
template <int PARTS, u32 LOSS, class First, class... MORE>
__global__ void __launch_bounds__(THREADS, 2)
train_rows(const Step step, const __grid_constant__ RowLayers layers, uint4* dz_parts) {
    extern __shared__ float4 room[];
    using Last = typename LastOf<MORE...>::type;
    using Goal = Targets<16, 32, LOSS, Last::N, Last::CODE, 2>;
    constexpr int D = First::N, TILE_FLOATS = 16 * (pitch_of(D) + ... + pitch_of(MORE::N));  // per warp
    constexpr int SUMS = all_sums<First, MORE...>();
    const int size = step.size(), warp = threadIdx.x / 32, stages = static_cast<int>((step.batch + 63) / 64);
    uint4* const weights = reinterpret_cast<uint4*>(room);
    float* const sums = reinterpret_cast<float*>(weights + all_pieces<PARTS, First, MORE...>());
    float *const tiles = sums + SUMS, *const tile = tiles + warp * TILE_FLOATS;
    // Weights are valid before the wait: the previous launch waited for their update. They fit in the tiles: 128 rows.
    bring_weights<1, First, MORE...>(step, layers, tiles);
    for (int i = threadIdx.x; i < SUMS; i += THREADS) sums[i] = 0.0f;
    __syncthreads();
    cut_weights<PARTS, 1, First, MORE...>(layers, tiles, weights);
    __syncthreads();
    put_ones<First, MORE...>(tile);
    __syncwarp();
    bool is_first = true;
    for (int first = blockIdx.x * ROWS; first < size; first += gridDim.x * ROWS) {
        const TileRows<16> rows = {first + 16 * warp, size};
        Goal goal;
        goal.find(step, layers, rows);
        if (is_first) wait_for_step_before();
        is_first = false;
        const long long at = static_cast<long long>(rows.first) * layers.of[0].stride;
        bring_rows<D>(tile, step.mine(layers.memory[0].a) + at, layers.of[0].stride, rows.there());
        __syncwarp();
        take_rows_through<PARTS, 1, Goal, First, MORE...>(step, layers, rows, goal, tile, tiles, TILE_FLOATS, weights, sums);
        if (rows.first < round_up(size, 32))  // the dW gemm reads rows by 32
            store_parts<PARTS, D, 16, 32>(step.mine(dz_parts), tile, pitch_of(D), rows.first, rows.there(), stages,
                                          threadIdx.x % 32);
        __syncwarp();
    }
    if (is_first) wait_for_step_before();
    __syncthreads();
    store_gradients<1, First, MORE...>(step, layers, sums);
}
