// mma/mma_tile.cuh: mma.sync GEMM mainloop and epilogue of one tile of y = activation(x w^T + bias): sm_80 up. Used by
// gemm/mma.cu and conv/implicit_gemm.cu, which differ in how they load rows of x. Host side: mma/mma_tile.py.
//
// Idea    A cp.async pipeline of STAGES stages: while one slice of k (64 bytes of w) is multiplied, the next ones are
//         in flight. WM x WN warps share the tile. A warp loads fragments by ldmatrix one step ahead and multiplies
//         them by mma.sync, 16 x 8 outputs per instruction. A row of a slice is four units of k, one thread per unit;
//         the copy width follows the alignment of the rows. Loaders advance pointers from slice to slice: recomputing
//         addresses takes as long as the mma. x is rounded, or split (3xTF32), when fragments are read.
// Order   k in order, STEP elements per instruction. fp32 partial sums are added to a total every MMA_PART elements,
//         since the tensor cores truncate when they accumulate. Then bias, residual, activation. The reduction order
//         depends neither on the tile nor on the batch size.
// Shared  STAGES * (BM * DEPTH elements of x + PARTS * BN * 64 B) + 4 BN B of bias: 48.5 KB for 128 x 128, 16 bits.
#pragma once

#include "mma/cp_async.cuh"
#include "common/epilogue.cuh"
#include "mma/tensor_core.cuh"

constexpr int UNITS = 4;         // 16-byte units of w per row of a slice
constexpr int MMA_PART = 32;     // elements of k per fp32 partial sum
constexpr int BANK_BYTES = 128;  // all 32 banks of shared memory

template <class P>
struct MmaMultiplies {
    using type = P;
};
template <>
struct MmaMultiplies<Fp32> {
    using type = Tf32;
};

template <class P>
struct MmaSlice {
    static constexpr int UNIT = 4 * P::PER_WORD, DEPTH = UNITS * UNIT;  // elements
    static constexpr int STEPS = DEPTH / P::STEP, PARTS = is_same<P, Fp32> ? 2 : 1;
};

// -- cp.async loads of slices -----------------------------------------------------------------------------------

// ROWS rows of a slice in shared memory, of element type T.
template <class P, class T, int ROWS>
struct SliceRoom {
    static constexpr int LINE = MmaSlice<P>::DEPTH * static_cast<int>(sizeof(T)), BYTES = ROWS * LINE;

    // XOR swizzle of 16-byte chunks: ldmatrix reads the same chunk of eight rows from 32 distinct banks.
    static __device__ __forceinline__ int place(int row, int byte) {
        const int mixed = LINE < BANK_BYTES ? row * LINE / BANK_BYTES % (LINE / 16) : row % 8;
        return row * LINE + (byte / 16 ^ mixed) * 16 + byte % 16;
    }
};

// Assignment of units to threads: UNITS threads load a row, and a thread loads every DOWN-th row from its own on.
template <class P, class T, int ROWS, int THREADS>
struct UnitPlaces {
    using Room = SliceRoom<P, T, ROWS>;
    static constexpr int UNIT = MmaSlice<P>::UNIT, BYTES = UNIT * static_cast<int>(sizeof(T));
    static constexpr int DOWN = THREADS / UNITS, EACH = (ROWS + DOWN - 1) / DOWN;
    static_assert(DOWN % 8 == 0, "rows of a thread are mixed alike");

    static __device__ __forceinline__ int row() { return threadIdx.x / UNITS; }
    static __device__ __forceinline__ int unit() { return threadIdx.x % UNITS; }
    static __device__ __forceinline__ int first() { return Room::place(row(), unit() * BYTES); }
    static __device__ __forceinline__ bool has(int i) { return ROWS % DOWN == 0 || row() + i * DOWN < ROWS; }
};

