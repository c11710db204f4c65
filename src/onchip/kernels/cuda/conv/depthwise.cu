// conv/depthwise.cu: convolutions in which every channel of y is made of one channel of x. Sizes are run-time values.
//
// Idea    A thread makes Q x U x V outputs (common/window.cuh). Windows of a few common sizes are unrolled, with the weights
//         in registers: a thread's numbers are on their way at once, each is read once for all its windows. Any other
//         is a loop over the rows and their taps: a weight is read for U outputs, a number for Q x U of them. An
//         activation that follows comes along.
// Floor   Every number is read once and written once: 1024 x 64 x 32 x 32 floats are 2 x 268 MB / 4.8 TB/s = 112 us.
//         3 x 3 taps of them are 1.2 Gflop, 18 us.
// Order   A sum runs over its taps, the last axis fastest, by multiply-adds that start from zero; every PART taps it is
//         added to a total. Then comes the bias. The same as in conv/direct.cu, of which this is a case.
// Layout  x (B, C, H, W) and y (B, N, HO, WO), N a multiple of C; or both with channels last: then a thread takes four
//         or two channels where N is C and they divide it. Signals are images whose rows are those of the batch. w in
//         rows (N, taps), with channels last (taps, N); bias (N) or none.
// Shared  None: neighbours find what they share in L1.
// Limits  Any geometry; up to 2^31 numbers a row, 2^28 along an axis; x and y float32, float16 or bfloat16, w and bias
//         float32; or all float64, without an activation; sm_80 up.
#include "common/epilogue.cuh"
#include "common/window.cuh"

constexpr int PART = 128;  // terms of a sum; longer ones are sums of sums

// Out of line: a thread has many sums, and a copy for each would be most of the kernel.
__device__ __noinline__ float activate(float v, const Activation activation) { return activation(v); }

// The weights of V channels: of a few taps in registers, or of any in memory.
template <class Number, int V, int KH, int KW>
struct HeldWeights {
    Number held[KH * KW][V];

    __device__ __forceinline__ HeldWeights(const Number* weights, long long N, int) {
#pragma unroll
        for (int k = 0; k < KH * KW; ++k) load_neighbours(weights + k * N, held[k]);
    }
    __device__ __forceinline__ int tap(int kh, int kw) const { return kh * KW + kw; }
    __device__ __forceinline__ void load(int k, Number (&weight)[V]) const {
#pragma unroll
        for (int v = 0; v < V; ++v) weight[v] = held[k][v];
    }
};
template <class Number, int V>
struct HeldWeights<Number, V, 0, 0> {
    const Number* weights;
    const long long N;
    const int taps;  // along w

    __device__ __forceinline__ HeldWeights(const Number* weights, long long N, int taps)
        : weights(weights), N(N), taps(taps) {}
    __device__ __forceinline__ int tap(int kh, int kw) const { return kh * taps + kw; }
    __device__ __forceinline__ void load(int k, Number (&weight)[V]) const { load_neighbours(weights + k * N, weight); }
};

// The sums of a thread. HAS_PARTS: of more than PART taps.
template <class Number, int V, int U, int Q, bool HAS_PARTS, class Weights>
struct Convolved {
    Number sums[Q][U][V] = {}, totals[HAS_PARTS ? Q : 1][U][V] = {};
    int parts[Q] = {};
    const Weights weights;
    const int taps, stride;  // along h

    __device__ __forceinline__ Convolved(const Weights& weights, int taps, int stride)
        : weights(weights), taps(taps), stride(stride) {}
    __device__ __forceinline__ void end_part(int q) {
#pragma unroll
        for (int u = 0; u < U; ++u)
#pragma unroll
            for (int v = 0; v < V; ++v) {
                totals[q][u][v] += sums[q][u][v];
                sums[q][u][v] = 0;
            }
    }
    template <int K, int STEP, int LEAD, int WORDS, int SIZE>
    __device__ __forceinline__ void take(int r, int kw, const Number (&read)[WORDS][SIZE]) {
#pragma unroll
        for (int q = 0; q < Q; ++q) {
            if (static_cast<u32>(r - q * stride) >= static_cast<u32>(taps)) continue;
            const int k = weights.tap(r - q * stride, kw);
#pragma unroll
            for (int i = 0; i < K; ++i) {
                if constexpr (HAS_PARTS) {
                    if ((k + i) / PART != parts[q]) end_part(q);
                    parts[q] = (k + i) / PART;
                }
                Number weight[V];
                weights.load(k + i, weight);
#pragma unroll
                for (int u = 0; u < U; ++u)
#pragma unroll
                    for (int v = 0; v < V; ++v)
                        sums[q][u][v] =
                            multiply_add(number_of<V>(read, LEAD + u * STEP + i, v), weight[v], sums[q][u][v]);
            }
        }
    }
    __device__ __forceinline__ void end_row(int) {}
    __device__ __forceinline__ Number sum(int q, int u, int v) const {
        return HAS_PARTS ? sums[q][u][v] + totals[q][u][v] : sums[q][u][v];
    }
};

