// mlp_train_bytes.cuh: products of a training step whose one operand is bytes.
//
// Idea    A byte is a number of bf16, exactly; a float is the sum of PARTS numbers of bf16: three hold all of its bits.
//         So a product with bytes is PARTS products of bf16, at the tensor cores' full rate, and bytes are a quarter of
//         what floats would be to bring. Both operands come raw, 32 K_BLOCKS k's at a time, a stage; three stages are on
//         their way while one is made bf16 and another is multiplied. Each number is made bf16 once a block.
// Stage   Made bf16: blocks of 32 k's; of a block, rows of 64 bytes: lane (g, q) takes 16 of them, piece q of row g: its
//         k's of two instructions. The order of k is ours, so both operands number the k's alike and that is all.
// Order   A sum goes over stages; of a stage the lowest parts first, then those above. fp32: each stage's sum is added
//         in float; else eight stages' are. Where warps share a tile, its k-blocks are theirs, and their sums are added
//         first to last.
#pragma once

#include "mlp_train_finish.cuh"

constexpr int BLOCK_K = 32, RAW_STAGES = 4, TILE = 32;

// 16 bytes on their way to shared memory; zeros where there are none: then `from` is not read. The line that they are of
// comes to L2: the next stages want the rest of it.
__device__ __forceinline__ void copy_async(void* to, const void* from, bool is_there) {
    const u32 at = static_cast<u32>(__cvta_generic_to_shared(to)), bytes = is_there ? 16 : 0;
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" :: "r"(at), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void close_stage() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until all stages but the last `LEFT` that were closed are there.
template <int LEFT>
__device__ __forceinline__ void await_stages() {
    asm volatile("cp.async.wait_group %0;" :: "n"(LEFT) : "memory");
}

// -- numbers of bf16 -------------------------------------------------------------------------------------------------

// The piece of 8 k's: of a stage's block with ROWS rows. Rows four apart lie in other halves of a line, so that lanes
// that write rows of bytes that lie across, four columns each, meet all banks.
template <int ROWS>
__device__ __forceinline__ int piece_at(int row, int group) {
    return group / 4 * ROWS * 4 + row / 2 * 8 + ((row ^ row >> 2) & 1) * 4 + group % 4;
}

// Byte I of a word, as a float: it becomes the last bits of 2^23.
template <int I>
__device__ __forceinline__ float byte_of(u32 word) {
    return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7540u + I)) - 8388608.0f;
}
// The upper halves of two floats: of bytes, all that is not zero.
__device__ __forceinline__ u32 upper_halves(float first, float second) {
    return __byte_perm(__float_as_uint(first), __float_as_uint(second), 0x7632u);
}
__device__ __forceinline__ uint2 widen(u32 word) {
    return {upper_halves(byte_of<0>(word), byte_of<1>(word)), upper_halves(byte_of<2>(word), byte_of<3>(word))};
}

// 8 floats as PARTS pieces of bf16: all but the last are cut, so what is left is exact; the last is rounded.
template <int PARTS>
__device__ __forceinline__ void split_eight(uint4 (&parts)[PARTS], float (&v)[8]) {
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        u32 words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            words[i] = part == PARTS - 1 ? pack<bf16>(v[2 * i], v[2 * i + 1]) : upper_halves(v[2 * i], v[2 * i + 1]);
        parts[part] = {words[0], words[1], words[2], words[3]};
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] -= __uint_as_float(__float_as_uint(v[i]) & 0xffff0000u);
    }
}

// -- operands: fetch brings a raw stage, make turns it into pieces of bf16 -----------------------------------------

// ROWS rows of bytes, or fewer, along k; rows are multiples of 16 bytes, k_end of them.
template <int ROWS, int K_BLOCKS>
struct BytesAlongK {
    static constexpr int PARTS = 1, RAW_BYTES = ROWS * BLOCK_K * K_BLOCKS, PIECES = ROWS * 4 * K_BLOCKS;
    static_assert(RAW_BYTES == 16 * THREADS, "a thread brings 16 bytes of a stage");
    const unsigned char* at;  // nullptr: no such row
    int k_end;

