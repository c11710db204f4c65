// train/resident/resident.cuh: shared memory layout, small-tile gemms and the exchange of train/resident/resident.cu.
#pragma once

#include "train/large_batch/epilogue.cuh"

constexpr int TEAM = 512, TEAM_WARPS = TEAM / 32;
constexpr int MAX_FLOATS = (226 << 10) / 4, MAX_PARTS = 8192;  // per block; of split-K partial sums

// Layer widths: 784-320-160-10 is Widths<784, 320, 160, 10>. Layer l maps at(l - 1) inputs to at(l) outputs.
template <int... W>
struct Widths {
    static constexpr int LAYERS = sizeof...(W) - 1;
    static __device__ constexpr int at(int layer) {
        const int all[] = {W...};
        return all[layer];
    }
};

// Trainable activations, by their Activation code.
template <u32 CODE>
__device__ __forceinline__ float activate(float v, float slope) {
    const Activation activation = {CODE, slope, 0.0f};  // the compiler keeps one case
    return activation(v);
}

// -- shared memory ---------------------------------------------------------------------------------------------------

// Offsets in floats. Row pitches add 4 floats (8 bytes for uint8) to avoid bank conflicts.
template <class X, class Net, int ROWS, int BLOCKS>
struct Room {
    static constexpr int L = Net::LAYERS;
    static constexpr int HEAD_ROWS = (ROWS + BLOCKS - 1) / BLOCKS;  // rows per block of output layer and loss
    static constexpr int X_PITCH = round_up(Net::at(0), 16) + (sizeof(X) == 1 ? 8 : 4);
    static constexpr int X_FLOATS = ROWS * X_PITCH * static_cast<int>(sizeof(X)) / 4;
    static constexpr int TOLD = Net::at(L) + 2;  // values broadcast per row: output gradients, loss, correct

    static __device__ constexpr int tiles(int l) { return ((l < L ? Net::at(l) : TOLD) + 7) / 8; }
    // Most tiles of 8 units of a hidden layer per block.
    static __device__ constexpr int own(int l) { return (tiles(l) + BLOCKS - 1) / BLOCKS; }
    static __device__ constexpr int pitch(int l) { return round_up(l < L ? Net::at(l) : TOLD, 16) + 4; }
    static __device__ constexpr int weight_rows(int l) { return l < L ? 8 * own(l) : Net::at(L); }

    // (ROWS, pitch(l)): activations of hidden layer l, then gradients by its pre-activations. For the last hidden
    // layer, gradients only.
    static __device__ constexpr int values(int l) {
        int at = X_FLOATS;
        for (int i = 1; i < l; ++i) at += ROWS * pitch(i);
        return at;
    }
    // (weight_rows(l), pitch(l - 1)): weight rows of own units. For the output layer a copy of all, as of the start of
    // the step.
    static __device__ constexpr int weights(int l) {
        int at = values(L);
        for (int i = 1; i < l; ++i) at += weight_rows(i) * pitch(i - 1);
        return at;
    }
    // (8 own(l - 1), pitch(l)): layer l's weight columns of own inputs; 2 <= l.
    static __device__ constexpr int columns(int l) {
        int at = weights(L + 1);
        for (int i = 2; i < l; ++i) at += 8 * own(i - 1) * pitch(i);
        return at;
    }
    // (ROWS, pitch(L)): values broadcast per row. Before that, (HEAD_ROWS, pitch(L - 1)) activations of the last hidden
    // layer and (HEAD_ROWS, pitch(L)) outputs.
    static constexpr int OUTPUTS = columns(L + 1);
    static constexpr int HEAD_FLOATS = HEAD_ROWS * (pitch(L - 1) + pitch(L));
    static constexpr int OUTPUT_FLOATS = ROWS * pitch(L) > HEAD_FLOATS ? ROWS * pitch(L) : HEAD_FLOATS;
    // (ROWS, own_pitch(l)): own units' activations of the last hidden layer, then own gradients.
    static __device__ constexpr int own_pitch(int l) { return 8 * own(l) + 2; }
    static constexpr int OWN = OUTPUTS + OUTPUT_FLOATS;
    static __device__ constexpr int own_floats() {
        int most = 0;
        for (int l = 1; l < L; ++l) most = own_pitch(l) > most ? own_pitch(l) : most;
        return ROWS * most;
    }
    static __device__ constexpr int biases(int l) {
        int at = OWN + own_floats();
        for (int i = 1; i < l; ++i) at += weight_rows(i);
        return at;
    }
    static constexpr int IDS = biases(L + 1);  // (3, ROWS): row indices of three steps
    // Split-K partial sums, as many as fit. If too few fit, own_units() reuses OUTPUTS.
    static constexpr int PARTS = round_up(IDS + 3 * ROWS, 4);
    static constexpr int LEFT = MAX_FLOATS - PARTS < 0 ? 0 : MAX_FLOATS - PARTS;
    static constexpr int PART_FLOATS = LEFT < MAX_PARTS ? LEFT / 128 * 128 : MAX_PARTS;
    static constexpr int FLOATS = PARTS + PART_FLOATS;
    static constexpr bool HAS_PARTS = PART_FLOATS > ROWS * pitch(L);
    static constexpr int SOME_PARTS = HAS_PARTS ? PARTS : OUTPUTS;
    static constexpr int SOME_FLOATS = HAS_PARTS ? PART_FLOATS : ROWS * pitch(L);
};

