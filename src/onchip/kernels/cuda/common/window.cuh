// common/window.cuh: sliding windows over images, for pools and depthwise convolutions.
//
// A thread computes Q x U outputs (rows x columns), in NHWC for V contiguous channels. Adjacent threads compute
// adjacent outputs, so loads are coalesced; an input that several windows of a thread share is loaded once. The thread
// walks over its input rows in order and passes them to a Fold:
//
//   accumulate<K, STEP, LEAD>(r, kw, read)  taps kw .. kw + K - 1 of row r; tap i of output u is
//                                           element_of(read, LEAD + u * STEP + i)
//   end_row(r)                              called after all taps of the row
//
// Row r is tap r - q * stride of output q, where that is a valid tap: the same for all threads.
#pragma once
#include "common/fast_divide.cuh"
#include "common/accumulator.cuh"

constexpr int WINDOW_THREADS = 256;

// One axis: input size, output count, window geometry. Taps before `end` count in an average that includes padding.
struct Axis {
    int size, count, taps, stride, before, dilation, end;
};

// Strides of an array, in elements.
struct Strides {
    long long image, channel, row, column;
};

// Launch parameters: thread count, dividers that decode a thread index, axes and strides.
struct Windows {
    Divider channels, rows, columns;  // number of threads along each axis of y
    Axis h, w;
    Strides x, y;
    long long count;
};

// The first output of a thread.
struct Outputs {
    long long image;
    u32 channel;
    int ho, wo;
};

template <class Index, bool IS_NHWC, int V, int U, int Q>
__device__ __forceinline__ Outputs outputs_of(long long thread, const Windows& windows) {
    Index index = static_cast<Index>(thread);
    Outputs outputs;
    if (IS_NHWC) outputs.channel = pop_index(index, windows.channels) * V;
    outputs.wo = pop_index(index, windows.columns) * U;
    outputs.ho = pop_index(index, windows.rows) * Q;
    if (!IS_NHWC) outputs.channel = pop_index(index, windows.channels);
    outputs.image = index;
    return outputs;
}

// Channel v of column c. A vector holds the V channels of one column (NHWC) or several columns (NCHW).
template <int V, class Element, int VECTORS, int SIZE>
__device__ __forceinline__ Element element_of(const Element (&read)[VECTORS][SIZE], int c, int v) {
    constexpr int P = SIZE / V;
    return read[c / P][c % P * V + v];
}

// A thread's view of x: its first window begins at (h0, w0), where `from` points.
template <class T>
struct View {
    const T* from;
    int h0, w0;
    long long row, column;  // strides
    T empty;  // padding value

    __device__ __forceinline__ static bool is_in(int at, int size) {
        return static_cast<u32>(at) < static_cast<u32>(size);
    }
};

// Undilated windows of KH x KW, fully unrolled: all loads of a thread are in flight together.
//
// SW       column stride between the U outputs
// P, LEAD  NCHW: P columns per vector load; P divides the width of x, and w0 is LEAD past a multiple of P
template <int V, int U, int Q, int P, int LEAD, int KH, int KW, int SH, int SW, class T, class Fold>
__device__ __forceinline__ void walk(const View<T>& x, int H, int W, Fold& fold) {
    constexpr int VECTORS = (LEAD + KW + (U - 1) * SW + P - 1) / P;
    const T* from = x.from - LEAD * x.column;
    bool is_column[VECTORS];
#pragma unroll
    for (int c = 0; c < VECTORS; ++c) is_column[c] = x.is_in(x.w0 - LEAD + c * P, W);
#pragma unroll
    for (int r = 0; r < (Q - 1) * SH + KH; ++r) {
        const bool is_row = x.is_in(x.h0 + r, H);
        acc_t<T> read[VECTORS][P * V];
#pragma unroll
        for (int c = 0; c < VECTORS; ++c) load_or(read[c], from + c * P * x.column, is_row && is_column[c], x.empty);
        fold.template accumulate<KW, SW, LEAD>(r, 0, read);
        fold.end_row(r);
        from += x.row;
    }
}

