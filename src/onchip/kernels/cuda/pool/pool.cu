// pool/pool.cu: max and average pooling in 1D and 2D.
//
// Idea    A thread computes Q x U x V outputs (common/window.cuh). Each row of x is pooled horizontally once, for all
//         windows that overlap it. Common window sizes are unrolled, with all loads of a thread in flight at once;
//         others loop over rows and taps.
// Floor   Each element is read and written once: 4096 x 64 x 56 x 56 floats by windows of 2 x 2 are
//         3.29 + 0.82 GB / 4.8 TB/s = 856 us.
// Order   Sums: taps of a row in order, then rows in order.
// Layout  x and y NCHW, or both NHWC: then a thread takes 16 B of channels if that divides C. Pairs<T> are two channels
//         in one f16x2/bf16x2 max. 1D inputs are images whose rows are those of the batch.
// Limits  Any geometry; up to 2^31 elements per row, 2^28 per axis; float32, float16, bfloat16, float64; sm_80 up.
#include "common/window.cuh"

struct Max {};
struct Mean {};           // over the elements inside x
struct MeanWithPads {};  // padding included

// Two adjacent 16-bit channels, not widened: a max is exact.
template <class T>
struct Pairs {
    u32 bits;
};
template <class T>
struct Wide<Pairs<T>> {
    using type = Pairs<T>;
};
__device__ __forceinline__ Pairs<f16> larger(Pairs<f16> a, Pairs<f16> b) {
    Pairs<f16> found;
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(found.bits) : "r"(a.bits), "r"(b.bits));
    return found;
}
__device__ __forceinline__ Pairs<bf16> larger(Pairs<bf16> a, Pairs<bf16> b) {
    Pairs<bf16> found;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(found.bits) : "r"(a.bits), "r"(b.bits));
    return found;
}

// -infinity.
template <class T>
__device__ __forceinline__ T lowest() {
    if constexpr (is_same<T, Pairs<f16>>) return {0xfc00fc00};
    else if constexpr (is_same<T, Pairs<bf16>>) return {0xff80ff80};
    else if constexpr (is_same<T, f16>) return {0xfc00};
    else if constexpr (is_same<T, bf16>) return {0xff80};
    else return -__int_as_float(0x7f800000);
}

// Accumulators of a thread's windows: within a row (across), then over rows (found).
template <class How, class Element, int V, int U, int Q>
struct Pooled {
    Element found[Q][U][V], across[U][V];
    const int taps, stride;  // along h

    __device__ __forceinline__ Pooled(int taps, int stride, Element empty) : taps(taps), stride(stride) {
#pragma unroll
        for (int i = 0; i < Q * U * V; ++i) found[i / (U * V)][i / V % U][i % V] = empty;
    }
    static __device__ __forceinline__ Element both(Element a, Element b) {
        if constexpr (is_same<How, Max>) return larger(a, b);
        else return a + b;
    }
    template <int K, int STEP, int LEAD, int WORDS, int SIZE>
    __device__ __forceinline__ void take(int, int kw, const Element (&read)[WORDS][SIZE]) {
#pragma unroll
        for (int i = 0; i < K; ++i)
#pragma unroll
            for (int u = 0; u < U; ++u)
#pragma unroll
                for (int v = 0; v < V; ++v) {
                    const Element number = number_of<V>(read, LEAD + u * STEP + i, v);
                    across[u][v] = i == 0 && kw == 0 ? number : both(across[u][v], number);
                }
    }
    __device__ __forceinline__ void end_row(int r) {
#pragma unroll
        for (int q = 0; q < Q; ++q) {
            if (static_cast<u32>(r - q * stride) >= static_cast<u32>(taps)) continue;
#pragma unroll
            for (int u = 0; u < U; ++u)
#pragma unroll
                for (int v = 0; v < V; ++v) found[q][u][v] = both(found[q][u][v], across[u][v]);
        }
    }
};

// KH, KW, SH, SW: window and stride, dilation 1. KH = 0: any window, KW taps at a time; SW = 1: stride and dilation 1.
template <class How, class T, class Index, bool IS_LAST, int V, int U, int Q, int P, int LEAD, int KH, int KW, int SH,
          int SW>
__global__ void __launch_bounds__(WINDOW_THREADS) pool(const T* x, T* y, const Windows all) {
    using Element = acc_t<T>;
    const long long thread = static_cast<long long>(blockIdx.x) * WINDOW_THREADS + threadIdx.x;
    if (thread >= all.count) return;
    const Outputs mine = outputs_of<Index, IS_LAST, V, U, Q>(thread, all);
    const Axis &h = all.h, &w = all.w;
    const long long column = IS_LAST ? all.from.column : 1;
    const int h0 = mine.ho * (KH ? SH : h.stride) - h.before, w0 = mine.wo * w.stride - w.before;
    const T* from = x + mine.image * all.from.image + mine.channel * all.from.channel + h0 * all.from.row + w0 * column;

    const T empty = is_same<How, Max> ? lowest<T>() : T{};
    const View<T> view{from, h0, w0, all.from.row, column, empty};
    Pooled<How, Element, V, U, Q> pooled(KH ? KH : h.taps, KH ? SH : h.stride, load_acc(&empty));
    if constexpr (KH > 0) walk<V, U, Q, P, LEAD, KH, KW, SH, SW>(view, h.size, w.size, pooled);
    else walk_any<SW == 1, KW, V, U, Q>(view, h, w, pooled);

    // Divisor of a mean: valid taps down times valid taps across.
    const auto count_taps = [](int begin, int taps, int dilation, const Axis& axis) {
        if (!is_same<How, MeanWithPads>) return Taps(begin, taps, dilation, axis.size).count();
        Taps with_pads(begin, taps, dilation, axis.end);
        with_pads.first = 0;
        return with_pads.count();
    };
    // 16-bit outputs need no exact division: multiply by two reciprocals.
    constexpr bool IS_SHORT = sizeof(T) == 2;
    int across[U];
    float share[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
        across[u] = count_taps(w0 + u * (KH ? SW : w.stride), KH ? KW : w.taps, KH ? 1 : w.dilation, w);
        share[u] = __fdividef(1.0f, across[u]);
    }

    T* to = y + mine.image * all.to.image + mine.channel * all.to.channel + mine.ho * all.to.row +
            mine.wo * (IS_LAST ? all.to.column : 1);
#pragma unroll
    for (int q = 0; q < Q; ++q) {
        if (Q > 1 && mine.ho + q >= h.count) break;
        if constexpr (!is_same<How, Max>) {
            const int down = count_taps(h0 + q * (KH ? SH : h.stride), KH ? KH : h.taps, KH ? 1 : h.dilation, h);
            const float part = __fdividef(1.0f, down);
#pragma unroll
            for (int i = 0; i < U * V; ++i) {
                Element& sum = pooled.found[q][i / V][i % V];
                sum = IS_SHORT ? sum * (part * share[i / V]) : sum / (down * across[i / V]);
            }
        }
        store_outputs<IS_LAST>(to, pooled.found[q], mine.wo, all);
        to += all.to.row;
    }
}
