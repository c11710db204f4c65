// train/layer_parallel/layer_parallel.cu: persistent kernel that trains an MLP on uint8 rows, blocks per layer.
//
// Idea    A block owns OWNED tiles of 8 units of one layer and keeps their fp32 weights register-resident. Layers
//         exchange activations, gradients and updated weights through L2 (exchange.cuh), without a grid barrier. Blocks
//         of the last two hidden layers recompute outputs, loss and their gradients rather than wait for them. A layer
//         sends new weights right after its update; the previous layer receives them while it waits for activations.
//         All gemms are wgmma on 1 to 3 bf16 split terms (uint8 needs one). The next rows load meanwhile.
// Floor   784-320-160-10, batch 64, 40 + 20 + 1 blocks: 102 wgmma reads of x, 2 KB each at 128 B/clock, 0.9 us; two
//         exchanges of 0.7 us; 120 KB in fp32 at 64 B/clock, 1 us: 3.3 us. Measured in bf16: 2.5x, 3.3 us from first
//         send to last hidden activations, then 2.7 us to new weights; loads of x take 2.1 us meanwhile.
// Order   K steps of 16 alternate between two warpgroups, whose sums are added; dW sums 16 rows at a time.
// Layout  x (n, x_stride): uint8 k is k * scale, rows 16 B aligned, then a 1 for the bias. w, mean, square as in
//         train/large_batch/launches.cu. Exchanged 16 B chunks lose the lowest bit of their first element.
// Limits  sm_90a; 2 to 15 layers, at most 32 outputs, 64 rows; cooperative launch, one network per blockIdx.y.
#include "train/layer_parallel/outputs.cuh"

// Row indices of the current and the next two steps, in a ring of three in shared memory.
template <int L, int BATCH>
struct RowIndices {
    const ParallelArgs<L>& args;
    u32* ids;
    long long first_step, end, steps;

    __device__ __forceinline__ RowIndices(const ParallelArgs<L>& args, char* at)
        : args(args), ids(reinterpret_cast<u32*>(at)), first_step(args.local(args.progress)[0]),
          end(args.local(args.progress)[1]), steps((end + args.batch - 1) / args.batch) {}
    __device__ __forceinline__ int rows(long long step) const { return StepRows<BATCH>(step, args.batch, end, 0).rows; }
    __device__ __forceinline__ u32 read(long long step) const {
        const StepRows<BATCH> step_rows(step, args.batch, end, 0);
        const int row = threadIdx.x;
        return row < step_rows.rows ? static_cast<u32>(args.local(args.order)[step_rows.first + row]) : 0;
    }
    __device__ __forceinline__ u32* at(long long step) const { return ids + step % 3 * BATCH; }
    __device__ __forceinline__ void store(long long step, u32 id) const {
        if (threadIdx.x < BATCH) at(step)[threadIdx.x] = id;
    }
};

// c = a b, one warpgroup's partial sums, a in shared memory. Panels from FIXED on are `offset` bytes further on.
template <int A_SPLITS, int STEPS, int FIXED, int ALL, class B>
__device__ __forceinline__ void multiply_panels(float (&c)[ALL][4], u32 a, u32 offset, int a_split_bytes, const B& b,
                                                int warpgroup) {
    static_assert(FIXED == 0 || A_SPLITS == 1, "only uint8 rows are double-buffered");
    using A = CoreMatrices<ROWS, false>;
    constexpr int FIRST_STEPS = FIXED / 2 < STEPS ? FIXED / 2 : STEPS;
    wgmma_fence();
    if constexpr (FIRST_STEPS > 0) begin_gemm<FIRST_STEPS, WARPGROUPS, A, B, ALL>(c, A(a), b, warpgroup, false);
    if constexpr (FIRST_STEPS < STEPS)
        split_gemm<A_SPLITS, STEPS - FIRST_STEPS, WARPGROUPS, A>(c, a + offset + FIXED * PANEL_BYTES, a_split_bytes,
                                                                 b.from(FIRST_STEPS), warpgroup, FIRST_STEPS > 0);
    wgmma_commit();
    wgmma_wait<0>();
}

