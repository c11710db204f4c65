// train/layer_parallel/layer_parallel.cuh: sizes, shared memory layout, row loads and a block's weights in registers.
#pragma once

#include "train/layer_parallel/fragments.cuh"

// Accumulators per thread in the dW gemm. Other values run out of registers and serialise the wgmmas.
template <u32 OPTIMISER>
constexpr int MAX_SUMS = OPTIMISER == ADAM ? 40 : 36;

struct LayerPlaces {
    float *w, *mean, *square;
    float *own_mean, *own_square;  // (blocks, fours, CREW, 4): mean and square in register fragment order
    // Exchange buffers, two each: activations; gradients by the pre-activations; weights (inputs, units), for the
    // output layer followed by its biases.
    char *forward, *backward, *columns;
};
template <int L>
struct Training {
    const void* x;
    const void* targets;        // (n,) int64 classes, or (n, outputs) float32
    const long long* order;     // (rows,) row indices, batch by batch
    const Rule* rules;          // (steps,)
    const long long* progress;  // the launch's first step, and the end of its rows
    double* step_losses;        // (steps,)
    long long* step_correct;       // (steps,)
    u32* status;                // [0] turns taken by earlier launches, [1] nonzero after a timeout
    LayerPlaces layers[L];
    long long batch, x_stride;  // in rows; in bytes
    Networks networks;
    float scale;
    u32 deadline_ms;
    LayerFacts facts[L];

    template <class T>
    __device__ __forceinline__ T* mine(T* of_first) const {
        return networks.mine(of_first);
    }
    __device__ __forceinline__ LayerPlaces places(int layer) const {
        const LayerPlaces& of = layers[layer - 1];
        return {mine(of.w), mine(of.mean), mine(of.square), mine(of.own_mean), mine(of.own_square), mine(of.forward),
                mine(of.backward), mine(of.columns)};
    }
};

// -- partial sums ----------------------------------------------------------------------------------------------------

// Sums of BATCH rows x 8 NT columns, in groups of adjacent columns as the exchange sends them. Adjacent threads have
// adjacent rows: shared memory stores are free of bank conflicts and sends are contiguous.
template <int NT, int BATCH, int GROUP>
struct Groups {
    static constexpr int ALL = BATCH * 8 * NT / GROUP, COUNT = (ALL + CREW - 1) / CREW;  // per thread, at most
    static constexpr int PITCH = NT % 4 ? 8 * NT : 8 * NT + 8;  // avoids bank conflicts
    static constexpr int BYTES = TEAMS * ROWS * PITCH * 4;
    float v[COUNT][GROUP];

    static __device__ __forceinline__ int at(int n) { return static_cast<int>(threadIdx.x) + n * CREW; }
    static __device__ __forceinline__ bool is_there(int n) { return ALL % CREW == 0 || at(n) < ALL; }
    static __device__ __forceinline__ int row(int n) { return at(n) % BATCH; }
    static __device__ __forceinline__ int column(int n) { return at(n) / BATCH * GROUP; }

    // Adds up the partial sums c of all warpgroups. Returns false if any thread of the block passes is_well = false.
    template <int PARTS>
    __device__ __forceinline__ bool add_teams(const float (&c)[PARTS * NT][4], float* sums, int team, bool is_well) {
#pragma unroll
        for (int n = 0; n < NT * 2; ++n) {
            const int j = n / 2, i = n % 2 * 2;
            *reinterpret_cast<float2*>(sums + (team * ROWS + sum_row(i)) * PITCH + sum_column(j, 0)) = {
                whole<PARTS>(c, j, i), whole<PARTS>(c, j, i + 1)};
        }
        if (of_whole_warps(__syncthreads_or(!is_well))) return false;
#pragma unroll
        for (int n = 0; n < COUNT; ++n) {
            if (!is_there(n)) break;
#pragma unroll
            for (int t = 0; t < TEAMS; ++t) {
#pragma unroll
                for (int i = 0; i < GROUP; i += 4) {
                    float four[4];
                    load_several<false>(four, sums + (t * ROWS + row(n)) * PITCH + column(n) + i);
#pragma unroll
                    for (int j = 0; j < 4; ++j) v[n][i + j] = t > 0 ? v[n][i + j] + four[j] : four[j];
                }
            }
        }
        return true;
    }
};

// -- sizes -----------------------------------------------------------------------------------------------------------

