// train/layer_parallel/layer_parallel.cu: training of an MLP on pixels by blocks that stay on the chip, a layer's weights each; sm_90a alone.
//
// Idea    Every hidden layer has blocks of its own, of which each owns OWN tiles of 8 units: it makes what they give of
//         what the layer before gave, and hands it on through L2. What the last hidden layer gives goes to all blocks of
//         the last two: each works out the outputs, the loss and their gradients by itself, so no gradient of theirs has
//         to be handed back. Layers before make their own units' gradients from those that the layer behind hands them.
//         Weights of the layer behind, and the last layer's, are told after each step, before they are waited for.
//         All products are wgmma's: of numbers in registers as they were handed over (train/layer_parallel/fragments.cuh), as outputs
//         and hidden layers of numbers of one part have them, or in strips (mma/swizzle.cuh), whichever side their sums go
//         along, so nothing is turned. A number is one of bf16, or for fp32 the sum of three; bytes are exact in one.
//         Weights stay in registers, float32. Rows of the next step are written to shared memory while blocks wait.
//         Networks that are alike train side by side, along y of the grid.
// Floor   784-320-160-10, batch 64: 40 + 20 + 1 blocks. Rows are read for 50 + 52 products of 2 KB at 128 B a clock,
//         0.9 us; two exchanges, 0.7 us each from store to load, of 120 KB in fp32, 1 us at 64 B a clock: 3.3 us.
//         What keeps it above, in bf16 by 2.5 times: from what the first layer sends to what the last hidden layer gives are 3.3 us,
//         from there to new weights 2.7. Meanwhile blocks of the first layer bring pixels, for 2.1 us: the loads that 40 blocks
//         ask for take 1.2 us to be taken, to registers or to shared memory, and whoever asks for more waits behind them.
// Order   Sums over inputs: a number's parts, then steps of 16 k's (of registers in the order of `position`), two teams
//         by turns, then the teams' sums. Gradients over rows: parts, then 16 after 16. It depends on the
//         network alone, not on how many blocks there are.
// Layout  x (n, x_stride): bytes k that mean k * scale, rows at multiples of 16 bytes, a bias's 1 behind them. w, mean and
//         square as train/large_batch/launches.cu has them.
// Shared  HiddenRoom, LastRoom: what comes in, weights, gradients.
// Limits  Bytes, 2 to 15 layers, at most 32 outputs and 64 rows. All blocks are there at a time (cooperative launch). Of
//         16 bytes that are handed over a number loses its last bit. What does not come before the deadline ends all
//         blocks.
#include "train/layer_parallel/outputs.cuh"

// -- blocks ----------------------------------------------------------------------------------------------------------

// Which rows a step has, and which come: three steps' numbers lie in shared memory.
template <int L, int BATCH>
struct Orders {
    const Training<L>& run;
    u32* ids;
    long long first_step, all, steps;

    __device__ __forceinline__ Orders(const Training<L>& run, char* at)
        : run(run), ids(reinterpret_cast<u32*>(at)), first_step(run.mine(run.progress)[0]), all(run.mine(run.progress)[1]),
          steps((all + run.batch - 1) / run.batch) {}
    __device__ __forceinline__ int rows(long long step) const { return Turn<BATCH>(step, run.batch, all, 0).rows; }
    __device__ __forceinline__ u32 read(long long step) const {
        const Turn<BATCH> turn(step, run.batch, all, 0);
        const int row = threadIdx.x;
        return row < turn.rows ? static_cast<u32>(run.mine(run.order)[turn.first + row]) : 0;
    }
    __device__ __forceinline__ u32* of(long long step) const { return ids + step % 3 * BATCH; }
    __device__ __forceinline__ void keep(long long step, u32 id) const {
        if (threadIdx.x < BATCH) of(step)[threadIdx.x] = id;
    }
};

