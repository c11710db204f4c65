// train/large_batch/staged.cu: forward, backward and dW gemms of a training step for many rows.
//
// Idea    As train/large_batch/launches.cu, with operands staged in shared memory (train/large_batch/staged.cuh): a
//         block computes 32 WARPS_M x 32 WARPS_N and loads shared operands from L2 once. Two blocks per SM.
// Floor   784-56-28-10, 60,000 rows: forward and dW each read x once, 188 MB / 4.8 TB/s = 39 us; a gemm of 60,000 x 785
//         x 56 is 5.3 Gflop, 3x in fp32: 32 us at 494 Tflop/s tf32. 784-320-160-10, 4,096 rows: dW is 2.5 Gflop, 15 us
//         in fp32, 5 us in tf32.
// Layout  As train/large_batch/launches.cu.
// Shared  3 stages of 32 x (32 WARPS_M + 32 WARPS_N) floats, rows padded by 4: at most 82 944 B.
// Limits  As train/large_batch/launches.cu; WARPS_M x WARPS_N is 4 x 2, 2 x 4 or 2 x 2. sm_80 up.
#include "train/large_batch/epilogue.cuh"
#include "train/large_batch/staged.cuh"

// y (size, N) = activation(x w^T), x (size, K), w (N, K).
template <class P, int WARPS_M, int WARPS_N>
__global__ void __launch_bounds__(THREADS, 2)
large_forward(const Step step, const float* x, const float* w, float* y, const Shape shape) {
    if (!shape.is_gathered) x = step.local(x);
    w = step.local(w), y = step.local(y);
    extern __shared__ float4 smem[];
    using A = StagedKMajor<TILE * WARPS_M>;
    using B = StagedKMajor<TILE * WARPS_N>;
    constexpr Warps warps = {WARPS_M, WARPS_N, WARPS / (WARPS_M * WARPS_N)};
    const int blocks_n = (shape.N + TILE * WARPS_N - 1) / (TILE * WARPS_N), size = step.size();
    const int first_m = blockIdx.x / blocks_n * TILE * WARPS_M, first_n = blockIdx.x % blocks_n * TILE * WARPS_N;
    const int last = (shape.K + STAGE_K - 1) / STAGE_K;
    const Stages<A, B> stages = {reinterpret_cast<float*>(smem)};
    A a(x, shape.x_stride, first_m, size, shape.x_stride, shape.is_gathered ? step.rows() : nullptr);
    B b(w, shape.w_stride, first_n, shape.N, shape.w_stride);
    if (first_m >= size) {
        wait_for_previous_kernel();
        return;
    }
    if (shape.is_gathered) stages.begin_a(a, 0, last);
    else stages.begin_b(b, 0, last);
    wait_for_previous_kernel();
    if (shape.is_gathered) stages.begin_b(b, 0, last);
    else stages.begin_a(a, 0, last);
    const WarpTile<4> warp_tile(warps);
    const bool is_busy = first_m + warp_tile.row < size && first_n + warp_tile.column < shape.N;
    const Tiles<4>& tiles = multiply_stages<P, WARPS_M, WARPS_N>(stages, a, b, 0, last, warp_tile, is_busy);
    forward_epilogue<4>(tiles, warps, shape, y, size, first_m, first_n);
}

// prev_dz (size, N) = (dz w) times the activation's derivative at `out` (size, N); dz (size, K), w (K, N).
template <class P, int WARPS_M, int WARPS_N>
__global__ void __launch_bounds__(THREADS, 2)
large_backward(const Step step, const float* dz, const float* w, const float* out, float* prev_dz, const Shape shape) {
    dz = step.local(dz), w = step.local(w), out = step.local(out), prev_dz = step.local(prev_dz);
    extern __shared__ float4 smem[];
    using A = StagedKMajor<TILE * WARPS_M>;
    using B = StagedMnMajor<TILE * WARPS_N>;
    constexpr Warps warps = {WARPS_M, WARPS_N, WARPS / (WARPS_M * WARPS_N)};
    const int blocks_n = (shape.N + TILE * WARPS_N - 1) / (TILE * WARPS_N), size = step.size();
    const int first_m = blockIdx.x / blocks_n * TILE * WARPS_M, first_n = blockIdx.x % blocks_n * TILE * WARPS_N;
    const int last = (shape.K + STAGE_K - 1) / STAGE_K;
    const Stages<A, B> stages = {reinterpret_cast<float*>(smem)};
    A a(dz, shape.x_stride, first_m, size, shape.x_stride);
    B b(w, shape.w_stride, first_n, shape.w_stride, shape.K, 0);
    if (first_m >= size) {
        wait_for_previous_kernel();
        return;
    }
    stages.begin_b(b, 0, last);
    wait_for_previous_kernel();
    stages.begin_a(a, 0, last);
    const WarpTile<4> warp_tile(warps);
    const bool is_busy = first_m + warp_tile.row < size && first_n + warp_tile.column < shape.N;
    const Tiles<4>& tiles = multiply_stages<P, WARPS_M, WARPS_N>(stages, a, b, 0, last, warp_tile, is_busy);
    backward_epilogue<4>(tiles, warps, shape, out, prev_dz, size, first_m, first_n);
}

// dW = dz^T a of every layer with the update as epilogue; with several slices, the slice's partial sums. Block 0
// computes the tally.
template <class P, int WARPS_M, int WARPS_N, bool HAS_UPDATE, bool IS_SECOND>
__global__ void __launch_bounds__(THREADS, 2)
large_gradients(const Step step, const __grid_constant__ Layers layers, const Tally tally) {
    extern __shared__ float4 smem[];
    using A = StagedMnMajor<TILE * WARPS_M>;
    using B = StagedMnMajor<TILE * WARPS_N>;
    constexpr Warps warps = {WARPS_M, WARPS_N, WARPS / (WARPS_M * WARPS_N)};
    const int size = step.size(), index = static_cast<int>(blockIdx.x) - (tally.losses ? 1 : 0);
    if (size == 0 || index < 0) {
        wait_for_previous_kernel();
        if (size > 0) tally.add_up(step);
        return;
    }
    const GradientBlock block(layers, index, TILE * WARPS_M, TILE * WARPS_N);
    const LayerMemory memory = layers.memory_of(block.layer, step);
    const LayerSizes& sizes = layers.sizes[block.layer];
    const int end = (size + STAGE_K - 1) / STAGE_K, slice_stages = layers.chunks / (STAGE_K / CHUNK);
    const int first = block.slice * slice_stages, last = first + slice_stages < end ? first + slice_stages : end;
    const Stages<A, B> stages = {reinterpret_cast<float*>(smem)};
    B b(memory.a, sizes.a_stride, block.first_n, sizes.a_stride, size, first,
        sizes.is_gathered ? step.rows() : nullptr);
    stages.begin_b(b, first, last);
    if (!IS_SECOND) wait_for_previous_kernel();
    A a(memory.dz, sizes.dz_stride, block.first_m, sizes.dz_stride, size, first);
    stages.begin_a(a, first, last);
    const WarpTile<4> warp_tile(warps);
    const bool is_busy = block.first_m + warp_tile.row < sizes.N && block.first_n + warp_tile.column < sizes.K;
    const Tiles<4>& tiles = multiply_stages<P, WARPS_M, WARPS_N>(stages, a, b, first, last, warp_tile, is_busy);
    gradient_epilogue<4, HAS_UPDATE>(tiles, warps, step, layers, block);
    if (IS_SECOND) wait_for_previous_kernel();
}
