// train/large_batch/launches.cu: a training step of an MLP as one launch per layer: forward, loss, backward, update.
//
// Idea    One launch per layer forward, one for the head (output layer, loss, gradients), one per layer backward, and
//         one for all dW gemms. The optimiser update is the epilogue of the dW gemm: no gradient reaches global memory.
//         Large batches use split-K slices that train_apply adds up. Clipping needs slices too: train_squares sums
//         their squares, and train_apply scales by the norm. Many steps form one graph with a step counter on the GPU.
// Floor   6 flop per weight and row, 4 in the first layer. 784-320-160-10, batch 64: 85 Mflop, 1.2 MB of weights read
//         twice and written once: 0.5 us of 3xTF32, 0.2 us of L2; five launches in a graph, 3.5 us. 784-56-28-10,
//         60,000 rows: x read twice, 376 MB / 4.8 TB/s = 78 us; 11.2 Gflop times 3 / 494 Tflop/s = 68 us.
// Order   launches.cuh. Head: four elements per lane, then a tree; slices first to last, many of them in eight shares.
// Layout  Rows are 32 B aligned. x and activations (rows, width, 1 if the next layer has a bias, zeros); w, mean,
//         square (D_out, D_in, bias, zeros): the bias is the weight of that 1. dz (gradients by pre-activations) as
//         activations.
// Shared  8 tiles of 32 x 36 floats, 36 864 B, or of 16 x 20, 10 240 B.
// Limits  float32 in memory; gemms in fp32 (3xTF32), tf32, bf16 or fp16. Any widths, batch below 2^30. sm_80 up.
#include "train/large_batch/bf16_split.cuh"

// y (size, N) = activation(x w^T), x (size, K), w (N, K).
template <class P, int R>
__global__ void __launch_bounds__(THREADS, R == 2 ? 2 : 1)
train_forward(const Step step, const float* x, const float* w, float* y, const Shape shape) {
    if (!shape.is_gathered) x = step.mine(x);
    w = step.mine(w), y = step.mine(y);
    __shared__ __align__(16) Tiles<R> tiles;
    const Warps warps = shape.warps;
    const int across = 8 * R * warps.across, blocks_across = (shape.N + across - 1) / across;
    const int first_m = blockIdx.x / blocks_across * 8 * R * warps.down, first_n = blockIdx.x % blocks_across * across;
    const int size = step.size();
    const WarpPlace<R> place(warps);
    const AlongK<R> a(x, shape.x_stride, first_m + place.row, size, shape.x_stride,
                      shape.is_gathered ? step.rows() : nullptr);
    const AlongK<R> b(w, shape.w_stride, first_n + place.column, shape.N, shape.w_stride);
    const Chunks chunks = {place.part, (shape.K + CHUNK - 1) / CHUNK, warps.deep};
    Ahead<R> of_a, of_b;
    if (shape.is_gathered) of_a.begin(a, chunks);
    else of_b.begin(b, chunks);
    wait_for_step_before();
    if (first_m >= size) return;
    if (shape.is_gathered) of_b.begin(b, chunks);
    else of_a.begin(a, chunks);
    sum_up<P, R>(tiles.at[threadIdx.x / 32], a, of_a, b, of_b, chunks);
    finish_forward<R>(tiles, warps, shape, y, size, first_m, first_n);
}

