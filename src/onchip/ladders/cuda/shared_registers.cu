// shared_registers.cu: the second layer's weights in registers, the others in shared memory.
//
// Idea    A persistent kernel. A thread has the same neuron for every row, so its 64 weights of the second layer stay
//         in registers. That layer's FFMAs then read only h0 from shared memory, as a broadcast to the whole warp.
//         USES_ALL = false: in the last layer every 16th thread computes one output and the others idle.
//         USES_ALL = true: 16 threads share an output, 4 FFMAs each, and reduce by shuffles.
// Floor   As whole_shared, but half of the FFMAs read no weight from shared memory.
// Layout  x (B, 72), y (B, 4), row-major; w0 (64, 72), w1 (64, 64), w2 (4, 64). 71 columns are read.
// Shared  (64*71 + 4*65 + 4*72 + 2*4*64)*4 = 22 416 B
// Limits  Any B (rows past B are zero and not written); fp32; sm_80 up.
#include "decode.cuh"

constexpr int ROWS = THREADS / W;

// At least two blocks per SM: 64 weights and the loop state fit into 128 registers.
template <bool USES_ALL>
__global__ void __launch_bounds__(THREADS, 2)
shared_registers(const float* __restrict__ x, const float* __restrict__ w0, const float* __restrict__ w1,
                 const float* __restrict__ w2, float* __restrict__ y, long long B) {
    __shared__ float s0[W * odd(SIGNALS)], s2[D_out * odd(W)];
    alignas(16) __shared__ float tile[ROWS * COLUMNS], h0[ROWS * W], h1[ROWS * W];
    const int row = threadIdx.x / W, n = threadIdx.x % W, output = n / 16, part = n % 16;
    float r1[W];

#pragma unroll
    for (int k = 0; k < W; ++k) r1[k] = w1[n * W + k];
    stage<W, SIGNALS, COLUMNS>(w0, s0);
    stage<D_out, W, W>(w2, s2);
    for (long long first = 1LL * ROWS * blockIdx.x; first < B; first += 1LL * ROWS * gridDim.x) {
        load_rows<ROWS, SIGNALS, COLUMNS>(x, tile, first, B);
        __syncthreads();
        h0[row * W + n] = relu(dot<SIGNALS>(s0 + n * odd(SIGNALS), tile + row * COLUMNS));
        __syncthreads();
        h1[row * W + n] = relu(dot<4>(r1, h0 + row * W));
        __syncthreads();
        float sum = 0.0f;
        if (USES_ALL) {
#pragma unroll
            for (int k = part; k < W; k += 16) sum = fma(s2[output * odd(W) + k], h1[row * W + k], sum);
            sum = sum_lanes<16>(sum);
        } else if (part == 0) {
            sum = dot<W>(s2 + output * odd(W), h1 + row * W);
        }
        if (part == 0 && first + row < B) y[(first + row) * D_out + output] = sum;
    }
}
