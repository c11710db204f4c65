// mma/cp_async.cuh: cp.async copies to shared memory, and ldmatrix fragment loads from it. sm_80 up.
#pragma once

#include "common/dtype.cuh"

__device__ __forceinline__ u32 shared_address(const void* at) { return static_cast<u32>(__cvta_generic_to_shared(at)); }

// Copies `bytes` bytes and fills up to BYTES with zeros. With bytes = 0, `from` is not read and may be any address.
template <int BYTES>
__device__ __forceinline__ void cp_async(char* to, const void* from, int bytes) {
    const u32 at = shared_address(to);
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(at), "l"(from), "r"(bytes) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" :: "r"(at), "l"(from), "n"(BYTES), "r"(bytes)
                     : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" :: "n"(LEFT) : "memory");
}

// ldmatrix.x4 of four 8 x 16 B matrices: lane l addresses row l % 8 of matrix l / 8; it receives 32-bit element l % 4
// of row l / 4 of each matrix.
__device__ __forceinline__ void ldmatrix_x4(u32 (&to)[4], const char* at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(shared_address(at)) : "memory");
}
// The same, each matrix transposed: lane l receives the 16-bit elements l / 4 of rows l % 4 * 2 and l % 4 * 2 + 1.
__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&to)[4], const char* at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(shared_address(at)) : "memory");
}