// before (size, N) = (dz w) times the activation's derivative at `out` (size, N); dz (size, K), w (K, N).
template <class P, int R>
__global__ void __launch_bounds__(THREADS, R == 2 ? 2 : 1)
train_backward(const Step step, const float* dz, const float* w, const float* out, float* before, const Shape shape) {
    dz = step.mine(dz), w = step.mine(w), out = step.mine(out), before = step.mine(before);
    __shared__ __align__(16) Tiles<R> tiles;
    const Warps warps = shape.warps;
    const int across = 8 * R * warps.across, blocks_across = (shape.N + across - 1) / across;
    const int first_m = blockIdx.x / blocks_across * 8 * R * warps.down, first_n = blockIdx.x % blocks_across * across;
    const int size = step.size();
    const WarpPlace<R> place(warps);
    const AlongK<R> a(dz, shape.x_stride, first_m + place.row, size, shape.x_stride);
    const AcrossK<R> b(w, shape.w_stride, first_n + place.column, shape.w_stride, shape.K);
    const Chunks chunks = {place.part, (shape.K + CHUNK - 1) / CHUNK, warps.deep};
    Ahead<R> of_a, of_b;
    of_b.begin(b, chunks);
    wait_for_step_before();
    if (first_m >= size) return;
    of_a.begin(a, chunks);
    sum_up<P, R>(tiles.at[threadIdx.x / 32], a, of_a, b, of_b, chunks);
    finish_backward<R>(tiles, warps, shape, out, before, size, first_m, first_n);
}

// -- the head ---------------------------------------------------------------------------------------------------------

struct Head {
    const float* a;       // (size, K): input of the output layer
    const float* w;       // (N, K), N <= 32; nullptr: z is given
    const float* z;       // (size, N): the network's output, if w is nullptr
    const void* targets;  // (n,) int64 classes, or (n, N) float32
    const float* weights;  // (n,) loss weights per row; nullptr: 1
    float* dz;            // (size, N); nullptr: losses only
    float* before;        // (size, D): gradient by the pre-activations of `a`, without the bias 1; nullptr: skip
    double* losses;       // (size,)
    int* correct;            // (size,)
    int a_stride, w_stride, z_stride, K, N, D;
    u32 is_gathered, loss, code, slope, before_code, before_slope;
    float smoothing;  // label smoothing of cross-entropy
    u32 unused;

    // Pointers of this block's network.
    __device__ __forceinline__ Head mine(const Step& step) const {
        Head made = *this;
        if (!is_gathered) made.a = step.mine(a);
        made.w = step.mine(w), made.z = step.mine(z), made.dz = step.mine(dz), made.before = step.mine(before);
        made.losses = step.mine(losses), made.correct = step.mine(correct), made.weights = step.mine(weights);
        return made;
    }
};

