// train/resident/step.cuh: one step of train/resident/resident.cu: arguments, row loads, forward, loss, backward.
#pragma once

#include "train/phases.cuh"
#include "train/resident/weights.cuh"

template <int L>
struct ResidentArgs {
#ifdef PHASE_CLOCKS
    u32* phase_clocks;
#endif
    const void* x;
    const void* targets;        // (n,) int64 classes, or (n, outputs) float32
    const long long* order;     // (rows,) row indices, batch by batch
    const StepValues* per_step_values;  // (steps,)
    const long long* progress;  // the launch's first step, and the end of its rows
    double* step_losses;        // (steps, groups)
    long long* step_correct;    // (steps, groups)
    u32* status;                // [0] exchange rounds of earlier launches, [1] nonzero after a timeout
    float* partner_buffer;      // of Partners
    LayerState layers[L];
    long long batch, x_stride;  // in rows; in elements
    Networks networks;
    float scale;
    u32 deadline_ms;
    LayerFacts facts[L];

    template <class T>
    __device__ __forceinline__ T* local(T* pointer) const {
        return networks.local(pointer);
    }
    __device__ __forceinline__ LayerState state(int layer) const {
        const LayerState& pointers = layers[layer - 1];
        return {local(pointers.w), local(pointers.mean), local(pointers.square), local(pointers.col_mean),
                local(pointers.col_square), local(pointers.forward), local(pointers.backward)};
    }
};

// Codes of the loss and of each layer's activation, 4 bits each, the loss first.
template <unsigned long long CODES>
struct Codes {
    static constexpr u32 LOSS = CODES & 15;
    static __device__ constexpr u32 code(int layer) { return CODES >> 4 * layer & 15; }
};

// A group's rows of a step, at most ROWS.
template <int ROWS>
struct StepRows {
    long long first;
    int rows;

    // end: of the launch's rows in the order
    __device__ __forceinline__ StepRows(long long step, long long batch, long long end, int group) {
        first = step * batch + group * ROWS;
        long long remaining = batch - group * ROWS;
        if (remaining > end - first) remaining = end - first;
        rows = static_cast<int>(remaining < 0 ? 0 : remaining < ROWS ? remaining : ROWS);
    }
};

// The next step's rows, in flight in registers. CTA_THREADS / ROWS adjacent threads load a row.
template <class X, class Net, int ROWS, int BLOCKS>
struct RowPrefetch {
    using R = SharedLayout<X, Net, ROWS, BLOCKS>;
    static constexpr int PER_VECTOR = 16 / sizeof(X), ROW_VECTORS = (Net::at(0) + PER_VECTOR - 1) / PER_VECTOR;
    static constexpr int LANES = CTA_THREADS / ROWS, COUNT = (ROW_VECTORS + LANES - 1) / LANES;
    uint4 v[COUNT];

    __device__ __forceinline__ void fetch(const void* x, long long stride, const u32* ids, int rows) {
        const int row = threadIdx.x / LANES, lane = threadIdx.x % LANES;
        const X* const from = static_cast<const X*>(x) + ids[row] * stride + lane * PER_VECTOR;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            v[i] = {0, 0, 0, 0};
            if (row < rows && lane + i * LANES < ROW_VECTORS)
                v[i] = __ldcg(reinterpret_cast<const uint4*>(from + i * LANES * PER_VECTOR));
        }
    }
    __device__ __forceinline__ void store(float* smem) const {
        const int row = threadIdx.x / LANES, lane = threadIdx.x % LANES;
        X* const to = reinterpret_cast<X*>(smem) + row * R::X_PITCH + lane * PER_VECTOR;  // 8 B aligned
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            if (lane + i * LANES >= ROW_VECTORS) break;
            uint2* const at = reinterpret_cast<uint2*>(to + i * LANES * PER_VECTOR);
            at[0] = {v[i].x, v[i].y};
            at[1] = {v[i].z, v[i].w};
        }
    }
};

