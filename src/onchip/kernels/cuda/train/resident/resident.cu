// train/resident/resident.cu: persistent kernel that trains a small MLP with its weights resident in shared memory.
//
// Idea    A block owns tiles of 8 units of every hidden layer: their weight rows, and the next layer's weight columns.
//         Layer by layer, blocks compute their units and all-gather activations through L2 (Exchange), without a grid
//         barrier. Each block computes the output layer for a few rows and broadcasts their loss and gradients, then
//         updates its own weights. The next rows load meanwhile. A larger batch uses two groups of blocks that own the
//         same units and add up their gradients. Many networks in one launch have fewer blocks each.
// Floor   784-320-160-10, batch 64: 85 Mflop per step, 2 us of tf32 mma.sync on 40 SMs; 120 KB of activations per
//         block, 1.1 us at 109 B/ns; four exchanges of 0.7 us. It takes 5x that: the phases are latency-bound.
// Order   K chunks of 16, split-K over warps; dW adds 16 rows at a time, then groups. ALONE sets the splits.
// Layout  x (n, x_stride): uint8 k is k * scale, or float32; rows 16 B aligned. w, mean, square as in
//         train/large_batch/launches.cu. Exchanged values lose their lowest bit.
// Limits  2 to 15 layers, at most 32 outputs and 128 rows, in shared memory. Cooperative launch, one network per
//         blockIdx.y. Every block must own a tile, or nothing waits for it. A wait past the deadline ends all blocks.
#include "train/resident/step.cuh"

// Loads weights and biases, or stores them if is_back. Owners store; block 0 stores the output layer's biases.
template <class X, class Net, int ROWS, int BLOCKS, int l>
__device__ __forceinline__ void move_weights(const Run<Net::LAYERS>& run, float* room, bool is_back) {
    using R = Room<X, Net, ROWS, BLOCKS>;
    constexpr int L = Net::LAYERS, D = Net::at(l - 1), N = Net::at(l);
    const LayerState state = run.state(l);
    const LayerFacts& facts = run.facts[l - 1];
    float *const weights = room + R::weights(l), *const biases = room + R::biases(l);
    const int block = static_cast<int>(blockIdx.x) % BLOCKS;
    if (is_back && blockIdx.x >= BLOCKS) return;  // groups hold identical weights
    const auto copy = [=](float& there, float& here) {
        if (is_back) there = here;
        else here = there;
    };
    for (int i = threadIdx.x; i < R::weight_rows(l) * (D + 1); i += TEAM) {
        const int row = i / (D + 1), k = i % (D + 1);
        const int unit = l < L ? block * 8 * R::own(l) + row : row;
        if (unit >= N || (k == D && !facts.has_bias)) continue;
        if (is_back && l == L && (k < D || block > 0)) continue;
        float& here = k < D ? weights[row * R::pitch(l - 1) + k] : biases[row];
        copy(state.w[static_cast<long long>(unit) * facts.stride + k], here);
        if (l == L && k < D && !is_back) here = Exchange::sent(here);  // rounded as exchanged weights are
    }
    if constexpr (l == L) {
        for (int n = threadIdx.x; n < N && (!is_back || block == 0); n += TEAM) {
            const long long at = static_cast<long long>(n) * facts.stride + D;
            if (facts.has_bias && state.mean) copy(state.mean[at], state.own_mean[block * N + n]);
            if (facts.has_bias && state.square) copy(state.square[at], state.own_square[block * N + n]);
        }
    }
    if constexpr (l > 1) {
        for (int i = threadIdx.x; i < 8 * R::own(l - 1) * N && (!is_back || l == L); i += TEAM) {
            const int row = i % (8 * R::own(l - 1)), unit = i / (8 * R::own(l - 1));
            const int input = block * 8 * R::own(l - 1) + row;
            if (input >= D) continue;
            const long long at = static_cast<long long>(unit) * facts.stride + input;
            copy(state.w[at], room[R::columns(l) + row * R::pitch(l) + unit]);
            if (l < L && state.mean) state.own_mean[at] = state.mean[at];
            if (l < L && state.square) state.own_square[at] = state.square[at];
        }
        move_weights<X, Net, ROWS, BLOCKS, l - 1>(run, room, is_back);
    }
}

// -- kernel ----------------------------------------------------------------------------------------------------------

template <class P, class X, int GROUPS, int ROWS, int BLOCKS, int ALONE, u32 OPTIMISER, unsigned long long CODES,
          int... W>
