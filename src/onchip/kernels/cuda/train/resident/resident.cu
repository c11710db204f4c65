// train/resident/resident.cu: training of an MLP by blocks that stay on the chip, step after step, weights in shared memory.
//
// Idea    Of each hidden layer a block owns tiles of 8 units: their weights, and those by which the next layer reads
//         them. In a step every block makes what its units give, and all hand that to each other through L2, layer by
//         layer. Of the last layer a block takes a few rows: outputs, loss, gradients back to the last hidden layer,
//         which it hands to all; from there each works out its own units' gradients and those of its own weights, and
//         moves them on the spot. Rows of the next step are on their way meanwhile. A larger batch is two groups' of
//         blocks, who own the same and add up their gradients. Weights are read when a launch begins and written when
//         it ends, many steps later. Networks that are alike train side by side, along y of the grid; where many wait,
//         each has fewer blocks, which own more.
// Floor   784-320-160-10, batch 64: 85 Mflop a step, 2 us of 40 multiprocessors' mma.sync in tf32; 120 KB of
//         activations to each block, 1.1 us at 109 B/ns; four exchanges, 0.7 us each from store to load. What keeps it
//         five times above: each exchange ends a phase of few instructions a warp, whose latencies add up. Four such
//         networks of 2 x 14 blocks fill the chip: by the planner's estimate, 1.75 times the time of one with 2 x 40.
// Order   Sums over inputs: chunks of 16 k's, warps by turns, then the warps' parts first to last. Gradients over
//         rows: chunks of 16, first to last, then both groups. It depends on the network and the batch alone, not on
//         how many blocks a network has: ALONE is how many it would have by itself, whose room decides.
// Layout  x (n, x_stride): bytes k that mean k * scale, or floats; rows begin at multiples of 16 bytes. w, mean and
//         square as train/large_batch/launches.cu has them; own_mean and own_square lie alike.
// Shared  train/resident/resident.cuh's Room: rows, activations of all hidden layers, the block's weights.
// Limits  2 to 15 layers, at most 32 outputs and 128 rows; what does not fit a multiprocessor is train/large_batch/launches.cu's. All
//         blocks are there at a time (cooperative launch), and each owns a tile of some layer: who owns none would not
//         be waited for. Of what is handed over the last bit is lost. A number that does not come before the deadline
//         ends all blocks.
#include "train/resident/step.cuh"

// Weights and biases from memory, or back: who owns them, and of the last layer's biases the first block, writes.
template <class X, class Net, int ROWS, int BLOCKS, int l>
__device__ __forceinline__ void move_weights(const Run<Net::LAYERS>& run, float* room, bool is_back) {
    using R = Room<X, Net, ROWS, BLOCKS>;
    constexpr int L = Net::LAYERS, D = Net::at(l - 1), N = Net::at(l);
    const LayerState state = run.state(l);
    const LayerFacts& facts = run.facts[l - 1];
    float *const weights = room + R::weights(l), *const biases = room + R::biases(l);
    const int block = static_cast<int>(blockIdx.x) % BLOCKS;
    if (is_back && blockIdx.x >= BLOCKS) return;  // all groups have the same
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
        if (l == L && k < D && !is_back) here = Exchange::sent(here);  // as those that move will be told
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

// -- all of it -------------------------------------------------------------------------------------------------------

template <class P, class X, int GROUPS, int ROWS, int BLOCKS, int ALONE, u32 OPTIMISER, unsigned long long CODES,
          int... W>
__global__ void __launch_bounds__(TEAM, 1) train_resident(const __grid_constant__ Run<sizeof...(W) - 1> run) {
    using Net = Widths<W...>;
    using K = Kinds<CODES>;
    using R = Room<X, Net, ROWS, BLOCKS>;
    using B = Blocks<P, X, Net, K, ROWS, BLOCKS, ALONE, OPTIMISER>;
    constexpr int L = Net::LAYERS, LANES = B::LANES, N = Net::at(L);
    extern __shared__ float room[];
    __shared__ Rule rule;  // of the turn: who reads it from memory waits
    u32* const ids = reinterpret_cast<u32*>(room) + R::IDS;
    u32* const status = run.mine(run.status);
    const long long *const progress = run.mine(run.progress), *const order = run.mine(run.order);
    const u32 first_turn = status[0];
    const int group = static_cast<int>(blockIdx.x) / BLOCKS;
    const bool is_teller = blockIdx.x % BLOCKS == 0;
    const long long first_step = progress[0], all = progress[1], steps = (all + run.batch - 1) / run.batch;
    // A network without a step in this launch: its blocks wait for no other, so none may store what another still loads.
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
        if (threadIdx.x == 0) rule = run.mine(run.rules)[step];  // nobody has read the last one since all waited
        const u32 coming = threadIdx.x < ROWS ? read_ids(step + 2) : 0;
        const int row = here.block * R::HEAD_ROWS + threadIdx.x / LANES;  // of the loss
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
            int hits = 0;
            for (int i = threadIdx.x; i < ROWS; i += 32) {
                const float* const told = room + R::OUTPUTS + i * R::pitch(L) + N;
                loss += told[0], hits += static_cast<int>(told[1]);
            }
            loss = reduce_lanes<Sum, 32>(loss);
            hits = reduce_lanes<Sum, 32>(hits);
            if (threadIdx.x == 0) {
                run.mine(run.step_losses)[step * GROUPS + group] = loss;
                run.mine(run.step_hits)[step * GROUPS + group] = hits;
            }
        }
        if (is_well) is_well = sums.backward(here, rule);
        const Partners<BLOCKS, AllSums::PIECES> partners = {run.mine(run.parts), here.turn, run.deadline_ms, group, here.block};
        if (GROUPS > 1 && is_well) sums.send(partners);
        __syncthreads();  // rows have been read
        next.keep(room);
        if constexpr (GROUPS > 1) {
            static_assert(GROUPS == 2 && OPTIMISER == SGD, "groups would share what other optimisers keep");
            if (is_well) is_well = !__syncthreads_or(!sums.add_up(partners, here, rule));
            if (is_well) sums.tell_weights(here);
        }
        if (!is_well) {  // all threads of the block know
            if (threadIdx.x == 0) status[1] = 1;
            return;
        }
        if (threadIdx.x < ROWS) ids[(step + 2) % 3 * ROWS + threadIdx.x] = coming;
        ++here.turn;
        __syncthreads();
    }
    move_weights<X, Net, ROWS, BLOCKS, L>(run, room, true);
    if (blockIdx.x == 0 && threadIdx.x == 0) status[0] = here.turn;  // all have read it: they took turns
}
