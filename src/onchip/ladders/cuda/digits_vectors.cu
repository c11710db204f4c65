// digits_vectors.cu: float4 loads, operands transposed on the way into shared memory, no atomics.
//
// Idea    A block of 64 threads computes a tile of 16 x 16, four columns per thread. Each thread loads one float4 of
//         each operand per 16 elements of K, in the order of memory. Operands that the inner loop would read by columns
//         are transposed when they are stored to shared memory, so it always reads rows: per k one float of a (a
//         broadcast) and one float4 of b serve four multiply-adds, where digits_tiled.cu reads two floats for one.
//         update_layer: the first row of blocks adds the rows of the dz tile while it is in shared memory: the bias
//         gradient costs no reads, no atomics.
// Order   Every sum has a fixed order: runs are bit-identical.
// Shared  16 * 17 * 4 + 16 * 20 * 4 = 2 368 B. Rows of b are 20 floats: 16 B aligned.
// Limits  Any B, K and N; rows whose length is not a multiple of 4 are loaded by single floats. Matrices 16 B aligned;
//         forward_softmax_grad: at most 16 classes; fp32; sm_80 up.

constexpr int TILE = 16, QUAD = 4, THREADS = TILE * TILE / QUAD;

__device__ __forceinline__ float relu(float v) { return v < 0.0f ? 0.0f : v; }

// Four elements of a row of m (rows, columns), zeros outside.
__device__ __forceinline__ void load_quad(float (&v)[QUAD], const float* __restrict__ m, int row, int column, int rows,
                                          int columns) {
    const float* at = m + row * columns + column;
    if (columns % QUAD == 0 && row < rows && column < columns) {
        const float4 quad = *reinterpret_cast<const float4*>(at);
        v[0] = quad.x, v[1] = quad.y, v[2] = quad.z, v[3] = quad.w;
        return;
    }
#pragma unroll
    for (int j = 0; j < QUAD; ++j) v[j] = row < rows && column + j < columns ? at[j] : 0.0f;
}

// A thread's elements: row `row`, columns `column` to `column + 3`, of the tile or the matrix.
struct Position {
    int row, column;
};
__device__ __forceinline__ Position in_tile() {
    return {static_cast<int>(threadIdx.x) / QUAD, static_cast<int>(threadIdx.x) % QUAD * QUAD};
}
__device__ __forceinline__ Position in_matrix() {
    const Position at = in_tile();
    return {static_cast<int>(blockIdx.y) * TILE + at.row, static_cast<int>(blockIdx.x) * TILE + at.column};
}

// The product of a (M, K) and b (K, N); transposed, they are stored as (K, M) and (N, K). With SUMS_B, the first 16
// threads add column threadIdx.x of b's tiles to *column_sum.
template <bool IS_A_TRANSPOSED, bool IS_B_TRANSPOSED, bool SUMS_B = false>
__device__ __forceinline__ void gemm_tile(const float* __restrict__ a, const float* __restrict__ b, float (&sums)[QUAD],
                                          int M, int K, int N, float* column_sum = nullptr) {
    __shared__ float as[TILE][TILE + 1];                 // [k][row]
    alignas(16) __shared__ float bs[TILE][TILE + QUAD];  // [k][column]
    const int first_row = TILE * blockIdx.y, first_column = TILE * blockIdx.x;
    const Position at = in_tile();
    for (int first = 0; first < K; first += TILE) {
        float u[QUAD], v[QUAD];  // both are loaded before one is stored: their latencies overlap
        if (IS_A_TRANSPOSED) load_quad(u, a, first + at.row, first_row + at.column, K, M);
        else load_quad(u, a, first_row + at.row, first + at.column, M, K);
        if (IS_B_TRANSPOSED) load_quad(v, b, first_column + at.row, first + at.column, N, K);
        else load_quad(v, b, first + at.row, first_column + at.column, K, N);
#pragma unroll
        for (int j = 0; j < QUAD; ++j) {
            (IS_A_TRANSPOSED ? as[at.row][at.column + j] : as[at.column + j][at.row]) = u[j];
            (IS_B_TRANSPOSED ? bs[at.column + j][at.row] : bs[at.row][at.column + j]) = v[j];
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < TILE; ++k) {
            const float value = as[k][at.row];
            const float4 row = *reinterpret_cast<const float4*>(&bs[k][at.column]);
            sums[0] += value * row.x, sums[1] += value * row.y, sums[2] += value * row.z, sums[3] += value * row.w;
        }
        if (SUMS_B && threadIdx.x < TILE)
            for (int k = 0; k < TILE; ++k) *column_sum += bs[k][threadIdx.x];
        __syncthreads();
    }
}

