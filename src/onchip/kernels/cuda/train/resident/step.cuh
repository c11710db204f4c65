// train/resident/step.cuh: one step of train/resident/resident.cu: arguments, row loads, forward, loss, backward.
#pragma once

#include "train/resident/weights.cuh"

template <int L>
struct Run {
    const void* x;
    const void* targets;        // (n,) int64 classes, or (n, outputs) float32
    const long long* order;     // (rows,) row indices, batch by batch
    const Rule* rules;          // (steps,)
    const long long* progress;  // the launch's first step, and the end of its rows
    double* step_losses;        // (steps, groups)
    long long* step_correct;       // (steps, groups)
    u32* status;                // [0] turns taken by earlier launches, [1] nonzero after a timeout
    float* parts;               // buffer of Partners
    LayerState layers[L];
    long long batch, x_stride;  // in rows; in elements
    Networks networks;
    float scale;
    u32 deadline_ms;
    LayerFacts facts[L];

    template <class T>
    __device__ __forceinline__ T* mine(T* of_first) const {
        return networks.mine(of_first);
    }
    __device__ __forceinline__ LayerState state(int layer) const {
        const LayerState& of = layers[layer - 1];
        return {mine(of.w), mine(of.mean), mine(of.square), mine(of.own_mean), mine(of.own_square), mine(of.forward),
                mine(of.backward)};
    }
};

// Codes of the loss and of each layer's activation, 4 bits each, the loss first.
template <unsigned long long CODES>
struct Kinds {
    static constexpr u32 LOSS = CODES & 15;
    static __device__ constexpr u32 of(int layer) { return CODES >> 4 * layer & 15; }
};

// Rows of a step that belong to a group, at most ROWS.
template <int ROWS>
struct Turn {
    long long first;
    int rows;

    // all: end of the launch's rows in the order
    __device__ __forceinline__ Turn(long long step, long long batch, long long all, int group) {
        first = step * batch + group * ROWS;
        long long left = batch - group * ROWS;
        if (left > all - first) left = all - first;
        rows = static_cast<int>(left < 0 ? 0 : left < ROWS ? left : ROWS);
    }
};

// -- row loads -------------------------------------------------------------------------------------------------------

// The next step's rows, in flight in registers. TEAM / ROWS adjacent threads load a row.
template <class X, class Net, int ROWS, int BLOCKS>
struct NextRows {
    using R = Room<X, Net, ROWS, BLOCKS>;
    static constexpr int PER_PIECE = 16 / sizeof(X), A_ROW = (Net::at(0) + PER_PIECE - 1) / PER_PIECE;
    static constexpr int LANES = TEAM / ROWS, COUNT = (A_ROW + LANES - 1) / LANES;
    uint4 v[COUNT];

    __device__ __forceinline__ void fetch(const void* x, long long stride, const u32* ids, int rows) {
        const int row = threadIdx.x / LANES, lane = threadIdx.x % LANES;
        const X* const from = static_cast<const X*>(x) + ids[row] * stride + lane * PER_PIECE;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            v[i] = {0, 0, 0, 0};
            if (row < rows && lane + i * LANES < A_ROW)
                v[i] = __ldcg(reinterpret_cast<const uint4*>(from + i * LANES * PER_PIECE));
        }
    }
    __device__ __forceinline__ void keep(float* room) const {
        const int row = threadIdx.x / LANES, lane = threadIdx.x % LANES;
        X* const to = reinterpret_cast<X*>(room) + row * R::X_PITCH + lane * PER_PIECE;  // 8 B aligned
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            if (lane + i * LANES >= A_ROW) break;
            uint2* const at = reinterpret_cast<uint2*>(to + i * LANES * PER_PIECE);
            at[0] = {v[i].x, v[i].y};
            at[1] = {v[i].z, v[i].w};
        }
    }
};

// -- the loss --------------------------------------------------------------------------------------------------------

