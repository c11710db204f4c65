// gemm/gemv.cu: gemv and skinny GEMM, y = activation(x w^T + bias + other) for few rows; M, N, K are run-time values.
//
// Idea    Bandwidth-bound: weights stream from memory to registers, 16 bytes per load, many loads in flight per lane. A
//         block computes a few columns of y; its warps split K and reduce through shared memory at the end. The first
//         weight loads overlap the previous kernel (programmatic dependent launch).
//         gemv_mma uses mma.sync, 16 rows x 8 columns; k is permuted so that a lane's 16 bytes are its fragment.
//         gemv_fma uses CUDA cores (FFMA) with lanes along k: true fp32.
// Order   Warp i of 8 has chunks i, i + 8, ... of k. mma: chunks of 32, in two steps of 16. fma: chunks of 32 V, V per
//         lane, then a shuffle tree (16, 8, 4, 2, 1). Then warps in order, bias, other. Independent of M and N.
// Floor   Weights once. 4,096 x 4,096 in fp16: 33.6 MB / 4.8 TB/s = 7.0 us from memory; from L2 (33 TB/s) 1.0 us.
// Layout  x (M, K), w (N, K), y (M, N) row-major, each 16 B aligned; bias (N), other (M, N) or none.
// Shared  8 * ROWS * COLUMNS floats: 8 KB for 16 x 16.
// Limits  Any M, N, K; x and y float32, float16 or bfloat16. mma: K a multiple of 8. fma: V = 1, or K a multiple of V.
#include "mma/tma.cuh"
#include "common/epilogue.cuh"
#include "mma/tensor_core.cuh"

constexpr int WARPS = 8;

// A block's first row and column of y; blocks go along the columns first.
template <int ROWS, int COLUMNS>
struct FewPlace {
    long long m, n;

    __device__ __forceinline__ FewPlace(long long N) {
        const u32 across = static_cast<u32>((N + COLUMNS - 1) / COLUMNS);
        m = static_cast<long long>(blockIdx.x / across) * ROWS;
        n = static_cast<long long>(blockIdx.x % across) * COLUMNS;
    }
};

// Cross-warp reduction of a tile, and its epilogue.
template <int ROWS, int COLUMNS, class Y>
__device__ __forceinline__ void add_up_warps(const float (&sums)[WARPS][ROWS][COLUMNS], const float* bias,
                                             const Y* other, Y* y, long long m, long long n, long long M, long long N,
                                             const Activation& activation) {
    __syncthreads();
    for (int i = threadIdx.x; i < ROWS * COLUMNS; i += 32 * WARPS) {
        const int row = i / COLUMNS, column = i % COLUMNS;
        if (m + row >= M || n + column >= N) continue;
        float sum = sums[0][row][column];
#pragma unroll
        for (int warp = 1; warp < WARPS; ++warp) sum += sums[warp][row][column];
        if (bias != nullptr) sum += bias[n + column];
        const long long at = (m + row) * N + n + column;
        if (other != nullptr) sum += to_float(other[at]);
        finish_one(sum, y + at, activation);
    }
}

// -- tensor cores (mma.sync) ----------------------------------------------------------------------------------

constexpr int PIECE = 32;  // elements of k per chunk: eight per lane, four lanes

// Eight contiguous elements as four fragment words of P.
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

// 16 MT rows, 8 NT columns; PIECES chunks of k are in flight.
template <class P, class X, class Y, int MT, int NT, int PIECES>
__global__ void __launch_bounds__(32 * WARPS, MT == 1 ? 2 : 1)
gemv_mma(const X* x, const typename P::Element* w, const float* bias, const Y* other, Y* y, long long M,
                long long N, long long K, u32 code, u32 a_bits, u32 b_bits) {
    constexpr int ROWS = 16 * MT, COLUMNS = 8 * NT;
    __shared__ float sums[WARPS][ROWS][COLUMNS];
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    const FewPlace<ROWS, COLUMNS> place(N);
    uint4 weights[PIECES][NT];
    const auto read_weights = [&](long long first) {
#pragma unroll
        for (int i = 0; i < PIECES; ++i)
#pragma unroll
            for (int j = 0; j < NT; ++j) {
                const long long k = first + static_cast<long long>(i) * WARPS * PIECE, n = place.n + 8 * j + g;
                weights[i][j] = k < K && n < N ? *reinterpret_cast<const uint4*>(w + n * K + k) : uint4{0, 0, 0, 0};
            }
    };
    long long k = warp * PIECE + 8 * q;  // of this lane
    let_next_begin();
    read_weights(k);
    wait_for_kernel_before();

    float c[MT][NT][4] = {};
    while (true) {
#pragma unroll
        for (int t = 0; t < MT; ++t) {
            uint4 rows[PIECES][2];
#pragma unroll
            for (int i = 0; i < PIECES; ++i)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const long long at = k + static_cast<long long>(i) * WARPS * PIECE;
                    const long long m = place.m + 16 * t + 8 * half + g;
                    rows[i][half] = at < K && m < M ? read8<P>(x + m * K + at) : uint4{0, 0, 0, 0};
                }
#pragma unroll
            for (int i = 0; i < PIECES; ++i) {
                const u32 even[4] = {rows[i][0].x, rows[i][1].x, rows[i][0].y, rows[i][1].y};
                const u32 odd[4] = {rows[i][0].z, rows[i][1].z, rows[i][0].w, rows[i][1].w};
#pragma unroll
                for (int j = 0; j < NT; ++j) {
                    mma<P>(c[t][j], even, weights[i][j].x, weights[i][j].y);
                    mma<P>(c[t][j], odd, weights[i][j].z, weights[i][j].w);
                }
            }
        }
        k += static_cast<long long>(PIECES) * WARPS * PIECE;
        if (k - 8 * q >= K) break;  // the same for all lanes
        read_weights(k);
    }