// c = a b, a team's sums, of rows that lie in shared memory; those from strip FIXED on, `further` bytes further on.
template <int A_PARTS, int STEPS, int FIXED, int ALL, class B>
__device__ __forceinline__ void multiply_rows_of(float (&c)[ALL][4], u32 a, u32 further, int a_part_bytes, const B& b,
                                                 int team) {
    static_assert(FIXED == 0 || A_PARTS == 1, "of pixels alone");
    using A = Strips<ROWS, false>;
    constexpr int BEFORE = FIXED / 2 < STEPS ? FIXED / 2 : STEPS;
    begin_products();
    if constexpr (BEFORE > 0) begin_sums<BEFORE, TEAMS, A, B, ALL>(c, A(a), b, team, false);
    if constexpr (BEFORE < STEPS)
        begin_parts<A_PARTS, STEPS - BEFORE, TEAMS, A>(c, a + further + FIXED * ROWS_STRIP, a_part_bytes, b.from(BEFORE), team, BEFORE > 0);
    end_products();
    wait_for_products<0>();
}

template <class S>
__device__ __forceinline__ void put_ones(char* input, int l, bool has_bias) {
    if (threadIdx.x < ROWS && has_bias)
        store1(reinterpret_cast<bf16*>(input + place_in_strips<ROWS>(threadIdx.x, S::one(l))), 1.0f);
}

// Uses of gradients of the last hidden layer (Outputs::make_hidden). Where they are a block's own: to shared memory.
template <int PARTS, int OWN>
struct OwnUnits {
    char* to;  // (ROWS, own units) in parts
    int first_unit, team;

    template <int GROUPS>
    __device__ __forceinline__ void operator()(int first, const float (&made)[GROUPS][4][4]) const {
#pragma unroll
        for (int i = 0; i < GROUPS * 8; ++i) {
            const int m = i / 8, j = i / 2 % 4, h = i % 2;
            const int unit = ((team + (first + m) * TEAMS) * 4 + threadIdx.x % 4) * 8 + 2 * j - first_unit;
            if (unit < 0 || unit >= 8 * OWN) continue;
            u32 parts[PARTS];
            split_two(parts, made[m][j][2 * h], made[m][j][2 * h + 1]);
#pragma unroll
            for (int part = 0; part < PARTS; ++part)
                *reinterpret_cast<u32*>(to + place_in_strips<ROWS>(sum_row(2 * h), part * 8 * OWN + unit)) = parts[part];
        }
    }
};
// By the weights of the layer before's own units: c = made columns.
template <int PARTS, int OWN, class Strips>
struct Columns {
    float (&c)[PARTS * OWN][4];
    const Strips& columns;
    int team;

    template <int GROUPS>
    __device__ __forceinline__ void operator()(int first, const float (&made)[GROUPS][4][4]) const {
        u32 words[GROUPS * 2][PARTS][4];
#pragma unroll
        for (int i = 0; i < GROUPS * 8; ++i) {
            const int j = i / 2 % 4, h = i % 2;
            u32 parts[PARTS];
            split_two(parts, made[i / 8][j][2 * h], made[i / 8][j][2 * h + 1]);
#pragma unroll
            for (int part = 0; part < PARTS; ++part) words[i / 4][part][j % 2 * 2 + h] = parts[part];
        }
        begin_products();
#pragma unroll
        for (int i = 0; i < GROUPS * 2; ++i)
            add_numbers<PARTS, PARTS * OWN, Strips>(c, words[i], columns.word(2 * (team + (first + i / 2) * TEAMS) + i % 2),
                                                    first > 0 || i > 0);
        end_products();
        wait_for_products<0>();
    }
};