template <class S>
__device__ __forceinline__ void write_ones(char* input, int l, bool has_bias) {
    if (threadIdx.x < ROWS && has_bias)
        store1(reinterpret_cast<bf16*>(input + core_matrix_offset<ROWS>(threadIdx.x, S::bias_row(l))), 1.0f);
}

// Consumers for Outputs::hidden_gradients. StoreOwned stores the gradients of owned units in shared memory.
template <int SPLITS, int OWNED>
struct StoreOwned {
    char* to;  // (ROWS, owned units), split
    int first_unit, warpgroup;

    template <int GROUPS>
    __device__ __forceinline__ void operator()(int first, const float (&gradients)[GROUPS][4][4]) const {
#pragma unroll
        for (int i = 0; i < GROUPS * 8; ++i) {
            const int m = i / 8, j = i / 2 % 4, h = i % 2;
            const int unit = ((warpgroup + (first + m) * WARPGROUPS) * 4 + threadIdx.x % 4) * 8 + 2 * j - first_unit;
            if (unit < 0 || unit >= 8 * OWNED) continue;
            u32 splits[SPLITS];
            split_pair(splits, gradients[m][j][2 * h], gradients[m][j][2 * h + 1]);
#pragma unroll
            for (int t = 0; t < SPLITS; ++t)
                *reinterpret_cast<u32*>(
                    to + core_matrix_offset<ROWS>(acc_row(2 * h), t * 8 * OWNED + unit)) = splits[t];
        }
    }
};
// MultiplyColumns multiplies gradients by the weights of the previous layer's owned units: c = gradients columns.
template <int SPLITS, int OWNED, class B>
struct MultiplyColumns {
    float (&c)[SPLITS * OWNED][4];
    const B& columns;
    int warpgroup;

    template <int GROUPS>
    __device__ __forceinline__ void operator()(int first, const float (&gradients)[GROUPS][4][4]) const {
        u32 fragments[GROUPS * 2][SPLITS][4];
#pragma unroll
        for (int i = 0; i < GROUPS * 8; ++i) {
            const int j = i / 2 % 4, h = i % 2;
            u32 splits[SPLITS];
            split_pair(splits, gradients[i / 8][j][2 * h], gradients[i / 8][j][2 * h + 1]);
#pragma unroll
            for (int term = 0; term < SPLITS; ++term) fragments[i / 4][term][j % 2 * 2 + h] = splits[term];
        }
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < GROUPS * 2; ++i)
            add_split_step<SPLITS, SPLITS * OWNED, B>(
                c, fragments[i], columns.descriptor(2 * (warpgroup + (first + i / 2) * WARPGROUPS) + i % 2),
                first > 0 || i > 0);
        wgmma_commit();
        wgmma_wait<0>();
    }
};

