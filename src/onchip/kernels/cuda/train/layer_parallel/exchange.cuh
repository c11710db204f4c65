// train/layer_parallel/exchange.cuh: bf16 splits of fp32 values, and point-to-point exchange between blocks through L2.
#pragma once

#include "train/resident/step.cuh"
#include "mma/core_matrix.cuh"

constexpr int ROWS = 64, TEAMS = 2, CREW = 128 * TEAMS;
constexpr int ROWS_STRIP = 16 * ROWS;

__device__ __forceinline__ u32 shared_at(const void* at) { return static_cast<u32>(__cvta_generic_to_shared(at)); }

// Row and column of element i of 4 of a thread's wgmma accumulator fragment, 8-column tile j.
__device__ __forceinline__ int sum_row(int i) { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + i / 2 * 8; }
__device__ __forceinline__ int sum_column(int j, int i) { return 8 * j + threadIdx.x % 4 * 2 + i % 2; }

// Makes a condition warp-uniform to the compiler: ptxas serialises wgmmas that follow a possibly divergent branch.
__device__ __forceinline__ bool of_whole_warps(bool is) { return __any_sync(~0u, is); }

// -- bf16 splits -----------------------------------------------------------------------------------------------------

// Splits two floats into PARTS packed bf16 pairs. Each term rounds what the previous terms leave.
template <int PARTS>
__device__ __forceinline__ void split_two(u32 (&words)[PARTS], float a, float b) {
#pragma unroll
    for (int i = 0; i < PARTS; ++i) {
        words[i] = pack<bf16>(a, b);
        a -= __uint_as_float(words[i] << 16), b -= __uint_as_float(words[i] & 0xffff0000);
    }
}

// c = a b: each bf16 term of a times all terms of b, which are stored side by side. Issues wgmma K steps `first`,
// `first` + BY, ... below STEPS; `whole` adds the terms up. The smallest term products could be skipped, but
// accumulators of mixed widths cost too many registers.
template <int A_PARTS, int STEPS, int BY, class A, class B, int ALL>
__device__ __forceinline__ void begin_parts(float (&c)[ALL][4], u32 a, int a_part_bytes, const B& b, int first,
                                            bool sums = false) {
#pragma unroll
    for (int part = 0; part < A_PARTS; ++part)
        begin_sums<STEPS, BY, A, B, ALL>(c, A(a + part * a_part_bytes), b, first, sums || part > 0);
}
template <int PARTS, int ALL>
__device__ __forceinline__ float whole(const float (&c)[ALL][4], int j, int i) {
    constexpr int NT = ALL / PARTS;
    float sum = c[(PARTS - 1) * NT + j][i];
#pragma unroll
    for (int part = PARTS - 2; part >= 0; --part) sum += c[part * NT + j][i];
    return sum;
}

// -- exchange between blocks -----------------------------------------------------------------------------------------

// A double buffer in L2 with in-band flags, as in NCCL's LL protocol: the lowest bit of each 16 B chunk is a phase bit,
// and the receiver polls until it matches. A slot is reused every second turn with the opposite bit, so no flags,
// fences or grid barrier are needed. A sender is never two turns ahead of its receiver: it waits for data that others
// can only send once the receiver has finished the turn between.
struct Post {
    char* at;  // two buffers of `bytes`
    long long bytes;
    u32 turn, deadline_ms;

    __device__ __forceinline__ u32 bit() const { return 1 ^ (turn >> 1 & 1); }
    __device__ __forceinline__ char* place(int piece) const { return at + (turn & 1) * bytes + piece * 16; }

    __device__ __forceinline__ void send(int piece, u32 a, u32 b, u32 c, u32 d) const {
        delay();
        const unsigned long long low = static_cast<unsigned long long>(b) << 32 | (a & ~1u) | bit();
        const unsigned long long high = static_cast<unsigned long long>(d) << 32 | c;
        asm volatile("{ .reg .b128 s; mov.b128 s, {%1, %2}; st.relaxed.gpu.b128 [%0], s; }"
                     :: "l"(place(piece)), "l"(low), "l"(high) : "memory");
    }
    // Polls COUNT chunks per thread with all loads in flight at once: chunk `first` + offset(i), if is_one(i). Offsets
    // are compile-time, since addresses would take too many registers. Returns false on timeout. Call it
    // unconditionally: after a branch, ptxas runs out of registers.
    template <int COUNT, class Offset, class IsOne>
    __device__ __forceinline__ bool look(u32 (&words)[COUNT][4], int first, const Offset& offset, const IsOne& is_one) const {
        unsigned long long low[COUNT], high[COUNT], begin = 0;
        const char* const from = place(first);
        bool all, is_late = false;
        u32 looks = 0;
        do {
            all = true;
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                low[i] = bit(), high[i] = 0;
                if (is_one(i))
                    asm volatile("{ .reg .b128 s; ld.relaxed.gpu.b128 s, [%2]; mov.b128 {%0, %1}, s; }"
                                 : "=l"(low[i]), "=l"(high[i]) : "l"(from + offset(i) * 16) : "memory");
            }
#pragma unroll
            for (int i = 0; i < COUNT; ++i) all = all && (low[i] & 1) == bit();
            if (++looks % 256 == 0) {
                const unsigned long long now = Exchange::nanoseconds();
                if (begin == 0) begin = now;
                is_late = deadline_ms && (now - begin) / 1000000 >= deadline_ms;
            }
        } while (!all && !is_late);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            words[i][0] = static_cast<u32>(low[i]) & ~1u, words[i][1] = static_cast<u32>(low[i] >> 32);
            words[i][2] = static_cast<u32>(high[i]), words[i][3] = static_cast<u32>(high[i] >> 32);
        }
        return !is_late;
    }
    // Receives PIECES chunks with all threads or one warpgroup: take(n, four words). Chunks from `there` on are not
    // loaded and read as 0. Chunk n is stored at which(n), and which(n + THREADS) must be which(n) + THREADS.
    template <int PIECES, int THREADS = CREW, class Which, class Take>
    __device__ __forceinline__ bool receive(int there, const Which& which, const Take& take) const {
        constexpr int EACH = (PIECES + THREADS - 1) / THREADS, MOST = THREADS == CREW ? 20 : 10;
        constexpr int AT_ONCE = EACH < MOST ? EACH : MOST;
        delay();
        bool are_there = true;
#pragma unroll 1
        for (int next = threadIdx.x % THREADS; are_there && next < PIECES; next += AT_ONCE * THREADS) {
            u32 words[AT_ONCE][4];
            are_there = look(words, which(next), [](int i) { return i * THREADS; },
                             [=](int i) { return next + i * THREADS < there; });
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                if (next + i * THREADS >= PIECES) break;
                take(next + i * THREADS, words[i]);
            }
        }
        return are_there;
    }
};