// What own units give: from their sums, to whoever waits for it.
// given  sums; then what the units give
// scale  of the sums; biases are added by words alone
template <class S, class K, int l>
__device__ __forceinline__ void give(typename S::Own& given, const typename S::Tiles& to, int block, int own_units,
                                     const float* biases, float scale, float slope) {
    using Own = typename S::Own;
    constexpr int GROUP = S::Tiles::GROUP;
#pragma unroll
    for (int n = 0; n < Own::COUNT; ++n) {
        const int unit = Own::column(n);
        if (!Own::is_there(n) || unit >= own_units) break;
#pragma unroll
        for (int i = 0; i < GROUP; ++i) {
            const float sum = S::by_words(l) ? given.v[n][i] + biases[unit + i] : scale * given.v[n][i];
            given.v[n][i] = block * 8 * S::OWN + unit + i < S::at(l) ? activate<K::of(l)>(sum, slope) : 0.0f;
        }
        to.send(block * S::OWN + unit / 8, Own::row(n), unit % 8, given.v[n]);
    }
}
// Gradients of own units by what goes into their activation: to shared memory in parts, and to the layer before.
// made   gradients by what the units give; then by what goes in
// room   (ROWS, own units) in parts
template <class S, class K, int l>
__device__ __forceinline__ void give_back(typename S::Own& made, const typename S::Own& given, char* room,
                                          const typename S::Tiles& to, int block, int own_units, float slope) {
    using Own = typename S::Own;
    constexpr int GROUP = S::Tiles::GROUP, PARTS = S::PARTS;
#pragma unroll
    for (int n = 0; n < Own::COUNT; ++n) {
        const int unit = Own::column(n), row = Own::row(n);
        if (!Own::is_there(n) || unit >= own_units) break;
#pragma unroll
        for (int i = 0; i < GROUP; ++i) {
            const float by_sum = through(K::of(l), slope, made.v[n][i], given.v[n][i]);
            made.v[n][i] = block * 8 * S::OWN + unit + i < S::at(l) ? by_sum : 0.0f;
        }
        u32 parts[GROUP / 2][PARTS];
#pragma unroll
        for (int i = 0; i < GROUP / 2; ++i) split_two(parts[i], made.v[n][2 * i], made.v[n][2 * i + 1]);
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
            char* const at = room + place_in_strips<ROWS>(row, i * 8 * S::OWN + unit);
            if constexpr (GROUP == 8)
                *reinterpret_cast<uint4*>(at) = {parts[0][i], parts[1][i], parts[2][i], parts[3][i]};
            else
                *reinterpret_cast<uint2*>(at) = {parts[0][i], parts[1][i]};
        }
        if constexpr (l > 1) to.send(block * S::OWN + unit / 8, row, unit % 8, made.v[n]);
    }
}

