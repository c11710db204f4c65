// train/large_batch/staged.cu: forward, backward and dW gemms of a training step for many rows.
//
// Idea    As train/large_batch/launches.cu, with operands staged in shared memory (train/large_batch/staged.cuh): a
//         block computes 32 DOWN x 32 ACROSS and loads shared operands from L2 once. Two blocks per SM.
// Floor   784-56-28-10, 60,000 rows: forward and dW each read x once, 188 MB / 4.8 TB/s = 39 us; a gemm of 60,000 x 785
//         x 56 is 5.3 Gflop, 3x in fp32: 32 us at 494 Tflop/s tf32. 784-320-160-10, 4,096 rows: dW is 2.5 Gflop, 15 us
//         in fp32, 5 us in tf32.
// Layout  As train/large_batch/launches.cu.
// Shared  3 stages of 32 x (32 DOWN + 32 ACROSS) floats, rows padded by 4: at most 82 944 B.
// Limits  As train/large_batch/launches.cu; DOWN x ACROSS is 4 x 2, 2 x 4 or 2 x 2. sm_80 up.
#include "train/large_batch/epilogue.cuh"
#include "train/large_batch/staged.cuh"

// y (size, N) = activation(x w^T), x (size, K), w (N, K).
template <class P, int DOWN, int ACROSS>
__global__ void __launch_bounds__(THREADS, 2)
large_forward(const Step step, const float* x, const float* w, float* y, const Shape shape) {
    if (!shape.is_gathered) x = step.mine(x);
    w = step.mine(w), y = step.mine(y);
    extern __shared__ float4 room[];
    using A = StagedAlongK<TILE * DOWN>;
    using B = StagedAlongK<TILE * ACROSS>;
    constexpr Warps warps = {DOWN, ACROSS, WARPS / (DOWN * ACROSS)};
    const int blocks_across = (shape.N + TILE * ACROSS - 1) / (TILE * ACROSS), size = step.size();
    const int first_m = blockIdx.x / blocks_across * TILE * DOWN, first_n = blockIdx.x % blocks_across * TILE * ACROSS;
    const int last = (shape.K + STAGE_K - 1) / STAGE_K;
    const Stages<A, B> stages = {reinterpret_cast<float*>(room)};
    A a(x, shape.x_stride, first_m, size, shape.x_stride, shape.is_gathered ? step.rows() : nullptr);
    B b(w, shape.w_stride, first_n, shape.N, shape.w_stride);
    if (first_m >= size) {
        wait_for_step_before();
        return;
    }
    if (shape.is_gathered) stages.begin_a(a, 0, last);
    else stages.begin_b(b, 0, last);
    wait_for_step_before();
    if (shape.is_gathered) stages.begin_b(b, 0, last);
    else stages.begin_a(a, 0, last);
    const WarpPlace<4> place(warps);
    const bool is_busy = first_m + place.row < size && first_n + place.column < shape.N;
    const Tiles<4>& tiles = sum_up_stages<P, DOWN, ACROSS>(stages, a, b, 0, last, place, is_busy);
    finish_forward<4>(tiles, warps, shape, y, size, first_m, first_n);
}

// before (size, N) = (dz w) times the activation's derivative at `out` (size, N); dz (size, K), w (K, N).
template <class P, int DOWN, int ACROSS>
__global__ void __launch_bounds__(THREADS, 2)
large_backward(const Step step, const float* dz, const float* w, const float* out, float* before, const Shape shape) {
    dz = step.mine(dz), w = step.mine(w), out = step.mine(out), before = step.mine(before);
    extern __shared__ float4 room[];
    using A = StagedAlongK<TILE * DOWN>;
    using B = StagedAcrossK<TILE * ACROSS>;
    constexpr Warps warps = {DOWN, ACROSS, WARPS / (DOWN * ACROSS)};
    const int blocks_across = (shape.N + TILE * ACROSS - 1) / (TILE * ACROSS), size = step.size();
    const int first_m = blockIdx.x / blocks_across * TILE * DOWN, first_n = blockIdx.x % blocks_across * TILE * ACROSS;
    const int last = (shape.K + STAGE_K - 1) / STAGE_K;
    const Stages<A, B> stages = {reinterpret_cast<float*>(room)};
    A a(dz, shape.x_stride, first_m, size, shape.x_stride);
    B b(w, shape.w_stride, first_n, shape.w_stride, shape.K, 0);
    if (first_m >= size) {
        wait_for_step_before();
        return;
    }
    stages.begin_b(b, 0, last);
    wait_for_step_before();
    stages.begin_a(a, 0, last);
    const WarpPlace<4> place(warps);
    const bool is_busy = first_m + place.row < size && first_n + place.column < shape.N;
    const Tiles<4>& tiles = sum_up_stages<P, DOWN, ACROSS>(stages, a, b, 0, last, place, is_busy);
    finish_backward<4>(tiles, warps, shape, out, before, size, first_m, first_n);
}

// dW = dz^T a of every layer with the update as epilogue; with several slices, the slice's partial sums. Block 0
// computes the tally.
template <class P, int DOWN, int ACROSS, bool IS_WHOLE, bool IS_SECOND>
__global__ void __launch_bounds__(THREADS, 2)
large_gradients(const Step step, const __grid_constant__ Layers layers, const Tally tally) {
    extern __shared__ float4 room[];
    using A = StagedAcrossK<TILE * DOWN>;
    using B = StagedAcrossK<TILE * ACROSS>;
    constexpr Warps warps = {DOWN, ACROSS, WARPS / (DOWN * ACROSS)};
    const int size = step.size(), number = static_cast<int>(blockIdx.x) - (tally.losses ? 1 : 0);
    if (size == 0 || number < 0) {
        wait_for_step_before();
        if (size > 0) tally.add_up(step);
        return;
    }
    const GradientBlock block(layers, number, TILE * DOWN, TILE * ACROSS);
    const LayerMemory memory = layers.memory_of(block.layer, step);
    const LayerSizes& sizes = layers.sizes[block.layer];
    const int all = (size + STAGE_K - 1) / STAGE_K, a_slice = layers.chunks / (STAGE_K / CHUNK);
    const int first = block.slice * a_slice, last = first + a_slice < all ? first + a_slice : all;
    const Stages<A, B> stages = {reinterpret_cast<float*>(room)};
    B b(memory.a, sizes.a_stride, block.first_n, sizes.a_stride, size, first,
        sizes.is_gathered ? step.rows() : nullptr);
    stages.begin_b(b, first, last);
    if (!IS_SECOND) wait_for_step_before();
    A a(memory.dz, sizes.dz_stride, block.first_m, sizes.dz_stride, size, first);
    stages.begin_a(a, first, last);
    const WarpPlace<4> place(warps);
    const bool is_busy = block.first_m + place.row < sizes.N && block.first_n + place.column < sizes.K;
    const Tiles<4>& tiles = sum_up_stages<P, DOWN, ACROSS>(stages, a, b, first, last, place, is_busy);
    finish_gradients<4, IS_WHOLE>(tiles, warps, step, layers, block);
    if (IS_SECOND) wait_for_step_before();
}
