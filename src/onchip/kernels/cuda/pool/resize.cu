// pool/resize.cu: linear resize along up to three axes.
//
// Idea    A thread walks along the third axis, V contiguous elements at a time. A column is x interpolated along the
//         first two axes at one position of the third. An output blends two columns, and the next one mostly reuses one
//         or both, so each column is computed once. Small cached tables hold the two taps and the weight per axis.
// Floor   x is read once and y written once: 2^26 floats and four times as many are 1.34 GB / 4.8 TB/s = 280 us.
// Order   First axis, second, third: a (1 - share) + b share, two multiplications and an addition.
// Layout  y (?, n1, n2, n3, run), x (?, x_row), row-major. taps: {low, high} per n1, n2, n3, as offsets in x.
// Limits  float32, float16, bfloat16, float64; run a multiple of V, or run = 1 and n3 a multiple of TOGETHER (aligned
//         stores); Index counts threads; sm_80 up.
#include "common/fast_divide.cuh"
#include "common/accumulator.cuh"

constexpr int THREADS = 256;

struct Axes {
    Divider n1, n2, strips, run;  // strips: ceil(n3 / strip); run in vectors of V
    u32 n3;
    u32 is_resized[3];
};
struct Taps {
    int low, high;
};

template <class W, int V>
__device__ __forceinline__ void mean(W (&a)[V], const W (&b)[V], W share) {
    const W rest = 1 - share;
#pragma unroll
    for (int j = 0; j < V; ++j) a[j] = a[j] * rest + b[j] * share;
}

// x interpolated along the first two axes, relative to `from`.
template <class T, int V>
struct Columns {
    using W = acc_t<T>;
    const T* from;
    Taps t1, t2;
    W share1, share2;
    bool by_1, by_2;

    __device__ __forceinline__ void load_line(const T* at, W (&v)[V]) const {
        load_neighbours(at + t1.low, v);
        if (!by_1) return;
        W high[V];
        load_neighbours(at + t1.high, high);
        mean(v, high, share1);
    }
    __device__ __forceinline__ void load(int at3, W (&v)[V]) const {
        load_line(from + at3 + t2.low, v);
        if (!by_2) return;
        W high[V];
        load_line(from + at3 + t2.high, high);
        mean(v, high, share2);
    }
};

// count     threads
// strip     outputs along the third axis per thread, a multiple of TOGETHER
// TOGETHER  outputs per store
template <class T, class Index, int V, int TOGETHER>
__global__ void __launch_bounds__(THREADS) resize(const T* x, const Taps* taps, const acc_t<T>* shares, T* y,
                                                  long long count, long long x_row, u32 strip, Axes axes) {
    static_assert(V == 1 || TOGETHER == 1, "channels, or places");
    using W = acc_t<T>;
    const long long thread = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
    if (thread >= count) return;
    Index n = static_cast<Index>(thread);
    const u32 c = take_rest(n, axes.run) * V, begin = take_rest(n, axes.strips) * strip;
    const u32 i2 = take_rest(n, axes.n2), i1 = take_rest(n, axes.n1);
    const long long line = (n * static_cast<long long>(axes.n1.size) + i1) * axes.n2.size + i2;
    const u32 run = axes.run.size * V;
    T* to = y + (line * axes.n3 + begin) * run + c;
    const Columns<T, V> columns{x + n * x_row + c,
                                taps[i1],
                                taps[axes.n1.size + i2],
                                shares[i1],
                                shares[axes.n1.size + i2],
                                axes.is_resized[0] != 0,
                                axes.is_resized[1] != 0};
    taps += axes.n1.size + axes.n2.size;
    shares += axes.n1.size + axes.n2.size;

    W low[V], high[V];
    Taps held{-1, -1};
    const u32 end = min(begin + strip, axes.n3);
    for (u32 first = begin; first < end; first += TOGETHER) {
        alignas(16) W made[TOGETHER * V];
#pragma unroll
        for (int k = 0; k < TOGETHER; ++k) {
            const Taps wanted = taps[first + k];
            if (wanted.low != held.low) {
                if (wanted.low == held.high) {
#pragma unroll
                    for (int j = 0; j < V; ++j) low[j] = high[j];
                } else {
                    columns.load(wanted.low, low);
                }
            }
            W v[V];
#pragma unroll
            for (int j = 0; j < V; ++j) v[j] = low[j];
            if (axes.is_resized[2]) {
                if (wanted.high != held.high) columns.load(wanted.high, high);
                mean(v, high, shares[first + k]);
                held = wanted;
            } else {
                held.low = wanted.low;
            }
#pragma unroll
            for (int j = 0; j < V; ++j) made[k * V + j] = v[j];
        }
        store_neighbours(to, made);
        to += TOGETHER * run;
    }
}
