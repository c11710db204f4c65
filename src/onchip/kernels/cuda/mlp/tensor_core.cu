// mlp/tensor_core.cu: a whole MLP forward in one persistent kernel, on the tensor cores.
//
// Idea    One persistent block per SM stages all weights in shared memory once. A warp keeps 16 MT rows in registers
//         through all layers: accumulators become the next layer's A fragments without leaving their lane. cp.async
//         prefetches rows STAGES tiles ahead into a ring per warp. Only the four warps of a wgmma synchronise.
// Order   k in steps of STEP inside the tensor cores; a softmax reduces a lane's columns, then four lanes. A row's bits
//         do not depend on B. fp32 is 3xTF32: low * W_high + high * W_low + high * W_high, summed in float32 every four
//         steps; W_low corrects the tensor cores' truncation on average (mlp/packing.py). Infinities become NaN.
// Floor   D_in + D_out elements and 2*params flop per row. 72-64-64-4, B = 2^21, fp16, H200: 319 MB / 4.8 TB/s = 66 us;
//         40.8 Gflop / 989 Tflop/s = 41 us: memory-bound (fp32 rows: 133). 3xTF32: 114 / 494.5 Tflop/s = 230 us.
// Layout  x (B, D_in), y (B, D_out) row-major, 16 B aligned, any of float32, float16, bfloat16. weights: per layer W in
//         tiles of 8 columns x 16 B of k (mma/tensor_core.cuh), permuted by mlp/packing.py, then its bias in float32.
// Shared  WEIGHT_BYTES + warps * STAGES * 16 MT * D_in * sizeof(In): 93 184 B for 72-64-64-4 in fp16 with 16 warps.
// Limits  Weights fit in shared memory, fragments in registers (checked by the host); rows longer than MAX_STEPS steps
//         are read from global memory on demand. wgmma on sm_90a, mma.sync elsewhere; sm_80 up.
#include "common/elementwise.cuh"
#include "common/dtype.cuh"
#include "mlp/rows_in.cuh"
#include "mlp/rows_out.cuh"
#include "mma/tensor_core.cuh"

// One Linear, W (D_out, D_in), with its optional bias and activation.
template <int D_in_, int D_out_, class Act_, bool has_bias_>
struct Dense {
    static_assert(D_in_ > 0 && D_out_ > 0, "a layer has at least one input and one output");
    static constexpr int D_in = D_in_, D_out = D_out_, N = round_up(D_out_, 8);
    static constexpr bool has_bias = has_bias_;
    using Act = Act_;
};

// -- layers ---------------------------------------------------------------------------------------------------

template <class P>
__device__ constexpr int steps_of(int K) { return round_up(K, P::STEP) / P::STEP; }

// Bytes of a layer in shared memory: W in tiles (3xTF32: high parts, then low parts), then the bias.
template <class P, class Layer>
__device__ constexpr int matrix_bytes(int KS) { return 32 * KS * Layer::N; }
template <class P, class Layer>
__device__ constexpr int bias_at(int KS) { return (is_same<P, Fp32> ? 2 : 1) * matrix_bytes<P, Layer>(KS); }
template <class P, class Layer>
__device__ constexpr int layer_bytes(int KS) { return bias_at<P, Layer>(KS) + (Layer::has_bias ? 4 * Layer::N : 0); }

// These zeros are never read and cost nothing. Without them ptxas 13.0 merges accumulators that were never initialised
// and returns wrong results.
template <int MT, int NT>
__device__ __forceinline__ void clear(float (&c)[MT][NT][4]) {
#pragma unroll
    for (int i = 0; i < MT; ++i)
#pragma unroll
        for (int j = 0; j < NT; ++j) c[i][j][0] = c[i][j][1] = c[i][j][2] = c[i][j][3] = 0.0f;
}

