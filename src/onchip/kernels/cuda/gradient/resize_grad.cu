// gradient/resize_grad.cu: dx of a linear resize along up to three axes.
//
// Idea    A thread computes one element of dx: along each axis, a list has the positions of y that read it, each with
//         its weight. The lists are small and stay in cache, as do the elements of dy that neighbours read, too.
// Floor   dy is read once, dx is written once: 2^28 floats and a quarter as many are 1.34 GB / 4.2 TB/s = 320 us.
// Order   Positions of y in order: third axis, second, first.
// Layout  dx (outer, n1, n2, n3, run), dy (outer, y_row), row-major. starts: for n1, n2 and n3, the first entry of each
//         position and the end of the last one; offsets (in dy) and weights: the entries.
// Limits  Rows of fewer than 2^31 elements; float32, float16, bfloat16, float64; sm_80 up.
#include "common/accumulator.cuh"
#include "common/fast_divide.cuh"

constexpr int THREADS = 256;

struct Axes {
    Divider n1, n2, n3, run;
};

template <class T, class Index>
__global__ void __launch_bounds__(THREADS)
    resize_grad(const T* dy, const int* starts, const int* offsets, const acc_t<T>* weights, T* dx, long long count,
                long long y_row, Axes axes) {
    using A = acc_t<T>;
    const long long thread = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
    if (thread >= count) return;
    Index outer = static_cast<Index>(thread);
    const u32 c = pop_index(outer, axes.run), i3 = pop_index(outer, axes.n3), i2 = pop_index(outer, axes.n2);
    const u32 i1 = pop_index(outer, axes.n1);
    const T* from = dy + static_cast<long long>(outer) * y_row + c;
    const int *first = starts + i1, *second = starts + axes.n1.size + 1 + i2;
    const int* third = starts + axes.n1.size + axes.n2.size + 2 + i3;
    A total = 0;
    for (int k1 = first[0]; k1 < first[1]; ++k1) {
        A plane = 0;
        for (int k2 = second[0]; k2 < second[1]; ++k2) {
            const T* line = from + offsets[k1] + offsets[k2];
            A sum = 0;
            for (int k3 = third[0]; k3 < third[1]; ++k3)
                sum = multiply_add(load_acc(line + offsets[k3]), weights[k3], sum);
            plane = multiply_add(sum, weights[k2], plane);
        }
        total = multiply_add(plane, weights[k1], total);
    }
    store_acc(dx + thread, total);
}
