// mlp_train_rows.cu: of a training step of many rows, all layers behind the first: forward, loss and back, in one launch.
//
// Idea    Narrow layers are too little work for a launch each. A thread takes a row through all of them and back: what
//         goes into a layer is in its registers, the weights come from shared memory, a word for a whole warp, and
//         what the layers give waits in shared memory, a column of floats for each row, where the gradients replace it.
//         Rows come and go as lines, by way of these columns. Products are of floats, whatever the job's precision.
// Floor   784-56-28-10, 60,000 rows: 15 + 7 + 4 MB come or go as activations and 15 + 7 + 4 MB as gradients, in L2 for
//         the most part: 52 MB / 4.8 TB/s = 11 us from memory; 3,416 multiplications a row / 33.5 T/s = 6 us.
// Order   Sums of a layer go over four neighbours at a time, those four added last; gradients neuron by neuron.
// Layout  As mlp_train.cu.
// Shared  (W_0 + W_1 + ...) * 129 floats of columns, and all weights with the strides that they have: 56,952 B here.
// Limits  Two to four widths of at most 64, the last at most 32. sm_80 up.
#include "mlp_train_finish.cuh"

constexpr int ROWS = 128, PITCH = ROWS + 1;  // columns begin in other banks, so rows are read without conflict too
constexpr int MOST_WIDTHS = 4;

struct RowMemory {
    const float* w;  // (N, w_stride)
    float* a;        // (size, stride): what the layer gives; nullptr: nobody asks
    float* dz;       // (size, stride)
};
struct RowLayer {
    int w_stride, stride;
    u32 code, slope, has_bias, unused;
};
struct RowLayers {
    RowMemory memory[MOST_WIDTHS];
    const void* targets;
    double* losses;  // (size,)
    int* hits;       // (size,)
    RowLayer of[MOST_WIDTHS];
    u32 loss, unused;
};

// Rows of W numbers to columns, or back; `size` of them are there.
template <int W, bool TO_COLUMNS>
__device__ __forceinline__ void move_rows(float* columns, float* rows, int stride, int size) {
    for (int i = threadIdx.x; i < ROWS * W; i += ROWS) {
        const int row = i / W, n = i % W;
        if (row >= size) continue;
        float* at = rows + static_cast<long long>(row) * stride + n;
        if (TO_COLUMNS) columns[n * PITCH + row] = __ldcg(at);
        else *at = columns[n * PITCH + row];
    }
}

// A layer's N numbers of this thread's row from the D before them.
template <int D, int N>
__device__ __forceinline__ void go_forward(const float* given, float* made, const float* w, const RowLayer& layer) {
    const Activation activation = activation_of(layer.code, layer.slope);
    float v[D];
#pragma unroll
    for (int k = 0; k < D; ++k) v[k] = given[k * PITCH];
#pragma unroll 4
    for (int n = 0; n < N; ++n) {
        const float* of_n = w + n * layer.w_stride;
        float sums[4] = {layer.has_bias ? of_n[D] : 0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int k = 0; k < D / 4 * 4; k += 4) {
            const float4 four = load4(of_n + k);
            sums[0] = fmaf(v[k], four.x, sums[0]), sums[1] = fmaf(v[k + 1], four.y, sums[1]);
            sums[2] = fmaf(v[k + 2], four.z, sums[2]), sums[3] = fmaf(v[k + 3], four.w, sums[3]);
        }
#pragma unroll
        for (int k = D / 4 * 4; k < D; ++k) sums[0] = fmaf(v[k], of_n[k], sums[0]);
        made[n * PITCH] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    }
    for (int n = 0; n < N; ++n) made[n * PITCH] = activation(made[n * PITCH]);
}

// From a layer's dz to that of the D numbers before it, which they replace.
template <int D, int N>
__device__ __forceinline__ void go_back(float* before, const float* dz, const float* w, const RowLayer& layer,
                                        const RowLayer& layer_before) {
    float sums[D] = {};
#pragma unroll 4
    for (int n = 0; n < N; ++n) {
        const float of_n = dz[n * PITCH];
        const float* row = w + n * layer.w_stride;
#pragma unroll
        for (int k = 0; k < D / 4 * 4; k += 4) {
            const float4 four = load4(row + k);
            sums[k] = fmaf(of_n, four.x, sums[k]), sums[k + 1] = fmaf(of_n, four.y, sums[k + 1]);
            sums[k + 2] = fmaf(of_n, four.z, sums[k + 2]), sums[k + 3] = fmaf(of_n, four.w, sums[k + 3]);
        }
#pragma unroll
        for (int k = D / 4 * 4; k < D; ++k) sums[k] = fmaf(of_n, row[k], sums[k]);
    }
#pragma unroll
    for (int k = 0; k < D; ++k)
        before[k * PITCH] = through(layer_before.code, __uint_as_float(layer_before.slope), sums[k], before[k * PITCH]);
}

