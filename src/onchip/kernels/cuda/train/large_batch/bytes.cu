// train/large_batch/bytes.cu: forward and dW of the first layer of a training step for many uint8 rows.
//
// Idea    As train/large_batch/staged.cu, for rows of uint8 times a scale (pixels); gemms in
//         train/large_batch/bytes.cuh. The other operand is split into bf16 once for all blocks: weights by
//         bytes_parts, after the first step by train_apply; dz by train_rows or train_stream where they compute it. dW
//         is split-K; train_apply adds the slices.
// Floor   784-56-28-10, 60,000 rows: forward and dW each read x once, 47 MB / 4.8 TB/s = 10 us; a gemm of 60,000 x 785
//         x 56 is 5.3 Gflop, 3x in fp32: 16 us at 989 Tflop/s bf16. 784-320-160-10, 4,096 rows: 2.1 Gflop each, 6 us in
//         fp32, 2 us in bf16.
// Layout  x (n, D_in, a byte that stands for 1 if the layer has a bias, zeros), row stride a multiple of 16 B. Splits
//         (blocks of 64 columns, stages, PARTS, chunks) as in bytes.cuh. Others as train/large_batch/launches.cu.
// Shared  Pipeline stages: forward 4 (3 in fp32) of 8,192 (1 + PARTS) B, dW 4 of 8,704 + 4,096 PARTS B: at most 98,304.
// Limits  PARTS is 3 (fp32), 2 (tf32, fp16) or 1 (bf16). Any widths and batch below 2^30. sm_80 up; wgmma on sm_90a.
#include "train/large_batch/bytes.cuh"

constexpr int STAGE_K = 64;  // of the splits, and of forward

// Splits floats into bf16: (N, k_end) ALONG K, or (k_end, N). A thread writes a 16 B chunk. In forward, lane q reads 16
// adjacent elements of x and uses four per K step; in dW, K steps are rows in order.
template <int PARTS, bool ALONG>
__global__ void __launch_bounds__(THREADS)
bytes_parts(const Step step, const float* from, uint4* to, int stride, int N, int K) {
    from = step.mine(from), to = step.mine(to);
    wait_for_step_before();
    const int k_end = ALONG ? K : step.size(), stages = (K + STAGE_K - 1) / STAGE_K;
    const int pieces = STAGE_K / 8 * COLUMNS, piece = (blockIdx.x * THREADS + threadIdx.x) % pieces;
    const int stage = (blockIdx.x * THREADS + threadIdx.x) / pieces, first_k = stage % stages * STAGE_K;
    const int n = stage / stages * COLUMNS + piece % COLUMNS, eight = piece / COLUMNS;
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int k = first_k + (ALONG ? i / 2 * 16 + eight * 2 + i % 2 : eight * 8 + i);
        const long long at = ALONG ? static_cast<long long>(n) * stride + k : static_cast<long long>(k) * stride + n;
        v[i] = n < N && k < k_end ? __ldcg(from + at) : 0.0f;
    }
    uint4 parts[PARTS];
    split_eight(parts, v);
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
        to[(static_cast<long long>(stage) * PARTS + part) * pieces + piece] = parts[part];
}

