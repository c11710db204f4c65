// faces_layers.cu: the layers of the generator other than its transposed convolutions, one kernel each.
//
// Idea    One thread per element; consecutive threads have consecutive elements, so every load and store coalesces.
//         Batch norm is not folded into the convolution before it: the report launches it as a kernel, and so do these
//         rungs.
// Floor   An activation that each kernel reads and writes in memory moves six times before the next convolution has it,
//         instead of twice: 3.1 MB per face of the full generator, of which 2 MB are those of batch_norm and relu_each.
// Layout  z (N, D_in), w (D_in, D_out); activations (faces, height, width, C), C fastest.
// Shared  none
// Limits  Any sizes; fp32; sm_80 up.

// y (faces, D_out) = z w + bias, for the faces from `first` of z on.
__global__ void project(const float* __restrict__ z, const float* __restrict__ w, const float* __restrict__ bias,
                        float* __restrict__ y, long long first, long long faces, int D_in, int D_out) {
    const long long i = 1LL * blockDim.x * blockIdx.x + threadIdx.x, face = i / D_out;
    const int d = i % D_out;
    if (face >= faces) return;
    float sum = bias[d];
    for (int k = 0; k < D_in; ++k) sum += z[(first + face) * D_in + k] * w[1LL * k * D_out + d];
    y[i] = sum;
}

__global__ void batch_norm(float* y, const float* __restrict__ mean, const float* __restrict__ var,
                           const float* __restrict__ gamma, const float* __restrict__ beta, long long count, int C) {
    const long long i = 1LL * blockDim.x * blockIdx.x + threadIdx.x;
    const int c = i % C;
    if (i < count) y[i] = gamma[c] * (y[i] - mean[c]) / sqrtf(var[c] + 1e-5f) + beta[c];
}

// NaN propagates; fmaxf(v, 0) would return 0.
__global__ void relu_each(float* y, long long count) {
    const long long i = 1LL * blockDim.x * blockIdx.x + threadIdx.x;
    if (i < count && y[i] < 0.0f) y[i] = 0.0f;
}

// y, from element `first` on.
__global__ void tanh_each(const float* __restrict__ x, float* __restrict__ y, long long first, long long count) {
    const long long i = 1LL * blockDim.x * blockIdx.x + threadIdx.x;
    if (i < count) y[first + i] = tanhf(x[i]);
}
