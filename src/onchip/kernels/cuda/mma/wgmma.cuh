// mma/wgmma.cuh: wgmma.mma_async wrappers: a warpgroup multiplies 64 rows by N columns per instruction; sm_90a only.
//
// Accumulators  Lane (g, q) = (lane / 4, lane % 4) of warp w holds, of column group j of 8, c[j] = {(16w + g, 8j + 2q),
//               (16w + g, 8j + 2q + 1), (16w + g + 8, 8j + 2q), (16w + g + 8, 8j + 2q + 1)}.
// Operands      B (weights) is in shared memory, addressed by a descriptor. A (rows) is in shared memory too, or in
//               registers: fragments of two registers per row, as for mma.sync (mma/tensor_core.cuh).
// Waiting       wgmma_fence, any number of add, wgmma_commit; then wgmma_wait<n>, which leaves the last n groups in
//               flight. The accumulators, registers and shared memory of the others may then be used.
#pragma once

#include "common/dtype.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define ONCHIP_R4(a, b, c, d) "%" #a ",%" #b ",%" #c ",%" #d
#define ONCHIP_R16(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p) \
    ONCHIP_R4(a, b, c, d) "," ONCHIP_R4(e, f, g, h) "," ONCHIP_R4(i, j, k, l) "," ONCHIP_R4(m, n, o, p)
#define ONCHIP_REGISTERS_8 ONCHIP_R4(0, 1, 2, 3)
#define ONCHIP_REGISTERS_16 ONCHIP_REGISTERS_8 "," ONCHIP_R4(4, 5, 6, 7)
#define ONCHIP_REGISTERS_24 ONCHIP_REGISTERS_16 "," ONCHIP_R4(8, 9, 10, 11)
#define ONCHIP_REGISTERS_32 ONCHIP_REGISTERS_16 "," ONCHIP_R4(8, 9, 10, 11) "," ONCHIP_R4(12, 13, 14, 15)
#define ONCHIP_REGISTERS_48 ONCHIP_REGISTERS_32 "," ONCHIP_R4(16, 17, 18, 19) "," ONCHIP_R4(20, 21, 22, 23)
#define ONCHIP_REGISTERS_64 \
    ONCHIP_REGISTERS_32 "," ONCHIP_R16(16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31)
#define ONCHIP_REGISTERS_128                                                                         \
    ONCHIP_REGISTERS_64 "," ONCHIP_R16(32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47) \
        "," ONCHIP_R16(48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63)
#define ONCHIP_REGISTERS_256                                                                                 \
    ONCHIP_REGISTERS_128 "," ONCHIP_R16(64, 65, 66, 67, 68, 69, 70, 71, 72, 73, 74, 75, 76, 77, 78, 79)        \
        "," ONCHIP_R16(80, 81, 82, 83, 84, 85, 86, 87, 88, 89, 90, 91, 92, 93, 94, 95)                         \
        "," ONCHIP_R16(96, 97, 98, 99, 100, 101, 102, 103, 104, 105, 106, 107, 108, 109, 110, 111)             \
        "," ONCHIP_R16(112, 113, 114, 115, 116, 117, 118, 119, 120, 121, 122, 123, 124, 125, 126, 127)
#define ONCHIP_C4(j) "+f"(c[j][0]), "+f"(c[j][1]), "+f"(c[j][2]), "+f"(c[j][3])
#define ONCHIP_SUMS_8 ONCHIP_C4(0)
#define ONCHIP_SUMS_16 ONCHIP_SUMS_8, ONCHIP_C4(1)
#define ONCHIP_SUMS_24 ONCHIP_SUMS_16, ONCHIP_C4(2)
#define ONCHIP_SUMS_32 ONCHIP_SUMS_16, ONCHIP_C4(2), ONCHIP_C4(3)
#define ONCHIP_SUMS_48 ONCHIP_SUMS_32, ONCHIP_C4(4), ONCHIP_C4(5)
#define ONCHIP_SUMS_64 ONCHIP_SUMS_32, ONCHIP_C4(4), ONCHIP_C4(5), ONCHIP_C4(6), ONCHIP_C4(7)
#define ONCHIP_SUMS_128                                                                                 \
    ONCHIP_SUMS_64, ONCHIP_C4(8), ONCHIP_C4(9), ONCHIP_C4(10), ONCHIP_C4(11), ONCHIP_C4(12), ONCHIP_C4(13), \
        ONCHIP_C4(14), ONCHIP_C4(15)
#define ONCHIP_SUMS_256                                                                                        \
    ONCHIP_SUMS_128, ONCHIP_C4(16), ONCHIP_C4(17), ONCHIP_C4(18), ONCHIP_C4(19), ONCHIP_C4(20), ONCHIP_C4(21),   \
        ONCHIP_C4(22), ONCHIP_C4(23), ONCHIP_C4(24), ONCHIP_C4(25), ONCHIP_C4(26), ONCHIP_C4(27), ONCHIP_C4(28), \
        ONCHIP_C4(29), ONCHIP_C4(30), ONCHIP_C4(31)