// -- gemms -----------------------------------------------------------------------------------------------------------

// totals (rows 2 t and 2 t + 1 of a, all columns of b) += a b over 16 K elements.
template <class P, int R, bool IS_EXACT>
__device__ __forceinline__ void add_chunk(float (&totals)[4], const Words<P, R, IS_EXACT>& a, int t,
                                          const Words<P, 1>& b) {
    constexpr int STEPS = Words<P, 1>::COUNT / 2;
    float sums[STEPS][4] = {};
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        u32 x[4];
        take_rows(x, a.high, t, step);
        const u32 y0 = b.high[0][2 * step], y1 = b.high[0][2 * step + 1];
        if constexpr (is_same<P, Fp32>) {
            if constexpr (!IS_EXACT) {
                u32 x_low[4];
                take_rows(x_low, a.low, t, step);
                mma<Tf32>(sums[step], x_low, y0, y1);
            }
            mma<Tf32>(sums[step], x, b.low[0][2 * step], b.low[0][2 * step + 1]);
            mma<Tf32>(sums[step], x, y0, y1);
        } else {
            mma<P>(totals, x, y0, y1);
        }
    }
    // Tensor cores truncate accumulators; in fp32 that error would show, so chunks are summed with FADD.
    if constexpr (is_same<P, Fp32>) {
#pragma unroll
        for (int i = 0; i < 4; ++i) totals[i] += sums[0][i] + sums[STEPS - 1][i];
    }
}

// Loads four adjacent values; uint8 converts to float.
__device__ __forceinline__ void load_four(float (&v)[4], const float* from) {
    const float4 four = load4(from);
    v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
}
__device__ __forceinline__ void load_four(float (&v)[4], const unsigned char* from) {
    const u32 word = *reinterpret_cast<const u32*>(from);
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = __uint_as_float(__byte_perm(word, 0x4b000000, 0x7440 + i)) - 8388608.0f;
}

// Warps per split-K sum: at most the number of K chunks, and what the partial sums have space for. It fixes the
// reduction order, so it is computed for one tile, however many a block owns.
__device__ constexpr int splits_of(int row_tiles, int chunks, int room_floats) {
    int splits = TEAM_WARPS / row_tiles;
    if (splits > chunks) splits = chunks;
    if (splits > 1 + room_floats / (row_tiles * 128)) splits = 1 + room_floats / (row_tiles * 128);
    return splits < 1 ? 1 : splits;
}
__device__ constexpr int shares_of(int chunks, int room_tiles) {
    const int shares = chunks < TEAM_WARPS ? chunks : TEAM_WARPS;
    return shares < room_tiles ? shares : room_tiles;
}