// Forward epilogue of owned units: bias, activation, send to the next layer.
// values  accumulators in, activations out
// biases  only with a_in_registers; otherwise the bias is a K element
template <class S, class K, int l>
__device__ __forceinline__ void send_activations(typename S::Sums& values, const typename S::Tiles& to, int block,
                                                 int owned_units, const float* biases, float scale, float slope) {
    using Sums = typename S::Sums;
    constexpr int GROUP = S::Tiles::GROUP;
#pragma unroll
    for (int n = 0; n < Sums::COUNT; ++n) {
        const int unit = Sums::column(n);
        if (!Sums::is_valid(n) || unit >= owned_units) break;
#pragma unroll
        for (int i = 0; i < GROUP; ++i) {
            const float sum = S::a_in_registers(l) ? values.v[n][i] + biases[unit + i] : scale * values.v[n][i];
            values.v[n][i] = block * 8 * S::OWNED + unit + i < S::at(l) ? activate<K::code(l)>(sum, slope) : 0.0f;
        }
        to.send(block * S::OWNED + unit / 8, Sums::row(n), unit % 8, values.v[n]);
    }
}
// Backward epilogue of owned units: activation derivative, split to shared memory, send to the previous layer.
// gradients  by the activations in, by the pre-activations out
// smem       (ROWS, owned units), split
template <class S, class K, int l>
__device__ __forceinline__ void send_gradients(typename S::Sums& gradients, const typename S::Sums& activations,
                                               char* smem, const typename S::Tiles& to, int block, int owned_units,
                                               float slope) {
    using Sums = typename S::Sums;
    constexpr int GROUP = S::Tiles::GROUP, SPLITS = S::SPLITS;
#pragma unroll
    for (int n = 0; n < Sums::COUNT; ++n) {
        const int unit = Sums::column(n), row = Sums::row(n);
        if (!Sums::is_valid(n) || unit >= owned_units) break;
#pragma unroll
        for (int i = 0; i < GROUP; ++i) {
            const float gradient = act_grad(K::code(l), slope, gradients.v[n][i], activations.v[n][i]);
            gradients.v[n][i] = block * 8 * S::OWNED + unit + i < S::at(l) ? gradient : 0.0f;
        }
        u32 splits[GROUP / 2][SPLITS];
#pragma unroll
        for (int i = 0; i < GROUP / 2; ++i) split_pair(splits[i], gradients.v[n][2 * i], gradients.v[n][2 * i + 1]);
#pragma unroll
        for (int i = 0; i < SPLITS; ++i) {
            char* const at = smem + core_matrix_offset<ROWS>(row, i * 8 * S::OWNED + unit);
            if constexpr (GROUP == 8)
                *reinterpret_cast<uint4*>(at) = {splits[0][i], splits[1][i], splits[2][i], splits[3][i]};
            else
                *reinterpret_cast<uint2*>(at) = {splits[0][i], splits[1][i]};
        }
        if constexpr (l > 1) to.send(block * S::OWNED + unit / 8, row, unit % 8, gradients.v[n]);
    }
}