#pragma unroll
    for (int i = 0; i < MT * NT * 4; ++i) {
        const int t = i / 4 / NT, j = i / 4 % NT;
        sums[warp][16 * t + i % 4 / 2 * 8 + g][8 * j + 2 * q + i % 2] = c[t][j][i % 4];
    }
    add_up_warps(sums, bias, other, y, place.m, place.n, M, N,
                 Activation{code, __uint_as_float(a_bits), __uint_as_float(b_bits)});
}

// -- CUDA cores (FFMA) ----------------------------------------------------------------------------------------

// V elements as float32: one vector load for V = 4, or a single element.
template <int V, class T>
__device__ __forceinline__ void read_wide(float (&to)[V], const T* from, bool is_there) {
    if constexpr (V == 4) {
        const float4 v = is_there ? load4(from) : float4{0.0f, 0.0f, 0.0f, 0.0f};
        to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
    } else {
        to[0] = is_there ? to_float(*from) : 0.0f;
    }
}

template <class X, class W, class Y, int ROWS, int COLUMNS, int V, int PIECES>
__global__ void __launch_bounds__(32 * WARPS, 2)
gemv_fma(const X* x, const W* w, const float* bias, const Y* other, Y* y, long long M, long long N, long long K,
                u32 code, u32 a_bits, u32 b_bits) {
    constexpr long long STEP = 32 * V * WARPS;  // from a chunk of a warp to its next
    __shared__ float sums[WARPS][ROWS][COLUMNS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const FewPlace<ROWS, COLUMNS> place(N);
    float weights[PIECES][COLUMNS][V];
    const auto read_weights = [&](long long first) {
#pragma unroll
        for (int i = 0; i < PIECES; ++i)
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) {
                const long long k = first + i * STEP, n = place.n + j;
                const bool is_there = k < K && n < N;
                read_wide<V>(weights[i][j], w + (is_there ? n * K + k : 0), is_there);
            }
    };
    long long k = (warp * 32 + lane) * V;  // of this lane
    let_next_begin();
    read_weights(k);
    wait_for_kernel_before();

    float c[ROWS][COLUMNS] = {};
    while (true) {
#pragma unroll
        for (int i = 0; i < PIECES; ++i)
#pragma unroll
            for (int row = 0; row < ROWS; ++row) {
                const bool is_there = k + i * STEP < K && place.m + row < M;
                float v[V];
                read_wide<V>(v, x + (is_there ? (place.m + row) * K + k + i * STEP : 0), is_there);
#pragma unroll
                for (int j = 0; j < COLUMNS; ++j)
#pragma unroll
                    for (int l = 0; l < V; ++l) c[row][j] = fmaf(v[l], weights[i][j][l], c[row][j]);
            }
        k += PIECES * STEP;
        if (k - lane * V >= K) break;  // the same for all lanes
        read_weights(k);
    }
#pragma unroll
    for (int i = 0; i < ROWS * COLUMNS; ++i) {
        float sum = c[i / COLUMNS][i % COLUMNS];
#pragma unroll
        for (int apart = 16; apart > 0; apart /= 2) sum += __shfl_xor_sync(~0u, sum, apart);
        if (lane == 0) sums[warp][i / COLUMNS][i % COLUMNS] = sum;
    }
    add_up_warps(sums, bias, other, y, place.m, place.n, M, N,
                 Activation{code, __uint_as_float(a_bits), __uint_as_float(b_bits)});
}