// Rounds to bf16 with the lowest mantissa bit clear, which leaves it free for the phase bit.
__device__ __forceinline__ u32 round_to_even_bits(float v) {
    const u32 bits = __float_as_uint(v);
    const bool is_finite = (bits & 0x7f800000) != 0x7f800000;
    return (is_finite ? bits + 0xffff + (bits >> 17 & 1) : bits) >> 16 & 0xfffe;
}

// Exchanges tiles of 8 units x BATCH rows. IN_PARTS sends bf16 split terms, one panel after the other, so that the
// receiver has nothing to split. Three terms are more bytes than fp32 and slower: an epoch of digits in fp32 takes 13.6
// instead of 11.4 ms. It pays only with many rows: tf32 takes 9.0 instead of 9.3 ms at batch 64, but 26.0 instead of
// 25.6 at 16. Otherwise it sends fp32, four units of all rows and then the other four, so that consecutive rows are
// contiguous.
template <int PARTS, int BATCH>
struct TilePost {
    static constexpr bool IN_PARTS = PARTS == 1 || (PARTS == 2 && BATCH == ROWS);
    static constexpr int A_ROW = IN_PARTS ? PARTS : 2, A_TILE = BATCH * A_ROW;  // in 16 B chunks
    static constexpr int GROUP = IN_PARTS ? 8 : 4;  // units of a row per send
    Post post;

    __device__ __forceinline__ TilePost(char* at, int tiles, u32 turn, u32 deadline_ms)
        : post{at, static_cast<long long>(tiles) * A_TILE * 16, turn, deadline_ms} {}

    // which: split term, or half of the 8 units
    static __device__ __forceinline__ int piece(int tile, int row, int which) { return (tile * A_ROW + which) * BATCH + row; }
    // Sends units `unit` to `unit` + GROUP of a tile: one chunk, or one per split term.
    __device__ __forceinline__ void send(int tile, int row, int unit, const float (&v)[GROUP]) const {
        if constexpr (IN_PARTS) {
            float left[GROUP];
#pragma unroll
            for (int i = 0; i < GROUP; ++i) left[i] = v[i];
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                u32 words[GROUP / 2];
#pragma unroll
                for (int i = 0; i < GROUP / 2; ++i) {
                    words[i] = pack<bf16>(left[2 * i], left[2 * i + 1]);
                    if (i == 0) words[0] = (words[0] & 0xffff0000) | round_to_even_bits(left[0]);
                    left[2 * i] -= __uint_as_float(words[i] << 16), left[2 * i + 1] -= __uint_as_float(words[i] & 0xffff0000);
                }
                post.send(piece(tile, row, part), words[0], words[1], words[2], words[3]);
            }
        } else {
            post.send(piece(tile, row, unit / 4), __float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]),
                      __float_as_uint(v[3]));
        }
    }
    // Stores a chunk as wgmma core matrices. `to` is the tile's row; split terms are part_bytes apart.
    static __device__ __forceinline__ void put(char* to, int part_bytes, int which, const u32 (&four)[4]) {
        if constexpr (IN_PARTS) {
            *reinterpret_cast<uint4*>(to + which * part_bytes) = {four[0], four[1], four[2], four[3]};
        } else {
            u32 front[PARTS], back[PARTS];
            split_two(front, __uint_as_float(four[0]), __uint_as_float(four[1]));
            split_two(back, __uint_as_float(four[2]), __uint_as_float(four[3]));
#pragma unroll
            for (int i = 0; i < PARTS; ++i) *reinterpret_cast<uint2*>(to + i * part_bytes + which * 8) = {front[i], back[i]};
        }
    }
    // Receives TILES tiles into shared memory. Neighbouring threads take the halves of a row, which avoids bank
    // conflicts.
    template <int TILES>
    __device__ __forceinline__ bool receive(char* to, int part_bytes) const {
        const auto row = [](int n) { return IN_PARTS ? n % BATCH : n % A_TILE / 2; };
        const auto half = [](int n) { return IN_PARTS ? n % A_TILE / BATCH : n % 2; };
        static_assert(CREW % A_TILE == 0, "pieces of a thread lie at the same place of other tiles");
        return post.receive<TILES * A_TILE>(
            TILES * A_TILE, [=](int n) { return piece(n / A_TILE, row(n), half(n)); },
            [=](int n, const u32 (&four)[4]) { put(to + n / A_TILE * ROWS_STRIP + row(n) * 16, part_bytes, half(n), four); });
    }
};
