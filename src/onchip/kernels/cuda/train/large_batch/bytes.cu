// train/large_batch/bytes.cu: forward and dW of the first layer of a training step for many uint8 rows.
//
// Idea    As train/large_batch/staged.cu, for rows of uint8 times a scale (pixels), with the gemms of bytes.cuh. The
//         other operand is split into bf16 once for all blocks: weights by bytes_split, after the first step by
//         train_apply; dz by its own kernel or by bytes_split. dW is split-K; train_apply adds the slices.
// Floor   784-56-28-10, 60,000 rows: forward and dW each read x once, 47 MB / 4.8 TB/s = 10 us; a gemm of 60,000 x 785
//         x 56 is 5.3 Gflop, 3x in fp32: 16 us at 989 Tflop/s bf16. 784-320-160-10, 4,096 rows: 2.1 Gflop each, 6 us in
//         fp32, 2 us in bf16.
// Layout  x (n, D_in, a byte that means 1 if the layer has a bias, zeros), row stride a multiple of 16 B. Splits
//         (blocks of 64 columns, stages, SPLITS, vectors) as in bytes.cuh. Others as train/large_batch/launches.cu.
// Shared  Pipeline stages: forward 4 (3 in fp32) of 8,192 (1 + SPLITS) B, dW 4 of 8,704 + 4,096 SPLITS B; <= 98,304 B.
// Limits  SPLITS is 3 (fp32), 2 (tf32, fp16) or 1 (bf16). Any widths and batch below 2^30. sm_80 up; wgmma on sm_90a.
#include "train/large_batch/bytes.cuh"

constexpr int STAGE_K = 64;  // of bytes_split and bytes_forward

// Splits floats, (N, k_end) if K_MAJOR, else (k_end, N), into bf16. A thread writes a 16 B vector. K_MAJOR permutes K
// as bytes_forward reads x: lane q reads 16 adjacent elements and uses four per K step. Otherwise K is in order.
template <int SPLITS, bool K_MAJOR>
__global__ void __launch_bounds__(THREADS)
bytes_split(const Step step, const float* from, uint4* to, int stride, int N, int K) {
    from = step.local(from), to = step.local(to);
    wait_for_previous_kernel();
    const int k_end = K_MAJOR ? K : step.size(), stages = (K + STAGE_K - 1) / STAGE_K;
    const int vectors = STAGE_K / 8 * COLUMNS, vector = (blockIdx.x * THREADS + threadIdx.x) % vectors;
    const int stage = (blockIdx.x * THREADS + threadIdx.x) / vectors, first_k = stage % stages * STAGE_K;
    const int n = stage / stages * COLUMNS + vector % COLUMNS, k_group = vector / COLUMNS;
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int k = first_k + (K_MAJOR ? i / 2 * 16 + k_group * 2 + i % 2 : k_group * 8 + i);
        const long long at = K_MAJOR ? static_cast<long long>(n) * stride + k : static_cast<long long>(k) * stride + n;
        v[i] = n < N && k < k_end ? __ldcg(from + at) : 0.0f;
    }
    uint4 splits[SPLITS];
    split_eight(splits, v);
#pragma unroll
    for (int term = 0; term < SPLITS; ++term)
        to[(static_cast<long long>(stage) * SPLITS + term) * vectors + vector] = splits[term];
}

