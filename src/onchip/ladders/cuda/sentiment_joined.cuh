// sentiment_joined.cuh: a convolution of 16 sentences as one gemm without padding.
//
// The windows of 16 sentences are side by side: column s*STEPS + t is window t of sentence s. 16*STEPS is a multiple
// of 16 for any STEPS, so nothing is padded. A block of 4 warps computes 64 channels x 16*STEPS columns, a warp 32
// channels x 8*STEPS columns: a loaded weight serves 16 sentences, and a fragment of B two of A. The tiles' rows are an
// odd number of 16-byte units apart, 5 and 2*STEPS + 1, so the 8 rows of an ldmatrix touch 32 distinct banks.
#pragma once

#include "mma/cp_async.cuh"
#include "mma/tensor_core.cuh"

constexpr int JOINED = 16, CHANNELS = 64, DEPTH = 32, CHUNK = 8;  // sentences, channels, k per tile, fp16 per 16 B
constexpr int GEMM_THREADS = 128, STRIDE_A = DEPTH + CHUNK;

__device__ constexpr int stride_b(int steps) { return JOINED * steps + CHUNK; }
__device__ constexpr int tile_elements(int steps) { return CHANNELS * STRIDE_A + DEPTH * stride_b(steps); }  // of f16

// Columns j, j + 1 of a row of the windows of 16 sentences; zeros for sentences past B. x points at x[0][c][k].
__device__ __forceinline__ u32 two_windows(const float* x, int j, int steps, int first, int B,
                                           long long sentence_size) {
    float v[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int sentence = first + (j + i) / steps;
        v[i] = sentence < B ? x[sentence * sentence_size + (j + i) % steps] : 0.0f;
    }
    return pack<f16>(v[0], v[1]);
}

// The windows of one channel and 16 sentences from `first`, K rows of 16*steps columns; all 128 threads call this. x
// points at x[0][c][0]. A block per row would read its 1 KB of x for each of the K rows, and be done after a store or two.
__device__ __forceinline__ void spread_channel(const float* x, u32* windows, int K, int steps, int first, int B,
                                               long long sentence_size) {
    const int pairs = JOINED / 2 * steps;
    for (int i = threadIdx.x; i < K * pairs; i += GEMM_THREADS)
        windows[i] = two_windows(x + i / pairs, 2 * (i % pairs), steps, first, B, sentence_size);
}

// y[16 sentences from `first`][64 channels from n0][STEPS] = w windows + bias
//
// w (C_out, rows) fp16; windows (rows, 16*STEPS) fp16, of these sentences; y (B, C_out, STEPS) fp32. `tiles` is shared
// memory for tile_elements(STEPS). All 128 threads call this.
template <int STEPS>
__device__ __forceinline__ void convolve(const f16* w, const f16* windows, const float* bias, float* y, f16* tiles,
                                         int n0, int C_out, int rows, int first, int B) {
    constexpr int COLUMNS = JOINED * STEPS, CHUNKS_A = DEPTH / CHUNK, CHUNKS_B = COLUMNS / CHUNK;
    f16 *const tile_a = tiles, *const tile_b = tiles + CHANNELS * STRIDE_A;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int channel0 = warp / 2 * 32, column0 = warp % 2 * 8 * STEPS;
    float sums[2][STEPS][4] = {};
    for (int k0 = 0; k0 < rows; k0 += DEPTH) {
        for (int i = threadIdx.x; i < CHANNELS * CHUNKS_A; i += GEMM_THREADS) {
            const int channel = i / CHUNKS_A, k = i % CHUNKS_A * CHUNK;
            uint4 chunk = {0, 0, 0, 0};
            if (n0 + channel < C_out && k0 + k < rows)
                chunk = *reinterpret_cast<const uint4*>(w + 1LL * (n0 + channel) * rows + k0 + k);
            *reinterpret_cast<uint4*>(tile_a + channel * STRIDE_A + k) = chunk;
        }
#pragma unroll 4  // more loads in flight do not fit into the registers of three blocks per SM
        for (int i = threadIdx.x; i < DEPTH * CHUNKS_B; i += GEMM_THREADS) {
            const int k = i / CHUNKS_B, column = i % CHUNKS_B * CHUNK;
            uint4 chunk = {0, 0, 0, 0};
            if (k0 + k < rows) chunk = reinterpret_cast<const uint4*>(windows)[i];
            *reinterpret_cast<uint4*>(tile_b + k * stride_b(STEPS) + column) = chunk;
        }
        windows += DEPTH * COLUMNS;
        __syncthreads();
#pragma unroll
        for (int k = 0; k < DEPTH; k += 16) {
            // Lane l addresses row l % 16 of the left (l < 16) or right 8 columns of a 16 x 16 matrix.
            u32 a[2][4];
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                const f16* at = tile_a + (channel0 + 16 * m + lane % 16) * STRIDE_A + k + lane / 16 * 8;
                ldmatrix_x4(a[m], reinterpret_cast<const char*>(at));
            }
#pragma unroll
            for (int j = 0; j < STEPS; j += 2) {  // with STEPS odd, the last right half is not used
                u32 b[4];
                const f16* const from = tile_b + (k + lane % 16) * stride_b(STEPS) + column0 + 8 * j + lane / 16 * 8;
                ldmatrix_x4_trans(b, reinterpret_cast<const char*>(from));
#pragma unroll
                for (int m = 0; m < 2; ++m) {
                    mma<Fp16>(sums[m][j], a[m], b[0], b[1]);
                    if (j + 1 < STEPS) mma<Fp16>(sums[m][j + 1], a[m], b[2], b[3]);
                }
            }
        }
        __syncthreads();
    }
    const int g = lane / 4, q = lane % 4;
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int upper = 0; upper < 2; ++upper) {
            const int n = n0 + channel0 + 16 * m + 8 * upper + g;
            if (n >= C_out) continue;
            float* const channel = y + (1LL * first * C_out + n) * STEPS;
#pragma unroll
            for (int j = 0; j < STEPS; ++j)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int column = column0 + 8 * j + 2 * q + i, sentence = column / STEPS;
                    if (first + sentence < B)
                        channel[1LL * sentence * C_out * STEPS + column % STEPS] = sums[m][j][2 * upper + i] + bias[n];
                }
        }
}