    __device__ __forceinline__ BytesAlongK(const unsigned char* x, int stride, int first, int rows, int k_end,
                                           const long long* order)
        : k_end(k_end) {
        u32 found[1];
        find_rows(found, order, first + static_cast<int>(threadIdx.x) / (2 * K_BLOCKS), 1, rows);
        at = found[0] == NO_ROW ? nullptr : x + static_cast<long long>(found[0]) * stride;
    }
    __device__ __forceinline__ void fetch(unsigned char* raw, int number) const {
        const int k = (number * 2 * K_BLOCKS + threadIdx.x % (2 * K_BLOCKS)) * 16;
        copy_async(raw + threadIdx.x * 16, at + k, at && k < k_end);
    }
    static __device__ __forceinline__ void make(uint4* made, const unsigned char* raw) {
#pragma unroll
        for (int i = 0; i < PIECES / THREADS; ++i) {
            const int piece = threadIdx.x + i * THREADS;
            const uint2 eight = *reinterpret_cast<const uint2*>(raw + 8 * piece);
            const uint2 a = widen(eight.x), b = widen(eight.y);
            made[piece_at<ROWS>(piece / (4 * K_BLOCKS), piece % (4 * K_BLOCKS))] = {a.x, a.y, b.x, b.y};
        }
    }
};

// ROWS rows of floats, or fewer, along k; k_end is a multiple of 4.
template <int PARTS_, int ROWS, int K_BLOCKS>
struct FloatsAlongK {
    // +16: of eight lanes that read together, those of the next row are 4 banks on
    static constexpr int PARTS = PARTS_, PITCH = 4 * BLOCK_K * K_BLOCKS + 16, RAW_BYTES = ROWS * PITCH;
    static constexpr int PIECES = ROWS * 4 * K_BLOCKS, A_ROW = 8 * K_BLOCKS;  // of 16 bytes, raw
    const float* from;
    int stride, first, rows, k_end;

    __device__ __forceinline__ void fetch(unsigned char* raw, int number) const {
        const int within = threadIdx.x % A_ROW, k = (number * A_ROW + within) * 4;
#pragma unroll
        for (int i = 0; i < ROWS * A_ROW / THREADS; ++i) {
            const int row = threadIdx.x / A_ROW + THREADS / A_ROW * i;
            const bool is_there = first + row < rows && k < k_end;
            copy_async(raw + row * PITCH + 16 * within, row_at(from, is_there ? first + row : 0, stride) + k, is_there);
        }
    }
    static __device__ __forceinline__ void make(uint4* made, const unsigned char* raw) {
#pragma unroll
        for (int i = 0; i < PIECES / THREADS; ++i) {
            const int piece = threadIdx.x + i * THREADS, row = piece / (4 * K_BLOCKS), group = piece % (4 * K_BLOCKS);
            const float* eight = reinterpret_cast<const float*>(raw + row * PITCH + 32 * group);
            const float4 a = load4(eight), b = load4(eight + 4);
            float v[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
            uint4 parts[PARTS];
            split_eight(parts, v);
#pragma unroll
            for (int part = 0; part < PARTS; ++part) made[part * PIECES + piece_at<ROWS>(row, group)] = parts[part];
        }
    }
};

// Matrices whose rows are the k's. Of the 32 k's of a stage, group j has j, j + 4, ...: rows that lanes read together
// begin 8 banks apart. Half of a block's warps make the one operand, half the other.

// COLUMNS columns of bytes; `columns` of them are there, a multiple of 16. Stages are fetched one after the other: which
// rows the next one has is known before they are asked for.
template <int COLUMNS>
struct BytesAcrossK {
    static constexpr int PARTS = 1, PITCH = COLUMNS + 32, RAW_BYTES = BLOCK_K * PITCH;
    static constexpr int PIECES = COLUMNS * 4, A_ROW = COLUMNS / 16;
    static_assert(BLOCK_K * A_ROW == THREADS && PIECES == 2 * THREADS, "a thread brings 16 bytes of a stage");
    const unsigned char* from;
    const long long* order;
    u32 rows[1];  // of the next stage, or NO_ROW
    int stride, k_end;
    bool is_there;

