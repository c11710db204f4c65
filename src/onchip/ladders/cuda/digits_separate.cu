// digits_separate.cu: one kernel per layer and operation: the definition of a training step.
//
// Idea    A thread per element of each result. linear: a dot product per thread, both operands from global memory.
//         Softmax: a thread per row; cross-entropy: a half-warp per row, reduced by shuffles. The backward pass: p - y,
//         dz @ w^T, the mask of ReLU; then weights and biases, whose gradients are not stored but applied.
// Floor   Every value between two kernels is written and read: at batch 64 all of them are 0.5 MB and stay in L2. The
//         18 launches of a step are the larger cost.
// Layout  x (B, K), w (K, N), b (N,), z (B, N), y (B, N) one-hot; dz is not divided by B, the updates divide.
// Order   Every sum has a fixed order: runs are bit-identical.
// Limits  Cross-entropy: at most 16 classes. Any B; fp32; sm_80 up.
#include "digits.cuh"

__global__ void __launch_bounds__(THREADS)
linear(const float* x, const float* w, const float* b, float* z, int B, int K, int N) {
    const auto [row, column] = in_matrix();
    if (row >= B || column >= N) return;
    float sum = b[column];
    for (int k = 0; k < K; ++k) sum += x[row * K + k] * w[k * N + column];
    z[row * N + column] = sum;
}

__global__ void __launch_bounds__(THREADS) apply_relu(float* z, int count) {
    const int i = THREADS * blockIdx.x + threadIdx.x;
    if (i < count) z[i] = relu(z[i]);
}

__global__ void __launch_bounds__(THREADS) softmax_row(float* z, int B, int N) {
    const int row = THREADS * blockIdx.x + threadIdx.x;
    if (row >= B) return;
    float largest = z[row * N], sum = 0.0f;
    for (int j = 1; j < N; ++j) largest = fmaxf(largest, z[row * N + j]);
    for (int j = 0; j < N; ++j) sum += expf(z[row * N + j] - largest);
    for (int j = 0; j < N; ++j) z[row * N + j] = expf(z[row * N + j] - largest) / sum;
}

// losses[step] = the mean of -sum_j y[j] log p[j] over the rows. One block; 16 lanes per row, one per class.
__global__ void __launch_bounds__(THREADS)
cross_entropy_by_shuffles(const float* p, const float* y, float* losses, int step, int B, int N) {
    __shared__ float sums[TILE];
    const auto [group, j] = in_tile();
    float sum = 0.0f;
    for (int first = 0; first < B; first += TILE) {  // all lanes take every turn: the shuffles need all of them
        const int row = first + group;
        const bool is_valid = row < B && j < N && y[row * N + j] != 0.0f;  // 0 * log(0) is NaN
        sum += sum_lanes<TILE>(is_valid ? -y[row * N + j] * logf(p[row * N + j]) : 0.0f);
    }
    if (j == 0) sums[group] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        float total = 0.0f;
        for (int i = 0; i < TILE; ++i) total += sums[i];
        losses[step] = total / B;
    }
}

// Through softmax and cross-entropy at once: dz = p - y.
__global__ void __launch_bounds__(THREADS)
cross_entropy_softmax_grad(const float* p, const float* y, float* dz, int count) {
    const int i = THREADS * blockIdx.x + threadIdx.x;
    if (i < count) dz[i] = p[i] - y[i];
}

// da (B, K) = dz (B, N) @ w^T
__global__ void __launch_bounds__(THREADS) propagate(const float* dz, const float* w, float* da, int B, int K, int N) {
    const auto [row, column] = in_matrix();
    if (row >= B || column >= K) return;
    float sum = 0.0f;
    for (int k = 0; k < N; ++k) sum += dz[row * N + k] * w[column * N + k];
    da[row * K + column] = sum;
}

__global__ void __launch_bounds__(THREADS) mask_by_relu(float* da, const float* a, int count) {
    const int i = THREADS * blockIdx.x + threadIdx.x;
    if (i < count && !(a[i] > 0.0f)) da[i] = 0.0f;
}

// w -= rate * x^T @ dz
__global__ void __launch_bounds__(THREADS)
update_weights(const float* x, const float* dz, float* w, float rate, int B, int K, int N) {
    const auto [row, column] = in_matrix();
    if (row >= K || column >= N) return;
    float sum = 0.0f;
    for (int k = 0; k < B; ++k) sum += x[k * K + row] * dz[k * N + column];
    w[row * N + column] -= rate * sum;
}

__global__ void __launch_bounds__(THREADS) update_bias(const float* dz, float* b, float rate, int B, int N) {
    const int column = THREADS * blockIdx.x + threadIdx.x;
    if (column >= N) return;
    float sum = 0.0f;
    for (int k = 0; k < B; ++k) sum += dz[k * N + column];
    b[column] -= rate * sum;
}
