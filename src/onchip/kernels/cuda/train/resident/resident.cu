// train/resident/resident.cu: persistent kernel that trains a small MLP with its weights resident in shared memory.
//
// Idea    A block owns tiles of 8 units of every hidden layer: their weight rows, and the next layer's weight columns.
//         Per layer, blocks compute their units and all-gather activations through L2 (Exchange), without a grid
//         barrier. A block computes the output layer for a few rows, broadcasts their loss and gradients and updates
//         its weights, while the next rows load. Large batches use two groups of blocks that own the same units and
//         sum their gradients. Several networks share a launch, with fewer blocks each.
// Floor   784-320-160-10, batch 64: 85 Mflop per step, 2 us of tf32 mma.sync on 40 SMs; 120 KB of activations per
//         block, 1.1 us at 109 B/ns; four exchanges of 0.7 us. Measured: 5x that, since the phases are latency-bound.
// Order   K chunks of 16, split-K over warps; dW sums 16 rows at a time, then groups. ORDER_BLOCKS sets split-K.
// Layout  x (n, x_stride): uint8 k is k * scale, or float32; rows 16 B aligned. w, mean, square as in
//         train/large_batch/launches.cu. Exchanged values lose their lowest bit.
// Limits  2 to 15 layers, at most 32 outputs and 128 rows, in shared memory. Cooperative launch, one network per
//         blockIdx.y. Every block must own a tile: no block waits for an idle one. On timeout all blocks exit.
#include "train/resident/step.cuh"

// Loads weights and biases, or stores them if is_store: owners store weights, block 0 the output layer's biases.
template <class X, class Net, int ROWS, int BLOCKS, int l>
__device__ __forceinline__ void transfer_weights(const ResidentArgs<Net::LAYERS>& args, float* smem, bool is_store) {
    using R = SharedLayout<X, Net, ROWS, BLOCKS>;
    constexpr int L = Net::LAYERS, D = Net::at(l - 1), N = Net::at(l);
    const LayerState state = args.state(l);
    const LayerFacts& facts = args.facts[l - 1];
    float *const weights = smem + R::weights(l), *const biases = smem + R::biases(l);
    const int block = static_cast<int>(blockIdx.x) % BLOCKS;
    if (is_store && blockIdx.x >= BLOCKS) return;  // groups hold identical weights
    const auto copy = [=](float& global, float& local) {
        if (is_store) global = local;
        else local = global;
    };
    for (int i = threadIdx.x; i < R::weight_rows(l) * (D + 1); i += CTA_THREADS) {
        const int row = i / (D + 1), k = i % (D + 1);
        const int unit = l < L ? block * 8 * R::owned(l) + row : row;
        if (unit >= N || (k == D && !facts.has_bias)) continue;
        if (is_store && l == L && (k < D || block > 0)) continue;
        float& local = k < D ? weights[row * R::pitch(l - 1) + k] : biases[row];
        copy(state.w[static_cast<long long>(unit) * facts.stride + k], local);
        if (l == L && k < D && !is_store) local = Exchange::cleared(local);  // rounded as exchanged weights are
    }
    if constexpr (l == L) {
        for (int n = threadIdx.x; n < N && (!is_store || block == 0); n += CTA_THREADS) {
            const long long at = static_cast<long long>(n) * facts.stride + D;
            if (facts.has_bias && state.mean) copy(state.mean[at], state.col_mean[block * N + n]);
            if (facts.has_bias && state.square) copy(state.square[at], state.col_square[block * N + n]);
        }
    }
    if constexpr (l > 1) {
        for (int i = threadIdx.x; i < 8 * R::owned(l - 1) * N && (!is_store || l == L); i += CTA_THREADS) {
            const int row = i % (8 * R::owned(l - 1)), unit = i / (8 * R::owned(l - 1));
            const int input = block * 8 * R::owned(l - 1) + row;
            if (input >= D) continue;
            const long long at = static_cast<long long>(unit) * facts.stride + input;
            copy(state.w[at], smem[R::columns(l) + row * R::pitch(l) + unit]);
            if (l < L && state.mean) state.col_mean[at] = state.mean[at];
            if (l < L && state.square) state.col_square[at] = state.square[at];
        }
        transfer_weights<X, Net, ROWS, BLOCKS, l - 1>(args, smem, is_store);
    }
}

template <class P, class X, int GROUPS, int ROWS, int BLOCKS, int ORDER, u32 OPTIMISER, unsigned long long CODES,
          int... W>