// Replaces outputs z of ROWS rows by their gradients; LANES lanes share a row, and element i of a lane is column(i) of
// N. All lanes get losses and correct predictions, 0 for rows without counts. Rows are interleaved to hide latency.
template <int LANES, int N, u32 LOSS, u32 CODE, int ROWS, int PER_LANE, class Column>
__device__ __forceinline__ void compute_loss(float (&z)[ROWS][PER_LANE], const Column& column,
                                             const bool (&counts)[ROWS], float slope,
                                             const float (&target)[ROWS][PER_LANE], const int (&truth)[ROWS],
                                             float (&loss)[ROWS], int (&correct)[ROWS]) {
    if constexpr (LOSS == CROSS_ENTROPY) {
        float top[ROWS], exp_sum[ROWS], at_truth[ROWS];  // at_truth: nonzero in one lane
        int best[ROWS];
#pragma unroll
        for (int h = 0; h < ROWS; ++h) {
            top[h] = __uint_as_float(0xff800000u), exp_sum[h] = at_truth[h] = 0.0f, best[h] = N;
#pragma unroll
            for (int i = 0; i < PER_LANE; ++i)
                if (column(i) < N) top[h] = fmaxf(top[h], z[h][i]);
        }
#pragma unroll
        for (int mask = LANES / 2; mask > 0; mask /= 2)
#pragma unroll
            for (int h = 0; h < ROWS; ++h) top[h] = fmaxf(top[h], __shfl_xor_sync(~0u, top[h], mask));
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i)
#pragma unroll
            for (int h = 0; h < ROWS; ++h) {
                const float shifted = z[h][i] - top[h];
                z[h][i] = column(i) < N ? expf(shifted) : 0.0f;
                exp_sum[h] += z[h][i];
                if (column(i) == truth[h]) at_truth[h] = shifted;
                if (shifted == 0.0f && column(i) < best[h]) best[h] = column(i);
            }
#pragma unroll
        for (int mask = LANES / 2; mask > 0; mask /= 2)
#pragma unroll
            for (int h = 0; h < ROWS; ++h) {
                exp_sum[h] += __shfl_xor_sync(~0u, exp_sum[h], mask);
                at_truth[h] += __shfl_xor_sync(~0u, at_truth[h], mask);
                best[h] = min(best[h], __shfl_xor_sync(~0u, best[h], mask));
            }
#pragma unroll
        for (int h = 0; h < ROWS; ++h) {
            // exp_sum is in [1, N]: a division would branch for special cases.
            float scale;
            asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(scale) : "f"(exp_sum[h]));
            scale = fmaf(scale, fmaf(-exp_sum[h], scale, 1.0f), scale);
#pragma unroll
            for (int i = 0; i < PER_LANE; ++i) z[h][i] = z[h][i] * scale - (column(i) == truth[h] ? 1.0f : 0.0f);
            loss[h] = logf(exp_sum[h]) - at_truth[h];
            correct[h] = best[h] == truth[h];
        }
    } else {
#pragma unroll
        for (int h = 0; h < ROWS; ++h) {
            loss[h] = 0.0f, correct[h] = 0;
#pragma unroll
            for (int i = 0; i < PER_LANE; ++i) {
                const float difference = z[h][i] - target[h][i];
                if (column(i) < N) loss[h] = fmaf(difference, difference, loss[h]);
                z[h][i] = column(i) < N ? act_grad(CODE, slope, difference, z[h][i]) : 0.0f;
            }
            loss[h] = reduce_lanes<Sum, LANES>(loss[h]) * (LOSS == HALF_SSE ? 0.5f : 1.0f / N);
        }
    }
#pragma unroll
    for (int h = 0; h < ROWS; ++h) {
        if (!counts[h]) loss[h] = 0.0f, correct[h] = 0;
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) z[h][i] = counts[h] ? z[h][i] : 0.0f;
    }
}

// ORDER_BLOCKS: BLOCKS of a single network; it sets the reduction order for any BLOCKS.
template <class P, class X, class Net, class K, int ROWS, int BLOCKS, int ORDER, u32 OPTIMISER>
struct BlockTrainer {
    using R = SharedLayout<X, Net, ROWS, BLOCKS>;
    static constexpr int L = Net::LAYERS, RT = ROWS / 16;
    static constexpr int LANES = 8, TARGETS = (Net::at(L) + LANES - 1) / LANES;  // per row; per lane
    const ResidentArgs<L>& args;
    float* const smem;
    int group, block;
    u32 round;  // counted across launches

    // Exchange buffer of this group.
    template <int SENT_ROWS, int TILES>
    __device__ __forceinline__ Exchange exchange(float* at, u32 exchange_round) const {
        return {at + static_cast<long long>(group) * 2 * TILES * 8 * SENT_ROWS, exchange_round};
    }

    // First owned unit of hidden layer l; 0 (a valid address) if the block owns none.
    template <int l>
    __device__ __forceinline__ int first_unit() const {
        const int first = block * 8 * R::owned(l);
        return first < Net::at(l) ? first : 0;
    }

