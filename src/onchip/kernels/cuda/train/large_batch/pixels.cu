// train/large_batch/pixels.cu: first layer forward, and dW with update of all layers, for some hundred uint8 rows.
//
// Idea    As train/large_batch/bytes.cu for fewer rows, where latency dominates: small tiles, split-K over the warps of
//         a block, all loads of a warp in flight at once. Operands come from L2 in fragment order (K is permuted).
//         uint8 rows load before griddepcontrol.wait. The update, the epilogue of dW, also writes the first layer's
//         weights as a bf16 split.
// Floor   784-320-160-10, 256 rows, fp32: 0.55 G bf16 multiplications, 1.1 us at 989 Tflop/s; 80 KB of weights and 32
//         KB of dz per block, 0.9 and 0.4 us at 48 B/clock; two launches, 1.4 us: 3.8 us. On an H200 a block takes 5.5
//         us forward and 5.0 for dW in fp32, 3.1 and 3.1 in bf16. Row loops stay rolled: the code runs once.
// Order   Forward: stages of 64 K, dW: 16 rows; 8 warps alternate, lowest split terms first, then warps in order.
// Layout  x (n, D_in, a byte that stands for 1 if the layer has a bias, zeros), row stride a multiple of 16 B; splits
//         (SPLITS, N, stages of 64) bf16. Others as train/large_batch/launches.cu.
// Shared  Forward: 832 B per row here, reused for sums; at most 64 rows. dW: 65,536 B of sums; 8,192 B per array of
//         weights or moments.
// Limits  SPLITS is 3 (fp32), 2 (tf32, fp16) or 1 (bf16). Rows of at most 6,000 bytes. sm_80 up.
#include "train/large_batch/bytes.cuh"

constexpr int STAGE_K = 64;
constexpr int TILE_UNITS = 32, SUM_FLOATS = WARPS * TILE_UNITS * 64;

// The first layer's input rows and split weights.
struct SplitWeights {
    const unsigned char* x;  // (n, x_stride)
    bf16* splits;            // (SPLITS, N, stride)
    int x_stride, stride, N, K;
    float scale;

    // Row n of term 0; term p starts at row p N.
    __device__ __forceinline__ bf16* row(const Step& step, int n) const {
        return step.local(splits) + static_cast<long long>(n) * stride;
    }
    // Splits and stores four adjacent K elements.
    template <int SPLITS>
    __device__ __forceinline__ void store(const Step& step, int n, int k, float (&four)[4]) const {
        u32 result[SPLITS][2];
        split_floats(result, four);
#pragma unroll
        for (int term = 0; term < SPLITS; ++term)
            *reinterpret_cast<uint2*>(row(step, term * N + n) + k) = {result[term][0], result[term][1]};
    }
};

// Splits all weights w (N, w_stride), before the first step of a graph.
template <int SPLITS>
__global__ void __launch_bounds__(THREADS)
pixels_split(const Step step, const float* w, const SplitWeights pixels, int w_stride) {
    wait_for_previous_kernel();
    const int fours = (pixels.K + 3) / 4, item = blockIdx.x * THREADS + threadIdx.x, n = item / fours,
        k = item % fours * 4;
    if (n >= pixels.N) return;
    const float4 w4 = __ldcg(reinterpret_cast<const float4*>(step.local(w) + static_cast<long long>(n) * w_stride + k));
    float four[4] = {w4.x, w4.y, w4.z, w4.w};
    pixels.store<SPLITS>(step, n, k, four);
}

