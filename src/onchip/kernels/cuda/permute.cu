// permute.cu: the axes of an array in another order, and its numbers in another dtype if that is wanted.
//
// Idea    permute_rows, where the last axis stays the last: neighbours stay neighbours, and threads move words of them.
//         permute_tiles, where another one becomes the last: a block takes 32 x 32 numbers of the two axes that are last
//         before and after through shared memory, so that it reads and writes lines of memory; one column more than
//         needed keeps its columns in different banks. All other axes are divided out of the number of the tile.
// Floor   Every number is read once and written once: 2^28 floats are 2.15 GB / 4.8 TB/s = 447 us.
// Layout  y row-major; of permute_rows (?, n1, n2, n3, n4, n5), the number of (i0, ..., i5) lies in x at
//         i0 s0 + ... + i4 s4 + i5; of permute_tiles, axis a is last in y and axis b in x, a number (o0, ..., o3, a, b)
//         lies in x at o0 s0 + ... + o3 s3 + a xa + b and in y at o0 t0 + ... + o3 t3 + b yb + a.
// Limits  Up to six axes, once those that stay together are one; words of 1 to 16 bytes, or float32, float16 and bfloat16
//         into each other; Index counts words or tiles; sm_80 up.
#include "divide.cuh"

constexpr int THREADS = 256, TOGETHER = 4, SIDE = 32, LINES = THREADS / SIDE;
constexpr int AT_ONCE = 2;  // tiles on their way, of a block

template <class In, class Out>
__device__ __forceinline__ Out moved(In v) {
    if constexpr (is_same<In, Out>) {
        return v;
    } else {
        Out made;
        store1(&made, to_float(v));
        return made;
    }
}

template <class In, class Out, class Index>
__global__ void __launch_bounds__(THREADS) permute_rows(
    const In* x, Out* y, long long count, Divider n1, Divider n2, Divider n3, Divider n4, Divider n5, long long s0,
    long long s1, long long s2, long long s3, long long s4) {
    const long long step = static_cast<long long>(gridDim.x) * THREADS * TOGETHER;
    for (long long begin = static_cast<long long>(blockIdx.x) * THREADS * TOGETHER + threadIdx.x; begin < count;
         begin += step) {
        Out words[TOGETHER];
#pragma unroll
        for (int k = 0; k < TOGETHER; ++k) {
            Index n = static_cast<Index>(begin + k * THREADS);
            if (begin + k * THREADS >= count) break;
            const u32 i5 = take_rest(n, n5), i4 = take_rest(n, n4), i3 = take_rest(n, n3), i2 = take_rest(n, n2);
            const u32 i1 = take_rest(n, n1);
            words[k] = moved<In, Out>(x[n * s0 + i1 * s1 + i2 * s2 + i3 * s3 + i4 * s4 + i5]);
        }
#pragma unroll
        for (int k = 0; k < TOGETHER; ++k) {
            if (begin + k * THREADS < count) y[begin + k * THREADS] = words[k];
        }
    }
}

template <class In, class Out, class Index>
__global__ void __launch_bounds__(THREADS) permute_tiles(
    const In* x, Out* y, long long tiles, long long Na, long long Nb, Divider across, Divider down, Divider n1,
    Divider n2, Divider n3, long long xa, long long yb, long long s0, long long s1, long long s2, long long s3,
    long long t0, long long t1, long long t2, long long t3) {
    __shared__ Out tile[AT_ONCE][SIDE][SIDE + 1];
    const int column = threadIdx.x % SIDE, line = threadIdx.x / SIDE;
    const long long step = gridDim.x;
    for (long long number = blockIdx.x; number < tiles; number += AT_ONCE * step) {
        Out* to[AT_ONCE];
        int left_a[AT_ONCE], left_b[AT_ONCE];  // of the tile, of its rows and columns that are there
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            Index n = static_cast<Index>(number + k * step < tiles ? number + k * step : number);
            const long long a = static_cast<long long>(take_rest(n, across)) * SIDE;
            const long long b = static_cast<long long>(take_rest(n, down)) * SIDE;
            const u32 o3 = take_rest(n, n3), o2 = take_rest(n, n2), o1 = take_rest(n, n1);
            const In* from = x + n * s0 + o1 * s1 + o2 * s2 + o3 * s3 + a * xa + b + column;
            to[k] = y + n * t0 + o1 * t1 + o2 * t2 + o3 * t3 + b * yb + a + column;
            left_a[k] = number + k * step >= tiles ? 0 : Na - a < SIDE ? static_cast<int>(Na - a) : SIDE;
            left_b[k] = Nb - b < SIDE ? static_cast<int>(Nb - b) : SIDE;
#pragma unroll
            for (int i = line; i < SIDE; i += LINES) {
                if (i < left_a[k] && column < left_b[k]) tile[k][i][column] = moved<In, Out>(from[i * xa]);
            }
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
#pragma unroll
            for (int i = line; i < SIDE; i += LINES) {
                if (i < left_b[k] && column < left_a[k]) to[k][i * yb] = tile[k][column][i];
            }
        }
        __syncthreads();
    }
}
