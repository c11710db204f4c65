// train/layer_parallel/layer_parallel.cuh: sizes, shared memory layout, row loads and a block's weights in registers.
#pragma once

#include "train/layer_parallel/fragments.cuh"

// Accumulators per thread in the dW gemm; with more, the wgmmas run out of registers and serialise.
template <u32 OPTIMISER>
constexpr int MAX_SUMS = OPTIMISER == ADAM ? 40 : 36;

struct LayerBuffers {
    float *w, *mean, *square;
    float *frag_mean, *frag_square;  // (blocks, fours, LP_THREADS, 4): mean and square in register fragment order
    // Double-buffered exchanges: activations; dz; weights (inputs, units), and the output layer's biases.
    char *forward, *backward, *columns;
};
template <int L>
struct ParallelArgs {
#ifdef PHASE_CLOCKS
    u32* phase_clocks;
#endif
    const void* x;
    const void* targets;        // (n,) int64 classes, or (n, outputs) float32
    const long long* order;     // (rows,) row indices, batch by batch
    const StepValues* per_step_values;  // (steps,)
    const long long* progress;  // the launch's first step, and the end of its rows
    double* step_losses;        // (steps,)
    long long* step_correct;    // (steps,)
    u32* status;                // [0] exchange rounds of earlier launches, [1] nonzero after a timeout
    LayerBuffers layers[L];
    long long batch, x_stride;  // in rows; in bytes
    Networks networks;
    float scale;
    u32 deadline_ms;
    LayerFacts facts[L];

    template <class T>
    __device__ __forceinline__ T* local(T* pointer) const {
        return networks.local(pointer);
    }
    __device__ __forceinline__ LayerBuffers buffers(int layer) const {
        const LayerBuffers& pointers = layers[layer - 1];
        return {local(pointers.w), local(pointers.mean), local(pointers.square), local(pointers.frag_mean),
                local(pointers.frag_square), local(pointers.forward), local(pointers.backward),
                local(pointers.columns)};
    }
};

// Sums of BATCH rows x 8 NT columns, in groups of adjacent columns as the exchange sends them. Adjacent threads have
// adjacent rows: shared memory stores are free of bank conflicts and sends are contiguous.
template <int NT, int BATCH, int GROUP>
struct PartialSums {
    static constexpr int ALL = BATCH * 8 * NT / GROUP, COUNT = (ALL + LP_THREADS - 1) / LP_THREADS;  // per thread
    static constexpr int PITCH = NT % 4 ? 8 * NT : 8 * NT + 8;  // avoids bank conflicts
    static constexpr int BYTES = WARPGROUPS * ROWS * PITCH * 4;
    float v[COUNT][GROUP];

    static __device__ __forceinline__ int at(int n) { return static_cast<int>(threadIdx.x) + n * LP_THREADS; }
    static __device__ __forceinline__ bool is_valid(int n) { return ALL % LP_THREADS == 0 || at(n) < ALL; }
    static __device__ __forceinline__ int row(int n) { return at(n) % BATCH; }
    static __device__ __forceinline__ int column(int n) { return at(n) / BATCH * GROUP; }

    // Adds up the partial sums c of all warpgroups. Returns false if any thread of the block passes ok = false.
    template <int SPLITS>
    __device__ __forceinline__ bool reduce_warpgroups(const float (&c)[SPLITS * NT][4], float* sums, int warpgroup,
                                                      bool ok) {
#pragma unroll
        for (int n = 0; n < NT * 2; ++n) {
            const int j = n / 2, i = n % 2 * 2;
            *reinterpret_cast<float2*>(sums + (warpgroup * ROWS + acc_row(i)) * PITCH + acc_column(j, 0)) = {
                add_terms<SPLITS>(c, j, i), add_terms<SPLITS>(c, j, i + 1)};
        }
        if (warp_uniform(__syncthreads_or(!ok))) return false;
#pragma unroll
        for (int n = 0; n < COUNT; ++n) {
            if (!is_valid(n)) break;
#pragma unroll
            for (int t = 0; t < WARPGROUPS; ++t) {
#pragma unroll
                for (int i = 0; i < GROUP; i += 4) {
                    float four[4];
                    load_several<false>(four, sums + (t * ROWS + row(n)) * PITCH + column(n) + i);
#pragma unroll
                    for (int j = 0; j < 4; ++j) v[n][i + j] = t > 0 ? v[n][i + j] + four[j] : four[j];
                }
            }
        }
        return true;
    }
};

