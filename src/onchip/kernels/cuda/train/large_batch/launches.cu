// train/large_batch/launches.cu: a training step of an MLP as one launch per layer: forward, loss, backward, update.
//
// Idea    One launch per layer forward, one for the head (output layer, loss, gradients), one per layer backward, and
//         one for all dW gemms. The optimiser update is the epilogue of the dW gemm: no gradient reaches global memory.
//         Large batches use split-K slices that train_apply adds up. Clipping needs slices too: train_squares sums
//         their squares, and train_apply scales by the norm. One graph runs many steps; the GPU counts them.
// Floor   6 flop per weight and row, 4 in the first layer. 784-320-160-10, batch 64: 85 Mflop, 1.2 MB of weights read
//         twice and written once: 0.5 us of 3xTF32, 0.2 us of L2; five launches in a graph, 3.5 us. 784-56-28-10,
//         60,000 rows: x read twice, 376 MB / 4.8 TB/s = 78 us; 11.2 Gflop times 3 / 494 Tflop/s = 68 us.
// Order   launches.cuh. Head: four elements per lane, then a tree; slices first to last, many of them in eight shares.
// Layout  Rows are 32 B aligned. x, activations and dz, the gradients by pre-activations: (rows, width, 1 if the next
//         layer has a bias, zeros); w, mean, square (D_out, D_in, bias, zeros): the bias is the weight of that 1.
// Shared  8 tiles of 32 x 36 floats, 36 864 B, or of 16 x 20, 10 240 B.
// Limits  float32 in memory; gemms in fp32 (3xTF32), tf32, bf16 or fp16. Any widths, batch below 2^30. sm_80 up.
#include "train/large_batch/bf16_split.cuh"

// y (size, N) = activation(x w^T), x (size, K), w (N, K).
template <class P, int R>
__global__ void __launch_bounds__(THREADS, R == 2 ? 2 : 1)
train_forward(const Step step, const float* x, const float* w, float* y, const Shape shape) {
    if (!shape.is_gathered) x = step.local(x);
    w = step.local(w), y = step.local(y);
    __shared__ __align__(16) Tiles<R> tiles;
    const Warps warps = shape.warps;
    const int columns = 8 * R * warps.n, blocks_n = (shape.N + columns - 1) / columns;
    const int first_m = blockIdx.x / blocks_n * 8 * R * warps.m, first_n = blockIdx.x % blocks_n * columns;
    const int size = step.size();
    const WarpTile<R> tile(warps);
    const KMajor<R> a(x, shape.x_stride, first_m + tile.row, size, shape.x_stride,
                      shape.is_gathered ? step.rows() : nullptr);
    const KMajor<R> b(w, shape.w_stride, first_n + tile.column, shape.N, shape.w_stride);
    const Chunks chunks = {tile.k_split, (shape.K + CHUNK - 1) / CHUNK, warps.k};
    Prefetch<R> prefetch_a, prefetch_b;
    if (shape.is_gathered) prefetch_a.begin(a, chunks);
    else prefetch_b.begin(b, chunks);
    wait_for_previous_kernel();
    if (first_m >= size) return;
    if (shape.is_gathered) prefetch_b.begin(b, chunks);
    else prefetch_a.begin(a, chunks);
    warp_gemm<P, R>(tiles.at[threadIdx.x / 32], a, prefetch_a, b, prefetch_b, chunks);
    forward_epilogue<R>(tiles, warps, shape, y, size, first_m, first_n);
}