// y (size, N) = activation(scale x w^T), x (size, K), w (N, K) split. A block computes 128 x 64.
template <int PARTS, u32 CODE>
__global__ void __launch_bounds__(THREADS, 2)
bytes_forward(const Step step, const unsigned char* x, const unsigned char* w, float* y, const Shape shape,
              const u32 scale) {
    w = step.mine(w), y = step.mine(y);
    extern __shared__ float4 room[];
    constexpr int ROWS = 16 * WARPS, STAGES = PARTS == 3 ? 3 : 4, STEPS = STAGE_K / 16;
    constexpr int X_BYTES = ROWS * STAGE_K, W_BYTES = PARTS * STEPS * STEP_BYTES, STAGE_BYTES = X_BYTES + W_BYTES;
    static_assert(sizeof(Tiles<4>) <= STAGES * STAGE_BYTES, "tiles fit where stages were");
    const int blocks_across = (shape.N + COLUMNS - 1) / COLUMNS, size = step.size();
    const int first_m = blockIdx.x / blocks_across * ROWS, first_n = blockIdx.x % blocks_across * COLUMNS;
    const int last = (shape.K + STAGE_K - 1) / STAGE_K;
    if (first_m >= size) {
        wait_for_step_before();
        return;
    }
    unsigned char* const stages = reinterpret_cast<unsigned char*>(room);
    u32 found[2];  // a thread copies 16 B of each row
    find_rows(found, step.rows(), first_m + static_cast<int>(threadIdx.x) / 4, 64, size);
    const int within = threadIdx.x % 4 * 16;
    const auto fetch_x = [&](int stage) {
        unsigned char* to = stages + stage % STAGES * STAGE_BYTES + threadIdx.x * 16;
        const int k = stage * STAGE_K + within;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const bool is_there = found[i] != NO_ROW && k < shape.x_stride;
            const unsigned char* row = x + static_cast<long long>(is_there ? found[i] : 0) * shape.x_stride;
            copy_async(to + i * X_BYTES / 2, row + (is_there ? k : 0), is_there);
        }
    };
    const auto fetch_w = [&](int stage) {
        const unsigned char* from = w + (static_cast<long long>(first_n / COLUMNS) * last + stage) * W_BYTES;
        unsigned char* to = stages + stage % STAGES * STAGE_BYTES + X_BYTES;
#pragma unroll
        for (int i = threadIdx.x * 16; i < W_BYTES; i += THREADS * 16) copy_async(to + i, from + i);
    };
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i)
        if (i < last) fetch_x(i);
    wait_for_step_before();
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) {
        if (i < last) fetch_w(i);
        close_stage();  // the first group has all of x
    }
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    float totals[1][8][4] = {}, c[1][8][4] = {};
    u32 even[STEPS][1][4], odd[STEPS][1][4];  // double buffer: convert the next stage during this one's gemm
    const auto widen = [&](u32 (&a)[STEPS][1][4], int stage) {  // rows g and g + 8
        const unsigned char* here = stages + stage % STAGES * STAGE_BYTES + (16 * warp + g) * STAGE_K + 16 * q;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint4 bytes = *reinterpret_cast<const uint4*>(here + 8 * half * STAGE_K);
            const u32 words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
#pragma unroll
            for (int i = 0; i < STEPS; ++i) {
                a[i][0][half] = upper_halves(byte_of<0>(words[i]), byte_of<1>(words[i]));
                a[i][0][2 + half] = upper_halves(byte_of<2>(words[i]), byte_of<3>(words[i]));
            }
        }
    };
    await_stages<STAGES - 2>();
    __syncthreads();
    widen(even, 0);
    const auto multiply = [&](u32 (&now)[STEPS][1][4], u32 (&next)[STEPS][1][4], int stage) {
        add_stage<PARTS>(c, now, stages + stage % STAGES * STAGE_BYTES + X_BYTES, PARTS < 3 && stage > 0);
        await_stages<STAGES - 3>();
        __syncthreads();  // the next stage is complete, and the previous one is no longer read
        if (stage + STAGES - 1 < last) fetch_x(stage + STAGES - 1), fetch_w(stage + STAGES - 1);
        close_stage();
        widen(next, stage + 1);  // unused after the last stage
        hold(next);
        Products::wait();
        if (PARTS == 3) add_to_totals(totals, c);
    };
#pragma unroll 1
    for (int stage = 0; stage < last; stage += 2) {
        multiply(even, odd, stage);
        if (stage + 1 < last) multiply(odd, even, stage + 1);
    }
    if (PARTS < 3) add_to_totals(totals, c);
    __syncthreads();
    Tiles<4>& tiles = *reinterpret_cast<Tiles<4>*>(room);
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float by = __uint_as_float(scale), pair[2] = {totals[0][j][2 * half] * by, totals[0][j][2 * half + 1] * by};
            store_several(&tiles.at[warp / 2 * 2 + j / 4][warp % 2 * 16 + 8 * half + g][j % 4 * 8 + 2 * q], pair);
        }
    const auto activate = [&](const float4& sum) { return activated<CODE>(sum, shape.a); };
    finish_forward<4>(tiles, {4, 2, 1}, shape, y, size, first_m, first_n, activate);
}

struct ByteGradient {
    const unsigned char* x;   // (n, x_stride)
    const unsigned char* dz;  // (size, N), split
    float* parts;             // (slices, N, w_stride)
    int x_stride, w_stride, K, N;
    int all_stages, a_slice;  // stages of 32 rows: of a full batch (even), and of a slice
    float scale;
    u32 unused;
};

