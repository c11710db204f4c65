// digits_tensor_core.cu: the gemms on tensor cores: fp16 operands, fp32 accumulators, fp32 weights in memory.
//
// Idea    A block of 4 warps computes a tile of 16 x 16. It loads 64 elements of K per step, rounds them to fp16 in
//         shared memory, and each warp multiplies a slice of 16 by two mma.sync.m16n8k16; at the end the four partial
//         sums are added. Gradients need no loss scaling: dz = p - y is not divided by B until the update, in fp32.
//         The report names wmma::mma_sync. That wraps this instruction in a header (<mma.h>) that NVRTC cannot find
//         without a CUDA toolkit, and with a fragment layout that is not documented.
// Floor   The tensor cores are idle nearly always: a step of K loads 8 KB and costs 8 mma.sync.
// Order   As in digits_tiled.cu, with 4 partial sums per element; biases by atomicAdd: non-deterministic.
// Shared  2 * 16 * 72 * 2 B of operands + 4 * 16 * 16 * 4 B of partial sums = 8 704 B
// Limits  forward_softmax is separate (digits_loss.cu). Any B, K and N; fp16 (values up to 65 504); sm_80 up.
#include "mma/tensor_core.cuh"

constexpr int TILE = 16, LANES = 32, WARPS = 4, THREADS = WARPS * LANES;
constexpr int K_TILE = WARPS * 16;      // 16: of mma.sync
constexpr int STRIDE = K_TILE + 8;      // +8 halves: the 8 rows of a fragment are in different banks

// tile[i][k] = element (first + i, first_k + k) of m, (count, K); transposed, m is stored as (K, count). Zeros outside.
template <bool IS_TRANSPOSED>
__device__ __forceinline__ void load_tile(unsigned short* tile, const float* m, int first, int first_k, int count,
                                          int K) {
    for (int t = threadIdx.x; t < TILE * K_TILE; t += THREADS) {  // neighbouring threads read neighbouring elements
        const int i = IS_TRANSPOSED ? t % TILE : t / K_TILE, k = IS_TRANSPOSED ? t / TILE : t % K_TILE;
        const bool is_valid = first + i < count && first_k + k < K;
        const int at = IS_TRANSPOSED ? (first_k + k) * count + first + i : (first + i) * K + first_k + k;
        tile[i * STRIDE + k] = static_cast<unsigned short>(pack<f16>(is_valid ? m[at] : 0.0f, 0.0f));
    }
}

__device__ __forceinline__ u32 pair_at(const unsigned short* tile, int i, int k) {
    return *reinterpret_cast<const u32*>(tile + i * STRIDE + k);
}

// The product of a (M, K) and b (K, N); transposed, they are stored as (K, M) and (N, K). Thread t gets elements t and
// t + 128 of the tile, row-major.
template <bool IS_A_TRANSPOSED, bool IS_B_TRANSPOSED>
__device__ __forceinline__ void gemm_tile(const float* a, const float* b, float (&result)[2], int M, int K, int N) {
    alignas(16) __shared__ unsigned short as[TILE * STRIDE], bs[TILE * STRIDE];  // b's tile is (N, K)
    __shared__ float partial[WARPS][TILE * TILE];
    const int warp = threadIdx.x / LANES, g = threadIdx.x % LANES / 4, q = threadIdx.x % 4, k = 16 * warp + 2 * q;
    float c[2][4] = {};
    for (int first = 0; first < K; first += K_TILE) {
        load_tile<IS_A_TRANSPOSED>(as, a, TILE * blockIdx.y, first, M, K);
        load_tile<!IS_B_TRANSPOSED>(bs, b, TILE * blockIdx.x, first, N, K);
        __syncthreads();
        const u32 rows[] = {pair_at(as, g, k), pair_at(as, g + 8, k), pair_at(as, g, k + 8), pair_at(as, g + 8, k + 8)};
        mma<Fp16>(c[0], rows, pair_at(bs, g, k), pair_at(bs, g, k + 8));
        mma<Fp16>(c[1], rows, pair_at(bs, g + 8, k), pair_at(bs, g + 8, k + 8));
        __syncthreads();
    }
    for (int j = 0; j < 2; ++j)
        for (int i = 0; i < 4; ++i) partial[warp][(g + i / 2 * 8) * TILE + 8 * j + 2 * q + i % 2] = c[j][i];
    __syncthreads();
    for (int i = 0; i < 2; ++i) {
        result[i] = 0.0f;
        for (int w = 0; w < WARPS; ++w) result[i] += partial[w][threadIdx.x + i * THREADS];
    }
}

// Of this thread's element i in the result matrix.
struct Position {
    int row, column;
};
__device__ __forceinline__ Position in_matrix(int i) {
    const int t = threadIdx.x + i * THREADS;
    return {static_cast<int>(blockIdx.y) * TILE + t / TILE, static_cast<int>(blockIdx.x) * TILE + t % TILE};
}

template <bool IS_RELU>
__global__ void __launch_bounds__(THREADS)
forward_half(const float* __restrict__ x, const float* __restrict__ w, const float* __restrict__ b,
             float* __restrict__ z, int B, int K, int N) {
    float sums[2];
    gemm_tile<false, false>(x, w, sums, B, K, N);
    for (int i = 0; i < 2; ++i) {
        const auto [row, column] = in_matrix(i);
        if (row >= B || column >= N) continue;
        const float value = sums[i] + b[column];
        z[row * N + column] = IS_RELU && value < 0.0f ? 0.0f : value;
    }
}

__global__ void __launch_bounds__(THREADS)
z_grad_half(const float* __restrict__ dz_next, const float* __restrict__ w, const float* __restrict__ a,
            float* __restrict__ dz, int B, int K, int N) {
    float sums[2];
    gemm_tile<false, true>(dz_next, w, sums, B, N, K);
    for (int i = 0; i < 2; ++i) {
        const auto [row, column] = in_matrix(i);
        if (row < B && column < K) dz[row * K + column] = a[row * K + column] > 0.0f ? sums[i] : 0.0f;
    }
}

__global__ void __launch_bounds__(THREADS)
update_layer_half(const float* __restrict__ x, const float* __restrict__ dz, float* __restrict__ w,
                  float* __restrict__ b, float rate, int B, int K, int N) {
    float sums[2];
    gemm_tile<true, false>(x, dz, sums, K, B, N);
    for (int i = 0; i < 2; ++i) {
        const auto [row, column] = in_matrix(i);
        if (row < K && column < N) w[row * N + column] -= rate * sums[i];
    }
    const int column = TILE * blockIdx.x + threadIdx.x % TILE;
    if (blockIdx.y > 0 || column >= N) return;
    float share = 0.0f;
    for (int k = threadIdx.x / TILE; k < B; k += THREADS / TILE) share += dz[k * N + column];
    atomicAdd(b + column, -rate * share);
}
