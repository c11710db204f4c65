// train/large_batch/staged.cuh: gemms of a training step for many rows, with a cp.async pipeline in shared memory.
//
// Idea    A block loads 32 K elements per stage; two stages are in flight while the tensor cores work on a third. All
//         warps share a stage, so a block loads DOWN + ACROSS tiles, not two per warp. A warp computes 32 x 32; a lane
//         holds the same K elements as in train/large_batch/launches.cuh.
// Order   As train/large_batch/launches.cuh. A warp takes both chunks of a stage, or one if two warps share a tile.
#pragma once

#include "train/large_batch/launches.cuh"

constexpr int STAGE_K = 32, STAGES = 3, TILE = 32;

// Copies 16 B to shared memory asynchronously; zero-fills without reading `from` if not is_there.
__device__ __forceinline__ void copy_async(float* to, const float* from, bool is_there) {
    const u32 at = static_cast<u32>(__cvta_generic_to_shared(to)), bytes = is_there ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(at), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void close_stage() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `LEFT` committed stages are in flight.
template <int LEFT>
__device__ __forceinline__ void await_stages() {
    asm volatile("cp.async.wait_group %0;" :: "n"(LEFT) : "memory");
}

// Operand of up to ROWS rows, K contiguous. k_end is a multiple of 4.
template <int ROWS>
struct StagedAlongK {
    // +4: the eight lanes of a phase read two rows 16 banks apart
    static constexpr int PITCH = STAGE_K + 4, FLOATS = ROWS * PITCH, PIECES = ROWS / 32;
    const float* at[PIECES];  // nullptr past the last row
    int k_end;

    __device__ __forceinline__ StagedAlongK(const float* from, int stride, int first, int rows, int k_end,
                                            const long long* order = nullptr)
        : k_end(k_end) {
        u32 found[PIECES];
        find_rows(found, order, first + threadIdx.x / 8, 32, rows);
#pragma unroll
        for (int i = 0; i < PIECES; ++i) at[i] = found[i] == NO_ROW ? nullptr : row_at(from, found[i], stride);
    }
    __device__ __forceinline__ void fetch(float* stage, int number) const {
        const int within = threadIdx.x % 8 * 4, k = number * STAGE_K + within;
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            copy_async(stage + (threadIdx.x / 8 + 32 * i) * PITCH + within, at[i] + k, at[i] && k < k_end);
        }
    }
    // Loads a lane's fragment of the tile that starts at row `first`.
    static __device__ __forceinline__ void load(float (&v)[4][4], const float* stage, int first, int chunk) {
        const float* lane = stage + (first + threadIdx.x % 32 / 4 * 4) * PITCH + chunk * CHUNK + threadIdx.x % 4 * 4;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float4 four = load4(lane + j * PITCH);
            v[j][0] = four.x, v[j][1] = four.y, v[j][2] = four.z, v[j][3] = four.w;
        }
    }
};

// Operand of COLUMNS columns of a matrix whose rows are K. `columns` is a multiple of 4. Fetch stages in order: the row
// indices of the next stage are loaded ahead.
template <int COLUMNS>
struct StagedAcrossK {
    static constexpr int FLOATS = STAGE_K * COLUMNS, PIECES = COLUMNS / 32, A_ROW = COLUMNS / 4;  // 16 B chunks
    const float* from;
    const long long* order;  // row index of K element k; nullptr: k
    u32 rows[PIECES];        // row indices of the next stage, or NO_ROW
    int stride, k_end;
    bool is_there;

    __device__ __forceinline__ StagedAcrossK(const float* matrix, int stride, int first, int columns, int k_end,
                                             int first_stage, const long long* order = nullptr)
        : order(order), stride(stride), k_end(k_end) {
        const int column = first + threadIdx.x % A_ROW * 4;
        is_there = column < columns;
        from = matrix + (is_there ? column : 0);
        find_next(first_stage);
    }
    __device__ __forceinline__ void find_next(int number) {
        find_rows(rows, order, number * STAGE_K + threadIdx.x / A_ROW, THREADS / A_ROW, k_end);
    }
    // XOR swizzle of column groups by k: eight lanes that read K elements four apart are free of bank conflicts.
    static __device__ __forceinline__ int place(int k, int column) { return k * COLUMNS + (column ^ k / 4 % 4 * 8); }