template <bool IS_RELU>
__global__ void __launch_bounds__(THREADS)
forward_vectors(const float* __restrict__ x, const float* __restrict__ w, const float* __restrict__ b,
                float* __restrict__ z, int B, int K, int N) {
    const auto [row, column] = in_matrix();
    float sums[QUAD] = {};
    gemm_tile<false, false>(x, w, sums, B, K, N);
    for (int j = 0; j < QUAD; ++j) {
        if (row >= B || column + j >= N) continue;
        const float value = sums[j] + b[column + j];
        z[row * N + column + j] = IS_RELU ? relu(value) : value;
    }
}

// Softmax of a tile that holds whole rows, and dz = p - y.
__global__ void __launch_bounds__(THREADS)
forward_softmax_grad(const float* __restrict__ x, const float* __restrict__ w, const float* __restrict__ b,
                     const float* __restrict__ y, float* __restrict__ p, float* __restrict__ dz, int B, int K, int N) {
    const auto [row, column] = in_matrix();
    float sums[QUAD] = {};
    gemm_tile<false, false>(x, w, sums, B, K, N);
    float largest = -3.4e38f, sum = 0.0f;
    for (int j = 0; j < QUAD; ++j) {
        const bool is_class = column + j < N;
        sums[j] = is_class ? sums[j] + b[column + j] : -3.4e38f;
        largest = fmaxf(largest, sums[j]);
    }
    for (int mask = 1; mask < QUAD; mask *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, mask));
    for (int j = 0; j < QUAD; ++j) sum += column + j < N ? expf(sums[j] - largest) : 0.0f;
    for (int mask = 1; mask < QUAD; mask *= 2) sum += __shfl_xor_sync(~0u, sum, mask);
    for (int j = 0; j < QUAD; ++j) {
        if (row >= B || column + j >= N) continue;
        const int at = row * N + column + j;
        p[at] = expf(sums[j] - largest) / sum;
        dz[at] = p[at] - y[at];
    }
}

// dz (B, K) = dz_next (B, N) @ w^T where a > 0, else 0
__global__ void __launch_bounds__(THREADS)
z_grad_vectors(const float* __restrict__ dz_next, const float* __restrict__ w, const float* __restrict__ a,
               float* __restrict__ dz, int B, int K, int N) {
    const auto [row, column] = in_matrix();
    float sums[QUAD] = {};
    gemm_tile<false, true>(dz_next, w, sums, B, N, K);
    for (int j = 0; j < QUAD; ++j)
        if (row < B && column + j < K) dz[row * K + column + j] = a[row * K + column + j] > 0.0f ? sums[j] : 0.0f;
}

__global__ void __launch_bounds__(THREADS)
update_vectors(const float* __restrict__ x, const float* __restrict__ dz, float* __restrict__ w, float* __restrict__ b,
               float rate, int B, int K, int N) {
    const auto [row, column] = in_matrix();
    float sums[QUAD] = {}, column_sum = 0.0f;
    gemm_tile<true, false, true>(x, dz, sums, K, B, N, &column_sum);
    for (int j = 0; j < QUAD; ++j)
        if (row < K && column + j < N) w[row * N + column + j] -= rate * sums[j];
    const int own = TILE * blockIdx.x + threadIdx.x;
    if (blockIdx.y == 0 && threadIdx.x < TILE && own < N) b[own] -= rate * column_sum;
}