__device__ constexpr int larger(int a, int b) { return a > b ? a : b; }

// BATCH: most rows of a step. The gemms have ROWS rows; the rest are 0.
template <class Net, int SPLITS_, int OWNED_, int BATCH_>
struct Sizes {
    static constexpr int L = Net::LAYERS, SPLITS = SPLITS_, OWNED = OWNED_, BATCH = BATCH_;
    using Tiles = TileChannel<SPLITS, BATCH>;
    using Sums = PartialSums<OWNED, BATCH, Tiles::GROUP>;
    template <int l>
    using FragmentsOf = ActivationFragments<SPLITS, BATCH, (Net::at(l) + 7) / 8>;
    static __device__ constexpr int at(int l) { return Net::at(l); }
    static __device__ constexpr int tiles(int l) { return (Net::at(l) + 7) / 8; }
    static __device__ constexpr int blocks(int l) { return (tiles(l) + OWNED - 1) / OWNED; }
    // K steps cover two panels, and warpgroups have equally many: no wgmma may follow a branch.
    static __device__ constexpr int pad_panels(int panels) { return round_up(panels, 2 * WARPGROUPS); }
    static __device__ constexpr int next_panels(int l) { return pad_panels(tiles(l)); }
    // The panel after a hidden layer's tiles starts with a 1, which multiplies the next layer's bias.
    static __device__ constexpr int bias_row(int l) { return l == 0 ? Net::at(0) : 8 * tiles(l); }
    static __device__ constexpr int sent_rows(int l) { return 8 * tiles(l - 1) + (l == L ? 1 : 0); }  // and a bias
    static __device__ constexpr int panels(int l) {
        return l < L ? pad_panels(bias_row(l) / 8 + 1) : round_up(Net::at(L), 16) / 8; }
    static __device__ constexpr int input_splits(int l) { return l == 1 ? 1 : SPLITS; }
    static __device__ constexpr int input_bytes(int l) { return panels(l - 1) * PANEL_BYTES; }  // of one split term
    // Whether a hidden layer's gemm loads its A operand from registers. Split activations fit only shared memory.
    static __device__ constexpr bool a_in_registers(int l) { return l > 1 && SPLITS == 1; }
    // K size of a hidden layer's weights, in the order of the gemm.
    template <int l>
    static __device__ constexpr int k_size() {
        if constexpr (a_in_registers(l)) return FragmentsOf<l - 1>::K_SIZE;
        else return 8 * panels(l - 1);
    }
    // The dW gemm reads whole 64-input tiles of all warpgroups, past the last input.
    static __device__ constexpr int read_bytes(int l) {
        return (input_splits(l) - 1) * input_bytes(l) + round_up(panels(l - 1), 8 * WARPGROUPS) * PANEL_BYTES;
    }
};

// Shared memory of a block that computes the outputs, starting at offset AT.
template <class S, int AT>
struct OutputLayout {
    static constexpr int L = S::L, PANELS = S::panels(L);
    static constexpr int K_SIZE = S::template FragmentsOf<L - 1>::K_SIZE;
    static constexpr int WEIGHTS = AT;  // (K_SIZE, outputs), term after term
    static constexpr int SPLIT_BYTES = PANELS * 16 * K_SIZE;
    static constexpr int BIASES = WEIGHTS + S::SPLITS * SPLIT_BYTES;  // (outputs,) float32
    // (WARPGROUPS, PANELS, 128, 4)
    static constexpr int SUMS = BIASES + PANELS * 32, SUM_BYTES = WARPGROUPS * PANELS * 128 * 16;
};

constexpr int MAX_BYTES = 226 << 10;  // dynamic shared memory per block

