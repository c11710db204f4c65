// depthwise.cu: convolutions in which every channel of y is made of one channel of x. Sizes are run-time values.
//
// Idea    A thread makes Q x V outputs (window.cuh), with the weights of its channel in registers.
//         Windows of a few common sizes are unrolled, so that a thread's numbers are on their way at once and each is
//         read once for all its windows; any other is a loop over the taps that are inside. An activation that
//         follows comes along.
// Floor   Every number is read once and written once: 1024 x 64 x 32 x 32 floats are 2 x 268 MB / 4.8 TB/s = 112 us.
//         3 x 3 taps of them are 1.2 Gflop, 18 us.
// Order   A sum runs over its taps, the last axis fastest, by multiply-adds that start from zero; every PART taps it is
//         added to a total. Then comes the bias. The same as in conv.cu, of which this is a case.
// Layout  x (B, C, H, W) and y (B, N, HO, WO), N a multiple of C; or both with channels last: then a thread takes four
//         or two channels where N is C and they divide it. Signals are images whose rows are those of the batch. w in rows
//         (N, taps), with channels last (taps, N); bias (N) or none.
// Limits  Any geometry; up to 2^31 numbers a row; x and y float32, float16 or bfloat16, w and bias float32; or all
//         float64, without an activation; sm_80 up.
#include "product.cuh"
#include "window.cuh"

constexpr int PART = 512;  // terms of a sum; longer ones are sums of sums

// Out of line: a thread has many sums, and a copy for each would be most of the kernel.
__device__ __noinline__ float activate(float v, const Activation activation) { return activation(v); }

// KH, KW, SH, SW: the window and its steps, its taps side by side; or 0: any, and Q is 1. SW is 0 where it does not matter.
// each  channels of y made of one of x
template <class T, class Index, bool IS_LAST, int V, int Q, int KH, int KW, int SH, int SW>
__global__ void __launch_bounds__(WINDOW_THREADS, IS_LAST && V > 1 ? 2 : 3)
depthwise(const T* x, const wide_t<T>* weights, const wide_t<T>* bias, T* y, const Windows all, Divider each, u32 code,
          u32 a_bits, u32 b_bits) {
    using Number = wide_t<T>;
    constexpr int EACH = IS_LAST ? V : 1;  // channels
    const long long thread = static_cast<long long>(blockIdx.x) * WINDOW_THREADS + threadIdx.x;
    if (thread >= all.count) return;
    const Outputs mine = outputs_of<Index, IS_LAST, V, Q>(thread, all);
    const Axis &h = all.h, &w = all.w;
    const long long column = IS_LAST ? all.from.column : 1;
    const int h0 = mine.ho * (KH ? SH : h.stride) - h.before, w0 = mine.wo * w.stride - w.before;
    const u32 n = mine.channel, c = quotient(n, each);
    const T* from = x + mine.image * all.from.image + c * all.from.channel + h0 * all.from.row + w0 * column;
    // With channels last the weights of a tap lie side by side, in rows those of a channel.
    const int taps = (KH ? KH : h.taps) * (KW ? KW : w.taps);
    const long long N = IS_LAST ? all.channels.size * V : 1;
    weights += IS_LAST ? n : static_cast<long long>(n) * taps;

    Number sums[Q][V] = {};
    if constexpr (KH > 0) {
        static_assert(KH * KW <= PART, "one part");
        Number held[KH * KW][EACH];
#pragma unroll
        for (int k = 0; k < KH * KW; ++k) load_neighbours(weights + k * N, held[k]);
        const auto fold = [&](int q, int kh, int kw, const Number(&v)[V]) {
#pragma unroll
            for (int j = 0; j < V; ++j) sums[q][j] = multiply_add(v[j], held[kh * KW + kw][j % EACH], sums[q][j]);
        };
        walk<IS_LAST, V, Q, KH, KW, SH, SW>(from, h0, w0, h.size, w.size, all.from.row, column, Number(0), fold);
    } else {
        const Taps down(h0, h.taps, h.dilation, h.size), across(w0, w.taps, w.dilation, w.size);
        Number total[V] = {};
        int part = 0;
        for (int kh = down.first; kh < down.end; ++kh)
            for (int kw = across.first; kw < across.end; ++kw) {
                const int k = kh * w.taps + kw;
                if (k / PART != part) {
                    part = k / PART;
#pragma unroll
                    for (int j = 0; j < V; ++j) {
                        total[j] += sums[0][j];
                        sums[0][j] = 0;
                    }
                }
                Number v[V], weight[V];
                load_neighbours(from + kh * h.dilation * all.from.row + kw * w.dilation * column, v);
                load_neighbours(weights + k * N, weight);
#pragma unroll
                for (int j = 0; j < V; ++j) sums[0][j] = multiply_add(v[j], weight[j], sums[0][j]);
            }
#pragma unroll
        for (int j = 0; j < V; ++j) sums[0][j] += total[j];
    }

    // A ReLU is a Clip without an upper bound; both stand here, as most activations behind a convolution do.
    const bool is_clip = code == 1 || code == 3;
    const float low = code == 3 ? __uint_as_float(a_bits) : 0.0f;
    const float high = __uint_as_float(code == 3 ? b_bits : 0x7f800000);
    Number shift[EACH];
#pragma unroll
    for (int j = 0; j < EACH; ++j) shift[j] = bias ? bias[n + j] : 0;
    T* to = y + mine.image * all.to.image + n * all.to.channel + mine.ho * all.to.row +
            mine.wo * (IS_LAST ? all.to.column : 1);
#pragma unroll
    for (int q = 0; q < Q; ++q) {
        if (Q > 1 && mine.ho + q >= h.count) break;
#pragma unroll
        for (int j = 0; j < V; ++j) {
            sums[q][j] += shift[j % EACH];
            if constexpr (!is_same<T, double>) {
                if (is_clip) sums[q][j] = Clip::apply(sums[q][j], low, high);
                else if (code) sums[q][j] = activate(sums[q][j], {code, __uint_as_float(a_bits), __uint_as_float(b_bits)});
            }
        }
        store_outputs<IS_LAST>(to, sums[q], mine.wo, w.count);
        to += all.to.row;
    }
}