// prev_dz (size, N) = (dz w) times the activation's derivative at `out` (size, N); dz (size, K), w (K, N).
template <class P, int R>
__global__ void __launch_bounds__(THREADS, R == 2 ? 2 : 1)
train_backward(const Step step, const float* dz, const float* w, const float* out, float* prev_dz, const Shape shape) {
    dz = step.local(dz), w = step.local(w), out = step.local(out), prev_dz = step.local(prev_dz);
    __shared__ __align__(16) Tiles<R> tiles;
    const Warps warps = shape.warps;
    const int columns = 8 * R * warps.n, blocks_n = (shape.N + columns - 1) / columns;
    const int first_m = blockIdx.x / blocks_n * 8 * R * warps.m, first_n = blockIdx.x % blocks_n * columns;
    const int size = step.size();
    const WarpTile<R> tile(warps);
    const KMajor<R> a(dz, shape.x_stride, first_m + tile.row, size, shape.x_stride);
    const MnMajor<R> b(w, shape.w_stride, first_n + tile.column, shape.w_stride, shape.K);
    const Chunks chunks = {tile.k_split, (shape.K + CHUNK - 1) / CHUNK, warps.k};
    Prefetch<R> prefetch_a, prefetch_b;
    prefetch_b.begin(b, chunks);
    wait_for_previous_kernel();
    if (first_m >= size) return;
    prefetch_a.begin(a, chunks);
    warp_gemm<P, R>(tiles.at[threadIdx.x / 32], a, prefetch_a, b, prefetch_b, chunks);
    backward_epilogue<R>(tiles, warps, shape, out, prev_dz, size, first_m, first_n);
}

struct Head {
    const float* a;        // (size, K): input of the output layer
    const float* w;        // (N, K), N <= 32; nullptr: an earlier launch computed z
    const float* z;        // (size, N): the network's output, if w is nullptr
    const void* targets;   // (n,) int64 classes, or (n, N) float32
    const float* weights;  // (n,) loss weights per row; nullptr: 1
    float* dz;             // (size, N); nullptr: losses only
    float* prev_dz;        // (size, D): gradient by the pre-activations of `a`, without the bias 1; nullptr: skip
    double* losses;        // (size,)
    int* correct;          // (size,)
    int a_stride, w_stride, z_stride, K, N, D;
    u32 is_gathered, loss, code, slope, prev_code, prev_slope;
    float smoothing;  // label smoothing of cross-entropy

    // Pointers of this block's network.
    __device__ __forceinline__ Head local(const Step& step) const {
        Head copy = *this;
        if (!is_gathered) copy.a = step.local(a);
        copy.w = step.local(w), copy.z = step.local(z), copy.dz = step.local(dz), copy.prev_dz = step.local(prev_dz);
        copy.losses = step.local(losses), copy.correct = step.local(correct), copy.weights = step.local(weights);
        return copy;
    }
};

