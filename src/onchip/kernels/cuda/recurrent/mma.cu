// recurrent/mma.cu: LSTM, GRU or RNN over many sequences on the tensor cores, all time steps in one launch; with F > 0
// the input gemm is fused.
//
// Idea    A block, or a cluster of BLOCKS, steps through 16 * tiles sequences of one direction. A warp owns 8 units and
//         holds their recurrent weights in registers as mma fragments for the whole launch. A step loads only states
//         (ldmatrix, 16 sequences per tile), so a lane gets all gates of 2 units of 2 sequences and computes their next
//         states. These go to the other of two buffers in every block of the cluster (DSMEM); a barrier ends the step.
//         cp.async loads the next step's input: gate pre-activations (F = 0), or F features with W in shared memory.
// Floor   2 G H (H + F) flop per sequence, step and direction, 3x in fp32 (3xTF32): 4,096 sequences, 49 steps, LSTM,
//         H = 128, fp16: 26.3 Gflop = 27 us; gates 206 MB = 43 us, or 10 features 4 MB; 129 M activations = 35 us.
// Order   Input (bias, features), then units, STEP per mma; in fp32, partial sums of 32. Independent of the tiling.
// Layout  States, y and x as in recurrent/simt.cu, or x (N, S, F). R, W (D, BLOCKS, WARPS, G, k steps, lanes):
//         fragments of 2 registers; bias (D, BLOCKS, G, 8 WARPS), inner_bias (D, BLOCKS * 8 WARPS).
// Limits  Registers of R per lane: 64 with 16 warps, 128 with 8; H <= 8 * WARPS * BLOCKS; float32, float16, bfloat16;
//         BLOCKS > 1 from sm_90 on, else sm_80 up. Shared: LSTM, H = 128, fp16: 50,176 B per tile (mma.py).
#include "mma/cluster.cuh"
#include "mma/cp_async.cuh"
#include "mma/fragments.cuh"
#include "recurrent/cells.cuh"

constexpr int TILE = 16, WARP_UNITS = 8;  // sequences and units per mma

template <class Cell_, class P_, class T_, int H_, int F_, int WARPS_>
struct Recurrence {
    using Cell = Cell_;
    using P = P_;
    using T = T_;
    static constexpr int H = H_, F = F_, WARPS = WARPS_, SIZE = sizeof(T);
    static constexpr bool RESETS_FIRST = is_same<Cell, GruBefore>;
    static constexpr int G = GATES<Cell>, THREADS = 32 * WARPS, UNITS = WARP_UNITS * WARPS;  // per block
    static constexpr int STEPS = (H + P::STEP - 1) / P::STEP, X_STEPS = (F + P::STEP - 1) / P::STEP;
    static constexpr int WORDS = 2 * G * STEPS, BLOCKS_AT_A_TIME = (WORDS <= 64 ? 16 : 8) / WARPS;
    static constexpr int BUFFERS = RESETS_FIRST ? 3 : 2;
    static constexpr int SAVED = RESETS_FIRST ? 2 : G == 1 ? 0 : 1;  // float32 values per unit: cell or state, then z
    // Row pitches are odd multiples of 16 B (ldmatrix) or of 8 gate elements: 8 rows have no bank conflicts.
    static constexpr int LINE = 32 * STEPS + 16, X_LINE = F ? 32 * X_STEPS + 16 : WARP_UNITS * SIZE * (G * WARPS | 1);
    static constexpr int RUN = F ? F : H, RUNS = F ? 1 : G;  // contiguous elements of a step's input
    static constexpr int WIDTH = RUN * SIZE % 16 == 0 ? 16 : RUN * SIZE % 8 == 0 ? 8 : RUN * SIZE % 4 == 0 ? 4 : 2;
};

// TF32 high and low of a weight, recomputed per use. volatile: else the compiler keeps both and runs out of registers.
__device__ __forceinline__ void split(Fragment<Fp32, 2>& fragment, int i, float v) {
    asm volatile("cvt.rna.tf32.f32 %0, %1;" : "=r"(fragment.splits[0][i]) : "f"(v));
    fragment.splits[1][i] = Tf32::word(v - __uint_as_float(fragment.splits[0][i]));
}