// Schedule of NT tiles: SIDE tiles by different warps, DEEP tiles by the same warps, which load `a` once for them.
// MOST: tiles whose partial sums fit
template <int NT, int TEAMS, int MOST, int DEEPEST>
struct TileTurns {
    static constexpr int SIDE_ROOM = TEAMS < MOST ? TEAMS : MOST, SIDE = SIDE_ROOM < NT ? SIDE_ROOM : NT;
    static constexpr int ROUNDS = (NT + SIDE - 1) / SIDE, DEEP_ROOM = MOST / SIDE < DEEPEST ? MOST / SIDE : DEEPEST;
    static constexpr int DEEP = ROUNDS < DEEP_ROOM ? ROUNDS : DEEP_ROOM, TILES = SIDE * DEEP;
};

// a (16 RT rows, CHUNKS chunks) times 8 NT rows of b; SPLITS warps share each 16 x 8 tile (split-K). Per lane
// finish(row, column, four) receives rows `row` and + 1, columns `column` and + 1.
// parts  (SPLITS - 1) x RT x 128 floats for each of ROOM tiles
template <class P, int RT, int NT, int SPLITS, int CHUNKS, int ROOM, class A, class Finish>
__device__ __forceinline__ void multiply_rows(const A* a, int a_pitch, const float* b, int b_pitch, float* parts,
                                              const Finish& finish) {
    static_assert(SPLITS * RT <= TEAM_WARPS && ROOM > 0, "a warp has one part of one sum");
    using Turns = TileTurns<NT, TEAM_WARPS / (SPLITS * RT), ROOM, 4>;
    constexpr int ITEMS = RT * Turns::SIDE, DEEP = Turns::DEEP;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const int share = warp / ITEMS, item = warp % ITEMS, row = item % RT * 16 + 2 * g;
    const A* const of_a = a + row * a_pitch + 4 * q;
#pragma unroll 1
    for (int first = 0; first < NT; first += Turns::TILES) {
        const int tile = first + item / RT;
        const float* const of_b = b + (tile * 8 + g) * b_pitch + 4 * q;
        float totals[DEEP][4] = {};
        if (share < SPLITS) {
#pragma unroll 2
            for (int chunk = share; chunk < CHUNKS; chunk += SPLITS) {
                float v[2][4];
                load_four(v[0], of_a + chunk * CHUNK);
                load_four(v[1], of_a + chunk * CHUNK + a_pitch);
                const Words<P, 2, sizeof(A) == 1> words(v);
#pragma unroll
                for (int j = 0; j < DEEP; ++j) {
                    if (tile + j * Turns::SIDE >= NT) continue;
                    float w[1][4];
                    load_four(w[0], of_b + j * Turns::SIDE * 8 * b_pitch + chunk * CHUNK);
                    add_chunk<P>(totals[j], words, 0, Words<P, 1>(w));
                }
            }
        }
        float* const mine = parts + (share - 1) * ITEMS * DEEP * 128 + item * 128 + lane * 4;
        if (SPLITS > 1 && first > 0) __syncthreads();  // previous partial sums have been read
        if (share > 0 && share < SPLITS) {
#pragma unroll
            for (int j = 0; j < DEEP; ++j) store_several(mine + j * ITEMS * 128, totals[j]);
        }
        if (SPLITS > 1) __syncthreads();
        if (share > 0) continue;
#pragma unroll
        for (int j = 0; j < DEEP; ++j) {
            if (tile + j * Turns::SIDE >= NT) continue;
#pragma unroll
            for (int other = 1; other < SPLITS; ++other) {
                float part[4];
                load_four(part, mine + (other * DEEP + j) * ITEMS * 128);
#pragma unroll
                for (int i = 0; i < 4; ++i) totals[j][i] += part[i];
            }
            finish(row, (tile + j * Turns::SIDE) * 8 + 2 * q, totals[j]);
        }
    }
}

