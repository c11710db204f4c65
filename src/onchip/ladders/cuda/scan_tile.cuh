// scan_tile.cuh: a block scans a tile of 4096 values in registers.
// A warp has 512 contiguous values as 4 lines of 128; in each line a lane has 4 contiguous values, one 16-byte load.
#pragma once
#include "scan_block.cuh"

constexpr int THREADS = 256, WARPS = THREADS / LANES;
constexpr int LINES = 4, QUAD = 4;
constexpr int TILE = THREADS * LINES * QUAD;  // 4096 values

struct alignas(16) Quad {
    float v[QUAD];
};

// Offset in the tile of this lane's quad of a line.
__device__ __forceinline__ int place(int line) {
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    return (warp * LINES + line) * LANES * QUAD + lane * QUAD;
}

// Load x[first : first + TILE], zeros past N. x is 16 B aligned, first a multiple of 4.
__device__ __forceinline__ void load_tile(const float* x, Quad (&tile)[LINES], long long first, long long N) {
#pragma unroll
    for (int line = 0; line < LINES; ++line) {
        const long long i = first + place(line);
        if (i + QUAD <= N) {
            tile[line] = *reinterpret_cast<const Quad*>(x + i);
        } else {
#pragma unroll
            for (int j = 0; j < QUAD; ++j) tile[line].v[j] = i + j < N ? x[i + j] : 0.0f;
        }
    }
}

// Store the tile to y[first : first + TILE] with `before` added to each value; nothing past N.
__device__ __forceinline__ void store_tile(float* y, const Quad (&tile)[LINES], float before, long long first,
                                           long long N) {
#pragma unroll
    for (int line = 0; line < LINES; ++line) {
        const long long i = first + place(line);
        Quad sums;
#pragma unroll
        for (int j = 0; j < QUAD; ++j) sums.v[j] = before + tile[line].v[j];
        if (i + QUAD <= N) {
            *reinterpret_cast<Quad*>(y + i) = sums;
        } else {
#pragma unroll
            for (int j = 0; j < QUAD; ++j)
                if (i + j < N) y[i + j] = sums.v[j];
        }
    }
}

// Inclusive prefix sum of the tile, in place; every thread returns the sum of the tile.
// `totals` is shared memory for WARPS values; it may be overwritten after the next barrier.
__device__ __forceinline__ float scan_tile(Quad (&tile)[LINES], float* totals) {
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    float before_line = 0.0f;
#pragma unroll
    for (int line = 0; line < LINES; ++line) {
        float (&v)[QUAD] = tile[line].v;
#pragma unroll
        for (int j = 1; j < QUAD; ++j) v[j] += v[j - 1];
        const float lanes = warp_reduction(v[QUAD - 1]);
        float before = __shfl_up_sync(~0u, lanes, 1);
        before = lane == 0 ? before_line : before_line + before;
#pragma unroll
        for (int j = 0; j < QUAD; ++j) v[j] += before;
        before_line += __shfl_sync(~0u, lanes, LANES - 1);
    }
    if (lane == 0) totals[warp] = before_line;
    __syncthreads();
    float before_warp = 0.0f, all = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        if (w == warp) before_warp = all;
        all += totals[w];
    }
#pragma unroll
    for (int line = 0; line < LINES; ++line)
#pragma unroll
        for (int j = 0; j < QUAD; ++j) tile[line].v[j] += before_warp;
    return all;
}