__device__ constexpr int larger(int a, int b) { return a > b ? a : b; }

// BATCH: most rows of a step. The gemms have ROWS rows; the rest are 0.
template <class Net, int PARTS_, int OWN_, int BATCH_>
struct Sizes {
    static constexpr int L = Net::LAYERS, PARTS = PARTS_, OWN = OWN_, BATCH = BATCH_;
    using Tiles = TilePost<PARTS, BATCH>;
    using Own = Groups<OWN, BATCH, Tiles::GROUP>;
    template <int l>
    using GivenBy = Given<PARTS, BATCH, (Net::at(l) + 7) / 8>;
    static __device__ constexpr int at(int l) { return Net::at(l); }
    static __device__ constexpr int tiles(int l) { return (Net::at(l) + 7) / 8; }
    static __device__ constexpr int blocks(int l) { return (tiles(l) + OWN - 1) / OWN; }
    // K steps cover two panels and every warpgroup has as many: no wgmma may follow a branch.
    static __device__ constexpr int by_teams(int strips) { return round_up(strips, 2 * TEAMS); }
    static __device__ constexpr int behind(int l) { return by_teams(tiles(l)); }
    // The panel after a hidden layer's tiles starts with a 1, which multiplies the next layer's bias.
    static __device__ constexpr int one(int l) { return l == 0 ? Net::at(0) : 8 * tiles(l); }
    static __device__ constexpr int told_rows(int l) { return 8 * tiles(l - 1) + (l == L ? 1 : 0); }  // and a bias
    static __device__ constexpr int strips(int l) { return l < L ? by_teams(one(l) / 8 + 1) : round_up(Net::at(L), 16) / 8; }
    static __device__ constexpr int input_parts(int l) { return l == 1 ? 1 : PARTS; }
    static __device__ constexpr int input_bytes(int l) { return strips(l - 1) * ROWS_STRIP; }  // of one split term
    // Whether a hidden layer's gemm takes its A operand from registers. Split activations do not fit there: they go
    // through shared memory.
    static __device__ constexpr bool by_words(int l) { return l > 1 && PARTS == 1; }
    // K size of a hidden layer's weights, in the order of the gemm.
    template <int l>
    static __device__ constexpr int positions() {
        if constexpr (by_words(l)) return GivenBy<l - 1>::POSITIONS;
        else return 8 * strips(l - 1);
    }
    // The dW gemm reads whole 64-input tiles of all warpgroups, past the last input.
    static __device__ constexpr int read_bytes(int l) {
        return (input_parts(l) - 1) * input_bytes(l) + round_up(strips(l - 1), 8 * TEAMS) * ROWS_STRIP;
    }
};

// Shared memory of a block that computes the outputs, from offset `AT`.
template <class S, int AT>
struct OutputRoom {
    static constexpr int L = S::L, STRIPS = S::strips(L);
    static constexpr int POSITIONS = S::template GivenBy<L - 1>::POSITIONS;
    static constexpr int WEIGHTS = AT;  // (POSITIONS, outputs), term after term
    static constexpr int WEIGHT_PART = STRIPS * 16 * POSITIONS;
    static constexpr int BIASES = WEIGHTS + S::PARTS * WEIGHT_PART;  // (outputs,) float32
    static constexpr int SUMS = BIASES + STRIPS * 32, SUM_BYTES = TEAMS * STRIPS * 128 * 16;  // (TEAMS, STRIPS, 128, 4)
};

constexpr int MAX_BYTES = 226 << 10;  // dynamic shared memory per block

