// shared_memory.cu: the whole network in one launch, weights and hidden activations in shared memory.
//
// Idea    fused_shared: a block has 4 rows, as in fused_global.cu. It stages one layer's weights, uses them for its 4
//         rows, then stages the next layer in the same buffer. Global memory is read once per weight for 4 rows.
//         whole_shared: a persistent kernel. A block stages all weights once and loops over tiles of 4 rows; the grid
//         has as many blocks as the chip holds at a time.
// Floor   Both move 304 B per row plus 36 KB of weights per block. fused_shared has one block per 4 rows: 9 KB per row,
//         from L2. Then shared memory bounds it: each FFMA reads its weight there, 32 per cycle and SM, where the SM
//         could issue 128.
// Layout  x (B, 72), y (B, 4), row-major; w0 (64, 72), w1 (64, 64), w2 (4, 64). 71 columns are read.
// Shared  fused_shared: (64*71 + 4*72 + 2*4*64)*4 = 21 376 B; whole_shared: 16 640 + 1 040 B more, for w1 and w2.
// Limits  Any B (rows past B are zero and not written); fp32; sm_80 up.
#include "decode.cuh"

constexpr int ROWS = THREADS / W;

__global__ void __launch_bounds__(THREADS)
fused_shared(const float* __restrict__ x, const float* __restrict__ w0, const float* __restrict__ w1,
             const float* __restrict__ w2, float* __restrict__ y, long long B) {
    __shared__ float w[W * odd(SIGNALS)], tile[ROWS * COLUMNS], h0[ROWS * W], h1[ROWS * W];
    const long long first = 1LL * ROWS * blockIdx.x;
    const int row = threadIdx.x / W, n = threadIdx.x % W;

    load_rows<ROWS, SIGNALS, COLUMNS>(x, tile, first, B);
    stage<W, SIGNALS, COLUMNS>(w0, w);
    __syncthreads();
    h0[row * W + n] = relu(dot<SIGNALS>(w + n * odd(SIGNALS), tile + row * COLUMNS));
    __syncthreads();
    stage<W, W, W>(w1, w);
    __syncthreads();
    h1[row * W + n] = relu(dot<W>(w + n * odd(W), h0 + row * W));
    __syncthreads();
    stage<D_out, W, W>(w2, w);
    __syncthreads();
    if (n % 16 == 0 && first + row < B)
        y[(first + row) * D_out + n / 16] = dot<W>(w + n / 16 * odd(W), h1 + row * W);
}

__global__ void __launch_bounds__(THREADS)
whole_shared(const float* __restrict__ x, const float* __restrict__ w0, const float* __restrict__ w1,
             const float* __restrict__ w2, float* __restrict__ y, long long B) {
    __shared__ float s0[W * odd(SIGNALS)], s1[W * odd(W)], s2[D_out * odd(W)];
    __shared__ float tile[ROWS * COLUMNS], h0[ROWS * W], h1[ROWS * W];
    const int row = threadIdx.x / W, n = threadIdx.x % W;

    stage<W, SIGNALS, COLUMNS>(w0, s0);
    stage<W, W, W>(w1, s1);
    stage<D_out, W, W>(w2, s2);
    for (long long first = 1LL * ROWS * blockIdx.x; first < B; first += 1LL * ROWS * gridDim.x) {
        load_rows<ROWS, SIGNALS, COLUMNS>(x, tile, first, B);
        __syncthreads();
        h0[row * W + n] = relu(dot<SIGNALS>(s0 + n * odd(SIGNALS), tile + row * COLUMNS));
        __syncthreads();
        h1[row * W + n] = relu(dot<W>(s1 + n * odd(W), h0 + row * W));
        __syncthreads();
        if (n % 16 == 0 && first + row < B)
            y[(first + row) * D_out + n / 16] = dot<W>(s2 + n / 16 * odd(W), h1 + row * W);
        // No barrier here: the next barrier precedes every read of the next tile and every write of h0 and h1.
    }
}