// W x LANES threads per row: the output layer if head.w, W outputs at a time; then the loss, computed by every warp,
// and the gradients. 8 warps per row suit few rows (load latency), 8 lanes per row many rows (instruction count).
template <int W, int LANES>
__global__ void __launch_bounds__(THREADS) train_head(const Step step, const Head pointers) {
    const Head head = pointers.local(step);
    constexpr int ROWS = THREADS / (LANES * W), PITCH = 40;  // rows of 8 lanes start 8 banks apart
    __shared__ float outputs[ROWS][PITCH], gradients[THREADS / LANES][PITCH];
    const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES, warp = group % W, N = head.N;
    const int first_row = blockIdx.x * ROWS, size = step.size();
    if (first_row >= size) {
        wait_for_previous_kernel();
        return;
    }
    const bool is_valid = first_row + group / W < size;  // else clamped: all lanes take part in the reductions
    const int row = is_valid ? first_row + group / W : size - 1;
    const long long row_id = step.rows()[row];
    const bool has_classes = head.loss == CROSS_ENTROPY;
    const int truth = has_classes ? static_cast<int>(static_cast<const long long*>(head.targets)[row_id]) : 0;
    const float weight = head.weights ? head.weights[row_id] : 1.0f;
    wait_for_previous_kernel();
    const long long at = static_cast<long long>(row) * head.z_stride;
    const float* a = head.a + (head.is_gathered ? row_id : static_cast<long long>(row)) * head.a_stride;
    const float* z = head.z + at;
    if (head.w) {
        constexpr int AT_ONCE = W > 1 ? 2 : 5;  // independent sums: ten classes take one or two rounds
        const Activation activation = activation_of(head.code, head.slope);
        for (int first = warp; first < N; first += AT_ONCE * W) {
            const float* w[AT_ONCE];
            float sums[AT_ONCE] = {};
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j)  // clamped: a branch would serialise loads
                w[j] = head.w + static_cast<long long>(first + j * W < N ? first + j * W : N - 1) * head.w_stride;
#pragma unroll 2
            for (int k = 4 * lane; k < head.K; k += 4 * LANES) {
                const float4 input = load4(a + k);
                float4 w4[AT_ONCE];
#pragma unroll
                for (int j = 0; j < AT_ONCE; ++j) w4[j] = load4(w[j] + k);
#pragma unroll
                for (int j = 0; j < AT_ONCE; ++j) {
                    sums[j] = fmaf(input.x, w4[j].x, sums[j]);
                    sums[j] = fmaf(input.y, w4[j].y, sums[j]);
                    sums[j] = fmaf(input.z, w4[j].z, sums[j]);
                    sums[j] = fmaf(input.w, w4[j].w, sums[j]);
                }
            }
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j) {
                const float sum = reduce_lanes<Sum, LANES>(sums[j]);
                if (lane == 0 && first + j * W < N) outputs[group / W][first + j * W] = activation(sum);
            }
        }
        if (W > 1) __syncthreads();
        else __syncwarp();
        z = outputs[group / W];
    }
    const bool is_writer = is_valid && warp == 0;  // writes to global memory
    const auto store_gradient = [&](int n, float gradient) {
        if (head.prev_dz) gradients[group][n] = weight * gradient;  // then N <= 32
        if (head.dz && is_writer) head.dz[at + n] = weight * gradient;
    };
    double loss = 0.0;
    if (has_classes) {
        float top = __uint_as_float(0xff800000u);
        int best = N;
        for (int n = lane; n < N; n += LANES)
            if (z[n] > top || best == N) top = z[n], best = n;
        argmax_lanes<LANES>(top, best, N);
        double total = 0.0;
        for (int n = lane; n < N; n += LANES) total += static_cast<double>(expf(z[n] - top));
        total = reduce_lanes<Sum, LANES>(total);
        const float scale = static_cast<float>(total), share = head.smoothing / N;
        float at_truth = 0.0f;  // nonzero in one lane
        for (int n = lane; n < N; n += LANES) {
            if (n == truth) at_truth = z[n] - top;
            store_gradient(n, expf(z[n] - top) / scale - (n == truth ? 1.0f - head.smoothing + share : share));
        }
        at_truth = reduce_lanes<Sum, LANES>(at_truth);
        loss = log(total) - (1.0 - head.smoothing) * static_cast<double>(at_truth);
        if (head.smoothing > 0.0f) {
            double shifted_sum = 0.0;
            for (int n = lane; n < N; n += LANES) shifted_sum += static_cast<double>(z[n] - top);
            loss -= static_cast<double>(head.smoothing) / N * reduce_lanes<Sum, LANES>(shifted_sum);
        }
        if (lane == 0 && is_writer) head.correct[row] = best == truth;
    } else {
        const float* target = static_cast<const float*>(head.targets) + row_id * N;
        for (int n = lane; n < N; n += LANES) {
            const float difference = z[n] - target[n];
            loss += static_cast<double>(difference) * static_cast<double>(difference);
            store_gradient(n, act_grad(head.code, __uint_as_float(head.slope), difference, z[n]));
        }
        loss = reduce_lanes<Sum, LANES>(loss) * (head.loss == HALF_SSE ? 0.5 : 1.0 / N);
        if (lane == 0 && is_writer) head.correct[row] = 0;
    }
    if (lane == 0 && is_writer) head.losses[row] = weight * loss;
    if (!head.prev_dz) return;
    __syncwarp();
    if (!is_valid) return;
    for (int k = 4 * (lane + LANES * warp); k < head.D; k += 4 * LANES * W) {
        float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 5
        for (int n = 0; n < N; ++n) {
            const float gradient = gradients[group][n];
            const float4 w = load4(head.w + static_cast<long long>(n) * head.w_stride + k);
            sum = {fmaf(gradient, w.x, sum.x), fmaf(gradient, w.y, sum.y), fmaf(gradient, w.z, sum.z),
                   fmaf(gradient, w.w, sum.w)};
        }
        const float4 result = act_grad(head.prev_code, __uint_as_float(head.prev_slope), sum, load4(a + k));
        const float four[4] = {result.x, result.y, result.z, result.w};
        store_first(head.prev_dz + static_cast<long long>(row) * head.a_stride + k, four, head.D - k);
    }
}

