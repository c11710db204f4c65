// train/large_batch/stream.cu: all layers after the first of a training step for 1,000 rows or more.
//
// Idea    One launch per gemm waits as long as it computes. So a block of 16 warps runs 16 or 32 rows through all
//         layers: activations stay in shared memory, split for the tensor cores and as floats for the backward pass.
//         The warps divide the columns, so each weight belongs to one warp and streams from L2 to registers four K
//         steps ahead, where it is split. The narrow output layer is in shared memory, with split-K over warps. dz of
//         the first layer leaves as the split that its dW gemm reads.
// Floor   784-320-160-10, 4,096 rows: 128 blocks read 205 KB of weights each way: 5.8 us at 40 B/clock; 0.42 G
//         multiplications, 6x in fp32: 0.9 us (5.1 in fp32) at 989 Tflop/s bf16. A block takes 15 us (33) on an H200.
// Order   K steps of 16, smallest term products first; fp32 adds steps with FADD. Outputs: split-K over DEEP warps.
// Layout  As train/large_batch/launches.cu; dz of the first layer split as in train/large_batch/bytes.cuh.
// Shared  (PARTS / 2 + 1) 4 B per activation but outputs, 16 or 32 rows; output weights; split-K sums: 216,832 B here
//         with 32 rows in fp32.
// Limits  2 to 4 layers in all, at most 32 outputs. PARTS is 3 (fp32), 2 (tf32, fp16) or 1 (bf16). sm_80 up.
#include "train/large_batch/bytes.cuh"
#include "train/large_batch/targets.cuh"

constexpr int STREAM_WARPS = 16, STREAM_THREADS = 32 * STREAM_WARPS, A_WARP = 16;  // A_WARP: columns per warp

__device__ constexpr int steps_of(int K) { return (K + 15) / 16; }
__device__ constexpr int tiles_of(int N) { return (N + 7) / 8; }
// Row pitch of W packed values along K: an odd number of K steps, so that reads of four rows are free of bank
// conflicts. Floats likewise.
__device__ constexpr int word_pitch(int W) { return 8 * (steps_of(W) | 1); }
__device__ constexpr int float_pitch(int W) { return 2 * word_pitch(W); }
// Row pitches of the output layer's weights and of its split-K sums, in floats: 4 and 8 banks apart.
__device__ constexpr int weight_pitch(int W) { return 16 * steps_of(W) + 4; }
__device__ constexpr int sum_pitch(int tiles) { return round_up(8 * tiles - 8, 16) + 8; }

// -- gemms -----------------------------------------------------------------------------------------------------------

// Loads a lane's A fragment: its row and the row 8 below.
__device__ __forceinline__ void load_rows(u32 (&a)[4], const u32* row, int pitch) {
    const uint2 upper = *reinterpret_cast<const uint2*>(row), lower = *reinterpret_cast<const uint2*>(row + 8 * pitch);
    a[0] = upper.x, a[1] = lower.x, a[2] = upper.y, a[3] = lower.y;
}

// c[t][j][2 h + w] (row 16 t + 8 h + g, column 4 q + 2 w + j of a group) = split rows times weights. The weights have
// the layout of launches.cuh: of 16 K elements lane (g, q) holds 4 q to 4 q + 3, for columns 2 g and 2 g + 1 of a
// group. IS_NEAR: they are in shared memory.
template <int PARTS, int MT, int STEPS, bool IS_NEAR, class Weights>
__device__ __forceinline__ void multiply_rows(float (&c)[MT][1][2][4], const u32* words, int pitch, const Weights& weights) {
    constexpr int AHEAD = STEPS < 4 ? STEPS : 4, ROWS = 16 * MT;
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    float next[AHEAD][2][4];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) weights.template load<!IS_NEAR>(next[i], i);
#pragma unroll
    for (int n = 0; n < 8 * MT; ++n) c[n / 8][0][n / 4 % 2][n % 4] = 0.0f;