// c = a * W (+ c), columns of W from `weights` on. `low` is the byte offset from W to its low parts (3xTF32).
template <class P, class By, int N, int MT, int NT, int KS>
__device__ __forceinline__ void gemm_tile(float (&c)[MT][NT][4], const u32 (&a)[MT][KS][4], u32 weights, int low,
                                          bool accumulate) {
    if constexpr (is_same<P, Fp32>) {
        constexpr int PASS = KS < 4 ? KS : 4;  // steps at a time: each holds 8 registers for its high and low parts
        u32 high[MT][PASS][4], residual[MT][PASS][4];
#pragma unroll
        for (int i = 0; i < MT; ++i)
#pragma unroll
            for (int k = 0; k < PASS; ++k)
#pragma unroll
                for (int n = 0; n < 4; ++n) {
                    const float v = __uint_as_float(a[i][k][n]);
                    high[i][k][n] = Tf32::word(v);
                    residual[i][k][n] = Tf32::word(v - __uint_as_float(high[i][k][n]));
                }
        float partial[MT][NT][4];
        clear(partial);
        By::begin();
        By::template add<Tf32, N>(partial, residual, weights, false);  // smallest terms first
        By::template add<Tf32, N>(partial, high, weights + low, true);
        By::template add<Tf32, N>(partial, high, weights, true);
        By::end();
        // Tensor cores truncate to float32. Short sums, added here with rounding, lose less.
#pragma unroll
        for (int i = 0; i < MT; ++i)
#pragma unroll
            for (int j = 0; j < NT; ++j)
#pragma unroll
                for (int n = 0; n < 4; ++n) c[i][j][n] = accumulate ? c[i][j][n] + partial[i][j][n] : partial[i][j][n];
        if constexpr (KS > PASS) {
            u32 remaining[MT][KS - PASS][4];
#pragma unroll
            for (int i = 0; i < MT; ++i)
#pragma unroll
                for (int k = PASS; k < KS; ++k)
#pragma unroll
                    for (int n = 0; n < 4; ++n) remaining[i][k - PASS][n] = a[i][k][n];
            gemm_tile<P, By, N>(c, remaining, weights + PASS * 32 * N, low, true);
        }
    } else {
        By::begin();
        By::template add<P, N>(c, a, weights, accumulate);
        By::end();
    }
}

// Input of a layer as A fragments in registers.
template <class P, int MT, int KS>
struct InRegisters {
    static constexpr int CHUNKS = 1;
    u32 a[MT][KS][4];

    template <class By, int N, int NT>
    __device__ __forceinline__ void multiply(float (&c)[MT][NT][4], u32 weights, int low, bool accumulate) const {
        gemm_tile<P, By, N>(c, a, weights, low, accumulate);
    }
};
constexpr int MAX_STEPS = 16;
// Input rows that are too long for registers, loaded a few steps at a time.
template <class P, int MT, class In, int D>
struct InRows {
    static constexpr int CHUNKS = is_same<P, Fp32> ? 1 : 2;  // column chunks per pass: every pass rereads the rows
    const In* rows[2 * MT];  // fragment rows g, g + 8, ..
    int q;

    // A rolled loop over full blocks of steps, then the remainder: unrolled, the compiler would prefetch a whole row
    // and spill. The accumulators are initialised, so every gemm accumulates.
    template <class By, int N, int NT>
    __device__ __forceinline__ void multiply(float (&c)[MT][NT][4], u32 weights, int low, bool) const {
        constexpr int BLOCK = MAX_STEPS / 2, COLUMNS = BLOCK * 8 * P::PER_WORD, BLOCKS = D / COLUMNS;
        constexpr int LEFT = first_steps<P>(D) - BLOCKS * BLOCK;
#pragma unroll 1
        for (int block = 0; block < BLOCKS; ++block) {
            u32 a[MT][BLOCK][4];
            load<0>(a, block * COLUMNS);
            gemm_tile<P, By, N>(c, a, weights + block * BLOCK * 32 * N, low, true);
        }
        if constexpr (LEFT > 0) {
            u32 a[MT][LEFT][4];
            load<BLOCKS * COLUMNS>(a);
            gemm_tile<P, By, N>(c, a, weights + BLOCKS * BLOCK * 32 * N, low, true);
        }
    }
    // Fragments of the columns from `from` + `skipped` on.
    template <int from, int KS>
    __device__ __forceinline__ void load(u32 (&a)[MT][KS][4], int skipped = 0) const {
#pragma unroll
        for (int i = 0; i < MT; ++i)
            load_fragment<P, In, D, from>(rows[2 * i] + skipped, rows[2 * i + 1] + skipped, q, a[i]);
    }
};

// Accumulators of columns `column` .. + 8 NT, initialised with the bias.
template <class P, class By, class Layer, int KS, int MT, int NT, class Source>
__device__ __forceinline__ void gemm_columns(float (&c)[MT][NT][4], const Source& source, const char* layer, int column,
                                             int q) {
    if constexpr (Layer::has_bias) {
        const float* bias = reinterpret_cast<const float*>(layer + bias_at<P, Layer>(KS)) + column + 2 * q;
#pragma unroll
        for (int j = 0; j < NT; ++j) {
            const float2 b = *reinterpret_cast<const float2*>(bias + 8 * j);
#pragma unroll
            for (int i = 0; i < MT; ++i) c[i][j][0] = c[i][j][2] = b.x, c[i][j][1] = c[i][j][3] = b.y;
        }
    } else {
        clear(c);
    }
    source.template multiply<By, Layer::N>(c, shared_address(layer) + 16 * column, matrix_bytes<P, Layer>(KS),
                                           Layer::has_bias);
}