// Shared memory of a block of hidden layer l, offsets in bytes: the input, then the rest. The input is x or the
// previous layer's activations, (ROWS, 8 strips(l - 1)), term after term. Panels of x from FIXED on are
// double-buffered, as many as fit: the next step's are stored while the current ones are read.
template <class S, int l>
struct HiddenRoom {
    static constexpr bool HAS_OUTPUTS = l >= S::L - 2, HAS_BEHIND = l < S::L - 2, HAS_COLUMNS = l < S::L - 1;
    static constexpr int BEHIND_STRIPS = HAS_BEHIND ? S::behind(l + 1) : 0, COLUMN_STRIP = 128 * S::OWN * S::PARTS;
    static constexpr int COLUMN_STRIPS = HAS_BEHIND ? BEHIND_STRIPS : HAS_COLUMNS ? OutputRoom<S, 0>::POSITIONS / 8 : 0;
    static constexpr int WEIGHTS = 0;  // (positions(l), own units), split
    static constexpr int BIASES = WEIGHTS + S::PARTS * S::OWN * 16 * S::template positions<l>();  // (own units,) fp32
    static constexpr int GRADIENTS = BIASES + S::OWN * 32;  // (ROWS, own units), split
    static constexpr int BEHIND = GRADIENTS + S::PARTS * S::OWN * ROWS_STRIP;  // (ROWS, units of l + 1), split
    static constexpr int COLUMNS = BEHIND + S::PARTS * BEHIND_STRIPS * ROWS_STRIP;  // (own units, l + 1's units), split
    using Outputs = OutputRoom<S, COLUMNS + COLUMN_STRIPS * COLUMN_STRIP>;
    static constexpr int SUMS = HAS_OUTPUTS ? Outputs::SUMS : Outputs::WEIGHTS;  // (TEAMS, ROWS, Own::PITCH) float32
    static constexpr int SUM_BYTES = S::Own::BYTES;
    static constexpr int IDS = SUMS + (HAS_OUTPUTS ? larger(SUM_BYTES, Outputs::SUM_BYTES) : SUM_BYTES);  // (3, BATCH)
    static constexpr int REST_BYTES = IDS + 3 * S::BATCH * 4, INPUT_BYTES = S::input_parts(l) * S::input_bytes(l);
    static constexpr int LEFT = (MAX_BYTES - larger(INPUT_BYTES + REST_BYTES, S::read_bytes(l))) / ROWS_STRIP;
    static constexpr int KEPT = round_up(larger(S::strips(0) - larger(LEFT, 0), 0), 8);
    static constexpr int FIXED = KEPT < S::strips(0) ? KEPT : S::strips(0), TWICE = l > 1 ? 0 : S::strips(0) - FIXED;
    static constexpr int REST = INPUT_BYTES + TWICE * ROWS_STRIP;
    static constexpr int BYTES = larger(REST + REST_BYTES, TWICE * ROWS_STRIP + S::read_bytes(l));
};
// Shared memory of the output layer's block.
template <class S>
struct LastRoom {
    static constexpr int L = S::L;
    using Outputs = OutputRoom<S, 0>;
    static constexpr int IDS = Outputs::SUMS + Outputs::SUM_BYTES;  // (3, BATCH)
    static constexpr int LOSSES = IDS + 3 * S::BATCH * 4;           // (2, ROWS) float32: losses, correct predictions
    static constexpr int GRADIENTS = round_up(LOSSES + 2 * ROWS * 4, 128);
    static constexpr int INPUT = GRADIENTS + S::PARTS * S::strips(L) * ROWS_STRIP;
    static constexpr int BYTES = INPUT + S::read_bytes(L);
};
template <class S, int l = S::L - 1>
__device__ constexpr int max_bytes() {
    if constexpr (l == 0) {
        return LastRoom<S>::BYTES;
    } else {
        return larger(HiddenRoom<S, l>::BYTES, max_bytes<S, l - 1>());
    }
}

// -- row loads -------------------------------------------------------------------------------------------------------

// The next step's rows, in flight in registers. A warp loads 8 rows, four consecutive 16 B vectors each: half a cache
// line per row, and conflict-free stores. With few rows, several warps share them.
template <class S>
struct NextPixels {
    static constexpr int PIECES = S::strips(0) / 2, EIGHTS = S::BATCH / 8, AT_ONCE = CREW / 8 / EIGHTS;
    static constexpr int COUNT = (PIECES + AT_ONCE - 1) / AT_ONCE;
    uint4 bytes[COUNT];

    static __device__ __forceinline__ int row() { return threadIdx.x / 32 % EIGHTS * 8 + threadIdx.x % 8; }
    static __device__ __forceinline__ int piece(int i) {
        return threadIdx.x / 32 / EIGHTS * 4 + threadIdx.x % 32 / 8 + AT_ONCE * i;
    }

