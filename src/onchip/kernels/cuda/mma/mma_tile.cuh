// mma/mma_tile.cuh: mma.sync GEMM mainloop and epilogue of one tile of y = activation(x w^T + bias): sm_80 up. Used by
// gemm/mma.cu and conv/implicit_gemm.cu, which differ in how they load rows of x. Host side: mma/mma_tile.py.
//
// Idea    A cp.async pipeline of STAGES stages: while one slice of k (64 bytes of w) is multiplied, the next ones are
//         in flight. WM x WN warps share the tile. A warp loads fragments by ldmatrix one step ahead and multiplies
//         them by mma.sync, 16 x 8 outputs per instruction. A row of a slice is four units of k, one thread per unit;
//         the copy width depends on the alignment of rows. Loaders advance pointers from slice to slice: recomputing
//         addresses takes as long as the mma. x is rounded, or split (3xTF32), when fragments are read.
// Order   k in order, STEP elements per instruction. fp32 partial sums are added to a total every MMA_PART elements,
//         since the tensor cores truncate. Then bias, residual, activation. Tile and batch size do not change it.
// Shared  STAGES * (BM * DEPTH elements of x + SPLITS * BN * 64 B) + 4 BN B of bias: 48.5 KB for 128 x 128, 16 bits.
#pragma once

#include "mma/cp_async.cuh"
#include "common/epilogue.cuh"
#include "mma/tensor_core.cuh"

constexpr int UNITS = 4;         // 16-byte units of w per row of a slice
constexpr int MMA_PART = 32;     // elements of k per fp32 partial sum
constexpr int BANK_BYTES = 128;  // all 32 banks of shared memory

template <class P>
struct MmaTilePrecision {
    using type = P;
};
template <>
struct MmaTilePrecision<Fp32> {
    using type = Tf32;
};

template <class P>
struct MmaSlice {
    static constexpr int UNIT = 4 * P::PER_WORD, DEPTH = UNITS * UNIT;  // elements
    static constexpr int STEPS = DEPTH / P::STEP, SPLITS = is_same<P, Fp32> ? 2 : 1;
};

// -- cp.async loads of slices -----------------------------------------------------------------------------------

// ROWS rows of a slice in shared memory, of element type T.
template <class P, class T, int ROWS>
struct SliceBuffer {
    static constexpr int ROW_BYTES = MmaSlice<P>::DEPTH * static_cast<int>(sizeof(T)), BYTES = ROWS * ROW_BYTES;

    // XOR swizzle of 16-byte chunks: ldmatrix reads the same chunk of eight rows from 32 distinct banks.
    static __device__ __forceinline__ int offset(int row, int byte) {
        const int swizzled = ROW_BYTES < BANK_BYTES ? row * ROW_BYTES / BANK_BYTES % (ROW_BYTES / 16) : row % 8;
        return row * ROW_BYTES + (byte / 16 ^ swizzled) * 16 + byte % 16;
    }
};

// Assignment of units to threads: UNITS threads load a row, and each thread loads every ROW_STEP-th row.
template <class P, class T, int ROWS, int THREADS>
struct UnitLoads {
    using Buffer = SliceBuffer<P, T, ROWS>;
    static constexpr int UNIT = MmaSlice<P>::UNIT, BYTES = UNIT * static_cast<int>(sizeof(T));
    static constexpr int ROW_STEP = THREADS / UNITS, ROWS_PER_THREAD = (ROWS + ROW_STEP - 1) / ROW_STEP;
    static_assert(ROW_STEP % 8 == 0, "all rows of a thread must have the same swizzle");

    static __device__ __forceinline__ int row() { return threadIdx.x / UNITS; }
    static __device__ __forceinline__ int unit() { return threadIdx.x % UNITS; }
    static __device__ __forceinline__ int first() { return Buffer::offset(row(), unit() * BYTES); }
    static __device__ __forceinline__ bool has(int i) { return ROWS % ROW_STEP == 0 || row() + i * ROW_STEP < ROWS; }
};

