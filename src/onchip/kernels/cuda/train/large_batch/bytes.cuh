// train/large_batch/bytes.cuh: gemms of a training step with one uint8 operand.
//
// Idea    uint8 is exact in bf16 and a quarter of the bytes of fp32. A float is a sum of SPLITS bf16 terms (three hold
//         all bits), so the gemm is SPLITS bf16 gemms. Lanes convert uint8 to A fragments in registers; the other
//         operand is copied from global memory, where it is a bf16 split in tensor core order (bytes_split).
// Layout  16 B vectors of 8 K elements; 64 of them, one per column, and two such groups per K step of 16: free of bank
//         conflicts for mma.sync, and addressable by a wgmma descriptor. Both operands use the same permutation of K.
// Order   Per stage, lowest split terms first. fp32 adds the stages with FADD; otherwise tensor cores accumulate all.
#pragma once

#include "train/large_batch/bf16_split.cuh"

constexpr int COLUMNS = 64, STEP_BYTES = 2 * 16 * COLUMNS;  // per block; of a K step of 16

// Copies 16 B to shared memory with cp.async, or zeros if not is_valid, and prefetches the cache line to L2.
__device__ __forceinline__ void copy_async(void* to, const void* from, bool is_valid = true) {
    const u32 at = static_cast<u32>(__cvta_generic_to_shared(to)), bytes = is_valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" :: "r"(at), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void commit_stage() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `LEFT` committed stages are in flight, and makes them visible to wgmma.
template <int LEFT>
__device__ __forceinline__ void wait_for_stages() {
    asm volatile("cp.async.wait_group %0;" :: "n"(LEFT) : "memory");
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Byte I of a word as a float: placed in the low mantissa bits of 2^23.
template <int I>
__device__ __forceinline__ float byte_of(u32 word) {
    return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7540u + I)) - 8388608.0f;
}

// -- gemm ------------------------------------------------------------------------------------------------------------

// 16 rows per warp, A in registers, times 64 columns: begin(), any number of add(), end(). After wait() the sums are
// valid and the operands may be overwritten. With sums = false, c is overwritten.
struct TileGemm {
    static __device__ __forceinline__ void begin() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
        wgmma_fence();
#endif
    }
    static __device__ __forceinline__ void add(float (&c)[8][4], const u32 (&a)[4], const unsigned char* b, bool sums) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
        Wgmma<Bf16, COLUMNS>::add(
            c, a, weights_descriptor<COLUMNS>(static_cast<u32>(__cvta_generic_to_shared(b)), 0), sums);
#else
        const u32* fragments = reinterpret_cast<const u32*>(b) + threadIdx.x % 32;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            if (!sums) c[j][0] = c[j][1] = c[j][2] = c[j][3] = 0.0f;
            mma<Bf16>(c[j], a, fragments[32 * j], fragments[32 * j + STEP_BYTES / 8]);
        }
#endif
    }
    static __device__ __forceinline__ void end() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
        wgmma_commit();
#endif
    }
    static __device__ __forceinline__ void wait() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
        wgmma_wait<0>();
#endif
    }
};

// Issues a[step] times the stage's tiles over STEPS K steps and all split terms, lowest term first; call wait() after.
template <int SPLITS, int STEPS, int TILES>
__device__ __forceinline__ void add_stage(float (&c)[TILES][8][4], const u32 (&a)[STEPS][TILES][4],
                                          const unsigned char* stage, bool sums) {
    TileGemm::begin();
#pragma unroll
    for (int term = SPLITS - 1; term >= 0; --term)
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
#pragma unroll
            for (int t = 0; t < TILES; ++t)
                TileGemm::add(c[t], a[step][t], stage + (term * STEPS + step) * STEP_BYTES,
                              sums || term < SPLITS - 1 || step > 0);
    TileGemm::end();
}

// Stops the compiler from sinking the conversion below the wgmmas that it should overlap with.
template <int STEPS, int TILES>
__device__ __forceinline__ void keep_in_registers(u32 (&a)[STEPS][TILES][4]) {
#ifdef __CUDA_ARCH__
#pragma unroll
    for (int i = 0; i < 4 * STEPS * TILES; ++i) asm volatile("" : "+r"(a[i / 4 / TILES][i / 4 % TILES][i % 4]));
#endif
}

template <int TILES>
__device__ __forceinline__ void add_to_totals(float (&totals)[TILES][8][4], const float (&c)[TILES][8][4]) {
#pragma unroll
    for (int i = 0; i < 32 * TILES; ++i) totals[i / 32][i / 4 % 8][i % 4] += c[i / 32][i / 4 % 8][i % 4];
}

// Stores ROWS rows of dz, N values each, from row `first` of the batch on, as a bf16 split with rows as K; other rows
// and columns are 0. A batch has `stages` stages of 64 rows. `thread`: index of this thread of STORING_THREADS.
template <int SPLITS, int N, int ROWS, int STORING_THREADS>
__device__ __forceinline__ void store_split_dz(uint4* to, const float* dz, int pitch, int first, int valid_rows,
                                               int stages, int thread) {
    constexpr int PADDED_N = round_up(N, COLUMNS);
    for (int item = thread; item < ROWS / 8 * PADDED_N; item += STORING_THREADS) {
        const int row_group = item / PADDED_N, n = item % PADDED_N, row = first + 8 * row_group;
        float v[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int k = 8 * row_group + i;
            v[i] = n < N && k < valid_rows ? dz[k * pitch + n] : 0.0f;
        }
        uint4 splits[SPLITS];
        split_eight(splits, v);
        const long long stage = static_cast<long long>(n / COLUMNS) * stages + row / 64;
#pragma unroll
        for (int term = 0; term < SPLITS; ++term)
            to[(stage * SPLITS + term) * (8 * COLUMNS) + row % 64 / 8 * COLUMNS + n % COLUMNS] = splits[term];
    }
}