// The inputs of a row that one iteration of walk_any needs, in registers.
template <bool SLIDES, int PASS_TAPS, int V, int U, class T>
struct RowWindow {
    static constexpr int REUSED = SLIDES ? U - 1 : 0;  // columns reused from the previous iteration
    const View<T>& x;
    const T* line;
    const Axis& w;
    acc_t<T> read[SLIDES ? REUSED + PASS_TAPS : U * PASS_TAPS][V];

    __device__ __forceinline__ RowWindow(const View<T>& x, const T* line, const Axis& w) : x(x), line(line), w(w) {
#pragma unroll
        for (int c = 0; c < REUSED; ++c) load(c, c);
    }
    __device__ __forceinline__ void load(int slot, int c) {
        load_or(read[slot], line + c * x.column, x.is_in(x.w0 + c, w.size), x.empty);
    }
    template <int K, class Fold>
    __device__ __forceinline__ void accumulate(int r, int kw, Fold& fold) {
        if constexpr (SLIDES) {
#pragma unroll
            for (int i = 0; i < K; ++i) load(REUSED + i, kw + REUSED + i);
            fold.template accumulate<K, 1, 0>(r, kw, read);
#pragma unroll
            for (int c = 0; c < REUSED; ++c)
#pragma unroll
                for (int v = 0; v < V; ++v) read[c][v] = read[c + K][v];
        } else {
#pragma unroll
            for (int u = 0; u < U; ++u)
#pragma unroll
                for (int i = 0; i < K; ++i) load(u * K + i, u * w.stride + (kw + i) * w.dilation);
            fold.template accumulate<K, K, 0>(r, kw, read);
        }
    }
};

// Windows of any size: loops over the taps of a row, PASS_TAPS at a time. SLIDES (stride and dilation 1): each input is
// loaded once for all outputs of a row.
template <bool SLIDES, int PASS_TAPS, int V, int U, int Q, class T, class Fold>
__device__ __forceinline__ void walk_any(const View<T>& x, const Axis& h, const Axis& w, Fold& fold) {
    const T* line = x.from;
    for (int r = 0; r < (Q - 1) * h.stride + h.taps; ++r, line += h.dilation * x.row) {
        if (!x.is_in(x.h0 + r * h.dilation, h.size)) continue;
        RowWindow<SLIDES, PASS_TAPS, V, U, T> window(x, line, w);
        int kw = 0;
        for (; kw + PASS_TAPS <= w.taps; kw += PASS_TAPS) window.template accumulate<PASS_TAPS>(r, kw, fold);
        for (; kw < w.taps; ++kw) window.template accumulate<1>(r, kw, fold);
        fold.end_row(r);
    }
}

// Stores U x V outputs; columns past the end are skipped. NCHW: one aligned vector where U divides the row.
template <bool IS_NHWC, class T, int U, int V>
__device__ __forceinline__ void store_outputs(T* to, const acc_t<T> (&v)[U][V], int wo, const Windows& windows) {
    if (!IS_NHWC && windows.w.count % U == 0) {
        acc_t<T> row[U];
#pragma unroll
        for (int u = 0; u < U; ++u) row[u] = v[u][0];
        store_contiguous(to, row);
    } else {
#pragma unroll
        for (int u = 0; u < U; ++u)
            if (U == 1 || wo + u < windows.w.count) store_contiguous(to + u * (IS_NHWC ? windows.y.column : 1), v[u]);
    }
}

// The taps of a window starting at `begin` that fall inside 0 .. size - 1.
struct Taps {
    int first, end;

    __device__ __forceinline__ Taps(int begin, int taps, int dilation, int size) {
        first = begin >= 0 ? 0 : dilation == 1 ? -begin : (dilation - 1 - begin) / dilation;
        const int last = size - 1 - begin;
        end = last < 0 ? 0 : min(taps, (dilation == 1 ? last : last / dilation) + 1);
    }
    __device__ __forceinline__ int count() const { return end > first ? end - first : 0; }
};