// Copies a unit, ALIGNMENT bytes per cp.async, to the swizzled offset `at` in the stage.
template <int ALIGNMENT, int BYTES>
__device__ __forceinline__ void copy_unit(char* smem, int at, const char* from, int nbytes) {
    constexpr int WIDTH = ALIGNMENT < BYTES ? ALIGNMENT : BYTES;
#pragma unroll
    for (int b = 0; b < BYTES; b += WIDTH)
        cp_async<WIDTH>(smem + (at ^ (b & 16)) + b % 16, from + b, min(max(nbytes - b, 0), WIDTH));
}

// Copies a unit of a row: `count` elements of `from`, then zeros. IS_WHOLE: the whole unit or zeros, 16-byte aligned.
// alignment  of `from` in bytes, up to 16
template <class Loads, bool IS_WHOLE, class T>
__device__ __forceinline__ void load_unit(char* smem, int at, const T* from, int count, int alignment) {
    constexpr int UNIT = Loads::UNIT, SIZE = sizeof(T), BYTES = Loads::BYTES;
    const char* const bytes = reinterpret_cast<const char*>(from);
    if (IS_WHOLE) {
        constexpr int WIDTH = BYTES < 16 ? BYTES : 16;
#pragma unroll
        for (int b = 0; b < BYTES; b += WIDTH) cp_async<WIDTH>(smem + (at ^ b), bytes + b, count > 0 ? WIDTH : 0);
    } else if (alignment == 16) {
        copy_unit<16, BYTES>(smem, at, bytes, count * SIZE);
    } else if (alignment == 8) {
        copy_unit<8, BYTES>(smem, at, bytes, count * SIZE);
    } else if (SIZE == 4 || alignment == 4) {
        copy_unit<4, BYTES>(smem, at, bytes, count * SIZE);
    } else {  // cp.async copies at least 4 bytes
        T values[UNIT];
#pragma unroll
        for (int i = 0; i < UNIT; ++i) values[i] = i < count ? from[i] : T{};
#pragma unroll
        for (int i = 0; i < UNIT; ++i) {
            const int b = i * SIZE;
            *reinterpret_cast<T*>(smem + (at ^ (b & 16)) + b % 16) = values[i];
        }
    }
}

// Loads ROWS rows of each of SPLITS row-major matrices, slice by slice.
template <class P, class T, int ROWS, int THREADS, int SPLITS, bool IS_WHOLE>
struct MatrixLoader {
    using Loads = UnitLoads<P, T, ROWS, THREADS>;
    const T* from;            // the thread's unit of its first row
    long long pitch, lower;   // row stride; offset of the lower tf32 matrix
    long long k_left;         // elements of k from that unit on
    int left, at, alignment;  // rows left from the thread's first on; offset in the stage; alignment

    // first  first element of `row_count` rows of K elements
    __device__ __forceinline__ MatrixLoader(const T* first, long long pitch, long long row_count, long long K,
                                            int alignment, long long lower = 0)
        : from(first + Loads::row() * pitch + Loads::unit() * Loads::UNIT), pitch(pitch), lower(lower),
          k_left(K - Loads::unit() * Loads::UNIT), at(Loads::first()), alignment(alignment) {
        left = static_cast<int>(row_count < ROWS ? row_count : ROWS) - Loads::row();
    }
    __device__ __forceinline__ void load_slice(char* smem) {
        const int valid = k_left < 0 ? 0 : k_left < Loads::UNIT ? static_cast<int>(k_left) : Loads::UNIT;
#pragma unroll
        for (int i = 0; i < Loads::ROWS_PER_THREAD; ++i) {
            if (!Loads::has(i)) break;
            const int count = i * Loads::ROW_STEP < left ? valid : 0;
#pragma unroll
            for (int split = 0; split < SPLITS; ++split)
                load_unit<Loads, IS_WHOLE>(smem + split * Loads::Buffer::BYTES,
                                           at + i * Loads::ROW_STEP * Loads::Buffer::ROW_BYTES,
                                           from + i * Loads::ROW_STEP * pitch + split * lower, count, alignment);
        }
        from += MmaSlice<P>::DEPTH, k_left -= MmaSlice<P>::DEPTH;
    }
};

