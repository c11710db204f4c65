// mlp_by_layers.cu: training of an MLP on pixels by blocks that stay on the chip, a layer's weights each; sm_90a alone.
//
// Idea    Every hidden layer has blocks of its own, of which each owns OWN tiles of 8 units: it makes what they give of
//         what the layer before gave, and hands it on through L2. One block has the last layer, works out loss and
//         gradients, and hands back those of the last hidden layer; each layer makes its own units' from those behind,
//         by weights that the layer behind tells after each step. All products are wgmma's of numbers in strips
//         (strips.cuh), whichever side their sums go along, so nothing is turned. A number is one of bf16, or for fp32
//         the sum of three; bytes are exact in one. Weights stay in registers, float32.
//         Networks that are alike train side by side, along y of the grid.
// Floor   784-320-160-10, batch 64: 40 + 20 + 1 blocks. Rows are read for 50 + 52 products of 2 KB at 128 B a clock,
//         0.9 us; three exchanges, 0.7 us each from store to load, of 120 KB in fp32, 1 us at 64 B a clock: 4 us.
// Order   Sums over inputs: a number's parts, then steps of 16 k's, two teams by turns, then the teams' sums. Gradients
//         over rows: parts, then 16 after 16. It depends on the network alone, not on how many blocks there are.
// Layout  x (n, x_stride): bytes k that mean k * scale, rows at multiples of 16 bytes, a bias's 1 behind them. w, mean and
//         square as mlp_train.cu has them.
// Shared  HiddenRoom, HeadRoom: what comes in, weights, gradients.
// Limits  Bytes, 2 to 15 layers, at most 32 outputs and 64 rows. All blocks are there at a time (cooperative launch). Of
//         16 bytes that are handed over a number loses its last bit. What does not come before the deadline ends all
//         blocks.
#include "mlp_by_layers.cuh"

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

// Of so many numbers, a thread's at most.
__device__ constexpr int numbers_of(int all) { return (all + CREW - 1) / CREW; }

// Sums of BATCH rows by 8 NT columns, by all teams: finish(number of the thread, row, column, sum), neighbours' of a row.
template <int A_PARTS, int PARTS, int STEPS, int NT, int BATCH, class B, class Finish>
__device__ __forceinline__ void multiply_rows_of(u32 a, int a_part_bytes, const B& b, float* sums, int team,
                                                 const Finish& finish) {
    float c[PARTS * NT][4];
    if constexpr (STEPS < TEAMS) {
#pragma unroll
        for (int i = 0; i < PARTS * NT * 4; ++i) c[i / 4][i % 4] = 0.0f;
    }
    begin_products();
    begin_parts<A_PARTS, STEPS, TEAMS, Strips<ROWS, false>>(c, a, a_part_bytes, b, team);
    end_products();
    wait_for_products<0>();
#pragma unroll
    for (int n = 0; n < NT * 2; ++n) {
        const int j = n / 2, i = n % 2 * 2;
        *reinterpret_cast<float2*>(sums + (team * ROWS + sum_row(i)) * 8 * NT + sum_column(j, 0)) = {
            whole<PARTS>(c, j, i), whole<PARTS>(c, j, i + 1)};
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < numbers_of(BATCH * 8 * NT); ++n) {
        const int at = threadIdx.x + n * CREW;
        if (BATCH * 8 * NT % CREW && at >= BATCH * 8 * NT) break;  // whole warps
        float sum = sums[at];
#pragma unroll
        for (int i = 1; i < TEAMS; ++i) sum += sums[i * ROWS * 8 * NT + at];
        finish(n, at / (8 * NT), at % (8 * NT), sum);
    }
}

template <class S>
__device__ __forceinline__ void put_ones(char* input, int l, bool has_bias) {
    if (threadIdx.x < ROWS && has_bias)
        store1(reinterpret_cast<bf16*>(input + place_in_strips<ROWS>(threadIdx.x, S::one(l))), 1.0f);
}

