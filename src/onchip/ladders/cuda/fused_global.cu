// fused_global.cu: the whole network in one launch; hidden activations go through global memory.
//
// Idea    A block computes 4 rows x 64 neurons: thread t has row t / 64 and neuron t % 64 in both hidden layers. In the
//         last layer every 16th thread computes one output and the others idle.
// Floor   One launch instead of five, and ReLU is fused. The block that wrote a hidden value reads it again, so the
//         load hits L1 or L2. But a warp now reads 1 row and 32 neurons, and each neuron's weight is in a different
//         cache line: more lines per load than the 16 + 2 of separate.cu.
// Layout  x (B, 72), h0 and h1 (B, 64), y (B, 4), row-major; w0 (64, 72), w1 (64, 64), w2 (4, 64). 71 columns are read.
// Limits  Any B (rows past B are skipped); fp32; sm_80 up.
#include "decode.cuh"

// h0 and h1 are written, then read: without __restrict__ and const the compiler cannot move the loads up.
__global__ void __launch_bounds__(THREADS)
fused_global(const float* __restrict__ x, const float* __restrict__ w0, const float* __restrict__ w1,
             const float* __restrict__ w2, float* h0, float* h1, float* __restrict__ y, long long B) {
    const long long row = 4LL * blockIdx.x + threadIdx.x / W;
    const int n = threadIdx.x % W;
    if (row < B) h0[row * W + n] = relu(dot<SIGNALS>(w0 + n * COLUMNS, x + row * COLUMNS));
    __syncthreads();
    if (row < B) h1[row * W + n] = relu(dot<W>(w1 + n * W, h0 + row * W));
    __syncthreads();
    if (row < B && n % 16 == 0) y[row * D_out + n / 16] = dot<W>(w2 + n / 16 * W, h1 + row * W);
}