// -- fragments --------------------------------------------------------------------------------------------------

// A lane's unconverted fragments of one k step: 16 MT rows of x, 8 NT columns of w in SPLITS tf32 splits.
template <class P, class X, int BM, int BN, int MT, int NT>
struct MmaStep {
    static constexpr int SPLITS = MmaSlice<P>::SPLITS;
    u32 x[MT][4], w[SPLITS][NT / 2][4];

    // row: the warp's first row; x_at, w_at: the lane's ldmatrix offsets in this step
    __device__ __forceinline__ void read(const char* stage, int row, int step, int x_at, int w_at) {
        using Buffer = SliceBuffer<P, X, BM>;
        using WBuffer = SliceBuffer<P, typename P::Element, BN>;
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < MT; ++i) {
            if constexpr (is_same<X, typename P::Element>) {
                ldmatrix_x4(x[i], stage + x_at + 16 * i * Buffer::ROW_BYTES);
            } else {
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    const int column = step * P::STEP + (lane % 4 + k / 2 * 4) * P::PER_WORD;
                    const int at =
                        Buffer::offset(row + 16 * i + lane / 4 + k % 2 * 8, column * static_cast<int>(sizeof(X)));
                    const X* const v = reinterpret_cast<const X*>(stage + at);
                    if constexpr (P::PER_WORD == 2) x[i][k] = pack<typename P::Element>(to_float(v[0]), to_float(v[1]));
                    else x[i][k] = __float_as_uint(to_float(v[0]));
                }
            }
        }
#pragma unroll
        for (int i = 0; i < SPLITS * NT / 2; ++i) {
            const int split = i / (NT / 2), j = i % (NT / 2);
            ldmatrix_x4(w[split][j],
                        stage + Buffer::BYTES + w_at + split * WBuffer::BYTES + 16 * j * WBuffer::ROW_BYTES);
        }
    }
    // 3xTF32 where SPLITS is 2: the two small terms first.
    __device__ __forceinline__ void multiply(float (&sums)[MT][NT][4]) const {
        using Precision = typename MmaTilePrecision<P>::type;
#pragma unroll
        for (int i = 0; i < MT; ++i) {
            u32 a[4], low[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                a[k] = x[i][k];
                if constexpr (P::PER_WORD == 1) a[k] = Tf32::word(__uint_as_float(a[k]));
                if constexpr (SPLITS == 2) low[k] = Tf32::word(__uint_as_float(x[i][k]) - __uint_as_float(a[k]));
            }
            if constexpr (SPLITS == 2) {
                add<Precision>(sums[i], low, w[0]);
                add<Precision>(sums[i], a, w[SPLITS - 1]);
            }
            add<Precision>(sums[i], a, w[0]);
        }
    }

private:
    template <class Precision>
    static __device__ __forceinline__ void add(float (&sums)[NT][4], const u32 (&a)[4], const u32 (&b)[NT / 2][4]) {
#pragma unroll
        for (int j = 0; j < NT; ++j) mma<Precision>(sums[j], a, b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
    }
};

// -- a tile -----------------------------------------------------------------------------------------------------

template <class P, class X, int BM, int BN>
constexpr int STAGE_BYTES =
    SliceBuffer<P, X, BM>::BYTES + MmaSlice<P>::SPLITS * SliceBuffer<P, typename P::Element, BN>::BYTES;

// Occupancy in blocks per SM, limited by accumulator registers.
template <class P, int BM, int BN, int WARPS>
constexpr int MMA_BLOCKS = BM * BN * MmaSlice<P>::SPLITS > 64 * 32 * WARPS ? 2
                           : BM * BN * MmaSlice<P>::SPLITS > 32 * 32 * WARPS ? 3 : 4;