    // Input of layer l, and its row pitch.
    template <int l>
    __device__ __forceinline__ auto input() const {
        if constexpr (l == 1) return reinterpret_cast<const X*>(smem);
        else return static_cast<const float*>(smem + R::values(l - 1));
    }
    template <int l>
    static constexpr int INPUT_PITCH = l == 1 ? R::X_PITCH : R::pitch(l - 1);

    // Layers l to L - 1: computes owned units, then receives all. Returns false on timeout.
    template <int l>
    __device__ __forceinline__ bool forward() const {
        if constexpr (l < L) {
            constexpr int OWNED = R::owned(l), CHUNKS = round_up(Net::at(l - 1), CHUNK) / CHUNK, TILES = R::tiles(l);
            constexpr int CAPACITY = ROWS * R::pitch(l) / (RT * 128), SPLIT_K = column_split_k(CHUNKS, CAPACITY);
            const LayerFacts& facts = args.facts[l - 1];
            const Exchange exchange = this->exchange<ROWS, TILES>(args.state(l).forward, round);
            const float scale = l == 1 ? args.scale : 1.0f;
            const float* const biases = smem + R::biases(l);
            const auto finish = [&](int row, int unit, float sum) {
                const int n = block * 8 * OWNED + unit;
                if (n >= 8 * TILES) return;
                const float result = activate<K::code(l)>(fmaf(scale, sum, biases[unit]), __uint_as_float(facts.slope));
                exchange.send<ROWS, TILES>(n, row, n < Net::at(l) ? result : 0.0f);
                if constexpr (l == L - 1) smem[R::OWNED + row * R::owned_pitch(l) + unit] = result;
            };
            multiply_columns<P, RT, OWNED, SPLIT_K, CHUNKS, CAPACITY / SPLIT_K>(
                input<l>(), INPUT_PITCH<l>, smem + R::weights(l), R::pitch(l - 1), smem + R::values(l), finish);
            __syncthreads();
            if constexpr (l == L - 1) return true;
            change_phase(args, Phase::FORWARD, Phase::WAIT_FOR_ACTIVATIONS);
            const bool arrived = exchange.receive<ROWS, TILES>(smem + R::values(l), R::pitch(l), args.deadline_ms);
            if (__syncthreads_or(!arrived)) return false;
            change_phase(args, Phase::WAIT_FOR_ACTIVATIONS, Phase::FORWARD);
            return forward<l + 1>();
        } else {
            return true;
        }
    }

