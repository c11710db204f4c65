// mlp/fused.cu: a whole MLP forward in one persistent kernel, true fp32 on the CUDA cores (FFMA).
//
// Idea    One persistent block per SM stages the weights in shared memory once. A warp loops over tiles of ROWS rows:
//         load x, run all layers in its private shared-memory buffers, store y. Only x and y touch global memory. Warps
//         never synchronise with each other. Layers that do not fit (is_resident = false) go through L1.
// Order   One accumulator per output: fma over k = 0 .. D_in-1, then + bias. K > PART sums chunks of PART in order.
//         A softmax reduces its row in column order. A row's bits do not depend on B, ROWS, WARPS or residency.
// Floor   (D_in + D_out)*4 B and 2*params flop per row. 72-64-64-4, B = 2^21, H200: 638 MB / 4.8 TB/s = 133 us;
//         37.6 Gflop / 66.9 Tflop/s = 562 us: compute-bound. Layer by layer a row moves 2 352 B instead of 304.
// Layout  x (B, D_in), y (B, D_out) row-major, 16 B aligned, each float32, float16 or bfloat16. weights: per layer
//         W^T (D_in, padded), then its bias (padded) if any, contiguous; columns past D_out are zeros.
// Shared  (resident weights + WARPS * ROWS * (stride of buffer 0 + stride of buffer 1)) * 4 B
//         = (8 960 + 12 * 32 * 76) * 4 = 152 576 B for 72-64-64-4 with ROWS = 32, WARPS = 12.
// Limits  Any widths and depth that fit; any B (the last tile is masked); ROWS in {8, 16, 32}; sm_80 up.

#include "common/elementwise.cuh"
#include "common/dtype.cuh"
#include "common/softmax.cuh"

// One Linear, W (D_out, D_in), with its optional bias and activation.
template <int D_in_, int D_out_, class Act_, bool has_bias_, bool is_resident_>
struct Dense {
    static_assert(D_in_ > 0 && D_out_ > 0, "a layer has at least one input and one output");
    static constexpr int D_in = D_in_, D_out = D_out_;
    static constexpr bool has_bias = has_bias_, is_resident = is_resident_;
    using Act = Act_;
};

constexpr int PART = 128;  // K elements per partial sum: longer sums would exceed the error of a blocked gemm

// A warp computes a layer in column chunks: 64 wide while at least 49 columns remain (fewer would waste a quarter of
// the work), then one or two narrower ones.
__device__ constexpr int full_chunks(int D_out) { return (D_out + 15) / 64; }
__device__ constexpr int columns_left(int D_out) {
    return D_out > 64 * full_chunks(D_out) ? D_out - 64 * full_chunks(D_out) : 0;
}
__device__ constexpr int chunk_of(int left, int rows) {
    // At least 128 / rows columns: each of the 32 lanes computes at least one row of four.
    int chunk = 32;
    while (chunk > 128 / rows && left <= chunk / 2) chunk /= 2;
    return left > 0 ? chunk : 0;
}
__device__ constexpr int padded(int D_out, int rows) {
    const int rest = columns_left(D_out), first = chunk_of(rest, rows);
    return 64 * full_chunks(D_out) + first + chunk_of(rest - first, rows);
}
__device__ constexpr bool is_one_chunk(int D_out, int rows) {
    return full_chunks(D_out) == 0 ? columns_left(D_out) <= chunk_of(columns_left(D_out), rows) : D_out <= 64;
}

// Offsets and strides, all constexpr. The host twin mlp/fused.py computes the same values.
template <int ROWS, class... Layers>
struct Layout {
    static constexpr int L = sizeof...(Layers);
    static_assert(L > 0, "an MLP has at least one layer");
    static_assert(ROWS == 8 || ROWS == 16 || ROWS == 32, "ROWS in {8, 16, 32}");