// rows, weights  loaders of x and w; each load_slice() loads the next slice of k
// m, n           first row and column of the tile; bias  from that column on, or nullptr
template <class P, class X, int BM, int BN, int WM, int WN, int STAGES, class Rows, class Weights, class Out>
__device__ __forceinline__ void multiply_tile(uint4* shared, Rows& rows, Weights& weights, int slices,
                                              const float* bias, const Out& out, long long m, long long n,
                                              const Activation& activation) {
    using WBuffer = SliceBuffer<P, typename P::Element, BN>;
    using XBuffer = SliceBuffer<P, X, BM>;
    constexpr int THREADS = 32 * WM * WN, MT = BM / WM / 16, NT = BN / WN / 8;
    constexpr int SPLITS = MmaSlice<P>::SPLITS, STEPS = MmaSlice<P>::STEPS, STAGE = STAGE_BYTES<P, X, BM, BN>;
    static_assert(MT * WM * 16 == BM && NT * WN * 8 == BN && NT % 4 == 0 && STEPS % 2 == 0, "whole fragments");
    char* const smem = reinterpret_cast<char*>(shared);
    float* const smem_bias = reinterpret_cast<float*>(smem + STAGES * STAGE);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const int first_m = warp / WN * (BM / WM), first_n = warp % WN * (BN / WN);
    for (int i = threadIdx.x; i < BN; i += THREADS) smem_bias[i] = bias != nullptr && n + i < out.N ? bias[i] : 0.0f;

    int x_at[STEPS], w_at[STEPS];
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        x_at[step] = XBuffer::offset(first_m + lane % 16, 32 * step + lane / 16 * 16);
        w_at[step] = WBuffer::offset(first_n + lane / 16 * 8 + lane % 8, 32 * step + lane / 8 % 2 * 16);
    }
    const auto load_slice = [&](int slice) {
        if (slice < slices) {
            char* const stage = smem + slice % STAGES * STAGE;
            rows.load_slice(stage);
            weights.load_slice(stage + XBuffer::BYTES);
        }
        cp_async_commit();  // empty groups too: cp_async_wait counts groups
    };
    float sums[MT][NT][4] = {}, totals[SPLITS == 2 ? MT : 1][NT][4] = {};
    MmaStep<P, X, BM, BN, MT, NT> fragments[2];  // double-buffered fragments: the current k step and the next
#pragma unroll
    for (int slice = 0; slice < STAGES - 1; ++slice) load_slice(slice);
    cp_async_wait<STAGES - 2>();
    __syncthreads();
    fragments[0].read(smem, first_m, 0, x_at[0], w_at[0]);
    for (int slice = 0; slice < slices; ++slice) {
        load_slice(slice + STAGES - 1);  // into the stage of the previous slice
        const char* const stage = smem + slice % STAGES * STAGE;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            if (step + 1 < STEPS) {
                fragments[(step + 1) % 2].read(stage, first_m, step + 1, x_at[step + 1], w_at[step + 1]);
            } else {
                cp_async_wait<STAGES - 2>();
                __syncthreads();  // the next slice has landed, and all warps have read this one
                fragments[(step + 1) % 2].read(smem + (slice + 1) % STAGES * STAGE, first_m, 0, x_at[0], w_at[0]);
            }
            fragments[step % 2].multiply(sums);
        }
        if constexpr (SPLITS == 2) {
            if ((slice + 1) % (MMA_PART / MmaSlice<P>::DEPTH) == 0 || slice + 1 == slices) {
#pragma unroll
                for (int i = 0; i < 4 * MT * NT; ++i) {
                    totals[i / (4 * NT)][i / 4 % NT][i % 4] += sums[i / (4 * NT)][i / 4 % NT][i % 4];
                    sums[i / (4 * NT)][i / 4 % NT][i % 4] = 0.0f;
                }
            }
        }
    }
    cp_async_wait<0>();
#pragma unroll
    for (int i = 0; i < MT; ++i) {
        const long long row = m + first_m + 16 * i + g;
        if constexpr (SPLITS == 2)
            finish_rows<BN / WN>(totals[i], out, smem_bias + first_n, row, n + first_n, q, activation);
        else finish_rows<BN / WN>(sums[i], out, smem_bias + first_n, row, n + first_n, q, activation);
    }
}