// Replaces outputs z of ROWS rows by their gradients; LANES lanes share a row, and element i of a lane is column(i) of
// N. Every lane gets the losses and whether the prediction is correct; both are 0 for rows that do not count. Rows are
// interleaved to hide the latency of the reductions.
template <int LANES, int N, u32 LOSS, u32 CODE, int ROWS, int MINE, class Column>
__device__ __forceinline__ void lose(float (&z)[ROWS][MINE], const Column& column, const bool (&counts)[ROWS], float slope,
                                     const float (&target)[ROWS][MINE], const int (&truth)[ROWS], float (&loss)[ROWS],
                                     int (&hit)[ROWS]) {
    if constexpr (LOSS == CROSS_ENTROPY) {
        float most[ROWS], total[ROWS], at_truth[ROWS];  // at_truth: nonzero in one lane
        int best[ROWS];
#pragma unroll
        for (int h = 0; h < ROWS; ++h) {
            most[h] = __uint_as_float(0xff800000u), total[h] = at_truth[h] = 0.0f, best[h] = N;
#pragma unroll
            for (int i = 0; i < MINE; ++i)
                if (column(i) < N) most[h] = fmaxf(most[h], z[h][i]);
        }
#pragma unroll
        for (int mask = LANES / 2; mask > 0; mask /= 2)
#pragma unroll
            for (int h = 0; h < ROWS; ++h) most[h] = fmaxf(most[h], __shfl_xor_sync(~0u, most[h], mask));
#pragma unroll
        for (int i = 0; i < MINE; ++i)
#pragma unroll
            for (int h = 0; h < ROWS; ++h) {
                const float less = z[h][i] - most[h];
                z[h][i] = column(i) < N ? expf(less) : 0.0f;
                total[h] += z[h][i];
                if (column(i) == truth[h]) at_truth[h] = less;
                if (less == 0.0f && column(i) < best[h]) best[h] = column(i);
            }
#pragma unroll
        for (int mask = LANES / 2; mask > 0; mask /= 2)
#pragma unroll
            for (int h = 0; h < ROWS; ++h) {
                total[h] += __shfl_xor_sync(~0u, total[h], mask);
                at_truth[h] += __shfl_xor_sync(~0u, at_truth[h], mask);
                best[h] = min(best[h], __shfl_xor_sync(~0u, best[h], mask));
            }
#pragma unroll
        for (int h = 0; h < ROWS; ++h) {
            // total is in [1, N]: skips the special cases of a division, whose branches would diverge between rows.
            float scale;
            asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(scale) : "f"(total[h]));
            scale = fmaf(scale, fmaf(-total[h], scale, 1.0f), scale);
#pragma unroll
            for (int i = 0; i < MINE; ++i) z[h][i] = z[h][i] * scale - (column(i) == truth[h] ? 1.0f : 0.0f);
            loss[h] = logf(total[h]) - at_truth[h];
            hit[h] = best[h] == truth[h];
        }
    } else {
#pragma unroll
        for (int h = 0; h < ROWS; ++h) {
            loss[h] = 0.0f, hit[h] = 0;
#pragma unroll
            for (int i = 0; i < MINE; ++i) {
                const float difference = z[h][i] - target[h][i];
                if (column(i) < N) loss[h] = fmaf(difference, difference, loss[h]);
                z[h][i] = column(i) < N ? through(CODE, slope, difference, z[h][i]) : 0.0f;
            }
            loss[h] = reduce_lanes<Sum, LANES>(loss[h]) * (LOSS == HALF_SSE ? 0.5f : 1.0f / N);
        }
    }
#pragma unroll
    for (int h = 0; h < ROWS; ++h) {
        if (!counts[h]) loss[h] = 0.0f, hit[h] = 0;
#pragma unroll
        for (int i = 0; i < MINE; ++i) z[h][i] = counts[h] ? z[h][i] : 0.0f;
    }
}

// -- layers ----------------------------------------------------------------------------------------------------------

// ALONE: blocks of a network that trains alone. It fixes the reduction order, whatever BLOCKS is.
template <class P, class X, class Net, class K, int ROWS, int BLOCKS, int ALONE, u32 OPTIMISER>
struct Blocks {
    using R = Room<X, Net, ROWS, BLOCKS>;
    static constexpr int L = Net::LAYERS, RT = ROWS / 16;
    static constexpr int LANES = 8, TARGETS = (Net::at(L) + LANES - 1) / LANES;  // per row; per lane
    const Run<L>& run;
    float* const room;
    int group, block;
    u32 turn;  // counted across launches