// Same gemm, but a warp computes all rows of 8 columns, so it converts b once. Every warp stores partial sums, and a
// thread reduces one element: finish(row, column, sum).
// parts  SPLITS x RT x 128 floats for each of ROOM tiles
template <class P, int RT, int NT, int SPLITS, int CHUNKS, int ROOM, class A, class Finish>
__device__ __forceinline__ void multiply_columns(const A* a, int a_pitch, const float* b, int b_pitch, float* parts,
                                                 const Finish& finish) {
    static_assert(SPLITS <= TEAM_WARPS && ROOM > 0, "a warp has one part of one sum");
    using Turns = TileTurns<NT, TEAM_WARPS / SPLITS, ROOM, RT < 4 ? 4 / RT : 1>;
    constexpr int SIDE = Turns::SIDE, DEEP = Turns::DEEP, ELEMENTS = RT * Turns::TILES * 128;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const int share = warp / SIDE;
    const A* const of_a = a + 2 * g * a_pitch + 4 * q;
#pragma unroll 1
    for (int first = 0; first < NT; first += Turns::TILES) {
        const int tile = first + warp % SIDE;
        if (first > 0) __syncthreads();  // previous partial sums have been read
        if (share < SPLITS) {
            const float* const of_b = b + (tile * 8 + g) * b_pitch + 4 * q;
            float totals[DEEP][RT][4] = {};
#pragma unroll 1
            for (int chunk = share; chunk < CHUNKS; chunk += SPLITS) {
                float w[DEEP][1][4] = {};
#pragma unroll
                for (int j = 0; j < DEEP; ++j)
                    if (tile + j * SIDE < NT) load_four(w[j][0], of_b + j * SIDE * 8 * b_pitch + chunk * CHUNK);
#pragma unroll
                for (int t = 0; t < RT; ++t) {
                    float v[2][4];
                    load_four(v[0], of_a + 16 * t * a_pitch + chunk * CHUNK);
                    load_four(v[1], of_a + (16 * t + 1) * a_pitch + chunk * CHUNK);
                    const Words<P, 2, sizeof(A) == 1> words(v);
#pragma unroll
                    for (int j = 0; j < DEEP; ++j) add_chunk<P>(totals[j][t], words, 0, Words<P, 1>(w[j]));
                }
            }
#pragma unroll
            for (int j = 0; j < DEEP; ++j) {
                const int slot = j * SIDE + warp % SIDE;
#pragma unroll
                for (int t = 0; t < RT; ++t)
                    store_several(parts + (share * Turns::TILES + slot) * RT * 128 + t * 128 + lane * 4, totals[j][t]);
            }
        }
        __syncthreads();
        for (int at = threadIdx.x; at < ELEMENTS; at += TEAM) {
            const int within = at % 128, item = at / 128, made = first + item / RT;  // within: 4 * lane + element
            if (made >= NT) break;
            float sum = parts[at];
#pragma unroll
            for (int i = 1; i < SPLITS; ++i) sum += parts[i * ELEMENTS + at];
            finish(item % RT * 16 + within / 16 * 2 + within % 4 / 2, made * 8 + within / 4 % 4 * 2 + within % 2, sum);
        }
    }
}

// -- exchange between blocks -----------------------------------------------------------------------------------------

// For stress tests (-DRANDOM_DELAYS): delays sends and polls of some warps by up to two microseconds.
__device__ __forceinline__ void delay() {
#ifdef RANDOM_DELAYS
    u32 now;
    asm volatile("mov.u32 %0, %clock;" : "=r"(now) :);
    const u32 drawn = (now ^ blockIdx.x * 40503u ^ threadIdx.x / 32 * 2057u) * 2654435761u;
    if (drawn >> 28 == 0) __nanosleep(drawn >> 16 & 2047);
#endif
}

// A double buffer in L2 with in-band flags, as in NCCL's LL protocol: the lowest bit of each float is a phase bit, and
// the receiver polls until it matches. A slot is reused every second turn with the opposite bit, so no flags or fences
// are needed.
struct Exchange {
    float* at;  // (2, tiles, 2, ROWS, 4): buffer, tile of 8 units, half of the tile
    u32 turn;

    __device__ __forceinline__ u32 bit() const { return 1 ^ (turn >> 1 & 1); }

    // Value after the exchange: the lowest bit is cleared.
    static __device__ __forceinline__ float sent(float v) { return __uint_as_float(__float_as_uint(v) & ~1u); }