// y (size, N) = activation(scale x w^T): a block computes 16 MT x 16. Of 64 K elements, lane q holds 4 per K step.
template <int SPLITS, int MT, u32 CODE>
__global__ void __launch_bounds__(THREADS, 2)
pixels_forward(const Step step, const SplitWeights pixels, float* y, int y_stride, u32 slope) {
    extern __shared__ float4 smem[];
    constexpr int ROWS = 16 * MT, STEPS = STAGE_K / 16, NT = 2, COLUMNS = 8 * NT;
    const int blocks_n = (pixels.N + COLUMNS - 1) / COLUMNS, size = step.size(), stages = pixels.stride / STAGE_K;
    const int first_m = blockIdx.x / blocks_n * ROWS, first_n = blockIdx.x % blocks_n * COLUMNS;
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    if (first_m >= size) {
        wait_for_previous_kernel();
        return;
    }
    unsigned char* const rows = reinterpret_cast<unsigned char*>(smem);
    // Half a warp loads a row. Rows start 64 B apart modulo 128 B, so eight lanes read different banks.
    const int pitch = pixels.stride + (pixels.stride % 128 ? 0 : 64);
    u32 ids[MT];
    find_rows(ids, step.rows(), first_m + static_cast<int>(threadIdx.x) / 16, THREADS / 16, size);
#pragma unroll
    for (int i = 0; i < MT; ++i) {
        unsigned char* const to = rows + (threadIdx.x / 16 + i * (THREADS / 16)) * pitch;
        const unsigned char* const from =
            pixels.x + static_cast<long long>(ids[i] == NO_ROW ? 0 : ids[i]) * pixels.x_stride;
        for (int k = threadIdx.x % 16 * 16; k < pixels.stride; k += 256) {
            const bool is_valid = ids[i] != NO_ROW && k < pixels.x_stride;
            copy_async(to + k, from + (is_valid ? k : 0), is_valid);
        }
    }
    commit_stage();
    wait_for_previous_kernel();
    uint4 weights[SPLITS][NT][2];
    const auto fetch = [&](int stage) {
        if (stage >= stages) return;
#pragma unroll
        for (int n = 0; n < SPLITS * NT * 2; ++n) {
            const int term = n / 2 / NT, j = n / 2 % NT, column = first_n + 8 * j + g;
            weights[term][j][n % 2] = __ldcg(reinterpret_cast<const uint4*>(
                pixels.row(step, term * pixels.N + (column < pixels.N ? column : pixels.N - 1)) + stage * STAGE_K +
                16 * q + n % 2 * 8));
        }
    };
    fetch(warp);
    wait_for_stages<0>();
    __syncthreads();
    float totals[MT][NT][4] = {};
#pragma unroll 1
    for (int stage = warp; stage < stages; stage += WARPS) {
        if (stage > warp) fetch(stage);
#pragma unroll
        for (int t = 0; t < MT; ++t) {
            const unsigned char* const source = rows + (16 * t + g) * pitch + stage * STAGE_K + 16 * q;
            const uint4 upper = *reinterpret_cast<const uint4*>(source),
                lower = *reinterpret_cast<const uint4*>(source + 8 * pitch);
            const u32 raw[2][STEPS] = {{upper.x, upper.y, upper.z, upper.w}, {lower.x, lower.y, lower.z, lower.w}};
            float c[1][NT][4] = {};
#pragma unroll
            for (int k = 0; k < STEPS; ++k) {
                u32 a[1][1][4], b[NT][SPLITS][2];
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    a[0][0][half] = upper_halves(byte_of<0>(raw[half][k]), byte_of<1>(raw[half][k]));
                    a[0][0][2 + half] = upper_halves(byte_of<2>(raw[half][k]), byte_of<3>(raw[half][k]));
                }
#pragma unroll
                for (int n = 0; n < SPLITS * NT; ++n) {
                    const uint4& vector = weights[n / NT][n % NT][k / 2];
                    u32(&two)[2] = b[n % NT][n / NT];
                    two[0] = k % 2 ? vector.z : vector.x, two[1] = k % 2 ? vector.w : vector.y;
                }
                mma_splits(c, a, b);
            }
#pragma unroll
            for (int n = 0; n < 4 * NT; ++n) totals[t][n / 4][n % 4] += c[0][n / 4][n % 4];
        }
    }
    __syncthreads();
    float* const partials = reinterpret_cast<float*>(smem);  // (WARPS, ROWS, COLUMNS)
#pragma unroll
    for (int n = 0; n < 2 * MT * NT; ++n) {
        const int t = n / 2 / NT, j = n / 2 % NT, half = n % 2;
        const float two[2] = {totals[t][j][2 * half], totals[t][j][2 * half + 1]};
        store_vector(partials + (warp * ROWS + 16 * t + 8 * half + g) * COLUMNS + 8 * j + 2 * q, two);
    }
    __syncthreads();
    for (int item = threadIdx.x; item < ROWS * COLUMNS / 4; item += THREADS) {
        const int row = item / (COLUMNS / 4), n = item % (COLUMNS / 4) * 4;
        float4 sum = load4(partials + 4 * item);
#pragma unroll
        for (int other = 1; other < WARPS; ++other) {
            const float4 partial = load4(partials + other * ROWS * COLUMNS + 4 * item);
            sum = {sum.x + partial.x, sum.y + partial.y, sum.z + partial.z, sum.w + partial.w};
        }
        if (first_m + row >= size || first_n + n >= pixels.N) continue;
        const float factor = pixels.scale;
        const float4 result = activated<CODE>({factor * sum.x, factor * sum.y, factor * sum.z, factor * sum.w}, slope);
        const float four[4] = {result.x, result.y, result.z, result.w};
        store_first(step.local(y) + static_cast<long long>(first_m + row) * y_stride + first_n + n, four,
                    pixels.N - first_n - n);
    }
}