template <class T, class Act>
__device__ __forceinline__ u32 pack_activated(float first, float second) {
    return pack<T>(Act::fast(first), Act::fast(second));
}
template <>
__device__ __forceinline__ u32 pack_activated<f16, ReLU>(float first, float second) {
    return pack_relu<f16>(first, second);
}
template <>
__device__ __forceinline__ u32 pack_activated<bf16, ReLU>(float first, float second) {
    return pack_relu<bf16>(first, second);
}

// Converts accumulators, columns from 8 * first on, to A fragments of the next layer within the same lane. Clears the
// padding columns: an infinity in a row makes them NaN, and NaN * 0 is not zero.
template <class P, class Layer, int first, int MT, int NT, int KS>
__device__ __forceinline__ void activate(const float (&c)[MT][NT][4], int q, u32 (&a)[MT][KS][4]) {
    using Act = typename Layer::Act;
#pragma unroll
    for (int i = 0; i < MT; ++i) {
#pragma unroll
        for (int j = 0; j < NT; ++j) {
            const int column = 8 * (first + j) + 2 * q;
            const bool has_all = 8 * (first + j + 1) <= Layer::D_out;
            float v[4];
#pragma unroll
            for (int n = 0; n < 4; ++n) v[n] = has_all || column + n % 2 < Layer::D_out ? c[i][j][n] : 0.0f;
            if constexpr (P::PER_WORD == 1) {
                u32(&to)[4] = a[i][first + j];
                to[0] = P::word(Act::apply(v[0])), to[2] = P::word(Act::apply(v[1]));
                to[1] = P::word(Act::apply(v[2])), to[3] = P::word(Act::apply(v[3]));
            } else {
                u32(&to)[4] = a[i][(first + j) / 2];
                to[2 * ((first + j) % 2)] = pack_activated<typename P::Element, Act>(v[0], v[1]);
                to[2 * ((first + j) % 2) + 1] = pack_activated<typename P::Element, Act>(v[2], v[3]);
            }
        }
        if constexpr (P::PER_WORD == 2 && first + NT == 2 * KS - 1) a[i][KS - 1][2] = a[i][KS - 1][3] = 0;
    }
}

// One column chunk after another: only one chunk's accumulators are live.
template <class P, class By, class Layer, int KS, int column, int MT, int NEXT, class Source>
__device__ __forceinline__ void run_columns(const Source& source, const char* layer, int q, u32 (&next)[MT][NEXT][4]) {
    constexpr int CHUNK = By::COLUMNS * Source::CHUNKS, WIDTH = Layer::N - column < CHUNK ? Layer::N - column : CHUNK;
    float c[MT][WIDTH / 8][4];
    gemm_columns<P, By, Layer, KS>(c, source, layer, column, q);
    activate<P, Layer, column / 8>(c, q, next);
    if constexpr (column + WIDTH < Layer::N)
        run_columns<P, By, Layer, KS, column + WIDTH>(source, layer, q, next);
}

template <class P, class By, int MT, int KS, class Finish, class Source, class Layer, class... Rest>
__device__ __forceinline__ void run_layers(const Source& source, const char* layer, int q, const Finish& finish) {
    if constexpr (sizeof...(Rest) > 0) {
        constexpr int NEXT = steps_of<P>(Layer::N);
        InRegisters<P, MT, NEXT> next;
        run_columns<P, By, Layer, KS, 0>(source, layer, q, next.a);
        run_layers<P, By, MT, NEXT, Finish, InRegisters<P, MT, NEXT>, Rest...>(
            next, layer + layer_bytes<P, Layer>(KS), q, finish);
    } else {
        constexpr int CHUNK = By::COLUMNS * Source::CHUNKS;
        constexpr int WHOLE = Finish::NEEDS_ROWS ? 0 : (Layer::D_out - 1) / CHUNK * CHUNK;
#pragma unroll 1
        for (int column = 0; column < WHOLE; column += CHUNK) {
            float c[MT][CHUNK / 8][4];
            gemm_columns<P, By, Layer, KS>(c, source, layer, column, q);
            finish.template store<CHUNK>(c, column);
        }
        float c[MT][(Layer::N - WHOLE) / 8][4];
        gemm_columns<P, By, Layer, KS>(c, source, layer, WHOLE, q);
        finish.template store<Layer::D_out - WHOLE>(c, WHOLE);
    }
}

// -- the kernel -----------------------------------------------------------------------------------------------

template <class Layer, class... Rest>
struct LastLayer {
    using Last = typename LastLayer<Rest...>::Last;
};
template <class Layer>
struct LastLayer<Layer> {
    using Last = Layer;
};
template <class P, class Layer, class... Rest>
__device__ constexpr int all_bytes(int KS) {
    if constexpr (sizeof...(Rest) > 0) return layer_bytes<P, Layer>(KS) + all_bytes<P, Rest...>(steps_of<P>(Layer::N));
    else return layer_bytes<P, Layer>(KS);
}