    // Output layer, loss, and gradients of outputs and last hidden layer: HEAD_ROWS rows per block, broadcast to all.
    // has_new_weights: first receives the output layer's updated weights from their owners.
    // From WAIT_FOR_ACTIVATIONS to WAIT_FOR_GRADIENTS.
    __device__ __forceinline__ bool head(int rows, bool has_new_weights, const float (&target)[1][TARGETS],
                                         const int (&truth)[1]) const {
        constexpr int HEAD = R::HEAD_ROWS, D = Net::at(L - 1), N = Net::at(L), TILES = R::tiles(L - 1);
        constexpr int PITCH = R::pitch(L - 1), OUT = R::pitch(L);
        float *const activations = smem + R::OUTPUTS, *const outputs = activations + HEAD * PITCH;
        const float *const weights = smem + R::weights(L), *const biases = smem + R::biases(L);
        const float slope = __uint_as_float(args.facts[L - 1].slope),
            prev_slope = __uint_as_float(args.facts[L - 2].slope);
        const Exchange values = exchange<ROWS, TILES>(args.state(L - 1).forward, round);
        const Exchange gradients = exchange<ROWS, TILES>(args.state(L - 1).backward, round);
        const Exchange broadcast = exchange<ROWS, R::tiles(L)>(args.state(L).forward, round);
        const Exchange new_weights = exchange<N, TILES>(args.state(L).backward, round - 1);
        const int first = block * HEAD, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        bool arrived = true;
        if (first < ROWS) {
            arrived = values.receive<ROWS, TILES, HEAD>(activations, PITCH, args.deadline_ms, first);
            if (has_new_weights)
                arrived = new_weights.receive<N, TILES>(smem + R::weights(L), PITCH, args.deadline_ms) && arrived;
        }
        if (__syncthreads_or(!arrived)) return false;
        change_phase(args, Phase::WAIT_FOR_ACTIVATIONS, Phase::OUTPUTS_AND_LOSS);
        if (first < ROWS) {
            for (int item = warp; item < HEAD * N; item += CTA_WARPS) {
                const float *const x = activations + item % HEAD * PITCH, *const w = weights + item / HEAD * PITCH;
                float sum = 0.0f;
                for (int k = lane; k < D; k += 32) sum = fmaf(x[k], w[k], sum);
                sum = reduce_lanes<Sum, 32>(sum);
                if (lane == 0)
                    outputs[item % HEAD * OUT + item / HEAD] = activate<K::code(L)>(sum + biases[item / HEAD], slope);
            }
        }
        __syncthreads();
        if (first < ROWS) {
            const int local_row = threadIdx.x / LANES;
            if (warp < (HEAD * LANES + 31) / 32) {
                float* const row = outputs + (local_row < HEAD ? local_row : HEAD - 1) * OUT;  // clamped, same warp
                const auto column = [](int i) { return static_cast<int>(threadIdx.x) % LANES + i * LANES; };
                float z[1][TARGETS], loss[1];
                int correct[1];
#pragma unroll
                for (int i = 0; i < TARGETS; ++i) z[0][i] = column(i) < N ? row[column(i)] : 0.0f;
                compute_loss<LANES, N, K::LOSS, K::code(L)>(z, column, {local_row < HEAD && first + local_row < rows},
                                                            slope, target, truth, loss, correct);
                __syncwarp();
                if (local_row < HEAD) {
#pragma unroll
                    for (int i = 0; i < TARGETS; ++i)
                        if (column(i) < N) row[column(i)] = z[0][i];
                    if (threadIdx.x % LANES == 0) row[N] = loss[0], row[N + 1] = static_cast<float>(correct[0]);
                }
            }
        }
        __syncthreads();
        if (first < ROWS) {
            for (int i = threadIdx.x; i < HEAD * R::SENT; i += CTA_THREADS) {
                const int row = first + i % HEAD;
                if (row < ROWS) broadcast.send<ROWS, R::tiles(L)>(i / HEAD, row, outputs[i % HEAD * OUT + i / HEAD]);
            }
            // Padding of the last tile.
            for (int i = threadIdx.x; i < (8 * R::tiles(L) - R::SENT) * HEAD; i += CTA_THREADS)
                if (first + i % HEAD < ROWS)
                    broadcast.send<ROWS, R::tiles(L)>(R::SENT + i / HEAD, first + i % HEAD, 0.0f);
            for (int i = threadIdx.x; i < HEAD * 8 * TILES; i += CTA_THREADS) {
                const int row = i / (8 * TILES), k = i % (8 * TILES);
                float sum = 0.0f;
#pragma unroll 5
                for (int n = 0; n < N; ++n) sum = fmaf(outputs[row * OUT + n], weights[n * PITCH + k], sum);
                sum = k < D ? act_grad(K::code(L - 1), prev_slope, sum, activations[row * PITCH + k]) : 0.0f;
                if (first + row < ROWS) gradients.send<ROWS, TILES>(k, first + row, sum);
            }
        }
        __syncthreads();
        change_phase(args, Phase::OUTPUTS_AND_LOSS, Phase::WAIT_FOR_GRADIENTS);
        arrived = gradients.receive<ROWS, TILES>(smem + R::values(L - 1), PITCH, args.deadline_ms);
        arrived = broadcast.receive<ROWS, R::tiles(L)>(smem + R::OUTPUTS, OUT, args.deadline_ms) && arrived;
        return !__syncthreads_or(!arrived);
    }

