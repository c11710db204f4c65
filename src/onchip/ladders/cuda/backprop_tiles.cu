// backprop_tiles.cu: an epoch from 16 x 16 tiles: feed forward, propagate, gradient, error, update.
//
// Idea    The matrices have 60,000 rows, so a grid of fixed size slides over them: it covers all columns, computes a
//         tile per block, and moves down by its height. The gradient's grid slides along both axes. The last layer also
//         stores the error and the gradient of each output. Targets come from global memory, through a texture object,
//         or by __ldg: a template argument.
// Floor   x is read by 4 columns of blocks forward and 4 backward; 188 MB each time, less what the caches keep. The
//         gradient's sums have 60,000 elements and only 196, 8 and 2 tiles: the last two layers use a few SMs.
// Order   Every sum has a fixed order: runs are bit-identical. The error is added in double.
// Layout  x (B, K), w (K, N), b (N,), h (B, N), targets, error and dz (B, N); g, v and w of all layers are contiguous.
// Shared  2 * 16 * 17 * 4 = 2 176 B; gradient 1 024 B more, sum_error 2 048 B
// Limits  B * K below 2^31; fp32; sm_80 up. A texture holds up to 2^27 elements.
#include "backprop.cuh"

struct Global {
    const float* at;
    __device__ __forceinline__ float get(int i) const { return at[i]; }
};
struct Texture {
    unsigned long long object;
    __device__ __forceinline__ float get(int i) const { return tex1Dfetch<float>(object, i); }
};
struct ReadOnly {
    const float* at;
    __device__ __forceinline__ float get(int i) const { return __ldg(at + i); }
};

__global__ void __launch_bounds__(THREADS)
feed_forward(const float* x, const float* w, const float* b, float* h, int B, int K, int N) {
    const Position at = in_tile();
    const int first_column = TILE * blockIdx.x, column = first_column + at.column;
    for (int first = TILE * blockIdx.y; first < B; first += TILE * gridDim.y) {
        const int row = first + at.row;
        const float sum = gemm_tile<PAD, false, false>(x, w, {first, first_column}, B, K, N);
        if (row < B && column < N) h[row * N + column] = sigmoid(sum + b[column]);
    }
}

template <class Targets>
__global__ void __launch_bounds__(THREADS)
feed_output(const float* x, const float* w, const float* b, Targets targets, float* error, float* dz, int B, int K,
            int N) {
    const Position at = in_tile();
    const int first_column = TILE * blockIdx.x, column = first_column + at.column;
    for (int first = TILE * blockIdx.y; first < B; first += TILE * gridDim.y) {
        const int row = first + at.row, i = row * N + column;
        const float sum = gemm_tile<PAD, false, false>(x, w, {first, first_column}, B, K, N);
        if (row >= B || column >= N) continue;
        const float output = sigmoid(sum + b[column]), difference = output - targets.get(i);
        error[i] = 0.5f * difference * difference;
        dz[i] = difference * sigmoid_derivative(output);
    }
}

// dz_previous (B, K) = dz (B, N) @ w^T, times the derivative of h (B, K)
__global__ void __launch_bounds__(THREADS)
propagate_tiles(const float* dz, const float* w, const float* h, float* dz_previous, int B, int K, int N) {
    const Position at = in_tile();
    const int first_column = TILE * blockIdx.x, column = first_column + at.column;
    for (int first = TILE * blockIdx.y; first < B; first += TILE * gridDim.y) {
        const int row = first + at.row, i = row * K + column;
        const float sum = gemm_tile<PAD, false, true>(dz, w, {first, first_column}, B, N, K);
        if (row < B && column < K) dz_previous[i] = sum * sigmoid_derivative(h[i]);
    }
}

// g (K, N) = x^T @ dz, g_bias (N,) = the sum of dz over the rows
__global__ void __launch_bounds__(THREADS)
gradient_tiles(const float* x, const float* dz, float* g, float* g_bias, int B, int K, int N) {
    __shared__ float shares[TILE][TILE];
    const Position at = in_tile();
    for (int first_column = TILE * blockIdx.x; first_column < N; first_column += TILE * gridDim.x) {
        const int column = first_column + at.column;
        for (int first = TILE * blockIdx.y; first < K; first += TILE * gridDim.y) {
            const int row = first + at.row;
            const float sum = gemm_tile<PAD, true, false>(x, dz, {first, first_column}, K, B, N);
            if (row < K && column < N) g[row * N + column] = sum;
        }
        if (blockIdx.y > 0) continue;
        float share = 0.0f;
        for (int k = at.row; k < B && column < N; k += TILE) share += dz[k * N + column];
        shares[at.row][at.column] = share;
        __syncthreads();
        if (at.row == 0 && column < N) {
            float sum = 0.0f;
            for (int i = 0; i < TILE; ++i) sum += shares[i][at.column];
            g_bias[column] = sum;
        }
        __syncthreads();
    }
}

// losses[0] = the sum of the error matrix. One block.
__global__ void __launch_bounds__(THREADS) sum_error(const float* error, double* losses, int count) {
    __shared__ double sums[THREADS];
    double sum = 0.0;
    for (int i = threadIdx.x; i < count; i += THREADS) sum += error[i];
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int i = 1; i < THREADS; ++i) sum += sums[i];
    losses[0] = sum;
}

// All weights and biases. eta and alpha are kernel parameters.
__global__ void __launch_bounds__(THREADS)
update_all(float* w, float* v, const float* g, float eta, float alpha, int count) {
    const int i = THREADS * blockIdx.x + threadIdx.x;
    if (i < count) momentum_step(w[i], v[i], g[i], eta, alpha);
}