    // Sends one unit of a row.
    template <int ROWS, int TILES>
    __device__ __forceinline__ void send(int unit, int row, float v) const {
        float* const to = at + ((((turn & 1) * TILES * 2) + unit / 4) * ROWS + row) * 4 + unit % 4;
        const u32 word = __float_as_uint(sent(v)) | bit();
        delay();
        asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" :: "l"(to), "r"(word) : "memory");
    }
    static __device__ __forceinline__ void look(u32 (&v)[4], const float* from) {
        asm volatile("ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "l"(from) : "memory");
    }
    __device__ __forceinline__ bool is_there(const u32 (&v)[4]) const {
        return ((bit() ? v[0] & v[1] & v[2] & v[3] : ~(v[0] | v[1] | v[2] | v[3])) & 1) != 0;
    }
    // Receives TAKEN rows from `first_row` on, all tiles, to `to` (TAKEN, pitch). Returns false on timeout.
    template <int ROWS, int TILES, int TAKEN = ROWS>
    __device__ __forceinline__ bool receive(float* to, int pitch, u32 deadline_ms, int first_row = 0) const {
        constexpr int PIECES = TILES * 2 * TAKEN, AT_ONCE = PIECES <= TEAM ? 1 : 5;
        const float* const from = at + (turn & 1) * TILES * 2 * ROWS * 4;
        const auto place = [=](int piece) {  // clamped to the last row
            const int row = first_row + piece % TAKEN;
            return from + (piece / TAKEN * ROWS + (row < ROWS ? row : ROWS - 1)) * 4;
        };
        unsigned long long begin = 0;
        bool is_late = false;
        delay();
#pragma unroll 1
        for (int first = threadIdx.x; first < PIECES; first += AT_ONCE * TEAM) {
            u32 v[AT_ONCE][4];
            bool all;
            u32 looks = 0;
            do {
                all = true;
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i)
                    if (first + i * TEAM < PIECES) look(v[i], place(first + i * TEAM));
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i) all = all && (first + i * TEAM >= PIECES || is_there(v[i]));
                if (++looks % 256 == 0) {
                    const unsigned long long now = nanoseconds();
                    if (begin == 0) begin = now;
                    is_late = deadline_ms && (now - begin) / 1000000 >= deadline_ms;
                }
            } while (!all && !is_late);
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int piece = first + i * TEAM;
                if (piece >= PIECES) break;
                const float four[4] = {__uint_as_float(v[i][0] & ~1u), __uint_as_float(v[i][1] & ~1u),
                                       __uint_as_float(v[i][2] & ~1u), __uint_as_float(v[i][3] & ~1u)};
                store_several(to + piece % TAKEN * pitch + piece / TAKEN * 4, four);
            }
        }
        return !is_late;
    }
    static __device__ __forceinline__ unsigned long long nanoseconds() {
        unsigned long long now;
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now) :);
        return now;
    }
};

// Gradient sum of two blocks, one per group, that own the same units for different rows.
template <int BLOCKS, int PIECES>
struct Partners {
    float* at;  // (2, 2, BLOCKS, PIECES, TEAM, 4): buffer, group
    u32 turn, deadline_ms;
    int group, block;

    __device__ __forceinline__ float* place(int of, int piece) const {
        const int index = (((turn & 1) * 2 + of) * BLOCKS + block) * PIECES + piece;
        return at + (static_cast<long long>(index) * TEAM + threadIdx.x) * 4;
    }
    __device__ __forceinline__ void send(int piece, const float (&v)[4]) const {
        const Exchange exchange = {at, turn};
        delay();
        u32 words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = __float_as_uint(Exchange::sent(v[i])) | exchange.bit();
        asm volatile("st.relaxed.gpu.global.v4.b32 [%0], {%1, %2, %3, %4};"
                     :: "l"(place(group, piece)), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]) : "memory");
    }
    // Receives up to `left` of COUNT chunks from the other group, all loads in flight at once. Returns false on
    // timeout.
    template <int COUNT>
    __device__ __forceinline__ bool receive(u32 (&v)[COUNT][4], int first, int left) const {
        const Exchange exchange = {at, turn};
        unsigned long long begin = 0;
        delay();
        for (u32 looks = 1;; ++looks) {
            bool all = true;
#pragma unroll
            for (int i = 0; i < COUNT; ++i)
                if (i < left) Exchange::look(v[i], place(1 - group, first + i));
#pragma unroll
            for (int i = 0; i < COUNT; ++i) all = all && (i >= left || exchange.is_there(v[i]));
            if (all) return true;
            if (looks % 256 == 0) {
                const unsigned long long now = Exchange::nanoseconds();
                if (begin == 0) begin = now;
                if (deadline_ms && (now - begin) / 1000000 >= deadline_ms) return false;
            }
        }
    }
};

