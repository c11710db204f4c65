// train/layer_parallel/exchange.cuh: bf16 splits of fp32 values, and point-to-point exchange between blocks through L2.
#pragma once

#include "train/resident/step.cuh"
#include "mma/core_matrix.cuh"

constexpr int ROWS = 64, WARPGROUPS = 2, LP_THREADS = 128 * WARPGROUPS;
constexpr int PANEL_BYTES = 16 * ROWS;

__device__ __forceinline__ u32 shared_at(const void* at) { return static_cast<u32>(__cvta_generic_to_shared(at)); }

// Row and column of element i of 4 of a thread's wgmma accumulator fragment, 8-column tile j.
__device__ __forceinline__ int acc_row(int i) { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + i / 2 * 8; }
__device__ __forceinline__ int acc_column(int j, int i) { return 8 * j + threadIdx.x % 4 * 2 + i % 2; }

// Makes a condition warp-uniform to the compiler: ptxas serialises wgmmas that follow a possibly divergent branch.
__device__ __forceinline__ bool warp_uniform(bool is) { return __any_sync(~0u, is); }

// Splits two floats into SPLITS packed bf16 pairs. Each term rounds what the previous terms leave.
template <int SPLITS>
__device__ __forceinline__ void split_pair(u32 (&packed)[SPLITS], float a, float b) {
#pragma unroll
    for (int i = 0; i < SPLITS; ++i) {
        packed[i] = pack<bf16>(a, b);
        a -= __uint_as_float(packed[i] << 16), b -= __uint_as_float(packed[i] & 0xffff0000);
    }
}

// c = a b: each bf16 term of a times all terms of b, which are stored next to each other. Issues wgmma K steps `first`,
// `first` + BY, ... below STEPS; add_terms() adds the terms. Skipping the smallest products would mix accumulator
// widths, which costs too many registers.
template <int A_SPLITS, int STEPS, int BY, class A, class B, int ALL>
__device__ __forceinline__ void split_gemm(float (&c)[ALL][4], u32 a, int a_split_bytes, const B& b, int first,
                                           bool sums = false) {
#pragma unroll
    for (int term = 0; term < A_SPLITS; ++term)
        begin_gemm<STEPS, BY, A, B, ALL>(c, A(a + term * a_split_bytes), b, first, sums || term > 0);
}
template <int SPLITS, int ALL>
__device__ __forceinline__ float add_terms(const float (&c)[ALL][4], int j, int i) {
    constexpr int NT = ALL / SPLITS;
    float sum = c[(SPLITS - 1) * NT + j][i];
#pragma unroll
    for (int term = SPLITS - 2; term >= 0; --term) sum += c[term * NT + j][i];
    return sum;
}

// -- exchange between blocks -----------------------------------------------------------------------------------------

// A double buffer in L2 with in-band flags, as in NCCL's LL protocol: the lowest bit of each 16 B slot is a phase
// bit that the receiver polls. A slot is reused every second round with the opposite bit, so no flags, fences or grid
// barrier are needed. A sender is never two rounds ahead: it waits for data that depends on the receiver's last round.
struct Channel {
    char* at;  // two buffers of `bytes`
    long long bytes;
    u32 round, deadline_ms;

    __device__ __forceinline__ u32 phase_bit() const { return 1 ^ (round >> 1 & 1); }
    __device__ __forceinline__ char* address(int slot) const { return at + (round & 1) * bytes + slot * 16; }

