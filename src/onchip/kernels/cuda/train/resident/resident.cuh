// train/resident/resident.cuh: shared memory layout, small-tile gemms and the exchange of train/resident/resident.cu.
#pragma once

#include "train/large_batch/epilogue.cuh"

constexpr int CTA_THREADS = 512, CTA_WARPS = CTA_THREADS / 32;
constexpr int MAX_FLOATS = (226 << 10) / 4, MAX_PARTIALS = 8192;  // per block; of split-K partial sums

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
struct SharedLayout {
    static constexpr int L = Net::LAYERS;
    static constexpr int HEAD_ROWS = (ROWS + BLOCKS - 1) / BLOCKS;  // rows per block of output layer and loss
    static constexpr int X_PITCH = round_up(Net::at(0), 16) + (sizeof(X) == 1 ? 8 : 4);
    static constexpr int X_FLOATS = ROWS * X_PITCH * static_cast<int>(sizeof(X)) / 4;
    static constexpr int SENT = Net::at(L) + 2;  // values broadcast per row: output gradients, loss, correct

    static __device__ constexpr int tiles(int l) { return ((l < L ? Net::at(l) : SENT) + 7) / 8; }
    // Most tiles of 8 units of a hidden layer per block.
    static __device__ constexpr int owned(int l) { return (tiles(l) + BLOCKS - 1) / BLOCKS; }
    static __device__ constexpr int pitch(int l) { return round_up(l < L ? Net::at(l) : SENT, 16) + 4; }
    static __device__ constexpr int weight_rows(int l) { return l < L ? 8 * owned(l) : Net::at(L); }

    // (ROWS, pitch(l)): activations of hidden layer l, then its dz; for the last hidden layer, dz only.
    static __device__ constexpr int values(int l) {
        int at = X_FLOATS;
        for (int i = 1; i < l; ++i) at += ROWS * pitch(i);
        return at;
    }
    // (weight_rows(l), pitch(l - 1)): weight rows of owned units; all rows of the output layer, before its update.
    static __device__ constexpr int weights(int l) {
        int at = values(L);
        for (int i = 1; i < l; ++i) at += weight_rows(i) * pitch(i - 1);
        return at;
    }
    // (8 owned_tiles(l - 1), pitch(l)): layer l's weight columns of owned inputs; 2 <= l.
    static __device__ constexpr int columns(int l) {
        int at = weights(L + 1);
        for (int i = 2; i < l; ++i) at += 8 * owned(i - 1) * pitch(i);
        return at;
    }
    // (ROWS, pitch(L)): broadcast values; before, last hidden activations and outputs of HEAD_ROWS rows.
    static constexpr int OUTPUTS = columns(L + 1);
    static constexpr int HEAD_FLOATS = HEAD_ROWS * (pitch(L - 1) + pitch(L));
    static constexpr int OUTPUT_FLOATS = ROWS * pitch(L) > HEAD_FLOATS ? ROWS * pitch(L) : HEAD_FLOATS;
    // (ROWS, owned_pitch(l)): owned units' activations of the last hidden layer, then their gradients.
    static __device__ constexpr int owned_pitch(int l) { return 8 * owned(l) + 2; }
    static constexpr int OWNED = OUTPUTS + OUTPUT_FLOATS;
    static __device__ constexpr int owned_floats() {
        int most = 0;
        for (int l = 1; l < L; ++l) most = owned_pitch(l) > most ? owned_pitch(l) : most;
        return ROWS * most;
    }
    static __device__ constexpr int biases(int l) {
        int at = OWNED + owned_floats();
        for (int i = 1; i < l; ++i) at += weight_rows(i);
        return at;
    }
    static constexpr int IDS = biases(L + 1);  // (3, ROWS): row indices of three steps
    // Split-K partial sums, as many as fit. If too few fit, owned_gradients() reuses OUTPUTS.
    static constexpr int PARTIALS = round_up(IDS + 3 * ROWS, 4);
    static constexpr int SPARE_FLOATS = MAX_FLOATS - PARTIALS < 0 ? 0 : MAX_FLOATS - PARTIALS;
    static constexpr int PARTIAL_FLOATS = SPARE_FLOATS < MAX_PARTIALS ? SPARE_FLOATS / 128 * 128 : MAX_PARTIALS;
    static constexpr int FLOATS = PARTIALS + PARTIAL_FLOATS;
    static constexpr bool HAS_PARTIALS = PARTIAL_FLOATS > ROWS * pitch(L);
    static constexpr int SCRATCH = HAS_PARTIALS ? PARTIALS : OUTPUTS;
    static constexpr int SCRATCH_FLOATS = HAS_PARTIALS ? PARTIAL_FLOATS : ROWS * pitch(L);
};