// W x LANES threads per row: the output layer if head.w, W outputs at a time; then the loss, computed by every warp,
// and the gradients. 8 warps per row suit few rows, where load latency dominates; 8 lanes per row suit many rows, where
// instruction count does.
template <int W, int LANES>
__global__ void __launch_bounds__(THREADS) train_head(const Step step, const Head of_first) {
    const Head head = of_first.mine(step);
    constexpr int ROWS = THREADS / (LANES * W), PITCH = 40;  // rows of 8 lanes start 8 banks apart
    __shared__ float outputs[ROWS][PITCH], gradients[THREADS / LANES][PITCH];
    const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES, warp = group % W, N = head.N;
    const int first_row = blockIdx.x * ROWS, size = step.size();
    if (first_row >= size) {
        wait_for_step_before();
        return;
    }
    const bool is_there = first_row + group / W < size;  // else clamped to the last row: all lanes join the reductions
    const int row = is_there ? first_row + group / W : size - 1;
    const long long number = step.rows()[row];
    const bool has_classes = head.loss == CROSS_ENTROPY;
    const int truth = has_classes ? static_cast<int>(static_cast<const long long*>(head.targets)[number]) : 0;
    const float weight = head.weights ? head.weights[number] : 1.0f;
    wait_for_step_before();
    const long long at = static_cast<long long>(row) * head.z_stride;
    const float* a = head.a + (head.is_gathered ? number : static_cast<long long>(row)) * head.a_stride;
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
                const float4 given = load4(a + k);
                float4 of[AT_ONCE];
#pragma unroll
                for (int j = 0; j < AT_ONCE; ++j) of[j] = load4(w[j] + k);
#pragma unroll
                for (int j = 0; j < AT_ONCE; ++j) {
                    sums[j] = fmaf(given.x, of[j].x, sums[j]);
                    sums[j] = fmaf(given.y, of[j].y, sums[j]);
                    sums[j] = fmaf(given.z, of[j].z, sums[j]);
                    sums[j] = fmaf(given.w, of[j].w, sums[j]);
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
    const bool tells = is_there && warp == 0;  // writes to global memory
    const auto keep = [&](int n, float gradient) {
        if (head.before) gradients[group][n] = weight * gradient;  // then N <= 32
        if (head.dz && tells) head.dz[at + n] = weight * gradient;
    };
    double loss = 0.0;
    if (has_classes) {
        float most = __uint_as_float(0xff800000u);
        int best = N;
        for (int n = lane; n < N; n += LANES)
            if (z[n] > most || best == N) most = z[n], best = n;
        join_largest<LANES>(most, best, N);
        double total = 0.0;
        for (int n = lane; n < N; n += LANES) total += static_cast<double>(expf(z[n] - most));
        total = reduce_lanes<Sum, LANES>(total);
        const float scale = static_cast<float>(total), share = head.smoothing / N;
        float at_truth = 0.0f;  // nonzero in one lane
        for (int n = lane; n < N; n += LANES) {
            if (n == truth) at_truth = z[n] - most;
            keep(n, expf(z[n] - most) / scale - (n == truth ? 1.0f - head.smoothing + share : share));
        }
        at_truth = reduce_lanes<Sum, LANES>(at_truth);
        loss = log(total) - (1.0 - head.smoothing) * static_cast<double>(at_truth);
        if (head.smoothing > 0.0f) {
            double all = 0.0;
            for (int n = lane; n < N; n += LANES) all += static_cast<double>(z[n] - most);
            loss -= static_cast<double>(head.smoothing) / N * reduce_lanes<Sum, LANES>(all);
        }
        if (lane == 0 && tells) head.correct[row] = best == truth;
    } else {
        const float* target = static_cast<const float*>(head.targets) + number * N;
        for (int n = lane; n < N; n += LANES) {
            const float difference = z[n] - target[n];
            loss += static_cast<double>(difference) * static_cast<double>(difference);
            keep(n, through(head.code, __uint_as_float(head.slope), difference, z[n]));
        }
        loss = reduce_lanes<Sum, LANES>(loss) * (head.loss == HALF_SSE ? 0.5 : 1.0 / N);
        if (lane == 0 && tells) head.correct[row] = 0;
    }
    if (lane == 0 && tells) head.losses[row] = weight * loss;
    if (!head.before) return;
    __syncwarp();
    if (!is_there) return;
    for (int k = 4 * (lane + LANES * warp); k < head.D; k += 4 * LANES * W) {
        float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 5
        for (int n = 0; n < N; ++n) {
            const float of_n = gradients[group][n];
            const float4 w = load4(head.w + static_cast<long long>(n) * head.w_stride + k);
            sum = {fmaf(of_n, w.x, sum.x), fmaf(of_n, w.y, sum.y), fmaf(of_n, w.z, sum.z), fmaf(of_n, w.w, sum.w)};
        }
        const float4 made = through(head.before_code, __uint_as_float(head.before_slope), sum, load4(a + k));
        const float four[4] = {made.x, made.y, made.z, made.w};
        store_first(head.before + static_cast<long long>(row) * head.a_stride + k, four, head.D - k);
    }
}

// Sums the rows' losses when no gradients are computed.
__global__ void __launch_bounds__(THREADS) train_tally(const Step step, const Tally tally) {
    wait_for_step_before();
    tally.add_up(step);
}

// -- gradients and update ---------------------------------------------------------------------------------------------

// dW = dz^T a of every layer with the update as epilogue; with several slices, the slice's partial sums. Block 0
// computes the tally, if any; it finishes before the others. IS_SECOND: follows another dW launch that already waited
// for the same inputs, so this one skips the wait and both overlap.
template <class P, int R, bool IS_WHOLE, bool IS_SECOND>
__global__ void __launch_bounds__(THREADS, R == 2 ? 2 : 1)
train_gradients(const Step step, const __grid_constant__ Layers layers, const Tally tally) {
    __shared__ __align__(16) Tiles<R> tiles;
    const int size = step.size(), number = static_cast<int>(blockIdx.x) - (tally.losses ? 1 : 0);
    if (size == 0 || number < 0) {
        wait_for_step_before();
        if (size > 0) tally.add_up(step);
        return;
    }
    const Warps warps = layers.warps;
    const GradientBlock block(layers, number, 8 * R * warps.down, 8 * R * warps.across);
    const LayerMemory memory = layers.memory_of(block.layer, step);
    const LayerSizes& sizes = layers.sizes[block.layer];
    const WarpPlace<R> place(warps);
    const int all = (size + CHUNK - 1) / CHUNK, first = block.slice * layers.chunks;
    const Chunks chunks = {first + place.part, first + layers.chunks < all ? first + layers.chunks : all, warps.deep};
    const AcrossK<R> b(memory.a, sizes.a_stride, block.first_n + place.column, sizes.a_stride, size,
                       sizes.is_gathered ? step.rows() : nullptr);
    Ahead<R> of_a, of_b;
    of_b.begin(b, chunks);
    if (!IS_SECOND) wait_for_step_before();
    const AcrossK<R> a(memory.dz, sizes.dz_stride, block.first_m + place.row, sizes.dz_stride, size);
    of_a.begin(a, chunks);
    sum_up<P, R, IS_SECOND>(tiles.at[threadIdx.x / 32], a, of_a, b, of_b, chunks);
    finish_gradients<R, IS_WHOLE>(tiles, warps, step, layers, block);
    if (IS_SECOND) wait_for_step_before();
}

// Four adjacent gradients, layer by layer. SHARES threads of a block split their slices.
template <int SHARES = 1>
struct ApplyPlace {
    static constexpr int FOURS = THREADS / SHARES;  // per block
    int layer, left;  // valid elements
    long long at;

    __device__ __forceinline__ explicit ApplyPlace(const Layers& layers) : layer(layers.layer_of(blockIdx.x)) {
        const LayerSizes& sizes = layers.sizes[layer];
        at = (static_cast<long long>(blockIdx.x - layers.first_block[layer]) * FOURS + threadIdx.x % FOURS) * 4;
        left = at < numbers(sizes) ? sizes.K - static_cast<int>(at % sizes.w_stride) : 0;
    }
    static __device__ __forceinline__ long long numbers(const LayerSizes& sizes) {
        return static_cast<long long>(sizes.N) * sizes.w_stride;
    }
    static __device__ __forceinline__ bool is_first() { return SHARES == 1 || threadIdx.x < FOURS; }
    // Adds up the slices in order; with SHARES, per share and then the shares. The first FOURS threads get the sums.
    // All threads must call it.
    __device__ __forceinline__ void add_up(float (&sums)[4], const LayerMemory& memory, const LayerSizes& sizes) const {
        const int each = (sizes.slices + SHARES - 1) / SHARES, first = threadIdx.x / FOURS * each;
        const int last = left <= 0 ? first : first + each < sizes.slices ? first + each : sizes.slices;
#pragma unroll 8
        for (int slice = first; slice < last; ++slice) {
            const float4 part = load4(memory.parts + slice * numbers(sizes) + at);
            sums[0] += part.x, sums[1] += part.y, sums[2] += part.z, sums[3] += part.w;
        }
        if constexpr (SHARES > 1) {
            __shared__ __align__(16) float shares[SHARES - 1][FOURS][4];
            if (!is_first()) store_several(shares[threadIdx.x / FOURS - 1][threadIdx.x % FOURS], sums);
            __syncthreads();
#pragma unroll
            for (int share = 0; share < SHARES - 1; ++share) {
                const float4 part = load4(shares[share][threadIdx.x % FOURS]);
                sums[0] += part.x, sums[1] += part.y, sums[2] += part.z, sums[3] += part.w;
            }
        }
    }
};

// Input of the gradient norm.
struct Squares {
    double* of_blocks;  // (count,): one sum per block of train_squares; nullptr: no clipping
    int first, count;   // blocks of earlier launches, and of all

    // Gradient scale that limits the norm to rule.clip. All threads of the block must call it.
    __device__ __forceinline__ float clipped_scale(const Step& step, const Rule& rule) const {
        double total = 0.0;
        for (int i = threadIdx.x; i < count; i += THREADS) total += __ldcg(step.mine(of_blocks) + i);
        const double norm = rule.scale * sqrt(reduce_lanes<Sum, THREADS>(total)), share = rule.clip / (norm + 1e-6);
        return share >= 1.0 ? rule.scale : static_cast<float>(rule.scale * share);
    }
};

// Adds up the slices into the first one and sums the squares.
__global__ void __launch_bounds__(THREADS)
train_squares(const Step step, const __grid_constant__ Layers layers, const Squares squares) {
    wait_for_step_before();
    if (step.size() == 0) return;
    const ApplyPlace<> place(layers);
    double sum = 0.0;
    if (place.left > 0) {
        const LayerMemory memory = layers.memory_of(place.layer, step);
        float sums[4] = {};
        place.add_up(sums, memory, layers.sizes[place.layer]);
        store_several(memory.parts + place.at, sums);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (i < place.left) sum += static_cast<double>(sums[i]) * static_cast<double>(sums[i]);
    }
    sum = reduce_lanes<Sum, THREADS>(sum);
    if (threadIdx.x == 0) step.mine(squares.of_blocks)[squares.first + blockIdx.x] = sum;
}

// Adds up the slices in order and updates. PARTS > 0: also writes the first layer's weights as a bf16 split, in the
// layout of bytes_parts with `stages` stages of 64 K elements.
template <int PARTS, int SHARES>
__global__ void __launch_bounds__(THREADS)
train_apply(const Step step, const __grid_constant__ Layers layers, const Squares squares, u32* w_parts, int stages) {
    wait_for_step_before();
    if (step.size() == 0) return;
    Rule rule = step.rule();
    if (squares.of_blocks) rule.scale = squares.clipped_scale(step, rule);
    const ApplyPlace<SHARES> place(layers);
    const LayerMemory memory = layers.memory_of(place.layer, step);
    Kept kept;
    if (place.left > 0 && place.is_first()) kept.load(layers.optimiser, memory, place.at);
    float sums[4] = {};
    place.add_up(sums, memory, layers.sizes[place.layer]);
    if (place.left <= 0 || !place.is_first()) return;
    update(layers.optimiser, rule, memory, place.at, sums, kept, place.left);
    if constexpr (PARTS > 0) {
        if (place.layer > 0) return;
        const int stride = layers.sizes[0].w_stride;
        const int n = static_cast<int>(place.at / stride), k = static_cast<int>(place.at % stride);
        const long long stage = static_cast<long long>(n / 64) * stages + k / 64;
        u32 words[PARTS][2];
        split_numbers(words, kept.w);
#pragma unroll
        for (int i = 0; i < 2 * PARTS; ++i) {  // 16 B chunks of 8 K elements: four pairs 16 apart
            const long long piece = (stage * PARTS + i / 2) * 512 + (k % 16 / 2 + i % 2) * 64 + n % 64;
            step.mine(w_parts)[piece * 4 + k % 64 / 16] = words[i / 2][i % 2];
        }
    }
}

// Advances the step counter at the end of a graph.
__global__ void train_advance(const Networks networks, long long* progress, long long steps) {
    wait_for_step_before();
    if (threadIdx.x == 0) networks.mine(progress)[0] += steps;
}