    // Exchange buffer of this group.
    template <int SENT_ROWS, int TILES>
    __device__ __forceinline__ Exchange exchange(float* at, u32 of_turn) const {
        return {at + static_cast<long long>(group) * 2 * TILES * 8 * SENT_ROWS, of_turn};
    }

    // First own unit of hidden layer l, or 0 (a valid address) if the block owns none.
    template <int l>
    __device__ __forceinline__ int first_unit() const {
        const int first = block * 8 * R::own(l);
        return first < Net::at(l) ? first : 0;
    }

    // Input of layer l, and its row pitch.
    template <int l>
    __device__ __forceinline__ auto input() const {
        if constexpr (l == 1) return reinterpret_cast<const X*>(room);
        else return static_cast<const float*>(room + R::values(l - 1));
    }
    template <int l>
    static constexpr int INPUT_PITCH = l == 1 ? R::X_PITCH : R::pitch(l - 1);

    // Layers l to L - 1: computes own units, then receives all. Returns false on timeout.
    template <int l>
    __device__ __forceinline__ bool forward() const {
        if constexpr (l < L) {
            constexpr int OWN = R::own(l), CHUNKS = round_up(Net::at(l - 1), CHUNK) / CHUNK, TILES = R::tiles(l);
            constexpr int ROOM = ROWS * R::pitch(l) / (RT * 128), SPLITS = shares_of(CHUNKS, ROOM);
            const LayerFacts& facts = run.facts[l - 1];
            const Exchange exchange = this->exchange<ROWS, TILES>(run.state(l).forward, turn);
            const float scale = l == 1 ? run.scale : 1.0f;
            const float* const biases = room + R::biases(l);
            const auto finish = [&](int row, int unit, float sum) {
                const int of_layer = block * 8 * OWN + unit;
                if (of_layer >= 8 * TILES) return;
                const float made = activate<K::of(l)>(fmaf(scale, sum, biases[unit]), __uint_as_float(facts.slope));
                exchange.send<ROWS, TILES>(of_layer, row, of_layer < Net::at(l) ? made : 0.0f);
                if constexpr (l == L - 1) room[R::OWN + row * R::own_pitch(l) + unit] = made;
            };
            multiply_columns<P, RT, OWN, SPLITS, CHUNKS, ROOM / SPLITS>(
                input<l>(), INPUT_PITCH<l>, room + R::weights(l), R::pitch(l - 1), room + R::values(l), finish);
            __syncthreads();
            if constexpr (l == L - 1) return true;
            const bool is_there = exchange.receive<ROWS, TILES>(room + R::values(l), R::pitch(l), run.deadline_ms);
            if (__syncthreads_or(!is_there)) return false;
            return forward<l + 1>();
        } else {
            return true;
        }
    }

