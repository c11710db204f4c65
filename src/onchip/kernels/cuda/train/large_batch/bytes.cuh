// train/large_batch/bytes.cuh: gemms of a training step with one uint8 operand.
//
// Idea    uint8 is exact in bf16, and a float is a sum of PARTS bf16 terms (three keep all bits), so the gemm is PARTS
//         bf16 gemms and uint8 is a quarter of the bytes of fp32. Lanes convert uint8 to A fragments in registers. The
//         other operand is stored in global memory as a bf16 split in tensor core order (bytes_parts), and only copied.
// Layout  16 B chunks of 8 K elements; 64 of them, one per column, and two such groups per K step of 16: free of bank
//         conflicts for mma.sync, and addressable by a wgmma descriptor. Both operands use the same permutation of K.
// Order   Stage by stage; within a stage the lowest split terms first. fp32 adds each stage's sum with FADD; otherwise
//         the tensor core accumulates all.
#pragma once

#include "train/large_batch/bf16_split.cuh"

constexpr int COLUMNS = 64, STEP_BYTES = 2 * 16 * COLUMNS;  // per block; of a K step of 16

// Copies 16 B to shared memory asynchronously; zero-fills without reading `from` if not is_there. Prefetches the cache
// line to L2 for the next stages.
__device__ __forceinline__ void copy_async(void* to, const void* from, bool is_there = true) {
    const u32 at = static_cast<u32>(__cvta_generic_to_shared(to)), bytes = is_there ? 16 : 0;
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" :: "r"(at), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void close_stage() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `LEFT` committed stages are in flight, and makes them visible to wgmma.
template <int LEFT>
__device__ __forceinline__ void await_stages() {
    asm volatile("cp.async.wait_group %0;" :: "n"(LEFT) : "memory");
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// -- conversion ------------------------------------------------------------------------------------------------------

// Byte I of a word as a float: placed in the low mantissa bits of 2^23.
template <int I>
__device__ __forceinline__ float byte_of(u32 word) {
    return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7540u + I)) - 8388608.0f;
}

// -- gemm ------------------------------------------------------------------------------------------------------------

// 16 rows per warp, A in registers, times 64 columns: begin(), any number of add(), end(). After wait() the sums are
// valid and a and the tiles may be reused. With sums = false, c is overwritten.
struct Products {
    static __device__ __forceinline__ void begin() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
        begin_products();
#endif
    }
    static __device__ __forceinline__ void add(float (&c)[8][4], const u32 (&a)[4], const unsigned char* step, bool sums) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
        Wgmma<Bf16, COLUMNS>::add(c, a, tiles_at<COLUMNS>(static_cast<u32>(__cvta_generic_to_shared(step)), 0), sums);
#else
        const u32* words = reinterpret_cast<const u32*>(step) + threadIdx.x % 32;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            if (!sums) c[j][0] = c[j][1] = c[j][2] = c[j][3] = 0.0f;
            mma<Bf16>(c[j], a, words[32 * j], words[32 * j + STEP_BYTES / 8]);
        }
#endif
    }
    static __device__ __forceinline__ void end() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
        end_products();
#endif
    }
    static __device__ __forceinline__ void wait() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
        wait_for_products<0>();
#endif
    }
};

// Issues a[step] times the stage's tiles over STEPS K steps and all split terms, lowest term first; call wait() after.
template <int PARTS, int STEPS, int TILES>
__device__ __forceinline__ void add_stage(float (&c)[TILES][8][4], const u32 (&a)[STEPS][TILES][4],
                                          const unsigned char* stage, bool sums) {
    Products::begin();
#pragma unroll
    for (int part = PARTS - 1; part >= 0; --part)
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
#pragma unroll
            for (int t = 0; t < TILES; ++t)
                Products::add(c[t], a[step][t], stage + (part * STEPS + step) * STEP_BYTES,
                              sums || part < PARTS - 1 || step > 0);
    Products::end();
}

// Keeps the compiler from sinking the conversion below the wgmmas that it should overlap with.
template <int STEPS, int TILES>
__device__ __forceinline__ void hold(u32 (&a)[STEPS][TILES][4]) {
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

// -- split gradients -------------------------------------------------------------------------------------------------

// Stores ROWS rows of dz, N values each, as a bf16 split with rows as K; missing rows and columns are 0. `first` is the
// first row, `there` the valid rows; a batch has `stages` stages of 64 rows. `me` is this thread's index of TEAM.
template <int PARTS, int N, int ROWS, int TEAM>
__device__ __forceinline__ void store_parts(uint4* to, const float* dz, int pitch, int first, int there, int stages,
                                            int me) {
    constexpr int ALL = round_up(N, COLUMNS);
    for (int item = me; item < ROWS / 8 * ALL; item += TEAM) {
        const int eight = item / ALL, n = item % ALL, row = first + 8 * eight;
        float v[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int k = 8 * eight + i;
            v[i] = n < N && k < there ? dz[k * pitch + n] : 0.0f;
        }
        uint4 parts[PARTS];
        split_eight(parts, v);
        const long long stage = static_cast<long long>(n / COLUMNS) * stages + row / 64;
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
            to[(stage * PARTS + part) * (8 * COLUMNS) + row % 64 / 8 * COLUMNS + n % COLUMNS] = parts[part];
    }
}