__global__ void __launch_bounds__(CTA_THREADS, 1)
train_resident(const __grid_constant__ ResidentArgs<sizeof...(W) - 1> args) {
    using Net = Widths<W...>;
    using K = Codes<CODES>;
    using R = SharedLayout<X, Net, ROWS, BLOCKS>;
    using B = BlockTrainer<P, X, Net, K, ROWS, BLOCKS, ORDER, OPTIMISER>;
    constexpr int L = Net::LAYERS, LANES = B::LANES, N = Net::at(L);
    extern __shared__ float smem[];
    __shared__ StepValues opt;  // loaded early to hide the latency
    u32* const ids = reinterpret_cast<u32*>(smem) + R::IDS;
    u32* const status = args.local(args.status);
    const long long *const progress = args.local(args.progress), *const order = args.local(args.order);
    const u32 first_round = status[0];
    const int group = static_cast<int>(blockIdx.x) / BLOCKS;
    const bool is_writer = blockIdx.x % BLOCKS == 0;
    const long long first_step = progress[0], end = progress[1], steps = (end + args.batch - 1) / args.batch;
    // A network without a step returns: its blocks would not wait for each other, and stores could race with loads.
    if (first_step >= steps) return;
    change_phase(args, Phase::OUTSIDE, Phase::LOAD_WEIGHTS);
    const auto load_ids = [&](long long step) -> u32 {
        const StepRows<ROWS> step_rows(step, args.batch, end, group);
        const int row = threadIdx.x;
        return row < step_rows.rows ? static_cast<u32>(order[step_rows.first + row]) : 0;
    };
    for (int i = threadIdx.x; i < R::FLOATS; i += CTA_THREADS) smem[i] = 0.0f;
    __syncthreads();
    transfer_weights<X, Net, ROWS, BLOCKS, L>(args, smem, false);
    if (threadIdx.x < ROWS)
        for (int i = 0; i < 2; ++i) ids[(first_step + i) % 3 * ROWS + threadIdx.x] = load_ids(first_step + i);
    __syncthreads();
    RowPrefetch<X, Net, ROWS, BLOCKS> next;
    next.fetch(args.x, args.x_stride, ids + first_step % 3 * ROWS,
               StepRows<ROWS>(first_step, args.batch, end, group).rows);
    next.store(smem);
    __syncthreads();
    change_phase(args, Phase::LOAD_WEIGHTS, Phase::LOAD_ROWS);
    B trainer = {args, smem, group, static_cast<int>(blockIdx.x) % BLOCKS, first_round};
    using AllGradients = WeightGradients<P, X, Net, K, GROUPS, ROWS, BLOCKS, ORDER, OPTIMISER, L>;
    AllGradients sums;
#pragma unroll 1
    for (long long step = first_step; step < steps; ++step) {
        const StepRows<ROWS> current(step, args.batch, end, group), following(step + 1, args.batch, end, group);
        if (threadIdx.x == 0) opt = args.local(args.per_step_values)[step];  // the previous values are unused by now
        const u32 next_ids = threadIdx.x < ROWS ? load_ids(step + 2) : 0;
        const int row = trainer.block * R::HEAD_ROWS + threadIdx.x / LANES;  // this thread's row in the loss
        const long long id = ids[step % 3 * ROWS + (row < ROWS ? row : 0)];
        float target[1][B::TARGETS] = {};
        int truth[1] = {};
        if (K::LOSS == CROSS_ENTROPY) {
            truth[0] = static_cast<int>(static_cast<const long long*>(args.targets)[id]);
        } else {
#pragma unroll
            for (int i = 0; i < B::TARGETS; ++i)
                if (threadIdx.x % LANES + i * LANES < N)
                    target[0][i] = static_cast<const float*>(args.targets)[id * N + threadIdx.x % LANES + i * LANES];
        }
        change_phase(args, Phase::LOAD_ROWS, Phase::FORWARD);
        bool ok = trainer.template forward<1>();
        if (ok) {
            change_phase(args, Phase::FORWARD, Phase::LOAD_ROWS);
            next.fetch(args.x, args.x_stride, ids + (step + 1) % 3 * ROWS, following.rows);
            change_phase(args, Phase::LOAD_ROWS, Phase::WAIT_FOR_ACTIVATIONS);
            ok = trainer.head(current.rows, step > first_step, target, truth);
            change_phase(args, Phase::WAIT_FOR_GRADIENTS, Phase::OUTPUTS_AND_LOSS);
        }
        if (is_writer && ok && threadIdx.x < 32) {
            double loss = 0.0;
            int correct = 0;
            for (int i = threadIdx.x; i < ROWS; i += 32) {
                const float* const row_values = smem + R::OUTPUTS + i * R::pitch(L) + N;
                loss += row_values[0], correct += static_cast<int>(row_values[1]);
            }
            loss = reduce_lanes<Sum, 32>(loss);
            correct = reduce_lanes<Sum, 32>(correct);
            if (threadIdx.x == 0) {
                args.local(args.step_losses)[step * GROUPS + group] = loss;
                args.local(args.step_correct)[step * GROUPS + group] = correct;
            }
        }
        change_phase(args, Phase::OUTPUTS_AND_LOSS, Phase::GRADIENTS);
        if (ok) ok = sums.backward(trainer, opt);
        const Partners<BLOCKS, AllGradients::CHUNKS> partners = {args.local(args.partner_buffer), trainer.round,
                                                                 args.deadline_ms, group, trainer.block};
        if (GROUPS > 1 && ok) sums.send(partners);
        __syncthreads();  // all reads of x are done
        change_phase(args, Phase::GRADIENTS, Phase::LOAD_ROWS);
        next.store(smem);
        if constexpr (GROUPS > 1) {
            static_assert(GROUPS == 2 && OPTIMISER == SGD, "two groups do not synchronise optimiser moments");
            change_phase(args, Phase::LOAD_ROWS, Phase::WAIT_FOR_OTHER_GROUP);
            if (ok) ok = !__syncthreads_or(!sums.add_partner(partners, trainer, opt));
            change_phase(args, Phase::WAIT_FOR_OTHER_GROUP, Phase::UPDATE);
            if (ok) sums.broadcast_weights(trainer);
            change_phase(args, Phase::UPDATE, Phase::LOAD_ROWS);
        }
        if (!ok) {  // block-uniform
            if (threadIdx.x == 0) status[1] = 1;
            return;
        }
        if (threadIdx.x < ROWS) ids[(step + 2) % 3 * ROWS + threadIdx.x] = next_ids;
        ++trainer.round;
        __syncthreads();
    }
    change_phase(args, Phase::LOAD_ROWS, Phase::STORE_WEIGHTS);
    transfer_weights<X, Net, ROWS, BLOCKS, L>(args, smem, true);
    change_phase(args, Phase::STORE_WEIGHTS, Phase::OUTSIDE);
    if (blockIdx.x == 0 && threadIdx.x == 0) status[0] = trainer.round;  // all blocks have read the old value
}