// sums[j] += 16 rows times the weights of gate j of the warp's units.
// at     the lane's ldmatrix row at k step 0; ROUNDS: elements there are not rounded to TF32 yet
// fragment  (j, k) -> the lane's fragment of gate j, k step k
template <class P, int STEPS, bool ROUNDS, int COUNT, class Weights>
__device__ __forceinline__ void add_gates(float (&sums)[COUNT][4], const char* at, const Weights& fragment) {
    float part[COUNT][4] = {};
#pragma unroll
    for (int k = 0; k < STEPS; ++k) {
        u32 read[4];
        ldmatrix_x4(read, at + 32 * k);
        Fragment<P, 4> rows;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if constexpr (is_same<P, Fp32> || (ROUNDS && is_same<P, Tf32>)) rows.set(i, __uint_as_float(read[i]));
            else rows.splits[0][i] = read[i];
        }
#pragma unroll
        for (int j = 0; j < COUNT; ++j) {
            const uint2 two = fragment(j, k);
            Fragment<P, 2> weights;
            if constexpr (is_same<P, Fp32>) {
                split(weights, 0, __uint_as_float(two.x)), split(weights, 1, __uint_as_float(two.y));
                multiply<P>(part[j], rows, weights);
                end_partial_sum<P>(sums[j], part[j], k, STEPS);
            } else {
                weights.splits[0][0] = two.x, weights.splits[0][1] = two.y;
                multiply<P>(sums[j], rows, weights);
            }
        }
    }
}

// Input contribution to gates FIRST to FIRST + COUNT - 1 of a tile: loaded, or computed from features.
// at          the lane's row of the tile: gates from its first unit on, or features at k step 0
// W, biases   F > 0: the lane's fragments, and its units' biases
template <class Shape, int FIRST, int COUNT>
__device__ __forceinline__ void load_gates(float (&v)[COUNT][4], const char* at, const uint2* W, const float* biases) {
#pragma unroll
    for (int i = 0; i < 2 * COUNT; ++i) {
        const int j = i / 2, half = i % 2, first = (FIRST + j) * Shape::UNITS;
        float2 two;
        if constexpr (Shape::F > 0) two = load2(biases + first);
        else two = load2(reinterpret_cast<const typename Shape::T*>(at + 8 * half * Shape::X_LINE) + first);
        v[j][2 * half] = two.x, v[j][2 * half + 1] = two.y;
    }
    if constexpr (Shape::F > 0)
        add_gates<typename Shape::P, Shape::X_STEPS, true>(
            v, at, [&](int j, int k) { return W[((FIRST + j) * Shape::X_STEPS + k) * 32]; });
}

// Stores two adjacent states, rounded to the mma operand type, in every block of the cluster.
template <class P, int BLOCKS>
__device__ __forceinline__ void store_states(char* at, float first, float second) {
    u32 words[2 / P::PER_WORD];
    if constexpr (P::PER_WORD == 2) words[0] = pack<typename P::Element>(first, second);
    else words[0] = P::word(first), words[1] = P::word(second);
#pragma unroll
    for (int i = 0; i < 2 / P::PER_WORD; ++i) {
        u32* const to = reinterpret_cast<u32*>(at) + i;
        if constexpr (BLOCKS == 1) {
            *to = words[i];
        } else {
#pragma unroll
            for (unsigned block = 0; block < BLOCKS; ++block)
                dsmem_store(reinterpret_cast<float*>(to), block, __uint_as_float(words[i]));
        }
    }
}