    // Output layer, loss, and gradients of outputs and last hidden layer: HEAD_ROWS rows per block, broadcast to all.
    // has_moved: the output layer's weights were updated since launch and are received from their owners.
    __device__ __forceinline__ bool head(int rows, bool has_moved, const float (&target)[1][TARGETS],
                                         const int (&truth)[1]) const {
        constexpr int HEAD = R::HEAD_ROWS, D = Net::at(L - 1), N = Net::at(L), TILES = R::tiles(L - 1);
        constexpr int PITCH = R::pitch(L - 1), OUT = R::pitch(L);
        float *const given = room + R::OUTPUTS, *const outputs = given + HEAD * PITCH;
        const float *const weights = room + R::weights(L), *const biases = room + R::biases(L);
        const float slope = __uint_as_float(run.facts[L - 1].slope), before = __uint_as_float(run.facts[L - 2].slope);
        const Exchange values = exchange<ROWS, TILES>(run.state(L - 1).forward, turn);
        const Exchange gradients = exchange<ROWS, TILES>(run.state(L - 1).backward, turn);
        const Exchange told = exchange<ROWS, R::tiles(L)>(run.state(L).forward, turn);
        const Exchange moved = exchange<N, TILES>(run.state(L).backward, turn - 1);
        const int first = block * HEAD, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        bool is_there = true;
        if (first < ROWS) {
            is_there = values.receive<ROWS, TILES, HEAD>(given, PITCH, run.deadline_ms, first);
            if (has_moved)
                is_there = moved.receive<N, TILES>(room + R::weights(L), PITCH, run.deadline_ms) && is_there;
        }
        if (__syncthreads_or(!is_there)) return false;
        if (first < ROWS) {
            for (int item = warp; item < HEAD * N; item += TEAM_WARPS) {
                const float *const x = given + item % HEAD * PITCH, *const w = weights + item / HEAD * PITCH;
                float sum = 0.0f;
                for (int k = lane; k < D; k += 32) sum = fmaf(x[k], w[k], sum);
                sum = reduce_lanes<Sum, 32>(sum);
                if (lane == 0)
                    outputs[item % HEAD * OUT + item / HEAD] = activate<K::of(L)>(sum + biases[item / HEAD], slope);
            }
        }
        __syncthreads();
        if (first < ROWS) {
            const int mine = threadIdx.x / LANES;
            if (warp < (HEAD * LANES + 31) / 32) {
                float* const row = outputs + (mine < HEAD ? mine : HEAD - 1) * OUT;  // clamped, same warp
                const auto column = [](int i) { return static_cast<int>(threadIdx.x) % LANES + i * LANES; };
                float z[1][TARGETS], loss[1];
                int hit[1];
#pragma unroll
                for (int i = 0; i < TARGETS; ++i) z[0][i] = column(i) < N ? row[column(i)] : 0.0f;
                lose<LANES, N, K::LOSS, K::of(L)>(z, column, {mine < HEAD && first + mine < rows}, slope, target, truth, loss, hit);
                __syncwarp();
                if (mine < HEAD) {
#pragma unroll
                    for (int i = 0; i < TARGETS; ++i)
                        if (column(i) < N) row[column(i)] = z[0][i];
                    if (threadIdx.x % LANES == 0) row[N] = loss[0], row[N + 1] = static_cast<float>(hit[0]);
                }
            }
        }
        __syncthreads();
        if (first < ROWS) {
            for (int i = threadIdx.x; i < HEAD * R::TOLD; i += TEAM) {
                const int row = first + i % HEAD;
                if (row < ROWS) told.send<ROWS, R::tiles(L)>(i / HEAD, row, outputs[i % HEAD * OUT + i / HEAD]);
            }
            for (int i = threadIdx.x; i < (8 * R::tiles(L) - R::TOLD) * HEAD; i += TEAM)  // pads the last tile
                if (first + i % HEAD < ROWS) told.send<ROWS, R::tiles(L)>(R::TOLD + i / HEAD, first + i % HEAD, 0.0f);
            for (int i = threadIdx.x; i < HEAD * 8 * TILES; i += TEAM) {
                const int row = i / (8 * TILES), k = i % (8 * TILES);
                float sum = 0.0f;
#pragma unroll 5
                for (int n = 0; n < N; ++n) sum = fmaf(outputs[row * OUT + n], weights[n * PITCH + k], sum);
                sum = k < D ? through(K::of(L - 1), before, sum, given[row * PITCH + k]) : 0.0f;
                if (first + row < ROWS) gradients.send<ROWS, TILES>(k, first + row, sum);
            }
        }
        __syncthreads();
        is_there = gradients.receive<ROWS, TILES>(room + R::values(L - 1), PITCH, run.deadline_ms);
        is_there = told.receive<ROWS, R::tiles(L)>(room + R::OUTPUTS, OUT, run.deadline_ms) && is_there;
        return !__syncthreads_or(!is_there);
    }

