// registers.cu: the whole network in registers, two threads to a neuron.
//
// Idea    A row of weights is too long for one thread: 72 + 64 registers would leave room for one block. Two
//         neighbouring threads share a neuron: each has half of its row in both hidden layers, 36 and 32 weights, and
//         the two halves of the sum meet in a shuffle. In the last layer a warp has an output: 2 weights a thread, a
//         tree of five shuffles. No weight is read again after the start.
// Floor   304 B a row (152 in half precision), and no weight from shared memory: a multiply-add reads a number that
//         half of the warp reads too. 2 rows an iteration and three barriers: the barriers are what is left to save.
// Layout  x (B, 72), y (B, 4), row-major; w0 (64, 72), w1 (64, 64), w2 (4, 64), all of type T. T = float reads 71
//         columns, T = f16 all 72, and adds up in half precision too.
// Shared  2*(72 + 64 + 64)*sizeof(T) = 1 600 or 800 B
// Limits  Any B (rows past the end are zeros and not written); sm_80 up.
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