    __device__ __forceinline__ void fetch(const void* x, long long stride, const u32* ids, int rows) {
        const unsigned char* const from = static_cast<const unsigned char*>(x) + ids[row()] * stride + 16 * piece(0);
        const bool is_row = row() < rows;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            bytes[i] = {0, 0, 0, 0};
            const bool is_piece = i < COUNT - 1 || 16 * piece(i) < stride;
            if (is_row && is_piece) bytes[i] = __ldcg(reinterpret_cast<const uint4*>(from + 16 * AT_ONCE * i));
        }
    }
    // Two bytes as bf16. With high byte 0x43, byte b reads as 128 + b, or 2 b from 128 on: take min(t - 128, t / 2).
    static __device__ __forceinline__ u32 widen(u32 word, u32 which) {
        const u32 less = 0xc300c300, half = 0x3f003f00;
        u32 made;
        asm("{.reg .b32 t, u; prmt.b32 t, %1, 0x43434343, %2; add.rn.bf16x2 u, t, %3; mul.rn.bf16x2 t, t, %4; min.bf16x2 %0, t, u;}"
            : "=r"(made) : "r"(word), "r"(which), "r"(less), "r"(half));
        return made;
    }
    static __device__ __forceinline__ uint4 widen_eight(u32 low, u32 high) {
        return {widen(low, 0x4140), widen(low, 0x4342), widen(high, 0x4140), widen(high, 0x4342)};
    }
    // Stores panels BEGIN to END; `to` is panel 0.
    template <int BEGIN, int END>
    __device__ __forceinline__ void keep(char* to) const {
        uint4* const first = reinterpret_cast<uint4*>(to + piece(0) * 2 * ROWS_STRIP + row() * 16);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            if (2 * AT_ONCE * (i + 1) <= BEGIN || 2 * AT_ONCE * i >= END) continue;  // compile-time: saves registers
            if (2 * piece(i) < BEGIN || 2 * piece(i) >= END) continue;
            first[i * 2 * AT_ONCE * ROWS] = widen_eight(bytes[i].x, bytes[i].y);
            first[(i * 2 * AT_ONCE + 1) * ROWS] = widen_eight(bytes[i].z, bytes[i].w);
        }
    }
};

// -- weights ---------------------------------------------------------------------------------------------------------

// A thread's weights of layer l, for 8 STRIPS units from first_unit on. The warpgroups alternate tiles of 64 inputs.
template <class S, u32 OPTIMISER, int l, int STRIPS>
struct Weights {
    static constexpr int D = S::at(l - 1), INPUTS = 8 * S::strips(l - 1), PARTS = S::PARTS;
    static constexpr int COUNT = ((INPUTS + 63) / 64 + TEAMS - 1) / TEAMS, ELEMENTS = COUNT * STRIPS * 4;
    float w[ELEMENTS];
    float *means, *squares;  // the thread's, in fours in global memory: registers are scarce
    int team, first_unit;

    __device__ __forceinline__ Weights(const LayerPlaces& places, int block, int team)
        : team(team), first_unit(block * 8 * STRIPS) {
        const long long first = (static_cast<long long>(block) * (ELEMENTS / 4) * CREW + threadIdx.x) * 4;
        means = places.own_mean + first, squares = places.own_square + first;
    }

