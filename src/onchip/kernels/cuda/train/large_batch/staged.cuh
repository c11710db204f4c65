// train/large_batch/staged.cuh: gemms of a training step for many rows, with a cp.async pipeline in shared memory.
//
// Idea    A block loads 32 K elements per stage; two stages are in flight while the tensor cores work on a third. All
//         warps share a stage, so a block loads WARPS_M + WARPS_N tiles, not two per warp. A warp computes 32 x 32 with
//         the lane layout of train/large_batch/launches.cuh.
// Order   As train/large_batch/launches.cuh. A warp sums both chunks of a stage, or one if two warps share a tile.
#pragma once

#include "train/large_batch/launches.cuh"

constexpr int STAGE_K = 32, STAGES = 3, TILE = 32;

// Copies 16 B to shared memory with cp.async, or zeros if not is_valid.
__device__ __forceinline__ void copy_async(float* to, const float* from, bool is_valid) {
    const u32 at = static_cast<u32>(__cvta_generic_to_shared(to)), bytes = is_valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(at), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void commit_stage() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `LEFT` committed stages are in flight.
template <int LEFT>
__device__ __forceinline__ void wait_for_stages() {
    asm volatile("cp.async.wait_group %0;" :: "n"(LEFT) : "memory");
}

// Operand of up to ROWS rows, K contiguous. k_end is a multiple of 4.
template <int ROWS>
struct StagedKMajor {
    // +4: the eight lanes of a phase read two rows 16 banks apart
    static constexpr int PITCH = STAGE_K + 4, FLOATS = ROWS * PITCH, VECTORS = ROWS / 32;
    const float* at[VECTORS];  // nullptr past the last row
    int k_end;

    __device__ __forceinline__ StagedKMajor(const float* from, int stride, int first, int rows, int k_end,
                                            const long long* order = nullptr)
        : k_end(k_end) {
        u32 indices[VECTORS];
        find_rows(indices, order, first + threadIdx.x / 8, 32, rows);
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) at[i] = indices[i] == NO_ROW ? nullptr : row_at(from, indices[i], stride);
    }
    __device__ __forceinline__ void fetch(float* stage, int index) const {
        const int within = threadIdx.x % 8 * 4, k = index * STAGE_K + within;
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
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

// Operand of COLUMNS columns of a matrix whose rows are K. `columns` is a multiple of 4. Fetches stages in order, since
// it loads the row indices of the next stage ahead.
template <int COLUMNS>
struct StagedMnMajor {
    static constexpr int FLOATS = STAGE_K * COLUMNS, VECTORS = COLUMNS / 32, ROW_VECTORS = COLUMNS / 4;  // 16 B vectors
    const float* from;
    const long long* order;  // row index of K element k; nullptr: k
    u32 rows[VECTORS];       // row indices of the next stage, or NO_ROW
    int stride, k_end;
    bool is_valid;

    __device__ __forceinline__ StagedMnMajor(const float* matrix, int stride, int first, int columns, int k_end,
                                             int first_stage, const long long* order = nullptr)
        : order(order), stride(stride), k_end(k_end) {
        const int column = first + threadIdx.x % ROW_VECTORS * 4;
        is_valid = column < columns;
        from = matrix + (is_valid ? column : 0);
        find_next(first_stage);
    }
    __device__ __forceinline__ void find_next(int index) {
        find_rows(rows, order, index * STAGE_K + threadIdx.x / ROW_VECTORS, THREADS / ROW_VECTORS, k_end);
    }
    // Columns are XOR-swizzled by k, so that eight lanes that read K elements four apart avoid bank conflicts.
    static __device__ __forceinline__ int offset(int k, int column) { return k * COLUMNS + (column ^ k / 4 % 4 * 8); }

    __device__ __forceinline__ void fetch(float* stage, int index) {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const int k = threadIdx.x / ROW_VECTORS + THREADS / ROW_VECTORS * i;
            const bool has_row = is_valid && rows[i] != NO_ROW;
            copy_async(stage + offset(k, threadIdx.x % ROW_VECTORS * 4), row_at(from, rows[i], stride), has_row);
        }
        find_next(index + 1);
    }
    static __device__ __forceinline__ void load(float (&v)[4][4], const float* stage, int first, int chunk) {
        const int k = chunk * CHUNK + threadIdx.x % 4 * 4, column = first + threadIdx.x % 32 / 4 * 4;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float4 four = load4(stage + offset(k + i, column));
            v[0][i] = four.x, v[1][i] = four.y, v[2][i] = four.z, v[3][i] = four.w;
        }
    }
};

