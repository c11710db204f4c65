// gradient/select_grad.cu: dx of a selection (Gather, Pad, nearest resize, ...) or of a linear resize.
//
// Idea    An element of dx is a sum along up to three axes: of the elements of dy that read it, times their factors.
//         The terms of each index of an axis are in small tables, which stay in cache. A thread computes V contiguous
//         elements; what neighbours read of dy is in L1.
// Floor   dy is read once, dx is written once: 2^24 floats from four times as many are 336 MB / 4.2 TB/s = 80 us.
// Order   First axis, second, third: the terms of each in the order of dy, a sum per axis.
// Layout  dx (outer, n1, n2, n3, run), dy (outer, dy_row), row-major. starts: n1 + 1, n2 + 1, n3 + 1 positions in
//         `offsets`, of elements of dy, and in `factors`; the offsets follow the starts.
// Limits  float32, float16, bfloat16, float64; run a multiple of V; fewer than 2^31 elements per row; Index holds
//         `count`; sm_80 up.
#include "common/accumulator.cuh"
#include "common/fast_divide.cuh"

constexpr int THREADS = 256;

struct Axes {
    Divider n1, n2, n3, run;  // run in vectors of V
};

// count  threads
template <class T, class Index, int V>
__global__ void __launch_bounds__(THREADS) select_grad(const T* dy, const int* starts, const acc_t<T>* factors, T* dx,
                                                       long long count, long long dy_row, Axes axes) {
    using W = acc_t<T>;
    const long long thread = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
    if (thread >= count) return;
    Index n = static_cast<Index>(thread);
    const u32 c = pop_index(n, axes.run) * V, i3 = pop_index(n, axes.n3), i2 = pop_index(n, axes.n2);
    const int *at1 = starts + pop_index(n, axes.n1), *at2 = starts + axes.n1.size + 1 + i2;
    const int *at3 = starts + axes.n1.size + axes.n2.size + 2 + i3;
    const int* offsets = starts + axes.n1.size + axes.n2.size + axes.n3.size + 3;
    const int begin2 = at2[0], end2 = at2[1], begin3 = at3[0], end3 = at3[1];
    const T* from = dy + n * dy_row + c;

    W sum[V] = {};
    for (int a = at1[0]; a < at1[1]; ++a) {
        W sum2[V] = {};
        for (int b = begin2; b < end2; ++b) {
            const T* line = from + offsets[a] + offsets[b];
            W sum3[V] = {};
#pragma unroll 4
            for (int k = begin3; k < end3; ++k) {
                W v[V];
                load_contiguous(line + offsets[k], v);
#pragma unroll
                for (int j = 0; j < V; ++j) sum3[j] = multiply_add(v[j], factors[k], sum3[j]);
            }
#pragma unroll
            for (int j = 0; j < V; ++j) sum2[j] = multiply_add(sum3[j], factors[b], sum2[j]);
        }
#pragma unroll
        for (int j = 0; j < V; ++j) sum[j] = multiply_add(sum2[j], factors[a], sum[j]);
    }
    store_contiguous(dx + thread * V, sum);
}
