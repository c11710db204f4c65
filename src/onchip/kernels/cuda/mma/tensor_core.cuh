// mma/tensor_core.cuh: A in registers times weights in shared memory, by wgmma (sm_90a) or mma.sync (sm_80 up).
//
// Fragments  A warp holds 16 rows. Lane (g, q) = (lane / 4, lane % 4) holds two registers of rows g and g + 8 per step
//            of STEP columns: a[step] = {row g reg 0, row g+8 reg 0, row g reg 1, row g+8 reg 1}. Of 8 columns of the
//            result it holds c = {(g, 2q), (g, 2q+1), (g+8, 2q), (g+8, 2q+1)}. wgmma and mma.sync share this layout, so
//            the result of a layer becomes the A operand of the next without leaving its lane.
// Weights    (K, N) as core matrices of 8 columns n x 16 B of k; matrix (k, n) is at byte 128 * (k * N/8 + n). ldmatrix
//            and wgmma descriptors without swizzle both read this layout. 128 contiguous bytes: no bank conflicts.
#pragma once

#include "common/dtype.cuh"
#include "mma/wgmma.cuh"

// -- wgmma: one warpgroup, 64 rows, N columns; asynchronous ---------------------------------------------------

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// The wgmma descriptor of a step's weights (no swizzle), in 16-byte units: address of the first core matrix, stride
// along k (bits 16 to 29) and along n (bits 32 to 45). Steps differ in the address only: one addition each.
template <int N>
__device__ __forceinline__ unsigned long long weights_descriptor(u32 shared_address, int offset) {
    constexpr unsigned long long stride_n = 8;
    constexpr u32 stride_k = N;
    return stride_n << 32 | ((stride_k << 16 | shared_address >> 4) + offset / 16);
}

// c[j..] += a * weights from column 8j on, by instructions of 64, 32, 16 and 8 columns.
template <class P, int N, int j, int NT, int KS>
__device__ __forceinline__ void wgmma_columns(float (&c)[NT][4], const u32 (&a)[KS][4], u32 weights, bool sums) {
    constexpr int left = NT - j, GROUPS = left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
#pragma unroll
    for (int k = 0; k < KS; ++k)
        Wgmma<P, 8 * GROUPS>::add(c + j, a[k], weights_descriptor<N>(weights, k * 32 * N + j * 128), sums || k > 0);
    if constexpr (left > GROUPS) wgmma_columns<P, N, j + GROUPS>(c, a, weights, sums);
}
#endif

// GEMM with A in registers, by WARPS warps: begin(), any number of add(), end(); c is valid after end().
// add: c (16 MT rows, 8 NT columns) += a (16 MT rows, KS steps) * the (K, N) matrix at address `weights`; with
// sums = false it overwrites c.
struct ByWgmma {
    static constexpr int WARPS = 4, COLUMNS = 64;  // result columns per instruction

    static __device__ __forceinline__ void begin() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
        wgmma_fence();
#endif
    }
    template <class P, int N, int MT, int NT, int KS>
    static __device__ __forceinline__ void add(float (&c)[MT][NT][4], const u32 (&a)[MT][KS][4], u32 weights,
                                               bool sums) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#pragma unroll
        for (int i = 0; i < MT; ++i) wgmma_columns<P, N, 0>(c[i], a[i], weights, sums);
#endif
    }
    static __device__ __forceinline__ void end() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
        wgmma_commit();
        wgmma_wait<0>();
#endif
    }
};

// -- mma.sync: one warp ----------------------------------------------------------------------------------------

template <class P>
__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1);
#define ONCHIP_MMA(P, NAME)                                                                                          \
    template <>                                                                                                      \
    __device__ __forceinline__ void mma<P>(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {                       \
        asm("mma.sync.aligned." NAME " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                        \
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                         \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                                         \
    }
ONCHIP_MMA(Fp16, "m16n8k16.row.col.f32.f16.f16.f32")
ONCHIP_MMA(Bf16, "m16n8k16.row.col.f32.bf16.bf16.f32")
ONCHIP_MMA(Tf32, "m16n8k8.row.col.f32.tf32.tf32.f32")

struct ByMma {
    static constexpr int WARPS = 1, COLUMNS = 32;

    static __device__ __forceinline__ void begin() {}
    template <class P, int N, int MT, int NT, int KS>
    static __device__ __forceinline__ void add(float (&c)[MT][NT][4], const u32 (&a)[MT][KS][4], u32 weights,
                                               bool sums) {
        if (!sums) {
#pragma unroll
            for (int i = 0; i < MT; ++i)
#pragma unroll
                for (int j = 0; j < NT; ++j) c[i][j][0] = c[i][j][1] = c[i][j][2] = c[i][j][3] = 0.0f;
        }
        // ldmatrix: lane l addresses row l % 8 of matrix l / 8: both k halves of 8 columns, then of the next 8.
        const int lane = threadIdx.x % 32;
        const u32 at = weights + ((lane / 8 % 2) * N + 8 * (lane / 16) + lane % 8) * 16;
#pragma unroll
        for (int k = 0; k < KS; ++k) {
#pragma unroll
            for (int j = 0; j < NT; j += 2) {
                u32 b[4];
                if (j + 1 < NT) {
                    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                                 : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(at + k * 32 * N + j * 128));
                } else {
                    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                                 : "=r"(b[0]), "=r"(b[1]) : "r"(at + k * 32 * N + j * 128));
                }
#pragma unroll
                for (int i = 0; i < MT; ++i) {
                    mma<P>(c[i][j], a[i][k], b[0], b[1]);
                    if (j + 1 < NT) mma<P>(c[i][j + 1], a[i][k], b[2], b[3]);
                }
            }
        }
    }
    static __device__ __forceinline__ void end() {}
};
