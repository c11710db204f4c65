// conv/depthwise.cu: depthwise convolution with a fused activation. Sizes are run-time values.
//
// Idea    A thread computes Q x U x V outputs (common/window.cuh). Common window sizes are unrolled with the weights in
//         registers: all loads of a thread are in flight at once, and each element is loaded once for all its windows.
//         Other sizes loop over rows and taps: a weight is loaded per U outputs, an element per Q x U.
// Floor   One read and one write per element: 1024 x 64 x 32 x 32 floats are 2 x 268 MB / 4.8 TB/s = 112 us; 3 x 3 taps
//         of them are 1.2 Gflop, 18 us.
// Order   fma over the taps, last axis fastest, from zero; every PART taps the sum is added to a total. Then the bias.
//         The same as in conv/direct.cu, of which this is a special case.
// Layout  x (B, C, H, W) and y (B, N, HO, WO), N a multiple of C; or both NHWC, with V = 4 or 2 channels per thread if
//         N = C is a multiple of V. 1D signals are images whose rows are batch rows. w (N, taps), NHWC: (taps, N); bias
//         (N) or nullptr. No shared memory: threads share loads through L1.
// Limits  Any geometry; up to 2^31 elements per image, 2^28 along an axis; x, y float32, float16 or bfloat16 with w,
//         bias float32; or all float64 without an activation; sm_80 up.
#include "common/epilogue.cuh"
#include "common/window.cuh"

constexpr int PART = 128;  // K elements per partial sum

// Not inlined: a thread has many outputs, and a copy for each would dominate the code size.
__device__ __noinline__ float activate(float v, const Activation activation) { return activation(v); }

// Weights of V channels: in registers for small windows, else in global memory.
template <class Element, int V, int KH, int KW>
struct TapWeights {
    Element registers[KH * KW][V];

    __device__ __forceinline__ TapWeights(const Element* weights, long long N, int) {
#pragma unroll
        for (int k = 0; k < KH * KW; ++k) load_contiguous(weights + k * N, registers[k]);
    }
    __device__ __forceinline__ int tap(int kh, int kw) const { return kh * KW + kw; }
    __device__ __forceinline__ void load(int k, Element (&weight)[V]) const {
#pragma unroll
        for (int v = 0; v < V; ++v) weight[v] = registers[k][v];
    }
};
template <class Element, int V>
struct TapWeights<Element, V, 0, 0> {
    const Element* weights;
    const long long N;
    const int taps;  // taps per row

    __device__ __forceinline__ TapWeights(const Element* weights, long long N, int taps)
        : weights(weights), N(N), taps(taps) {}
    __device__ __forceinline__ int tap(int kh, int kw) const { return kh * taps + kw; }
    __device__ __forceinline__ void load(int k, Element (&w)[V]) const { load_contiguous(weights + k * N, w); }
};

// A thread's accumulators. IS_LONG: more than PART taps.
template <class Element, int V, int U, int Q, bool IS_LONG, class Weights>
struct WindowSums {
    Element sums[Q][U][V] = {}, totals[IS_LONG ? Q : 1][U][V] = {};
    int part_index[Q] = {};
    const Weights weights;
    const int taps, stride;  // along h

    __device__ __forceinline__ WindowSums(const Weights& weights, int taps, int stride)
        : weights(weights), taps(taps), stride(stride) {}
    __device__ __forceinline__ void end_partial_sum(int q) {
#pragma unroll
        for (int u = 0; u < U; ++u)
#pragma unroll
            for (int v = 0; v < V; ++v) {
                totals[q][u][v] += sums[q][u][v];
                sums[q][u][v] = 0;
            }
    }
    template <int K, int STEP, int LEAD, int VECTORS, int SIZE>
    __device__ __forceinline__ void accumulate(int r, int kw, const Element (&read)[VECTORS][SIZE]) {
#pragma unroll
        for (int q = 0; q < Q; ++q) {
            if (static_cast<u32>(r - q * stride) >= static_cast<u32>(taps)) continue;
            const int k = weights.tap(r - q * stride, kw);
#pragma unroll
            for (int i = 0; i < K; ++i) {
                if constexpr (IS_LONG) {
                    if ((k + i) / PART != part_index[q]) end_partial_sum(q);
                    part_index[q] = (k + i) / PART;
                }
                Element weight[V];
                weights.load(k + i, weight);
#pragma unroll
                for (int u = 0; u < U; ++u)
#pragma unroll
                    for (int v = 0; v < V; ++v)
                        sums[q][u][v] =
                            multiply_add(element_of<V>(read, LEAD + u * STEP + i, v), weight[v], sums[q][u][v]);
            }
        }
    }
    __device__ __forceinline__ void end_row(int) {}
    __device__ __forceinline__ Element sum(int q, int u, int v) const {
        return IS_LONG ? sums[q][u][v] + totals[q][u][v] : sums[q][u][v];
    }
};