__global__ void __launch_bounds__(TEAM, 1) train_resident(const __grid_constant__ Run<sizeof...(W) - 1> run) {
    using Net = Widths<W...>;
    using K = Kinds<CODES>;
    using R = Room<X, Net, ROWS, BLOCKS>;
    using B = Blocks<P, X, Net, K, ROWS, BLOCKS, ALONE, OPTIMISER>;
    constexpr int L = Net::LAYERS, LANES = B::LANES, N = Net::at(L);
    extern __shared__ float room[];
    __shared__ Rule rule;  // of the step; hides the global load latency
    u32* const ids = reinterpret_cast<u32*>(room) + R::IDS;
    u32* const status = run.mine(run.status);
    const long long *const progress = run.mine(run.progress), *const order = run.mine(run.order);
    const u32 first_turn = status[0];
    const int group = static_cast<int>(blockIdx.x) / BLOCKS;
    const bool is_teller = blockIdx.x % BLOCKS == 0;
    const long long first_step = progress[0], all = progress[1], steps = (all + run.batch - 1) / run.batch;
    // A network without a step in this launch returns: its blocks do not wait, so their stores could race with loads.
    if (first_step >= steps) return;
    const auto read_ids = [&](long long step) -> u32 {
        const Turn<ROWS> turn(step, run.batch, all, group);
        const int row = threadIdx.x;
        return row < turn.rows ? static_cast<u32>(order[turn.first + row]) : 0;
    };
    for (int i = threadIdx.x; i < R::FLOATS; i += TEAM) room[i] = 0.0f;
    __syncthreads();
    move_weights<X, Net, ROWS, BLOCKS, L>(run, room, false);
    if (threadIdx.x < ROWS)
        for (int i = 0; i < 2; ++i) ids[(first_step + i) % 3 * ROWS + threadIdx.x] = read_ids(first_step + i);
    __syncthreads();
    NextRows<X, Net, ROWS, BLOCKS> next;
    next.fetch(run.x, run.x_stride, ids + first_step % 3 * ROWS, Turn<ROWS>(first_step, run.batch, all, group).rows);
    next.keep(room);
    __syncthreads();
    B here = {run, room, group, static_cast<int>(blockIdx.x) % BLOCKS, first_turn};
    using AllSums = Sums<P, X, Net, K, GROUPS, ROWS, BLOCKS, ALONE, OPTIMISER, L>;
    AllSums sums;
#pragma unroll 1
    for (long long step = first_step; step < steps; ++step) {
        const Turn<ROWS> now(step, run.batch, all, group), then(step + 1, run.batch, all, group);
        if (threadIdx.x == 0) rule = run.mine(run.rules)[step];  // the previous Rule is no longer read
        const u32 coming = threadIdx.x < ROWS ? read_ids(step + 2) : 0;
        const int row = here.block * R::HEAD_ROWS + threadIdx.x / LANES;  // row of the loss
        const long long id = ids[step % 3 * ROWS + (row < ROWS ? row : 0)];
        float target[1][B::TARGETS] = {};
        int truth[1] = {};
        if (K::LOSS == CROSS_ENTROPY) {
            truth[0] = static_cast<int>(static_cast<const long long*>(run.targets)[id]);
        } else {
#pragma unroll
            for (int i = 0; i < B::TARGETS; ++i)
                if (threadIdx.x % LANES + i * LANES < N)
                    target[0][i] = static_cast<const float*>(run.targets)[id * N + threadIdx.x % LANES + i * LANES];
        }
        bool is_well = here.template forward<1>();
        if (is_well) {
            next.fetch(run.x, run.x_stride, ids + (step + 1) % 3 * ROWS, then.rows);
            is_well = here.head(now.rows, step > first_step, target, truth);
        }
        if (is_teller && is_well && threadIdx.x < 32) {
            double loss = 0.0;
            int correct = 0;
            for (int i = threadIdx.x; i < ROWS; i += 32) {
                const float* const told = room + R::OUTPUTS + i * R::pitch(L) + N;
                loss += told[0], correct += static_cast<int>(told[1]);
            }
            loss = reduce_lanes<Sum, 32>(loss);
            correct = reduce_lanes<Sum, 32>(correct);
            if (threadIdx.x == 0) {
                run.mine(run.step_losses)[step * GROUPS + group] = loss;
                run.mine(run.step_correct)[step * GROUPS + group] = correct;
            }
        }
        if (is_well) is_well = sums.backward(here, rule);
        const Partners<BLOCKS, AllSums::PIECES> partners = {run.mine(run.parts), here.turn, run.deadline_ms, group, here.block};
        if (GROUPS > 1 && is_well) sums.send(partners);
        __syncthreads();  // x has been read
        next.keep(room);
        if constexpr (GROUPS > 1) {
            static_assert(GROUPS == 2 && OPTIMISER == SGD, "groups would share what other optimisers keep");
            if (is_well) is_well = !__syncthreads_or(!sums.add_up(partners, here, rule));
            if (is_well) sums.tell_weights(here);
        }
        if (!is_well) {  // block-uniform
            if (threadIdx.x == 0) status[1] = 1;
            return;
        }
        if (threadIdx.x < ROWS) ids[(step + 2) % 3 * ROWS + threadIdx.x] = coming;
        ++here.turn;
        __syncthreads();
    }
    move_weights<X, Net, ROWS, BLOCKS, L>(run, room, true);
    if (blockIdx.x == 0 && threadIdx.x == 0) status[0] = here.turn;  // every block has read it by now
}
