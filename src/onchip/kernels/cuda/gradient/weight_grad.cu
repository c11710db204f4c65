// gradient/weight_grad.cu: the gradient of a Linear's or a convolution's weight, and of its bias.
//
// Idea    dw[m, n] = sum over k of dy[k, m] x[k, n] as an implicit GEMM: k is a row of the batch and a position in y, m a
//         channel of y, n a channel of x and a tap. K is split over blocks; gradient/batch_sum.cu adds the partial sums.
//         A block has a 64 x 64 tile, a thread 4 x 4 of it; the next 16 k are loaded while these are multiplied. The
//         blocks of the first n also sum dy: the gradient of the bias.
// Floor   2 K M N flop: LeNet's second convolution, batch 512, is 0.25 Gflop, 5 us at 51 Tflop/s.
// Order   k in order within a split; splits in order. Both depend on B and the sizes alone.
// Layout  IS_ROWS: dy (K, M), x (K, N). Else NCHW: dy (B, groups M, positions), x (B, groups C, height, width).
//         dw (groups, M, N), `split_stride` elements between the partial sums of splits.
// Shared  2 (16 x 68) floats, twice: 17 KB.
// Limits  Any sizes; float32, float16 and bfloat16 in float32 arithmetic, float64; sm_80 up.
#include "gradient/weight_grad.cuh"

constexpr int TILE = 64, TILE_K = 16, THREADS = 256, STRIDE = TILE + 4;

// 4 elements as they are loaded at once.
template <class A>
struct alignas(4 * sizeof(A) < 16 ? 4 * sizeof(A) : 16) Four {
    A v[4];
};

template <class A>
__device__ __forceinline__ void multiply_tile(const A (*dy)[STRIDE], const A (*x)[STRIDE], A (&acc)[4][4]) {
    const int m = threadIdx.x / 16 * 4, n = threadIdx.x % 16 * 4;
#pragma unroll
    for (int k = 0; k < TILE_K; ++k) {
        const Four<A> a = *reinterpret_cast<const Four<A>*>(&dy[k][m]), b = *reinterpret_cast<const Four<A>*>(&x[k][n]);
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) acc[i][j] = multiply_add(a.v[i], b.v[j], acc[i][j]);
    }
}

// What a thread loads of a tile of 16 k: 4 elements of dy and of x.
template <bool IS_ROWS, class Index, class T>
struct Loader;

template <class Index, class T>
struct Loader<true, Index, T> {
    using A = acc_t<T>;  // 4 adjacent elements of one k
    const T *dy, *x;
    long long M, N, first_m, first_n;
    int line, lane;

    __device__ Loader(const T* dy, const T* x, int M, int N, int m, int n, const Windows&)
        : dy(dy), x(x), M(M), N(N), first_m(m + threadIdx.x % 16 * 4), first_n(n + threadIdx.x % 16 * 4),
          line(threadIdx.x / 16), lane(threadIdx.x % 16 * 4) {}
    __device__ __forceinline__ void load(long long k, long long end, A (&a)[4], A (&b)[4]) const {
        const long long row = k + line;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            a[i] = row < end && first_m + i < M ? load_acc(dy + row * M + first_m + i) : A(0);
            b[i] = row < end && first_n + i < N ? load_acc(x + row * N + first_n + i) : A(0);
        }
    }
    __device__ __forceinline__ void store(A (*a_tile)[STRIDE], A (*b_tile)[STRIDE], const A (&a)[4],
                                          const A (&b)[4]) const {
        *reinterpret_cast<Four<A>*>(&a_tile[line][lane]) = {a[0], a[1], a[2], a[3]};
        *reinterpret_cast<Four<A>*>(&b_tile[line][lane]) = {b[0], b[1], b[2], b[3]};
    }
};

template <class Index, class T>
struct Loader<false, Index, T> {
    using A = acc_t<T>;  // one k of 4 channels of y, and of 4 elements of the filter
    const T *dy, *x;
    const Windows& windows;
    long long y_at[4], x_at[4];  // offsets; -1: past the end
    int down[4], right[4];       // of the taps
    int lane, line;

