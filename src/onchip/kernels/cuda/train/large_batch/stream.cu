// train/large_batch/stream.cu: all layers after the first of a training step for 1,000 rows or more.
//
// Idea    One launch per gemm waits as long as it computes. So a block of 16 warps runs 16 or 32 rows through all
//         layers: activations stay in shared memory, split for the tensor cores and as floats for the backward pass.
//         Each warp owns columns: their weights stream from L2 to registers four K steps ahead and are split there. The
//         narrow output layer is in shared memory, with split-K over warps. dz of the first layer is stored as the
//         split that its dW gemm reads.
// Floor   784-320-160-10, 4,096 rows: 128 blocks read 205 KB of weights each way: 5.8 us at 40 B/clock; 0.42 G
//         multiplications, 6x in fp32: 0.9 us (5.1 in fp32) at 989 Tflop/s bf16. A block takes 15 us (33) on an H200.
// Order   K steps of 16, smallest products first; fp32 adds steps with FADD. Outputs: split-K over SPLIT_K warps.
// Layout  As train/large_batch/launches.cu; dz of the first layer split as in train/large_batch/bytes.cuh.
// Shared  (SPLITS / 2 + 1) 4 B per hidden activation, 16 or 32 rows; output weights; split-K sums: 216,832 B here with
//         32 rows in fp32.
// Limits  2 to 4 layers in all, at most 32 outputs. SPLITS is 3 (fp32), 2 (tf32, fp16) or 1 (bf16). sm_80 up.
#include "train/large_batch/bytes.cuh"
#include "train/large_batch/targets.cuh"

constexpr int STREAM_WARPS = 16, STREAM_THREADS = 32 * STREAM_WARPS, WARP_COLUMNS = 16;

__device__ constexpr int steps_of(int K) { return (K + 15) / 16; }
__device__ constexpr int tiles_of(int N) { return (N + 7) / 8; }
// Row pitch of W packed values along K: an odd number of K steps, so that reads of four rows avoid bank conflicts.
__device__ constexpr int word_pitch(int W) { return 8 * (steps_of(W) | 1); }
__device__ constexpr int float_pitch(int W) { return 2 * word_pitch(W); }
// Row pitches of the output layer's weights and of its split-K sums, in floats: 4 and 8 banks apart.
__device__ constexpr int weight_pitch(int W) { return 16 * steps_of(W) + 4; }
__device__ constexpr int sum_pitch(int tiles) { return round_up(8 * tiles - 8, 16) + 8; }

// -- gemms -----------------------------------------------------------------------------------------------------------

// Loads a lane's A fragment: its row and the row 8 below.
__device__ __forceinline__ void load_a(u32 (&a)[4], const u32* row, int pitch) {
    const uint2 upper = *reinterpret_cast<const uint2*>(row), lower = *reinterpret_cast<const uint2*>(row + 8 * pitch);
    a[0] = upper.x, a[1] = lower.x, a[2] = upper.y, a[3] = lower.y;
}

// c[t][j][2 h + w] (row 16 t + 8 h + g, column 4 q + 2 w + j of a group) = split rows times weights. The weights have
// the layout of launches.cuh: of 16 K elements lane (g, q) holds 4 q to 4 q + 3, for columns 2 g and 2 g + 1 of a
// group. IN_SHARED: weights in shared memory.
template <int SPLITS, int MT, int STEPS, bool IN_SHARED, class Weights>
__device__ __forceinline__ void multiply_rows(float (&c)[MT][1][2][4], const u32* splits, int pitch,
                                              const Weights& weights) {
    constexpr int PREFETCHED = STEPS < 4 ? STEPS : 4, ROWS = 16 * MT;
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    float next[PREFETCHED][2][4];
#pragma unroll
    for (int i = 0; i < PREFETCHED; ++i) weights.template load<!IN_SHARED>(next[i], i);
#pragma unroll
    for (int n = 0; n < 8 * MT; ++n) c[n / 8][0][n / 4 % 2][n % 4] = 0.0f;
#pragma unroll 1
    for (int first = 0; first < STEPS; first += PREFETCHED) {
#pragma unroll
        for (int i = 0; i < PREFETCHED; ++i) {
            const int step = first + i;
            if (step >= STEPS) break;
            u32 b[2][SPLITS][2];
            split_floats(b[0], next[i][0]), split_floats(b[1], next[i][1]);
            if (step + PREFETCHED < STEPS) weights.template load<!IN_SHARED>(next[i], step + PREFETCHED);
#pragma unroll
            for (int t = 0; t < MT; ++t) {
                u32 a[1][SPLITS][4];
#pragma unroll
                for (int term = 0; term < SPLITS; ++term)
                    load_a(a[0][term], splits + (term * ROWS + 16 * t + g) * pitch + 8 * step + 2 * q, pitch);
                if constexpr (SPLITS == 3) {  // tensor cores truncate: one K step per accumulator
                    float step_sums[1][2][4] = {};
                    mma_splits(step_sums, a, b);
#pragma unroll
                    for (int n = 0; n < 8; ++n) c[t][0][n / 4][n % 4] += step_sums[0][n / 4][n % 4];
                } else {
                    mma_splits(c[t], a, b);
                }
            }
        }
    }
}

