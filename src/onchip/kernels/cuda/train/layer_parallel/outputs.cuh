// train/layer_parallel/outputs.cuh: outputs, loss and gradients of a step, recomputed by every block that needs them.
//
// Idea    Activations stay in wgmma A fragments and gradients in accumulator fragments, without a pass through shared
//         memory.
#pragma once

#include "train/layer_parallel/layer_parallel.cuh"

// Reads the weights w (units, stride) of `rows` inputs from `first` on in the order of the exchange, four units per
// chunk: take(chunk, four words). D inputs; the bias is input row round_up(D, 8).
template <class Take>
__device__ __forceinline__ void read_fours(const float* w, const LayerFacts& facts, int D, int N, int first, int rows,
                                           const Take& take) {
    const int fours = (N + 7) / 8 * 2;
    for (int i = threadIdx.x; i < rows * fours; i += CREW) {
        const int row = first + i / fours, unit = i % fours * 4;
        const bool is_bias = row == round_up(D, 8);
        u32 four[4] = {};
        for (int j = 0; j < 4; ++j)
            if (unit + j < N && (is_bias ? facts.has_bias : row < D))
                four[j] = __float_as_uint(w[static_cast<long long>(unit + j) * facts.stride + (is_bias ? D : row)]);
        four[0] &= ~1u;
        take(i, four);
    }
}

// R: the block's OutputRoom.
template <class S, class K, class R>
struct Outputs {
    using Units = typename S::template GivenBy<S::L - 1>;
    static constexpr int L = S::L, PARTS = S::PARTS, N = S::at(L), STRIPS = R::STRIPS, COLUMNS = 2 * STRIPS;
    static constexpr int GROUPS = Units::GROUPS, AT_ONCE = Units::AT_ONCE;
    const Training<L>& run;
    char* const room;
    const int team;
    float target[2][COLUMNS];  // rows g and g + 8 of the warp's 16
    int truth[2];
    Units given;
    float gradients[2][COLUMNS];      // of the outputs
    float loss[2];
    int hit[2];

    __device__ __forceinline__ Outputs(const Training<L>& run, char* room, int team) : run(run), room(room), team(team) {}

    static __device__ __forceinline__ int row(int h) { return Units::row(h); }
    static __device__ __forceinline__ int column(int i) { return sum_column(i / 2, i); }