// Shared memory of a block of hidden layer l, offsets in bytes: the input, then the rest. The input is x or the
// previous layer's activations, (ROWS, 8 panels(l - 1)), term after term. Panels of x from FIXED on are
// double-buffered, as many as fit: next rows are stored while current ones are read.
template <class S, int l>
struct HiddenLayout {
    static constexpr bool HAS_OUTPUTS = l >= S::L - 2, HAS_NEXT = l < S::L - 2, HAS_COLUMNS = l < S::L - 1;
    static constexpr int NEXT_PANELS = HAS_NEXT ? S::next_panels(l + 1) : 0, COLUMN_BYTES = 128 * S::OWNED * S::SPLITS;
    static constexpr int COLUMN_PANELS = HAS_NEXT ? NEXT_PANELS : HAS_COLUMNS ? OutputLayout<S, 0>::K_SIZE / 8 : 0;
    static constexpr int WEIGHTS = 0;  // (k_size(l), owned units), split
    static constexpr int BIASES = WEIGHTS + S::SPLITS * S::OWNED * 16 * S::template k_size<l>();  // (owned units,) fp32
    static constexpr int GRADIENTS = BIASES + S::OWNED * 32;  // (ROWS, owned units), split
    static constexpr int NEXT_DZ = GRADIENTS + S::SPLITS * S::OWNED * PANEL_BYTES;  // (ROWS, units of l + 1), split
    // (owned units, units of l + 1), split
    static constexpr int COLUMNS = NEXT_DZ + S::SPLITS * NEXT_PANELS * PANEL_BYTES;
    using Outputs = OutputLayout<S, COLUMNS + COLUMN_PANELS * COLUMN_BYTES>;
    static constexpr int SUMS = HAS_OUTPUTS ? Outputs::SUMS : Outputs::WEIGHTS;  // (WARPGROUPS, ROWS, PITCH) fp32
    static constexpr int SUM_BYTES = S::Sums::BYTES;
    static constexpr int IDS = SUMS + (HAS_OUTPUTS ? larger(SUM_BYTES, Outputs::SUM_BYTES) : SUM_BYTES);  // (3, BATCH)
    static constexpr int REST_BYTES = IDS + 3 * S::BATCH * 4, INPUT_BYTES = S::input_splits(l) * S::input_bytes(l);
    static constexpr int SPARE_PANELS = (MAX_BYTES - larger(INPUT_BYTES + REST_BYTES, S::read_bytes(l))) / PANEL_BYTES;
    static constexpr int SINGLE = round_up(larger(S::panels(0) - larger(SPARE_PANELS, 0), 0), 8);
    static constexpr int FIXED = SINGLE < S::panels(0) ? SINGLE : S::panels(0),
        TWICE = l > 1 ? 0 : S::panels(0) - FIXED;
    static constexpr int REST = INPUT_BYTES + TWICE * PANEL_BYTES;
    static constexpr int BYTES = larger(REST + REST_BYTES, TWICE * PANEL_BYTES + S::read_bytes(l));
};
// Shared memory of the output layer's block.
template <class S>
struct OutputBlockLayout {
    static constexpr int L = S::L;
    using Outputs = OutputLayout<S, 0>;
    static constexpr int IDS = Outputs::SUMS + Outputs::SUM_BYTES;  // (3, BATCH)
    static constexpr int LOSSES = IDS + 3 * S::BATCH * 4;           // (2, ROWS) float32: losses, correct predictions
    static constexpr int GRADIENTS = round_up(LOSSES + 2 * ROWS * 4, 128);
    static constexpr int INPUT = GRADIENTS + S::SPLITS * S::panels(L) * PANEL_BYTES;
    static constexpr int BYTES = INPUT + S::read_bytes(L);
};
template <class S, int l = S::L - 1>
__device__ constexpr int max_bytes() {
    if constexpr (l == 0) {
        return OutputBlockLayout<S>::BYTES;
    } else {
        return larger(HiddenLayout<S, l>::BYTES, max_bytes<S, l - 1>());
    }
}

// The next step's rows, in flight in registers. A warp loads four consecutive 16 B vectors of 8 rows: half cache lines,
// and conflict-free stores. With few rows, several warps share them.
template <class S>
struct PixelPrefetch {
    static constexpr int VECTORS = S::panels(0) / 2, ROW_GROUPS = S::BATCH / 8, AT_ONCE = LP_THREADS / 8 / ROW_GROUPS;
    static constexpr int COUNT = (VECTORS + AT_ONCE - 1) / AT_ONCE;
    uint4 bytes[COUNT];

    static __device__ __forceinline__ int row() { return threadIdx.x / 32 % ROW_GROUPS * 8 + threadIdx.x % 8; }
    static __device__ __forceinline__ int vector(int i) {
        return threadIdx.x / 32 / ROW_GROUPS * 4 + threadIdx.x % 32 / 8 + AT_ONCE * i;
    }