// scale dz^T x of each split-K slice of the rows: a block computes 64 x 256. Block 0 computes the tally.
template <int PARTS>
__global__ void __launch_bounds__(THREADS, PARTS == 3 ? 1 : 2)
bytes_gradient(const Step step, const ByteGradient to, const Tally tally) {
    extern __shared__ float4 room[];
    constexpr int ROWS = 32, STEPS = ROWS / 16, FEATURES = 256, STAGES = 4;
    constexpr int PITCH = FEATURES + 16;  // rows two apart start 8 banks apart
    constexpr int X_BYTES = ROWS * PITCH, PART_BYTES = STEPS * STEP_BYTES, STAGE_BYTES = X_BYTES + PARTS * PART_BYTES;
    const int size = step.size(), number = static_cast<int>(blockIdx.x) - 1;
    if (size == 0 || number < 0) {
        wait_for_step_before();
        if (size > 0) tally.add_up(step);
        return;
    }
    const int across = (to.K + FEATURES - 1) / FEATURES, down = (to.N + COLUMNS - 1) / COLUMNS;
    const int slice = number / (across * down), tile = number - slice * across * down;
    const int first_m = tile / across * COLUMNS, first_n = tile % across * FEATURES;
    const int all = (size + ROWS - 1) / ROWS, first = slice * to.a_slice;
    const int last = first + to.a_slice < all ? first + to.a_slice : all;
    unsigned char* const stages = reinterpret_cast<unsigned char*>(room);
    const int column = threadIdx.x % 16 * 16, row = threadIdx.x / 16;  // a thread copies 16 B of two rows
    const bool has_column = first_n + column < to.x_stride;
    const long long* const order = step.rows();
    const auto find = [&](u32 (&found)[2], int stage) {  // a stage ahead, to hide the load latency
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int k = stage * ROWS + row + 16 * i;
            found[i] = static_cast<u32>(order[k < size ? k : size - 1]);
        }
    };
    const auto fetch_x = [&](const u32 (&found)[2], int stage) {
        unsigned char* at = stages + stage % STAGES * STAGE_BYTES + row * PITCH + column;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const bool is_there = has_column && stage * ROWS + row + 16 * i < size;
            const unsigned char* from = to.x + static_cast<long long>(is_there ? found[i] : 0) * to.x_stride;
            copy_async(at + 16 * i * PITCH, from + (is_there ? first_n + column : 0), is_there);
        }
    };
    const auto fetch_dz = [&](int stage) {  // half a stage of bytes_parts
        const long long at = (static_cast<long long>(first_m / COLUMNS) * to.all_stages + stage / 2 * 2) * PARTS;
        const unsigned char* from = step.mine(to.dz) + at * PART_BYTES + stage % 2 * PART_BYTES;
        unsigned char* made = stages + stage % STAGES * STAGE_BYTES + X_BYTES;
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
            copy_async(made + part * PART_BYTES + threadIdx.x * 16, from + 2 * part * PART_BYTES + threadIdx.x * 16);
    };
    u32 early[STAGES][2];
#pragma unroll
    for (int i = 0; i < STAGES; ++i) find(early[i], first + i);
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i)
        if (first + i < last) fetch_x(early[i], first + i);
    u32 found[2] = {early[STAGES - 1][0], early[STAGES - 1][1]};
    wait_for_step_before();
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) {
        if (first + i < last) fetch_dz(first + i);
        close_stage();  // the first group has all of x
    }
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    const int feature = warp * 32 + 4 * g;  // first of a lane's four
    float totals[2][8][4] = {}, c[2][8][4] = {};
    u32 even[STEPS][2][4], odd[STEPS][2][4];  // as in bytes_forward
    const auto widen = [&](u32 (&a)[STEPS][2][4], int stage) {
        const unsigned char* here = stages + stage % STAGES * STAGE_BYTES;
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
            u32 words[4];  // rows 2 q, 2 q + 1 and those 8 further, four features each
#pragma unroll
            for (int k = 0; k < 4; ++k)
                words[k] = *reinterpret_cast<const u32*>(here + (16 * i + 2 * q + k % 2 + k / 2 * 8) * PITCH + feature);
#pragma unroll
            for (int pair = 0; pair < 2; ++pair) {
                const u32 one = words[2 * pair], other = words[2 * pair + 1];
                a[i][0][2 * pair] = upper_halves(byte_of<0>(one), byte_of<0>(other));
                a[i][0][2 * pair + 1] = upper_halves(byte_of<1>(one), byte_of<1>(other));
                a[i][1][2 * pair] = upper_halves(byte_of<2>(one), byte_of<2>(other));
                a[i][1][2 * pair + 1] = upper_halves(byte_of<3>(one), byte_of<3>(other));
            }
        }
    };
    await_stages<STAGES - 2>();
    __syncthreads();
    widen(even, first);
    const auto multiply = [&](u32 (&now)[STEPS][2][4], u32 (&next)[STEPS][2][4], int stage) {
        add_stage<PARTS>(c, now, stages + stage % STAGES * STAGE_BYTES + X_BYTES, PARTS < 3 && stage > first);
        await_stages<STAGES - 3>();
        __syncthreads();  // the next stage is complete, and the previous one is no longer read
        if (stage + STAGES - 1 < last) fetch_x(found, stage + STAGES - 1), fetch_dz(stage + STAGES - 1);
        close_stage();
        widen(next, stage + 1);  // unused after the last stage
        hold(next);
        find(found, stage + STAGES);  // not before: copies still use the indices it replaces
        Products::wait();
        if (PARTS == 3) add_to_totals(totals, c);
    };
#pragma unroll 1
    for (int stage = first; stage < last; stage += 2) {
        multiply(even, odd, stage);
        if (stage + 1 < last) multiply(odd, even, stage + 1);
    }
    if (PARTS < 3) add_to_totals(totals, c);
    float* part = step.mine(to.parts) + static_cast<long long>(slice) * to.N * to.w_stride;
    const int n = first_n + feature;
    if (n >= to.K) return;
#pragma unroll
    for (int i = 0; i < 16; ++i) {  // a cache line in each of four rows
        const int m = first_m + i / 2 * 8 + 2 * q + i % 2, j = i / 2, w = i % 2;
        const float four[4] = {totals[0][j][w] * to.scale, totals[0][j][2 + w] * to.scale, totals[1][j][w] * to.scale,
                               totals[1][j][2 + w] * to.scale};
        if (m < to.N) store_several(part + static_cast<long long>(m) * to.w_stride + n, four);
    }
}