#pragma unroll 1
    for (int first = 0; first < STEPS; first += AHEAD) {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int step = first + i;
            if (step >= STEPS) break;
            u32 b[2][PARTS][2];
            split_numbers(b[0], next[i][0]), split_numbers(b[1], next[i][1]);
            if (step + AHEAD < STEPS) weights.template load<!IS_NEAR>(next[i], step + AHEAD);
#pragma unroll
            for (int t = 0; t < MT; ++t) {
                u32 a[1][PARTS][4];
#pragma unroll
                for (int part = 0; part < PARTS; ++part)
                    load_rows(a[0][part], words + (part * ROWS + 16 * t + g) * pitch + 8 * step + 2 * q, pitch);
                if constexpr (PARTS == 3) {  // tensor cores truncate: one K step per accumulator
                    float some[1][2][4] = {};
                    add_products(some, a, b);
#pragma unroll
                    for (int n = 0; n < 8; ++n) c[t][0][n / 4][n % 4] += some[0][n / 4][n % 4];
                } else {
                    add_products(c[t], a, b);
                }
            }
        }
    }
}

// Calls finish(row, column, four adjacent sums) for a group's accumulators.
template <int MT, class Finish>
__device__ __forceinline__ void each_four(const float (&c)[MT][1][2][4], int group, const Finish& finish) {
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 2 * MT; ++i) {
        const int t = i / 2, h = i % 2 * 2;
        finish(16 * t + 4 * h + g, A_WARP * group + 4 * q,
               float4{c[t][0][0][h], c[t][0][1][h], c[t][0][0][h + 1], c[t][0][1][h + 1]});
    }
}

// -- shared memory ---------------------------------------------------------------------------------------------------

// W: the first layer, then all layers after it. Offsets in 32-bit words.
template <int P, int MT_, u32 LOSS, class... W>
struct Room {
    static constexpr int PARTS = P, MT = MT_, ROWS = 16 * MT, L = sizeof...(W) - 1;
    static __device__ constexpr int at(int l) {
        const int all[] = {W::N...};
        return all[l];
    }
    static __device__ constexpr u32 code(int l) {
        const u32 all[] = {W::CODE...};
        return all[l];
    }
    static __device__ constexpr int terms(int l) { return at(l) + (l < L ? 1 : 0); }  // units and the bias 1
    // (PARTS, ROWS, pitch): split activations of layer l, then its gradients.
    static __device__ constexpr int words(int l) {
        int sum = 0;
        for (int i = 0; i < l; ++i) sum += PARTS * ROWS * word_pitch(terms(i));
        return sum;
    }
    // (ROWS, pitch): activations of layer l as floats; for the first layer, then its gradients.
    static __device__ constexpr int floats(int l) {
        int sum = words(L + 1);
        for (int i = 0; i < l; ++i) sum += ROWS * float_pitch(terms(i));
        return sum;
    }
    static constexpr int TILES = tiles_of(at(L)), STEPS = steps_of(at(L - 1) + 1);
    static constexpr int DEEP = STEPS < STREAM_WARPS ? STEPS : STREAM_WARPS;  // split-K warps of the output layer
    static constexpr int OUTPUTS = floats(L), OUT_PITCH = 36;  // (ROWS, pitch): outputs, then gradients
    // (LAST_ROWS, LAST_PITCH): the output layer's weights
    static constexpr int LAST = OUTPUTS + ROWS * OUT_PITCH, LAST_ROWS = 16 * steps_of(at(L));
    static constexpr int LAST_PITCH = weight_pitch(at(L - 1) + 1);
    static constexpr int SUMS = LAST + LAST_ROWS * LAST_PITCH, SUM_PITCH = sum_pitch(TILES);  // (DEEP, ROWS, pitch)
    static __device__ constexpr int bytes() { return 4 * (SUMS + DEEP * ROWS * SUM_PITCH); }
    using Rows = Targets<ROWS, STREAM_THREADS, LOSS, at(L), code(L)>;
};

// Stores four adjacent values of layer l, split.
template <class R, int l>
__device__ __forceinline__ void store_words(float* room, int row, int column, const float4& four) {
    float v[4] = {four.x, four.y, four.z, four.w};
    u32 made[R::PARTS][2];
    split_numbers(made, v);
    u32* const to = reinterpret_cast<u32*>(room) + R::words(l) + row * word_pitch(R::terms(l)) + column / 2;
#pragma unroll
    for (int part = 0; part < R::PARTS; ++part)
        *reinterpret_cast<uint2*>(to + part * R::ROWS * word_pitch(R::terms(l))) = {made[part][0], made[part][1]};
}