    __device__ __forceinline__ void fetch(const void* x, long long stride, const u32* ids, int rows) {
        const unsigned char* const from = static_cast<const unsigned char*>(x) + ids[row()] * stride + 16 * vector(0);
        const bool is_row = row() < rows;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            bytes[i] = {0, 0, 0, 0};
            const bool is_vector = i < COUNT - 1 || 16 * vector(i) < stride;
            if (is_row && is_vector) bytes[i] = __ldcg(reinterpret_cast<const uint4*>(from + 16 * AT_ONCE * i));
        }
    }
    // Two bytes as bf16. With high byte 0x43, byte b reads as t = 128 + b, 2 b from 128 on; b is min(t - 128, t / 2).
    static __device__ __forceinline__ u32 widen(u32 word, u32 which) {
        const u32 less = 0xc300c300, half = 0x3f003f00;
        u32 result;
        asm("{.reg .b32 t, u; prmt.b32 t, %1, 0x43434343, %2; add.rn.bf16x2 u, t, %3; mul.rn.bf16x2 t, t, %4; min.bf16x2 %0, t, u;}"
            : "=r"(result) : "r"(word), "r"(which), "r"(less), "r"(half));
        return result;
    }
    static __device__ __forceinline__ uint4 widen_eight(u32 low, u32 high) {
        return {widen(low, 0x4140), widen(low, 0x4342), widen(high, 0x4140), widen(high, 0x4342)};
    }
    // Stores panels BEGIN to END; `to` is panel 0.
    template <int BEGIN, int END>
    __device__ __forceinline__ void store(char* to) const {
        uint4* const first = reinterpret_cast<uint4*>(to + vector(0) * 2 * PANEL_BYTES + row() * 16);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            if (2 * AT_ONCE * (i + 1) <= BEGIN || 2 * AT_ONCE * i >= END) continue;  // compile-time: saves registers
            if (2 * vector(i) < BEGIN || 2 * vector(i) >= END) continue;
            first[i * 2 * AT_ONCE * ROWS] = widen_eight(bytes[i].x, bytes[i].y);
            first[(i * 2 * AT_ONCE + 1) * ROWS] = widen_eight(bytes[i].z, bytes[i].w);
        }
    }
};

// A thread's weights of layer l, for 8 PANELS units from first_unit on. The warpgroups alternate tiles of 64 inputs.
template <class S, u32 OPTIMISER, int l, int PANELS>
struct Weights {
    static constexpr int D = S::at(l - 1), INPUTS = 8 * S::panels(l - 1), SPLITS = S::SPLITS;
    static constexpr int COUNT = ((INPUTS + 63) / 64 + WARPGROUPS - 1) / WARPGROUPS, ELEMENTS = COUNT * PANELS * 4;
    float w[ELEMENTS];
    float *means, *squares;  // this thread's moments, float4s in global memory to save registers
    int warpgroup, first_unit;

    __device__ __forceinline__ Weights(const LayerBuffers& buffers, int block, int warpgroup)
        : warpgroup(warpgroup), first_unit(block * 8 * PANELS) {
        const long long first = (static_cast<long long>(block) * (ELEMENTS / 4) * LP_THREADS + threadIdx.x) * 4;
        means = buffers.frag_mean + first, squares = buffers.frag_square + first;
    }

