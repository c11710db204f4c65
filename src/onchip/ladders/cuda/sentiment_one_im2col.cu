// sentiment_one_im2col.cu: the report's second further idea: all four convolutions in one im2col and one gemm.
//
// Idea    Two launches instead of eight. A group of 16 sentences has 16 * (14 + 12 + 10 + 8) columns; those of a
//         convolution have its own number of rows, C*K, so they are stored as four matrices, one after the other. A
//         block works for one convolution, and the heaviest blocks (K = 9) come first, so the light ones fill the tail.
// Floor   As in sentiment_joined.cu. What can be gained is the tails of three of four launches: 64 * 16 blocks each, and
//         an H200 runs 396 at a time.
// Layout  x (B, C, L); of convolution i, one after the other: windows (B/16, C*K_i, 16*STEPS_i), w (C_out, C*K_i), bias
//         (C_out,), y (B, C_out, STEPS_i). K_i = L + 1 - STEPS_i.
// Shared  (64*40 + 32*(16*STEPS + 8)) * 2 B of the largest STEPS: 19 968 B
// Limits  Any B; C divisible by 8; STEPS descend; sm_80 up.
#include "sentiment_joined.cuh"

constexpr int CONVOLUTIONS = 4;

template <int S0, int S1, int S2, int S3>
__device__ __forceinline__ int steps_of(int convolution) {
    return convolution == 0 ? S0 : convolution == 1 ? S1 : convolution == 2 ? S2 : S3;
}

// Grid (C, 4 * B/16): a block writes the rows of a channel for one convolution.
template <int S0, int S1, int S2, int S3>
__global__ void __launch_bounds__(GEMM_THREADS)
spread_all(const float* __restrict__ x, u32* __restrict__ windows, long long B, long long L, long long C) {
    const int groups = gridDim.y / CONVOLUTIONS, group = blockIdx.y % groups, convolution = blockIdx.y / groups;
    const int channel = blockIdx.x, steps = steps_of<S0, S1, S2, S3>(convolution);
    const long long K = L + 1 - steps;
    for (int i = 0; i < convolution; ++i) {
        const int skipped = steps_of<S0, S1, S2, S3>(i);
        windows += groups * C * (L + 1 - skipped) * JOINED / 2 * skipped;
    }
    windows += K * (JOINED / 2 * steps) * (group * C + channel);
    spread_channel(x + channel * L, windows, K, steps, JOINED * group, B, C * L);
}

// Grid (C_out / 64, 4 * B/16): the last convolution's blocks first.
template <int S0, int S1, int S2, int S3>
__global__ void __launch_bounds__(GEMM_THREADS, 3)
matmul_all(const f16* __restrict__ w, const f16* __restrict__ windows, const float* __restrict__ bias,
           float* __restrict__ y, long long B, long long L, long long C, long long C_out) {
    __shared__ __align__(16) f16 tiles[tile_elements(S0)];
    const int groups = gridDim.y / CONVOLUTIONS, group = blockIdx.y % groups;
    const int convolution = CONVOLUTIONS - 1 - blockIdx.y / groups;
    for (int i = 0; i < convolution; ++i) {
        const int steps = steps_of<S0, S1, S2, S3>(i);
        const long long rows = C * (L + 1 - steps);
        w += C_out * rows;
        windows += groups * rows * JOINED * steps;
        bias += C_out;
        y += B * C_out * steps;
    }
    const int rows = C * (L + 1 - steps_of<S0, S1, S2, S3>(convolution)), first = JOINED * group;
    windows += 1LL * group * rows * JOINED * steps_of<S0, S1, S2, S3>(convolution);
    const int n0 = CHANNELS * blockIdx.x;
    if (convolution == 0) convolve<S0>(w, windows, bias, y, tiles, n0, C_out, rows, first, B);
    else if (convolution == 1) convolve<S1>(w, windows, bias, y, tiles, n0, C_out, rows, first, B);
    else if (convolution == 2) convolve<S2>(w, windows, bias, y, tiles, n0, C_out, rows, first, B);
    else convolve<S3>(w, windows, bias, y, tiles, n0, C_out, rows, first, B);
}
