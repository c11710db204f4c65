// linear.cu: y = x w' + bias, the report's two kernels.
//
// Idea    linear_narrow: shared-memory tiles. A block of TS x TS threads loads TS x TS tiles of x and w; each thread
//         computes one output, reading two values from shared memory per FFMA. For a layer of two outputs: 14 of 16
//         threads have none, but the layer is small.
//         linear_tiled: a block of (TS / W)^2 threads computes TS x TS outputs, W x W per thread in registers: 2 W
//         values from shared memory serve W^2 FFMA. A thread loads TSK-wide tiles with 16-byte loads (float4), and
//         stores them transposed, so that its W values per k are contiguous.
// Floor   1024 x 4096 x 2048: 17.2 Gflop / 66.9 Tflop/s = 257 us of fp32 on an H200. linear_narrow: an SM reads 32
//         words of shared memory per cycle, so at most 16 of 128 FFMA: 8 times the floor. linear_tiled, W = 4: two
//         16-byte reads per 16 FFMA.
// Layout  x (M, K), w (N, K), bias (N,), y (M, N), row-major, 16 B aligned.
// Shared  linear_narrow<16>: 2 176 B. linear_tiled<64, 16, 4>: 2 * 16 * 68 * 4 = 8 704 B; the stride of 68 halves the
//         conflicts of the transposed stores.
// Limits  Any M, N; K divisible by 4 in linear_tiled; fp32; sm_80 up.

template <int TS>
__global__ void __launch_bounds__(TS * TS)
linear_narrow(const float* __restrict__ x, const float* __restrict__ w, const float* __restrict__ bias,
              float* __restrict__ y, long long M, long long N, long long K) {
    __shared__ float rows[TS][TS + 1], columns[TS][TS + 1];
    const int i = threadIdx.x / TS, j = threadIdx.x % TS;
    const long long m = 1LL * TS * blockIdx.x + i, n0 = 1LL * TS * blockIdx.y;
    float sum = 0.0f;
    for (long long k0 = 0; k0 < K; k0 += TS) {
        const bool is_inside = k0 + j < K;
        rows[i][j] = is_inside && m < M ? x[m * K + k0 + j] : 0.0f;
        columns[i][j] = is_inside && n0 + i < N ? w[(n0 + i) * K + k0 + j] : 0.0f;
        __syncthreads();
#pragma unroll
        for (int k = 0; k < TS; ++k) sum = fmaf(rows[i][k], columns[j][k], sum);
        __syncthreads();
    }
    if (m < M && n0 + j < N) y[m * N + n0 + j] = sum + bias[n0 + j];
}

// tile[k][row] = from[first + row][k0 + k]; zeros past `rows` rows and K columns.
template <int TS, int TSK, int THREADS>
__device__ __forceinline__ void load_transposed(const float* from, float (&tile)[TSK][TS + 4], long long first,
                                                long long rows, long long k0, long long K) {
    constexpr int QUADS = TSK / 4;
#pragma unroll
    for (int i = threadIdx.x; i < TS * QUADS; i += THREADS) {
        const int row = i / QUADS, k = i % QUADS * 4;
        float4 quad = {0.0f, 0.0f, 0.0f, 0.0f};
        if (first + row < rows && k0 + k < K)
            quad = *reinterpret_cast<const float4*>(from + (first + row) * K + k0 + k);
        tile[k][row] = quad.x;
        tile[k + 1][row] = quad.y;
        tile[k + 2][row] = quad.z;
        tile[k + 3][row] = quad.w;
    }
}

template <int TS, int TSK, int W>
__global__ void __launch_bounds__(TS / W * (TS / W), 3)
linear_tiled(const float* __restrict__ x, const float* __restrict__ w, const float* __restrict__ bias,
             float* __restrict__ y, long long M, long long N, long long K) {
    constexpr int SIDE = TS / W, THREADS = SIDE * SIDE;
    __shared__ __align__(16) float rows[TSK][TS + 4], columns[TSK][TS + 4];
    const long long m0 = 1LL * TS * blockIdx.x, n0 = 1LL * TS * blockIdx.y;
    const int i0 = threadIdx.x / SIDE * W, j0 = threadIdx.x % SIDE * W;
    float sums[W][W] = {};
    for (long long k0 = 0; k0 < K; k0 += TSK) {
        load_transposed<TS, TSK, THREADS>(x, rows, m0, M, k0, K);
        load_transposed<TS, TSK, THREADS>(w, columns, n0, N, k0, K);
        __syncthreads();
#pragma unroll
        for (int k = 0; k < TSK; ++k) {
            float left[W], right[W];
#pragma unroll
            for (int i = 0; i < W; ++i) left[i] = rows[k][i0 + i], right[i] = columns[k][j0 + i];
#pragma unroll
            for (int i = 0; i < W; ++i)
#pragma unroll
                for (int j = 0; j < W; ++j) sums[i][j] = fmaf(left[i], right[j], sums[i][j]);
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < W; ++i)
#pragma unroll
        for (int j = 0; j < W; ++j)
            if (m0 + i0 + i < M && n0 + j0 + j < N) y[(m0 + i0 + i) * N + n0 + j0 + j] = sums[i][j] + bias[n0 + j0 + j];
}