// All turns of a block of hidden layer l. False: it waited in vain.
template <class S, class K, u32 OPTIMISER, int l>
__device__ __forceinline__ bool train_hidden(const Training<S::L>& run, char* room, int block, int team) {
    using R = HiddenRoom<S, l>;
    using Own = typename S::Own;
    constexpr int L = S::L, PARTS = S::PARTS, OWN = S::OWN;
    __shared__ Rule rule;
    const LayerPlaces places = run.places(l);
    const LayerFacts& facts = run.facts[l - 1];
    const float slope = __uint_as_float(facts.slope), scale = l == 1 ? run.scale : 1.0f;
    char* const rest = room + R::REST;
    const Orders<L, S::BATCH> orders(run, rest + R::IDS);
    const u32 input = shared_at(room), gradients = shared_at(rest + R::GRADIENTS);
    float *const sums = reinterpret_cast<float*>(rest + R::SUMS), *const biases = reinterpret_cast<float*>(rest + R::BIASES);
    const int own_units = min(8 * OWN, 8 * S::tiles(l) - block * 8 * OWN);
    Weights<S, OPTIMISER, l, OWN> weights(places, block, team);
    weights.move(places, facts, false);
    weights.tell(rest + R::WEIGHTS, biases);
    Outputs<S, K, typename R::Outputs> outputs(run, rest, team);
    if constexpr (l == 1 || R::HAS_OUTPUTS) {
        for (int i = 0; i < 2; ++i) orders.keep(orders.first_step + i, orders.read(orders.first_step + i));
        __syncthreads();
    }
    NextPixels<S> next;
    if constexpr (l == 1) {
        next.fetch(run.x, run.x_stride, orders.of(orders.first_step), orders.rows(orders.first_step));
        next.template keep<0, S::strips(0)>(room);
    } else {
        put_ones<S>(room, l - 1, facts.has_bias);
    }
    // Weights of the layer behind, by what own units give: as it will tell them.
    const auto put_columns = [&](int piece, const u32 (&four)[4]) {
        constexpr int FOURS = 2 * S::tiles(l + 1 < L ? l + 1 : L);
        const int mine = piece / FOURS, unit = piece % FOURS * 4;
        u32 parts[2][PARTS];
        split_two(parts[0], __uint_as_float(four[0]), __uint_as_float(four[1]));
        split_two(parts[1], __uint_as_float(four[2]), __uint_as_float(four[3]));
#pragma unroll
        for (int i = 0; i < 2 * PARTS; ++i) {
            const int at = R::HAS_OUTPUTS ? position(unit + i % 2 * 2) : unit + i % 2 * 2;
            *reinterpret_cast<u32*>(rest + R::COLUMNS + place_in_strips<8 * OWN * PARTS>(i / 2 * 8 * OWN + mine, at)) =
                parts[i % 2][i / 2];
        }
    };
    if constexpr (R::HAS_COLUMNS)
        read_fours(run.mine(run.layers[l].w), run.facts[l], S::at(l), S::at(l + 1), block * 8 * OWN, own_units, put_columns);
    if constexpr (R::HAS_OUTPUTS) outputs.read_weights();
    u32 turn = run.mine(run.status)[0];
    u32 further = 0;
    show_to_products();
    __syncthreads();
#pragma unroll 1
    for (long long step = orders.first_step; of_whole_warps(step < orders.steps); ++step, ++turn) {
        bool is_there = true;
        u32 coming = 0;
        // What a block does while it waits for others. Weights as they are since the last step: those of the layer behind are
        // one team's to receive, the last layer's the other's, so both wait at the same time. No word is waited for alone.
        const auto prepare = [&]() {
            u32 word = 0;  // of the rule
            if (threadIdx.x < sizeof(Rule) / 4)
                word = reinterpret_cast<const u32*>(run.mine(run.rules) + step)[threadIdx.x];
            if constexpr (l == 1 || R::HAS_OUTPUTS) coming = threadIdx.x < S::BATCH ? orders.read(step + 2) : 0;
            if constexpr (R::HAS_OUTPUTS) outputs.fetch_targets(orders.of(step));
            if (of_whole_warps(step > orders.first_step)) {
                if constexpr (R::HAS_COLUMNS) {
                    constexpr int FOURS = 2 * S::tiles(l + 1);  // of an input
                    const Post columns = {run.mine(run.layers[l].columns), static_cast<long long>(8 * S::tiles(l)) * FOURS * 16,
                                          turn - 1, run.deadline_ms};
                    const auto which = [=](int n) { return block * 8 * OWN * FOURS + n; };
                    if (team == 0) is_there = columns.receive<8 * OWN * FOURS, 128>(own_units * FOURS, which, put_columns);
                }
                if constexpr (R::HAS_OUTPUTS)
                    if (team == TEAMS - 1) is_there = outputs.template receive_weights<128>(turn - 1);
            }
            if (threadIdx.x < sizeof(Rule) / 4) reinterpret_cast<u32*>(&rule)[threadIdx.x] = word;
        };
        if constexpr (l > 1) prepare();
        // What own units give.
        Own given;
        float c[PARTS * OWN][4];
        typename S::template GivenBy<l - 1> before;  // nothing, unless by words
        if constexpr (!S::by_words(l)) {
            if constexpr (l > 1) {
                const typename S::Tiles from(run.mine(run.layers[l - 2].forward), S::tiles(l - 1), turn, run.deadline_ms);
                is_there = from.template receive<S::tiles(l - 1)>(room, S::input_bytes(l)) && is_there;
                show_to_products();
                if (of_whole_warps(__syncthreads_or(!is_there))) return false;
            }
            const Strips<8 * S::strips(l - 1), true> told(shared_at(rest + R::WEIGHTS));
            multiply_rows_of<S::input_parts(l), S::strips(l - 1) / 2, l == 1 ? R::FIXED : 0>(
                c, input, further, S::input_bytes(l), told, team);
            given.template add_teams<PARTS>(c, sums, team, true);
        } else {
            const typename S::Tiles from(run.mine(run.layers[l - 2].forward), S::tiles(l - 1), turn, run.deadline_ms);
            is_there = before.receive(from, team) && is_there;
            before.multiply(c, shared_at(rest + R::WEIGHTS), team);
            if (!given.template add_teams<PARTS>(c, sums, team, is_there)) return false;
        }
        const typename S::Tiles to(places.forward, S::tiles(l), turn, run.deadline_ms);
        give<S, K, l>(given, to, block, own_units, biases, scale, slope);
        if constexpr (S::by_words(l)) before.put(room, S::input_bytes(l), team);
        if constexpr (l == 1) {
            prepare();  // first, for whoever asks while pixels are on their way is answered behind them
            next.fetch(run.x, run.x_stride, orders.of(step + 1), orders.rows(step + 1));
            next.template keep<R::FIXED, S::strips(0)>(room + (R::TWICE * ROWS_STRIP - further));
        }
        if constexpr (R::HAS_OUTPUTS) {
            is_there = outputs.receive(turn) && is_there;
        } else {
            const typename S::Tiles back(run.mine(run.layers[l].backward), S::tiles(l + 1), turn, run.deadline_ms);
            is_there = back.template receive<S::tiles(l + 1)>(rest + R::BEHIND, S::behind(l + 1) * ROWS_STRIP) && is_there;
        }
        show_to_products();
        if (of_whole_warps(__syncthreads_or(!is_there))) return false;
        // Gradients of own units.
        if constexpr (R::HAS_OUTPUTS) outputs.make(orders.rows(step));
        if constexpr (R::HAS_COLUMNS) {
            const typename S::Tiles back(places.backward, S::tiles(l), turn, run.deadline_ms);
            const Strips<8 * OWN * PARTS, false> columns(shared_at(rest + R::COLUMNS));
            Own made;
            if constexpr (R::HAS_OUTPUTS) {
                outputs.make_hidden(Columns<PARTS, OWN, decltype(columns)>{c, columns, team});
                __syncthreads();  // sums of outputs have been read: these lie there, too
            } else {
                multiply_rows_of<PARTS, S::behind(l + 1) / 2, 0>(c, shared_at(rest + R::BEHIND), 0,
                                                                 S::behind(l + 1) * ROWS_STRIP, columns, team);
            }
            made.template add_teams<PARTS>(c, sums, team, true);
            give_back<S, K, l>(made, given, rest + R::GRADIENTS, back, block, own_units, slope);
        } else {
            outputs.make_hidden(OwnUnits<PARTS, OWN>{rest + R::GRADIENTS, block * 8 * OWN, team});
        }
        show_to_products();
        __syncthreads();
        weights.template learn<l == 1 ? R::FIXED : 0>(rule, scale, input, further, gradients);
        weights.tell(rest + R::WEIGHTS, biases);
        if constexpr (l == 1) {
            __syncthreads();  // rows have been read
            next.template keep<0, R::FIXED>(room);
            further = R::TWICE * ROWS_STRIP - further;
        } else {
            const Post columns = {places.columns, static_cast<long long>(8 * S::tiles(l - 1)) * 2 * S::tiles(l) * 16, turn, 0};
            weights.send(columns);
        }
        if constexpr (l == 1 || R::HAS_OUTPUTS) orders.keep(step + 2, coming);
        if constexpr (l == 1) {  // from memory to L2: blocks have other lines of the rows each
            const char* const row = static_cast<const char*>(run.x) + coming * run.x_stride;
            if (threadIdx.x < S::BATCH)
                for (int at = block * 128; at < run.x_stride; at += S::blocks(1) * 128)
                    asm volatile("prefetch.global.L2 [%0];" :: "l"(row + at));
        }
        show_to_products();
        __syncthreads();
    }
    weights.move(places, facts, true);
    return true;
}