// Calls finish(row, column, four adjacent sums) for a group's accumulators.
template <int MT, class Finish>
__device__ __forceinline__ void for_each_four(const float (&c)[MT][1][2][4], int group, const Finish& finish) {
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 2 * MT; ++i) {
        const int t = i / 2, h = i % 2 * 2;
        finish(16 * t + 4 * h + g, WARP_COLUMNS * group + 4 * q,
               float4{c[t][0][0][h], c[t][0][1][h], c[t][0][0][h + 1], c[t][0][1][h + 1]});
    }
}

// -- shared memory ---------------------------------------------------------------------------------------------------

// W: the first layer, then all layers after it. Offsets in 32-bit words.
template <int P, int MT_, u32 LOSS, class... W>
struct SharedLayout {
    static constexpr int SPLITS = P, MT = MT_, ROWS = 16 * MT, L = sizeof...(W) - 1;
    static __device__ constexpr int at(int l) {
        const int all[] = {W::N...};
        return all[l];
    }
    static __device__ constexpr u32 code(int l) {
        const u32 all[] = {W::CODE...};
        return all[l];
    }
    static __device__ constexpr int k_size(int l) { return at(l) + (l < L ? 1 : 0); }  // units and the bias 1
    // (SPLITS, ROWS, pitch): split activations of layer l, then its gradients.
    static __device__ constexpr int splits(int l) {
        int sum = 0;
        for (int i = 0; i < l; ++i) sum += SPLITS * ROWS * word_pitch(k_size(i));
        return sum;
    }
    // (ROWS, pitch): activations of layer l as floats; for the first layer, then its gradients.
    static __device__ constexpr int floats(int l) {
        int sum = splits(L + 1);
        for (int i = 0; i < l; ++i) sum += ROWS * float_pitch(k_size(i));
        return sum;
    }
    static constexpr int TILES = tiles_of(at(L)), STEPS = steps_of(at(L - 1) + 1);
    static constexpr int SPLIT_K = STEPS < STREAM_WARPS ? STEPS : STREAM_WARPS;  // split-K warps of the output layer
    static constexpr int OUTPUTS = floats(L), OUT_PITCH = 36;  // (ROWS, pitch): outputs, then gradients
    // (LAST_ROWS, LAST_PITCH): the output layer's weights
    static constexpr int LAST = OUTPUTS + ROWS * OUT_PITCH, LAST_ROWS = 16 * steps_of(at(L));
    static constexpr int LAST_PITCH = weight_pitch(at(L - 1) + 1);
    static constexpr int SUMS = LAST + LAST_ROWS * LAST_PITCH, SUM_PITCH = sum_pitch(TILES);  // (SPLIT_K, ROWS, pitch)
    static __device__ constexpr int bytes() { return 4 * (SUMS + SPLIT_K * ROWS * SUM_PITCH); }
    using RowTargets = Targets<ROWS, STREAM_THREADS, LOSS, at(L), code(L)>;
};

// Stores four adjacent values of layer l, split.
template <class R, int l>
__device__ __forceinline__ void store_splits(float* smem, int row, int column, const float4& four) {
    float v[4] = {four.x, four.y, four.z, four.w};
    u32 packed[R::SPLITS][2];
    split_floats(packed, v);
    u32* const to = reinterpret_cast<u32*>(smem) + R::splits(l) + row * word_pitch(R::k_size(l)) + column / 2;
#pragma unroll
    for (int term = 0; term < R::SPLITS; ++term)
        *reinterpret_cast<uint2*>(to + term * R::ROWS * word_pitch(R::k_size(l))) = {packed[term][0], packed[term][1]};
}