    __device__ __forceinline__ void send(int slot, u32 a, u32 b, u32 c, u32 d) const {
        delay();
        const unsigned long long low = static_cast<unsigned long long>(b) << 32 | (a & ~1u) | phase_bit();
        const unsigned long long high = static_cast<unsigned long long>(d) << 32 | c;
        asm volatile("{ .reg .b128 s; mov.b128 s, {%1, %2}; st.relaxed.gpu.b128 [%0], s; }"
                     :: "l"(address(slot)), "l"(low), "l"(high) : "memory");
    }
    // Polls COUNT slots per thread with all loads in flight: `first` + offset(i), if is_active(i). Offsets are
    // compile-time to save registers. Returns false on timeout. Not to be called in a branch: ptxas would run out of
    // registers.
    template <int COUNT, class Offset, class IsActive>
    __device__ __forceinline__ bool poll(u32 (&received)[COUNT][4], int first, const Offset& offset,
                                         const IsActive& is_active) const {
        unsigned long long low[COUNT], high[COUNT], begin = 0;
        const char* const from = address(first);
        bool all, timed_out = false;
        u32 polls = 0;
        do {
            all = true;
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                low[i] = phase_bit(), high[i] = 0;
                if (is_active(i))
                    asm volatile("{ .reg .b128 s; ld.relaxed.gpu.b128 s, [%2]; mov.b128 {%0, %1}, s; }"
                                 : "=l"(low[i]), "=l"(high[i]) : "l"(from + offset(i) * 16) : "memory");
            }
#pragma unroll
            for (int i = 0; i < COUNT; ++i) all = all && (low[i] & 1) == phase_bit();
            if (++polls % 256 == 0) {
                const unsigned long long now = Exchange::nanoseconds();
                if (begin == 0) begin = now;
                timed_out = deadline_ms && (now - begin) / 1000000 >= deadline_ms;
            }
        } while (!all && !timed_out);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            received[i][0] = static_cast<u32>(low[i]) & ~1u, received[i][1] = static_cast<u32>(low[i] >> 32);
            received[i][2] = static_cast<u32>(high[i]), received[i][3] = static_cast<u32>(high[i] >> 32);
        }
        return !timed_out;
    }
    // Receives SLOTS values with all threads or one warpgroup: consume(n, four words). Values from `valid` on are 0 and
    // not loaded. Value n is in slot_of(n), and slot_of(n + THREADS) must be slot_of(n) + THREADS.
    template <int SLOTS, int THREADS = LP_THREADS, class SlotOf, class Consume>
    __device__ __forceinline__ bool receive(int valid, const SlotOf& slot_of, const Consume& consume) const {
        constexpr int PER_THREAD = (SLOTS + THREADS - 1) / THREADS, MAX = THREADS == LP_THREADS ? 20 : 10;
        constexpr int AT_ONCE = PER_THREAD < MAX ? PER_THREAD : MAX;
        delay();
        bool arrived = true;
#pragma unroll 1
        for (int next = threadIdx.x % THREADS; arrived && next < SLOTS; next += AT_ONCE * THREADS) {
            u32 received[AT_ONCE][4];
            arrived = poll(received, slot_of(next), [](int i) { return i * THREADS; },
                           [=](int i) { return next + i * THREADS < valid; });
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                if (next + i * THREADS >= SLOTS) break;
                consume(next + i * THREADS, received[i]);
            }
        }
        return arrived;
    }
};

// Rounds to bf16 with the lowest mantissa bit clear, which leaves it free for the phase bit.
__device__ __forceinline__ u32 round_to_even_bits(float v) {
    const u32 bits = __float_as_uint(v);
    const bool is_finite = (bits & 0x7f800000) != 0x7f800000;
    return (is_finite ? bits + 0xffff + (bits >> 17 & 1) : bits) >> 16 & 0xfffe;
}

// Exchanges tiles of 8 units x BATCH rows. SENDS_SPLITS sends bf16 split terms, panel by panel, so that receivers do
// not split. Three terms are more bytes than fp32 and slower (an epoch of digits: 13.6 ms, not 11.4). Two are faster
// with many rows only: tf32 takes 9.0, not 9.3 ms, at batch 64, but 26.0, not 25.6, at 16. Otherwise it sends fp32:
// four units of all rows, then the other four, so that consecutive rows are contiguous.
template <int SPLITS, int BATCH>
struct TileChannel {
    static constexpr bool SENDS_SPLITS = SPLITS == 1 || (SPLITS == 2 && BATCH == ROWS);
    static constexpr int ROW_SLOTS = SENDS_SPLITS ? SPLITS : 2, TILE_SLOTS = BATCH * ROW_SLOTS;
    static constexpr int GROUP = SENDS_SPLITS ? 8 : 4;  // units of a row per send
    Channel chunks;