// Copies a unit, PIECE bytes per cp.async. at  swizzled offset in the stage
template <int PIECE, int BYTES>
__device__ __forceinline__ void copy_pieces(char* room, int at, const char* from, int given) {
    constexpr int WIDTH = PIECE < BYTES ? PIECE : BYTES;
#pragma unroll
    for (int b = 0; b < BYTES; b += WIDTH)
        copy_async<WIDTH>(room + (at ^ (b & 16)) + b % 16, from + b, min(max(given - b, 0), WIDTH));
}

// Copies a unit of a row: `numbers` elements of `from`, then zeros. IS_WHOLE: all or none, 16-byte aligned.
// piece  alignment of `from` in bytes, up to 16
template <class Places, bool IS_WHOLE, class T>
__device__ __forceinline__ void bring_unit(char* room, int at, const T* from, int numbers, int piece) {
    constexpr int UNIT = Places::UNIT, SIZE = sizeof(T), BYTES = Places::BYTES;
    const char* const bytes = reinterpret_cast<const char*>(from);
    if (IS_WHOLE) {
        constexpr int WIDTH = BYTES < 16 ? BYTES : 16;
#pragma unroll
        for (int b = 0; b < BYTES; b += WIDTH) copy_async<WIDTH>(room + (at ^ b), bytes + b, numbers > 0 ? WIDTH : 0);
    } else if (piece == 16) {
        copy_pieces<16, BYTES>(room, at, bytes, numbers * SIZE);
    } else if (piece == 8) {
        copy_pieces<8, BYTES>(room, at, bytes, numbers * SIZE);
    } else if (SIZE == 4 || piece == 4) {
        copy_pieces<4, BYTES>(room, at, bytes, numbers * SIZE);
    } else {  // cp.async copies at least 4 bytes
        T held[UNIT];
#pragma unroll
        for (int i = 0; i < UNIT; ++i) held[i] = i < numbers ? from[i] : T{};
#pragma unroll
        for (int i = 0; i < UNIT; ++i) {
            const int b = i * SIZE;
            *reinterpret_cast<T*>(room + (at ^ (b & 16)) + b % 16) = held[i];
        }
    }
}

// Loads ROWS rows of a row-major matrix, slice by slice; of PARTS matrices.
template <class P, class T, int ROWS, int THREADS, int PARTS, bool IS_WHOLE>
struct Lines {
    using Places = UnitPlaces<P, T, ROWS, THREADS>;
    const T* from;           // the thread's unit of its first line
    long long pitch, lower;  // row stride, and stride between parts
    long long rest;          // elements of k from that unit on
    int left, at, piece;     // rows from the thread's first on; offset in the stage; alignment

    // first  element of the first of `lines` rows, K elements each
    __device__ __forceinline__ Lines(const T* first, long long pitch, long long lines, long long K, int piece,
                                     long long lower = 0)
        : from(first + Places::row() * pitch + Places::unit() * Places::UNIT), pitch(pitch), lower(lower),
          rest(K - Places::unit() * Places::UNIT), at(Places::first()), piece(piece) {
        left = static_cast<int>(lines < ROWS ? lines : ROWS) - Places::row();
    }
    __device__ __forceinline__ void bring(char* room) {
        const int there = rest < 0 ? 0 : rest < Places::UNIT ? static_cast<int>(rest) : Places::UNIT;
#pragma unroll
        for (int i = 0; i < Places::EACH; ++i) {
            if (!Places::has(i)) break;
            const int numbers = i * Places::DOWN < left ? there : 0;
#pragma unroll
            for (int part = 0; part < PARTS; ++part)
                bring_unit<Places, IS_WHOLE>(room + part * Places::Room::BYTES,
                                             at + i * Places::DOWN * Places::Room::LINE,
                                             from + i * Places::DOWN * pitch + part * lower, numbers, piece);
        }
        from += MmaSlice<P>::DEPTH, rest -= MmaSlice<P>::DEPTH;
    }
};