// -- gradients -------------------------------------------------------------------------------------------------------

// Loads 4 or 2 adjacent values of a row.
template <int R, class A>
__device__ __forceinline__ void load_across(float (&v)[R], const A* from) {
    if constexpr (R == 4) {
        load_four(v, from);
    } else {
        const float2 two = *reinterpret_cast<const float2*>(from);
        v[0] = two.x, v[1] = two.y;
    }
}

// dW fragment: a (rows, INPUTS) transposed times dz (rows, UNITS), a warp's tiles of 8 R inputs x 8 units.
// sums[i][t][2 h + w] is at input 8 R tile + R g + 2 t + h, unit 2 q + w.
template <class P, int R, int INPUTS, int UNITS>
struct Gradients {
    static constexpr int DOWN = (INPUTS + 8 * R - 1) / (8 * R), ITEMS = DOWN * ((UNITS + 7) / 8);
    static constexpr int COUNT = (ITEMS + TEAM_WARPS - 1) / TEAM_WARPS;
    float sums[COUNT][R / 2][4];
    float shifts[COUNT];  // bias gradients of unit g, in tiles of the first inputs

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            shifts[i] = 0.0f;
#pragma unroll
            for (int j = 0; j < R * 2; ++j) sums[i][j / 4][j % 4] = 0.0f;
        }
    }
    static __device__ __forceinline__ int item(int i) { return threadIdx.x / 32 + i * TEAM_WARPS; }

    // Chunks of four for Partners: the sums, then the bias gradients.
    static constexpr int ELEMENTS = COUNT * (2 * R + 1), PIECES = (ELEMENTS + 3) / 4;
    __device__ __forceinline__ float& number(int i) {
        const int count = COUNT * R * 2;
        return i < count ? sums[i / (2 * R)][i / 4 % (R / 2)][i % 4] : shifts[i - count];
    }
    template <class Partners>
    __device__ __forceinline__ void send(const Partners& partners, int first) {
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            float four[4] = {};
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (4 * i + j < ELEMENTS) four[j] = number(4 * i + j);
            partners.send(first + i, four);
        }
    }
    // Sums both groups. Addition commutes, so both get identical results.
    template <class Partners>
    __device__ __forceinline__ bool add_up(const Partners& partners, int first) {
        constexpr int AT_ONCE = PIECES < 6 ? PIECES : 6;  // more would spill
        bool all = true;
#pragma unroll
        for (int begin = 0; begin < PIECES; begin += AT_ONCE) {
            u32 theirs[AT_ONCE][4];
            all = partners.receive(theirs, first + begin, PIECES - begin) && all;
#pragma unroll
            for (int i = 4 * begin; i < ELEMENTS && i < 4 * (begin + AT_ONCE); ++i)
                number(i) = Exchange::sent(number(i)) + __uint_as_float(theirs[i / 4 - begin][i % 4] & ~1u);
        }
        return all;
    }

    template <int ROWS, class A>
    __device__ __forceinline__ void add(const A* a, int a_pitch, const float* dz, int dz_pitch) {
        const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
#pragma unroll 1
        for (int chunk = 0; chunk < ROWS / CHUNK; ++chunk) {
            const int row = chunk * CHUNK + 4 * q;
            float given[1][4];
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                if (item(i) >= ITEMS) continue;
                const int tile = item(i) % DOWN, unit = item(i) / DOWN * 8;
                float v[R][4];
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    if (i == 0 || UNITS > 8) given[0][k] = dz[(row + k) * dz_pitch + unit + g];
                    float across[R];
                    load_across<R>(across, a + (row + k) * a_pitch + tile * 8 * R + R * g);
#pragma unroll
                    for (int j = 0; j < R; ++j) v[j][k] = across[j];
                }
                if (tile == 0) shifts[i] += (given[0][0] + given[0][1]) + (given[0][2] + given[0][3]);
                const Words<P, R, sizeof(A) == 1> of_a(v);
                const Words<P, 1> of_b(given);
#pragma unroll
                for (int t = 0; t < R / 2; ++t) add_chunk<P>(sums[i][t], of_a, t, of_b);
            }
        }
    }
};