// The loss of a row whose last layer gave the N numbers `made`, which their dz replaces.
template <int N>
__device__ __forceinline__ double loss_of_row(const RowLayers& layers, const RowLayer& layer, float* made,
                                              long long number, int& hit) {
    if (layers.loss != CROSS_ENTROPY) {
        const float* target = static_cast<const float*>(layers.targets) + number * N;
        double loss = 0.0;
#pragma unroll 4
        for (int n = 0; n < N; ++n) {
            const float out = made[n * PITCH], difference = out - target[n];
            loss += static_cast<double>(difference) * static_cast<double>(difference);
            made[n * PITCH] = through(layer.code, __uint_as_float(layer.slope), difference, out);
        }
        hit = 0;
        return loss * (layers.loss == HALF_SSE ? 0.5 : 1.0 / N);
    }
    const int truth = static_cast<int>(static_cast<const long long*>(layers.targets)[number]);
    int best = 0;  // the first of the largest
    for (int n = 1; n < N; ++n)
        if (made[n * PITCH] > made[best * PITCH]) best = n;
    const float most = made[best * PITCH], at_truth = made[truth * PITCH] - most;
    double total = 0.0;
    for (int n = 0; n < N; ++n) {
        const float share = expf(made[n * PITCH] - most);
        total += static_cast<double>(share);
        made[n * PITCH] = share;
    }
    const float scale = static_cast<float>(total);
    for (int n = 0; n < N; ++n) made[n * PITCH] = made[n * PITCH] / scale - (n == truth ? 1.0f : 0.0f);
    hit = best == truth;
    return log(total) - static_cast<double>(at_truth);
}

// Layer AT makes N numbers from D; MORE layers follow. `columns` are this block's, of the D; weights of this layer on.
template <int AT, int D, int N, int... MORE>
__device__ __forceinline__ void take_rows_through(const RowLayers& layers, float* columns, const float* w, int first,
                                                  int size, long long number) {
    const RowLayer& layer = layers.of[AT];
    float *given = columns + threadIdx.x, *made = given + D * PITCH;
    const long long at = static_cast<long long>(first) * layer.stride;
    go_forward<D, N>(given, made, w, layer);
    if constexpr (sizeof...(MORE) > 0) {
        __syncthreads();
        move_rows<N, false>(columns + D * PITCH, layers.memory[AT].a + at, layer.stride, size);
        __syncthreads();
        take_rows_through<AT + 1, N, MORE...>(layers, columns + D * PITCH, w + N * layer.w_stride, first, size, number);
    } else if (static_cast<int>(threadIdx.x) < size) {
        const int row = first + threadIdx.x;
        layers.losses[row] = loss_of_row<N>(layers, layer, made, number, layers.hits[row]);
    }
    go_back<D, N>(given, made, w, layer, layers.of[AT - 1]);
    __syncthreads();
    move_rows<N, false>(columns + D * PITCH, layers.memory[AT].dz + at, layer.stride, size);
}

// The weights of the layers from AT on to shared memory, one behind the other.
template <int AT, int N, int... MORE>
__device__ __forceinline__ float* bring_weights(const RowLayers& layers, float* to) {
    const RowLayer& layer = layers.of[AT];
    for (int i = 4 * threadIdx.x; i < N * layer.w_stride; i += 4 * ROWS)
        *reinterpret_cast<float4*>(to + i) = __ldcg(reinterpret_cast<const float4*>(layers.memory[AT].w + i));
    to += N * layer.w_stride;
    if constexpr (sizeof...(MORE) > 0) return bring_weights<AT + 1, MORE...>(layers, to);
    else return to;
}

// D numbers a row come, the first layer's; dz of all layers goes, and what those behind the first give.
template <int D, int... MORE>
__global__ void __launch_bounds__(ROWS, 4) train_rows(const Step step, const __grid_constant__ RowLayers layers) {
    extern __shared__ float4 room[];
    float* weights = reinterpret_cast<float*>(room);
    const int first = blockIdx.x * ROWS, size = step.size() - first;
    if (size <= 0) {
        wait_for_step_before();
        return;
    }
    float* columns = bring_weights<1, MORE...>(layers, weights);  // not those that the launch before has made
    const int last = size < ROWS ? size - 1 : ROWS - 1, row = static_cast<int>(threadIdx.x);
    const long long number = step.rows()[first + (row < last ? row : last)];
    wait_for_step_before();
    const RowLayer& given = layers.of[0];
    const long long at = static_cast<long long>(first) * given.stride;
    move_rows<D, true>(columns, layers.memory[0].a + at, given.stride, size);
    __syncthreads();
    take_rows_through<1, D, MORE...>(layers, columns, weights, first, size, number);
    __syncthreads();
    move_rows<D, false>(columns, layers.memory[0].dz + at, given.stride, size);
}