// All turns of a block of hidden layer l. False: it waited in vain.
template <class S, class K, u32 OPTIMISER, int l>
__device__ __forceinline__ bool train_hidden(const Training<S::L>& run, char* room, int block, int team) {
    using R = HiddenRoom<S, l>;
    constexpr int L = S::L, PARTS = S::PARTS, OWN = S::OWN, NUMBERS = numbers_of(S::BATCH * 8 * OWN);
    __shared__ Rule rule;
    const LayerPlaces places = run.places(l);
    const LayerFacts& facts = run.facts[l - 1];
    const float slope = __uint_as_float(facts.slope), scale = l == 1 ? run.scale : 1.0f;
    const Orders<L, S::BATCH> orders(run, room + R::IDS);
    const u32 input = shared_at(room + R::INPUT), gradients = shared_at(room + R::GRADIENTS);
    float* const sums = reinterpret_cast<float*>(room + R::SUMS);
    Weights<S, OPTIMISER, l, OWN> weights(places, block, team);
    weights.move(places, facts, false);
    weights.tell(room + R::WEIGHTS);
    NextPixels<S> next;
    if constexpr (l == 1) {
        for (int i = 0; i < 2; ++i) orders.keep(orders.first_step + i, orders.read(orders.first_step + i));
        __syncthreads();
        next.fetch(run.x, run.x_stride, orders.of(orders.first_step), orders.rows(orders.first_step));
        next.keep(room + R::INPUT);
    } else {
        put_ones<S>(room + R::INPUT, l - 1, facts.has_bias);
    }
    if constexpr (!R::IS_LAST) {  // what the layer behind tells later on, and as it does: without the bit that says when
        const LayerFacts& behind = run.facts[l];
        const float* const behind_w = run.mine(run.layers[l].w);
        for (int i = threadIdx.x; i < 8 * OWN * 8 * S::tiles(l + 1) / 2; i += CREW) {
            const int mine = i % (8 * OWN), unit = i / (8 * OWN) * 2, of_layer = block * 8 * OWN + mine;
            float two[2] = {};
            for (int j = 0; j < 2; ++j)
                if (of_layer < S::at(l) && unit + j < S::at(l + 1))
                    two[j] = behind_w[static_cast<long long>(unit + j) * behind.stride + of_layer];
            if (unit % 4 == 0) two[0] = __uint_as_float(__float_as_uint(two[0]) & ~1u);
            u32 parts[PARTS];
            split_two(parts, two[0], two[1]);
            for (int j = 0; j < PARTS; ++j) {
                const int at = place_in_strips<8 * OWN * PARTS>(j * 8 * OWN + mine, unit);
                *reinterpret_cast<u32*>(room + R::COLUMNS + at) = parts[j];
            }
        }
    }
    u32 turn = run.mine(run.status)[0];
    show_to_products();
    __syncthreads();
#pragma unroll 1
    for (long long step = orders.first_step; step < orders.steps; ++step, ++turn) {
        bool is_there = true;
        u32 coming = 0;
        if (threadIdx.x == 0) rule = run.mine(run.rules)[step];
        if constexpr (l > 1) {
            const typename S::Tiles from(run.mine(run.layers[l - 2].forward), S::tiles(l - 1), turn, run.deadline_ms);
            is_there = from.template receive<S::tiles(l - 1)>(0, room + R::INPUT, S::input_bytes(l));
            show_to_products();
            if (__syncthreads_or(!is_there)) return false;
        }
        // What own units give.
        float given[NUMBERS];
        const typename S::Tiles to(places.forward, S::tiles(l), turn, run.deadline_ms);
        const Strips<8 * S::strips(l - 1), true> told(shared_at(room + R::WEIGHTS));
        multiply_rows_of<S::input_parts(l), PARTS, S::strips(l - 1) / 2, OWN, S::BATCH>(
            input, S::input_bytes(l), told, sums, team, [&](int n, int row, int unit, float sum) {
                const int tile = block * OWN + unit / 8;
                given[n] = tile * 8 + unit % 8 < S::at(l) ? activate<K::of(l)>(scale * sum, slope) : 0.0f;
                to.send(tile, row, unit % 8, given[n], tile < S::tiles(l));
            });
        if constexpr (l == 1) {  // while that is under way
            coming = threadIdx.x < S::BATCH ? orders.read(step + 2) : 0;
            next.fetch(run.x, run.x_stride, orders.of(step + 1), orders.rows(step + 1));
        }
        // Their gradients.
        if constexpr (R::IS_LAST) {
            const typename S::Tiles back(places.backward, S::tiles(l), turn, run.deadline_ms);
            constexpr int LEFT = S::tiles(l) - (S::blocks(l) - 1) * OWN;  // tiles of the last block
            if (block < S::blocks(l) - 1)
                is_there = back.template receive<OWN>(block * OWN, room + R::GRADIENTS, OWN * ROWS_STRIP);
            else is_there = back.template receive<LEFT>(block * OWN, room + R::GRADIENTS, OWN * ROWS_STRIP);
        } else {
            const typename S::Tiles back(run.mine(run.layers[l].backward), S::tiles(l + 1), turn, run.deadline_ms);
            is_there = back.template receive<S::tiles(l + 1)>(0, room + R::BEHIND, S::even(l + 1) * ROWS_STRIP);
            if (step > orders.first_step) {
                constexpr int FOURS = 2 * S::tiles(l + 1);  // of an input
                const Post columns = {run.mine(run.layers[l].columns), static_cast<long long>(8 * S::tiles(l)) * FOURS * 16, turn - 1,
                                      run.deadline_ms};
                const auto take = [&](int piece, const u32 (&four)[4]) {
                    const int mine = piece / FOURS, unit = piece % FOURS * 4;
                    u32 front[PARTS], rest[PARTS];
                    split_two(front, __uint_as_float(four[0]), __uint_as_float(four[1]));
                    split_two(rest, __uint_as_float(four[2]), __uint_as_float(four[3]));
#pragma unroll
                    for (int i = 0; i < PARTS; ++i)
                        *reinterpret_cast<uint2*>(room + R::COLUMNS + place_in_strips<8 * OWN * PARTS>(i * 8 * OWN + mine, unit)) = {
                            front[i], rest[i]};
                };
                constexpr int LEFT = S::tiles(l) - (S::blocks(l) - 1) * OWN;
                bool are_there;
                if (block < S::blocks(l) - 1) are_there = columns.receive<8 * OWN * FOURS>(block * 8 * OWN * FOURS, take);
                else are_there = columns.receive<8 * LEFT * FOURS>(block * 8 * OWN * FOURS, take);
                is_there = is_there && are_there;
            }
        }
        show_to_products();
        if (__syncthreads_or(!is_there)) return false;
        if constexpr (!R::IS_LAST) {
            const typename S::Tiles before(places.backward, S::tiles(l), turn, run.deadline_ms);
            const Strips<8 * OWN * PARTS, false> columns(shared_at(room + R::COLUMNS));
            multiply_rows_of<PARTS, PARTS, S::even(l + 1) / 2, OWN, S::BATCH>(
                shared_at(room + R::BEHIND), S::even(l + 1) * ROWS_STRIP, columns, sums, team,
                [&](int n, int row, int unit, float sum) {
                    const int tile = block * OWN + unit / 8;
                    const float made = tile * 8 + unit % 8 < S::at(l) ? through(K::of(l), slope, sum, given[n]) : 0.0f;
                    u32 parts[PARTS];
                    split_two(parts, made, 0.0f);
#pragma unroll
                    for (int i = 0; i < PARTS; ++i)
                        reinterpret_cast<bf16*>(room + R::GRADIENTS + place_in_strips<ROWS>(row, i * 8 * OWN + unit))->bits =
                            static_cast<unsigned short>(parts[i]);
                    if constexpr (l > 1) before.send(tile, row, unit % 8, made, tile < S::tiles(l));
                });
            show_to_products();
            __syncthreads();
        }
        weights.learn(rule, scale, input, gradients);
        weights.tell(room + R::WEIGHTS);
        if constexpr (l == 1) {
            __syncthreads();  // rows have been read
            next.keep(room + R::INPUT);
            orders.keep(step + 2, coming);
        } else {
            const Post columns = {places.columns, static_cast<long long>(8 * S::tiles(l - 1)) * 2 * S::tiles(l) * 16, turn, 0};
            weights.send(columns);
        }
        show_to_products();
        __syncthreads();
    }
    weights.move(places, facts, true);
    return true;
}

