// train/layer_parallel/layer_parallel.cu: persistent kernel that trains an MLP on uint8 rows, blocks per layer.
//
// Idea    A block owns OWN tiles of 8 units of one layer and keeps their fp32 weights register-resident. Layers
//         exchange activations, gradients and updated weights through L2 (exchange.cuh), without a grid barrier. Blocks
//         of the last two hidden layers recompute outputs, loss and their gradients rather than wait for them. A layer
//         sends new weights right after its update; the previous layer receives them while it waits for activations.
//         All gemms are wgmma on 1 to 3 bf16 split terms (uint8 needs one). The next rows load during waits.
// Floor   784-320-160-10, batch 64, 40 + 20 + 1 blocks: 102 wgmma reads of x, 2 KB each at 128 B/clock, 0.9 us; two
//         exchanges of 0.7 us; 120 KB in fp32 at 64 B/clock, 1 us: 3.3 us. bf16 takes 2.5x: 3.3 us from first send to
//         last hidden activations, then 2.7 us to new weights; loads of x take 2.1 us meanwhile.
// Order   K steps of 16 alternate between two warpgroups, then their sums add up; dW adds 16 rows at a time.
// Layout  x (n, x_stride): uint8 k is k * scale, rows 16 B aligned, then a 1 for the bias. w, mean, square as in
//         train/large_batch/launches.cu. Exchanged 16 B chunks lose the lowest bit of their first element.
// Limits  sm_90a; 2 to 15 layers, at most 32 outputs, 64 rows; cooperative launch, one network per blockIdx.y. A wait
//         past the deadline ends all blocks.
#include "train/layer_parallel/outputs.cuh"

// -- blocks ----------------------------------------------------------------------------------------------------------

// Row indices of the current and the next two steps, in a ring of three in shared memory.
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

// c = a b, one warpgroup's partial sums, with a in shared memory. Panels from FIXED on are `further` bytes further on.
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

// Consumers for Outputs::make_hidden. OwnUnits keeps the gradients of the block's own units in shared memory.
template <int PARTS, int OWN>
struct OwnUnits {
    char* to;  // (ROWS, own units), split
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
// Columns multiplies them by the weights of the previous layer's own units: c = made columns.
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

// Forward epilogue of own units: bias, activation, send to the next layer.
// given  accumulators in, activations out
// scale  applied to accumulators; the bias is added here only if by_words, else it is a K element
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
// Backward epilogue of own units: activation derivative, split to shared memory, send to the previous layer.
// made   gradients by the activations in, by the pre-activations out
// room   (ROWS, own units), split
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

// Runs all steps of a block of hidden layer l. Returns false on timeout.
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
    // Weights of layer l + 1 for own units, in the layout that layer l + 1 sends.
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
        // Overlaps with waiting for other blocks. Receives the weights updated in the previous step: one warpgroup
        // those of layer l + 1, the other the output layer's, so the latencies overlap.
        const auto prepare = [&]() {
            u32 word = 0;  // one of the Rule
            if (threadIdx.x < sizeof(Rule) / 4)
                word = reinterpret_cast<const u32*>(run.mine(run.rules) + step)[threadIdx.x];
            if constexpr (l == 1 || R::HAS_OUTPUTS) coming = threadIdx.x < S::BATCH ? orders.read(step + 2) : 0;
            if constexpr (R::HAS_OUTPUTS) outputs.fetch_targets(orders.of(step));
            if (of_whole_warps(step > orders.first_step)) {
                if constexpr (R::HAS_COLUMNS) {
                    constexpr int FOURS = 2 * S::tiles(l + 1);  // chunks per input
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
        // Activations of own units.
        Own given;
        float c[PARTS * OWN][4];
        typename S::template GivenBy<l - 1> before;  // empty unless by_words
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
            prepare();  // first, since later loads queue behind those of the pixels
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
                __syncthreads();  // the sums below reuse the memory of the outputs' sums
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
            __syncthreads();  // x has been read
            next.template keep<0, R::FIXED>(room);
            further = R::TWICE * ROWS_STRIP - further;
        } else {
            const Post columns = {places.columns, static_cast<long long>(8 * S::tiles(l - 1)) * 2 * S::tiles(l) * 16, turn, 0};
            weights.send(columns);
        }
        if constexpr (l == 1 || R::HAS_OUTPUTS) orders.keep(step + 2, coming);
        if constexpr (l == 1) {  // prefetch x to L2; each block takes other cache lines
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

// Runs all steps of the output layer's block.
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
            int correct = 0;
            for (int i = threadIdx.x; i < S::BATCH; i += 32)
                total += losses[i], correct += static_cast<int>(losses[ROWS + i]);
            total = reduce_lanes<Sum, 32>(total);
            correct = reduce_lanes<Sum, 32>(correct);
            if (threadIdx.x == 0) run.mine(run.step_losses)[step] = total, run.mine(run.step_correct)[step] = correct;
        }
        orders.keep(step + 2, coming);
        __syncthreads();
    }
    weights.move(places, facts, true);
    if (threadIdx.x == 0) run.mine(run.status)[0] = turn;
    return true;
}

// -- kernel ----------------------------------------------------------------------------------------------------------

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
__global__ void __launch_bounds__(CREW, 1) train_layer_parallel(const __grid_constant__ Training<sizeof...(W) - 1> run) {
    using S = Sizes<Widths<W...>, PARTS, OWN, BATCH>;
    extern __shared__ float room[];
    // A network without a step in this launch returns: its blocks do not wait, so their stores could race with loads.
    const long long* const progress = run.mine(run.progress);
    if (of_whole_warps(progress[0] * run.batch >= progress[1])) return;
    for (int i = threadIdx.x; i < max_bytes<S>() / 4; i += CREW) room[i] = 0.0f;
    __syncthreads();
    // Warp-uniform to the compiler (of_whole_warps).
    const int team = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
    const bool is_well = train_layer<S, Kinds<CODES>, OPTIMISER, 1>(run, reinterpret_cast<char*>(room), blockIdx.x, team);
    if (!is_well && threadIdx.x == 0) run.mine(run.status)[1] = 1;
}