    __device__ __forceinline__ int input(int n) const {
        return (warpgroup + n / (PANELS * 4) * WARPGROUPS) * 64 + acc_row(n % 4); }
    __device__ __forceinline__ int unit(int n) const { return first_unit + acc_column(n / 4 % PANELS, n); }
    static __device__ __forceinline__ void copy(float& local, float* global, bool is_valid, bool is_store) {
        if (!is_store) local = is_valid ? *global : 0.0f;
        else if (is_valid) *global = local;
    }
    // Loads from global memory, or stores if is_store.
    __device__ __forceinline__ void transfer(const LayerBuffers& buffers, const LayerFacts& facts, bool is_store) {
#pragma unroll
        for (int n = 0; n < ELEMENTS; ++n) {
            const int from = input(n), to = unit(n);
            const bool is_bias = from == S::bias_row(l - 1);
            const bool is_valid = to < S::at(l) && (is_bias ? facts.has_bias : from < D);
            const long long at = is_valid ? static_cast<long long>(to) * facts.stride + (is_bias ? D : from) : 0;
            copy(w[n], buffers.w + at, is_valid, is_store);
            if constexpr (OPTIMISER != SGD)
                copy(means[n / 4 * LP_THREADS * 4 + n % 4], buffers.mean + at, is_valid, is_store);
            if constexpr (OPTIMISER == ADAM)
                copy(squares[n / 4 * LP_THREADS * 4 + n % 4], buffers.square + at, is_valid, is_store);
        }
    }
    // Stores split weights for the gemm: (k_size(l), 8 PANELS), term after term; with a_in_registers, also `biases`.
    __device__ __forceinline__ void store_splits(char* to, float* biases) const {
        constexpr int K_SIZE = S::template k_size<l>(), STORED = S::a_in_registers(l) ? S::bias_row(l - 1) : INPUTS;
#pragma unroll
        for (int n = 0; n < ELEMENTS; n += 2) {
            const bool is_full_tile = (n / (PANELS * 4) + 1) * WARPGROUPS * 64 <= STORED;
            const int column = acc_column(n / 4 % PANELS, 0);
            if (!is_full_tile && input(n) >= STORED) {
                if (S::a_in_registers(l) && input(n) == STORED) biases[column] = w[n], biases[column + 1] = w[n + 1];
                continue;
            }
            u32 splits[SPLITS];
            split_pair(splits, w[n], w[n + 1]);
            const int at = S::a_in_registers(l) ? permuted_k(input(n)) : input(n);
#pragma unroll
            for (int i = 0; i < SPLITS; ++i)
                *reinterpret_cast<u32*>(to + core_matrix_offset<K_SIZE>(at, i * 8 * PANELS + column)) = splits[i];
        }
    }
    // Sends (sent_rows(l), 8 tiles(l)) as float4s. Lane pairs swap halves to hold four units of a row.
    __device__ __forceinline__ void send(const Channel& chunks) const {
        const bool is_odd = threadIdx.x % 2;
#pragma unroll
        for (int n = 0; n < ELEMENTS; n += 4) {
            u32 values[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) values[i] = __float_as_uint(w[n + i]);
            const u32 a = __shfl_xor_sync(~0u, is_odd ? values[0] : values[2], 1);
            const u32 b = __shfl_xor_sync(~0u, is_odd ? values[1] : values[3], 1);
            const int row = input(is_odd ? n + 2 : n),
                four = (first_unit + n / 4 % PANELS * 8) / 4 + threadIdx.x % 4 / 2;
            if (row >= S::sent_rows(l) || four >= 2 * S::tiles(l)) continue;
            const int slot = row * 2 * S::tiles(l) + four;
            if (is_odd) chunks.send(slot, a, b, values[2], values[3]);
            else chunks.send(slot, values[0], values[1], a, b);
        }
    }
    // Computes dW and updates the weights. inputs, gradients: shared memory addresses; offset: of panels from FIXED on.
    template <int FIXED>
    __device__ __forceinline__ void update(const StepValues& opt, float scale, u32 inputs, u32 offset, u32 gradients) {
        using Transposed = CoreMatrices<ROWS, true>;
        constexpr int AT_ONCE = MAX_SUMS<OPTIMISER> / (SPLITS * PANELS * 4) > 1
            ? MAX_SUMS<OPTIMISER> / (SPLITS * PANELS * 4) : 1;
#pragma unroll
        for (int first = 0; first < COUNT; first += AT_ONCE) {
            float c[AT_ONCE][SPLITS * PANELS][4];
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                if (first + i >= COUNT) break;
                const int panel = (warpgroup + (first + i) * WARPGROUPS) * 8;
                const u32 tile = inputs + (panel < FIXED ? 0 : offset) + panel * PANEL_BYTES;
                split_gemm<S::input_splits(l), S::BATCH / 16, 1, Transposed>(c[i], tile, S::input_bytes(l),
                                                                             Transposed(gradients), 0);
            }
            wgmma_commit();
            wgmma_wait<0>();
#pragma unroll
            for (int m = 0; m < AT_ONCE * PANELS; ++m) {
                const int n = first * PANELS + m;  // index of four weights
                if (n >= ELEMENTS / 4) break;
                float gradient[4], weight[4], mean[4] = {}, square[4] = {};
                if constexpr (OPTIMISER != SGD) load_several<true>(mean, means + n * LP_THREADS * 4);
                if constexpr (OPTIMISER == ADAM) load_several<true>(square, squares + n * LP_THREADS * 4);
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    gradient[i] = scale * add_terms<SPLITS>(c[m / PANELS], m % PANELS, i), weight[i] = w[4 * n + i];
                ::optimiser_step(OPTIMISER, opt, gradient, weight, mean, square, 4);
#pragma unroll
                for (int i = 0; i < 4; ++i) w[4 * n + i] = weight[i];  // padding is updated too, but unused
                if constexpr (OPTIMISER != SGD) store_vector(means + n * LP_THREADS * 4, mean);
                if constexpr (OPTIMISER == ADAM) store_vector(squares + n * LP_THREADS * 4, square);
            }
        }
    }
};
