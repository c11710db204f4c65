// gemm/gemv.cu: gemv and skinny GEMM, y = activation(x w^T + bias + residual), for few rows. Run-time M, N, K.
//
// Idea    Bandwidth-bound: weights stream from memory to registers, 16 bytes per load, many loads in flight per lane. A
//         block computes a few columns of y; its warps split K and reduce through shared memory at the end. The first
//         weight loads overlap the previous kernel (programmatic dependent launch).
//         gemv_mma uses mma.sync, 16 rows x 8 columns; k is permuted so that a 16-byte load is a lane's fragment.
//         gemv_fma uses CUDA cores (FFMA) with lanes along k: true fp32.
// Order   Warp i of 8 sums chunks i, i + 8, ... of k. mma: chunks of 32, in two steps of 16. fma: chunks of 32 V, V per
//         lane, then a shuffle tree (16, 8, 4, 2, 1). Then warps in order, bias, residual. Independent of M and N.
// Floor   Read w once. 4,096 x 4,096 in fp16: 33.6 MB / 4.8 TB/s = 7.0 us from memory; from L2 (33 TB/s) 1.0 us.
// Layout  x (M, K), w (N, K), y (M, N) row-major, each 16 B aligned; bias (N), residual (M, N) or none.
// Shared  8 * ROWS * COLUMNS floats: 8 KB for 16 x 16.
// Limits  Any M, N, K; x and y float32, float16 or bfloat16. mma: K a multiple of 8. fma: V = 1, or K a multiple of V.
#include "mma/tma.cuh"
#include "common/epilogue.cuh"
#include "mma/tensor_core.cuh"

constexpr int WARPS = 8;

// A block's first row and column of y; consecutive blocks are adjacent in a row of y.
template <int ROWS, int COLUMNS>
struct BlockOrigin {
    long long m, n;

    __device__ __forceinline__ BlockOrigin(long long N) {
        const u32 blocks_n = static_cast<u32>((N + COLUMNS - 1) / COLUMNS);
        m = static_cast<long long>(blockIdx.x / blocks_n) * ROWS;
        n = static_cast<long long>(blockIdx.x % blocks_n) * COLUMNS;
    }
};

// Cross-warp reduction of a tile, and its epilogue.
template <int ROWS, int COLUMNS, class Y>
__device__ __forceinline__ void reduce_warps(const float (&sums)[WARPS][ROWS][COLUMNS], const float* bias,
                                             const Y* residual, Y* y, long long m, long long n, long long M,
                                             long long N, const Activation& activation) {
    __syncthreads();
    for (int i = threadIdx.x; i < ROWS * COLUMNS; i += 32 * WARPS) {
        const int row = i / COLUMNS, column = i % COLUMNS;
        if (m + row >= M || n + column >= N) continue;
        float sum = sums[0][row][column];
#pragma unroll
        for (int warp = 1; warp < WARPS; ++warp) sum += sums[warp][row][column];
        if (bias != nullptr) sum += bias[n + column];
        const long long at = (m + row) * N + n + column;
        if (residual != nullptr) sum += to_float(residual[at]);
        finish_one(sum, y + at, activation);
    }
}

// -- tensor cores (mma.sync) ----------------------------------------------------------------------------------

constexpr int CHUNK = 32;  // elements of k per chunk: eight per lane, four lanes

// Eight contiguous elements as four fragment registers of P.
template <class P, class X>
__device__ __forceinline__ uint4 read8(const X* from) {
    using Element = typename P::Element;
    if constexpr (is_same<X, Element>) {
        return *reinterpret_cast<const uint4*>(from);
    } else {
        const float4 a = load4(from), b = load4(from + 4);
        return {pack<Element>(a.x, a.y), pack<Element>(a.z, a.w), pack<Element>(b.x, b.y), pack<Element>(b.z, b.w)};
    }
}

