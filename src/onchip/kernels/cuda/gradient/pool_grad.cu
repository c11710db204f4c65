// gradient/pool_grad.cu: the gradient of max and average pooling in 1D and 2D.
//
// Idea    A thread computes one element of dx, in NHWC of four adjacent channels: it adds up what it receives of each
//         window that covers it. A window passes its gradient to its first maximum: where x is y, the thread compares
//         the taps before its own. They are in L1, and of equal values the first few decide.
// Floor   x, y and dy are read once and dx is written once: 4096 x 64 x 56 x 56 by windows of 2 x 2 are
//         8.2 GB / 4.2 TB/s = 2.0 ms.
// Order   The windows of an element from last to first: the taps in order.
// Layout  x and dx NCHW with y and dy, or all of them NHWC.
// Limits  Any geometry; up to 2^31 elements per row, 2^28 per axis; float32, float16, bfloat16, float64;
//         sm_80 up.
#include "common/window.cuh"

struct Max {};
struct Mean {};  // over the elements inside x
struct MeanWithPads {};  // padding included

struct PoolGrad {
    Divider channels, rows, columns;  // number of threads along each axis of x
    Divider stride_h, stride_w;
    Axis h, w;
    Strides x, y;
    long long count;
};

// The windows that span a position along an axis.
struct Covering {
    int first, last;

    // at  the position, from the first element of the padding
    __device__ __forceinline__ Covering(int at, const Axis& axis, const Divider& stride) {
        const int span = (axis.taps - 1) * axis.dilation + 1;
        first = at < span ? 0 : quotient(static_cast<u32>(at - span), stride) + 1;
        last = min(static_cast<int>(quotient(static_cast<u32>(at), stride)), axis.count - 1);
    }
};
// The tap of a window that reads a position that it spans; -1: none does.
__device__ __forceinline__ int tap_of(int at, int window, const Axis& axis) {
    const int offset = at - window * axis.stride;
    return axis.dilation == 1 ? offset : offset % axis.dilation ? -1 : offset / axis.dilation;
}
// The elements along an axis that a window averages.
template <class Mode>
__device__ __forceinline__ int taps_counted(int window, const Axis& axis) {
    const int begin = window * axis.stride - axis.before;
    if (is_same<Mode, Mean>) return Taps(begin, axis.taps, axis.dilation, axis.size).count();
    Taps with_pads(begin, axis.taps, axis.dilation, axis.end);
    with_pads.first = 0;
    return with_pads.count();
}

template <class T>
__device__ __forceinline__ T lowest() {
    if constexpr (is_same<T, f16>) return {0xfc00};
    else if constexpr (is_same<T, bf16>) return {0xff80};
    else return -__int_as_float(0x7f800000);
}

// Whether tap (kh, kw) of a window is its first maximum y, for V channels. x: of the image and the channel.
template <class T, int V>
__device__ __forceinline__ void keep_first(const T* x, int h0, int w0, int kh, int kw, const acc_t<T> (&y)[V],
                                           const PoolGrad& pool, bool (&is_first)[V]) {
    const Axis &h = pool.h, &w = pool.w;
    for (int i = 0; i <= kh; ++i) {
        const int row = h0 + i * h.dilation, taps = i < kh ? w.taps : kw;
        for (int j = 0; j < taps; ++j) {
            const int column = w0 + j * w.dilation;
            const bool is_inside = View<T>::is_in(row, h.size) && View<T>::is_in(column, w.size);
            acc_t<T> other[V];
            load_or(other, x + row * pool.x.row + column * pool.x.column, is_inside, lowest<T>());
            bool is_left = false;
#pragma unroll
            for (int v = 0; v < V; ++v) {
                is_first[v] = is_first[v] && other[v] != y[v];
                is_left |= is_first[v];
            }
            if (!is_left) return;
        }
    }
}

template <class Mode, class T, class Index, bool IS_NHWC, int V>
__global__ void __launch_bounds__(WINDOW_THREADS)
    pool_grad(const T* x, const T* y, const T* dy, T* dx, const PoolGrad pool) {
    const long long thread = static_cast<long long>(blockIdx.x) * WINDOW_THREADS + threadIdx.x;
    if (thread >= pool.count) return;
    Index index = static_cast<Index>(thread);
    u32 channel = 0;
    if (IS_NHWC) channel = pop_index(index, pool.channels) * V;
    const int at_w = pop_index(index, pool.columns), at_h = pop_index(index, pool.rows);
    if (!IS_NHWC) channel = pop_index(index, pool.channels);
    const long long image = index;
    const Axis &h = pool.h, &w = pool.w;
    const T* x_image = x + image * pool.x.image + channel * pool.x.channel;
    const long long y_image = image * pool.y.image + channel * pool.y.channel;
    const long long own = at_h * pool.x.row + at_w * pool.x.column;

    acc_t<T> v[V], sum[V] = {};
    if constexpr (is_same<Mode, Max>) load_contiguous(x_image + own, v);
    const Covering rows(at_h + h.before, h, pool.stride_h), columns(at_w + w.before, w, pool.stride_w);
    for (int ho = rows.last; ho >= rows.first; --ho) {
        const int kh = tap_of(at_h + h.before, ho, h);
        if (kh < 0) continue;
        for (int wo = columns.last; wo >= columns.first; --wo) {
            const int kw = tap_of(at_w + w.before, wo, w);
            if (kw < 0) continue;
            const long long at = y_image + ho * pool.y.row + wo * pool.y.column;
            acc_t<T> d[V];
            if constexpr (is_same<Mode, Max>) {
                acc_t<T> largest[V];
                bool is_first[V], is_any = false;
                load_contiguous(y + at, largest);
#pragma unroll
                for (int c = 0; c < V; ++c) {
                    is_first[c] = v[c] == largest[c];
                    is_any |= is_first[c];
                }
                if (!is_any) continue;
                load_contiguous(dy + at, d);
                keep_first(x_image, ho * h.stride - h.before, wo * w.stride - w.before, kh, kw, largest, pool, is_first);
#pragma unroll
                for (int c = 0; c < V; ++c) sum[c] += is_first[c] ? d[c] : acc_t<T>(0);
            } else {
                load_contiguous(dy + at, d);
                const acc_t<T> divisor = taps_counted<Mode>(ho, h) * taps_counted<Mode>(wo, w);
#pragma unroll
                for (int c = 0; c < V; ++c) sum[c] += d[c] / divisor;
            }
        }
    }
    store_contiguous(dx + image * pool.x.image + channel * pool.x.channel + own, sum);
}