    // A layer of one chunk overwrites its input, which is consumed by then. Otherwise the two buffers alternate.
    static __device__ constexpr int buffer(int l) {
        const bool one_chunk[L] = {is_one_chunk(Layers::D_out, ROWS)...};
        int at = 0;
        for (int i = 0; i < l; ++i) at = one_chunk[i] ? at : 1 - at;
        return at;
    }
    static __device__ constexpr int stride(int which) {
        const int D_in[L] = {Layers::D_in...}, out[L] = {padded(Layers::D_out, ROWS)...};
        int max_width = which == 0 ? D_in[0] : 0;
        for (int i = 0; i < L; ++i)
            if (buffer(i + 1) == which && out[i] > max_width) max_width = out[i];
        // An odd number of float4: 8 consecutive rows cover all 32 banks without conflicts.
        return max_width == 0 ? 0 : ((max_width + 3) / 4 | 1) * 4;
    }
    // Floats before layer l: of all layers, or of the resident ones only.
    static __device__ constexpr int offset(int l, bool only_resident) {
        const int size[L] = {(Layers::D_in + (Layers::has_bias ? 1 : 0)) * padded(Layers::D_out, ROWS)...};
        const bool resident[L] = {Layers::is_resident...};
        int floats = 0;
        for (int i = 0; i < l; ++i) floats += resident[i] || !only_resident ? size[i] : 0;
        return floats;
    }
    static constexpr int weight_floats = offset(L, false), resident_floats = offset(L, true);
    static constexpr int warp_floats = ROWS * (stride(0) + stride(1));
};

// One column chunk of one layer. A lane accumulates TM rows x TN columns in registers: at 8 x 8 it reads 16 float4
// per 256 fma.
//
// in       (ROWS, IN) shared, the first D_in columns       out  (ROWS, OUT) shared, written from `column` on
// weights  (D_in [+ 1 with bias], N), shared or global
template <class Layer, int ROWS, int CHUNK, int N, int IN, int OUT, bool in_place>
__device__ __forceinline__ void run_chunk(const float* in, const float* weights, float* out, int column, int lane) {
    constexpr int K = Layer::D_in;
    constexpr int LANES_N = CHUNK < 32 ? CHUNK / 4 : 8, LANES_M = 32 / LANES_N;
    constexpr int TM = ROWS / LANES_M, TN = CHUNK / LANES_N;
    static_assert(TM * LANES_M == ROWS && TN % 4 == 0, "lanes cover the tile");

    // A lane's columns are groups of four, 4*LANES_N apart; its rows are LANES_M apart. Each warp-wide load then covers
    // contiguous columns or adjacent rows: no bank conflicts.
    const int n = 4 * (lane % LANES_N), m = lane / LANES_N;
    const float* a = in + m * IN;
    const float* w = weights + column + n;
    float acc[TM][TN] = {};

    auto multiply = [&](const float (&x)[TM], const float* row) {
#pragma unroll
        for (int j = 0; j < TN; j += 4) {
            const float* p = row + j * LANES_N;
            const float4 v = Layer::is_resident ? load4(p) : __ldg(reinterpret_cast<const float4*>(p));
#pragma unroll
            for (int i = 0; i < TM; ++i) {
                acc[i][j + 0] = fmaf(x[i], v.x, acc[i][j + 0]);
                acc[i][j + 1] = fmaf(x[i], v.y, acc[i][j + 1]);
                acc[i][j + 2] = fmaf(x[i], v.z, acc[i][j + 2]);
                acc[i][j + 3] = fmaf(x[i], v.w, acc[i][j + 3]);
            }
        }
    };
    auto accumulate = [&](int from, int until) {
        // Small tiles have registers to spare: keep more weight loads from L2 in flight.
#pragma unroll (TM * TN >= 32 ? 2 : 4)
        for (int k = from; k + 4 <= until; k += 4) {
            float x0[TM], x1[TM], x2[TM], x3[TM];
#pragma unroll
            for (int i = 0; i < TM; ++i) {
                const float4 v = load4(a + i * LANES_M * IN + k);
                x0[i] = v.x, x1[i] = v.y, x2[i] = v.z, x3[i] = v.w;
            }
            multiply(x0, w + (k + 0) * N);
            multiply(x1, w + (k + 1) * N);
            multiply(x2, w + (k + 2) * N);
            multiply(x3, w + (k + 3) * N);
        }
    };
    if constexpr (K <= PART) {
        accumulate(0, K);
    } else {
        float total[TM][TN] = {};
#pragma unroll 1
        for (int from = 0; from < K / PART * PART; from += PART) {
            accumulate(from, from + PART);
#pragma unroll
            for (int i = 0; i < TM; ++i)
#pragma unroll
                for (int j = 0; j < TN; ++j) total[i][j] += acc[i][j], acc[i][j] = 0.0f;
        }
        accumulate(K / PART * PART, K);
#pragma unroll
        for (int i = 0; i < TM; ++i)
#pragma unroll
            for (int j = 0; j < TN; ++j) acc[i][j] += total[i][j];
    }
#pragma unroll
    for (int k = K / 4 * 4; k < K; ++k) {
        float x[TM];
#pragma unroll
        for (int i = 0; i < TM; ++i) x[i] = a[i * LANES_M * IN + k];
        multiply(x, w + k * N);
    }

    if (in_place) __syncwarp();  // all lanes have read the input before it is overwritten
#pragma unroll
    for (int j = 0; j < TN; j += 4) {
        float4 bias = {0.0f, 0.0f, 0.0f, 0.0f};
        if (Layer::has_bias) bias = load4(w + K * N + j * LANES_N);
#pragma unroll
        for (int i = 0; i < TM; ++i) {
            float4 v = {acc[i][j], acc[i][j + 1], acc[i][j + 2], acc[i][j + 3]};
            if (Layer::has_bias) v.x += bias.x, v.y += bias.y, v.z += bias.z, v.w += bias.w;
            using Act = typename Layer::Act;
            v = {Act::apply(v.x), Act::apply(v.y), Act::apply(v.z), Act::apply(v.w)};
            store4(out + (m + i * LANES_M) * OUT + column + n + j * LANES_N, v);
        }
    }
}