// Of the last layer's block.
template <class S, class K, u32 OPTIMISER>
__device__ __forceinline__ bool train_last(const Training<S::L>& run, char* room, int team) {
    using R = LastRoom<S>;
    using Out = Outputs<S, K, typename R::Outputs>;
    constexpr int L = S::L, PARTS = S::PARTS, STRIPS = S::strips(L);
    __shared__ Rule rule;
    const LayerPlaces places = run.places(L);
    const LayerFacts& facts = run.facts[L - 1];
    const Orders<L, S::BATCH> orders(run, room + R::IDS);
    float* const losses = reinterpret_cast<float*>(room + R::LOSSES);
    const u32 input = shared_at(room + R::INPUT), gradients = shared_at(room + R::GRADIENTS);
    Weights<S, OPTIMISER, L, STRIPS> weights(places, 0, team);
    weights.move(places, facts, false);
    Out outputs(run, room, team);
    outputs.read_weights();
    put_ones<S>(room + R::INPUT, L - 1, facts.has_bias);
    for (int i = 0; i < 2; ++i) orders.keep(orders.first_step + i, orders.read(orders.first_step + i));
    u32 turn = run.mine(run.status)[0];
    show_to_products();
    __syncthreads();
#pragma unroll 1
    for (long long step = orders.first_step; of_whole_warps(step < orders.steps); ++step, ++turn) {
        if (threadIdx.x == 0) rule = run.mine(run.rules)[step];
        const u32 coming = threadIdx.x < S::BATCH ? orders.read(step + 2) : 0;
        outputs.fetch_targets(orders.of(step));
        bool is_there = step == orders.first_step || outputs.template receive_weights<CREW>(turn - 1);
        is_there = outputs.receive(turn) && is_there;
        outputs.given.put(room + R::INPUT, S::input_bytes(L), team);
        show_to_products();
        if (of_whole_warps(__syncthreads_or(!is_there))) return false;
        outputs.make(orders.rows(step));
        if (team == 0) {
#pragma unroll
            for (int i = 0; i < 2 * STRIPS * 2; ++i) {
                const int h = i % 2, j = i / 2;
                if (j % 2) continue;
                u32 parts[PARTS];
                split_two(parts, outputs.gradients[h][j], outputs.gradients[h][j + 1]);
#pragma unroll
                for (int part = 0; part < PARTS; ++part)
                    *reinterpret_cast<u32*>(room + R::GRADIENTS +
                                            place_in_strips<ROWS>(Out::row(h), part * 8 * STRIPS + Out::column(j))) = parts[part];
            }
            if (threadIdx.x % 4 == 0) {
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    losses[Out::row(h)] = outputs.loss[h], losses[ROWS + Out::row(h)] = static_cast<float>(outputs.hit[h]);
            }
        }
        show_to_products();
        __syncthreads();
        weights.template learn<0>(rule, 1.0f, input, 0, gradients);
        weights.send(Out::weights_post(run, turn));
        if (threadIdx.x < 32) {
            double total = 0.0;
            int hits = 0;
            for (int i = threadIdx.x; i < S::BATCH; i += 32)
                total += losses[i], hits += static_cast<int>(losses[ROWS + i]);
            total = reduce_lanes<Sum, 32>(total);
            hits = reduce_lanes<Sum, 32>(hits);
            if (threadIdx.x == 0) run.mine(run.step_losses)[step] = total, run.mine(run.step_hits)[step] = hits;
        }
        orders.keep(step + 2, coming);
        __syncthreads();
    }
    weights.move(places, facts, true);
    if (threadIdx.x == 0) run.mine(run.status)[0] = turn;
    return true;
}