// Masks four adjacent values of layer l: the bias 1 after its units, then zeros.
template <class R, int l>
__device__ __forceinline__ float4 behind(const RowLayers& layers, const float4& four, int column) {
    if (R::at(l) % 4 == 0 && column < R::at(l)) return four;
    const float one = layers.of[l + 1].has_bias ? 1.0f : 0.0f;
    const auto of = [&](float v, int n) { return n < R::at(l) ? v : n == R::at(l) ? one : 0.0f; };
    return {of(four.x, column), of(four.y, column + 1), of(four.z, column + 2), of(four.w, column + 3)};
}

// Writes the bias 1 and zeros after the units of layers l and up.
template <class R, int l>
__device__ __forceinline__ void put_ones(const RowLayers& layers, float* room) {
    if constexpr (l < R::L) {
        constexpr int FIRST = R::at(l) / 4 * 4, COUNT = (16 * steps_of(R::terms(l)) - FIRST) / 4;
        for (int i = threadIdx.x; i < R::ROWS * COUNT; i += STREAM_THREADS) {
            const int column = FIRST + i % COUNT * 4;
            store_words<R, l>(room, i / COUNT, column, behind<R, l>(layers, {}, column));
        }
        put_ones<R, l + 1>(layers, room);
    }
}

// -- a step -----------------------------------------------------------------------------------------------------------

// Loads the first layer's activations.
template <class R>
__device__ __forceinline__ void bring_rows(const float* from, int stride, float* room, int there) {
    constexpr int FOURS = 4 * steps_of(R::terms(0)), AT_ONCE = 6;
    constexpr int ITEMS = (R::ROWS * FOURS + STREAM_THREADS - 1) / STREAM_THREADS;  // per thread
#pragma unroll 1
    for (int first = 0; first < ITEMS; first += AT_ONCE) {
        float4 found[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int item = (first + i) * STREAM_THREADS + threadIdx.x, row = item / FOURS, column = item % FOURS * 4;
            const float4* const at = reinterpret_cast<const float4*>(row_at(from, row, stride) + column);
            found[i] = row < there && column < stride ? __ldcg(at) : float4{0.0f, 0.0f, 0.0f, 0.0f};
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int item = (first + i) * STREAM_THREADS + threadIdx.x, row = item / FOURS, column = item % FOURS * 4;
            if (row >= R::ROWS) break;
            const float four[4] = {found[i].x, found[i].y, found[i].z, found[i].w};
            store_several(room + R::floats(0) + row * float_pitch(R::terms(0)) + column, four);
            store_words<R, 0>(room, row, column, found[i]);
        }
    }
}

// Forward pass of hidden layers l and up.
template <class R, int l>
__device__ __forceinline__ void go_forward(const Step& step, const RowLayers& layers, const TileRows<R::ROWS>& rows,
                                           float* room) {
    if constexpr (l < R::L) {
        constexpr int N = R::at(l), K = R::terms(l - 1);
        const RowLayer& layer = layers.of[l];
        const float* const w = step.mine(layers.memory[l].w);
        float* const a = step.mine(layers.memory[l].a) + static_cast<long long>(rows.first) * layer.stride;
        const int there = rows.there();
#pragma unroll 1
        for (int group = threadIdx.x / 32; A_WARP * group < N; group += STREAM_WARPS) {
            float c[R::MT][1][2][4];
            const AlongK<2> weights(w, layer.w_stride, A_WARP * group, N, layer.w_stride);
            const u32* const given = reinterpret_cast<const u32*>(room) + R::words(l - 1);
            multiply_rows<R::PARTS, R::MT, steps_of(K), false>(c, given, word_pitch(K), weights);
            each_four(c, group, [&](int row, int column, const float4& sum) {
                if (column >= N) return;
                const float4 made = activated<R::code(l)>(sum, layer.slope);
                const float four[4] = {made.x, made.y, made.z, made.w};
                store_several(room + R::floats(l) + row * float_pitch(R::terms(l)) + column, four);
                store_words<R, l>(room, row, column, behind<R, l>(layers, made, column));
                if (row < there) store_first(a + static_cast<long long>(row) * layer.stride + column, four, N - column);
            });
        }
        __syncthreads();
        go_forward<R, l + 1>(step, layers, rows, room);
    }
}