// Sums the rows' losses when no gradients are computed.
__global__ void __launch_bounds__(THREADS) train_tally(const Step step, const Tally tally) {
    wait_for_previous_kernel();
    tally.add_up(step);
}

// -- gradients and update ---------------------------------------------------------------------------------------------

// dW = dz^T a of every layer with the update as epilogue; with several slices, the slice's partial sums. Block 0
// computes the tally, if any. IS_SECOND: a previous dW launch waited for the same inputs, so both overlap.
template <class P, int R, bool HAS_UPDATE, bool IS_SECOND>
__global__ void __launch_bounds__(THREADS, R == 2 ? 2 : 1)
train_gradients(const Step step, const __grid_constant__ Layers layers, const Tally tally) {
    __shared__ __align__(16) Tiles<R> tiles;
    const int size = step.size(), index = static_cast<int>(blockIdx.x) - (tally.losses ? 1 : 0);
    if (size == 0 || index < 0) {
        wait_for_previous_kernel();
        if (size > 0) tally.add_up(step);
        return;
    }
    const Warps warps = layers.warps;
    const GradientBlock block(layers, index, 8 * R * warps.m, 8 * R * warps.n);
    const LayerMemory memory = layers.memory_of(block.layer, step);
    const LayerSizes& sizes = layers.sizes[block.layer];
    const WarpTile<R> tile(warps);
    const int end = (size + CHUNK - 1) / CHUNK, first = block.slice * layers.chunks;
    const Chunks chunks = {first + tile.k_split, first + layers.chunks < end ? first + layers.chunks : end, warps.k};
    const MnMajor<R> b(memory.a, sizes.a_stride, block.first_n + tile.column, sizes.a_stride, size,
                       sizes.is_gathered ? step.rows() : nullptr);
    Prefetch<R> prefetch_a, prefetch_b;
    prefetch_b.begin(b, chunks);
    if (!IS_SECOND) wait_for_previous_kernel();
    const MnMajor<R> a(memory.dz, sizes.dz_stride, block.first_m + tile.row, sizes.dz_stride, size);
    prefetch_a.begin(a, chunks);
    warp_gemm<P, R, IS_SECOND>(tiles.at[threadIdx.x / 32], a, prefetch_a, b, prefetch_b, chunks);
    gradient_epilogue<R, HAS_UPDATE>(tiles, warps, step, layers, block);
    if (IS_SECOND) wait_for_previous_kernel();
}

// Four adjacent gradients of a layer. SHARES threads of a block split their slices.
template <int SHARES = 1>
struct ApplyPosition {
    static constexpr int FOURS = THREADS / SHARES;  // per block
    int layer, count;  // valid elements
    long long at;

    __device__ __forceinline__ explicit ApplyPosition(const Layers& layers) : layer(layers.layer_of(blockIdx.x)) {
        const LayerSizes& sizes = layers.sizes[layer];
        at = (static_cast<long long>(blockIdx.x - layers.first_block[layer]) * FOURS + threadIdx.x % FOURS) * 4;
        count = at < element_count(sizes) ? sizes.K - static_cast<int>(at % sizes.w_stride) : 0;
    }
    static __device__ __forceinline__ long long element_count(const LayerSizes& sizes) {
        return static_cast<long long>(sizes.N) * sizes.w_stride;
    }
    static __device__ __forceinline__ bool is_first() { return SHARES == 1 || threadIdx.x < FOURS; }
    // Adds up the slices in order, first per share; the first FOURS threads get the sums. Block-wide.
    __device__ __forceinline__ void add_up(float (&sums)[4], const LayerMemory& memory, const LayerSizes& sizes) const {
        const int each = (sizes.slices + SHARES - 1) / SHARES, first = threadIdx.x / FOURS * each;
        const int last = count <= 0 ? first : first + each < sizes.slices ? first + each : sizes.slices;
#pragma unroll 8
        for (int slice = first; slice < last; ++slice) {
            const float4 partial = load4(memory.partials + slice * element_count(sizes) + at);
            sums[0] += partial.x, sums[1] += partial.y, sums[2] += partial.z, sums[3] += partial.w;
        }
        if constexpr (SHARES > 1) {
            __shared__ __align__(16) float shares[SHARES - 1][FOURS][4];
            if (!is_first()) store_vector(shares[threadIdx.x / FOURS - 1][threadIdx.x % FOURS], sums);
            __syncthreads();
#pragma unroll
            for (int share = 0; share < SHARES - 1; ++share) {
                const float4 partial = load4(shares[share][threadIdx.x % FOURS]);
                sums[0] += partial.x, sums[1] += partial.y, sums[2] += partial.z, sums[3] += partial.w;
            }
        }
    }
};