// A block's shared memory: the stages, later reused for the warps' tiles.
template <class A, class B>
struct Stages {
    float* smem;

    __device__ __forceinline__ float* a_stage(int i) const { return smem + i % STAGES * (A::FLOATS + B::FLOATS); }
    __device__ __forceinline__ float* b_stage(int i) const { return a_stage(i) + A::FLOATS; }

    // Prologue loads, uncommitted.
    __device__ __forceinline__ void begin_a(A& a, int first, int last) const {
#pragma unroll
        for (int i = 0; i < STAGES - 1; ++i)
            if (first + i < last) a.fetch(a_stage(i), first + i);
    }
    __device__ __forceinline__ void begin_b(B& b, int first, int last) const {
#pragma unroll
        for (int i = 0; i < STAGES - 1; ++i)
            if (first + i < last) b.fetch(b_stage(i), first + i);
    }
};

// Computes the tiles of a block's warps from stages [first, last), whose prologue loads are issued. Idle warps only
// take part in barriers.
template <class P, int WARPS_M, int WARPS_N, class A, class B>
__device__ __forceinline__ Tiles<4>& multiply_stages(const Stages<A, B>& stages, A& a, B& b, int first, int last,
                                                     const WarpTile<4>& warp_tile, bool is_busy) {
    constexpr int SPLIT_K = WARPS / (WARPS_M * WARPS_N), CHUNKS = STAGE_K / CHUNK;
    static_assert(SPLIT_K <= CHUNKS, "a stage has a chunk for every warp of a tile");
    static_assert(sizeof(Tiles<4>) <= STAGES * sizeof(float) * (A::FLOATS + B::FLOATS), "tiles reuse the stages");
    float totals[2][4][4] = {}, sums[2][4][4] = {};
    int done = 0;
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) commit_stage();  // the first one includes all loads
#pragma unroll 1
    for (int stage = first; stage < last; ++stage) {
        wait_for_stages<STAGES - 2>();
        __syncthreads();  // this stage is complete, the previous one is free
        const int i = stage - first, next = stage + STAGES - 1;
        if (next < last) {
            a.fetch(stages.a_stage(i + STAGES - 1), next);
            b.fetch(stages.b_stage(i + STAGES - 1), next);
        }
        commit_stage();
        if (!is_busy) continue;
#pragma unroll 1
        for (int chunk = 0; chunk < CHUNKS / SPLIT_K; ++chunk) {
            float a_fragment[4][4], b_fragment[4][4];
            A::load(a_fragment, stages.a_stage(i), warp_tile.row, SPLIT_K * chunk + warp_tile.k_split);
            B::load(b_fragment, stages.b_stage(i), warp_tile.column, SPLIT_K * chunk + warp_tile.k_split);
            multiply<P, 4>(sums, Fragment<P, 4>(a_fragment), Fragment<P, 4>(b_fragment));
            if (++done % CHUNKS_PER_SUM<P> == 0) flush_sums<4>(totals, sums);
        }
    }
    flush_sums<4>(totals, sums);
    __syncthreads();
    Tiles<4>& tiles = *reinterpret_cast<Tiles<4>*>(stages.smem);
    store_tile<4>(tiles.at[threadIdx.x / 32], totals);
    return tiles;
}
