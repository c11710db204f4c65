// gemm/sm90.cu: the Hopper GEMM, y = activation(x w^T + bias + other); M, N, K are run-time values.
//
// Idea    The persistent, warp-specialised TMA + wgmma mainloop of mma/wgmma_tile.cuh, with split-K over a cluster for
//         few rows. Bias, residual (other) and activation are fused in the epilogue. This file only loads rows of x.
// Floor   2 M N K flop. 8,192 cubed in fp16: 1.1 Tflop / 989 Tflop/s = 1.11 ms; in fp32: 3 * 1.1 / 494.5 = 6.67 ms.
// Layout  x (M, K), y (M, N) row-major, w (PARTS, N, K), for fp32 the upper tf32, then the lower; bias (N) or none,
//         other (M, N) or none.
// Limits  Rows of x and w are multiples of 16 B; others are zero-padded first (gemm/pad_rows.cu). M < 2^31; sm_90a.
#include "mma/wgmma_tile.cuh"

// TMA loads of rows of x, for multiply_tiles.
struct RowLoader : OnePhase {
    const TensorMap& map;
    int row;

    __device__ __forceinline__ void begin_tile(long long m, u32, int) { row = static_cast<int>(m); }
    template <int DEPTH, int>
    __device__ __forceinline__ void load(void* to, Signal& signal, int slice, int box) {
        load_box(to, map, signal, slice * DEPTH + box * (LINE / 4), row);
    }
};

// Split-K over a cluster (TOGETHER): two blocks per SM, so that blocks of the next kernel fit before this one ends.
template <class P, class X, class Y, int WARPGROUP_ROWS, int BN, int WARPGROUPS, int STAGES, Split SPLIT, class Act = Activation>
__global__ void __launch_bounds__(WARPGROUP * (WARPGROUPS + 1), SPLIT == TOGETHER ? 2 : 1)
gemm_sm90(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map, const float* bias,
              const Y* other, Y* y, long long M, long long N, long long K, u32 box_rows, u32 parts, u32 code,
              u32 a_bits, u32 b_bits) {
    constexpr int DEPTH = Operands<P, X>::DEPTH;
    multiply_tiles<P, X, WARPGROUP_ROWS, BN, WARPGROUPS, STAGES, SPLIT>(
        RowLoader{{static_cast<int>((K + DEPTH - 1) / DEPTH)}, x_map, 0}, w_map, bias, RowsOut<Y>{y, M, N, other}, M,
        box_rows, parts, activation_of<Act>(code, a_bits, b_bits));
}