// Input of the gradient norm.
struct Squares {
    double* block_sums;  // (count,): one sum per block of train_squares; nullptr: no clipping
    int first, count;    // blocks of earlier launches, and of all

    // Gradient scale that limits the norm to opt.clip. Block-wide.
    __device__ __forceinline__ float clipped_scale(const Step& step, const StepValues& opt) const {
        double total = 0.0;
        for (int i = threadIdx.x; i < count; i += THREADS) total += __ldcg(step.local(block_sums) + i);
        const double norm = opt.scale * sqrt(reduce_lanes<Sum, THREADS>(total)), share = opt.clip / (norm + 1e-6);
        return share >= 1.0 ? opt.scale : static_cast<float>(opt.scale * share);
    }
};

// Adds up the slices into the first one and sums the squares.
__global__ void __launch_bounds__(THREADS)
train_squares(const Step step, const __grid_constant__ Layers layers, const Squares squares) {
    wait_for_previous_kernel();
    if (step.size() == 0) return;
    const ApplyPosition<> position(layers);
    double sum = 0.0;
    if (position.count > 0) {
        const LayerMemory memory = layers.memory_of(position.layer, step);
        float sums[4] = {};
        position.add_up(sums, memory, layers.sizes[position.layer]);
        store_vector(memory.partials + position.at, sums);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (i < position.count) sum += static_cast<double>(sums[i]) * static_cast<double>(sums[i]);
    }
    sum = reduce_lanes<Sum, THREADS>(sum);
    if (threadIdx.x == 0) step.local(squares.block_sums)[squares.first + blockIdx.x] = sum;
}

// Adds up the slices in order and updates. SPLITS > 0: also writes the first layer's weights as a bf16 split, in the
// layout of bytes_split with `stages` stages of 64 K elements.
template <int SPLITS, int SHARES>
__global__ void __launch_bounds__(THREADS)
train_apply(const Step step, const __grid_constant__ Layers layers, const Squares squares, u32* w_splits, int stages) {
    wait_for_previous_kernel();
    if (step.size() == 0) return;
    StepValues opt = step.opt();
    if (squares.block_sums) opt.scale = squares.clipped_scale(step, opt);
    const ApplyPosition<SHARES> position(layers);
    const LayerMemory memory = layers.memory_of(position.layer, step);
    WeightState state;
    if (position.count > 0 && position.is_first()) state.load(layers.optimiser, memory, position.at);
    float sums[4] = {};
    position.add_up(sums, memory, layers.sizes[position.layer]);
    if (position.count <= 0 || !position.is_first()) return;
    update(layers.optimiser, opt, memory, position.at, sums, state, position.count);
    if constexpr (SPLITS > 0) {
        if (position.layer > 0) return;
        const int stride = layers.sizes[0].w_stride;
        const int n = static_cast<int>(position.at / stride), k = static_cast<int>(position.at % stride);
        const long long stage = static_cast<long long>(n / 64) * stages + k / 64;
        u32 packed[SPLITS][2];
        split_floats(packed, state.w);
#pragma unroll
        for (int i = 0; i < 2 * SPLITS; ++i) {  // 16 B vectors of 8 K elements: four pairs 16 apart
            const long long vector = (stage * SPLITS + i / 2) * 512 + (k % 16 / 2 + i % 2) * 64 + n % 64;
            step.local(w_splits)[vector * 4 + k % 64 / 16] = packed[i / 2][i % 2];
        }
    }
}

// Advances the step counter at the end of a graph.
__global__ void train_advance(const Networks networks, long long* progress, long long steps) {
    wait_for_previous_kernel();
    if (threadIdx.x == 0) networks.local(progress)[0] += steps;
}