// y (size, N) = activation(scale x w^T), x (size, K), w (N, K) split. A block computes 128 x 64.
template <int SPLITS, u32 CODE>
__global__ void __launch_bounds__(THREADS, 2)
bytes_forward(const Step step, const unsigned char* x, const unsigned char* w, float* y, const Shape shape,
              const u32 scale) {
    w = step.local(w), y = step.local(y);
    extern __shared__ float4 smem[];
    constexpr int ROWS = 16 * WARPS, STAGES = SPLITS == 3 ? 3 : 4, STEPS = STAGE_K / 16;
    constexpr int X_BYTES = ROWS * STAGE_K, W_BYTES = SPLITS * STEPS * STEP_BYTES, STAGE_BYTES = X_BYTES + W_BYTES;
    static_assert(sizeof(Tiles<4>) <= STAGES * STAGE_BYTES, "tiles reuse the stages");
    const int blocks_n = (shape.N + COLUMNS - 1) / COLUMNS, size = step.size();
    const int first_m = blockIdx.x / blocks_n * ROWS, first_n = blockIdx.x % blocks_n * COLUMNS;
    const int last = (shape.K + STAGE_K - 1) / STAGE_K;
    if (first_m >= size) {
        wait_for_previous_kernel();
        return;
    }
    unsigned char* const stages = reinterpret_cast<unsigned char*>(smem);
    u32 ids[2];  // a thread copies 16 B of each row
    find_rows(ids, step.rows(), first_m + static_cast<int>(threadIdx.x) / 4, 64, size);
    const int within = threadIdx.x % 4 * 16;
    const auto fetch_x = [&](int stage) {
        unsigned char* to = stages + stage % STAGES * STAGE_BYTES + threadIdx.x * 16;
        const int k = stage * STAGE_K + within;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const bool is_valid = ids[i] != NO_ROW && k < shape.x_stride;
            const unsigned char* row = x + static_cast<long long>(is_valid ? ids[i] : 0) * shape.x_stride;
            copy_async(to + i * X_BYTES / 2, row + (is_valid ? k : 0), is_valid);
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
    wait_for_previous_kernel();
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) {
        if (i < last) fetch_w(i);
        commit_stage();  // the first group includes every x copy above
    }
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    float totals[1][8][4] = {}, c[1][8][4] = {};
    u32 even[STEPS][1][4], odd[STEPS][1][4];  // double buffer: the next stage is converted during this one's gemm
    const auto convert = [&](u32 (&a)[STEPS][1][4], int stage) {  // rows g and g + 8
        const unsigned char* at = stages + stage % STAGES * STAGE_BYTES + (16 * warp + g) * STAGE_K + 16 * q;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint4 bytes = *reinterpret_cast<const uint4*>(at + 8 * half * STAGE_K);
            const u32 words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
#pragma unroll
            for (int i = 0; i < STEPS; ++i) {
                a[i][0][half] = upper_halves(byte_of<0>(words[i]), byte_of<1>(words[i]));
                a[i][0][2 + half] = upper_halves(byte_of<2>(words[i]), byte_of<3>(words[i]));
            }
        }
    };
    wait_for_stages<STAGES - 2>();
    __syncthreads();
    convert(even, 0);
    const auto multiply = [&](u32 (&now)[STEPS][1][4], u32 (&next)[STEPS][1][4], int stage) {
        add_stage<SPLITS>(c, now, stages + stage % STAGES * STAGE_BYTES + X_BYTES, SPLITS < 3 && stage > 0);
        wait_for_stages<STAGES - 3>();
        __syncthreads();  // the next stage is complete, the previous one is free
        if (stage + STAGES - 1 < last) fetch_x(stage + STAGES - 1), fetch_w(stage + STAGES - 1);
        commit_stage();
        convert(next, stage + 1);  // unused after the last stage
        keep_in_registers(next);
        TileGemm::wait();
        if (SPLITS == 3) add_to_totals(totals, c);
    };
#pragma unroll 1
    for (int stage = 0; stage < last; stage += 2) {
        multiply(even, odd, stage);
        if (stage + 1 < last) multiply(odd, even, stage + 1);
    }
    if (SPLITS < 3) add_to_totals(totals, c);
    __syncthreads();
    Tiles<4>& tiles = *reinterpret_cast<Tiles<4>*>(smem);
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float factor = __uint_as_float(scale),
                pair[2] = {totals[0][j][2 * half] * factor, totals[0][j][2 * half + 1] * factor};
            store_vector(&tiles.at[warp / 2 * 2 + j / 4][warp % 2 * 16 + 8 * half + g][j % 4 * 8 + 2 * q], pair);
        }
    const auto activate = [&](const float4& sum) { return activated<CODE>(sum, shape.a); };
    forward_epilogue<4>(tiles, {4, 2, 1}, shape, y, size, first_m, first_n, activate);
}

struct ByteGradient {
    const unsigned char* x;   // (n, x_stride)
    const unsigned char* dz;  // (size, N), split
    float* partials;          // (slices, N, w_stride)
    int x_stride, w_stride, K, N;
    int all_stages, slice_stages;  // stages of 32 rows: in a full batch (even), in a slice
    float scale;
};

