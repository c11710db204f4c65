// pool.cu: the largest or the mean of every window of an image, or of a signal.
//
// Idea    A thread makes Q x V outputs (window.cuh). Windows of a few common sizes are unrolled, and
//         all that a thread reads is on its way at once; any other window is a loop over the taps that are inside.
// Floor   Every number is read once and written once: 4096 x 64 x 56 x 56 floats by windows of 2 x 2 are
//         3.29 + 0.82 GB / 4.8 TB/s = 856 us.
// Order   Of a sum: tap by tap, the last axis fastest.
// Layout  x and y lie in rows (B, C, H, W), or both with channels last, (B, H, W, C): then a thread takes 16 B of
//         channels where they divide them. Signals are images whose rows are those of the batch.
// Limits  Any geometry; up to 2^31 numbers a row; float32, float16, bfloat16, float64; sm_80 up.
#include "window.cuh"

struct Max {};
struct Mean {};           // over what it finds in x
struct MeanWithPads {};  // and over the pads

// KH, KW, SH, SW: the window and its steps, its taps side by side; or 0: any, and Q is 1. SW is 0 where it does not matter.
template <class How, class T, class Index, bool IS_LAST, int V, int Q, int KH, int KW, int SH, int SW>
__global__ void __launch_bounds__(WINDOW_THREADS) pool(const T* x, T* y, const Windows all) {
    using Number = wide_t<T>;
    const long long thread = static_cast<long long>(blockIdx.x) * WINDOW_THREADS + threadIdx.x;
    if (thread >= all.count) return;
    const Outputs mine = outputs_of<Index, IS_LAST, V, Q>(thread, all);
    const Axis &h = all.h, &w = all.w;
    const long long column = IS_LAST ? all.from.column : 1;
    const int h0 = mine.ho * (KH ? SH : h.stride) - h.before, w0 = mine.wo * w.stride - w.before;
    const T* from = x + mine.image * all.from.image + mine.channel * all.from.channel + h0 * all.from.row + w0 * column;

    const Number empty = is_same<How, Max> ? -__int_as_float(0x7f800000) : 0.0f;
    Number found[Q][V];
    const auto fold = [&](int q, int, int, const Number(&v)[V]) {
#pragma unroll
        for (int j = 0; j < V; ++j)
            found[q][j] = is_same<How, Max> ? larger(found[q][j], v[j]) : found[q][j] + v[j];
    };
#pragma unroll
    for (int q = 0; q < Q; ++q)
#pragma unroll
        for (int j = 0; j < V; ++j) found[q][j] = empty;
    if constexpr (KH > 0) {
        walk<IS_LAST, V, Q, KH, KW, SH, SW>(from, h0, w0, h.size, w.size, all.from.row, column, empty, fold);
    } else {
        const Taps down(h0, h.taps, h.dilation, h.size), across(w0, w.taps, w.dilation, w.size);
        for (int kh = down.first; kh < down.end; ++kh)
            for (int kw = across.first; kw < across.end; ++kw) {
                Number v[V];
                load_neighbours(from + kh * h.dilation * all.from.row + kw * w.dilation * column, v);
                fold(0, kh, kw, v);
            }
    }

    // What a mean is taken over: so many taps down times so many across.
    constexpr int COLUMNS = IS_LAST ? 1 : V;
    const auto count_taps = [](int begin, int taps, int dilation, const Axis& axis) {
        if (!is_same<How, MeanWithPads>) return Taps(begin, taps, dilation, axis.size).count();
        Taps with_pads(begin, taps, dilation, axis.end);
        with_pads.first = 0;
        return with_pads.count();
    };
    int across[COLUMNS];
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j)
        across[j] = count_taps(w0 + j * SW, KW ? KW : w.taps, KW ? 1 : w.dilation, w);

    T* to = y + mine.image * all.to.image + mine.channel * all.to.channel + mine.ho * all.to.row +
            mine.wo * (IS_LAST ? all.to.column : 1);
#pragma unroll
    for (int q = 0; q < Q; ++q) {
        if (Q > 1 && mine.ho + q >= h.count) break;
        if constexpr (!is_same<How, Max>) {
            const int down = count_taps(h0 + q * SH, KH ? KH : h.taps, KH ? 1 : h.dilation, h);
#pragma unroll
            for (int j = 0; j < V; ++j) found[q][j] /= down * across[j % COLUMNS];
        }
        store_outputs<IS_LAST>(to, found[q], mine.wo, w.count);
        to += all.to.row;
    }
}