// -- gemms -----------------------------------------------------------------------------------------------------------

// totals (rows 2 t and 2 t + 1 of a, all columns of b) += a b over 16 K elements.
template <class P, int R, bool IS_EXACT>
__device__ __forceinline__ void add_chunk(float (&totals)[4], const Fragment<P, R, IS_EXACT>& a, int t,
                                          const Fragment<P, 1>& b) {
    constexpr int STEPS = Fragment<P, 1>::COUNT / 2;
    float sums[STEPS][4] = {};
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        u32 x[4];
        select_fragment(x, a.high, t, step);
        const u32 y0 = b.high[0][2 * step], y1 = b.high[0][2 * step + 1];
        if constexpr (is_same<P, Fp32>) {
            if constexpr (!IS_EXACT) {
                u32 x_low[4];
                select_fragment(x_low, a.low, t, step);
                mma<Tf32>(sums[step], x_low, y0, y1);
            }
            mma<Tf32>(sums[step], x, b.low[0][2 * step], b.low[0][2 * step + 1]);
            mma<Tf32>(sums[step], x, y0, y1);
        } else {
            mma<P>(totals, x, y0, y1);
        }
    }
    // Tensor cores truncate when they accumulate; fp32 adds chunks with FADD instead.
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

// Split-K factors: limited by K chunks and space for partial sums. They fix the reduction order, so they are computed
// for a single tile, however many a block owns.
__device__ constexpr int row_split_k(int row_tiles, int chunks, int capacity_floats) {
    int splits = CTA_WARPS / row_tiles;
    if (splits > chunks) splits = chunks;
    if (splits > 1 + capacity_floats / (row_tiles * 128)) splits = 1 + capacity_floats / (row_tiles * 128);
    return splits < 1 ? 1 : splits;
}
__device__ constexpr int column_split_k(int chunks, int capacity_tiles) {
    const int splits = chunks < CTA_WARPS ? chunks : CTA_WARPS;
    return splits < capacity_tiles ? splits : capacity_tiles;
}

// Schedule of NT tiles: SIDE tiles on different warps, PER_WARP tiles on the same warps, which load `a` once for them.
// At most MAX_TILES tiles have space for their partial sums.
template <int NT, int WARP_SETS, int MAX_TILES, int WARP_LIMIT>
struct TileSchedule {
    static constexpr int MAX_SIDE = WARP_SETS < MAX_TILES ? WARP_SETS : MAX_TILES, SIDE = MAX_SIDE < NT ? MAX_SIDE : NT;
    static constexpr int ROUNDS = (NT + SIDE - 1) / SIDE,
        MAX_PER_WARP = MAX_TILES / SIDE < WARP_LIMIT ? MAX_TILES / SIDE : WARP_LIMIT;
    static constexpr int PER_WARP = ROUNDS < MAX_PER_WARP ? ROUNDS : MAX_PER_WARP, TILES = SIDE * PER_WARP;
};

