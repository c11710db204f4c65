// layout/select.cu: elements of rows selected axis by axis: Slice, Gather, Pad, Tile, nearest resize.
//
// Idea    Threads compute adjacent words of y, as wide as contiguous runs allow. A word's offset in x is the sum of
//         three table entries, one per axis; the tables stay in cache. A negative entry stores `fill`.
// Floor   Selected elements are read once, all are written once: 2^28 floats are 2.15 GB / 4.8 TB/s = 447 us.
// Layout  y (?, n1, n2, n3, run), x (?, x_row), row-major, in words. Word (o, i1, i2, i3, c) is x[o * x_row +
//         offsets[i1] + offsets[n1 + i2] + offsets[n1 + n2 + i3] + c].
// Limits  Words of 1, 2, 4, 8 or 16 B, aligned; fewer than 2^31 words per row of x; Index counts the words of y;
//         sm_80 up.
#include "common/fast_divide.cuh"

constexpr int THREADS = 256, UNROLL = 4;

struct Axes {
    Divider n1, n2, n3, run;
};

// fill  the word is its first bytes
template <class T, class Index>
__global__ void __launch_bounds__(THREADS)
    select(const T* x, const int* offsets, T* y, long long count, long long x_row, Axes axes,
           const __grid_constant__ uint4 fill) {
    const int *offsets2 = offsets + axes.n1.size, *offsets3 = offsets2 + axes.n2.size;
    const long long step = static_cast<long long>(gridDim.x) * THREADS * UNROLL;
    for (long long begin = static_cast<long long>(blockIdx.x) * THREADS * UNROLL + threadIdx.x; begin < count;
         begin += step) {
        T words[UNROLL];
#pragma unroll
        for (int k = 0; k < UNROLL; ++k) {
            if (begin + k * THREADS >= count) break;
            Index n = static_cast<Index>(begin + k * THREADS);
            const u32 c = pop_index(n, axes.run), i3 = pop_index(n, axes.n3), i2 = pop_index(n, axes.n2);
            const int a = offsets[pop_index(n, axes.n1)], b = offsets2[i2], d = offsets3[i3];
            words[k] = (a | b | d) < 0 ? *reinterpret_cast<const T*>(&fill) : x[n * x_row + (a + b + d) + c];
        }
#pragma unroll
        for (int k = 0; k < UNROLL; ++k) {
            if (begin + k * THREADS < count) y[begin + k * THREADS] = words[k];
        }
    }
}