// Input of a layer for 16 rows of a step, uint8 or floats to split: lane (g, q) holds rows 4 q to 4 q + 3 of features
// FEATURES g to FEATURES (g + 1) - 1.
struct ByteInputs {
    static constexpr int FEATURES = 8, TILES = FEATURES / 2, A_SPLITS = 1;
    u32 raw[4][2];

    __device__ __forceinline__ void load(const void* from, int stride, int first, const u32 (&rows)[4]) {
        const int feature = first + threadIdx.x % 32 / 4 * FEATURES;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            uint2 two = {0, 0};
            if (rows[i] != NO_ROW && feature < stride)
                two = __ldcg(reinterpret_cast<const uint2*>(static_cast<const unsigned char*>(from) +
                                                            static_cast<long long>(rows[i]) * stride + feature));
            raw[i][0] = two.x, raw[i][1] = two.y;
        }
    }
    __device__ __forceinline__ void widen(u32 (&a)[TILES][A_SPLITS][4]) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // rows 2 (i / 2) and + 1, two features of a word
            const u32 one = raw[i / 2 * 2][i % 2], other = raw[i / 2 * 2 + 1][i % 2];
            const int tile = i % 2 * 2, word = i / 2 * 2;
            a[tile][0][word] = upper_halves(byte_of<0>(one), byte_of<0>(other));
            a[tile][0][word + 1] = upper_halves(byte_of<1>(one), byte_of<1>(other));
            a[tile + 1][0][word] = upper_halves(byte_of<2>(one), byte_of<2>(other));
            a[tile + 1][0][word + 1] = upper_halves(byte_of<3>(one), byte_of<3>(other));
        }
    }
};
template <int SPLITS>
struct FloatInputs {
    static constexpr int FEATURES = 4, TILES = FEATURES / 2, A_SPLITS = SPLITS;
    float raw[4][4];

    __device__ __forceinline__ void load(const void* from, int stride, int first, const u32 (&rows)[4]) {
        const int feature = first + threadIdx.x % 32 / 4 * FEATURES;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) raw[i][j] = 0.0f;
            if (rows[i] != NO_ROW && feature < stride)
                load_several<true>(raw[i], row_at(static_cast<const float*>(from), rows[i], stride) + feature);
        }
    }
    __device__ __forceinline__ void widen(u32 (&a)[TILES][A_SPLITS][4]) const {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            float v[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) v[i] = raw[i / 4 * 2 + i % 2][2 * tile + i / 2 % 2];
            split_floats(a[tile], v);
        }
    }
};

// A dW tile of 8 FEATURES features x 32 units.
struct GradientTile {
    const void* a;  // (rows, a_stride): the layer's input, uint8 or float
    const float* dz;
    const long long* order;  // nullptr: identity
    int a_stride, dz_stride, first_feature, first_unit, size;

    __device__ __forceinline__ int steps() const { return (size + 15) / 16; }
    __device__ __forceinline__ void find(u32 (&rows)[4], const long long* order, int index) const {
        find_rows(rows, order, 16 * index + static_cast<int>(threadIdx.x) % 4 * 4, 1, size);
    }
    template <class Inputs>
    __device__ __forceinline__ void load_inputs(Inputs& inputs, int index) const {
        if (index >= steps()) return;
        u32 rows[4];
        find(rows, order, index);
        inputs.load(a, a_stride, first_feature, rows);
    }
    // Lane (g, q) holds units 4 g to 4 g + 3 of its rows.
    __device__ __forceinline__ void load_dz(float (&v)[4][4], int index) const {
        if (index >= steps()) return;
        u32 rows[4];
        find(rows, nullptr, index);
        const int unit = first_unit + threadIdx.x % 32 / 4 * 4;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) v[i][j] = 0.0f;
            if (rows[i] != NO_ROW && unit < dz_stride) load_several<true>(v[i], row_at(dz, rows[i], dz_stride) + unit);
        }
    }
};