// -- fragments --------------------------------------------------------------------------------------------------

// A lane's fragments of one k step of 16 MT rows and 8 NT columns, unconverted; w in PARTS.
template <class P, class X, int BM, int BN, int MT, int NT>
struct MmaStep {
    static constexpr int PARTS = MmaSlice<P>::PARTS;
    u32 x[MT][4], w[PARTS][NT / 2][4];

    // row: the warp's first row; x_at, w_at: the lane's ldmatrix offsets for the step
    __device__ __forceinline__ void read(const char* stage, int row, int step, int x_at, int w_at) {
        using Room = SliceRoom<P, X, BM>;
        using WRoom = SliceRoom<P, typename P::Element, BN>;
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < MT; ++i) {
            if constexpr (is_same<X, typename P::Element>) {
                read_matrices(x[i], stage + x_at + 16 * i * Room::LINE);
            } else {
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    const int number = step * P::STEP + (lane % 4 + k / 2 * 4) * P::PER_WORD;
                    const int at =
                        Room::place(row + 16 * i + lane / 4 + k % 2 * 8, number * static_cast<int>(sizeof(X)));
                    const X* const v = reinterpret_cast<const X*>(stage + at);
                    if constexpr (P::PER_WORD == 2) x[i][k] = pack<typename P::Element>(to_float(v[0]), to_float(v[1]));
                    else x[i][k] = __float_as_uint(to_float(v[0]));
                }
            }
        }
#pragma unroll
        for (int i = 0; i < PARTS * NT / 2; ++i) {
            const int part = i / (NT / 2), j = i % (NT / 2);
            read_matrices(w[part][j], stage + Room::BYTES + w_at + part * WRoom::BYTES + 16 * j * WRoom::LINE);
        }
    }
    // 3xTF32 where PARTS is 2: the two small terms first.
    __device__ __forceinline__ void multiply(float (&sums)[MT][NT][4]) const {
        using Multiplied = typename MmaMultiplies<P>::type;
#pragma unroll
        for (int i = 0; i < MT; ++i) {
            u32 a[4], low[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                a[k] = x[i][k];
                if constexpr (P::PER_WORD == 1) a[k] = Tf32::word(__uint_as_float(a[k]));
                if constexpr (PARTS == 2) low[k] = Tf32::word(__uint_as_float(x[i][k]) - __uint_as_float(a[k]));
            }
            if constexpr (PARTS == 2) {
                add<Multiplied>(sums[i], low, w[0]);
                add<Multiplied>(sums[i], a, w[PARTS - 1]);
            }
            add<Multiplied>(sums[i], a, w[0]);
        }
    }

private:
    template <class Multiplied>
    static __device__ __forceinline__ void add(float (&sums)[NT][4], const u32 (&a)[4], const u32 (&b)[NT / 2][4]) {
#pragma unroll
        for (int j = 0; j < NT; ++j) mma<Multiplied>(sums[j], a, b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
    }
};

// -- a tile -----------------------------------------------------------------------------------------------------

template <class P, class X, int BM, int BN>
constexpr int STAGE_BYTES =
    SliceRoom<P, X, BM>::BYTES + MmaSlice<P>::PARTS * SliceRoom<P, typename P::Element, BN>::BYTES;

// Occupancy in blocks per SM, limited by accumulator registers.
template <class P, int BM, int BN, int WARPS>
constexpr int MMA_BLOCKS = BM * BN * MmaSlice<P>::PARTS > 64 * 32 * WARPS ? 2
                           : BM * BN * MmaSlice<P>::PARTS > 32 * 32 * WARPS ? 3 : 4;