// a (16 RT rows, CHUNKS chunks) times 8 NT rows of b; SPLIT_K warps share each 16 x 8 tile (split-K). Per lane
// finish(row, column, four) receives rows `row` and + 1, columns `column` and + 1.
// partials  (SPLIT_K - 1) x RT x 128 floats for each of CAPACITY tiles
template <class P, int RT, int NT, int SPLIT_K, int CHUNKS, int CAPACITY, class A, class Finish>
__device__ __forceinline__ void multiply_rows(const A* a, int a_pitch, const float* b, int b_pitch, float* partials,
                                              const Finish& finish) {
    static_assert(SPLIT_K * RT <= CTA_WARPS && CAPACITY > 0, "a warp computes one partial sum");
    using Schedule = TileSchedule<NT, CTA_WARPS / (SPLIT_K * RT), CAPACITY, 4>;
    constexpr int ITEMS = RT * Schedule::SIDE, PER_WARP = Schedule::PER_WARP;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const int k_split = warp / ITEMS, item = warp % ITEMS, row = item % RT * 16 + 2 * g;
    const A* const a_row = a + row * a_pitch + 4 * q;
#pragma unroll 1
    for (int first = 0; first < NT; first += Schedule::TILES) {
        const int tile = first + item / RT;
        const float* const b_row = b + (tile * 8 + g) * b_pitch + 4 * q;
        float totals[PER_WARP][4] = {};
        if (k_split < SPLIT_K) {
#pragma unroll 2
            for (int chunk = k_split; chunk < CHUNKS; chunk += SPLIT_K) {
                float v[2][4];
                load_four(v[0], a_row + chunk * CHUNK);
                load_four(v[1], a_row + chunk * CHUNK + a_pitch);
                const Fragment<P, 2, sizeof(A) == 1> rows(v);
#pragma unroll
                for (int j = 0; j < PER_WARP; ++j) {
                    if (tile + j * Schedule::SIDE >= NT) continue;
                    float w[1][4];
                    load_four(w[0], b_row + j * Schedule::SIDE * 8 * b_pitch + chunk * CHUNK);
                    add_chunk<P>(totals[j], rows, 0, Fragment<P, 1>(w));
                }
            }
        }
        float* const warp_partials = partials + (k_split - 1) * ITEMS * PER_WARP * 128 + item * 128 + lane * 4;
        if (SPLIT_K > 1 && first > 0) __syncthreads();  // previous partial sums have been read
        if (k_split > 0 && k_split < SPLIT_K) {
#pragma unroll
            for (int j = 0; j < PER_WARP; ++j) store_vector(warp_partials + j * ITEMS * 128, totals[j]);
        }
        if (SPLIT_K > 1) __syncthreads();
        if (k_split > 0) continue;
#pragma unroll
        for (int j = 0; j < PER_WARP; ++j) {
            if (tile + j * Schedule::SIDE >= NT) continue;
#pragma unroll
            for (int split = 1; split < SPLIT_K; ++split) {
                float partial[4];
                load_four(partial, warp_partials + (split * PER_WARP + j) * ITEMS * 128);
#pragma unroll
                for (int i = 0; i < 4; ++i) totals[j][i] += partial[i];
            }
            finish(row, (tile + j * Schedule::SIDE) * 8 + 2 * q, totals[j]);
        }
    }
}