// Split-K sums of a tile: (WARPS, 32 units, 8 FEATURES features) floats. The features are XOR-swizzled by unit, so that
// the stores of eight lanes, of units 8 apart, are free of bank conflicts.
template <int FEATURES>
struct GradientSums {
    static constexpr int FOURS = 2 * FEATURES;  // per unit
    float* at;

    static __device__ __forceinline__ int offset(int warp, int unit, int four) {
        const int q = unit / 8, swizzle = FEATURES == 8 ? q % 2 + q / 2 * 4 : 2 * q;
        return ((warp * TILE_UNITS + unit) * FOURS + (four ^ swizzle)) * 4;
    }
    // c[t][j][2 h + w]: feature FEATURES g + 2 t + h, unit 8 q + 4 w + j.
    __device__ __forceinline__ void store(const float (&c)[FEATURES / 2][4][4]) const {
        const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < 8 * FEATURES / 4; ++i) {
            const int unit = i % 8, w = unit / 4, j = unit % 4, t = i / 8 * 2;
            float* const to = at + offset(warp, 8 * q + unit, g * (FEATURES / 4) + i / 8);
            const float four[4] = {c[t][j][w], c[t][j][2 + w], c[t + 1][j][w], c[t + 1][j][2 + w]};
            store_vector(to, four);
        }
    }
    __device__ __forceinline__ float4 add_up(int unit, int four) const {
        float4 sum = load4(at + offset(0, unit, four));
#pragma unroll
        for (int warp = 1; warp < WARPS; ++warp) {
            const float4 partial = load4(at + offset(warp, unit, four));
            sum = {sum.x + partial.x, sum.y + partial.y, sum.z + partial.z, sum.w + partial.w};
        }
        return sum;
    }
};

// A thread's float4s in a tile: use(index, unit, four, offset, row and column of the weights). Offsets are recomputed
// on each call to save registers.
template <int FEATURES, class Use>
__device__ __forceinline__ void for_each_four(const GradientTile& tile, const LayerSizes& sizes, const Use& use) {
    int thread = threadIdx.x;
#ifdef __CUDA_ARCH__
    asm volatile("" : "+r"(thread));
#endif
#pragma unroll
    for (int i = 0; i < FEATURES / 4; ++i) {
        const int item = thread + i * THREADS, unit = item / (2 * FEATURES), four = item % (2 * FEATURES);
        const int n = tile.first_unit + unit, k = tile.first_feature + 4 * four;
        if (n < sizes.N && k < sizes.K) use(i, unit, four, static_cast<long long>(n) * sizes.w_stride + k, n, k);
    }
}

