// window.cuh: windows over images, as pools and depthwise convolutions walk over them.
//
// A thread makes Q outputs one below the other, of V neighbouring channels where those lie last, or in rows V side by
// side. Threads that lie side by side make outputs that lie side by side, so whatever they read at once is one piece,
// wherever it begins; a number that several windows of a thread share is read once.
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
    Divider channels, parts, columns;  // of threads, along each axis of y
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
    mine.wo = take_rest(rest, all.columns) * (IS_LAST ? 1 : V);
    mine.ho = take_rest(rest, all.parts) * Q;
    if (!IS_LAST) mine.channel = take_rest(rest, all.channels);
    mine.image = rest;
    return mine;
}

// Calls fold(q, kh, kw, numbers) for each tap of Q outputs, in the order of the taps; numbers outside x are `empty`.
//
// from  x at (h0, w0), where the first window begins
// SW    the steps from column to column, where V outputs lie side by side
template <bool IS_LAST, int V, int Q, int KH, int KW, int SH, int SW, class T, class Fold>
__device__ __forceinline__ void walk(const T* from, int h0, int w0, int H, int W, long long row, long long column,
                                     wide_t<T> empty, Fold fold) {
    constexpr int COLUMNS = IS_LAST ? KW : KW + (V - 1) * SW;
    bool is_column[COLUMNS];
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) is_column[c] = static_cast<u32>(w0 + c) < static_cast<u32>(W);
#pragma unroll
    for (int r = 0; r < (Q - 1) * SH + KH; ++r) {
        const bool is_row = static_cast<u32>(h0 + r) < static_cast<u32>(H);
        wide_t<T> read[COLUMNS][IS_LAST ? V : 1];
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) load_or(read[c], from + c * column, is_row && is_column[c], empty);
#pragma unroll
        for (int q = 0; q < Q; ++q) {
            const int kh = r - q * SH;
            if (kh < 0 || kh >= KH) continue;
#pragma unroll
            for (int kw = 0; kw < KW; ++kw) {
                wide_t<T> numbers[V];
#pragma unroll
                for (int j = 0; j < V; ++j) numbers[j] = IS_LAST ? read[kw][j] : read[kw + j * SW][0];
                fold(q, kh, kw, numbers);
            }
        }
        from += row;
    }
}

// V neighbours of y. In rows the last may be past the end, and all are aligned where V divides the columns.
template <bool IS_LAST, class T, int V>
__device__ __forceinline__ void store_outputs(T* to, const wide_t<T> (&v)[V], int wo, int columns) {
    if (IS_LAST || columns % V == 0) {
        store_neighbours(to, v);
    } else {
#pragma unroll
        for (int j = 0; j < V; ++j)
            if (wo + j < columns) store_wide(to + j, v[j]);
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
