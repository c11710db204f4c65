// pool/resize.cu: linear resize along up to three axes.
//
// Idea    A thread walks along the third axis, V contiguous elements at a time. A column is x interpolated along the
//         first two axes at one position of the third. An output blends two columns, and the next one mostly reuses one
//         or both, so each column is computed once. Small cached tables hold the two taps and the weight per axis.
// Floor   x is read once and y written once: 2^26 floats and four times as many are 1.34 GB / 4.8 TB/s = 280 us.
// Order   First axis, second, third: a (1 - weight) + b weight, two multiplications and an addition.
// Layout  y (outer, n1, n2, n3, run), x (outer, x_row), row-major. taps: {low, high} per n1, n2, n3, as offsets in x.
// Limits  float32, float16, bfloat16, float64; run a multiple of V, or run = 1 and n3 a multiple of PER_STORE (aligned
//         stores); Index holds `count`; sm_80 up.
#include "common/fast_divide.cuh"
#include "common/accumulator.cuh"

constexpr int THREADS = 256;

struct Axes {
    Divider n1, n2, chunks, run;  // chunks: ceil(n3 / per_thread); run in vectors of V
    u32 n3;
    u32 is_resized[3];
};
struct Taps {
    int low, high;
};

template <class W, int V>
__device__ __forceinline__ void blend(W (&a)[V], const W (&b)[V], W weight) {
    const W low_weight = 1 - weight;
#pragma unroll
    for (int j = 0; j < V; ++j) a[j] = a[j] * low_weight + b[j] * weight;
}

// x interpolated along the first two axes, relative to `from`.
template <class T, int V>
struct ColumnReader {
    using W = acc_t<T>;
    const T* from;
    Taps t1, t2;
    W weight1, weight2;
    bool blends1, blends2;

    __device__ __forceinline__ void load_line(const T* at, W (&v)[V]) const {
        load_contiguous(at + t1.low, v);
        if (!blends1) return;
        W high[V];
        load_contiguous(at + t1.high, high);
        blend(v, high, weight1);
    }
    __device__ __forceinline__ void load(int at3, W (&v)[V]) const {
        load_line(from + at3 + t2.low, v);
        if (!blends2) return;
        W high[V];
        load_line(from + at3 + t2.high, high);
        blend(v, high, weight2);
    }
};

// count       threads
// per_thread  outputs along the third axis per thread, a multiple of PER_STORE
// PER_STORE   outputs per store
template <class T, class Index, int V, int PER_STORE>
__global__ void __launch_bounds__(THREADS) resize(const T* x, const Taps* taps, const acc_t<T>* weights, T* y,
                                                  long long count, long long x_row, u32 per_thread, Axes axes) {
    static_assert(V == 1 || PER_STORE == 1, "a vector is either channels or positions");
    using W = acc_t<T>;
    const long long thread = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
    if (thread >= count) return;
    Index n = static_cast<Index>(thread);
    const u32 c = pop_index(n, axes.run) * V, begin = pop_index(n, axes.chunks) * per_thread;
    const u32 i2 = pop_index(n, axes.n2), i1 = pop_index(n, axes.n1);
    const long long line = (n * static_cast<long long>(axes.n1.size) + i1) * axes.n2.size + i2;
    const u32 run = axes.run.size * V;
    T* to = y + (line * axes.n3 + begin) * run + c;
    const ColumnReader<T, V> columns{x + n * x_row + c,
                                     taps[i1],
                                     taps[axes.n1.size + i2],
                                     weights[i1],
                                     weights[axes.n1.size + i2],
                                     axes.is_resized[0] != 0,
                                     axes.is_resized[1] != 0};
    taps += axes.n1.size + axes.n2.size;
    weights += axes.n1.size + axes.n2.size;

    W low[V], high[V];
    Taps cached{-1, -1};
    const u32 end = min(begin + per_thread, axes.n3);
    for (u32 first = begin; first < end; first += PER_STORE) {
        alignas(16) W values[PER_STORE * V];
#pragma unroll
        for (int k = 0; k < PER_STORE; ++k) {
            const Taps needed = taps[first + k];
            if (needed.low != cached.low) {
                if (needed.low == cached.high) {
#pragma unroll
                    for (int j = 0; j < V; ++j) low[j] = high[j];
                } else {
                    columns.load(needed.low, low);
                }
            }
            W v[V];
#pragma unroll
            for (int j = 0; j < V; ++j) v[j] = low[j];
            if (axes.is_resized[2]) {
                if (needed.high != cached.high) columns.load(needed.high, high);
                blend(v, high, weights[first + k]);
                cached = needed;
            } else {
                cached.low = needed.low;
            }
#pragma unroll
            for (int j = 0; j < V; ++j) values[k * V + j] = v[j];
        }
        store_contiguous(to, values);
        to += PER_STORE * run;
    }
}