template <class Layer, int ROWS, int IN, int OUT, bool in_place>
__device__ __forceinline__ void run_layer(const float* in, const float* weights, float* out, int lane) {
    constexpr int N = padded(Layer::D_out, ROWS), FULL = 64 * full_chunks(Layer::D_out);
    constexpr int FIRST = chunk_of(columns_left(Layer::D_out), ROWS), SECOND = N - FULL - FIRST;
#pragma unroll 1
    for (int column = 0; column < FULL; column += 64)
        run_chunk<Layer, ROWS, 64, N, IN, OUT, in_place>(in, weights, out, column, lane);
    if constexpr (FIRST > 0) run_chunk<Layer, ROWS, FIRST, N, IN, OUT, in_place>(in, weights, out, FULL, lane);
    if constexpr (SECOND > 0)
        run_chunk<Layer, ROWS, SECOND, N, IN, OUT, in_place>(in, weights, out, FULL + FIRST, lane);
    __syncwarp();
}

// Runs layers l, l+1, ... `tile` holds the warp's two buffers; layer 0 reads x from the first.
template <class Offsets, int ROWS, int l, class Layer, class... Rest>
__device__ __forceinline__ void run_layers(const float* weights, const float* resident, float* tile, int lane) {
    constexpr int from = Offsets::buffer(l), to = Offsets::buffer(l + 1);
    constexpr int second = ROWS * Offsets::stride(0);
    const float* w = Layer::is_resident ? resident + Offsets::offset(l, true) : weights + Offsets::offset(l, false);
    run_layer<Layer, ROWS, Offsets::stride(from), Offsets::stride(to), from == to>(
        tile + from * second, w, tile + to * second, lane);
    if constexpr (sizeof...(Rest) > 0) run_layers<Offsets, ROWS, l + 1, Rest...>(weights, resident, tile, lane);
}

template <class Offsets, int ROWS, int l, class Layer, class... Rest>
__device__ __forceinline__ void stage_weights(const float* weights, float* resident, int thread, int threads) {
    if constexpr (Layer::is_resident) {
        const float* from = weights + Offsets::offset(l, false);
        float* to = resident + Offsets::offset(l, true);
        constexpr int floats = Offsets::offset(l + 1, true) - Offsets::offset(l, true);
#pragma unroll 4
        for (int i = 4 * thread; i < floats; i += 4 * threads) store4(to + i, load4(from + i));
    }
    if constexpr (sizeof...(Rest) > 0) stage_weights<Offsets, ROWS, l + 1, Rest...>(weights, resident, thread, threads);
}

// x (rows, D) global -> tile (ROWS, STRIDE) shared; rows past the end are zero-filled.
template <int ROWS, int D, int STRIDE, class In>
__device__ __forceinline__ void load_rows(const In* x, float* tile, int rows, int lane) {
    if constexpr (D % 4 == 0) {
#pragma unroll 6
        for (int i = lane; i < ROWS * (D / 4); i += 32) {
            const int row = i / (D / 4), column = 4 * (i % (D / 4));
            store4(tile + row * STRIDE + column, row < rows ? load4(x + 4 * i) : float4{0.0f, 0.0f, 0.0f, 0.0f});
        }
    } else {
#pragma unroll 6
        for (int i = lane; i < ROWS * D; i += 32) tile[i / D * STRIDE + i % D] = i / D < rows ? to_float(x[i]) : 0.0f;
    }
}