    __device__ __forceinline__ BytesAcrossK(const unsigned char* x, int stride, int first, int columns, int k_end,
                                            int first_stage, const long long* order)
        : order(order), stride(stride), k_end(k_end) {
        const int column = first + threadIdx.x % A_ROW * 16;
        is_there = column < columns;
        from = x + (is_there ? column : 0);
        find_next(first_stage);
    }
    __device__ __forceinline__ void find_next(int number) {
        find_rows(rows, order, number * BLOCK_K + static_cast<int>(threadIdx.x) / A_ROW, 1, k_end);
    }
    __device__ __forceinline__ void fetch(unsigned char* raw, int number) {
        const bool has_row = is_there && rows[0] != NO_ROW;
        copy_async(raw + threadIdx.x / A_ROW * PITCH + threadIdx.x % A_ROW * 16,
                   from + static_cast<long long>(has_row ? rows[0] : 0) * stride, has_row);
        find_next(number + 1);
    }
    // Four columns and 8 k's a thread.
    static __device__ __forceinline__ void make(uint4* made, const unsigned char* raw) {
        if (threadIdx.x >= THREADS / 2) return;
        const int group = threadIdx.x % 4, column = threadIdx.x / 4 * 4;
        u32 words[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) words[i] = *reinterpret_cast<const u32*>(raw + (group + 4 * i) * PITCH + column);
        made[piece_at<COLUMNS>(column, group)] = column_of<0>(words);
        made[piece_at<COLUMNS>(column + 1, group)] = column_of<1>(words);
        made[piece_at<COLUMNS>(column + 2, group)] = column_of<2>(words);
        made[piece_at<COLUMNS>(column + 3, group)] = column_of<3>(words);
    }

private:
    template <int I>
    static __device__ __forceinline__ uint4 column_of(const u32 (&words)[8]) {
        u32 pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) pairs[i] = upper_halves(byte_of<I>(words[2 * i]), byte_of<I>(words[2 * i + 1]));
        return {pairs[0], pairs[1], pairs[2], pairs[3]};
    }
};

// COLUMNS columns of floats; `columns` is a multiple of 4.
template <int PARTS_, int COLUMNS>
struct FloatsAcrossK {
    static constexpr int PARTS = PARTS_, PITCH = 4 * COLUMNS + 32, RAW_BYTES = BLOCK_K * PITCH, PIECES = COLUMNS * 4;
    static constexpr int A_ROW = COLUMNS / 4;  // pieces of 16 bytes, raw
    const float* from;
    int stride, first, columns, k_end;

    __device__ __forceinline__ void fetch(unsigned char* raw, int number) const {
        const int within = threadIdx.x % A_ROW, column = first + 4 * within;
#pragma unroll
        for (int i = 0; i < BLOCK_K * A_ROW / THREADS; ++i) {
            const int row = threadIdx.x / A_ROW + THREADS / A_ROW * i, k = number * BLOCK_K + row;
            const bool is_there = column < columns && k < k_end;
            const float* four = row_at(from, is_there ? k : 0, stride) + (is_there ? column : 0);
            copy_async(raw + row * PITCH + 16 * within, four, is_there);
        }
    }
    static __device__ __forceinline__ void make(uint4* made, const unsigned char* raw) {
        if (threadIdx.x < THREADS / 2) return;
#pragma unroll
        for (int i = 0; i < 2 * PIECES / THREADS; ++i) {
            const int piece = threadIdx.x - THREADS / 2 + i * THREADS / 2, group = piece % 4, column = piece / 4;
            float v[8];
#pragma unroll
            for (int j = 0; j < 8; ++j)
                v[j] = *reinterpret_cast<const float*>(raw + (group + 4 * j) * PITCH + 4 * column);
            uint4 parts[PARTS];
            split_eight(parts, v);
#pragma unroll
            for (int part = 0; part < PARTS; ++part) made[part * PIECES + piece_at<COLUMNS>(column, group)] = parts[part];
        }
    }
};

// -- products --------------------------------------------------------------------------------------------------------

// 32 rows of one part of an operand and 32 k's: words[j] are row 8 j + g's.
struct Fragment {
    uint4 words[4];

    template <int ROWS>
    __device__ __forceinline__ void load(const uint4* made, int first, int block) {
        const int row = first + threadIdx.x % 32 / 4, group = block * 4 + threadIdx.x % 4;
#pragma unroll
        for (int j = 0; j < 4; ++j) words[j] = made[piece_at<ROWS>(row + 8 * j, group)];
    }
};

// sums[t][j] += a * b: 16 rows t of a, 8 rows j of b.
__device__ __forceinline__ void multiply(float (&sums)[2][4][4], const Fragment& a, const Fragment& b) {
#pragma unroll
    for (int step = 0; step < 2; ++step)
#pragma unroll
        for (int t = 0; t < 2; ++t) {
            const uint4 upper = a.words[2 * t], lower = a.words[2 * t + 1];
            const u32 x[4] = {step ? upper.z : upper.x, step ? lower.z : lower.x, step ? upper.w : upper.y,
                              step ? lower.w : lower.y};
#pragma unroll
            for (int j = 0; j < 4; ++j)
                mma<Bf16>(sums[t][j], x, step ? b.words[j].z : b.words[j].x, step ? b.words[j].w : b.words[j].y);
        }
}