// Computes one dW tile and updates its weights. Includes griddepcontrol.wait.
template <int SPLITS, u32 OPTIMISER, class Inputs>
__device__ __forceinline__ void update_tile(const Step& step, const GradientTile& tile, float* smem,
                                            const LayerMemory& memory, const LayerSizes& sizes,
                                            const SplitWeights* weights) {
    constexpr int FEATURES = Inputs::FEATURES, TILES = Inputs::TILES, ITEMS = FEATURES / 4;
    constexpr bool IS_EARLY = Inputs::A_SPLITS == 1 && FEATURES == 8;  // x does not depend on the previous launch
    const GradientSums<FEATURES> sums = {smem};
    float* const staging = smem + SUM_FLOATS + 4 * threadIdx.x;  // (w, mean, square; ITEMS; THREADS) float4s
    const auto staged = [&](int array, int i) { return staging + (array * ITEMS + i) * 4 * THREADS; };
    const int warp = threadIdx.x / 32, steps = tile.steps();
    Inputs inputs[2];
    float dz[2][4][4];
    __shared__ StepValues opt;  // saves registers, as does `staging`
    if (threadIdx.x == 0) opt = step.opt();
    for_each_four<FEATURES>(tile, sizes, [&](int i, int, int, long long at, int, int) {
        copy_async(staged(0, i), memory.w + at, true);
        if (OPTIMISER != SGD) copy_async(staged(1, i), memory.mean + at, true);
        if (OPTIMISER == ADAM) copy_async(staged(2, i), memory.square + at, true);
    });
    commit_stage();
    if (IS_EARLY) tile.load_inputs(inputs[0], warp), tile.load_inputs(inputs[1], warp + WARPS);
    wait_for_previous_kernel();
    tile.load_dz(dz[0], warp), tile.load_dz(dz[1], warp + WARPS);
    if (!IS_EARLY) tile.load_inputs(inputs[0], warp), tile.load_inputs(inputs[1], warp + WARPS);
    float c[TILES][4][4] = {};
#pragma unroll 1  // the code runs once: instruction fetches of an unrolled loop take longer
    for (int index = warp; index < steps; index += WARPS) {
        u32 a[TILES][Inputs::A_SPLITS][4];
        inputs[0].widen(a);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float v[4] = {dz[0][0][j], dz[0][1][j], dz[0][2][j], dz[0][3][j]};
            u32 b[SPLITS][2];
            split_floats(b, v);
#pragma unroll
            for (int terms = SPLITS - 1; terms >= 0; --terms)
#pragma unroll
                for (int term = 0; term < Inputs::A_SPLITS && term <= terms; ++term)
#pragma unroll
                    for (int t = 0; t < TILES; ++t)
                        mma<Bf16>(c[t][j], a[t][term], b[terms - term][0], b[terms - term][1]);
        }
        inputs[0] = inputs[1];
#pragma unroll
        for (int i = 0; i < 16; ++i) dz[0][i / 4][i % 4] = dz[1][i / 4][i % 4];
        tile.load_dz(dz[1], index + 2 * WARPS), tile.load_inputs(inputs[1], index + 2 * WARPS);
    }
    sums.store(c);
    wait_for_stages<0>();
    __syncthreads();
    for_each_four<FEATURES>(tile, sizes, [&](int i, int unit, int four, long long at, int n, int k) {
        const float4 sum = sums.add_up(unit, four);
        const float factor = weights ? weights->scale : 1.0f,
            gradients[4] = {factor * sum.x, factor * sum.y, factor * sum.z, factor * sum.w};
        WeightState state;
        load_several<false>(state.w, staged(0, i));
        if (OPTIMISER != SGD) load_several<false>(state.mean, staged(1, i));
        if (OPTIMISER == ADAM) load_several<false>(state.square, staged(2, i));
        optimiser_step(OPTIMISER, opt, gradients, state.w, state.mean, state.square, sizes.K - k);
        store_vector(memory.w + at, state.w);
        if (OPTIMISER != SGD) store_vector(memory.mean + at, state.mean);
        if (OPTIMISER == ADAM) store_vector(memory.square + at, state.square);
        if (weights) weights->store<SPLITS>(step, n, k, state.w);
    });
}

// dW = dz^T a of every layer with the update: a block computes 32 units x 64 uint8 or 32 float features. Block 0
// computes the tally.
template <int SPLITS, u32 OPTIMISER>
__global__ void __launch_bounds__(THREADS, 2)
pixels_update(const Step step, const __grid_constant__ Layers layers, const SplitWeights pixels, const Tally tally) {
    extern __shared__ float4 smem[];
    const int size = step.size(), block = static_cast<int>(blockIdx.x) - 1;
    if (size == 0 || block < 0) {
        wait_for_previous_kernel();
        if (size > 0) tally.add_up(step);
        return;
    }
    const int layer = layers.layer_of(block);
    const LayerMemory memory = layers.memory_of(layer, step);
    const LayerSizes& sizes = layers.sizes[layer];
    const int layer_block = block - layers.first_block[layer], columns = sizes.blocks_n;
    const int unit = layer_block / columns * TILE_UNITS, feature = layer_block % columns;
    float* const sums = reinterpret_cast<float*>(smem);
    if (layer == 0) {
        const GradientTile tile = {pixels.x,        memory.dz,    step.rows(), pixels.x_stride,
                                   sizes.dz_stride, feature * 64, unit,        size};
        update_tile<SPLITS, OPTIMISER, ByteInputs>(step, tile, sums, memory, sizes, &pixels);
    } else {
        const GradientTile tile = {memory.a,        memory.dz,    nullptr, sizes.a_stride,
                                   sizes.dz_stride, feature * 32, unit,    size};
        update_tile<SPLITS, OPTIMISER, FloatInputs<SPLITS>>(step, tile, sums, memory, sizes, nullptr);
    }
}
