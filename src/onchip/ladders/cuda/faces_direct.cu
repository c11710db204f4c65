// faces_direct.cu: a 5x5 transposed convolution with stride 2 of one face, one thread per output.
//
// Idea    y[h, w, k] = bias[k] + sum of x[(h - 3 + r) / 2, (w - 3 + s) / 2, c] * weights[4 - r, 4 - s, k, c] over the
//         taps (r, s) whose halves are whole: one or two of every four, 6.25 of 25 on average.
//         USES_PARITY = false: each thread tests all 25 taps. A warp covers 4 x 4 pixels, all four parities, so each tap
//         is right for a quarter of its lanes, and the warp runs the loop over c 25 times with the others masked off.
//         USES_PARITY = true: r begins at the parity of h and steps by 2, s likewise: no test, and lanes of different
//         parities run different taps in the same instruction. At most 3 x 3 loops over c instead of 25.
// Floor   2 * 6.25 * C * K flop per output pixel. Both operands of an FFMA come through the L1 cache: x is broadcast to
//         the lanes of one input pixel, the weights to those of one k.
// Layout  x (n, n, C), y (2n, 2n, K), C and K fastest; weights (5, 5, K, C), as network.bin stores them.
// Shared  none
// Limits  One face per launch; any n, C, K; fp32; sm_80 up.
constexpr int TILE = 4, CHANNELS = 2;  // a warp: 4 x 4 pixels, 2 channels

template <bool USES_PARITY>
__global__ void __launch_bounds__(TILE * TILE * CHANNELS)
tconv_direct(const float* __restrict__ x, const float* __restrict__ weights, const float* __restrict__ bias,
             float* __restrict__ y, int n, int C, int K) {
    const int tiles = (2 * n + TILE - 1) / TILE;  // per row of pixels
    const int h = TILE * (blockIdx.x / tiles) + threadIdx.x % TILE;
    const int w = TILE * (blockIdx.x % tiles) + threadIdx.x / TILE % TILE;
    const int k = CHANNELS * blockIdx.y + threadIdx.x / (TILE * TILE);
    if (h >= 2 * n || w >= 2 * n || k >= K) return;
    const int first_r = USES_PARITY ? 1 - h % 2 : 0, first_s = USES_PARITY ? 1 - w % 2 : 0, step = USES_PARITY ? 2 : 1;
    float sum = bias[k];
    for (int r = first_r; r < 5; r += step)
        for (int s = first_s; s < 5; s += step) {
            const int i = h - 3 + r, j = w - 3 + s;  // in x with a zero between any two pixels
            if (!USES_PARITY && (i % 2 != 0 || j % 2 != 0)) continue;
            if (i < 0 || j < 0 || i >= 2 * n || j >= 2 * n) continue;
            const float* pixel = x + (i / 2 * n + j / 2) * C;
            const float* tap = weights + (((4 - r) * 5 + 4 - s) * K + k) * C;
            for (int c = 0; c < C; ++c) sum += pixel[c] * tap[c];
        }
    y[(h * 2 * n + w) * K + k] = sum;
}
