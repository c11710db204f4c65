// reduction/short_rows.cuh: rows so short that a warp takes 32 of them, or several times as many, through shared memory. It
// copies one piece of memory, 16 bytes at a time and with no register in between; then a thread has a row of its own.
//
// Flight  A piece is some 2 KB: 48 warps of a multiprocessor have 100 KB, most of them on their way.//
// Layout  The piece lies in shared memory as it does outside: rows that begin at multiples of 2, 4 or 8 bytes are read
//         by as many, and those of all lanes then lie in different banks. Where a row is an even number of 16 bytes,
//         16 are left free behind it, for the same reason.
// Shared  A warp has its rows and what is left free.
// Limits  A piece of fewer than 2^13 times 16 bytes; x and y begin at a multiple of 16 bytes.
#pragma once
#include "common/fast_divide.cuh"
#include "common/accumulator.cuh"

constexpr int SHORT_THREADS = 128;

template <class T>
struct ShortRows {
    static constexpr int A_CHUNK = 16 / sizeof(T);  // numbers of 16 bytes
    uint4* chunks;
    int together;  // rows of a warp
    int pitch;     // numbers from row to row
    Parts closed;  // chunks behind which one is left free
    __device__ __forceinline__ ShortRows(uint4* shared, int N, int together, const Parts& closed)
        : together(together), pitch(N * sizeof(T) % 32 == 0 ? N + A_CHUNK : N), closed(closed) {
        chunks = shared + threadIdx.x / 32 * (together * pitch / A_CHUNK);
    }
    __device__ __forceinline__ long long first() const {
        return (static_cast<long long>(blockIdx.x) * SHORT_THREADS + threadIdx.x) / 32 * together;
    }
    __device__ __forceinline__ long long step() const {
        return static_cast<long long>(gridDim.x) * (SHORT_THREADS / 32) * together;
    }
    __device__ __forceinline__ int height(long long rows_left) const {
        return rows_left < together ? static_cast<int>(rows_left) : together;
    }
    __device__ __forceinline__ uint4* chunk(int c) const { return chunks + c + part_of(c, closed); }
    __device__ __forceinline__ T* row(int r) const { return reinterpret_cast<T*>(chunks) + r * pitch; }

    // The first `count` numbers; all but those of the last rows are whole chunks.
    __device__ __forceinline__ void load(const T* x, int count) const {
        const int lane = threadIdx.x % 32, whole = count / A_CHUNK, last = whole * A_CHUNK + lane;
#pragma unroll 4
        for (int c = lane; c < whole; c += 32) {
            const u32 to = static_cast<u32>(__cvta_generic_to_shared(chunk(c)));
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"(x + c * A_CHUNK) : "memory");
        }
        if (last < count) reinterpret_cast<T*>(chunk(whole))[lane] = x[last];
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncwarp();
    }
    __device__ __forceinline__ void store(T* y, int count) const {
        const int lane = threadIdx.x % 32, whole = count / A_CHUNK, last = whole * A_CHUNK + lane;
        __syncwarp();
#pragma unroll 4
        for (int c = lane; c < whole; c += 32) reinterpret_cast<uint4*>(y)[c] = *chunk(c);
        if (last < count) y[last] = reinterpret_cast<const T*>(chunk(whole))[lane];
        __syncwarp();
    }
};
