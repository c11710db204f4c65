// gradient/weight_grad.cuh: which elements of dy and x an index of K, M or N is, in the implicit GEMM of
// gradient/weight_grad.cu and gradient/weight_grad_mma.cu. Host side: gradient/weight_grad.py.
#pragma once

#include "common/accumulator.cuh"
#include "common/fast_divide.cuh"

struct Windows {
    Divider positions, width_out, taps, taps_w;  // positions of y, and per line of them; taps, and per line of them
    int stride_h, stride_w, dilation_h, dilation_w, before_h, before_w, height, width;
    long long y_row, x_row;  // elements per row of the batch
};

// An index of K: a row of the batch and a position in y, which reads x from (top, column) on.
template <class Index>
struct Position {
    Index row;
    u32 position;
    int top, column;

    __device__ __forceinline__ Position(long long k, const Windows& windows) : row(static_cast<Index>(k)) {
        position = pop_index(row, windows.positions);
        u32 line_out = position;
        column = static_cast<int>(pop_index(line_out, windows.width_out)) * windows.stride_w;
        top = static_cast<int>(line_out) * windows.stride_h;
    }
};

// An index of N: a channel of x, and how far its tap is below and right of (top, column).
struct Tap {
    u32 channel;
    int down, right;

    __device__ __forceinline__ Tap(u32 n, const Windows& windows) : channel(n) {
        u32 h = pop_index(channel, windows.taps);
        const u32 w = pop_index(h, windows.taps_w);
        down = static_cast<int>(h) * windows.dilation_h - windows.before_h;
        right = static_cast<int>(w) * windows.dilation_w - windows.before_w;
    }
};

__device__ __forceinline__ bool is_pixel(int h, int w, const Windows& windows) {
    return static_cast<u32>(h) < static_cast<u32>(windows.height) &&
           static_cast<u32>(w) < static_cast<u32>(windows.width);
}

// Partial sums have the accumulator's type.
template <class Y, class A>
__device__ __forceinline__ void store_as(Y* at, A v) {
    if constexpr (is_same<Y, A>) *at = v;
    else store_acc(at, v);
}