// Same gemm, but a warp computes all rows of 8 columns, so it converts b once. All warps store partial sums; a thread
// reduces one element: finish(row, column, sum).
// partials  SPLIT_K x RT x 128 floats for each of CAPACITY tiles
template <class P, int RT, int NT, int SPLIT_K, int CHUNKS, int CAPACITY, class A, class Finish>
__device__ __forceinline__ void multiply_columns(const A* a, int a_pitch, const float* b, int b_pitch, float* partials,
                                                 const Finish& finish) {
    static_assert(SPLIT_K <= CTA_WARPS && CAPACITY > 0, "a warp computes one partial sum");
    using Schedule = TileSchedule<NT, CTA_WARPS / SPLIT_K, CAPACITY, RT < 4 ? 4 / RT : 1>;
    constexpr int SIDE = Schedule::SIDE, PER_WARP = Schedule::PER_WARP, ELEMENTS = RT * Schedule::TILES * 128;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const int k_split = warp / SIDE;
    const A* const a_row = a + 2 * g * a_pitch + 4 * q;
#pragma unroll 1
    for (int first = 0; first < NT; first += Schedule::TILES) {
        const int tile = first + warp % SIDE;
        if (first > 0) __syncthreads();  // previous partial sums have been read
        if (k_split < SPLIT_K) {
            const float* const b_row = b + (tile * 8 + g) * b_pitch + 4 * q;
            float totals[PER_WARP][RT][4] = {};
#pragma unroll 1
            for (int chunk = k_split; chunk < CHUNKS; chunk += SPLIT_K) {
                float w[PER_WARP][1][4] = {};
#pragma unroll
                for (int j = 0; j < PER_WARP; ++j)
                    if (tile + j * SIDE < NT) load_four(w[j][0], b_row + j * SIDE * 8 * b_pitch + chunk * CHUNK);
#pragma unroll
                for (int t = 0; t < RT; ++t) {
                    float v[2][4];
                    load_four(v[0], a_row + 16 * t * a_pitch + chunk * CHUNK);
                    load_four(v[1], a_row + (16 * t + 1) * a_pitch + chunk * CHUNK);
                    const Fragment<P, 2, sizeof(A) == 1> rows(v);
#pragma unroll
                    for (int j = 0; j < PER_WARP; ++j) add_chunk<P>(totals[j][t], rows, 0, Fragment<P, 1>(w[j]));
                }
            }
#pragma unroll
            for (int j = 0; j < PER_WARP; ++j) {
                const int slot = j * SIDE + warp % SIDE;
#pragma unroll
                for (int t = 0; t < RT; ++t)
                    store_vector(partials + (k_split * Schedule::TILES + slot) * RT * 128 + t * 128 + lane * 4,
                                 totals[j][t]);
            }
        }
        __syncthreads();
        for (int at = threadIdx.x; at < ELEMENTS; at += CTA_THREADS) {
            const int within = at % 128, item = at / 128, tile_n = first + item / RT;  // within: 4 * lane + element
            if (tile_n >= NT) break;
            float sum = partials[at];
#pragma unroll
            for (int i = 1; i < SPLIT_K; ++i) sum += partials[i * ELEMENTS + at];
            finish(item % RT * 16 + within / 16 * 2 + within % 4 / 2, tile_n * 8 + within / 4 % 4 * 2 + within % 2,
                   sum);
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

// A double buffer in L2 with in-band flags, as in NCCL's LL protocol: the lowest bit of each float is a phase bit that
// the receiver polls. A slot is reused every second round with the opposite bit, so no flags or fences are needed.
struct Exchange {
    float* at;  // (2, tiles, 2, ROWS, 4): buffer, tile of 8 units, half of the tile
    u32 round;

    __device__ __forceinline__ u32 phase_bit() const { return 1 ^ (round >> 1 & 1); }

    // The value that arrives: lowest bit cleared.
    static __device__ __forceinline__ float cleared(float v) { return __uint_as_float(__float_as_uint(v) & ~1u); }

    // Sends one unit of a row.
    template <int ROWS, int TILES>
    __device__ __forceinline__ void send(int unit, int row, float v) const {
        float* const to = at + ((((round & 1) * TILES * 2) + unit / 4) * ROWS + row) * 4 + unit % 4;
        const u32 word = __float_as_uint(cleared(v)) | phase_bit();
        delay();
        asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" :: "l"(to), "r"(word) : "memory");
    }
    static __device__ __forceinline__ void load_relaxed(u32 (&v)[4], const float* from) {
        asm volatile("ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "l"(from) : "memory");
    }
    __device__ __forceinline__ bool has_arrived(const u32 (&v)[4]) const {
        return ((phase_bit() ? v[0] & v[1] & v[2] & v[3] : ~(v[0] | v[1] | v[2] | v[3])) & 1) != 0;
    }
    // Receives RECEIVED rows from `first_row` on, all tiles, to `to` (RECEIVED, pitch). Returns false on timeout.
    template <int ROWS, int TILES, int RECEIVED = ROWS>
    __device__ __forceinline__ bool receive(float* to, int pitch, u32 deadline_ms, int first_row = 0) const {
        constexpr int VECTORS = TILES * 2 * RECEIVED, AT_ONCE = VECTORS <= CTA_THREADS ? 1 : 5;
        const float* const from = at + (round & 1) * TILES * 2 * ROWS * 4;
        const auto address = [=](int vector) {  // clamped to the last row
            const int row = first_row + vector % RECEIVED;
            return from + (vector / RECEIVED * ROWS + (row < ROWS ? row : ROWS - 1)) * 4;
        };
        unsigned long long begin = 0;
        bool timed_out = false;
        delay();
#pragma unroll 1
        for (int first = threadIdx.x; first < VECTORS; first += AT_ONCE * CTA_THREADS) {
            u32 v[AT_ONCE][4];
            bool all;
            u32 polls = 0;
            do {
                all = true;
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i)
                    if (first + i * CTA_THREADS < VECTORS) load_relaxed(v[i], address(first + i * CTA_THREADS));
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i)
                    all = all && (first + i * CTA_THREADS >= VECTORS || has_arrived(v[i]));
                if (++polls % 256 == 0) {
                    const unsigned long long now = nanoseconds();
                    if (begin == 0) begin = now;
                    timed_out = deadline_ms && (now - begin) / 1000000 >= deadline_ms;
                }
            } while (!all && !timed_out);
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int vector = first + i * CTA_THREADS;
                if (vector >= VECTORS) break;
                const float four[4] = {__uint_as_float(v[i][0] & ~1u), __uint_as_float(v[i][1] & ~1u),
                                       __uint_as_float(v[i][2] & ~1u), __uint_as_float(v[i][3] & ~1u)};
                store_vector(to + vector % RECEIVED * pitch + vector / RECEIVED * 4, four);
            }
        }
        return !timed_out;
    }
    static __device__ __forceinline__ unsigned long long nanoseconds() {
        unsigned long long now;
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now) :);
        return now;
    }
};

