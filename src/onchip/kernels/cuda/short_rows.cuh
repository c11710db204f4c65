// short_rows.cuh: rows so short that a warp takes 32 of them through shared memory: it reads and writes one piece of
// memory, and in between a thread has a row.
//
// Shared  A warp has 32 rows of N | 1 numbers, so that the same number of all rows lies in different banks, and one
//         number more for each.
// Limits  32 N < 2^15.
#pragma once
#include "divide.cuh"
#include "wide.cuh"

constexpr int SHORT_THREADS = 128, SHORT_WARPS = SHORT_THREADS / 32;
constexpr int SHORT_AT_ONCE = 8;  // numbers of a thread on their way

template <class T>
struct ShortRows {
    wide_t<T>* slots;
    Parts rows;  // of N numbers
    __device__ ShortRows(wide_t<T>* shared, const Parts& rows)
        : slots(shared + threadIdx.x / 32 * 32 * ((rows.size | 1) + 1)), rows(rows) {}
    __device__ __forceinline__ int pitch() const { return rows.size | 1; }
    // Number n of all 32 rows.
    __device__ __forceinline__ int row_of(int n) const { return part_of(n, rows); }
    __device__ __forceinline__ wide_t<T>& number(int n) const { return slots[n + row_of(n) * (pitch() - rows.size)]; }
    // A thread's own row, and the one number more that belongs to a row.
    __device__ __forceinline__ wide_t<T>* mine() const { return slots + threadIdx.x % 32 * pitch(); }
    __device__ __forceinline__ wide_t<T>& beside(int row) const { return slots[32 * pitch() + row]; }

    __device__ __forceinline__ void load(const T* x, int count) const {
#pragma unroll 1
        for (int n = threadIdx.x % 32; n < count; n += 32 * SHORT_AT_ONCE) {
            wide_t<T> held[SHORT_AT_ONCE];
#pragma unroll
            for (int k = 0; k < SHORT_AT_ONCE; ++k) {
                if (n + 32 * k < count) held[k] = load_wide(x + n + 32 * k);
            }
#pragma unroll
            for (int k = 0; k < SHORT_AT_ONCE; ++k) {
                if (n + 32 * k < count) number(n + 32 * k) = held[k];
            }
        }
        __syncwarp();
    }
};