template <class P, class By, class In, class Out, int MT, int WARPS, int STAGES, int WEIGHT_BYTES, class Normaliser,
          class First, class... Rest>
__global__ void __launch_bounds__(32 * WARPS, 1)
mlp_tensor_core(const In* x, const uint4* __restrict__ weights, Out* y, long long B) {
    // x is not __restrict__: the previous kernel may still be writing it (programmatic dependent launch), so it must
    // not go through the read-only cache.
    using Last = typename LastLayer<First, Rest...>::Last;
    constexpr int D_in = First::D_in, D_out = Last::D_out, ROW_BYTES = D_in * static_cast<int>(sizeof(In));
    constexpr int ROWS = 16 * MT, SLOT = ROWS * ROW_BYTES, KS = first_steps<P>(D_in);
    static_assert(all_bytes<P, First, Rest...>(KS) == WEIGHT_BYTES, "weight layout differs from the host's");

    extern __shared__ uint4 shared[];
    const char* resident = reinterpret_cast<const char*>(shared);
    const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    // The shuffle makes `warp` uniform for the compiler: wgmma must not sit in a divergent branch.
    const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0);

    // Weights do not depend on the previous kernel: load them before griddepcontrol.wait.
    for (int i = threadIdx.x; i < WEIGHT_BYTES / 16; i += blockDim.x)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(shared_address(shared + i)), "l"(weights + i)
                     : "memory");
    cp_async_commit();
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif

    // A group of By::WARPS warps has tiles of By::WARPS * ROWS rows. Consecutive tiles go to different blocks, so a
    // small batch spreads over all SMs. The warps of a group stay converged, also past the last row.
    const int group = warp / By::WARPS, rank = warp % By::WARPS, groups = blockDim.x / (32 * By::WARPS);
    const long long step = static_cast<long long>(gridDim.x) * groups * By::WARPS * ROWS;
    long long tile = (blockIdx.x + static_cast<long long>(gridDim.x) * group) * By::WARPS * ROWS;
    const char* ring = resident + WEIGHT_BYTES + warp * STAGES * SLOT;
#pragma unroll
    for (int s = 0; s < STAGES; ++s) {
        prefetch_rows<ROWS, In, D_in>(shared_address(ring + s * SLOT), x, tile + rank * ROWS + s * step, B, lane);
        cp_async_commit();
    }
    cp_async_wait<STAGES>();
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // wgmma reads through the async proxy
#endif
    __syncthreads();

    int slot = 0;
    for (; tile < B; tile += step) {
        const long long row = tile + rank * ROWS;
        const char* at = ring + slot * SLOT;
        InRows<P, MT, In, D_in> rows{{}, q};
        if constexpr (STAGES > 0) {
            cp_async_wait<STAGES - 1>();
            __syncwarp();
#pragma unroll
            for (int i = 0; i < 2 * MT; ++i)
                rows.rows[i] = reinterpret_cast<const In*>(at + (8 * i + row_of<ROW_BYTES>(g)) * ROW_BYTES);
        } else {
#pragma unroll
            for (int i = 0; i < 2 * MT; ++i) {
                const long long source_row = row + 8 * i + row_of<ROW_BYTES>(g);
                rows.rows[i] = x + (source_row < B ? source_row : B - 1) * D_in;
            }
        }
        const int rows_left = B - row < ROWS ? static_cast<int>(B - row) : ROWS;  // < 1: no rows
        const Store<Last, Normaliser, Out, ROW_BYTES> finish{y + row * D_out, rows_left, g, q};
        if constexpr (KS <= (STAGES > 0 ? MAX_STEPS : MAX_STEPS / 2)) {
            InRegisters<P, MT, KS> fragments;
            rows.template load<0>(fragments.a);
            if constexpr (STAGES > 0) {
                __syncwarp();  // all lanes have read the slot before it is refilled
                prefetch_rows<ROWS, In, D_in>(shared_address(at), x, row + STAGES * step, B, lane);
                cp_async_commit();
                slot = slot + 1 == STAGES ? 0 : slot + 1;
            }
            run_layers<P, By, MT, KS, decltype(finish), InRegisters<P, MT, KS>, First, Rest...>(
                fragments, resident, q, finish);
        } else {
            static_assert(STAGES == 0, "staged rows must fit in registers");
            run_layers<P, By, MT, KS, decltype(finish), InRows<P, MT, In, D_in>, First, Rest...>(
                rows, resident, q, finish);
        }
    }
}