// Outputs of the last layer.
template <class R>
__device__ __forceinline__ void make_outputs(const RowLayer& layer, float* room) {
    constexpr int L = R::L, PITCH = word_pitch(R::at(L - 1) + 1);
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    const u32* const words = reinterpret_cast<const u32*>(room) + R::words(L - 1);
    if (warp < R::DEEP) {
#pragma unroll
        for (int t = 0; t < R::MT; ++t) {
            float sums[1][R::TILES][4] = {};
#pragma unroll 1
            for (int step = warp; step < R::STEPS; step += R::DEEP) {
                u32 a[1][R::PARTS][4], b[R::TILES][R::PARTS][2];
#pragma unroll
                for (int part = 0; part < R::PARTS; ++part)
                    load_rows(a[0][part], words + (part * R::ROWS + 16 * t + g) * PITCH + 8 * step + 2 * q, PITCH);
#pragma unroll
                for (int j = 0; j < R::TILES; ++j) {
                    float w[4];
                    load_several<false>(w, room + R::LAST + (8 * j + g) * R::LAST_PITCH + 16 * step + 4 * q);
                    split_numbers(b[j], w);
                }
                float some[1][R::TILES][4] = {};
                add_products(some, a, b);
#pragma unroll
                for (int n = 0; n < 4 * R::TILES; ++n) sums[0][n / 4][n % 4] += some[0][n / 4][n % 4];
            }
#pragma unroll
            for (int n = 0; n < 2 * R::TILES; ++n) {
                const float two[2] = {sums[0][n / 2][n % 2 * 2], sums[0][n / 2][n % 2 * 2 + 1]};
                const int row = warp * R::ROWS + 16 * t + n % 2 * 8 + g;
                store_several(room + R::SUMS + row * R::SUM_PITCH + n / 2 * 8 + 2 * q, two);
            }
        }
    }
    __syncthreads();
    constexpr int FOURS = 2 * R::TILES;
    for (int item = threadIdx.x; item < R::ROWS * FOURS; item += STREAM_THREADS) {
        const int row = item / FOURS, column = item % FOURS * 4;
        float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int deep = 0; deep < R::DEEP; ++deep) {
            const float4 more = load4(room + R::SUMS + (deep * R::ROWS + row) * R::SUM_PITCH + column);
            sum = {sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w};
        }
        const float4 made = activated<R::code(L)>(sum, layer.slope);
        const float four[4] = {made.x, made.y, made.z, made.w};
        store_several(room + R::OUTPUTS + row * R::OUT_PITCH + column, four);
    }
    __syncthreads();
}

// Backward pass from layer l to the first.
template <class R, int l>
__device__ __forceinline__ void go_back(const Step& step, const RowLayers& layers, const TileRows<R::ROWS>& rows,
                                        float* room) {
    constexpr int D = R::at(l - 1), N = R::at(l), PITCH = word_pitch(R::terms(l));
    constexpr bool IS_LAST = l == R::L;
    const RowLayer &layer = layers.of[l], &before = layers.of[l - 1];
    const float* const w = IS_LAST ? room + R::LAST : step.mine(layers.memory[l].w);
    float* const dz = step.mine(layers.memory[l - 1].dz) + static_cast<long long>(rows.first) * before.stride;
    const int there = rows.there();
#pragma unroll 1
    for (int group = threadIdx.x / 32; A_WARP * group < D; group += STREAM_WARPS) {
        float c[R::MT][1][2][4];
        const int stride = IS_LAST ? R::LAST_PITCH : layer.w_stride;
        const AcrossK<2> weights(w, stride, A_WARP * group, stride, N);
        const u32* const given = reinterpret_cast<const u32*>(room) + R::words(l);
        multiply_rows<R::PARTS, R::MT, steps_of(N), IS_LAST>(c, given, PITCH, weights);
        each_four(c, group, [&](int row, int column, const float4& sum) {
            if (column >= D) return;
            float* const at = room + R::floats(l - 1) + row * float_pitch(D + 1) + column;
            const float4 made = through<R::code(l - 1)>(before.slope, sum, load4(at));
            const float four[4] = {made.x, made.y, made.z, made.w};
            if constexpr (l > 1) {
                store_words<R, l - 1>(room, row, column, made);
                if (row < there) store_first(dz + static_cast<long long>(row) * before.stride + column, four, D - column);
            } else {
                store_several(at, four);
            }
        });
    }
    __syncthreads();
    if constexpr (l > 1) go_back<R, l - 1>(step, layers, rows, room);
}