// Masks four adjacent values of layer l: the bias 1 after its units, then zeros.
template <class R, int l>
__device__ __forceinline__ float4 with_bias(const RowLayers& layers, const float4& four, int column) {
    if (R::at(l) % 4 == 0 && column < R::at(l)) return four;
    const float one = layers.layer[l + 1].has_bias ? 1.0f : 0.0f;
    const auto value = [&](float v, int n) { return n < R::at(l) ? v : n == R::at(l) ? one : 0.0f; };
    return {value(four.x, column), value(four.y, column + 1), value(four.z, column + 2), value(four.w, column + 3)};
}

// Writes the bias 1 and zeros after the units of layers l and up.
template <class R, int l>
__device__ __forceinline__ void write_ones(const RowLayers& layers, float* smem) {
    if constexpr (l < R::L) {
        constexpr int FIRST = R::at(l) / 4 * 4, COUNT = (16 * steps_of(R::k_size(l)) - FIRST) / 4;
        for (int i = threadIdx.x; i < R::ROWS * COUNT; i += STREAM_THREADS) {
            const int column = FIRST + i % COUNT * 4;
            store_splits<R, l>(smem, i / COUNT, column, with_bias<R, l>(layers, {}, column));
        }
        write_ones<R, l + 1>(layers, smem);
    }
}

// Loads the first layer's activations.
template <class R>
__device__ __forceinline__ void load_rows(const float* from, int stride, float* smem, int valid) {
    constexpr int FOURS = 4 * steps_of(R::k_size(0)), AT_ONCE = 6;
    constexpr int ITEMS = (R::ROWS * FOURS + STREAM_THREADS - 1) / STREAM_THREADS;  // per thread
#pragma unroll 1
    for (int first = 0; first < ITEMS; first += AT_ONCE) {
        float4 values[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int item = (first + i) * STREAM_THREADS + threadIdx.x, row = item / FOURS, column = item % FOURS * 4;
            const float4* const at = reinterpret_cast<const float4*>(row_at(from, row, stride) + column);
            values[i] = row < valid && column < stride ? __ldcg(at) : float4{0.0f, 0.0f, 0.0f, 0.0f};
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int item = (first + i) * STREAM_THREADS + threadIdx.x, row = item / FOURS, column = item % FOURS * 4;
            if (row >= R::ROWS) break;
            const float four[4] = {values[i].x, values[i].y, values[i].z, values[i].w};
            store_vector(smem + R::floats(0) + row * float_pitch(R::k_size(0)) + column, four);
            store_splits<R, 0>(smem, row, column, values[i]);
        }
    }
}

// Forward pass of hidden layers l and up.
template <class R, int l>
__device__ __forceinline__ void forward(const Step& step, const RowLayers& layers, const TileRows<R::ROWS>& rows,
                                        float* smem) {
    if constexpr (l < R::L) {
        constexpr int N = R::at(l), K = R::k_size(l - 1);
        const RowLayer& layer = layers.layer[l];
        const float* const w = step.local(layers.memory[l].w);
        float* const a = step.local(layers.memory[l].a) + static_cast<long long>(rows.first) * layer.stride;
        const int valid = rows.count();
#pragma unroll 1
        for (int group = threadIdx.x / 32; WARP_COLUMNS * group < N; group += STREAM_WARPS) {
            float c[R::MT][1][2][4];
            const KMajor<2> weights(w, layer.w_stride, WARP_COLUMNS * group, N, layer.w_stride);
            const u32* const input = reinterpret_cast<const u32*>(smem) + R::splits(l - 1);
            multiply_rows<R::SPLITS, R::MT, steps_of(K), false>(c, input, word_pitch(K), weights);
            for_each_four(c, group, [&](int row, int column, const float4& sum) {
                if (column >= N) return;
                const float4 result = activated<R::code(l)>(sum, layer.slope);
                const float four[4] = {result.x, result.y, result.z, result.w};
                store_vector(smem + R::floats(l) + row * float_pitch(R::k_size(l)) + column, four);
                store_splits<R, l>(smem, row, column, with_bias<R, l>(layers, result, column));
                if (row < valid) store_first(a + static_cast<long long>(row) * layer.stride + column, four, N - column);
            });
        }
        __syncthreads();
        forward<R, l + 1>(step, layers, rows, smem);
    }
}

