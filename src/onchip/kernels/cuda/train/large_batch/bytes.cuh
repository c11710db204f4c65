// train/large_batch/bytes.cuh: products of a training step whose one operand is bytes.
//
// Idea    A byte is a number of bf16, exactly; a float is the sum of PARTS numbers of bf16: three hold all of its bits.
//         So a product with bytes is PARTS products of bf16, and bytes are a quarter of what floats would be to bring.
//         A lane makes bf16 of the bytes that are its own words of an operand in registers. The other operand lies in
//         memory as parts, tile by tile as the tensor cores read them (bytes_parts made them): it is only copied.
// Parts   Pieces of 8 k's, 16 B; 64 of them, a column each, are 8 k's of 64 columns, and two of those a step of 16 k's:
//         mma.sync finds its words there without conflict, wgmma by a descriptor. Which k's a step has is our choice,
//         the same one for both operands.
// Order   A sum goes over stages; of a stage the lowest parts first, then those above. fp32: each stage's sum is added
//         in float; else the tensor core sums up all.
#pragma once

#include "train/large_batch/bf16_split.cuh"

constexpr int COLUMNS = 64, STEP_BYTES = 2 * 16 * COLUMNS;  // of a block, and of their numbers of a step of 16 k's

// 16 bytes on their way to shared memory; zeros where there are none: then `from` is not read. The line that they are of
// comes to L2: the next stages want the rest of it.
__device__ __forceinline__ void copy_async(void* to, const void* from, bool is_there = true) {
    const u32 at = static_cast<u32>(__cvta_generic_to_shared(to)), bytes = is_there ? 16 : 0;
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" :: "r"(at), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void close_stage() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until all stages but the last `LEFT` that were closed are there, for wgmma too.
template <int LEFT>
__device__ __forceinline__ void await_stages() {
    asm volatile("cp.async.wait_group %0;" :: "n"(LEFT) : "memory");
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// -- numbers of bf16 -------------------------------------------------------------------------------------------------

// Byte I of a word, as a float: it becomes the last bits of 2^23.
template <int I>
__device__ __forceinline__ float byte_of(u32 word) {
    return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7540u + I)) - 8388608.0f;
}

// -- products --------------------------------------------------------------------------------------------------------

// Products of 16 rows a warp, whose words are a lane's registers, with 64 columns: begin(), as many add() as there are,
// end(); behind wait() the sums are there, and a and the tiles are free. With sums = false, c is not read.
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

// Products of STEPS steps and all parts, the lowest first, to be waited for: a[step] times stage's tiles, which lie part
// by part.
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

// What was widened is there from here on: else the compiler does it where it is asked for, behind the products that it
// should be beside.
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

// -- parts of gradients ------------------------------------------------------------------------------------------------

// ROWS rows of dz, N numbers each, as the parts of an operand whose k's are rows: zeros for rows and columns that are not
// there. `first` is the number of their first row, `there` are so many; a batch has `stages` of 64 rows. TEAM threads take
// part, of which this is number `me`.
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
