// gemm/batched_mma.cu: batched GEMM y = a b by mma.sync; sizes are run-time values.
//
// Idea    A block computes a SIDE x SIDE tile of one matrix of y, each of 4 warps a quarter. Slices of a and b go
//         through registers to double-buffered shared memory, the next while the current one is multiplied. Values are
//         rounded, or split (3xTF32), when fragments are read. Batch strides address the matrices: nothing is copied.
// Floor   2 M N K flop per matrix, three times that in tf32 for fp32: 64 matrices of 512 cubed: 17.2 Gflop * 3 /
//         494 Tflop/s = 104 us.
// Order   k in order, STEP elements per mma; every 32 elements the partial sum is added to a total. The order depends
//         neither on the tile nor on the number of matrices.
// Layout  a (..., M, K), b (..., K, N), y (..., M, N) row-major.
// Shared  2 * (SIDE * 36 + 32 * (SIDE + 8)) floats: 36 864 B for 64 x 64.
// Limits  Any M, N, K >= 1, up to 4 batch axes; IS_WHOLE: rows of a, b and y are multiples of four elements, aligned;
//         float32, float16 or bfloat16 in memory; sm_80 up. In fp32, infinite inputs give NaN.
#include "gemm/batched.cuh"
#include "mma/fragments.cuh"

constexpr int DEPTH = 32, THREADS = 128;
constexpr int A_PITCH = DEPTH + 4;  // +4: rows start 4 banks apart, so 8 rows x 4 lanes touch 32 banks

// Four elements; those past the first `left` are zero.
template <bool IS_WHOLE, class T>
__device__ __forceinline__ float4 load_four(const T* from, long long left) {
    if constexpr (IS_WHOLE) return left > 0 ? load4(from) : float4{0.0f, 0.0f, 0.0f, 0.0f};
    else
        return {left > 0 ? to_float(from[0]) : 0.0f, left > 1 ? to_float(from[1]) : 0.0f,
                left > 2 ? to_float(from[2]) : 0.0f, left > 3 ? to_float(from[3]) : 0.0f};
}

template <class P, class T, int SIDE, bool IS_WHOLE>
__global__ void __launch_bounds__(THREADS)
    matmul_mma(const T* a, const T* b, T* y, long long count, long long M, long long N, long long K,
               const __grid_constant__ BatchAxes batch) {
    constexpr int MT = SIDE / 32, NT = SIDE / 16, B_PITCH = SIDE + 8, VECTORS = SIDE * DEPTH / THREADS / 4;
    __shared__ __align__(16) float as[2][SIDE][A_PITCH];
    __shared__ __align__(16) float bs[2][DEPTH][B_PITCH];
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    const int row = warp / 2 * (SIDE / 2), column = warp % 2 * (SIDE / 2);  // the warp's quarter
    const long long tiles_n = (N + SIDE - 1) / SIDE, tiles = (M + SIDE - 1) / SIDE * tiles_n;
    for (long long block = blockIdx.x; block < count * tiles; block += gridDim.x) {
        const long long matrix = block / tiles, tile = block % tiles;
        const long long first_m = tile / tiles_n * SIDE, first_n = tile % tiles_n * SIDE;
        const Matrices at = batch.matrices(matrix);
        float4 a_regs[VECTORS], b_regs[VECTORS];
        const auto load_slice = [&](long long k) {
#pragma unroll
            for (int i = 0; i < VECTORS; ++i) {
                const int vector = threadIdx.x + i * THREADS;
                const long long m = first_m + vector / (DEPTH / 4), d = k + vector % (DEPTH / 4) * 4;
                a_regs[i] = load_four<IS_WHOLE>(a + at.a + m * K + d, m < M ? K - d : 0);
                const long long k_row = k + vector / (SIDE / 4), n = first_n + vector % (SIDE / 4) * 4;
                b_regs[i] = load_four<IS_WHOLE>(b + at.b + k_row * N + n, k_row < K ? N - n : 0);
            }
        };
        const auto store_slice = [&](int stage) {
#pragma unroll
            for (int i = 0; i < VECTORS; ++i) {
                const int vector = threadIdx.x + i * THREADS;
                *reinterpret_cast<float4*>(&as[stage][vector / (DEPTH / 4)][vector % (DEPTH / 4) * 4]) = a_regs[i];
                *reinterpret_cast<float4*>(&bs[stage][vector / (SIDE / 4)][vector % (SIDE / 4) * 4]) = b_regs[i];
            }
        };
        float totals[MT][NT][4] = {}, sums[MT][NT][4] = {};
        load_slice(0);
        store_slice(0);
        __syncthreads();
        int stage = 0;
        for (long long k = 0; k < K; k += DEPTH, stage ^= 1) {
            const bool has_next = k + DEPTH < K;
            if (has_next) load_slice(k + DEPTH);
#pragma unroll
            for (int s = 0; s < DEPTH / P::STEP; ++s) {
                Fragment<P, 4> left[MT];
                Fragment<P, 2> right[NT];
#pragma unroll
                for (int i = 0; i < 4 * MT; ++i) {  // register i % 4: row g or g + 8, first or second half of k
                    const float* from = &as[stage][row + i / 4 * 16 + i % 2 * 8 + g][s * P::STEP];
                    if constexpr (P::PER_WORD == 2) {
                        const float2 two = *reinterpret_cast<const float2*>(from + 2 * q + i % 4 / 2 * 8);
                        left[i / 4].set(i % 4, two.x, two.y);
                    } else {
                        left[i / 4].set(i % 4, from[q + i % 4 / 2 * 4]);
                    }
                }
#pragma unroll
                for (int j = 0; j < 2 * NT; ++j) {
                    const int n = column + j / 2 * 8 + g, d = s * P::STEP;
                    if constexpr (P::PER_WORD == 2) {
                        const int k_row = d + 2 * q + j % 2 * 8;
                        right[j / 2].set(j % 2, bs[stage][k_row][n], bs[stage][k_row + 1][n]);
                    } else {
                        right[j / 2].set(j % 2, bs[stage][d + q + j % 2 * 4][n]);
                    }
                }
#pragma unroll
                for (int i = 0; i < MT; ++i)
#pragma unroll
                    for (int j = 0; j < NT; ++j) {
                        multiply<P>(sums[i][j], left[i], right[j]);
                        end_partial_sum<P>(totals[i][j], sums[i][j], s, DEPTH / P::STEP);
                    }
            }
            if (has_next) store_slice(stage ^ 1);  // its last readers have passed the previous barrier
            __syncthreads();
        }
#pragma unroll
        for (int i = 0; i < MT * NT * 2; ++i) {
            const int half = i % 2, j = i / 2 % NT, t = i / 2 / NT;
            const long long m = first_m + row + 16 * t + 8 * half + g, n = first_n + column + 8 * j + 2 * q;
            T* const to = y + (matrix * M + m) * N + n;
            alignas(8) const float two[2] = {totals[t][j][2 * half], totals[t][j][2 * half + 1]};
            if (m >= M || n >= N) continue;
            if constexpr (IS_WHOLE) {
                store_vector(to, two);
            } else {
                store1(to, two[0]);
                if (n + 1 < N) store1(to + 1, two[1]);
            }
        }
    }
}