// partials = scale dz^T x, per split-K slice of the rows. A block computes 64 x 256; block 0 sums the tally.
template <int SPLITS>
__global__ void __launch_bounds__(THREADS, SPLITS == 3 ? 1 : 2)
bytes_gradient(const Step step, const ByteGradient dw, const Tally tally) {
    extern __shared__ float4 smem[];
    constexpr int ROWS = 32, STEPS = ROWS / 16, FEATURES = 256, STAGES = 4;
    constexpr int PITCH = FEATURES + 16;  // rows two apart start 8 banks apart
    constexpr int X_BYTES = ROWS * PITCH, TERM_BYTES = STEPS * STEP_BYTES, STAGE_BYTES = X_BYTES + SPLITS * TERM_BYTES;
    const int size = step.size(), index = static_cast<int>(blockIdx.x) - 1;
    if (size == 0 || index < 0) {
        wait_for_previous_kernel();
        if (size > 0) tally.add_up(step);
        return;
    }
    const int column_tiles = (dw.K + FEATURES - 1) / FEATURES, row_tiles = (dw.N + COLUMNS - 1) / COLUMNS;
    const int slice = index / (column_tiles * row_tiles), tile = index - slice * column_tiles * row_tiles;
    const int first_m = tile / column_tiles * COLUMNS, first_n = tile % column_tiles * FEATURES;
    const int end = (size + ROWS - 1) / ROWS, first = slice * dw.slice_stages;
    const int last = first + dw.slice_stages < end ? first + dw.slice_stages : end;
    unsigned char* const stages = reinterpret_cast<unsigned char*>(smem);
    const int column = threadIdx.x % 16 * 16, row = threadIdx.x / 16;  // a thread copies 16 B of two rows
    const bool has_column = first_n + column < dw.x_stride;
    const long long* const order = step.rows();
    const auto load_ids = [&](u32 (&ids)[2], int stage) {  // one stage early, to hide the latency of the load
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int k = stage * ROWS + row + 16 * i;
            ids[i] = static_cast<u32>(order[k < size ? k : size - 1]);
        }
    };
    const auto fetch_x = [&](const u32 (&ids)[2], int stage) {
        unsigned char* at = stages + stage % STAGES * STAGE_BYTES + row * PITCH + column;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const bool is_valid = has_column && stage * ROWS + row + 16 * i < size;
            const unsigned char* from = dw.x + static_cast<long long>(is_valid ? ids[i] : 0) * dw.x_stride;
            copy_async(at + 16 * i * PITCH, from + (is_valid ? first_n + column : 0), is_valid);
        }
    };
    const auto fetch_dz = [&](int stage) {  // half of one of bytes_split's stages
        const long long at = (static_cast<long long>(first_m / COLUMNS) * dw.all_stages + stage / 2 * 2) * SPLITS;
        const unsigned char* from = step.local(dw.dz) + at * TERM_BYTES + stage % 2 * TERM_BYTES;
        unsigned char* to = stages + stage % STAGES * STAGE_BYTES + X_BYTES;
#pragma unroll
        for (int term = 0; term < SPLITS; ++term)
            copy_async(to + term * TERM_BYTES + threadIdx.x * 16, from + 2 * term * TERM_BYTES + threadIdx.x * 16);
    };
    u32 early[STAGES][2];
#pragma unroll
    for (int i = 0; i < STAGES; ++i) load_ids(early[i], first + i);
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i)
        if (first + i < last) fetch_x(early[i], first + i);
    u32 ids[2] = {early[STAGES - 1][0], early[STAGES - 1][1]};
    wait_for_previous_kernel();
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) {
        if (first + i < last) fetch_dz(first + i);
        commit_stage();  // the first group includes every x copy above
    }
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    const int feature = warp * 32 + 4 * g;  // first of a lane's four
    float totals[2][8][4] = {}, c[2][8][4] = {};
    u32 even[STEPS][2][4], odd[STEPS][2][4];  // as in bytes_forward
    const auto convert = [&](u32 (&a)[STEPS][2][4], int stage) {
        const unsigned char* at = stages + stage % STAGES * STAGE_BYTES;
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
            u32 words[4];  // rows 2 q, 2 q + 1 and those 8 further, four features each
#pragma unroll
            for (int k = 0; k < 4; ++k)
                words[k] = *reinterpret_cast<const u32*>(at + (16 * i + 2 * q + k % 2 + k / 2 * 8) * PITCH + feature);
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
    wait_for_stages<STAGES - 2>();
    __syncthreads();
    convert(even, first);
    const auto multiply = [&](u32 (&now)[STEPS][2][4], u32 (&next)[STEPS][2][4], int stage) {
        add_stage<SPLITS>(c, now, stages + stage % STAGES * STAGE_BYTES + X_BYTES, SPLITS < 3 && stage > first);
        wait_for_stages<STAGES - 3>();
        __syncthreads();  // the next stage is complete, the previous one is free
        if (stage + STAGES - 1 < last) fetch_x(ids, stage + STAGES - 1), fetch_dz(stage + STAGES - 1);
        commit_stage();
        convert(next, stage + 1);  // unused after the last stage
        keep_in_registers(next);
        load_ids(ids, stage + STAGES);  // fetch_x above used the old ones
        TileGemm::wait();
        if (SPLITS == 3) add_to_totals(totals, c);
    };
#pragma unroll 1
    for (int stage = first; stage < last; stage += 2) {
        multiply(even, odd, stage);
        if (stage + 1 < last) multiply(odd, even, stage + 1);
    }
    if (SPLITS < 3) add_to_totals(totals, c);
    float* partial = step.local(dw.partials) + static_cast<long long>(slice) * dw.N * dw.w_stride;
    const int n = first_n + feature;
    if (n >= dw.K) return;
#pragma unroll
    for (int i = 0; i < 16; ++i) {  // a warp stores a cache line in each of four rows
        const int m = first_m + i / 2 * 8 + 2 * q + i % 2, j = i / 2, w = i % 2;
        const float four[4] = {totals[0][j][w] * dw.scale, totals[0][j][2 + w] * dw.scale, totals[1][j][w] * dw.scale,
                               totals[1][j][2 + w] * dw.scale};
        if (m < dw.N) store_vector(partial + static_cast<long long>(m) * dw.w_stride + n, four);
    }
}