// A block's room: raw stages, then two of bf16; when those are done the tiles of its warps. A and B are operands of 32
// DOWN and 32 ACROSS rows.
template <class A, class B>
struct ByteStages {
    static constexpr int RAW_BYTES = A::RAW_BYTES + B::RAW_BYTES;
    unsigned char* room;

    __device__ __forceinline__ unsigned char* raw_a(int i) const { return room + i % RAW_STAGES * RAW_BYTES; }
    __device__ __forceinline__ unsigned char* raw_b(int i) const { return raw_a(i) + A::RAW_BYTES; }

    // Stages that go ahead of the loop, not closed yet.
    template <class Operand>
    __device__ __forceinline__ void begin(Operand& operand, int offset, int first, int last) const {
#pragma unroll
        for (int i = 0; i < RAW_STAGES; ++i)
            if (first + i < last) operand.fetch(raw_a(i) + offset, first + i);
    }
    __device__ __forceinline__ void begin_a(A& a, int first, int last) const { begin(a, 0, first, last); }
    __device__ __forceinline__ void begin_b(B& b, int first, int last) const { begin(b, A::RAW_BYTES, first, last); }
};

// The tiles of a block's warps times `scale`, from stages [first, last) that are begun. A warp whose tile nobody wants
// only brings and makes.
template <int DOWN, int ACROSS, class A, class B>
__device__ __forceinline__ Tiles<4>& sum_up_bytes(const ByteStages<A, B>& stages, A& a, B& b, int first, int last,
                                                  const WarpPlace<4>& place, bool is_busy, float scale) {
    constexpr int PIECES_A = A::PIECES * A::PARTS, PIECES_B = B::PIECES * B::PARTS, PARTS = A::PARTS * B::PARTS;
    constexpr int SUMMED = PARTS == 3 ? 1 : 8;  // stages that the tensor core sums up by itself
    constexpr int ALL_RAW = RAW_STAGES * (A::RAW_BYTES + B::RAW_BYTES);
    static_assert(A::PARTS == 1 || B::PARTS == 1, "one operand is bytes");
    static_assert(sizeof(Tiles<4>) <= ALL_RAW, "tiles fit where raw stages were");
    uint4* pieces = reinterpret_cast<uint4*>(stages.room + ALL_RAW);
    const auto made_a = [&](int i) { return pieces + i % 2 * (PIECES_A + PIECES_B); };
    const auto make = [&](int i) {
        A::make(made_a(i), stages.raw_a(i));
        B::make(made_a(i) + PIECES_A, stages.raw_b(i));
    };
    float totals[2][4][4] = {}, sums[2][4][4] = {};
#pragma unroll
    for (int i = 0; i < RAW_STAGES; ++i) close_stage();  // the first has all of them
    await_stages<RAW_STAGES - 1>();
    __syncthreads();
    make(0);
#pragma unroll 1
    for (int i = 0; i < last - first; ++i) {
        await_stages<RAW_STAGES - 2>();
        __syncthreads();  // stage i is made, the next is there, and nobody still reads the raw one or the one before
        if (first + i + RAW_STAGES < last) {
            a.fetch(stages.raw_a(i), first + i + RAW_STAGES);
            b.fetch(stages.raw_b(i), first + i + RAW_STAGES);
        }
        close_stage();
        if (first + i + 1 < last) make(i + 1);
        if (!is_busy) continue;
        const uint4 *of_a = made_a(i), *of_b = of_a + PIECES_A;
        Fragment whole, part;
        if constexpr (A::PARTS > 1) whole.template load<TILE * ACROSS>(of_b, place.column, place.part);
        else whole.template load<TILE * DOWN>(of_a, place.row, place.part);
#pragma unroll
        for (int number = PARTS - 1; number >= 0; --number) {
            if constexpr (A::PARTS > 1) {
                part.template load<TILE * DOWN>(of_a + number * A::PIECES, place.row, place.part);
                multiply(sums, part, whole);
            } else {
                part.template load<TILE * ACROSS>(of_b + number * B::PIECES, place.column, place.part);
                multiply(sums, whole, part);
            }
        }
        if (i % SUMMED == SUMMED - 1) move_sums<4>(totals, sums);
    }
    move_sums<4>(totals, sums);
    __syncthreads();
    Tiles<4>& tiles = *reinterpret_cast<Tiles<4>*>(stages.room);
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll
    for (int t = 0; t < 2; ++t)
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float pair[2] = {totals[t][j][2 * half] * scale, totals[t][j][2 * half + 1] * scale};
                store_several(&tiles.at[threadIdx.x / 32][16 * t + 8 * half + g][8 * j + 2 * q], pair);
            }
    return tiles;
}
