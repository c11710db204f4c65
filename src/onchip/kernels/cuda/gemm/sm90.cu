// gemm/sm90.cu: y = activation(x w^T + bias + other), of any sizes, which are run-time values, at the tensor cores' rate.
//
// Idea    mma/wgmma_tile.cuh, with rows of x as they lie.
// Floor   2 M N K flop. 8,192 cubed in fp16: 1.1 Tflop / 989 Tflop/s = 1.11 ms; in fp32: 3 * 1.1 / 494.5 = 6.67 ms.
// Layout  x (M, K), y (M, N) row-major, w (PARTS, N, K): of fp32 the upper parts, then the lower ones; bias (N) or none,
//         other (M, N) or none.
// Limits  Rows of x and w are a multiple of 16 B long: others are copied with zeros behind them (gemm/pad_rows.cu). M < 2^31;
//         sm_90a.
#include "mma/wgmma_tile.cuh"

struct RowLoader : OnePhase {
    const TensorMap& map;
    int row;

    __device__ __forceinline__ void begin_tile(long long m, u32, int) { row = static_cast<int>(m); }
    template <int DEPTH, int>
    __device__ __forceinline__ void load(void* to, Signal& signal, int slice, int box) {
        load_box(to, map, signal, slice * DEPTH + box * (LINE / 4), row);
    }
};

// A cluster's blocks leave room for those of the next kernel, which then begins before this one ends.
template <class P, class X, class Y, int TEAM_ROWS, int BN, int TEAMS, int STAGES, Split SPLIT, class Act = Activation>
__global__ void __launch_bounds__(TEAM * (TEAMS + 1), SPLIT == TOGETHER ? 2 : 1)
product_wgmma(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map, const float* bias,
              const Y* other, Y* y, long long M, long long N, long long K, u32 box_rows, u32 parts, u32 code, u32 a_bits,
              u32 b_bits) {
    constexpr int DEPTH = Operands<P, X>::DEPTH;
    multiply_tiles<P, X, TEAM_ROWS, BN, TEAMS, STAGES, SPLIT>(
        RowLoader{{static_cast<int>((K + DEPTH - 1) / DEPTH)}, x_map, 0}, w_map, bias, RowsOut<Y>{y, M, N, other}, M, box_rows,
        parts, activation_of<Act>(code, a_bits, b_bits));
}
