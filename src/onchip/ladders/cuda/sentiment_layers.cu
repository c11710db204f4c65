// sentiment_layers.cu: every layer of sentiment but the Linears, one kernel each. All rungs share them, but for conv1d,
// which is the naive rung alone.
//
// Idea    conv1d: the definition. One thread per output, and a loop over C * K products. 256 threads cover some 18
//         channels: neighbouring threads read neighbouring x and, within a channel, the same weight.
//         The others: one thread per element of the output; permute per element of its input; take_max per sequence.
// Floor   conv1d does 2 loads per FFMA, both from L1 or L2. An SM issues 128 FFMA per cycle, but only 32 loads: a
//         sentence's 1.02 G multiply-adds are 2.05 G loads, 2.05 G / (132 * 32 * 1.98 GHz) = 245 us on an H200.
//         permute writes 4 B per 64 B of stride: each warp touches 32 cache lines per store.
// Layout  ids (B, L); embedding (B, L, E), permuted (B, E, L); w (C_out, C, K); y (B, C_out, L - K + 1), row-major.
// Limits  Any sizes; four convolutions in concat_four; fp32; sm_80 up.

constexpr int THREADS = 256;

// Grid (tokens, E / 256). ids are in range.
__global__ void __launch_bounds__(THREADS)
embed(const int* __restrict__ ids, const float* __restrict__ table, float* __restrict__ y, long long E) {
    const long long e = 1LL * THREADS * blockIdx.y + threadIdx.x;
    if (e < E) y[blockIdx.x * E + e] = table[ids[blockIdx.x] * E + e];
}

// Grid (tokens, E / 256).
__global__ void __launch_bounds__(THREADS)
permute(const float* __restrict__ x, float* __restrict__ y, long long L, long long E) {
    const long long e = 1LL * THREADS * blockIdx.y + threadIdx.x;
    const long long sentence = blockIdx.x / L, l = blockIdx.x % L;
    if (e < E) y[(sentence * E + e) * L + l] = x[blockIdx.x * E + e];
}

// Grid (sentences, C_out * (L - K + 1) / 256).
__global__ void __launch_bounds__(THREADS)
conv1d(const float* __restrict__ x, const float* __restrict__ w, const float* __restrict__ bias, float* __restrict__ y,
       long long L, long long C, long long K, long long C_out) {
    const int steps = L - K + 1, i = THREADS * blockIdx.y + threadIdx.x, n = i / steps, t = i % steps;
    if (n >= C_out) return;
    const float *window = x + blockIdx.x * C * L + t, *weights = w + n * C * K;
    float sum = 0.0f;
    for (int c = 0; c < C; ++c)
        for (int k = 0; k < K; ++k) sum = fmaf(weights[c * K + k], window[c * L + k], sum);
    y[blockIdx.x * C_out * steps + i] = sum + bias[n];
}

// NaN propagates; fmaxf(v, 0) would return 0.
__global__ void __launch_bounds__(THREADS) relu(float* y, long long count) {
    const long long i = 1LL * THREADS * blockIdx.x + threadIdx.x;
    if (i < count) y[i] = y[i] < 0.0f ? 0.0f : y[i];
}

// x (count, steps) -> y (count,)
__global__ void __launch_bounds__(THREADS)
take_max(const float* __restrict__ x, float* __restrict__ y, long long count, long long steps) {
    const long long i = 1LL * THREADS * blockIdx.x + threadIdx.x;
    if (i >= count) return;
    float largest = x[i * steps];
    for (int t = 1; t < steps; ++t) {
        const float v = x[i * steps + t];
        largest = v > largest || v != v ? v : largest;
    }
    y[i] = largest;
}

// Four (B, C) -> y (B, 4, C); count = B * C. A thread copies one element of each.
__global__ void __launch_bounds__(THREADS)
concat_four(const float* __restrict__ first, const float* __restrict__ second, const float* __restrict__ third,
            const float* __restrict__ fourth, float* __restrict__ y, long long count, long long C) {
    const long long i = 1LL * THREADS * blockIdx.x + threadIdx.x;
    if (i >= count) return;
    float* const row = y + i / C * 4 * C + i % C;
    row[0] = first[i];
    row[C] = second[i];
    row[2 * C] = third[i];
    row[3 * C] = fourth[i];
}