// Runs all steps of a block of hidden layer l. Returns false on timeout.
template <class S, class K, u32 OPTIMISER, int l>
__device__ __forceinline__ bool train_hidden(const ParallelArgs<S::L>& args, char* smem, int block, int warpgroup) {
    using R = HiddenLayout<S, l>;
    using Sums = typename S::Sums;
    constexpr int L = S::L, SPLITS = S::SPLITS, OWNED = S::OWNED;
    __shared__ StepValues opt;
    const LayerBuffers buffers = args.buffers(l);
    const LayerFacts& facts = args.facts[l - 1];
    const float slope = __uint_as_float(facts.slope), scale = l == 1 ? args.scale : 1.0f;
    char* const rest = smem + R::REST;
    const RowIndices<L, S::BATCH> indices(args, rest + R::IDS);
    const u32 input = shared_at(smem), gradients = shared_at(rest + R::GRADIENTS);
    float *const sums = reinterpret_cast<float*>(rest + R::SUMS),
        *const biases = reinterpret_cast<float*>(rest + R::BIASES);
    const int owned_units = min(8 * OWNED, 8 * S::tiles(l) - block * 8 * OWNED);
    Weights<S, OPTIMISER, l, OWNED> weights(buffers, block, warpgroup);
    weights.transfer(buffers, facts, false);
    weights.store_splits(rest + R::WEIGHTS, biases);
    Outputs<S, K, typename R::Outputs> outputs(args, rest, warpgroup);
    if constexpr (l == 1 || R::HAS_OUTPUTS) {
        for (int i = 0; i < 2; ++i) indices.store(indices.first_step + i, indices.read(indices.first_step + i));
        __syncthreads();
    }
    PixelPrefetch<S> next;
    if constexpr (l == 1) {
        next.fetch(args.x, args.x_stride, indices.at(indices.first_step), indices.rows(indices.first_step));
        next.template store<0, S::panels(0)>(smem);
    } else {
        write_ones<S>(smem, l - 1, facts.has_bias);
    }
    // Stores layer l + 1's weights for owned units from exchange order.
    const auto store_columns = [&](int slot, const u32 (&four)[4]) {
        constexpr int FOURS = 2 * S::tiles(l + 1 < L ? l + 1 : L);
        const int row = slot / FOURS, unit = slot % FOURS * 4;
        u32 splits[2][SPLITS];
        split_pair(splits[0], __uint_as_float(four[0]), __uint_as_float(four[1]));
        split_pair(splits[1], __uint_as_float(four[2]), __uint_as_float(four[3]));
#pragma unroll
        for (int i = 0; i < 2 * SPLITS; ++i) {
            const int at = R::HAS_OUTPUTS ? permuted_k(unit + i % 2 * 2) : unit + i % 2 * 2;
            *reinterpret_cast<u32*>(rest + R::COLUMNS + core_matrix_offset<8 * OWNED * SPLITS>(
                i / 2 * 8 * OWNED + row, at)) = splits[i % 2][i / 2];
        }
    };
    if constexpr (R::HAS_COLUMNS)
        load_fours(args.local(args.layers[l].w), args.facts[l], S::at(l), S::at(l + 1), block * 8 * OWNED, owned_units,
                   store_columns);
    if constexpr (R::HAS_OUTPUTS) outputs.load_weights();
    u32 round = args.local(args.status)[0];
    u32 offset = 0;
    fence_for_wgmma();
    __syncthreads();
    change_phase(args, Phase::LOAD_WEIGHTS, Phase::LOAD_ROWS);
#pragma unroll 1
    for (long long step = indices.first_step; warp_uniform(step < indices.steps); ++step, ++round) {
        bool arrived = true;
        u32 next_ids = 0;
        // Overlaps with waiting for other blocks. One warpgroup receives the new weights of layer l + 1, the other
        // those of the output layer, so that their latencies overlap.
        const auto prepare = [&]() {
            u32 word = 0;  // of StepValues
            if (threadIdx.x < sizeof(StepValues) / 4)
                word = reinterpret_cast<const u32*>(args.local(args.per_step_values) + step)[threadIdx.x];
            if constexpr (l == 1 || R::HAS_OUTPUTS) next_ids = threadIdx.x < S::BATCH ? indices.read(step + 2) : 0;
            if constexpr (R::HAS_OUTPUTS) outputs.fetch_targets(indices.at(step));
            if (warp_uniform(step > indices.first_step)) {
                if constexpr (R::HAS_COLUMNS) {
                    constexpr int FOURS = 2 * S::tiles(l + 1);  // slots per input
                    const Channel columns =
                        {args.local(args.layers[l].columns), static_cast<long long>(8 * S::tiles(l)) * FOURS * 16,
                         round - 1, args.deadline_ms};
                    const auto slot_of = [=](int n) { return block * 8 * OWNED * FOURS + n; };
                    if (warpgroup == 0)
                        arrived = columns.receive<8 * OWNED * FOURS, 128>(owned_units * FOURS, slot_of, store_columns);
                }
                if constexpr (R::HAS_OUTPUTS)
                    if (warpgroup == WARPGROUPS - 1) arrived = outputs.template receive_weights<128>(round - 1);
            }
            if (threadIdx.x < sizeof(StepValues) / 4) reinterpret_cast<u32*>(&opt)[threadIdx.x] = word;
        };
        change_phase(args, Phase::LOAD_ROWS, l > 1 ? Phase::WAIT_FOR_WEIGHTS : Phase::FORWARD);
        if constexpr (l > 1) {
            prepare();
            change_phase(args, Phase::WAIT_FOR_WEIGHTS, Phase::WAIT_FOR_ACTIVATIONS);
        }
        // Activations of owned units.
        Sums activations;
        float c[SPLITS * OWNED][4];
        typename S::template FragmentsOf<l - 1> prev;  // empty unless a_in_registers
        if constexpr (!S::a_in_registers(l)) {
            if constexpr (l > 1) {
                const typename S::Tiles from(args.local(args.layers[l - 2].forward), S::tiles(l - 1), round,
                                             args.deadline_ms);
                arrived = from.template receive<S::tiles(l - 1)>(smem, S::input_bytes(l)) && arrived;
                fence_for_wgmma();
                if (warp_uniform(__syncthreads_or(!arrived))) return false;
                change_phase(args, Phase::WAIT_FOR_ACTIVATIONS, Phase::FORWARD);
            }
            const CoreMatrices<8 * S::panels(l - 1), true> weight_panels(shared_at(rest + R::WEIGHTS));
            multiply_panels<S::input_splits(l), S::panels(l - 1) / 2, l == 1 ? R::FIXED : 0>(
                c, input, offset, S::input_bytes(l), weight_panels, warpgroup);
            activations.template reduce_warpgroups<SPLITS>(c, sums, warpgroup, true);
        } else {
            const typename S::Tiles from(args.local(args.layers[l - 2].forward), S::tiles(l - 1), round,
                                         args.deadline_ms);
            arrived = prev.receive(from, warpgroup) && arrived;
            change_phase(args, Phase::WAIT_FOR_ACTIVATIONS, Phase::FORWARD);
            prev.multiply(c, shared_at(rest + R::WEIGHTS), warpgroup);
            if (!activations.template reduce_warpgroups<SPLITS>(c, sums, warpgroup, arrived)) return false;
        }
        const typename S::Tiles to(buffers.forward, S::tiles(l), round, args.deadline_ms);
        send_activations<S, K, l>(activations, to, block, owned_units, biases, scale, slope);
        if constexpr (S::a_in_registers(l)) prev.store(smem, S::input_bytes(l), warpgroup);
        if constexpr (l == 1) {
            change_phase(args, Phase::FORWARD, Phase::WAIT_FOR_WEIGHTS);
            prepare();  // before the row loads, which later loads would queue after
            change_phase(args, Phase::WAIT_FOR_WEIGHTS, Phase::LOAD_ROWS);
            next.fetch(args.x, args.x_stride, indices.at(step + 1), indices.rows(step + 1));
            next.template store<R::FIXED, S::panels(0)>(smem + (R::TWICE * PANEL_BYTES - offset));
        }
        constexpr Phase NEXT_WAIT = R::HAS_OUTPUTS ? Phase::WAIT_FOR_ACTIVATIONS : Phase::WAIT_FOR_GRADIENTS;
        change_phase(args, l == 1 ? Phase::LOAD_ROWS : Phase::FORWARD, NEXT_WAIT);
        if constexpr (R::HAS_OUTPUTS) {
            arrived = outputs.receive(round) && arrived;
        } else {
            const typename S::Tiles back(args.local(args.layers[l].backward), S::tiles(l + 1), round, args.deadline_ms);
            arrived = back.template receive<S::tiles(l + 1)>(rest + R::NEXT_DZ,
                                                             S::next_panels(l + 1) * PANEL_BYTES) && arrived;
        }
        fence_for_wgmma();
        if (warp_uniform(__syncthreads_or(!arrived))) return false;
        // Gradients of owned units.
        change_phase(args, NEXT_WAIT, R::HAS_OUTPUTS ? Phase::OUTPUTS_AND_LOSS : Phase::GRADIENTS);
        if constexpr (R::HAS_OUTPUTS) {
            outputs.compute(indices.rows(step));
            change_phase(args, Phase::OUTPUTS_AND_LOSS, Phase::GRADIENTS);
        }
        if constexpr (R::HAS_COLUMNS) {
            const typename S::Tiles back(buffers.backward, S::tiles(l), round, args.deadline_ms);
            const CoreMatrices<8 * OWNED * SPLITS, false> columns(shared_at(rest + R::COLUMNS));
            Sums owned_gradients;
            if constexpr (R::HAS_OUTPUTS) {
                outputs.hidden_gradients(MultiplyColumns<SPLITS, OWNED, decltype(columns)>{c, columns, warpgroup});
                __syncthreads();  // the sums below reuse the memory of the outputs' sums
            } else {
                multiply_panels<SPLITS, S::next_panels(l + 1) / 2, 0>(
                    c, shared_at(rest + R::NEXT_DZ), 0, S::next_panels(l + 1) * PANEL_BYTES, columns, warpgroup);
            }
            owned_gradients.template reduce_warpgroups<SPLITS>(c, sums, warpgroup, true);
            send_gradients<S, K, l>(owned_gradients, activations, rest + R::GRADIENTS, back, block, owned_units, slope);
        } else {
            outputs.hidden_gradients(StoreOwned<SPLITS, OWNED>{rest + R::GRADIENTS, block * 8 * OWNED, warpgroup});
        }
        fence_for_wgmma();
        __syncthreads();
        change_phase(args, Phase::GRADIENTS, Phase::UPDATE);
        weights.template update<l == 1 ? R::FIXED : 0>(opt, scale, input, offset, gradients);
        weights.store_splits(rest + R::WEIGHTS, biases);
        if constexpr (l == 1) {
            __syncthreads();  // all reads of x are done
            change_phase(args, Phase::UPDATE, Phase::LOAD_ROWS);
            next.template store<0, R::FIXED>(smem);
            offset = R::TWICE * PANEL_BYTES - offset;
        } else {
            const Channel columns =
                {buffers.columns, static_cast<long long>(8 * S::tiles(l - 1)) * 2 * S::tiles(l) * 16, round, 0};
            weights.send(columns);
            change_phase(args, Phase::UPDATE, Phase::LOAD_ROWS);
        }
        if constexpr (l == 1 || R::HAS_OUTPUTS) indices.store(step + 2, next_ids);
        if constexpr (l == 1) {  // prefetch x to L2, other cache lines in each block
            const char* const row = static_cast<const char*>(args.x) + next_ids * args.x_stride;
            if (threadIdx.x < S::BATCH)
                for (int at = block * 128; at < args.x_stride; at += S::blocks(1) * 128)
                    asm volatile("prefetch.global.L2 [%0];" :: "l"(row + at));
        }
        fence_for_wgmma();
        __syncthreads();
    }
    change_phase(args, Phase::LOAD_ROWS, Phase::STORE_WEIGHTS);
    weights.transfer(buffers, facts, true);
    change_phase(args, Phase::STORE_WEIGHTS, Phase::OUTSIDE);
    return true;
}

