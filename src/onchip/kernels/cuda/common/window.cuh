// common/window.cuh: windows over images, as pools and depthwise convolutions walk over them.
//
// A thread makes Q outputs one below the other times U side by side, of V neighbouring channels where those lie last.
// Threads that lie side by side make outputs that lie side by side, so whatever they read at once is one piece,
// wherever it begins; a number that several windows of a thread share is read once. The rows of x that a thread needs
// come one after the other; what becomes of them is a Fold's:
//
//   take<K, STEP, LEAD>(r, kw, read)  taps kw .. kw + K - 1 of the r-th row: that of the u-th output is
//                                     number_of(read, LEAD + u * STEP + i)
//   end_row(r)                        all taps of the row were taken
//
// Row r is tap r - q * stride of the q-th output, where that is one of its taps: the same for all threads.
#pragma once
#include "common/fast_divide.cuh"
#include "common/accumulator.cuh"

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

template <class Index, bool IS_LAST, int V, int U, int Q>
__device__ __forceinline__ Outputs outputs_of(long long thread, const Windows& all) {
    Index rest = static_cast<Index>(thread);
    Outputs mine;
    if (IS_LAST) mine.channel = take_rest(rest, all.channels) * V;
    mine.wo = take_rest(rest, all.columns) * U;
    mine.ho = take_rest(rest, all.parts) * Q;
    if (!IS_LAST) mine.channel = take_rest(rest, all.channels);
    mine.image = rest;
    return mine;
}

// The v-th channel of column c, where a word has the V channels of a column, or in rows several columns.
template <int V, class Number, int WORDS, int SIZE>
__device__ __forceinline__ Number number_of(const Number (&read)[WORDS][SIZE], int c, int v) {
    constexpr int P = SIZE / V;
    return read[c / P][c % P * V + v];
}

// Where windows lie in x, as a thread sees them: its first one begins at (h0, w0), and `from` is there.
template <class T>
struct View {
    const T* from;
    int h0, w0;
    long long row, column;
    T empty;  // stands for numbers outside x

    __device__ __forceinline__ static bool is_in(int at, int size) {
        return static_cast<u32>(at) < static_cast<u32>(size);
    }
};

// Windows of KH x KW, their taps side by side, all unrolled: what a thread reads is on its way at once.
//
// SW       the steps from output to output, where U of them lie side by side
// P, LEAD  in rows: P columns are read at once; P divides those of x, and w0 is LEAD past a multiple of it
template <int V, int U, int Q, int P, int LEAD, int KH, int KW, int SH, int SW, class T, class Fold>
__device__ __forceinline__ void walk(const View<T>& x, int H, int W, Fold& fold) {
    constexpr int WORDS = (LEAD + KW + (U - 1) * SW + P - 1) / P;
    const T* from = x.from - LEAD * x.column;
    bool is_column[WORDS];
#pragma unroll
    for (int c = 0; c < WORDS; ++c) is_column[c] = x.is_in(x.w0 - LEAD + c * P, W);
#pragma unroll
    for (int r = 0; r < (Q - 1) * SH + KH; ++r) {
        const bool is_row = x.is_in(x.h0 + r, H);
        wide_t<T> read[WORDS][P * V];
#pragma unroll
        for (int c = 0; c < WORDS; ++c) load_or(read[c], from + c * P * x.column, is_row && is_column[c], x.empty);
        fold.template take<KW, SW, LEAD>(r, 0, read);
        fold.end_row(r);
        from += x.row;
    }
}

// The numbers of a row that a turn of walk_any needs.
template <bool SLIDES, int TURN, int V, int U, class T>
struct Strip {
    static constexpr int KEPT = SLIDES ? U - 1 : 0;  // of the turn before
    const View<T>& x;
    const T* line;
    const Axis& w;
    wide_t<T> read[SLIDES ? KEPT + TURN : U * TURN][V];

    __device__ __forceinline__ Strip(const View<T>& x, const T* line, const Axis& w) : x(x), line(line), w(w) {
#pragma unroll
        for (int c = 0; c < KEPT; ++c) load(c, c);
    }
    __device__ __forceinline__ void load(int place, int c) {
        load_or(read[place], line + c * x.column, x.is_in(x.w0 + c, w.size), x.empty);
    }
    template <int K, class Fold>
    __device__ __forceinline__ void take(int r, int kw, Fold& fold) {
        if constexpr (SLIDES) {
#pragma unroll
            for (int i = 0; i < K; ++i) load(KEPT + i, kw + KEPT + i);
            fold.template take<K, 1, 0>(r, kw, read);
#pragma unroll
            for (int c = 0; c < KEPT; ++c)
#pragma unroll
                for (int v = 0; v < V; ++v) read[c][v] = read[c + K][v];
        } else {
#pragma unroll
            for (int u = 0; u < U; ++u)
#pragma unroll
                for (int i = 0; i < K; ++i) load(u * K + i, u * w.stride + (kw + i) * w.dilation);
            fold.template take<K, K, 0>(r, kw, read);
        }
    }
};

// Windows of any size: a row is a loop over its taps, TURN at a time. Where they and the outputs lie side by side it
// SLIDES: a number is read once for all outputs of a row.
template <bool SLIDES, int TURN, int V, int U, int Q, class T, class Fold>
__device__ __forceinline__ void walk_any(const View<T>& x, const Axis& h, const Axis& w, Fold& fold) {
    const T* line = x.from;
    for (int r = 0; r < (Q - 1) * h.stride + h.taps; ++r, line += h.dilation * x.row) {
        if (!x.is_in(x.h0 + r * h.dilation, h.size)) continue;
        Strip<SLIDES, TURN, V, U, T> strip(x, line, w);
        int kw = 0;
        for (; kw + TURN <= w.taps; kw += TURN) strip.template take<TURN>(r, kw, fold);
        for (; kw < w.taps; ++kw) strip.template take<1>(r, kw, fold);
        fold.end_row(r);
    }
}

// U x V neighbours of y, of which some columns may be past the end. In rows all are aligned where U divides theirs.
template <bool IS_LAST, class T, int U, int V>
__device__ __forceinline__ void store_outputs(T* to, const wide_t<T> (&v)[U][V], int wo, const Windows& all) {
    if (!IS_LAST && all.w.count % U == 0) {
        wide_t<T> row[U];
#pragma unroll
        for (int u = 0; u < U; ++u) row[u] = v[u][0];
        store_neighbours(to, row);
    } else {
#pragma unroll
        for (int u = 0; u < U; ++u)
            if (U == 1 || wo + u < all.w.count) store_neighbours(to + u * (IS_LAST ? all.to.column : 1), v[u]);
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