    // Gradients of owned units of layer l from all gradients of layer l + 1.
    template <int l>
    __device__ __forceinline__ void owned_gradients() const {
        constexpr int OWNED = R::owned(l), CHUNKS = round_up(Net::at(l + 1), CHUNK) / CHUNK, PITCH = R::owned_pitch(l);
        constexpr int SPLIT_K = row_split_k(RT, CHUNKS, SharedLayout<X, Net, ROWS, ORDER>::SCRATCH_FLOATS);
        constexpr int TILE_PARTIALS = (SPLIT_K - 1) * RT * 128,
            CAPACITY = TILE_PARTIALS ? R::SCRATCH_FLOATS / TILE_PARTIALS : OWNED;
        const LayerFacts& facts = args.facts[l - 1];
        const float slope = __uint_as_float(facts.slope);
        const Exchange exchange = this->exchange<ROWS, R::tiles(l)>(args.state(l).backward, round);
        const float* const values = smem + R::values(l);
        float* const to = smem + R::OWNED;
        multiply_rows<P, RT, OWNED, SPLIT_K, CHUNKS, CAPACITY>(
            static_cast<const float*>(smem + R::values(l + 1)), R::pitch(l + 1), smem + R::columns(l + 1),
            R::pitch(l + 1), smem + R::SCRATCH, [&](int row, int unit, const float (&sums)[4]) {
                const int tile = block * OWNED + unit / 8;
                float gradients[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int n = tile * 8 + unit % 8 + i % 2;
                    gradients[i] = 0.0f;
                    if (n < Net::at(l))
                        gradients[i] = act_grad(K::code(l), slope, sums[i], values[(row + i / 2) * R::pitch(l) + n]);
                    to[(row + i / 2) * PITCH + unit + i % 2] = gradients[i];
                }
                if constexpr (l > 1) {
                    constexpr int TILES = R::tiles(l);
                    if (tile >= TILES) return;
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        exchange.send<ROWS, TILES>(tile * 8 + unit % 8 + i % 2, row + i / 2, gradients[i]);
                }
            });
        __syncthreads();
    }
    template <int l>
    __device__ __forceinline__ bool receive_gradients() const {
        const Exchange exchange = this->exchange<ROWS, R::tiles(l)>(args.state(l).backward, round);
        const bool arrived = exchange.receive<ROWS, R::tiles(l)>(smem + R::values(l), R::pitch(l), args.deadline_ms);
        return !__syncthreads_or(!arrived);
    }
};

// Weight gradients of layers 1 to l.
template <class P, class X, class Net, class K, int GROUPS, int ROWS, int BLOCKS, int ORDER, u32 OPTIMISER, int l>
struct WeightGradients {
    using R = SharedLayout<X, Net, ROWS, BLOCKS>;
    using B = BlockTrainer<P, X, Net, K, ROWS, BLOCKS, ORDER, OPTIMISER>;
    static constexpr int L = Net::LAYERS, OWNED = l < L ? 8 * R::owned(l) : 8,
        OWNED_INPUTS = l > 1 ? 8 * R::owned(l - 1) : 8;
    static constexpr bool HAS_ROWS = l < L, HAS_COLUMNS = l > 1;
    using Previous = WeightGradients<P, X, Net, K, GROUPS, ROWS, BLOCKS, ORDER, OPTIMISER, l - 1>;
    Previous prev;
    Gradients<P, 4, HAS_ROWS ? Net::at(l - 1) : 1, OWNED> rows;
    Gradients<P, 2, OWNED_INPUTS, HAS_COLUMNS ? Net::at(l) : 1> columns;
    // Chunks in the gradient exchange; previous layers come first.
    static constexpr int ROW_CHUNKS = HAS_ROWS ? decltype(rows)::CHUNKS : 0;
    static constexpr int CHUNKS = Previous::CHUNKS + ROW_CHUNKS + (HAS_COLUMNS ? decltype(columns)::CHUNKS : 0);