template <class P, int N>
struct Wgmma;
// With sums = false the instruction overwrites c. A0 .. A5 are asm operand numbers, after the N / 2 accumulators.
#define ONCHIP_WGMMA(P, N, STEP, LAST, A0, A1, A2, A3, A4, A5)                                                       \
    template <>                                                                                                      \
    struct Wgmma<P, N> {                                                                                             \
        static __device__ __forceinline__ void add(float (*c)[4], const u32 (&a)[4], unsigned long long tiles,       \
                                                   bool sums) {                                                      \
            asm volatile("{.reg .pred sums; setp.ne.b32 sums, %" #A5 ", 0;\n"                                        \
                         "wgmma.mma_async.sync.aligned.m64n" #N STEP " {" ONCHIP_REGISTERS_##N                       \
                         "}, {%" #A0 ",%" #A1 ",%" #A2 ",%" #A3 "}, %" #A4 ", sums, 1, 1" LAST ";}"                  \
                         : ONCHIP_SUMS_##N                                                                           \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(tiles), "r"(static_cast<int>(sums)));     \
        }                                                                                                            \
        static __device__ __forceinline__ void add(float (*c)[4], unsigned long long rows, unsigned long long tiles, \
                                                   bool sums) {                                                      \
            asm volatile("{.reg .pred sums; setp.ne.b32 sums, %" #A2 ", 0;\n"                                        \
                         "wgmma.mma_async.sync.aligned.m64n" #N STEP " {" ONCHIP_REGISTERS_##N "}, %" #A0 ", %" #A1  \
                         ", sums, 1, 1" LAST LAST ";}"                                                               \
                         : ONCHIP_SUMS_##N                                                                           \
                         : "l"(rows), "l"(tiles), "r"(static_cast<int>(sums)));                                      \
        }                                                                                                            \
    };
#define ONCHIP_WGMMA_OF(P, STEP, LAST)                          \
    ONCHIP_WGMMA(P, 8, STEP, LAST, 4, 5, 6, 7, 8, 9)             \
    ONCHIP_WGMMA(P, 16, STEP, LAST, 8, 9, 10, 11, 12, 13)        \
    ONCHIP_WGMMA(P, 24, STEP, LAST, 12, 13, 14, 15, 16, 17)      \
    ONCHIP_WGMMA(P, 32, STEP, LAST, 16, 17, 18, 19, 20, 21)      \
    ONCHIP_WGMMA(P, 48, STEP, LAST, 24, 25, 26, 27, 28, 29)      \
    ONCHIP_WGMMA(P, 64, STEP, LAST, 32, 33, 34, 35, 36, 37)      \
    ONCHIP_WGMMA(P, 128, STEP, LAST, 64, 65, 66, 67, 68, 69)     \
    ONCHIP_WGMMA(P, 256, STEP, LAST, 128, 129, 130, 131, 132, 133)
ONCHIP_WGMMA_OF(Fp16, "k16.f32.f16.f16", ", 0")
ONCHIP_WGMMA_OF(Bf16, "k16.f32.bf16.bf16", ", 0")
ONCHIP_WGMMA_OF(Tf32, "k8.f32.tf32.tf32", "")

// wgmma descriptor of a swizzled K-major tile, as TMA writes it (mma/tma.cuh): rows of LINE (128, 64 or 32) bytes of k.
// In 16-byte units; the swizzle mode is in the top two bits. The next step of k is 32 bytes further: add 2.
// pitch  bytes between groups of 8 rows; in a patch of pixels, the bytes of a row of pixels. The swizzle depends on
//        the address only, so a tile may begin at any pixel of a patch that begins at a multiple of 1,024 bytes.
template <int LINE = 128>
__device__ __forceinline__ unsigned long long swizzled_descriptor(u32 shared_address, u32 pitch = 8 * LINE) {
    constexpr unsigned long long SWIZZLE_MODE = LINE == 128 ? 1 : LINE == 64 ? 2 : 3;
    return SWIZZLE_MODE << 62 | static_cast<unsigned long long>(pitch / 16) << 32 | 1ull << 16 |
           (shared_address & 0x3ffff) >> 4;
}
// The descriptor of the tile `bytes` after this one.
__device__ __forceinline__ unsigned long long advance(unsigned long long tile, u32 bytes) {
    return (tile & ~0ull << 32) | (static_cast<u32>(tile) + bytes / 16);
}
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int n>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(n) : "memory");
}
#endif

// movmatrix: transposes an 8 x 8 matrix of 16-bit elements held by a warp. Lane (g, q) passes columns 2q and 2q + 1 of
// row g and gets rows 2q and 2q + 1 of column g.
__device__ __forceinline__ u32 transposed(u32 pair) {
    u32 result;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
    return result;
}
// stmatrix.trans: stores four such matrices transposed; lane 8 i + r passes the 16-byte address of row r of matrix i.
__device__ __forceinline__ void store_transposed(void* to, const u32 (&pair)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 :
                 : "r"(static_cast<u32>(__cvta_generic_to_shared(to))), "r"(pair[0]), "r"(pair[1]), "r"(pair[2]),
                   "r"(pair[3])
                 : "memory");
}
