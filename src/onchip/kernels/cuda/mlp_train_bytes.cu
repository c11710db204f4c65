// mlp_train_bytes.cu: the first layer of a training step of many rows that are bytes: forward and gradients.
//
// Idea    As mlp_train_large.cu for rows that are bytes times a scale, pixels for instance: mlp_train_bytes.cuh has the
//         products. Gradients are slices' parts, which train_apply adds up.
// Floor   784-56-28-10, 60,000 rows: forward and gradients each read x once, 47 MB / 4.8 TB/s = 10 us; a product of
//         60,000 x 785 x 56 has 5.3 Gflop, in fp32 three times that: 16 us at 989 Tflop/s of bf16. 784-320-160-10,
//         4,096 rows: 2.1 Gflop each: 6 us in fp32, 2 us in bf16.
// Order   mlp_train_bytes.cuh. Slices of a batch first to last, by train_apply.
// Layout  x (n, D_in, a byte that stands for 1 if the layer has a bias, zeros), rows of multiples of 16 bytes. Others as
//         mlp_train.cu.
// Shared  4 raw stages and 2 of bf16: 4 (4,096 + 9,216) + 2 (8,192 + 4,096 PARTS) B forward, at most 94,208; with two
//         blocks of k's 4 (4,096 + 17,408) + 2 (8,192 + 8,192 PARTS), at most 151,552; gradients 4 (5,120 + 9,216)
//         + 2 (8,192 + 4,096 PARTS), at most 98,304.
// Limits  PARTS is 3 (fp32), 2 (tf32, fp16) or 1 (bf16); DOWN x ACROSS is 4 x 2 or 2 x 2. Any widths and batch below
//         2^30. sm_80 up.
#include "mlp_train_bytes.cuh"

// y (size, N) = activation(scale x w^T), x (size, K), w (N, K).
template <int PARTS, int DOWN, int ACROSS>
__global__ void __launch_bounds__(THREADS, DOWN * ACROSS == WARPS ? 2 : 1)
bytes_forward(const Step step, const unsigned char* x, const float* w, float* y, const Shape shape, const u32 scale) {
    extern __shared__ float4 room[];
    constexpr Warps warps = {DOWN, ACROSS, WARPS / (DOWN * ACROSS)};
    using A = BytesAlongK<TILE * DOWN, warps.deep>;
    using B = FloatsAlongK<PARTS, TILE * ACROSS, warps.deep>;
    const int blocks_across = (shape.N + TILE * ACROSS - 1) / (TILE * ACROSS), size = step.size();
    const int first_m = blockIdx.x / blocks_across * TILE * DOWN, first_n = blockIdx.x % blocks_across * TILE * ACROSS;
    const int last = (shape.K + BLOCK_K * warps.deep - 1) / (BLOCK_K * warps.deep);
    if (first_m >= size) {
        wait_for_step_before();
        return;
    }
    const ByteStages<A, B> stages = {reinterpret_cast<unsigned char*>(room)};
    A a(x, shape.x_stride, first_m, size, shape.x_stride, step.rows());
    B b = {w, shape.w_stride, first_n, shape.N, shape.w_stride};
    stages.begin_a(a, 0, last);
    wait_for_step_before();
    stages.begin_b(b, 0, last);
    const WarpPlace<4> place(warps);
    const bool is_busy = first_m + place.row < size && first_n + place.column < shape.N;
    const Tiles<4>& tiles = sum_up_bytes<DOWN, ACROSS>(stages, a, b, 0, last, place, is_busy,
                                                              __uint_as_float(scale));
    finish_forward<4>(tiles, warps, shape, y, size, first_m, first_n);
}

struct ByteGradient {
    const unsigned char* x;  // (n, x_stride)
    const float* dz;         // (size, N)
    float* parts;            // (slices, N, w_stride)
    int x_stride, dz_stride, w_stride, K, N;
    int a_slice;  // stages of rows that a slice has
    float scale;
};

// scale dz^T x of each slice of the rows. The tally is the first block's.
template <int PARTS>
__global__ void __launch_bounds__(THREADS, 2)
bytes_gradient(const Step step, const ByteGradient to, const Tally tally) {
    extern __shared__ float4 room[];
    constexpr Warps warps = {2, 4, 1};
    using A = FloatsAcrossK<PARTS, TILE * warps.down>;
    using B = BytesAcrossK<TILE * warps.across>;
    const int size = step.size(), number = static_cast<int>(blockIdx.x) - 1;
    if (size == 0 || number < 0) {
        wait_for_step_before();
        if (size > 0) tally.add_up(step);
        return;
    }
    const int across = (to.K + TILE * warps.across - 1) / (TILE * warps.across);
    const int down = (to.N + TILE * warps.down - 1) / (TILE * warps.down);
    const int slice = number / (across * down), tile = number - slice * across * down;
    const int first_m = tile / across * TILE * warps.down, first_n = tile % across * TILE * warps.across;
    const int all = (size + BLOCK_K - 1) / BLOCK_K, first = slice * to.a_slice;
    const int last = first + to.a_slice < all ? first + to.a_slice : all;
    const ByteStages<A, B> stages = {reinterpret_cast<unsigned char*>(room)};
    B b(to.x, to.x_stride, first_n, to.x_stride, size, first, step.rows());
    stages.begin_b(b, first, last);
    wait_for_step_before();
    A a = {to.dz, to.dz_stride, first_m, to.dz_stride, size};
    stages.begin_a(a, first, last);
    const WarpPlace<4> place(warps);
    const bool is_busy = first_m + place.row < to.N && first_n + place.column < to.K;
    const Tiles<4>& tiles =
        sum_up_bytes<warps.down, warps.across>(stages, a, b, first, last, place, is_busy, to.scale);
    float* part = to.parts + static_cast<long long>(slice) * to.N * to.w_stride;
    const auto fetch = [](int, int) { return Nothing{}; };
    finish_tiles<4>(tiles, warps, fetch, [&](int row, int column, float4 sum, Nothing) {
        const int m = first_m + row, n = first_n + column;
        const float four[4] = {sum.x, sum.y, sum.z, sum.w};
        if (m < to.N && n < to.K) store_several(part + static_cast<long long>(m) * to.w_stride + n, four);
    });
}
