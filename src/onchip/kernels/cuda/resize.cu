// resize.cu: rows resized along up to three axes, each number a mean of the two of x that lie around it.
//
// Idea    Threads make numbers of y that lie next to each other, V at a time where V stay together. Small tables, which
//         stay in the cache, say for each axis where the two lie and what share the second has. What neighbours read is
//         mostly the same, and comes from the cache.
// Floor   x is read once and y is written once: 2^26 floats and four times as many are 1.34 GB / 4.8 TB/s = 280 us.
// Order   Along the first axis, then the second, then the third: a (1 - share) + b share, two products and a sum.
// Layout  y (?, n1, n2, n3, run), x (?, x_row), row-major. A table has {low, high} of n1, n2, n3, in numbers of x.
// Limits  float32, float16, bfloat16, float64; run a multiple of V, which is aligned; Index counts V numbers of y; sm_80 up.
#include "divide.cuh"
#include "wide.cuh"

constexpr int THREADS = 256;

struct Axes {
    Divider n1, n2, n3, run;  // the last in V numbers
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

// count  times V numbers of y
template <class T, class Index, int V>
__global__ void __launch_bounds__(THREADS) resize(
    const T* x, const Taps* taps, const wide_t<T>* shares, T* y, long long count, long long x_row, Axes axes) {
    using W = wide_t<T>;
    for (long long at = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x; at < count;
         at += static_cast<long long>(gridDim.x) * THREADS) {
        Index n = static_cast<Index>(at);
        const u32 c = take_rest(n, axes.run) * V, i3 = take_rest(n, axes.n3) + axes.n1.size + axes.n2.size;
        const u32 i2 = take_rest(n, axes.n2) + axes.n1.size, i1 = take_rest(n, axes.n1);
        const Taps t1 = taps[i1], t2 = taps[i2], t3 = taps[i3];
        const T* from = x + n * x_row + c;
        W v3[2][V], v2[2][V], v1[2][V];
        // Of the third axis the ends, between which the second is resized; between its ends, the first.
#pragma unroll
        for (int k3 = 0; k3 < 2; ++k3) {
            if (k3 && !axes.is_resized[2]) break;
            const int at3 = k3 ? t3.high : t3.low;
#pragma unroll
            for (int k2 = 0; k2 < 2; ++k2) {
                if (k2 && !axes.is_resized[1]) break;
                const int at2 = at3 + (k2 ? t2.high : t2.low);
                load_neighbours(from + at2 + t1.low, v1[0]);
                if (axes.is_resized[0]) {
                    load_neighbours(from + at2 + t1.high, v1[1]);
                    mean(v1[0], v1[1], shares[i1]);
                }
#pragma unroll
                for (int j = 0; j < V; ++j) v2[k2][j] = v1[0][j];
            }
            if (axes.is_resized[1]) mean(v2[0], v2[1], shares[i2]);
#pragma unroll
            for (int j = 0; j < V; ++j) v3[k3][j] = v2[0][j];
        }
        if (axes.is_resized[2]) mean(v3[0], v3[1], shares[i3]);
        store_neighbours(y + at * V, v3[0]);
    }
}
