// pool/pool.cu: max and average pooling in 1D and 2D.
//
// Idea    A thread computes Q x U x V outputs (common/window.cuh). Each row of x is pooled horizontally once, for all
//         windows that overlap it. Common window sizes are unrolled, with all loads of a thread in flight at once;
//         others loop over rows and taps.
// Floor   Each element is read and written once: 4096 x 64 x 56 x 56 floats by windows of 2 x 2 are
//         3.29 + 0.82 GB / 4.8 TB/s = 856 us.
// Order   Sums: taps of a row in order, then rows in order.
// Layout  x and y NCHW, or both NHWC: then a thread loads 16 B of channels if that divides C. Pairs<T> are two channels
//         in one f16x2/bf16x2 max. 1D inputs use the batch as the axis h.
// Limits  Any geometry; up to 2^31 elements per row, 2^28 per axis; float32, float16, bfloat16, float64; sm_80 up.
#include "common/window.cuh"

struct Max {};
struct Mean {};  // over the elements inside x
struct MeanWithPads {};  // padding included

// Two adjacent 16-bit channels, not widened: a max is exact.
template <class T>
struct Pairs {
    u32 bits;
};
template <class T>
struct AccumulatorType<Pairs<T>> {
    using type = Pairs<T>;
};
__device__ __forceinline__ Pairs<f16> larger(Pairs<f16> a, Pairs<f16> b) {
    Pairs<f16> result;
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(result.bits) : "r"(a.bits), "r"(b.bits));
    return result;
}
__device__ __forceinline__ Pairs<bf16> larger(Pairs<bf16> a, Pairs<bf16> b) {
    Pairs<bf16> result;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(result.bits) : "r"(a.bits), "r"(b.bits));
    return result;
}

template <class T>
__device__ __forceinline__ T minus_infinity() {
    if constexpr (is_same<T, Pairs<f16>>) return {0xfc00fc00};
    else if constexpr (is_same<T, Pairs<bf16>>) return {0xff80ff80};
    else if constexpr (is_same<T, f16>) return {0xfc00};
    else if constexpr (is_same<T, bf16>) return {0xff80};
    else return -__int_as_float(0x7f800000);
}

// A Fold of common/window.cuh: accumulates each window within a row (row_result), then over rows (result).
template <class Mode, class Element, int V, int U, int Q>
struct WindowResults {
    Element result[Q][U][V], row_result[U][V];
    const int taps, stride;  // along h

    __device__ __forceinline__ WindowResults(int taps, int stride, Element empty) : taps(taps), stride(stride) {
#pragma unroll
        for (int i = 0; i < Q * U * V; ++i) result[i / (U * V)][i / V % U][i % V] = empty;
    }
    static __device__ __forceinline__ Element combine(Element a, Element b) {
        if constexpr (is_same<Mode, Max>) return larger(a, b);
        else return a + b;
    }
    template <int K, int STEP, int LEAD, int VECTORS, int SIZE>
    __device__ __forceinline__ void accumulate(int, int kw, const Element (&read)[VECTORS][SIZE]) {
#pragma unroll
        for (int i = 0; i < K; ++i)
#pragma unroll
            for (int u = 0; u < U; ++u)
#pragma unroll
                for (int v = 0; v < V; ++v) {
                    const Element value = element_of<V>(read, LEAD + u * STEP + i, v);
                    row_result[u][v] = i == 0 && kw == 0 ? value : combine(row_result[u][v], value);
                }
    }
    __device__ __forceinline__ void end_row(int r) {
#pragma unroll
        for (int q = 0; q < Q; ++q) {
            if (static_cast<u32>(r - q * stride) >= static_cast<u32>(taps)) continue;
#pragma unroll
            for (int u = 0; u < U; ++u)
#pragma unroll
                for (int v = 0; v < V; ++v) result[q][u][v] = combine(result[q][u][v], row_result[u][v]);
        }
    }
};

// KH, KW, SH, SW: window and stride, dilation 1. KH = 0: any window, KW taps at a time; SW = 1: stride and dilation 1.
template <class Mode, class T, class Index, bool IS_NHWC, int V, int U, int Q, int P, int LEAD, int KH, int KW, int SH,
          int SW>
__global__ void __launch_bounds__(WINDOW_THREADS) pool(const T* x, T* y, const Windows windows) {
    using Element = acc_t<T>;
    const long long thread = static_cast<long long>(blockIdx.x) * WINDOW_THREADS + threadIdx.x;
    if (thread >= windows.count) return;
    const Outputs out = outputs_of<Index, IS_NHWC, V, U, Q>(thread, windows);
    const Axis &h = windows.h, &w = windows.w;
    const long long column = IS_NHWC ? windows.x.column : 1;
    const int h0 = out.ho * (KH ? SH : h.stride) - h.before, w0 = out.wo * w.stride - w.before;
    const T* from = x + out.image * windows.x.image + out.channel * windows.x.channel +
                    h0 * windows.x.row + w0 * column;

    const T empty = is_same<Mode, Max> ? minus_infinity<T>() : T{};
    const View<T> view{from, h0, w0, windows.x.row, column, empty};
    WindowResults<Mode, Element, V, U, Q> acc(KH ? KH : h.taps, KH ? SH : h.stride, load_acc(&empty));
    if constexpr (KH > 0) walk<V, U, Q, P, LEAD, KH, KW, SH, SW>(view, h.size, w.size, acc);
    else walk_any<SW == 1, KW, V, U, Q>(view, h, w, acc);

    // Divisor of a mean: valid taps along h times valid taps along w.
    const auto count_taps = [](int begin, int taps, int dilation, const Axis& axis) {
        if (!is_same<Mode, MeanWithPads>) return Taps(begin, taps, dilation, axis.size).count();
        Taps with_pads(begin, taps, dilation, axis.end);
        with_pads.first = 0;
        return with_pads.count();
    };
    // 16-bit outputs need no exact division: multiply by two reciprocals.
    constexpr bool IS_SHORT = sizeof(T) == 2;
    int taps_w[U];
    float inverse_w[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
        taps_w[u] = count_taps(w0 + u * (KH ? SW : w.stride), KH ? KW : w.taps, KH ? 1 : w.dilation, w);
        inverse_w[u] = __fdividef(1.0f, taps_w[u]);
    }

    T* to = y + out.image * windows.y.image + out.channel * windows.y.channel + out.ho * windows.y.row +
            out.wo * (IS_NHWC ? windows.y.column : 1);
#pragma unroll
    for (int q = 0; q < Q; ++q) {
        if (Q > 1 && out.ho + q >= h.count) break;
        if constexpr (!is_same<Mode, Max>) {
            const int taps_h = count_taps(h0 + q * (KH ? SH : h.stride), KH ? KH : h.taps, KH ? 1 : h.dilation, h);
            const float inverse_h = __fdividef(1.0f, taps_h);
#pragma unroll
            for (int i = 0; i < U * V; ++i) {
                Element& sum = acc.result[q][i / V][i % V];
                sum = IS_SHORT ? sum * (inverse_h * inverse_w[i / V]) : sum / (taps_h * taps_w[i / V]);
            }
        }
        store_outputs<IS_NHWC>(to, acc.result[q], out.wo, windows);
        to += windows.y.row;
    }
}
