// separate.cu: one kernel per operation: gemm, ReLU, gemm, ReLU, gemm.
//
// Idea    The definition. One thread per output, 16 x 16 threads per block: 16 rows of x times 16 neurons. A warp
//         reads 16 rows and 2 neurons at a time.
// Floor   Each launch reads and writes global memory: (72 + 64 + 64*2 + 64 + 64 + 64*2 + 64 + 4)*4 B = 2 352 B per row,
//         if no value is read twice. The network needs 304 B.
// Layout  x (B, STRIDE), y (B, N), row-major; w (N, STRIDE). Only K of the STRIDE columns are read.
// Limits  Any B; fp32; sm_80 up.
#include "decode.cuh"

template <int K, int STRIDE, int N>
__global__ void __launch_bounds__(THREADS)
mat_mul(const float* __restrict__ x, const float* __restrict__ w, float* __restrict__ y, long long B) {
    const long long row = 16LL * blockIdx.x + threadIdx.x;
    const int n = 16 * blockIdx.y + threadIdx.y;
    if (row < B && n < N) y[row * N + n] = dot<K>(w + n * STRIDE, x + row * STRIDE);
}

__global__ void __launch_bounds__(THREADS) relu_each(float* y, long long count) {
    const long long i = 1LL * THREADS * blockIdx.x + threadIdx.x;
    if (i < count) y[i] = relu(y[i]);
}