    __device__ Loader(const T* dy, const T* x, int M, int N, int m, int n, const Windows& windows)
        : dy(dy), x(x), windows(windows), lane(threadIdx.x % 16), line(threadIdx.x / 16) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int channel = m + line + 16 * i;
            y_at[i] = channel < M ? static_cast<long long>(channel) * windows.positions.size : -1;
            const u32 at = n + line + 16 * i;
            const Tap tap(at, windows);
            const bool is_inside = static_cast<int>(at) < N;
            x_at[i] = is_inside ? static_cast<long long>(tap.channel) * windows.height * windows.width : -1;
            down[i] = tap.down, right[i] = tap.right;
        }
    }
    __device__ __forceinline__ void load(long long k, long long end, A (&a)[4], A (&b)[4]) const {
        const bool is_inside = k + lane < end;
        const Position<Index> at(is_inside ? k + lane : 0, windows);
        const T *dy_row = dy + at.row * windows.y_row + at.position, *x_row = x + at.row * windows.x_row;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            a[i] = is_inside && y_at[i] >= 0 ? load_acc(dy_row + y_at[i]) : A(0);
            const int h = at.top + down[i], w = at.column + right[i];
            const bool has_pixel = is_inside && x_at[i] >= 0 && is_pixel(h, w, windows);
            b[i] = has_pixel ? load_acc(x_row + x_at[i] + static_cast<long long>(h) * windows.width + w) : A(0);
        }
    }
    __device__ __forceinline__ void store(A (*a_tile)[STRIDE], A (*b_tile)[STRIDE], const A (&a)[4],
                                          const A (&b)[4]) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            a_tile[lane][line + 16 * i] = a[i];
            b_tile[lane][line + 16 * i] = b[i];
        }
    }
};

// grid   tiles of n and m; groups of each split of K
// Index  of K; bias: null if it has no gradient
template <bool IS_ROWS, class Index, class T, class Y>
__global__ void __launch_bounds__(THREADS)
    weight_grad(const T* dy, const T* x, Y* dw, Y* bias, int M, int N, u32 tiles_n, u32 groups, long long K,
                long long split_k, long long split_stride, const __grid_constant__ Windows windows) {
    using A = acc_t<T>;
    __shared__ Four<A> tiles[2][2][TILE_K * STRIDE / 4];
    const int first_m = static_cast<int>(blockIdx.x / tiles_n) * TILE, first_n = static_cast<int>(blockIdx.x % tiles_n) * TILE;
    const int group = blockIdx.y % groups, split = blockIdx.y / groups, channels = N / static_cast<int>(windows.taps.size);
    const long long group_x = static_cast<long long>(group) * channels * windows.height * windows.width;
    const Loader<IS_ROWS, Index, T> loader(dy + static_cast<long long>(group) * M * windows.positions.size, x + group_x, M, N, first_m,
                                 first_n, windows);
    const long long begin = static_cast<long long>(split) * split_k, end = begin + split_k < K ? begin + split_k : K;
    A acc[4][4] = {}, total = 0, a[4], b[4];
    loader.load(begin, end, a, b);
    int stage = 0;
    for (long long k = begin; k < end; k += TILE_K, stage ^= 1) {
        auto dy_tile = reinterpret_cast<A(*)[STRIDE]>(tiles[stage][0]);
        auto x_tile = reinterpret_cast<A(*)[STRIDE]>(tiles[stage][1]);
        loader.store(dy_tile, x_tile, a, b);
        __syncthreads();  // the other stage is free: all have multiplied it before they arrive here
        if (k + TILE_K < end) loader.load(k + TILE_K, end, a, b);
        multiply_tile<A>(dy_tile, x_tile, acc);
        if (bias != nullptr && first_n == 0 && threadIdx.x < TILE) {
            A sums[4] = {};  // a tile on its own, in 4 chains: fewer roundings of large totals
#pragma unroll
            for (int i = 0; i < TILE_K; ++i) sums[i % 4] += dy_tile[i][threadIdx.x];
            total += (sums[0] + sums[1]) + (sums[2] + sums[3]);
        }
    }
    dw += static_cast<long long>(split) * split_stride + static_cast<long long>(group) * M * N;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int m = first_m + threadIdx.x / 16 * 4 + i, n = first_n + threadIdx.x % 16 * 4;
#pragma unroll
        for (int j = 0; j < 4; ++j)
            if (m < M && n + j < N) store_as(dw + static_cast<long long>(m) * N + n + j, acc[i][j]);
    }
    const int channel = first_m + static_cast<int>(threadIdx.x);
    if (bias != nullptr && first_n == 0 && threadIdx.x < TILE && channel < M)
        store_as(bias + static_cast<long long>(split) * split_stride + static_cast<long long>(group) * M + channel, total);
}