// Outputs of the last layer.
template <class R>
__device__ __forceinline__ void compute_outputs(const RowLayer& layer, float* smem) {
    constexpr int L = R::L, PITCH = word_pitch(R::at(L - 1) + 1);
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    const u32* const splits = reinterpret_cast<const u32*>(smem) + R::splits(L - 1);
    if (warp < R::SPLIT_K) {
#pragma unroll
        for (int t = 0; t < R::MT; ++t) {
            float sums[1][R::TILES][4] = {};
#pragma unroll 1
            for (int step = warp; step < R::STEPS; step += R::SPLIT_K) {
                u32 a[1][R::SPLITS][4], b[R::TILES][R::SPLITS][2];
#pragma unroll
                for (int term = 0; term < R::SPLITS; ++term)
                    load_a(a[0][term], splits + (term * R::ROWS + 16 * t + g) * PITCH + 8 * step + 2 * q, PITCH);
#pragma unroll
                for (int j = 0; j < R::TILES; ++j) {
                    float w[4];
                    load_several<false>(w, smem + R::LAST + (8 * j + g) * R::LAST_PITCH + 16 * step + 4 * q);
                    split_floats(b[j], w);
                }
                float step_sums[1][R::TILES][4] = {};
                mma_splits(step_sums, a, b);
#pragma unroll
                for (int n = 0; n < 4 * R::TILES; ++n) sums[0][n / 4][n % 4] += step_sums[0][n / 4][n % 4];
            }
#pragma unroll
            for (int n = 0; n < 2 * R::TILES; ++n) {
                const float two[2] = {sums[0][n / 2][n % 2 * 2], sums[0][n / 2][n % 2 * 2 + 1]};
                const int row = warp * R::ROWS + 16 * t + n % 2 * 8 + g;
                store_vector(smem + R::SUMS + row * R::SUM_PITCH + n / 2 * 8 + 2 * q, two);
            }
        }
    }
    __syncthreads();
    constexpr int FOURS = 2 * R::TILES;
    for (int item = threadIdx.x; item < R::ROWS * FOURS; item += STREAM_THREADS) {
        const int row = item / FOURS, column = item % FOURS * 4;
        float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int k_split = 0; k_split < R::SPLIT_K; ++k_split) {
            const float4 partial = load4(smem + R::SUMS + (k_split * R::ROWS + row) * R::SUM_PITCH + column);
            sum = {sum.x + partial.x, sum.y + partial.y, sum.z + partial.z, sum.w + partial.w};
        }
        const float4 result = activated<R::code(L)>(sum, layer.slope);
        const float four[4] = {result.x, result.y, result.z, result.w};
        store_vector(smem + R::OUTPUTS + row * R::OUT_PITCH + column, four);
    }
    __syncthreads();
}

// Backward pass from layer l to the first.
template <class R, int l>
__device__ __forceinline__ void backward(const Step& step, const RowLayers& layers, const TileRows<R::ROWS>& rows,
                                         float* smem) {
    constexpr int D = R::at(l - 1), N = R::at(l), PITCH = word_pitch(R::k_size(l));
    constexpr bool IS_LAST = l == R::L;
    const RowLayer &layer = layers.layer[l], &prev = layers.layer[l - 1];
    const float* const w = IS_LAST ? smem + R::LAST : step.local(layers.memory[l].w);
    float* const dz = step.local(layers.memory[l - 1].dz) + static_cast<long long>(rows.first) * prev.stride;
    const int valid = rows.count();
#pragma unroll 1
    for (int group = threadIdx.x / 32; WARP_COLUMNS * group < D; group += STREAM_WARPS) {
        float c[R::MT][1][2][4];
        const int stride = IS_LAST ? R::LAST_PITCH : layer.w_stride;
        const MnMajor<2> weights(w, stride, WARP_COLUMNS * group, stride, N);
        const u32* const input = reinterpret_cast<const u32*>(smem) + R::splits(l);
        multiply_rows<R::SPLITS, R::MT, steps_of(N), IS_LAST>(c, input, PITCH, weights);
        for_each_four(c, group, [&](int row, int column, const float4& sum) {
            if (column >= D) return;
            float* const at = smem + R::floats(l - 1) + row * float_pitch(D + 1) + column;
            const float4 result = act_grad<R::code(l - 1)>(prev.slope, sum, load4(at));
            const float four[4] = {result.x, result.y, result.z, result.w};
            if constexpr (l > 1) {
                store_splits<R, l - 1>(smem, row, column, result);
                if (row < valid) store_first(dz + static_cast<long long>(row) * prev.stride + column, four, D - column);
            } else {
                store_vector(at, four);
            }
        });
    }
    __syncthreads();
    if constexpr (l > 1) backward<R, l - 1>(step, layers, rows, smem);
}