    // Gradients of own units of layer l, from all gradients of layer l + 1.
    template <int l>
    __device__ __forceinline__ void own_units() const {
        constexpr int OWN = R::own(l), CHUNKS = round_up(Net::at(l + 1), CHUNK) / CHUNK, PITCH = R::own_pitch(l);
        constexpr int SPLITS = splits_of(RT, CHUNKS, Room<X, Net, ROWS, ALONE>::SOME_FLOATS);
        constexpr int A_TILE = (SPLITS - 1) * RT * 128, ROOM = A_TILE ? R::SOME_FLOATS / A_TILE : OWN;
        const LayerFacts& facts = run.facts[l - 1];
        const float slope = __uint_as_float(facts.slope);
        const Exchange exchange = this->exchange<ROWS, R::tiles(l)>(run.state(l).backward, turn);
        const float* const values = room + R::values(l);
        float* const to = room + R::OWN;
        multiply_rows<P, RT, OWN, SPLITS, CHUNKS, ROOM>(
            static_cast<const float*>(room + R::values(l + 1)), R::pitch(l + 1), room + R::columns(l + 1),
            R::pitch(l + 1), room + R::SOME_PARTS, [&](int row, int unit, const float (&sums)[4]) {
                const int tile = block * OWN + unit / 8;
                float made[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int of_layer = tile * 8 + unit % 8 + i % 2;
                    made[i] = 0.0f;
                    if (of_layer < Net::at(l))
                        made[i] = through(K::of(l), slope, sums[i], values[(row + i / 2) * R::pitch(l) + of_layer]);
                    to[(row + i / 2) * PITCH + unit + i % 2] = made[i];
                }
                if constexpr (l > 1) {
                    constexpr int TILES = R::tiles(l);
                    if (tile >= TILES) return;
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        exchange.send<ROWS, TILES>(tile * 8 + unit % 8 + i % 2, row + i / 2, made[i]);
                }
            });
        __syncthreads();
    }
    template <int l>
    __device__ __forceinline__ bool all_units() const {
        const Exchange exchange = this->exchange<ROWS, R::tiles(l)>(run.state(l).backward, turn);
        const bool is_there = exchange.receive<ROWS, R::tiles(l)>(room + R::values(l), R::pitch(l), run.deadline_ms);
        return !__syncthreads_or(!is_there);
    }
};

// Weight gradients of layers 1 to l.
template <class P, class X, class Net, class K, int GROUPS, int ROWS, int BLOCKS, int ALONE, u32 OPTIMISER, int l>
struct Sums {
    using R = Room<X, Net, ROWS, BLOCKS>;
    using B = Blocks<P, X, Net, K, ROWS, BLOCKS, ALONE, OPTIMISER>;
    static constexpr int L = Net::LAYERS, OWN = l < L ? 8 * R::own(l) : 8, OWN_INPUTS = l > 1 ? 8 * R::own(l - 1) : 8;
    static constexpr bool HAS_ROWS = l < L, HAS_COLUMNS = l > 1;
    using Before = Sums<P, X, Net, K, GROUPS, ROWS, BLOCKS, ALONE, OPTIMISER, l - 1>;
    Before before;
    Gradients<P, 4, HAS_ROWS ? Net::at(l - 1) : 1, OWN> rows;
    Gradients<P, 2, OWN_INPUTS, HAS_COLUMNS ? Net::at(l) : 1> columns;
    // Chunks in the gradient exchange; previous layers come first.
    static constexpr int ROW_PIECES = HAS_ROWS ? decltype(rows)::PIECES : 0;
    static constexpr int PIECES = Before::PIECES + ROW_PIECES + (HAS_COLUMNS ? decltype(columns)::PIECES : 0);

