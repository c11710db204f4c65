// reduction/short_rows.cuh: stages short rows in shared memory, 32 or more per warp. cp.async copies a warp's
// contiguous rows, 16 B per lane, bypassing registers; then each thread reads its own rows.
//
// Memory  About 2 KB per warp: 48 warps per SM keep up to 100 KB in flight.
// Layout  Shared memory mirrors global memory. Rows aligned to 2, 4 or 8 bytes are read in words of that size without
//         bank conflicts. Rows of a multiple of 32 B are padded by 16 B, for the same reason.
// Shared  A warp's rows and padding.
// Limits  Fewer than 2^13 * 16 B per warp; x and y 16 B aligned.
#pragma once
#include "common/fast_divide.cuh"
#include "common/accumulator.cuh"

constexpr int SHORT_THREADS = 128;

template <class T>
struct ShortRows {
    static constexpr int PER_CHUNK = 16 / sizeof(T);  // elements per 16 B
    uint4* chunks;
    int warp_rows;            // rows per warp
    int pitch;                // row stride in elements
    SmallDivider row_chunks;  // 16 B words per padded row, less the padding
    __device__ __forceinline__ ShortRows(uint4* shared, int N, int warp_rows, const SmallDivider& row_chunks)
        : warp_rows(warp_rows), pitch(N * sizeof(T) % 32 == 0 ? N + PER_CHUNK : N), row_chunks(row_chunks) {
        chunks = shared + threadIdx.x / 32 * (warp_rows * pitch / PER_CHUNK);
    }
    __device__ __forceinline__ long long first() const {
        return (static_cast<long long>(blockIdx.x) * SHORT_THREADS + threadIdx.x) / 32 * warp_rows;
    }
    __device__ __forceinline__ long long step() const {
        return static_cast<long long>(gridDim.x) * (SHORT_THREADS / 32) * warp_rows;
    }
    __device__ __forceinline__ int height(long long rows_left) const {
        return rows_left < warp_rows ? static_cast<int>(rows_left) : warp_rows;
    }
    __device__ __forceinline__ uint4* chunk(int c) const { return chunks + c + quotient(c, row_chunks); }
    __device__ __forceinline__ T* row(int r) const { return reinterpret_cast<T*>(chunks) + r * pitch; }

    // count is a multiple of PER_CHUNK, except at the end of x.
    __device__ __forceinline__ void load(const T* x, int count) const {
        const int lane = threadIdx.x % 32, full_chunks = count / PER_CHUNK, last = full_chunks * PER_CHUNK + lane;
#pragma unroll 4
        for (int c = lane; c < full_chunks; c += 32) {
            const u32 to = static_cast<u32>(__cvta_generic_to_shared(chunk(c)));
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"(x + c * PER_CHUNK) : "memory");
        }
        if (last < count) reinterpret_cast<T*>(chunk(full_chunks))[lane] = x[last];
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncwarp();
    }
    __device__ __forceinline__ void store(T* y, int count) const {
        const int lane = threadIdx.x % 32, full_chunks = count / PER_CHUNK, last = full_chunks * PER_CHUNK + lane;
        __syncwarp();
#pragma unroll 4
        for (int c = lane; c < full_chunks; c += 32) reinterpret_cast<uint4*>(y)[c] = *chunk(c);
        if (last < count) y[last] = reinterpret_cast<const T*>(chunk(full_chunks))[lane];
        __syncwarp();
    }
};