// Sums the gradients of two blocks, one per group, that own the same units and have different rows.
template <int BLOCKS, int CHUNKS>
struct Partners {
    float* at;  // (2, 2, BLOCKS, CHUNKS, CTA_THREADS, 4): buffer, group
    u32 round, deadline_ms;
    int group, block;

    __device__ __forceinline__ float* address(int of_group, int chunk) const {
        const int index = (((round & 1) * 2 + of_group) * BLOCKS + block) * CHUNKS + chunk;
        return at + (static_cast<long long>(index) * CTA_THREADS + threadIdx.x) * 4;
    }
    __device__ __forceinline__ void send(int chunk, const float (&v)[4]) const {
        const Exchange exchange = {at, round};
        delay();
        u32 words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = __float_as_uint(Exchange::cleared(v[i])) | exchange.phase_bit();
        asm volatile("st.relaxed.gpu.global.v4.b32 [%0], {%1, %2, %3, %4};" :: "l"(address(group, chunk)),
                     "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]) : "memory");
    }
    // Receives up to `left` of COUNT chunks from the other group, with all loads in flight. Returns false on timeout.
    template <int COUNT>
    __device__ __forceinline__ bool receive(u32 (&v)[COUNT][4], int first, int left) const {
        const Exchange exchange = {at, round};
        unsigned long long begin = 0;
        delay();
        for (u32 polls = 1;; ++polls) {
            bool all = true;
#pragma unroll
            for (int i = 0; i < COUNT; ++i)
                if (i < left) Exchange::load_relaxed(v[i], address(1 - group, first + i));
#pragma unroll
            for (int i = 0; i < COUNT; ++i) all = all && (i >= left || exchange.has_arrived(v[i]));
            if (all) return true;
            if (polls % 256 == 0) {
                const unsigned long long now = Exchange::nanoseconds();
                if (begin == 0) begin = now;
                if (deadline_ms && (now - begin) / 1000000 >= deadline_ms) return false;
            }
        }
    }
};

// Loads 4 or 2 adjacent values of a row.
template <int R, class A>
__device__ __forceinline__ void load_adjacent(float (&v)[R], const A* from) {
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
    static constexpr int INPUT_TILES = (INPUTS + 8 * R - 1) / (8 * R), ITEMS = INPUT_TILES * ((UNITS + 7) / 8);
    static constexpr int COUNT = (ITEMS + CTA_WARPS - 1) / CTA_WARPS;
    float sums[COUNT][R / 2][4];
    float bias_sums[COUNT];  // bias gradients of unit g, in tiles of the first inputs only

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            bias_sums[i] = 0.0f;
#pragma unroll
            for (int j = 0; j < R * 2; ++j) sums[i][j / 4][j % 4] = 0.0f;
        }
    }
    static __device__ __forceinline__ int item(int i) { return threadIdx.x / 32 + i * CTA_WARPS; }

    // Chunks of four for Partners: the sums, then the bias gradients.
    static constexpr int ELEMENTS = COUNT * (2 * R + 1), CHUNKS = (ELEMENTS + 3) / 4;
    __device__ __forceinline__ float& element(int i) {
        const int count = COUNT * R * 2;
        return i < count ? sums[i / (2 * R)][i / 4 % (R / 2)][i % 4] : bias_sums[i - count];
    }
    template <class Partners>
    __device__ __forceinline__ void send(const Partners& partners, int first) {
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i) {
            float four[4] = {};
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (4 * i + j < ELEMENTS) four[j] = element(4 * i + j);
            partners.send(first + i, four);
        }
    }
    // Sums both groups. Addition commutes, so both get identical results.
    template <class Partners>
    __device__ __forceinline__ bool add_partner(const Partners& partners, int first) {
        constexpr int AT_ONCE = CHUNKS < 6 ? CHUNKS : 6;  // more would spill
        bool all = true;
#pragma unroll
        for (int begin = 0; begin < CHUNKS; begin += AT_ONCE) {
            u32 other[AT_ONCE][4];
            all = partners.receive(other, first + begin, CHUNKS - begin) && all;
#pragma unroll
            for (int i = 4 * begin; i < ELEMENTS && i < 4 * (begin + AT_ONCE); ++i)
                element(i) = Exchange::cleared(element(i)) + __uint_as_float(other[i / 4 - begin][i % 4] & ~1u);
        }
        return all;
    }

    template <int ROWS, class A>
    __device__ __forceinline__ void add(const A* a, int a_pitch, const float* dz, int dz_pitch) {
        const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
#pragma unroll 1
        for (int chunk = 0; chunk < ROWS / CHUNK; ++chunk) {
            const int row = chunk * CHUNK + 4 * q;
            float dz4[1][4];
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                if (item(i) >= ITEMS) continue;
                const int tile = item(i) % INPUT_TILES, unit = item(i) / INPUT_TILES * 8;
                float v[R][4];
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    if (i == 0 || UNITS > 8) dz4[0][k] = dz[(row + k) * dz_pitch + unit + g];
                    float adjacent[R];
                    load_adjacent<R>(adjacent, a + (row + k) * a_pitch + tile * 8 * R + R * g);
#pragma unroll
                    for (int j = 0; j < R; ++j) v[j][k] = adjacent[j];
                }
                if (tile == 0) bias_sums[i] += (dz4[0][0] + dz4[0][1]) + (dz4[0][2] + dz4[0][3]);
                const Fragment<P, R, sizeof(A) == 1> inputs(v);
                const Fragment<P, 1> units(dz4);
#pragma unroll
                for (int t = 0; t < R / 2; ++t) add_chunk<P>(sums[i][t], inputs, t, units);
            }
        }
    }
};
