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
// Limits  Any sizes; float32 arithmetic; sm_80 up.
#include "common/fast_divide.cuh"

constexpr int TILE = 64, TILE_K = 16, THREADS = 256, STRIDE = TILE + 4;

struct Windows {
    Divider positions, width_out, taps, taps_w;  // positions of y, and per line of them; taps, and per line of them
    int stride_h, stride_w, dilation_h, dilation_w, before_h, before_w, height, width;
    long long y_row, x_row;  // elements per row of the batch
};

__device__ __forceinline__ void multiply_tile(const float (*dy)[STRIDE], const float (*x)[STRIDE], float (&acc)[4][4]) {
    const int m = threadIdx.x / 16 * 4, n = threadIdx.x % 16 * 4;
#pragma unroll
    for (int k = 0; k < TILE_K; ++k) {
        const float4 a = *reinterpret_cast<const float4*>(&dy[k][m]), b = *reinterpret_cast<const float4*>(&x[k][n]);
        const float as[4] = {a.x, a.y, a.z, a.w}, bs[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) acc[i][j] = fmaf(as[i], bs[j], acc[i][j]);
    }
}

// What a thread loads of a tile of 16 k: 4 elements of dy and of x.
template <bool IS_ROWS, class Index>
struct Loader;

template <class Index>
struct Loader<true, Index> {  // 4 adjacent elements of one k
    const float *dy, *x;
    long long M, N, first_m, first_n;
    int line, lane;

    __device__ Loader(const float* dy, const float* x, int M, int N, int m, int n, const Windows&)
        : dy(dy), x(x), M(M), N(N), first_m(m + threadIdx.x % 16 * 4), first_n(n + threadIdx.x % 16 * 4),
          line(threadIdx.x / 16), lane(threadIdx.x % 16 * 4) {}
    __device__ __forceinline__ void load(long long k, long long end, float (&a)[4], float (&b)[4]) const {
        const long long row = k + line;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            a[i] = row < end && first_m + i < M ? dy[row * M + first_m + i] : 0;
            b[i] = row < end && first_n + i < N ? x[row * N + first_n + i] : 0;
        }
    }
    __device__ __forceinline__ void store(float (*a_tile)[STRIDE], float (*b_tile)[STRIDE], const float (&a)[4],
                                          const float (&b)[4]) const {
        *reinterpret_cast<float4*>(&a_tile[line][lane]) = float4{a[0], a[1], a[2], a[3]};
        *reinterpret_cast<float4*>(&b_tile[line][lane]) = float4{b[0], b[1], b[2], b[3]};
    }
};

template <class Index>
struct Loader<false, Index> {  // one k of 4 channels of y, and of 4 elements of the filter
    const float *dy, *x;
    const Windows& windows;
    long long y_at[4], x_at[4];  // offsets; -1: past the end
    int down[4], right[4];       // of the taps
    int lane, line;

    __device__ Loader(const float* dy, const float* x, int M, int N, int m, int n, const Windows& windows)
        : dy(dy), x(x), windows(windows), lane(threadIdx.x % 16), line(threadIdx.x / 16) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int channel = m + line + 16 * i;
            y_at[i] = channel < M ? static_cast<long long>(channel) * windows.positions.size : -1;
            u32 tap = n + line + 16 * i;
            const bool is_inside = static_cast<int>(tap) < N;
            const u32 of_channel = pop_index(tap, windows.taps);
            u32 h = of_channel;
            const u32 w = pop_index(h, windows.taps_w);
            x_at[i] = is_inside ? static_cast<long long>(tap) * windows.height * windows.width : -1;
            down[i] = static_cast<int>(h) * windows.dilation_h - windows.before_h;
            right[i] = static_cast<int>(w) * windows.dilation_w - windows.before_w;
        }
    }
    __device__ __forceinline__ void load(long long k, long long end, float (&a)[4], float (&b)[4]) const {
        const bool is_inside = k + lane < end;
        Index row = is_inside ? static_cast<Index>(k + lane) : 0;
        const u32 position = pop_index(row, windows.positions);
        u32 line_out = position;
        const int column = static_cast<int>(pop_index(line_out, windows.width_out)) * windows.stride_w;
        const int top = static_cast<int>(line_out) * windows.stride_h;
        const float *dy_row = dy + row * windows.y_row + position, *x_row = x + row * windows.x_row;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            a[i] = is_inside && y_at[i] >= 0 ? dy_row[y_at[i]] : 0;
            const int h = top + down[i], w = column + right[i];
            const bool is_pixel = is_inside && x_at[i] >= 0 && static_cast<u32>(h) < static_cast<u32>(windows.height) &&
                                  static_cast<u32>(w) < static_cast<u32>(windows.width);
            b[i] = is_pixel ? x_row[x_at[i] + static_cast<long long>(h) * windows.width + w] : 0;
        }
    }
    __device__ __forceinline__ void store(float (*a_tile)[STRIDE], float (*b_tile)[STRIDE], const float (&a)[4],
                                          const float (&b)[4]) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            a_tile[lane][line + 16 * i] = a[i];
            b_tile[lane][line + 16 * i] = b[i];
        }
    }
};

// grid   tiles of n and m; groups of each split of K
// Index  of K; bias: null if it has no gradient
template <bool IS_ROWS, class Index>
__global__ void __launch_bounds__(THREADS)
    weight_grad(const float* dy, const float* x, float* dw, float* bias, int M, int N, u32 tiles_n, u32 groups, long long K,
                long long split_k, long long split_stride, const __grid_constant__ Windows windows) {
    __shared__ float4 tiles[2][2][TILE_K * STRIDE / 4];
    const int first_m = static_cast<int>(blockIdx.x / tiles_n) * TILE, first_n = static_cast<int>(blockIdx.x % tiles_n) * TILE;
    const int group = blockIdx.y % groups, split = blockIdx.y / groups, channels = N / static_cast<int>(windows.taps.size);
    const long long group_x = static_cast<long long>(group) * channels * windows.height * windows.width;
    const Loader<IS_ROWS, Index> loader(dy + static_cast<long long>(group) * M * windows.positions.size, x + group_x, M, N, first_m,
                                 first_n, windows);
    const long long begin = static_cast<long long>(split) * split_k, end = begin + split_k < K ? begin + split_k : K;
    float acc[4][4] = {}, total = 0, a[4], b[4];
    loader.load(begin, end, a, b);
    int stage = 0;
    for (long long k = begin; k < end; k += TILE_K, stage ^= 1) {
        auto dy_tile = reinterpret_cast<float(*)[STRIDE]>(tiles[stage][0]);
        auto x_tile = reinterpret_cast<float(*)[STRIDE]>(tiles[stage][1]);
        loader.store(dy_tile, x_tile, a, b);
        __syncthreads();  // the other stage is free: all have multiplied it before they arrive here
        if (k + TILE_K < end) loader.load(k + TILE_K, end, a, b);
        multiply_tile(dy_tile, x_tile, acc);
        if (bias != nullptr && first_n == 0 && threadIdx.x < TILE) {
            float sums[4] = {};  // a tile on its own, in 4 chains: fewer roundings of large totals
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
            if (m < M && n + j < N) dw[static_cast<long long>(m) * N + n + j] = acc[i][j];
    }
    const int channel = first_m + static_cast<int>(threadIdx.x);
    if (bias != nullptr && first_n == 0 && threadIdx.x < TILE && channel < M)
        bias[static_cast<long long>(split) * split_stride + static_cast<long long>(group) * M + channel] = total;
}