// KH, KW, SH, SW: window and strides, no dilation. KH = 0: any window, KW taps at a time; SW = 1: stride, dilation 1.
// multiplier  output channels per input channel
template <class T, bool IS_LONG, class Index, bool IS_NHWC, int V, int U, int Q, int P, int LEAD, int KH, int KW,
          int SH, int SW>
__global__ void __launch_bounds__(WINDOW_THREADS, U * Q * V > 16 || IS_NHWC && V > 1 ? 2 : 3)
depthwise(const T* x, const acc_t<T>* weights, const acc_t<T>* bias, T* y, const Windows windows, Divider multiplier,
          u32 code, u32 a_bits, u32 b_bits) {
    using Element = acc_t<T>;
    static_assert(KH * KW <= PART, "unrolled windows fit in one partial sum");
    const long long thread = static_cast<long long>(blockIdx.x) * WINDOW_THREADS + threadIdx.x;
    if (thread >= windows.count) return;
    const Outputs outputs = outputs_of<Index, IS_NHWC, V, U, Q>(thread, windows);
    const Axis &h = windows.h, &w = windows.w;
    const long long column = IS_NHWC ? windows.x.column : 1;
    const int h0 = outputs.ho * (KH ? SH : h.stride) - h.before, w0 = outputs.wo * w.stride - w.before;
    const u32 n = outputs.channel, c = quotient(n, multiplier);
    const T* from = x + outputs.image * windows.x.image + c * windows.x.channel + h0 * windows.x.row + w0 * column;
    // NHWC: the weights of a tap are contiguous. NCHW: those of a channel.
    const int taps = (KH ? KH : h.taps) * (KH ? KW : w.taps);
    const long long N = IS_NHWC ? windows.channels.size * V : 1;
    weights += IS_NHWC ? n : static_cast<long long>(n) * taps;

    using Weights = TapWeights<Element, V, KH, KH ? KW : 0>;
    const Weights tap_weights(weights, N, w.taps);
    WindowSums<Element, V, U, Q, IS_LONG, Weights> acc(tap_weights, KH ? KH : h.taps, KH ? SH : h.stride);
    const View<T> view{from, h0, w0, windows.x.row, column, T{}};
    if constexpr (KH > 0) walk<V, U, Q, P, LEAD, KH, KW, SH, SW>(view, h.size, w.size, acc);
    else walk_any<SW == 1, KW, V, U, Q>(view, h, w, acc);

    // ReLU is a Clip without an upper bound. Both are inlined: most convolutions are followed by one of them.
    const bool is_clip = code == 1 || code == 3;
    const float low = code == 3 ? __uint_as_float(a_bits) : 0.0f;
    const float high = __uint_as_float(code == 3 ? b_bits : 0x7f800000);
    const Activation activation{code, __uint_as_float(a_bits), __uint_as_float(b_bits)};
    Element bias_values[V];
#pragma unroll
    for (int v = 0; v < V; ++v) bias_values[v] = bias ? bias[n + v] : 0;
    T* to = y + outputs.image * windows.y.image + n * windows.y.channel + outputs.ho * windows.y.row +
            outputs.wo * (IS_NHWC ? windows.y.column : 1);
#pragma unroll
    for (int q = 0; q < Q; ++q) {
        if (Q > 1 && outputs.ho + q >= h.count) break;
        Element out[U][V];
#pragma unroll
        for (int i = 0; i < U * V; ++i) out[i / V][i % V] = acc.sum(q, i / V, i % V) + bias_values[i % V];
        if constexpr (!is_same<T, double>) {
            if (is_clip) {
#pragma unroll
                for (int i = 0; i < U * V; ++i) out[i / V][i % V] = Clip::apply(out[i / V][i % V], low, high);
            } else if (code) {
#pragma unroll
                for (int i = 0; i < U * V; ++i) out[i / V][i % V] = activate(out[i / V][i % V], activation);
            }
        }
        store_outputs<IS_NHWC>(to, out, outputs.wo, windows);
        to += windows.y.row;
    }
}