// W, bias    input weights for F > 0, or nullptr
// inside     bias inside the reset of a GruAfter's candidate gate
// tiles      of 16 sequences, per block
// backwards  direction 0 runs from the last step to the first; direction 1 always does
// output     0: every step, 1: the last state, 2: the last cell
template <class Cell, class P, class T, int H, int F, int WARPS, int BLOCKS>
__global__ void __launch_bounds__(32 * WARPS, (Recurrence<Cell, P, T, H, F, WARPS>::BLOCKS_AT_A_TIME))
    recurrent_mma(const T* x, const uint2* R, const float* inner_bias, const T* first_h, const T* first_c, T* y,
                  const uint2* W, const float* bias, long long N, long long S, unsigned D, unsigned tiles,
                  unsigned backwards, unsigned output) {
    using Shape = Recurrence<Cell, P, T, H, F, WARPS>;
    constexpr int G = Shape::G, STEPS = Shape::STEPS, X_STEPS = Shape::X_STEPS, THREADS = Shape::THREADS;
    constexpr int UNITS = Shape::UNITS, LINE = Shape::LINE, X_LINE = Shape::X_LINE, SAVED = Shape::SAVED,
                  SIZE = Shape::SIZE;
    constexpr bool IS_FAST = P::PER_WORD == 2, IS_LSTM = is_same<Cell, Lstm>, RESETS_LAST = is_same<Cell, GruAfter>;
    static_assert(H <= UNITS * BLOCKS, "every unit needs a warp");
    static_assert(F == 0 || is_same<T, typename P::Element>, "features must have the type that is multiplied");
    extern __shared__ uint4 smem[];
    const int rows = TILE * tiles, buffer = rows * LINE;  // bytes
    char* const states = reinterpret_cast<char*>(smem);   // [BUFFERS][rows] lines
    char* const inputs = states + Shape::BUFFERS * buffer;  // [2][rows] lines
    float4* const saved = reinterpret_cast<float4*>(inputs + 2 * rows * X_LINE);  // [tiles][SAVED][THREADS]
    uint2* const fragments = reinterpret_cast<uint2*>(saved + tiles * SAVED * THREADS);  // [WARPS][G][X_STEPS][32]
    float* const smem_bias = reinterpret_cast<float*>(fragments + (F ? WARPS * G * X_STEPS * 32 : 0));  // [G][UNITS]

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const int rank = BLOCKS > 1 ? cluster_rank() : 0, first_unit = rank * UNITS;       // the block's first unit
    const int block_unit = WARP_UNITS * warp + 2 * q, unit = first_unit + block_unit;  // the lane's first unit
    const unsigned d = blockIdx.x / BLOCKS % D;
    const long long first = static_cast<long long>(blockIdx.x / BLOCKS / D) * rows;
    const int valid_rows = N - first < rows ? static_cast<int>(N - first) : rows, used = (valid_rows + TILE - 1) / TILE;
    const bool is_reverse = backwards || d == 1, stores_all = output == 0;
    const long long start = is_reverse ? S - 1 : 0, sign = is_reverse ? -1 : 1;
    const long long x_step = F ? F : static_cast<long long>(D) * G * H, x_row = S * x_step;
    const long long y_row = (stores_all ? S : 1) * D * H;
    const long long part = static_cast<long long>(d) * BLOCKS + rank;  // this block's slice of the weights
    x += first * x_row + start * x_step + (F ? 0 : d * G * H + first_unit);
    y += first * y_row + ((stores_all ? start : 0) * D + d) * H + unit;

    u32 weights[G][STEPS][2];
    R += (part * WARPS + warp) * G * STEPS * 32 + lane;
#pragma unroll
    for (int i = 0; i < G * STEPS; ++i) {
        const uint2 two = R[i * 32];
        weights[i / STEPS][i % STEPS][0] = two.x, weights[i / STEPS][i % STEPS][1] = two.y;
    }
    float2 inner = {0.0f, 0.0f};  // bias of a GruAfter's candidate gate
    if (RESETS_LAST && inner_bias != nullptr) inner = load2(inner_bias + part * UNITS + block_unit);

    const auto sync = [] {
        if constexpr (BLOCKS > 1) cluster_sync();
        else __syncthreads();
    };
    const auto load_step = [&](int stage) {  // copies the step at x to shared memory
        constexpr int WIDTH = Shape::WIDTH, ELEMENTS = WIDTH / SIZE, COPIES = (F ? F : UNITS) / ELEMENTS;  // per run
        for (int i = threadIdx.x; i < used * TILE * Shape::RUNS * COPIES; i += THREADS) {
            const int row = i / (Shape::RUNS * COPIES), run = i / COPIES % Shape::RUNS, at = i % COPIES * ELEMENTS;
            const bool is_valid = row < valid_rows && (F || first_unit + at < H);
            const T* const from = is_valid ? x + row * x_row + run * H + at : x;
            char* const to = inputs + (stage * rows + row) * X_LINE + (run * UNITS + at) * SIZE;
            if constexpr (WIDTH == 2) *reinterpret_cast<T*>(to) = is_valid ? *from : T{};  // cp.async needs 4 B
            else cp_async<WIDTH>(to, from, is_valid ? WIDTH : 0);
        }
        cp_async_commit();
        x += sign * x_step;
    };
    const auto initial = [&](const T* from, int row, int u) {
        return from != nullptr && row < valid_rows && u < H ? to_float(from[((first + row) * D + d) * H + u]) : 0.0f;
    };

    load_step(0);
    for (int i = threadIdx.x; i < rows * STEPS * P::STEP / 2; i += THREADS) {
        const int row = i / (STEPS * P::STEP / 2), u = i % (STEPS * P::STEP / 2) * 2;
        char* const at = states + row * LINE + u / P::PER_WORD * 4;
        store_states<P, 1>(at, initial(first_h, row, u), initial(first_h, row, u + 1));
#pragma unroll
        for (int j = 1; j < Shape::BUFFERS; ++j) store_states<P, 1>(at + j * buffer, 0.0f, 0.0f);
    }
    for (int t = 0; t < used && SAVED > 0; ++t) {
        const T* const from = IS_LSTM ? first_c : first_h;
        const int row = TILE * t + g;
        saved[t * SAVED * THREADS + threadIdx.x] = {initial(from, row, unit), initial(from, row, unit + 1),
                                                    initial(from, row + 8, unit), initial(from, row + 8, unit + 1)};
    }
    if constexpr (F > 0) {
        constexpr int PADDING = X_STEPS * P::STEP - F;  // zero padding up to a whole k step
        for (int i = threadIdx.x; i < 2 * rows * PADDING; i += THREADS)
            reinterpret_cast<T*>(inputs + i / max(PADDING, 1) * X_LINE)[F + i % max(PADDING, 1)] = T{};
        W += part * WARPS * G * X_STEPS * 32;
        for (int i = threadIdx.x; i < WARPS * G * X_STEPS * 32; i += THREADS) fragments[i] = W[i];
        for (int i = threadIdx.x; i < G * UNITS; i += THREADS)
            smem_bias[i] = bias != nullptr ? bias[part * G * UNITS + i] : 0.0f;
    }
    const uint2* const w_fragments = fragments + warp * G * X_STEPS * 32 + lane;
    const float* const lane_bias = smem_bias + block_unit;

    for (long long step = 0; step < S; ++step) {
        const int stage = step % 2;
        cp_async_wait<0>();
        sync();  // states and inputs have arrived; the previous step's reads are done
        if (step + 1 < S) load_step(stage ^ 1);
        const char* const state_in = states + stage * buffer + lane % 16 * LINE + lane / 16 * 16;
        const int next = (stage ^ 1) * buffer + g * LINE + unit / P::PER_WORD * 4;
        const int line = stage * rows + (F ? lane % 16 : g), column = F ? lane / 16 * 16 : block_unit * SIZE;
        const char* const input = inputs + line * X_LINE + column;
        if constexpr (Shape::RESETS_FIRST) {
            char* const reset = states + 2 * buffer + g * LINE + unit / P::PER_WORD * 4;
#pragma unroll 1
            for (int t = 0; t < used; ++t) {
                float v[2][4];
                load_gates<Shape, 0>(v, input + TILE * t * X_LINE, w_fragments, lane_bias);
                add_gates<P, STEPS, false>(v, state_in + TILE * t * LINE,
                                           [&](int j, int k) { return uint2{weights[j][k][0], weights[j][k][1]}; });
                float4* const at = saved + 2 * t * THREADS + threadIdx.x;
                const float4 state = at[0];
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    v[0][i] = sigmoid_of<IS_FAST>(v[0][i]), v[1][i] = sigmoid_of<IS_FAST>(v[1][i]);
                at[THREADS] = {v[0][0], v[0][1], v[0][2], v[0][3]};
                if (unit < H) {
                    const float right[2] = {v[1][1] * state.y, v[1][3] * state.w};
                    store_states<P, BLOCKS>(reset + TILE * t * LINE, v[1][0] * state.x, unit + 1 < H ? right[0] : 0.0f);
                    store_states<P, BLOCKS>(reset + (TILE * t + 8) * LINE, v[1][2] * state.z,
                                            unit + 1 < H ? right[1] : 0.0f);
                }
            }
            sync();
        }
#pragma unroll 1
        for (int t = 0; t < used; ++t) {
            float4* const at = saved + t * SAVED * THREADS + threadIdx.x;
            float cell[4] = {}, next_h[4];  // cells; states of a GRU
            if constexpr (Shape::RESETS_FIRST) {
                float v[1][4];
                load_gates<Shape, 2>(v, input + TILE * t * X_LINE, w_fragments, lane_bias);
                add_gates<P, STEPS, false>(v, state_in + (2 - stage) * buffer + TILE * t * LINE,
                                           [&](int j, int k) { return uint2{weights[2][k][0], weights[2][k][1]}; });
                const float4 old = at[0], zs = at[THREADS];
                const float state[4] = {old.x, old.y, old.z, old.w}, z[4] = {zs.x, zs.y, zs.z, zs.w};
#pragma unroll
                for (int i = 0; i < 4; ++i) next_h[i] = fmaf(z[i], state[i], (1.0f - z[i]) * tanh_of<IS_FAST>(v[0][i]));
            } else {
                float v[G][4], x_candidate[4] = {};  // input part of a GruAfter's candidate gate
                load_gates<Shape, 0>(v, input + TILE * t * X_LINE, w_fragments, lane_bias);
                if constexpr (RESETS_LAST) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) x_candidate[i] = v[2][i], v[2][i] = i % 2 ? inner.y : inner.x;
                }
                add_gates<P, STEPS, false>(v, state_in + TILE * t * LINE,
                                           [&](int j, int k) { return uint2{weights[j][k][0], weights[j][k][1]}; });
                if constexpr (SAVED > 0) {
                    const float4 old = *at;
                    cell[0] = old.x, cell[1] = old.y, cell[2] = old.z, cell[3] = old.w;
                }
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float x_gates[G] = {}, h_gates[G];
#pragma unroll
                    for (int j = 0; j < G; ++j) h_gates[j] = v[j][i];
                    if constexpr (RESETS_LAST) x_gates[2] = x_candidate[i];
                    next_h[i] = next_state<Cell, IS_FAST>(x_gates, h_gates, 0.0f, cell[i], cell[i]);
                }
            }
            if constexpr (IS_LSTM) *at = {cell[0], cell[1], cell[2], cell[3]};
            else if constexpr (SAVED > 0) *at = {next_h[0], next_h[1], next_h[2], next_h[3]};
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = TILE * t + 8 * half + g;
                if (unit >= H) continue;
                store_states<P, BLOCKS>(states + next + (TILE * t + 8 * half) * LINE, next_h[2 * half],
                                        unit + 1 < H ? next_h[2 * half + 1] : 0.0f);
                if (row >= valid_rows || (!stores_all && step + 1 < S)) continue;
                alignas(8) float two[2] = {next_h[2 * half], next_h[2 * half + 1]};
                if (IS_LSTM && output == 2) two[0] = cell[2 * half], two[1] = cell[2 * half + 1];
                T* const to = y + row * y_row;
                if constexpr (H % 2 == 0) {
                    store_vector(to, two);
                } else {
                    store1(to, two[0]);
                    if (unit + 1 < H) store1(to + 1, two[1]);
                }
            }
        }
        if (stores_all) y += sign * static_cast<long long>(D) * H;
    }
    if constexpr (BLOCKS > 1) cluster_sync();  // other blocks may still store here
}