// Runs all steps of the output layer's block.
template <class S, class K, u32 OPTIMISER>
__device__ __forceinline__ bool train_output(const ParallelArgs<S::L>& args, char* smem, int warpgroup) {
    using R = OutputBlockLayout<S>;
    using Out = Outputs<S, K, typename R::Outputs>;
    constexpr int L = S::L, SPLITS = S::SPLITS, PANELS = S::panels(L);
    __shared__ StepValues opt;
    const LayerBuffers buffers = args.buffers(L);
    const LayerFacts& facts = args.facts[L - 1];
    const RowIndices<L, S::BATCH> indices(args, smem + R::IDS);
    float* const losses = reinterpret_cast<float*>(smem + R::LOSSES);
    const u32 input = shared_at(smem + R::INPUT), gradients = shared_at(smem + R::GRADIENTS);
    Weights<S, OPTIMISER, L, PANELS> weights(buffers, 0, warpgroup);
    weights.transfer(buffers, facts, false);
    Out outputs(args, smem, warpgroup);
    outputs.load_weights();
    write_ones<S>(smem + R::INPUT, L - 1, facts.has_bias);
    for (int i = 0; i < 2; ++i) indices.store(indices.first_step + i, indices.read(indices.first_step + i));
    u32 round = args.local(args.status)[0];
    fence_for_wgmma();
    __syncthreads();
    change_phase(args, Phase::LOAD_WEIGHTS, Phase::LOAD_ROWS);
#pragma unroll 1
    for (long long step = indices.first_step; warp_uniform(step < indices.steps); ++step, ++round) {
        if (threadIdx.x == 0) opt = args.local(args.per_step_values)[step];
        const u32 next_ids = threadIdx.x < S::BATCH ? indices.read(step + 2) : 0;
        outputs.fetch_targets(indices.at(step));
        change_phase(args, Phase::LOAD_ROWS, Phase::WAIT_FOR_WEIGHTS);
        bool arrived = step == indices.first_step || outputs.template receive_weights<LP_THREADS>(round - 1);
        change_phase(args, Phase::WAIT_FOR_WEIGHTS, Phase::WAIT_FOR_ACTIVATIONS);
        arrived = outputs.receive(round) && arrived;
        outputs.activations.store(smem + R::INPUT, S::input_bytes(L), warpgroup);
        fence_for_wgmma();
        if (warp_uniform(__syncthreads_or(!arrived))) return false;
        change_phase(args, Phase::WAIT_FOR_ACTIVATIONS, Phase::OUTPUTS_AND_LOSS);
        outputs.compute(indices.rows(step));
        if (warpgroup == 0) {
#pragma unroll
            for (int i = 0; i < 2 * PANELS * 2; ++i) {
                const int h = i % 2, j = i / 2;
                if (j % 2) continue;
                u32 splits[SPLITS];
                split_pair(splits, outputs.gradients[h][j], outputs.gradients[h][j + 1]);
#pragma unroll
                for (int t = 0; t < SPLITS; ++t)
                    *reinterpret_cast<u32*>(smem + R::GRADIENTS + core_matrix_offset<ROWS>(
                        Out::row(h), t * 8 * PANELS + Out::column(j))) = splits[t];
            }
            if (threadIdx.x % 4 == 0) {
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    losses[Out::row(h)] = outputs.loss[h],
                        losses[ROWS + Out::row(h)] = static_cast<float>(outputs.correct[h]);
            }
        }
        fence_for_wgmma();
        __syncthreads();
        change_phase(args, Phase::OUTPUTS_AND_LOSS, Phase::UPDATE);
        weights.template update<0>(opt, 1.0f, input, 0, gradients);
        weights.send(Out::weights_channel(args, round));
        if (threadIdx.x < 32) {
            double total = 0.0;
            int correct = 0;
            for (int i = threadIdx.x; i < S::BATCH; i += 32)
                total += losses[i], correct += static_cast<int>(losses[ROWS + i]);
            total = reduce_lanes<Sum, 32>(total);
            correct = reduce_lanes<Sum, 32>(correct);
            if (threadIdx.x == 0)
                args.local(args.step_losses)[step] = total, args.local(args.step_correct)[step] = correct;
        }
        change_phase(args, Phase::UPDATE, Phase::LOAD_ROWS);
        indices.store(step + 2, next_ids);
        __syncthreads();
    }
    change_phase(args, Phase::LOAD_ROWS, Phase::STORE_WEIGHTS);
    weights.transfer(buffers, facts, true);
    change_phase(args, Phase::STORE_WEIGHTS, Phase::OUTSIDE);
    if (threadIdx.x == 0) args.local(args.status)[0] = round;
    return true;
}