    __device__ __forceinline__ void fetch(float* stage, int number) {
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            const int k = threadIdx.x / A_ROW + THREADS / A_ROW * i;
            const bool has_row = is_there && rows[i] != NO_ROW;
            copy_async(stage + place(k, threadIdx.x % A_ROW * 4), row_at(from, rows[i], stride), has_row);
        }
        find_next(number + 1);
    }
    static __device__ __forceinline__ void load(float (&v)[4][4], const float* stage, int first, int chunk) {
        const int k = chunk * CHUNK + threadIdx.x % 4 * 4, column = first + threadIdx.x % 32 / 4 * 4;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float4 four = load4(stage + place(k + i, column));
            v[0][i] = four.x, v[1][i] = four.y, v[2][i] = four.z, v[3][i] = four.w;
        }
    }
};

// A block's shared memory: the stages, later reused for the warps' tiles.
template <class A, class B>
struct Stages {
    float* room;

    __device__ __forceinline__ float* of_a(int i) const { return room + i % STAGES * (A::FLOATS + B::FLOATS); }
    __device__ __forceinline__ float* of_b(int i) const { return of_a(i) + A::FLOATS; }

    // Prologue loads, not committed yet.
    __device__ __forceinline__ void begin_a(A& a, int first, int last) const {
#pragma unroll
        for (int i = 0; i < STAGES - 1; ++i)
            if (first + i < last) a.fetch(of_a(i), first + i);
    }
    __device__ __forceinline__ void begin_b(B& b, int first, int last) const {
#pragma unroll
        for (int i = 0; i < STAGES - 1; ++i)
            if (first + i < last) b.fetch(of_b(i), first + i);
    }
};

// Computes the tiles of a block's warps from stages [first, last), which are started. Idle warps only
// keep the barriers.
template <class P, int DOWN, int ACROSS, class A, class B>
__device__ __forceinline__ Tiles<4>& sum_up_stages(const Stages<A, B>& stages, A& a, B& b, int first, int last,
                                                   const WarpPlace<4>& place, bool is_busy) {
    constexpr int DEEP = WARPS / (DOWN * ACROSS), CHUNKS = STAGE_K / CHUNK;
    static_assert(DEEP <= CHUNKS, "each warp has a part of a stage");
    static_assert(sizeof(Tiles<4>) <= STAGES * sizeof(float) * (A::FLOATS + B::FLOATS), "tiles fit where stages were");
    float totals[2][4][4] = {}, sums[2][4][4] = {};
    int done = 0;
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) close_stage();  // the first group has all loads
#pragma unroll 1
    for (int stage = first; stage < last; ++stage) {
        await_stages<STAGES - 2>();
        __syncthreads();  // this stage is complete, and the previous one is no longer read
        const int i = stage - first, next = stage + STAGES - 1;
        if (next < last) {
            a.fetch(stages.of_a(i + STAGES - 1), next);
            b.fetch(stages.of_b(i + STAGES - 1), next);
        }
        close_stage();
        if (!is_busy) continue;
#pragma unroll 1
        for (int chunk = 0; chunk < CHUNKS / DEEP; ++chunk) {
            float of_a[4][4], of_b[4][4];
            A::load(of_a, stages.of_a(i), place.row, DEEP * chunk + place.part);
            B::load(of_b, stages.of_b(i), place.column, DEEP * chunk + place.part);
            multiply<P, 4>(sums, Words<P, 4>(of_a), Words<P, 4>(of_b));
            if (++done % PART<P> == 0) move_sums<4>(totals, sums);
        }
    }
    move_sums<4>(totals, sums);
    __syncthreads();
    Tiles<4>& tiles = *reinterpret_cast<Tiles<4>*>(stages.room);
    store_tile<4>(tiles.at[threadIdx.x / 32], totals);
    return tiles;
}