    // With all gradients of layer l present: computes dW and updates, then recurses to the previous layers. The weights
    // updated here are no longer read in this step.
    __device__ __forceinline__ bool backward(const B& here, const Rule& rule) {
        float* const room = here.room;
        if constexpr (HAS_ROWS) rows.clear();
        if constexpr (HAS_COLUMNS) columns.clear();
        if constexpr (l == L) {
            columns.template add<ROWS>(static_cast<const float*>(room + R::OWN), R::own_pitch(L - 1), room + R::OUTPUTS,
                                       R::pitch(L));
            if constexpr (L > 2) __syncthreads();  // own units' gradients overwrite what is read here
        } else {
            constexpr bool HAS_OWN_ONLY = l == 1 && L > 2;
            if constexpr (l > 1) here.template own_units<l - 1>();
            const float* const all = room + R::values(l);
            const float* const dz = HAS_OWN_ONLY ? room + R::OWN : all + here.template first_unit<l>();
            rows.template add<ROWS>(here.template input<l>(), B::template INPUT_PITCH<l>, dz,
                                    HAS_OWN_ONLY ? R::own_pitch(1) : R::pitch(l));
            if constexpr (HAS_COLUMNS)
                columns.template add<ROWS>(here.template input<l>() + here.template first_unit<l - 1>(),
                                           R::pitch(l - 1), all, R::pitch(l));
        }
        if (GROUPS == 1) move_mine(here, rule);
        if constexpr (l == L && GROUPS == 1) tell_weights(here);
        if constexpr (l > 2 && l < L) {
            __syncthreads();
            if (!here.template all_units<l - 1>()) return false;
        }
        return before.backward(here, rule);
    }
    // With two groups, once all layers are done: send, add up, update.
    template <class Partners>
    __device__ __forceinline__ void send(const Partners& partners) {
        if constexpr (HAS_ROWS) rows.send(partners, Before::PIECES);
        if constexpr (HAS_COLUMNS) columns.send(partners, Before::PIECES + ROW_PIECES);
        before.send(partners);
    }
    template <class Partners>
    __device__ __forceinline__ bool add_up(const Partners& partners, const B& here, const Rule& rule) {
        bool all = true;
        if constexpr (HAS_ROWS) all = rows.add_up(partners, Before::PIECES);
        if constexpr (HAS_COLUMNS) all = columns.add_up(partners, Before::PIECES + ROW_PIECES) && all;
        move_mine(here, rule);
        return before.add_up(partners, here, rule) && all;
    }
    __device__ __forceinline__ void move_mine(const B& here, const Rule& rule) {
        const LayerState state = here.run.state(l);
        const LayerFacts& facts = here.run.facts[l - 1];
        float* const room = here.room;
        if constexpr (HAS_ROWS)
            move_rows<OPTIMISER>(rows, rule, l == 1 ? here.run.scale : 1.0f, room + R::weights(l), R::pitch(l - 1),
                                 room + R::biases(l), state, facts, here.block * OWN, Net::at(l));
        if constexpr (HAS_COLUMNS)
            move_columns<OPTIMISER>(columns, rule, room + R::columns(l), R::pitch(l), l < L ? state.own_mean : state.mean,
                                    l < L ? state.own_square : state.square, facts.stride, here.block * OWN_INPUTS,
                                    Net::at(l - 1));
        if constexpr (l == L) {
            const long long mine = static_cast<long long>(here.block) * Net::at(L);
            if (facts.has_bias)
                move_biases<OPTIMISER>(columns, rule, room + R::biases(L), state.own_mean + mine, state.own_square + mine);
        }
    }
    // Broadcasts the output layer's weights of own inputs; the next step's head() receives them.
    __device__ __forceinline__ void tell_weights(const B& here) const {
        constexpr int N = Net::at(L), TILES = R::tiles(L - 1);
        const Exchange moved = here.template exchange<N, TILES>(here.run.state(L).backward, here.turn);
        __syncthreads();
        for (int i = threadIdx.x; i < OWN_INPUTS * N; i += TEAM) {
            const int input = i % OWN_INPUTS, n = i / OWN_INPUTS, of_layer = here.block * OWN_INPUTS + input;
            if (of_layer < 8 * TILES)
                moved.send<N, TILES>(of_layer, n, here.room[R::columns(L) + input * R::pitch(L) + n]);
        }
    }
};
template <class P, class X, class Net, class K, int GROUPS, int ROWS, int BLOCKS, int ALONE, u32 OPTIMISER>
struct Sums<P, X, Net, K, GROUPS, ROWS, BLOCKS, ALONE, OPTIMISER, 0> {
    static constexpr int PIECES = 0;
    template <class Partners>
    __device__ __forceinline__ void send(const Partners&) {}
    template <class Partners, class B>
    __device__ __forceinline__ bool add_up(const Partners&, const B&, const Rule&) {
        return true;
    }
    template <class B>
    __device__ __forceinline__ bool backward(const B&, const Rule&) {
        return true;
    }
};
