// train/layer_parallel/outputs.cuh: outputs, loss and gradients of a step, recomputed by every block that needs them.
//
// Idea    Activations stay in wgmma A fragments and gradients in accumulator fragments, not in shared memory.
#pragma once

#include "train/layer_parallel/layer_parallel.cuh"

// Loads the weights w (units, stride) of `rows` inputs from `first` on in exchange order, four units per slot:
// consume(slot, four words). D inputs; the bias is input row round_up(D, 8).
template <class Consume>
__device__ __forceinline__ void load_fours(const float* w, const LayerFacts& facts, int D, int N, int first, int rows,
                                           const Consume& consume) {
    const int fours = (N + 7) / 8 * 2;
    for (int i = threadIdx.x; i < rows * fours; i += LP_THREADS) {
        const int row = first + i / fours, unit = i % fours * 4;
        const bool is_bias = row == round_up(D, 8);
        u32 four[4] = {};
        for (int j = 0; j < 4; ++j)
            if (unit + j < N && (is_bias ? facts.has_bias : row < D))
                four[j] = __float_as_uint(w[static_cast<long long>(unit + j) * facts.stride + (is_bias ? D : row)]);
        four[0] &= ~1u;
        consume(i, four);
    }
}

// R: the block's OutputLayout.
template <class S, class K, class R>
struct Outputs {
    using Activations = typename S::template FragmentsOf<S::L - 1>;
    static constexpr int L = S::L, SPLITS = S::SPLITS, N = S::at(L), PANELS = R::PANELS, COLUMNS = 2 * PANELS;
    static constexpr int GROUPS = Activations::GROUPS, AT_ONCE = Activations::AT_ONCE;
    const ParallelArgs<L>& args;
    char* const smem;
    const int warpgroup;
    float target[2][COLUMNS];  // rows g and g + 8 of the warp's 16
    int truth[2];
    Activations activations;
    float gradients[2][COLUMNS];  // of the outputs
    float loss[2];
    int correct[2];

    __device__ __forceinline__ Outputs(const ParallelArgs<L>& args, char* smem, int warpgroup)
        : args(args), smem(smem), warpgroup(warpgroup) {}

    static __device__ __forceinline__ int row(int h) { return Activations::row(h); }
    static __device__ __forceinline__ int column(int i) { return acc_column(i / 2, i); }