    // All gradients of layer l are present: computes dW, updates weights that this step no longer reads, then recurses
    // to the previous layers.
    __device__ __forceinline__ bool backward(const B& trainer, const StepValues& opt) {
        float* const smem = trainer.smem;
        if constexpr (HAS_ROWS) rows.clear();
        if constexpr (HAS_COLUMNS) columns.clear();
        if constexpr (l == L) {
            columns.template add<ROWS>(static_cast<const float*>(smem + R::OWNED), R::owned_pitch(L - 1),
                                       smem + R::OUTPUTS, R::pitch(L));
            if constexpr (L > 2) __syncthreads();  // owned_gradients() overwrites the activations read here
        } else {
            constexpr bool USES_OWNED = l == 1 && L > 2;
            if constexpr (l > 1) trainer.template owned_gradients<l - 1>();
            const float* const all = smem + R::values(l);
            const float* const dz = USES_OWNED ? smem + R::OWNED : all + trainer.template first_unit<l>();
            rows.template add<ROWS>(trainer.template input<l>(), B::template INPUT_PITCH<l>, dz,
                                    USES_OWNED ? R::owned_pitch(1) : R::pitch(l));
            if constexpr (HAS_COLUMNS)
                columns.template add<ROWS>(trainer.template input<l>() + trainer.template first_unit<l - 1>(),
                                           R::pitch(l - 1), all, R::pitch(l));
        }
        if constexpr (GROUPS == 1) {
            change_phase(trainer.args, Phase::GRADIENTS, Phase::UPDATE);
            update_owned(trainer, opt);
            if constexpr (l == L) broadcast_weights(trainer);
            change_phase(trainer.args, Phase::UPDATE, Phase::GRADIENTS);
        }
        if constexpr (l > 2 && l < L) {
            __syncthreads();
            change_phase(trainer.args, Phase::GRADIENTS, Phase::WAIT_FOR_GRADIENTS);
            if (!trainer.template receive_gradients<l - 1>()) return false;
            change_phase(trainer.args, Phase::WAIT_FOR_GRADIENTS, Phase::GRADIENTS);
        }
        return prev.backward(trainer, opt);
    }
    // With two groups, after all layers: send, add up, update.
    template <class Partners>
    __device__ __forceinline__ void send(const Partners& partners) {
        if constexpr (HAS_ROWS) rows.send(partners, Previous::CHUNKS);
        if constexpr (HAS_COLUMNS) columns.send(partners, Previous::CHUNKS + ROW_CHUNKS);
        prev.send(partners);
    }
    template <class Partners>
    __device__ __forceinline__ bool add_partner(const Partners& partners, const B& trainer, const StepValues& opt) {
        bool all = true;
        if constexpr (HAS_ROWS) all = rows.add_partner(partners, Previous::CHUNKS);
        if constexpr (HAS_COLUMNS) all = columns.add_partner(partners, Previous::CHUNKS + ROW_CHUNKS) && all;
        change_phase(trainer.args, Phase::WAIT_FOR_OTHER_GROUP, Phase::UPDATE);
        update_owned(trainer, opt);
        change_phase(trainer.args, Phase::UPDATE, Phase::WAIT_FOR_OTHER_GROUP);
        return prev.add_partner(partners, trainer, opt) && all;
    }
    __device__ __forceinline__ void update_owned(const B& trainer, const StepValues& opt) {
        const LayerState state = trainer.args.state(l);
        const LayerFacts& facts = trainer.args.facts[l - 1];
        float* const smem = trainer.smem;
        if constexpr (HAS_ROWS)
            update_rows<OPTIMISER>(rows, opt, l == 1 ? trainer.args.scale : 1.0f, smem + R::weights(l), R::pitch(l - 1),
                                   smem + R::biases(l), state, facts, trainer.block * OWNED, Net::at(l));
        if constexpr (HAS_COLUMNS)
            update_columns<OPTIMISER>(columns, opt, smem + R::columns(l), R::pitch(l),
                                      l < L ? state.col_mean : state.mean, l < L ? state.col_square : state.square,
                                      facts.stride, trainer.block * OWNED_INPUTS, Net::at(l - 1));
        if constexpr (l == L) {
            const long long bias_offset = static_cast<long long>(trainer.block) * Net::at(L);
            if (facts.has_bias)
                update_biases<OPTIMISER>(columns, opt, smem + R::biases(L), state.col_mean + bias_offset,
                                         state.col_square + bias_offset);
        }
    }
    // Broadcasts the output layer's weights of owned inputs to the next step's head().
    __device__ __forceinline__ void broadcast_weights(const B& trainer) const {
        constexpr int N = Net::at(L), TILES = R::tiles(L - 1);
        const Exchange new_weights = trainer.template exchange<N, TILES>(trainer.args.state(L).backward, trainer.round);
        __syncthreads();
        for (int i = threadIdx.x; i < OWNED_INPUTS * N; i += CTA_THREADS) {
            const int input = i % OWNED_INPUTS, n = i / OWNED_INPUTS, k = trainer.block * OWNED_INPUTS + input;
            if (k < 8 * TILES)
                new_weights.send<N, TILES>(k, n, trainer.smem[R::columns(L) + input * R::pitch(L) + n]);
        }
    }
};
template <class P, class X, class Net, class K, int GROUPS, int ROWS, int BLOCKS, int ORDER, u32 OPTIMISER>
struct WeightGradients<P, X, Net, K, GROUPS, ROWS, BLOCKS, ORDER, OPTIMISER, 0> {
    static constexpr int CHUNKS = 0;
    template <class Partners>
    __device__ __forceinline__ void send(const Partners&) {}
    template <class Partners, class B>
    __device__ __forceinline__ bool add_partner(const Partners&, const B&, const StepValues&) {
        return true;
    }
    template <class B>
    __device__ __forceinline__ bool backward(const B&, const StepValues&) {
        return true;
    }
};
