// gemm/mma.cu: mma.sync GEMM, y = activation(x w^T + bias); M, N, K are run-time values.
//
// Idea    One tile per block by the cp.async + mma.sync mainloop of mma/mma_tile.cuh.
// Order   That of mma/mma_tile.cuh. Batch-invariant: a row has the same bits in every batch.
// Floor   2 M N K flop. 4,096 cubed on an A100 in fp16: 137 Gflop / 312 Tflop/s = 440 us; fp32: 3 * 137 / 156 = 2.6 ms.
// Layout  x (M, K), y (M, N) row-major, w (SPLITS, N, pitch), for fp32 the upper tf32, then the lower; rows of w are
//         zero-padded to multiples of 16 B. Each 16 B aligned; bias (N) or none. Rows of x that are not multiples of
//         16 B take narrower cp.async copies.
// Limits  Any M, N, K; x and y float32, float16 or bfloat16; sm_80 up.
#include "mma/mma_tile.cuh"

// IS_WHOLE: rows of x are whole units of k, 16-byte aligned. alignment  of rows in bytes, up to 16
template <class P, class X, class Y, int BM, int BN, int WM, int WN, int STAGES, bool IS_WHOLE>
__global__ void __launch_bounds__(32 * WM * WN, (MMA_BLOCKS<P, BM, BN, WM * WN>))
gemm_mma(const X* __restrict__ x, const typename P::Element* __restrict__ w, const float* __restrict__ bias, Y* y,
            long long M, long long N, long long K, long long pitch, int alignment, u32 code, u32 a_bits, u32 b_bits) {
    using W = typename P::Element;
    constexpr int THREADS = 32 * WM * WN, DEPTH = MmaSlice<P>::DEPTH;
    extern __shared__ uint4 smem[];
    const TileOrigin<BM, BN> tile(M, N, blockIdx.x);
    MatrixLoader<P, X, BM, THREADS, 1, IS_WHOLE> rows(x + tile.m * K, K, M - tile.m, K, alignment);
    MatrixLoader<P, W, BN, THREADS, MmaSlice<P>::SPLITS, true> weights(w + tile.n * pitch, pitch, N - tile.n, pitch, 16,
                                                                      N * pitch);
    multiply_tile<P, X, BM, BN, WM, WN, STAGES>(
        smem, rows, weights, static_cast<int>((K + DEPTH - 1) / DEPTH), bias == nullptr ? nullptr : bias + tile.n,
        RowsOut<Y>{y, M, N}, tile.m, tile.n, Activation{code, __uint_as_float(a_bits), __uint_as_float(b_bits)});
}