    // Stores a slot of the output layer's weights: from global memory at launch, later from the output layer's block.
    __device__ __forceinline__ void store_weights(int slot, const u32 (&four)[4]) const {
        constexpr int FOURS = 2 * S::tiles(L);
        const int unit = slot / FOURS, n = slot % FOURS * 4;
        if (unit == S::bias_row(L - 1)) {
            *reinterpret_cast<uint4*>(smem + R::BIASES + n * 4) = {four[0], four[1], four[2], four[3]};
            return;
        }
        u32 low[SPLITS], high[SPLITS];
        split_pair(low, __uint_as_float(four[0]), __uint_as_float(four[1]));
        split_pair(high, __uint_as_float(four[2]), __uint_as_float(four[3]));
#pragma unroll
        for (int i = 0; i < SPLITS; ++i)
            *reinterpret_cast<uint2*>(smem + R::WEIGHTS + i * R::SPLIT_BYTES +
                                      core_matrix_offset<R::K_SIZE>(permuted_k(unit), n)) = {
                low[i], high[i]};
    }
    __device__ __forceinline__ void load_weights() const {
        load_fours(args.local(args.layers[L - 1].w), args.facts[L - 1], S::at(L - 1), N, 0, S::sent_rows(L),
                   [&](int slot, const u32 (&four)[4]) { store_weights(slot, four); });
    }
    static __device__ __forceinline__ Channel weights_channel(const ParallelArgs<L>& args, u32 round) {
        constexpr int SLOTS = S::sent_rows(L) * 2 * S::tiles(L);
        return {args.local(args.layers[L - 1].columns), SLOTS * 16ll, round, args.deadline_ms};
    }
    template <int THREADS>
    __device__ __forceinline__ bool receive_weights(u32 round) const {
        constexpr int SLOTS = S::sent_rows(L) * 2 * S::tiles(L);
        return weights_channel(args, round).template receive<SLOTS, THREADS>(
            SLOTS, [](int n) { return n; }, [&](int slot, const u32 (&four)[4]) { store_weights(slot, four); });
    }
    // ids: row indices of the step.
    __device__ __forceinline__ void fetch_targets(const u32* ids) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const long long id = row(h) < S::BATCH ? ids[row(h)] : 0;
            if constexpr (K::LOSS == CROSS_ENTROPY) {
                truth[h] = static_cast<int>(static_cast<const long long*>(args.targets)[id]);
#pragma unroll
                for (int i = 0; i < COLUMNS; ++i) target[h][i] = 0.0f;
            } else {
                truth[h] = 0;
#pragma unroll
                for (int i = 0; i < COLUMNS; ++i)
                    target[h][i] = column(i) < N ? static_cast<const float*>(args.targets)[id * N + column(i)] : 0.0f;
            }
        }
    }
    // Receives the last hidden layer's activations.
    __device__ __forceinline__ bool receive(u32 round) {
        return activations.receive({args.local(args.layers[L - 2].forward), S::tiles(L - 1), round, args.deadline_ms},
                                   warpgroup);
    }
    // Computes outputs, losses and gradients; block-wide.
    __device__ __forceinline__ void compute(int rows) {
        float c[SPLITS * PANELS][4];
        activations.multiply(c, shared_at(smem + R::WEIGHTS), warpgroup);
        float4* const sums = reinterpret_cast<float4*>(smem + R::SUMS) + threadIdx.x % 128;
#pragma unroll
        for (int j = 0; j < PANELS; ++j)
            sums[(warpgroup * PANELS + j) * 128] = {add_terms<SPLITS>(c, j, 0), add_terms<SPLITS>(c, j, 1),
                                                    add_terms<SPLITS>(c, j, 2), add_terms<SPLITS>(c, j, 3)};
        __syncthreads();
        const float slope = __uint_as_float(args.facts[L - 1].slope);
        const float* const biases = reinterpret_cast<const float*>(smem + R::BIASES);
#pragma unroll
        for (int j = 0; j < PANELS; ++j) {
            float4 sum = sums[j * 128];
#pragma unroll
            for (int i = 1; i < WARPGROUPS; ++i) {
                const float4 other = sums[(i * PANELS + j) * 128];
                sum = {sum.x + other.x, sum.y + other.y, sum.z + other.z, sum.w + other.w};
            }
            const float2 bias = *reinterpret_cast<const float2*>(biases + column(2 * j));
            gradients[0][2 * j] = activate<K::code(L)>(sum.x + bias.x, slope);
            gradients[0][2 * j + 1] = activate<K::code(L)>(sum.y + bias.y, slope);
            gradients[1][2 * j] = activate<K::code(L)>(sum.z + bias.x, slope);
            gradients[1][2 * j + 1] = activate<K::code(L)>(sum.w + bias.y, slope);
        }
        compute_loss<4, N, K::LOSS, K::code(L)>(gradients, column, {row(0) < rows, row(1) < rows}, slope, target,
                                                      truth, loss, correct);
    }
    // Gradients of the last hidden layer for the warpgroup's groups: consume(first group, accumulators (groups, 4, 4)).
    // A thread's units 2 j and 2 j + 1 of 8 are (.., j, 2 h) and (.., j, 2 h + 1).
    template <class Consume>
    __device__ __forceinline__ void hidden_gradients(const Consume& consume) const {
        using OutputWeights = CoreMatrices<R::K_SIZE, false>;
        const float slope = __uint_as_float(args.facts[L - 2].slope);
        u32 fragments[PANELS / 2][SPLITS][4];
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) {
            const int j = i / 2, h = i % 2;
            u32 splits[SPLITS];
            split_pair(splits, gradients[h][2 * j], gradients[h][2 * j + 1]);
#pragma unroll
            for (int term = 0; term < SPLITS; ++term) fragments[j / 2][term][j % 2 * 2 + h] = splits[term];
        }
#pragma unroll
        for (int first = 0; first < GROUPS; first += AT_ONCE) {
            float c[AT_ONCE][4][4];
            wgmma_fence();
#pragma unroll
            for (int m = 0; m < AT_ONCE; ++m) {
#pragma unroll
                for (int terms = SPLITS - 1; terms >= 0; --terms)  // smallest term products first
#pragma unroll
                    for (int i = 0; i <= terms; ++i) {
                        const OutputWeights weights(shared_at(smem + R::WEIGHTS + (terms - i) * R::SPLIT_BYTES) +
                                                    Activations::group(first + m, warpgroup) * 4 * 128);
#pragma unroll
                        for (int step = 0; step < PANELS / 2; ++step)
                            add_fragments<OutputWeights, 4>(c[m], fragments[step][i], weights.descriptor(step),
                                                            terms < SPLITS - 1 || i > 0 || step > 0);
                    }
            }
            wgmma_commit();
            wgmma_wait<0>();
#pragma unroll
            for (int i = 0; i < AT_ONCE * 8; ++i) {
                const int m = i / 8, j = i / 2 % 4, h = i % 2;
                const float2 pair = activations.pair(first + m, h, j);
                c[m][j][2 * h] = act_grad(K::code(L - 1), slope, c[m][j][2 * h], pair.x);
                c[m][j][2 * h + 1] = act_grad(K::code(L - 1), slope, c[m][j][2 * h + 1], pair.y);
            }
            consume(first, c);
        }
    }
};
