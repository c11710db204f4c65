// sentiment_joined.cu: the report's first further idea: 16 sentences joined along the columns of the gemm.
//
// Idea    [B/16, C*K, 16*STEPS] instead of [B, C*K, 16]: no column is padding, and a weight that is loaded serves 16
//         sentences instead of one. The gemm's tile is two-dimensional (sentiment_joined.cuh).
// Floor   2.05 Gflop per sentence, none wasted: for 1024, 2.1 Tflop / 989 Tflop/s = 2.1 ms on an H200. From L2 come
//         the weights, 201 MB per 16 sentences, 12.9 GB, and the windows, read by C_out / 64 = 16 blocks: 32.8 GB. One
//         sentence at a time, the weights alone are 206 GB.
// Layout  x (B, C, L) fp32; windows (B/16, C*K, 16*STEPS) fp16; w (C_out, C*K) fp16; y (B, C_out, STEPS) fp32.
// Shared  (64*40 + 32*(16*STEPS + 8)) * 2 B: 19 968 B with STEPS = 14
// Limits  Any B; C divisible by 8; sm_80 up.
#include "sentiment_joined.cuh"

// Grid (C, B/16): a block writes the rows of a channel.
__global__ void __launch_bounds__(GEMM_THREADS)
spread_joined(const float* __restrict__ x, u32* __restrict__ windows, long long B, long long L, long long C,
              long long K) {
    const int channel = blockIdx.x, group = blockIdx.y, steps = L - K + 1;
    windows += K * (JOINED / 2 * steps) * (group * C + channel);
    spread_channel(x + channel * L, windows, K, steps, JOINED * group, B, C * L);
}

// Grid (C_out / 64, B/16): blocks that run at the same time read the same windows.
template <int STEPS>
__global__ void __launch_bounds__(GEMM_THREADS, 3)
matmul_joined(const f16* __restrict__ w, const f16* __restrict__ windows, const float* __restrict__ bias,
              float* __restrict__ y, long long B, long long C_out, long long rows) {
    __shared__ __align__(16) f16 tiles[tile_elements(STEPS)];
    convolve<STEPS>(w, windows + blockIdx.y * rows * JOINED * STEPS, bias, y, tiles, CHANNELS * blockIdx.x, C_out, rows,
                    JOINED * blockIdx.y, B);
}
