// registers.cu: the whole network with every weight in registers, two threads per neuron.
//
// Idea    One thread per neuron would need 72 + 64 weight registers, which leaves one block per SM. Two neighbouring
//         threads share a neuron: each holds half of its row in both hidden layers, 36 and 32 weights, and a shuffle
//         adds the two partial sums. In the last layer a warp computes one output: 2 weights per thread and a tree of
//         five shuffles. Weights are loaded once per block.
// Floor   304 B per row (152 in fp16), no weight from shared memory: the operand that an FMA reads there is the same
//         for half of the warp. An iteration has 2 rows and three barriers; the barriers are what is left to save.
// Layout  x (B, 72), y (B, 4), row-major; w0 (64, 72), w1 (64, 64), w2 (4, 64), all of type T. T = float reads 71
//         columns, T = f16 all 72; T is also the accumulator type.
// Shared  2*(72 + 64 + 64)*sizeof(T) = 1 600 or 800 B
// Limits  Any B (rows past B are zero and not written); sm_80 up.
#include "decode.cuh"

template <class T>
__global__ void __launch_bounds__(THREADS, 2)
registers(const T* __restrict__ x, const T* __restrict__ w0, const T* __restrict__ w1, const T* __restrict__ w2,
          T* __restrict__ y, long long B) {
    constexpr int ROWS = THREADS / W / 2, K = sizeof(T) == 4 ? SIGNALS : COLUMNS;
    alignas(16) __shared__ T tile[ROWS * COLUMNS], h0[ROWS * W], h1[ROWS * W];
    const int row = threadIdx.x / (2 * W), n = threadIdx.x % (2 * W) / 2, half = threadIdx.x % 2;
    const int lane = threadIdx.x % 32, output = threadIdx.x / 32 % D_out;
    T r0[COLUMNS / 2], r1[W / 2], r2[W / 32];

#pragma unroll
    for (int i = 0; i < COLUMNS / 2; ++i) {
        const int k = half * (COLUMNS / 2) + i;
        r0[i] = k < K ? w0[n * COLUMNS + k] : T{};
    }
#pragma unroll
    for (int i = 0; i < W / 2; ++i) r1[i] = w1[n * W + half * (W / 2) + i];
#pragma unroll
    for (int i = 0; i < W / 32; ++i) r2[i] = w2[output * W + lane * (W / 32) + i];

    for (long long first = 1LL * ROWS * blockIdx.x; first < B; first += 1LL * ROWS * gridDim.x) {
        load_rows<ROWS, K, COLUMNS>(x, tile, first, B);
        __syncthreads();
        T sum = sum_lanes<2>(dot<4>(r0, tile + row * COLUMNS + half * (COLUMNS / 2)));
        if (half == 0) h0[row * W + n] = relu(sum);
        __syncthreads();
        sum = sum_lanes<2>(dot<4>(r1, h0 + row * W + half * (W / 2)));
        if (half == 0) h1[row * W + n] = relu(sum);
        __syncthreads();
        sum = sum_lanes<32>(dot<2>(r2, h1 + row * W + lane * (W / 32)));
        if (lane == 0 && first + row < B) y[(first + row) * D_out + output] = sum;
    }
}