// rows, weights  loaders of x and w; each bring() loads the next slice of k
// m, n           first row and column of the tile; bias  from that column on, or nullptr
template <class P, class X, int BM, int BN, int WM, int WN, int STAGES, class Rows, class Weights, class Out>
__device__ __forceinline__ void multiply_tile(uint4* shared, Rows& rows, Weights& weights, int slices,
                                              const float* bias, const Out& out, long long m, long long n,
                                              const Activation& activation) {
    using WRoom = SliceRoom<P, typename P::Element, BN>;
    using XRoom = SliceRoom<P, X, BM>;
    constexpr int THREADS = 32 * WM * WN, MT = BM / WM / 16, NT = BN / WN / 8;
    constexpr int PARTS = MmaSlice<P>::PARTS, STEPS = MmaSlice<P>::STEPS, STAGE = STAGE_BYTES<P, X, BM, BN>;
    static_assert(MT * WM * 16 == BM && NT * WN * 8 == BN && NT % 4 == 0 && STEPS % 2 == 0, "whole fragments");
    char* const room = reinterpret_cast<char*>(shared);
    float* const shifts = reinterpret_cast<float*>(room + STAGES * STAGE);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const int first_m = warp / WN * (BM / WM), first_n = warp % WN * (BN / WN);
    for (int i = threadIdx.x; i < BN; i += THREADS) shifts[i] = bias != nullptr && n + i < out.N ? bias[i] : 0.0f;

    int x_at[STEPS], w_at[STEPS];
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        x_at[step] = XRoom::place(first_m + lane % 16, 32 * step + lane / 16 * 16);
        w_at[step] = WRoom::place(first_n + lane / 16 * 8 + lane % 8, 32 * step + lane / 8 % 2 * 16);
    }
    const auto bring = [&](int slice) {
        if (slice < slices) {
            char* const stage = room + slice % STAGES * STAGE;
            rows.bring(stage);
            weights.bring(stage + XRoom::BYTES);
        }
        close_copies();  // empty groups too: wait_for_copies counts groups
    };
    float sums[MT][NT][4] = {}, totals[PARTS == 2 ? MT : 1][NT][4] = {};
    MmaStep<P, X, BM, BN, MT, NT> held[2];  // double-buffered fragments: the current k step and the next
#pragma unroll
    for (int slice = 0; slice < STAGES - 1; ++slice) bring(slice);
    wait_for_copies<STAGES - 2>();
    __syncthreads();
    held[0].read(room, first_m, 0, x_at[0], w_at[0]);
    for (int slice = 0; slice < slices; ++slice) {
        bring(slice + STAGES - 1);  // into the stage of the previous slice
        const char* const stage = room + slice % STAGES * STAGE;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            if (step + 1 < STEPS) {
                held[(step + 1) % 2].read(stage, first_m, step + 1, x_at[step + 1], w_at[step + 1]);
            } else {
                wait_for_copies<STAGES - 2>();
                __syncthreads();  // the next slice has landed, and all warps have read this one
                held[(step + 1) % 2].read(room + (slice + 1) % STAGES * STAGE, first_m, 0, x_at[0], w_at[0]);
            }
            held[step % 2].multiply(sums);
        }
        if constexpr (PARTS == 2) {
            if ((slice + 1) % (MMA_PART / MmaSlice<P>::DEPTH) == 0 || slice + 1 == slices) {
#pragma unroll
                for (int i = 0; i < 4 * MT * NT; ++i) {
                    totals[i / (4 * NT)][i / 4 % NT][i % 4] += sums[i / (4 * NT)][i / 4 % NT][i % 4];
                    sums[i / (4 * NT)][i / 4 % NT][i % 4] = 0.0f;
                }
            }
        }
    }
    wait_for_copies<0>();
#pragma unroll
    for (int i = 0; i < MT; ++i) {
        const long long row = m + first_m + 16 * i + g;
        if constexpr (PARTS == 2)
            finish_rows<BN / WN>(totals[i], out, shifts + first_n, row, n + first_n, q, activation);
        else finish_rows<BN / WN>(sums[i], out, shifts + first_n, row, n + first_n, q, activation);
    }
}
