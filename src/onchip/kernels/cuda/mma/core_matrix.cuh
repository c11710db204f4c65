// mma/core_matrix.cuh: wgmma on bf16 matrices in shared memory, K-major or MN-major from one layout; sm_90a only.
//
// Layout     No-swizzle wgmma layout (128B-swizzled tiles: mma/tma.cuh). A panel is 8 columns: 16 bytes per row, rows
//            contiguous. A matrix is its panels in order. 8 rows of a panel are a core matrix of 128 bytes, which wgmma
//            reads with k along the columns (K-major) or, TRANSPOSED, along the rows (MN-major, transposed operand).
// Operands   A warpgroup multiplies 64 rows (or columns) of A by 8 NT of B, 16 elements of k per instruction.
//            Accumulators: mma/wgmma.cuh. A may be in registers: register 2 v + h of lane (g, q) of warp w holds
//            columns 8 v + 2 q and + 1 of row 16 w + 8 h + g. Accumulators of two column groups are A of the next GEMM.
#pragma once

#include "mma/wgmma.cuh"

// Byte offset of (row, column).
template <int ROWS>
__device__ constexpr int core_matrix_offset(int row, int column) {
    return column / 8 * 16 * ROWS + row * 16 + column % 8 * 2;
}

// Keeps the compiler from precomputing the descriptors of all wgmma in a loop, which would take too many registers.
__device__ __forceinline__ u32 computed_here(u32 address) {
#ifdef __CUDA_ARCH__
    asm volatile("" : "+r"(address));
#endif
    return address;
}

// An operand in panels. K-major: the outer axis is rows, k runs along columns. TRANSPOSED (MN-major): the reverse.
template <int ROWS, bool TRANSPOSED>
struct CoreMatrices {
    static constexpr int PANEL = 16 * ROWS;
    static constexpr int NEXT_OUTER = TRANSPOSED ? PANEL : 128, NEXT_K = TRANSPOSED ? 128 : PANEL;  // strides, bytes
    static constexpr bool IS_TRANSPOSED = TRANSPOSED;
    u32 first;  // lower half of the wgmma descriptor

    __device__ __forceinline__ explicit CoreMatrices(u32 shared_address)
        : first(computed_here(NEXT_K / 16 << 16 | (shared_address & 0x3ffff) >> 4)) {}
    // The operand starting at k step `step`.
    __device__ __forceinline__ CoreMatrices from(int step) const {
        CoreMatrices shifted = *this;
        shifted.first += step * (2 * NEXT_K / 16);
        return shifted;
    }
    // The wgmma descriptor of a k step.
    __device__ __forceinline__ unsigned long long descriptor(int step) const {
        return static_cast<unsigned long long>(NEXT_OUTER / 16) << 32 | (first + step * (2 * NEXT_K / 16));
    }
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
template <int N, bool TRANSPOSE_A, bool TRANSPOSE_B>
struct CoreMatrixWgmma;
// A0 .. A6 are asm operand numbers, after the N / 2 accumulators.
#define ONCHIP_PANELS(N, A0, A1, A2, A3, A4, A5, A6)                                                                 \
    template <bool TRANSPOSE_A, bool TRANSPOSE_B>                                                                    \
    struct CoreMatrixWgmma<N, TRANSPOSE_A, TRANSPOSE_B> {                                                            \
        static __device__ __forceinline__ void add(float (*c)[4], unsigned long long a, unsigned long long b,        \
                                                   bool sums) {                                                      \
            asm volatile("{.reg .pred sums; setp.ne.b32 sums, %" #A4 ", 0;\n"                                        \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" ONCHIP_REGISTERS_##N "}, %" #A0 \
                         ", %" #A1 ", sums, 1, 1, %" #A2 ", %" #A3 ";}"                                              \
                         : ONCHIP_SUMS_##N                                                                           \
                         : "l"(a), "l"(b), "n"(static_cast<int>(TRANSPOSE_A)), "n"(static_cast<int>(TRANSPOSE_B)),   \
                           "r"(static_cast<int>(sums)));                                                             \
        }                                                                                                            \
        static __device__ __forceinline__ void add(float (*c)[4], const u32 (&a)[4], unsigned long long b, bool sums) {\
            asm volatile("{.reg .pred sums; setp.ne.b32 sums, %" #A6 ", 0;\n"                                        \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" ONCHIP_REGISTERS_##N "}, {%" #A0 \
                         ",%" #A1 ",%" #A2 ",%" #A3 "}, %" #A4 ", sums, 1, 1, %" #A5 ";}"                            \
                         : ONCHIP_SUMS_##N                                                                           \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(static_cast<int>(TRANSPOSE_B)),   \
                           "r"(static_cast<int>(sums)));                                                             \
        }                                                                                                            \
    };
ONCHIP_PANELS(8, 4, 5, 6, 7, 8, 9, 10)
ONCHIP_PANELS(16, 8, 9, 10, 11, 12, 13, 14)
ONCHIP_PANELS(24, 12, 13, 14, 15, 16, 17, 18)
ONCHIP_PANELS(32, 16, 17, 18, 19, 20, 21, 22)
ONCHIP_PANELS(48, 24, 25, 26, 27, 28, 29, 30)
ONCHIP_PANELS(64, 32, 33, 34, 35, 36, 37, 38)

// After a thread's writes to shared memory, before a barrier: makes them visible to wgmma (async proxy).
__device__ __forceinline__ void fence_for_wgmma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
#endif

template <class A, class B, int NT>
__device__ __forceinline__ void add_matrices(float (*c)[4], unsigned long long a, unsigned long long b, bool sums) {
    constexpr int N = NT >= 8 ? 8 : NT >= 6 ? 6 : NT >= 4 ? 4 : NT;
    CoreMatrixWgmma<8 * N, A::IS_TRANSPOSED, B::IS_TRANSPOSED>::add(c, a, b, sums);
    if constexpr (NT > N) add_matrices<A, B, NT - N>(c + N, a, b + N * (B::NEXT_OUTER / 16), sums);
}

// c = a b, or c += a b where `sums`, over one k step of 16; a in registers.
template <class B, int NT>
__device__ __forceinline__ void add_fragments(float (*c)[4], const u32 (&a)[4], unsigned long long b, bool sums) {
    constexpr int N = NT >= 8 ? 8 : NT >= 6 ? 6 : NT >= 4 ? 4 : NT;
    CoreMatrixWgmma<8 * N, false, B::IS_TRANSPOSED>::add(c, a, b, sums);
    if constexpr (NT > N) add_fragments<B, NT - N>(c + N, a, b + N * (B::NEXT_OUTER / 16), sums);
}

// c = a b, or c += a b where `sums`, over k steps `first`, `first` + BY, ... below STEPS; valid after
// wgmma_wait. The step count does not depend on `first`: the compiler would serialise wgmma after a branch.
template <int STEPS, int BY, class A, class B, int NT>
__device__ __forceinline__ void begin_gemm(float (*c)[4], const A& a, const B& b, int first, bool sums) {
    static_assert(STEPS % BY == 0, "BY must divide STEPS");
#pragma unroll
    for (int i = 0; i < STEPS / BY; ++i)
        add_matrices<A, B, NT>(c, a.descriptor(first + i * BY), b.descriptor(first + i * BY), sums || i > 0);
}