// tile (ROWS, STRIDE) shared -> y (rows, D) global.
template <int D, int STRIDE, class Out>
__device__ __forceinline__ void store_rows(const float* tile, Out* y, int rows, int lane) {
    if constexpr (D % 4 == 0) {
        for (int i = lane; i < rows * (D / 4); i += 32)
            store4(y + 4 * i, load4(tile + i / (D / 4) * STRIDE + 4 * (i % (D / 4))));
    } else {
        for (int i = lane; i < rows * D; i += 32) store1(y + i, tile[i / D * STRIDE + i % D]);
    }
}

// The row of a lane, reduced in column order.
template <int D>
struct LaneRow {
    float* row;

    __device__ __forceinline__ float max() const {
        float max_value = row[0];
        for (int c = 1; c < D; ++c) max_value = fmaxf(max_value, row[c]);
        return max_value;
    }
    template <class Function>
    __device__ __forceinline__ float sum(Function f) const {
        float sum = 0.0f;
        for (int c = 0; c < D; ++c) sum += f(row[c]);
        return sum;
    }
    template <class Function>
    __device__ __forceinline__ void each(Function f) const {
        for (int c = 0; c < D; ++c) row[c] = f(row[c]);
    }
};

template <class Layer, class... Rest>
__device__ constexpr int last_width() {
    if constexpr (sizeof...(Rest) > 0)
        return last_width<Rest...>();
    else
        return Layer::D_out;
}
template <class Layer, class... Rest>
__device__ constexpr int first_width() {
    return Layer::D_in;
}

// WEIGHT_FLOATS and SHARED_BYTES come from the host: compilation fails if the two sides disagree.
template <class In, class Out, int ROWS, int WARPS, int WEIGHT_FLOATS, int SHARED_BYTES, class Normaliser,
          class... Layers>
__global__ void __launch_bounds__(32 * WARPS, 1)
mlp_fused(const In* __restrict__ x, const float* __restrict__ weights, Out* __restrict__ y, long long B) {
    using Offsets = Layout<ROWS, Layers...>;
    static_assert(Offsets::weight_floats == WEIGHT_FLOATS, "weight layout differs from the host's");
    static_assert((Offsets::resident_floats + WARPS * Offsets::warp_floats) * 4 == SHARED_BYTES,
                  "shared memory per block differs from the host's");
    constexpr int D_in = first_width<Layers...>(), D_out = last_width<Layers...>();
    constexpr int last = Offsets::buffer(Offsets::L), STRIDE_out = Offsets::stride(last);

    extern __shared__ float4 shared[];
    float* resident = reinterpret_cast<float*>(shared);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float* tile = resident + Offsets::resident_floats + warp * Offsets::warp_floats;
    float* out_tile = tile + last * ROWS * Offsets::stride(0);

    stage_weights<Offsets, ROWS, 0, Layers...>(weights, resident, threadIdx.x, 32 * WARPS);
    __syncthreads();

    // Consecutive tiles go to different blocks, so a small batch spreads over all SMs.
    const int tiles = static_cast<int>((B + ROWS - 1) / ROWS);
    for (int t = blockIdx.x + gridDim.x * warp; t < tiles; t += gridDim.x * WARPS) {
        const long long row = static_cast<long long>(t) * ROWS;
        const int rows = B - row < ROWS ? static_cast<int>(B - row) : ROWS;
        load_rows<ROWS, D_in, Offsets::stride(0)>(x + row * D_in, tile, rows, lane);
        __syncwarp();
        run_layers<Offsets, ROWS, 0, Layers...>(weights, resident, tile, lane);
        if constexpr (!is_same<Normaliser, NoNormaliser>) {
            if (lane < ROWS) Normaliser::apply(LaneRow<D_out>{out_tile + lane * STRIDE_out});
            __syncwarp();
        }
        store_rows<D_out, STRIDE_out>(out_tile, y + row * D_out, rows, lane);
        __syncwarp();
    }
}