    __device__ __forceinline__ int input(int n) const { return (team + n / (STRIPS * 4) * TEAMS) * 64 + sum_row(n % 4); }
    __device__ __forceinline__ int unit(int n) const { return first_unit + sum_column(n / 4 % STRIPS, n); }
    static __device__ __forceinline__ void copy(float& mine, float* there, bool is_there, bool is_back) {
        if (!is_back) mine = is_there ? *there : 0.0f;
        else if (is_there) *there = mine;
    }
    // Loads from global memory, or stores if is_back.
    __device__ __forceinline__ void move(const LayerPlaces& places, const LayerFacts& facts, bool is_back) {
#pragma unroll
        for (int n = 0; n < ELEMENTS; ++n) {
            const int from = input(n), to = unit(n);
            const bool is_bias = from == S::one(l - 1);
            const bool is_there = to < S::at(l) && (is_bias ? facts.has_bias : from < D);
            const long long at = is_there ? static_cast<long long>(to) * facts.stride + (is_bias ? D : from) : 0;
            copy(w[n], places.w + at, is_there, is_back);
            if constexpr (OPTIMISER != SGD) copy(means[n / 4 * CREW * 4 + n % 4], places.mean + at, is_there, is_back);
            if constexpr (OPTIMISER == ADAM) copy(squares[n / 4 * CREW * 4 + n % 4], places.square + at, is_there, is_back);
        }
    }
    // Stores split weights to shared memory for the gemm: (positions(l), 8 STRIPS), term after term. If by_words,
    // biases go to `biases`.
    __device__ __forceinline__ void tell(char* to, float* biases) const {
        constexpr int POSITIONS = S::template positions<l>(), TOLD = S::by_words(l) ? S::one(l - 1) : INPUTS;
#pragma unroll
        for (int n = 0; n < ELEMENTS; n += 2) {
            const bool is_whole = (n / (STRIPS * 4) + 1) * TEAMS * 64 <= TOLD;
            const int column = sum_column(n / 4 % STRIPS, 0);
            if (!is_whole && input(n) >= TOLD) {
                if (S::by_words(l) && input(n) == TOLD) biases[column] = w[n], biases[column + 1] = w[n + 1];
                continue;
            }
            u32 parts[PARTS];
            split_two(parts, w[n], w[n + 1]);
            const int at = S::by_words(l) ? position(input(n)) : input(n);
#pragma unroll
            for (int i = 0; i < PARTS; ++i)
                *reinterpret_cast<u32*>(to + place_in_strips<POSITIONS>(at, i * 8 * STRIPS + column)) = parts[i];
        }
    }
    // Sends (told_rows(l), 8 tiles(l)) in fours to the blocks that need them. Lane pairs swap halves to hold four units
    // of a row.
    __device__ __forceinline__ void send(const Post& post) const {
        const bool is_odd = threadIdx.x % 2;
#pragma unroll
        for (int n = 0; n < ELEMENTS; n += 4) {
            u32 mine[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) mine[i] = __float_as_uint(w[n + i]);
            const u32 a = __shfl_xor_sync(~0u, is_odd ? mine[0] : mine[2], 1);
            const u32 b = __shfl_xor_sync(~0u, is_odd ? mine[1] : mine[3], 1);
            const int row = input(is_odd ? n + 2 : n), four = (first_unit + n / 4 % STRIPS * 8) / 4 + threadIdx.x % 4 / 2;
            if (row >= S::told_rows(l) || four >= 2 * S::tiles(l)) continue;
            const int piece = row * 2 * S::tiles(l) + four;
            if (is_odd) post.send(piece, a, b, mine[2], mine[3]);
            else post.send(piece, mine[0], mine[1], a, b);
        }
    }
    // Computes dW and updates the weights.
    // inputs, gradients  shared memory addresses
    // further  byte offset of input panels from FIXED on
    template <int FIXED>
    __device__ __forceinline__ void learn(const Rule& rule, float scale, u32 inputs, u32 further, u32 gradients) {
        using Turned = Strips<ROWS, true>;
        constexpr int AT_ONCE = MAX_SUMS<OPTIMISER> / (PARTS * STRIPS * 4) > 1 ? MAX_SUMS<OPTIMISER> / (PARTS * STRIPS * 4) : 1;
#pragma unroll
        for (int first = 0; first < COUNT; first += AT_ONCE) {
            float c[AT_ONCE][PARTS * STRIPS][4];
            begin_products();
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                if (first + i >= COUNT) break;
                const int strip = (team + (first + i) * TEAMS) * 8;
                const u32 tile = inputs + (strip < FIXED ? 0 : further) + strip * ROWS_STRIP;
                begin_parts<S::input_parts(l), S::BATCH / 16, 1, Turned>(c[i], tile, S::input_bytes(l), Turned(gradients), 0);
            }
            end_products();
            wait_for_products<0>();
#pragma unroll
            for (int m = 0; m < AT_ONCE * STRIPS; ++m) {
                const int n = first * STRIPS + m;  // index of the four weights
                if (n >= ELEMENTS / 4) break;
                float by[4], now[4], mean[4] = {}, square[4] = {};
                if constexpr (OPTIMISER != SGD) load_several<true>(mean, means + n * CREW * 4);
                if constexpr (OPTIMISER == ADAM) load_several<true>(square, squares + n * CREW * 4);
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    by[i] = scale * whole<PARTS>(c[m / STRIPS], m % STRIPS, i), now[i] = w[4 * n + i];
                ::move(OPTIMISER, rule, by, now, mean, square, 4);
#pragma unroll
                for (int i = 0; i < 4; ++i) w[4 * n + i] = now[i];  // padding is updated too, but unused
                if constexpr (OPTIMISER != SGD) store_several(means + n * CREW * 4, mean);
                if constexpr (OPTIMISER == ADAM) store_several(squares + n * CREW * 4, square);
            }
        }
    }
};