// A tile of 16 MT rows and 8 NT columns, CHUNKS chunks of k in flight.
template <class P, class X, class Y, int MT, int NT, int CHUNKS>
__global__ void __launch_bounds__(32 * WARPS, MT == 1 ? 2 : 1)
gemv_mma(const X* x, const typename P::Element* w, const float* bias, const Y* residual, Y* y, long long M,
                long long N, long long K, u32 code, u32 a_bits, u32 b_bits) {
    constexpr int ROWS = 16 * MT, COLUMNS = 8 * NT;
    __shared__ float sums[WARPS][ROWS][COLUMNS];
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    const BlockOrigin<ROWS, COLUMNS> origin(N);
    uint4 weights[CHUNKS][NT];
    const auto read_weights = [&](long long first) {
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i)
#pragma unroll
            for (int j = 0; j < NT; ++j) {
                const long long k = first + static_cast<long long>(i) * WARPS * CHUNK, n = origin.n + 8 * j + g;
                weights[i][j] = k < K && n < N ? *reinterpret_cast<const uint4*>(w + n * K + k) : uint4{0, 0, 0, 0};
            }
    };
    long long k = warp * CHUNK + 8 * q;  // this lane's first k
    launch_dependent_grids();
    read_weights(k);
    wait_on_dependent_grids();

    float c[MT][NT][4] = {};
    while (true) {
#pragma unroll
        for (int t = 0; t < MT; ++t) {
            uint4 rows[CHUNKS][2];
#pragma unroll
            for (int i = 0; i < CHUNKS; ++i)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const long long at = k + static_cast<long long>(i) * WARPS * CHUNK;
                    const long long m = origin.m + 16 * t + 8 * half + g;
                    rows[i][half] = at < K && m < M ? read8<P>(x + m * K + at) : uint4{0, 0, 0, 0};
                }
#pragma unroll
            for (int i = 0; i < CHUNKS; ++i) {
                const u32 even[4] = {rows[i][0].x, rows[i][1].x, rows[i][0].y, rows[i][1].y};
                const u32 odd[4] = {rows[i][0].z, rows[i][1].z, rows[i][0].w, rows[i][1].w};
#pragma unroll
                for (int j = 0; j < NT; ++j) {
                    mma<P>(c[t][j], even, weights[i][j].x, weights[i][j].y);
                    mma<P>(c[t][j], odd, weights[i][j].z, weights[i][j].w);
                }
            }
        }
        k += static_cast<long long>(CHUNKS) * WARPS * CHUNK;
        if (k - 8 * q >= K) break;  // the same for all lanes
        read_weights(k);
    }
#pragma unroll
    for (int i = 0; i < MT * NT * 4; ++i) {
        const int t = i / 4 / NT, j = i / 4 % NT;
        sums[warp][16 * t + i % 4 / 2 * 8 + g][8 * j + 2 * q + i % 2] = c[t][j][i % 4];
    }
    reduce_warps(sums, bias, residual, y, origin.m, origin.n, M, N,
                 Activation{code, __uint_as_float(a_bits), __uint_as_float(b_bits)});
}

// -- CUDA cores (FFMA) ----------------------------------------------------------------------------------------

// V elements as float32: one vector load for V = 4, or a single element.
template <int V, class T>
__device__ __forceinline__ void load_floats(float (&to)[V], const T* from, bool is_valid) {
    if constexpr (V == 4) {
        const float4 v = is_valid ? load4(from) : float4{0.0f, 0.0f, 0.0f, 0.0f};
        to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
    } else {
        to[0] = is_valid ? to_float(*from) : 0.0f;
    }
}

template <class X, class W, class Y, int ROWS, int COLUMNS, int V, int CHUNKS>
__global__ void __launch_bounds__(32 * WARPS, 2)
gemv_fma(const X* x, const W* w, const float* bias, const Y* residual, Y* y, long long M, long long N, long long K,
                u32 code, u32 a_bits, u32 b_bits) {
    constexpr long long STEP = 32 * V * WARPS;  // from one chunk of a warp to its next
    __shared__ float sums[WARPS][ROWS][COLUMNS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const BlockOrigin<ROWS, COLUMNS> origin(N);
    float weights[CHUNKS][COLUMNS][V];
    const auto read_weights = [&](long long first) {
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i)
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) {
                const long long k = first + i * STEP, n = origin.n + j;
                const bool is_valid = k < K && n < N;
                load_floats<V>(weights[i][j], w + (is_valid ? n * K + k : 0), is_valid);
            }
    };
    long long k = (warp * 32 + lane) * V;  // this lane's first k
    launch_dependent_grids();
    read_weights(k);
    wait_on_dependent_grids();

    float c[ROWS][COLUMNS] = {};
    while (true) {
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i)
#pragma unroll
            for (int row = 0; row < ROWS; ++row) {
                const bool is_valid = k + i * STEP < K && origin.m + row < M;
                float v[V];
                load_floats<V>(v, x + (is_valid ? (origin.m + row) * K + k + i * STEP : 0), is_valid);
#pragma unroll
                for (int j = 0; j < COLUMNS; ++j)
#pragma unroll
                    for (int l = 0; l < V; ++l) c[row][j] = fmaf(v[l], weights[i][j][l], c[row][j]);
            }
        k += CHUNKS * STEP;
        if (k - lane * V >= K) break;  // the same for all lanes
        read_weights(k);
    }
#pragma unroll
    for (int i = 0; i < ROWS * COLUMNS; ++i) {
        float sum = c[i / COLUMNS][i % COLUMNS];
#pragma unroll
        for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(~0u, sum, mask);
        if (lane == 0) sums[warp][i / COLUMNS][i % COLUMNS] = sum;
    }
    reduce_warps(sums, bias, residual, y, origin.m, origin.n, M, N,
                 Activation{code, __uint_as_float(a_bits), __uint_as_float(b_bits)});
}