// -- all of it -------------------------------------------------------------------------------------------------------

template <class S, class K, u32 OPTIMISER, int l>
__device__ __forceinline__ bool train_layer(const Training<S::L>& run, char* room, int block, int team) {
    if constexpr (l == S::L) {
        return train_last<S, K, OPTIMISER>(run, room, team);
    } else {
        if (block < S::blocks(l)) return train_hidden<S, K, OPTIMISER, l>(run, room, block, team);
        return train_layer<S, K, OPTIMISER, l + 1>(run, room, block - S::blocks(l), team);
    }
}

template <int PARTS, int OWN, int BATCH, u32 OPTIMISER, unsigned long long CODES, int... W>
__global__ void __launch_bounds__(CREW, 1) train_by_layers(const __grid_constant__ Training<sizeof...(W) - 1> run) {
    using S = Sizes<Widths<W...>, PARTS, OWN, BATCH>;
    extern __shared__ float room[];
    // A network without a step in this launch: its blocks wait for no other, so none may store what another still loads.
    const long long* const progress = run.mine(run.progress);
    if (of_whole_warps(progress[0] * run.batch >= progress[1])) return;
    for (int i = threadIdx.x; i < most_bytes<S>() / 4; i += CREW) room[i] = 0.0f;
    __syncthreads();
    // As a number of the whole warp (of_whole_warps).
    const int team = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
    const bool is_well = train_layer<S, Kinds<CODES>, OPTIMISER, 1>(run, reinterpret_cast<char*>(room), blockIdx.x, team);
    if (!is_well && threadIdx.x == 0) run.mine(run.status)[1] = 1;
}