    // Stores a chunk of the output layer's weights: from global memory at launch, later as received from its block.
    __device__ __forceinline__ void put_weights(int piece, const u32 (&four)[4]) const {
        constexpr int FOURS = 2 * S::tiles(L);
        const int unit = piece / FOURS, n = piece % FOURS * 4;
        if (unit == S::one(L - 1)) {
            *reinterpret_cast<uint4*>(room + R::BIASES + n * 4) = {four[0], four[1], four[2], four[3]};
            return;
        }
        u32 front[PARTS], back[PARTS];
        split_two(front, __uint_as_float(four[0]), __uint_as_float(four[1]));
        split_two(back, __uint_as_float(four[2]), __uint_as_float(four[3]));
#pragma unroll
        for (int i = 0; i < PARTS; ++i)
            *reinterpret_cast<uint2*>(room + R::WEIGHTS + i * R::WEIGHT_PART + place_in_strips<R::POSITIONS>(position(unit), n)) = {
                front[i], back[i]};
    }
    __device__ __forceinline__ void read_weights() const {
        read_fours(run.mine(run.layers[L - 1].w), run.facts[L - 1], S::at(L - 1), N, 0, S::told_rows(L),
                   [&](int piece, const u32 (&four)[4]) { put_weights(piece, four); });
    }
    static __device__ __forceinline__ Post weights_post(const Training<L>& run, u32 turn) {
        constexpr int PIECES = S::told_rows(L) * 2 * S::tiles(L);
        return {run.mine(run.layers[L - 1].columns), PIECES * 16ll, turn, run.deadline_ms};
    }
    template <int THREADS>
    __device__ __forceinline__ bool receive_weights(u32 turn) const {
        constexpr int PIECES = S::told_rows(L) * 2 * S::tiles(L);
        return weights_post(run, turn).template receive<PIECES, THREADS>(
            PIECES, [](int n) { return n; }, [&](int piece, const u32 (&four)[4]) { put_weights(piece, four); });
    }
    // ids: row indices of the step.
    __device__ __forceinline__ void fetch_targets(const u32* ids) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const long long id = row(h) < S::BATCH ? ids[row(h)] : 0;
            if constexpr (K::LOSS == CROSS_ENTROPY) {
                truth[h] = static_cast<int>(static_cast<const long long*>(run.targets)[id]);
#pragma unroll
                for (int i = 0; i < COLUMNS; ++i) target[h][i] = 0.0f;
            } else {
                truth[h] = 0;
#pragma unroll
                for (int i = 0; i < COLUMNS; ++i)
                    target[h][i] = column(i) < N ? static_cast<const float*>(run.targets)[id * N + column(i)] : 0.0f;
            }
        }
    }
    // Receives the last hidden layer's activations.
    __device__ __forceinline__ bool receive(u32 turn) {
        return given.receive({run.mine(run.layers[L - 2].forward), S::tiles(L - 1), turn, run.deadline_ms}, team);
    }
    // Computes outputs, losses and gradients. All threads of the block must call it.
    __device__ __forceinline__ void make(int rows) {
        float c[PARTS * STRIPS][4];
        given.multiply(c, shared_at(room + R::WEIGHTS), team);
        float4* const sums = reinterpret_cast<float4*>(room + R::SUMS) + threadIdx.x % 128;
#pragma unroll
        for (int j = 0; j < STRIPS; ++j)
            sums[(team * STRIPS + j) * 128] = {whole<PARTS>(c, j, 0), whole<PARTS>(c, j, 1), whole<PARTS>(c, j, 2),
                                               whole<PARTS>(c, j, 3)};
        __syncthreads();
        const float slope = __uint_as_float(run.facts[L - 1].slope);
        const float* const biases = reinterpret_cast<const float*>(room + R::BIASES);
#pragma unroll
        for (int j = 0; j < STRIPS; ++j) {
            float4 sum = sums[j * 128];
#pragma unroll
            for (int i = 1; i < TEAMS; ++i) {
                const float4 other = sums[(i * STRIPS + j) * 128];
                sum = {sum.x + other.x, sum.y + other.y, sum.z + other.z, sum.w + other.w};
            }
            const float2 bias = *reinterpret_cast<const float2*>(biases + column(2 * j));
            gradients[0][2 * j] = activate<K::of(L)>(sum.x + bias.x, slope);
            gradients[0][2 * j + 1] = activate<K::of(L)>(sum.y + bias.y, slope);
            gradients[1][2 * j] = activate<K::of(L)>(sum.z + bias.x, slope);
            gradients[1][2 * j + 1] = activate<K::of(L)>(sum.w + bias.y, slope);
        }
        lose<4, N, K::LOSS, K::of(L)>(gradients, column, {row(0) < rows, row(1) < rows}, slope, target, truth, loss, hit);
    }
    // Gradients of the last hidden layer for the warpgroup's groups: use(first group, accumulators (groups, 4, 4)). A
    // thread's units 2 j and 2 j + 1 of 8 are (.., j, 2 h) and (.., j, 2 h + 1).
    template <class Use>
    __device__ __forceinline__ void make_hidden(const Use& use) const {
        using Told = Strips<R::POSITIONS, false>;
        const float slope = __uint_as_float(run.facts[L - 2].slope);
        u32 words[STRIPS / 2][PARTS][4];
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) {
            const int j = i / 2, h = i % 2;
            u32 parts[PARTS];
            split_two(parts, gradients[h][2 * j], gradients[h][2 * j + 1]);
#pragma unroll
            for (int part = 0; part < PARTS; ++part) words[j / 2][part][j % 2 * 2 + h] = parts[part];
        }
#pragma unroll
        for (int first = 0; first < GROUPS; first += AT_ONCE) {
            float c[AT_ONCE][4][4];
            begin_products();
#pragma unroll
            for (int m = 0; m < AT_ONCE; ++m) {
#pragma unroll
                for (int both = PARTS - 1; both >= 0; --both)  // smallest term products first
#pragma unroll
                    for (int i = 0; i <= both; ++i) {
                        const Told told(shared_at(room + R::WEIGHTS + (both - i) * R::WEIGHT_PART) + Units::group(first + m, team) * 4 * 128);
#pragma unroll
                        for (int step = 0; step < STRIPS / 2; ++step)
                            add_words<Told, 4>(c[m], words[step][i], told.word(step), both < PARTS - 1 || i > 0 || step > 0);
                    }
            }
            end_products();
            wait_for_products<0>();
#pragma unroll
            for (int i = 0; i < AT_ONCE * 8; ++i) {
                const int m = i / 8, j = i / 2 % 4, h = i % 2;
                const float2 two = given.two(first + m, h, j);
                c[m][j][2 * h] = through(K::of(L - 1), slope, c[m][j][2 * h], two.x);
                c[m][j][2 * h + 1] = through(K::of(L - 1), slope, c[m][j][2 * h + 1], two.y);
            }
            use(first, c);
        }
    }
};
