// sentiment_wmma.cu: im2col and a gemm on tensor cores.
//
// Idea    spread_input writes every window of x as a column: row c*K + k, column t is x[c][t + k]. Then a convolution
//         is w (C_out, C*K) times that matrix, and each weight is read from contiguous memory. Zeros pad the columns to
//         16, the least that WMMA multiplies.
//         matmul_wmma: a warp computes 16 channels of one sentence, loading its fragments from global memory. Its 16 x
//         16 sums go to shared memory and from there, without the padding, to y.
// Floor   The padding is computed too: 14, 12, 10 and 8 of 16 columns are used, 384/244 = 1.57 times the flop. A warp
//         reads 512 + 512 B per 4 096 multiply-adds. K = 9: 75 MB of weights and 75 MB of windows per sentence, for
//         604 M multiply-adds, 1.2 us of an H200's tensor cores. They wait for L2.
// Layout  x (B, C, L) fp32; windows (B, C*K, 16) fp16; w (C_out, C*K) fp16; y (B, C_out, L - K + 1) fp32.
// Shared  16 warps * 16 * 16 * 4 = 16 384 B
// Limits  C and C_out divisible by 16; L - K < 16; B * C*K < 2^31; sm_80 up.
#include "wmma.cuh"

constexpr int WARPS = 16, SPREAD_THREADS = 256;

// A thread writes two neighbouring columns.
__global__ void __launch_bounds__(SPREAD_THREADS)
spread_input(const float* __restrict__ x, u32* __restrict__ windows, long long B, long long L, long long C,
             long long K) {
    constexpr int PAIRS = WMMA_SIZE / 2;
    const u32 i = 1u * SPREAD_THREADS / PAIRS * blockIdx.x + threadIdx.x / PAIRS, t = 2 * (threadIdx.x % PAIRS);
    const u32 rows = C * K, row = i % rows, k = row % static_cast<u32>(K), steps = L - K + 1;
    if (i >= B * rows) return;
    const float* window = x + (i / rows * C + row / static_cast<u32>(K)) * L + k;
    const float first = t < steps ? window[t] : 0.0f, second = t + 1 < steps ? window[t + 1] : 0.0f;
    windows[1LL * PAIRS * i + t / 2] = pack<f16>(first, second);
}

// Grid (sentences, C_out / 256).
__global__ void __launch_bounds__(32 * WARPS)
matmul_wmma(const f16* __restrict__ w, const f16* __restrict__ windows, const float* __restrict__ bias,
            float* __restrict__ y, long long C_out, long long rows, long long steps) {
    __shared__ float padded[WARPS][WMMA_SIZE * WMMA_SIZE];
    const int warp = threadIdx.x / 32;
    const long long n = 1LL * WMMA_SIZE * (WARPS * blockIdx.y + warp);
    if (n >= C_out) return;  // a whole warp; no barrier of the block follows
    const f16* columns = windows + blockIdx.x * rows * WMMA_SIZE;
    FragmentA a;
    FragmentB b;
    Accumulators c;
    for (long long k = 0; k < rows; k += WMMA_SIZE) {
        load_matrix(a, w + n * rows + k, rows);
        load_matrix(b, columns + k * WMMA_SIZE, WMMA_SIZE);
        multiply_add(c, a, b);
    }
    store_matrix(padded[warp], c, WMMA_SIZE);
    __syncwarp();
    copy_unpadded(padded[warp], bias + n, y + (blockIdx.x * C_out + n) * steps, steps);
}