// W: the first layer, computed before, and all others. Writes dz of all layers, the first one's as dz_splits, and the
// hidden activations.
template <int SPLITS, int MT, u32 LOSS, class... W>
__global__ void __launch_bounds__(STREAM_THREADS, 1)
train_stream(const __grid_constant__ Step step, const __grid_constant__ RowLayers layers, uint4* dz_splits) {
    using R = SharedLayout<SPLITS, MT, LOSS, W...>;
    constexpr int L = R::L;
    extern __shared__ float4 smem_base[];
    float* const smem = reinterpret_cast<float*>(smem_base);
    touch_arguments(step), touch_arguments(layers);
    const float* const last = step.local(layers.memory[L].w);
    const int size = step.size(), tiles = (round_up(size, 32) + R::ROWS - 1) / R::ROWS;
    if (static_cast<int>(blockIdx.x) >= tiles) {
        wait_for_previous_kernel();
        return;
    }
    // Weights are valid before the wait: the previous launch waited for their update.
    for (int i = threadIdx.x; i < R::LAST_ROWS * 4 * R::STEPS; i += STREAM_THREADS) {
        const int row = i / (4 * R::STEPS), column = i % (4 * R::STEPS) * 4, stride = layers.layer[L].w_stride;
        const bool is_valid = row < R::at(L) && column < stride;
        copy_async(smem + R::LAST + row * R::LAST_PITCH + column, last + (is_valid ? row * stride + column : 0),
                   is_valid);
    }
    commit_stage();
    write_ones<R, 1>(layers, smem);
#pragma unroll 1
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const TileRows<R::ROWS> rows = {tile * R::ROWS, size};
        typename R::RowTargets targets;
        targets.load(step, layers, rows);
        if (tile == static_cast<int>(blockIdx.x)) wait_for_previous_kernel();
        const int stride = layers.layer[0].stride;
        load_rows<R>(row_at(step.local(layers.memory[0].a), rows.first, stride), stride, smem, rows.count());
        wait_for_stages<0>();
        __syncthreads();
        forward<R, 1>(step, layers, rows, smem);
        compute_outputs<R>(layers.layer[L], smem);
        float* const outputs = smem + R::OUTPUTS;
#pragma unroll
        for (int i = 0; i < R::RowTargets::ROUNDS; ++i)
            targets.to_gradient(i, layers, layers.layer[L].slope, outputs + R::RowTargets::row(i) * R::OUT_PITCH);
        __syncthreads();
        constexpr int FOURS = 4 * steps_of(R::at(L));
        for (int item = threadIdx.x; item < R::ROWS * FOURS; item += STREAM_THREADS) {
            const float* const from = outputs + item / FOURS * R::OUT_PITCH;
            const int n = item % FOURS * 4;
            const auto value = [&](int n) { return n < R::at(L) ? from[n] : 0.0f; };
            store_splits<R, L>(smem, item / FOURS, n, {value(n), value(n + 1), value(n + 2), value(n + 3)});
        }
        targets.store(step, layers, rows, layers.memory[L].dz, layers.layer[L].stride, outputs, R::OUT_PITCH);
        __syncthreads();
        backward<R, L>(step, layers, rows, smem);
        const int stages = static_cast<int>((step.batch + 63) / 64);
        store_split_dz<SPLITS, R::at(0), R::ROWS, STREAM_THREADS>(step.local(dz_splits), smem + R::floats(0),
                                                                  float_pitch(R::k_size(0)), rows.first, rows.count(),
                                                                  stages, threadIdx.x);
        __syncthreads();  // before the next rows overwrite shared memory
    }
}
