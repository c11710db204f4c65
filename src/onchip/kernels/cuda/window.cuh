// window.cuh: windows over images, as pools and depthwise convolutions walk over them.
//
// A thread makes Q outputs one below the other, of V neighbouring channels. Threads that lie side by side make outputs
// that lie side by side, so whatever they read at once is one piece, wherever it begins; a row that several windows
// share is read once.
#pragma once
#include "divide.cuh"
#include "wide.cuh"

constexpr int WINDOW_THREADS = 256;

// Along one axis: the size of x, the outputs, and where their windows lie. Taps before `end` count in a mean over pads.
struct Axis {
    int size, count, taps, stride, before, dilation, end;
};

// How far apart the neighbours of an array lie, in numbers.
struct Apart {
    long long image, channel, row, column;
};

// What is known of a launch: how many threads there are, what they are counted by, the axes and the arrays.
struct Windows {
    Divider channels, parts, columns;  // of threads: V channels each, Q outputs each, one column each
    Axis h, w;
    Apart from, to;
    long long count;
};

// Where a thread's outputs are.
struct Outputs {
    long long image;
    u32 channel;
    int ho, wo;
};

template <class Index, bool IS_LAST, int V, int Q>
__device__ __forceinline__ Outputs outputs_of(long long thread, const Windows& all) {
    Index rest = static_cast<Index>(thread);
    Outputs mine;
    if (IS_LAST) mine.channel = take_rest(rest, all.channels) * V;
    mine.wo = take_rest(rest, all.columns);
    mine.ho = take_rest(rest, all.parts) * Q;
    if (!IS_LAST) mine.channel = take_rest(rest, all.channels);
    mine.image = rest;
    return mine;
}

// Calls fold(q, kh, kw, numbers) for each tap of Q outputs, in the order of the taps; numbers outside x are `empty`.
//
// from  x at (h0, w0), where the first window begins
template <int KH, int KW, int SH, int Q, int V, class T, class Fold>
__device__ __forceinline__ void walk(const T* from, int h0, int w0, int H, int W, long long row, long long column,
                                     wide_t<T> empty, Fold fold) {
    bool is_column[KW];
#pragma unroll
    for (int kw = 0; kw < KW; ++kw) is_column[kw] = static_cast<u32>(w0 + kw) < static_cast<u32>(W);
#pragma unroll
    for (int r = 0; r < (Q - 1) * SH + KH; ++r) {
        const bool is_row = static_cast<u32>(h0 + r) < static_cast<u32>(H);
        wide_t<T> numbers[KW][V];
#pragma unroll
        for (int kw = 0; kw < KW; ++kw) load_or(numbers[kw], from + kw * column, is_row && is_column[kw], empty);
#pragma unroll
        for (int q = 0; q < Q; ++q) {
            const int kh = r - q * SH;
            if (kh < 0 || kh >= KH) continue;
#pragma unroll
            for (int kw = 0; kw < KW; ++kw) fold(q, kh, kw, numbers[kw]);
        }
        from += row;
    }
}

// The taps of a window that begins at `begin` which lie in 0 .. size - 1.
struct Taps {
    int first, end;

    __device__ __forceinline__ Taps(int begin, int taps, int dilation, int size) {
        first = begin >= 0 ? 0 : dilation == 1 ? -begin : (dilation - 1 - begin) / dilation;
        const int last = size - 1 - begin;
        end = last < 0 ? 0 : min(taps, (dilation == 1 ? last : last / dilation) + 1);
    }
    __device__ __forceinline__ int count() const { return end > first ? end - first : 0; }
};
