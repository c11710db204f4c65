// gemm/sm90.cu: the Hopper GEMM, y = activation(x w^T + bias + residual); M, N, K are run-time values.
//
// Idea    The persistent, warp-specialised TMA + wgmma mainloop of mma/wgmma_tile.cuh, with split-K over a cluster for
//         few rows. Bias, residual and activation are fused in the epilogue. This file only loads rows of x.
// Floor   2 M N K flop. 8,192 cubed in fp16: 1.1 Tflop / 989 Tflop/s = 1.11 ms; in fp32: 3 * 1.1 / 494.5 = 6.67 ms.
// Layout  x (M, K), y and residual (M, N) row-major, w (SPLITS, N, K), in fp32 upper tf32, then lower; bias (N).
// Limits  Rows of x and w are multiples of 16 B; others are zero-padded first (gemm/pad_rows.cu). M < 2^31; sm_90a.
#include "mma/wgmma_tile.cuh"

// TMA loads of rows of x, for multiply_tiles.
struct RowLoader : SinglePhase {
    const TensorMap& map;
    int row;

    __device__ __forceinline__ void begin_tile(long long m, u32, int) { row = static_cast<int>(m); }
    template <int DEPTH, int>
    __device__ __forceinline__ void load(void* to, Mbarrier& mbarrier, int slice, int x_tile) {
        tma_load(to, map, mbarrier, slice * DEPTH + x_tile * (LINE / 4), row);
    }
};

// Split-K over a cluster (CLUSTER): two blocks per SM, so that blocks of the next kernel fit before this one ends.
template <class P, class X, class Y, int WARPGROUP_ROWS, int BN, int WARPGROUPS, int STAGES, Split SPLIT,
          class Act = Activation>
__global__ void __launch_bounds__(WARPGROUP * (WARPGROUPS + 1), SPLIT == CLUSTER ? 2 : 1)
gemm_sm90(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map, const float* bias,
              const Y* residual, Y* y, long long M, long long N, long long K, u32 x_tile_rows, u32 split_k, u32 code,
              u32 a_bits, u32 b_bits) {
    constexpr int DEPTH = Operands<P, X>::DEPTH;
    multiply_tiles<P, X, WARPGROUP_ROWS, BN, WARPGROUPS, STAGES, SPLIT>(
        RowLoader{{static_cast<int>((K + DEPTH - 1) / DEPTH)}, x_map, 0}, w_map, bias, RowsOut<Y>{y, M, N, residual}, M,
        x_tile_rows, split_k, activation_of<Act>(code, a_bits, b_bits));
}