// Of the last layer's block.
template <class S, class K, u32 OPTIMISER>
__device__ __forceinline__ bool train_head(const Training<S::L>& run, char* room, int team) {
    using R = HeadRoom<S>;
    constexpr int L = S::L, PARTS = S::PARTS, N = S::at(L), OUT = R::OUTPUT_STRIPS, LANES = CREW / S::BATCH;
    constexpr int TARGETS = (N + LANES - 1) / LANES, TILES = S::tiles(L - 1), MINE = (TILES + TEAMS - 1) / TEAMS;
    __shared__ Rule rule;
    const LayerPlaces places = run.places(L);
    const LayerFacts& facts = run.facts[L - 1];
    const float slope = __uint_as_float(facts.slope), before_slope = __uint_as_float(run.facts[L - 2].slope);
    const Orders<L, S::BATCH> orders(run, room + R::IDS);
    float *const sums = reinterpret_cast<float*>(room + R::SUMS), *const outputs = reinterpret_cast<float*>(room + R::OUTPUTS);
    const u32 input = shared_at(room + R::INPUT), gradients = shared_at(room + R::GRADIENTS);
    Weights<S, OPTIMISER, L, OUT> weights(places, 0, team);
    weights.move(places, facts, false);
    weights.tell(room + R::WEIGHTS);
    put_ones<S>(room + R::INPUT, L - 1, facts.has_bias);
    for (int i = 0; i < 2; ++i) orders.keep(orders.first_step + i, orders.read(orders.first_step + i));
    u32 turn = run.mine(run.status)[0];
    show_to_products();
    __syncthreads();
#pragma unroll 1
    for (long long step = orders.first_step; step < orders.steps; ++step, ++turn) {
        if (threadIdx.x == 0) rule = run.mine(run.rules)[step];
        const u32 coming = threadIdx.x < S::BATCH ? orders.read(step + 2) : 0;
        const int row = threadIdx.x / LANES, lane = threadIdx.x % LANES;
        const long long id = orders.of(step)[row];
        float target[TARGETS] = {};
        int truth = 0;
        if (K::LOSS == CROSS_ENTROPY) {
            truth = static_cast<int>(static_cast<const long long*>(run.targets)[id]);
        } else {
#pragma unroll
            for (int i = 0; i < TARGETS; ++i)
                if (lane + i * LANES < N) target[i] = static_cast<const float*>(run.targets)[id * N + lane + i * LANES];
        }
        const typename S::Tiles from(run.mine(run.layers[L - 2].forward), TILES, turn, run.deadline_ms);
        const bool is_there = from.template receive<TILES>(0, room + R::INPUT, S::input_bytes(L));
        show_to_products();
        if (__syncthreads_or(!is_there)) return false;
        const Strips<8 * S::strips(L - 1), true> told(shared_at(room + R::WEIGHTS));
        multiply_rows_of<PARTS, PARTS, S::strips(L - 1) / 2, OUT, S::BATCH>(
            input, S::input_bytes(L), told, sums, team, [&](int, int r, int n, float sum) {
                if (n < N) outputs[r * R::PITCH + n] = activate<K::of(L)>(sum, slope);
            });
        __syncthreads();
        float* const mine = outputs + row * R::PITCH;
        int hit;
        const float loss = lose<LANES, N, K::LOSS, K::of(L)>(mine, true, row < orders.rows(step), slope, target, truth, hit);
        if (lane == 0) mine[N] = loss, mine[N + 1] = static_cast<float>(hit);
#pragma unroll
        for (int i = 0; i < TARGETS; ++i) {
            const int n = lane + i * LANES;
            if (n >= N) break;
            u32 parts[PARTS];
            split_two(parts, mine[n], 0.0f);
#pragma unroll
            for (int j = 0; j < PARTS; ++j)
                reinterpret_cast<bf16*>(room + R::GRADIENTS + place_in_strips<ROWS>(row, j * 8 * OUT + n))->bits =
                    static_cast<unsigned short>(parts[j]);
        }
        show_to_products();
        __syncthreads();
        // The gradients of the last hidden layer: each team some tiles.
        using Given = Strips<ROWS, false>;
        using Told = Strips<8 * S::strips(L - 1), false>;
        float c[MINE][4];
        const u32 weights_at = shared_at(room + R::WEIGHTS) + team * MINE * 128;
        constexpr int WEIGHT_PART = OUT * 128 * S::strips(L - 1), GRADIENT_PART = OUT * ROWS_STRIP;
        begin_products();
#pragma unroll
        for (int both = PARTS - 1; both >= 0; --both)  // the small ones first
#pragma unroll
            for (int i = 0; i <= both; ++i)
                begin_sums<OUT / 2, 1, Given, Told, MINE>(c, Given(gradients + i * GRADIENT_PART),
                                                          Told(weights_at + (both - i) * WEIGHT_PART), 0,
                                                          both < PARTS - 1 || i > 0);
        end_products();
        wait_for_products<0>();
        const typename S::Tiles to(run.mine(run.layers[L - 2].backward), TILES, turn, run.deadline_ms);
#pragma unroll
        for (int j = 0; j < MINE; ++j) {
            const int tile = team * MINE + j;
            float made[4];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float2 given = {0.0f, 0.0f};  // the smallest part first
#pragma unroll
                for (int i = PARTS - 1; i >= 0; --i) {
                    const int at = i * S::input_bytes(L) + place_in_strips<ROWS>(sum_row(2 * h), tile * 8 + sum_column(0, 0));
                    const float2 part = load2(reinterpret_cast<const bf16*>(room + R::INPUT + (tile < TILES ? at : 0)));
                    given.x += part.x, given.y += part.y;
                }
                made[2 * h] = through(K::of(L - 1), before_slope, c[j][2 * h], given.x);
                made[2 * h + 1] = through(K::of(L - 1), before_slope, c[j][2 * h + 1], given.y);
            }
            to.send_sums(tile, made, tile < TILES && sum_row(0) < S::BATCH);
        }
        weights.learn(rule, 1.0f, input, gradients);
        __syncthreads();  // weights have been read
        weights.tell(room + R::WEIGHTS);
        if (threadIdx.x < 32) {
            double total = 0.0;
            int hits = 0;
            for (int i = threadIdx.x; i < S::BATCH; i += 32) {
                const float* const of_row = outputs + i * R::PITCH + N;
                total += of_row[0], hits += static_cast<int>(of_row[1]);
            }
            total = reduce_lanes<Sum, 32>(total);
            hits = reduce_lanes<Sum, 32>(hits);
            if (threadIdx.x == 0) run.mine(run.step_losses)[step] = total, run.mine(run.step_hits)[step] = hits;
        }
        orders.keep(step + 2, coming);
        show_to_products();
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
        return train_head<S, K, OPTIMISER>(run, room, team);
    } else {
        if (block < S::blocks(l)) return train_hidden<S, K, OPTIMISER, l>(run, room, block, team);
        return train_layer<S, K, OPTIMISER, l + 1>(run, room, block - S::blocks(l), team);
    }
}

template <int PARTS, int OWN, int BATCH, u32 OPTIMISER, unsigned long long CODES, int... W>
__global__ void __launch_bounds__(CREW, 1) train_by_layers(const __grid_constant__ Training<sizeof...(W) - 1> run) {
    using S = Sizes<Widths<W...>, PARTS, OWN, BATCH>;
    extern __shared__ float room[];
    for (int i = threadIdx.x; i < most_bytes<S>() / 4; i += CREW) room[i] = 0.0f;
    __syncthreads();
    // As a number of the whole warp: products must not stand behind a branch that could part it.
    const int team = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
    const bool is_well = train_layer<S, Kinds<CODES>, OPTIMISER, 1>(run, reinterpret_cast<char*>(room), blockIdx.x, team);
    if (!is_well && threadIdx.x == 0) run.mine(run.status)[1] = 1;
}