// W: the first layer, already computed, then all layers after it. Writes dz of all layers, the first one's as dz_parts,
// and the hidden activations.
template <int PARTS, int MT, u32 LOSS, class... W>
__global__ void __launch_bounds__(STREAM_THREADS, 1)
train_stream(const __grid_constant__ Step step, const __grid_constant__ RowLayers layers, uint4* dz_parts) {
    using R = Room<PARTS, MT, LOSS, W...>;
    constexpr int L = R::L;
    extern __shared__ float4 whole[];
    float* const room = reinterpret_cast<float*>(whole);
    touch_arguments(step), touch_arguments(layers);
    const float* const last = step.mine(layers.memory[L].w);
    const int size = step.size(), tiles = (round_up(size, 32) + R::ROWS - 1) / R::ROWS;
    if (static_cast<int>(blockIdx.x) >= tiles) {
        wait_for_step_before();
        return;
    }
    // Weights are valid before the wait: the previous launch waited for their update.
    for (int i = threadIdx.x; i < R::LAST_ROWS * 4 * R::STEPS; i += STREAM_THREADS) {
        const int row = i / (4 * R::STEPS), column = i % (4 * R::STEPS) * 4, stride = layers.of[L].w_stride;
        const bool is_there = row < R::at(L) && column < stride;
        copy_async(room + R::LAST + row * R::LAST_PITCH + column, last + (is_there ? row * stride + column : 0), is_there);
    }
    close_stage();
    put_ones<R, 1>(layers, room);
#pragma unroll 1
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const TileRows<R::ROWS> rows = {tile * R::ROWS, size};
        typename R::Rows targets;
        targets.find(step, layers, rows);
        if (tile == static_cast<int>(blockIdx.x)) wait_for_step_before();
        const int stride = layers.of[0].stride;
        bring_rows<R>(row_at(step.mine(layers.memory[0].a), rows.first, stride), stride, room, rows.there());
        await_stages<0>();
        __syncthreads();
        go_forward<R, 1>(step, layers, rows, room);
        make_outputs<R>(layers.of[L], room);
        float* const outputs = room + R::OUTPUTS;
#pragma unroll
        for (int i = 0; i < R::Rows::TURNS; ++i)
            targets.to_gradient(i, layers, layers.of[L].slope, outputs + R::Rows::row(i) * R::OUT_PITCH);
        __syncthreads();
        constexpr int FOURS = 4 * steps_of(R::at(L));
        for (int item = threadIdx.x; item < R::ROWS * FOURS; item += STREAM_THREADS) {
            const float* const from = outputs + item / FOURS * R::OUT_PITCH;
            const int n = item % FOURS * 4;
            const auto of = [&](int n) { return n < R::at(L) ? from[n] : 0.0f; };
            store_words<R, L>(room, item / FOURS, n, {of(n), of(n + 1), of(n + 2), of(n + 3)});
        }
        targets.store(step, layers, rows, layers.memory[L].dz, layers.of[L].stride, outputs, R::OUT_PITCH);
        __syncthreads();
        go_back<R, L>(step, layers, rows, room);
        const int stages = static_cast<int>((step.batch + 63) / 64);
        store_parts<PARTS, R::at(0), R::ROWS, STREAM_THREADS>(step.mine(dz_parts), room + R::floats(0),
                                                              float_pitch(R::terms(0)), rows.first, rows.there(), stages,
                                                              threadIdx.x);
        __syncthreads();  // the next rows overwrite what was read
    }
}