template <class S, class K, u32 OPTIMISER, int l>
__device__ __forceinline__ bool train_layer(const ParallelArgs<S::L>& args, char* smem, int block, int warpgroup) {
    if constexpr (l == S::L) {
        return train_output<S, K, OPTIMISER>(args, smem, warpgroup);
    } else {
        if (block < S::blocks(l)) return train_hidden<S, K, OPTIMISER, l>(args, smem, block, warpgroup);
        return train_layer<S, K, OPTIMISER, l + 1>(args, smem, block - S::blocks(l), warpgroup);
    }
}

template <int SPLITS, int OWNED, int BATCH, u32 OPTIMISER, unsigned long long CODES, int... W>
__global__ void __launch_bounds__(LP_THREADS, 1)
train_layer_parallel(const __grid_constant__ ParallelArgs<sizeof...(W) - 1> args) {
    using S = Sizes<Widths<W...>, SPLITS, OWNED, BATCH>;
    extern __shared__ float smem[];
    // A network without a step returns: its blocks would not wait for each other, and stores could race with loads.
    const long long* const progress = args.local(args.progress);
    if (warp_uniform(progress[0] * args.batch >= progress[1])) return;
    change_phase(args, Phase::OUTSIDE, Phase::LOAD_WEIGHTS);
    for (int i = threadIdx.x; i < max_bytes<S>() / 4; i += LP_THREADS) smem[i] = 0.0f;
    __syncthreads();
    // __shfl_sync makes it warp-uniform to the compiler.
    const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
    const bool ok =
        train_layer<S, Codes<CODES>, OPTIMISER, 1>(args, reinterpret_cast<char*>(smem), blockIdx.x, warpgroup);
    if (!ok && threadIdx.x == 0) args.local(args.status)[1] = 1;
}