    __device__ __forceinline__ TileChannel(char* at, int tiles, u32 round, u32 deadline_ms)
        : chunks{at, static_cast<long long>(tiles) * TILE_SLOTS * 16, round, deadline_ms} {}

    // which: split term, or half of the 8 units
    static __device__ __forceinline__ int slot(int tile, int row, int which) {
        return (tile * ROW_SLOTS + which) * BATCH + row; }
    // Sends GROUP units of a tile, from `unit` on: one slot, or one per split term.
    __device__ __forceinline__ void send(int tile, int row, int unit, const float (&v)[GROUP]) const {
        if constexpr (SENDS_SPLITS) {
            float remainder[GROUP];
#pragma unroll
            for (int i = 0; i < GROUP; ++i) remainder[i] = v[i];
#pragma unroll
            for (int term = 0; term < SPLITS; ++term) {
                u32 packed[GROUP / 2];
#pragma unroll
                for (int i = 0; i < GROUP / 2; ++i) {
                    packed[i] = pack<bf16>(remainder[2 * i], remainder[2 * i + 1]);
                    if (i == 0) packed[0] = (packed[0] & 0xffff0000) | round_to_even_bits(remainder[0]);
                    remainder[2 * i] -= __uint_as_float(packed[i] << 16),
                        remainder[2 * i + 1] -= __uint_as_float(packed[i] & 0xffff0000);
                }
                chunks.send(slot(tile, row, term), packed[0], packed[1], packed[2], packed[3]);
            }
        } else {
            chunks.send(slot(tile, row, unit / 4), __float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]),
                        __float_as_uint(v[3]));
        }
    }
    // Stores a slot as wgmma core matrices. `to` is the tile's row; split terms are split_bytes apart.
    static __device__ __forceinline__ void store(char* to, int split_bytes, int which, const u32 (&four)[4]) {
        if constexpr (SENDS_SPLITS) {
            *reinterpret_cast<uint4*>(to + which * split_bytes) = {four[0], four[1], four[2], four[3]};
        } else {
            u32 low[SPLITS], high[SPLITS];
            split_pair(low, __uint_as_float(four[0]), __uint_as_float(four[1]));
            split_pair(high, __uint_as_float(four[2]), __uint_as_float(four[3]));
#pragma unroll
            for (int i = 0; i < SPLITS; ++i)
                *reinterpret_cast<uint2*>(to + i * split_bytes + which * 8) = {low[i], high[i]};
        }
    }
    // Receives TILES tiles into shared memory. Adjacent threads store the halves of a row: no bank conflicts.
    template <int TILES>
    __device__ __forceinline__ bool receive(char* to, int split_bytes) const {
        const auto row = [](int n) { return SENDS_SPLITS ? n % BATCH : n % TILE_SLOTS / 2; };
        const auto half = [](int n) { return SENDS_SPLITS ? n % TILE_SLOTS / BATCH : n % 2; };
        static_assert(LP_THREADS % TILE_SLOTS == 0, "a thread's slots have the same offset in every tile");
        return chunks.receive<TILES * TILE_SLOTS>(
            TILES * TILE_SLOTS, [=](int n) { return slot(n / TILE_SLOTS, row(n), half(n)); },
            [=](int n, const u32 (&v)[4]) {
                store(to + n / TILE_SLOTS * PANEL_BYTES + row(n) * 16, split_bytes, half(n), v);
            });
    }
};