// KH, KW, SH, SW: the window and its steps, its taps side by side. KH = 0: any window, by KW taps at a time, and SW = 1
// where it slides.
// each  channels of y made of one of x
template <class T, bool HAS_PARTS, class Index, bool IS_LAST, int V, int U, int Q, int P, int LEAD, int KH, int KW,
          int SH, int SW>
__global__ void __launch_bounds__(WINDOW_THREADS, U * Q * V > 16 || IS_LAST && V > 1 ? 2 : 3)
depthwise(const T* x, const wide_t<T>* weights, const wide_t<T>* bias, T* y, const Windows all, Divider each, u32 code,
          u32 a_bits, u32 b_bits) {
    using Number = wide_t<T>;
    static_assert(KH * KW <= PART, "one part");
    const long long thread = static_cast<long long>(blockIdx.x) * WINDOW_THREADS + threadIdx.x;
    if (thread >= all.count) return;
    const Outputs mine = outputs_of<Index, IS_LAST, V, U, Q>(thread, all);
    const Axis &h = all.h, &w = all.w;
    const long long column = IS_LAST ? all.from.column : 1;
    const int h0 = mine.ho * (KH ? SH : h.stride) - h.before, w0 = mine.wo * w.stride - w.before;
    const u32 n = mine.channel, c = quotient(n, each);
    const T* from = x + mine.image * all.from.image + c * all.from.channel + h0 * all.from.row + w0 * column;
    // With channels last the weights of a tap lie side by side, in rows those of a channel.
    const int taps = (KH ? KH : h.taps) * (KH ? KW : w.taps);
    const long long N = IS_LAST ? all.channels.size * V : 1;
    weights += IS_LAST ? n : static_cast<long long>(n) * taps;

    using Weights = HeldWeights<Number, V, KH, KH ? KW : 0>;
    const Weights held(weights, N, w.taps);
    Convolved<Number, V, U, Q, HAS_PARTS, Weights> made(held, KH ? KH : h.taps, KH ? SH : h.stride);
    const View<T> view{from, h0, w0, all.from.row, column, T{}};
    if constexpr (KH > 0) walk<V, U, Q, P, LEAD, KH, KW, SH, SW>(view, h.size, w.size, made);
    else walk_any<SW == 1, KW, V, U, Q>(view, h, w, made);

    // A ReLU is a Clip without an upper bound; both stand here, as most activations behind a convolution do.
    const bool is_clip = code == 1 || code == 3;
    const float low = code == 3 ? __uint_as_float(a_bits) : 0.0f;
    const float high = __uint_as_float(code == 3 ? b_bits : 0x7f800000);
    const Activation other{code, __uint_as_float(a_bits), __uint_as_float(b_bits)};
    Number shift[V];
#pragma unroll
    for (int v = 0; v < V; ++v) shift[v] = bias ? bias[n + v] : 0;
    T* to = y + mine.image * all.to.image + n * all.to.channel + mine.ho * all.to.row +
            mine.wo * (IS_LAST ? all.to.column : 1);
#pragma unroll
    for (int q = 0; q < Q; ++q) {
        if (Q > 1 && mine.ho + q >= h.count) break;
        Number out[U][V];
#pragma unroll
        for (int i = 0; i < U * V; ++i) out[i / V][i % V] = made.sum(q, i / V, i % V) + shift[i % V];
        if constexpr (!is_same<T, double>) {
            if (is_clip) {
#pragma unroll
                for (int i = 0; i < U * V; ++i) out[i / V][i % V] = Clip::apply(out[i / V][i % V], low, high);
            } else if (code) {
#pragma unroll
                for (int i = 0; i < U * V; ++i) out[i / V][i % V] = activate(out[i / V][i % V], other);
            }
        }
        store_outputs<IS_LAST>(to, out, mine.wo, all);
        to += all.to.row;
    }
}
