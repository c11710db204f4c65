// attention/fused.cu: y = softmax(scale q k^T + shift) v of short sequences, one launch, mma.sync.
//
// Idea    A warp owns 16 queries of one head and all its keys. The scores stay in registers: the accumulator layout of
//         mma.sync matches its A operand, so the softmax output feeds the second gemm directly. Warps load operands
//         straight from global memory; warps of the same head hit L1. No block-wide synchronisation.
//         K order is free in both gemms, so each lane loads contiguous elements of q and k, and stores 4 of y.
// Floor   Bytes of q, k, v and y: 4,096 rows of 4 heads of 32 x 16 in float32: 134 MB / 4.8 TB/s = 28 us;
//         2 * 1.07 Gflop as 3xTF32 / 494 Tflop/s = 13 us.
// Order   STEP elements per mma. In fp32 a fresh accumulator starts every 32 K elements. A lane sums exponentials of
//         keys 8 j + 2 q, + 1 in order, then 4 lanes reduce pairwise; y is scaled last. Independent of B.
// Layout  q (Sq, D), k (Sk, D), v (Sk, V), y (Sq, V) per head, by strides; shift (heads or 1, Sq, Sk) float32 or null.
// Limits  Sk <= KEYS, D and V <= WIDTH, any Sq; KEYS 16 to 128, WIDTH 16 to 64. IS_WHOLE: D = V = WIDTH, contiguous,
//         every 4 elements aligned. float32, float16, bfloat16; sm_80 up. In fp32 infinities become NaN.
#include "common/elementwise.cuh"
#include "mma/fragments.cuh"

constexpr int ROWS = 16, WARPS = 4;

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000u); }  // minus infinity

// Offset and strides of a head, in elements: base offset; strides over batch rows, heads, sequence positions, elements.
struct Heads {
    long long first, row, head, step, each;
};
struct Sizes {
    long long count;          // heads of all batch rows
    int heads, Sq, Sk, D, V;  // heads per batch row; queries, keys; elements per query, per value
    int shift_head;           // head stride of shift: 0 if all heads share it
    Heads q, k, v, y;
};

// Loads N elements of a row; elements from `left` on are zero.
template <int N, bool IS_WHOLE, class T>
__device__ __forceinline__ void load_row(float (&v)[N], const T* from, long long each, int left) {
    if constexpr (IS_WHOLE) {
        using Word = typename Vector<N * sizeof(T)>::type;
        Word word = {};
        if (left > 0) word = *reinterpret_cast<const Word*>(from);
#pragma unroll
        for (int i = 0; i < N; ++i) v[i] = to_float(reinterpret_cast<const T*>(&word)[i]);
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i) v[i] = i < left ? to_float(from[i * each]) : 0.0f;
    }
}

// Reduce over the four lanes that share rows g and g + 8 of a warp's tile.
__device__ __forceinline__ float max_over_lanes(float v) {
    v = fmaxf(v, __shfl_xor_sync(~0u, v, 1));
    return fmaxf(v, __shfl_xor_sync(~0u, v, 2));
}
__device__ __forceinline__ float sum_over_lanes(float v) {
    v += __shfl_xor_sync(~0u, v, 1);
    return v + __shfl_xor_sync(~0u, v, 2);
}

template <class P, class T, int KEYS, int WIDTH, bool IS_WHOLE>
__global__ void __launch_bounds__(32 * WARPS)
attention(const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v, const float* __restrict__ scale,
          const float* __restrict__ shift, T* y, const __grid_constant__ Sizes sizes) {
    constexpr int STEP = P::STEP, PAIR = 2 * P::PER_WORD, STEPS = WIDTH / STEP, KEY_STEPS = KEYS / STEP;
    const int lane = threadIdx.x % 32, g = lane / 4, w = lane % 4;
    const int tiles = (sizes.Sq + ROWS - 1) / ROWS;
    const long long at = static_cast<long long>(blockIdx.x) * WARPS + threadIdx.x / 32, matrix = at / tiles;
    if (matrix >= sizes.count) return;
    const long long row = matrix / sizes.heads, head = matrix % sizes.heads;
    const int first = static_cast<int>(at % tiles) * ROWS;
    const auto begin = [&](const Heads& h) { return h.first + row * h.row + head * h.head; };
    q += begin(sizes.q), k += begin(sizes.k), v += begin(sizes.v), y += begin(sizes.y);

    Fragment<P, 4> queries[STEPS];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int query_row = first + g + 8 * half;
        const T* const from = q + query_row * sizes.q.step;
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            const int d = s * STEP + w * PAIR;
            float values[PAIR];
            load_row<PAIR, IS_WHOLE>(values, from + d * sizes.q.each, sizes.q.each,
                                     query_row < sizes.Sq ? sizes.D - d : 0);
            if constexpr (PAIR == 4) {
                queries[s].set(half, values[0], values[1]), queries[s].set(half + 2, values[2], values[3]);
            } else {
                queries[s].set(half, values[0]), queries[s].set(half + 2, values[1]);
            }
        }
    }

    float scores[KEYS / 8][4];
#pragma unroll
    for (int j = 0; j < KEYS / 8; ++j) {
        float c[4] = {};
        scores[j][0] = scores[j][1] = scores[j][2] = scores[j][3] = 0.0f;
        const int key = 8 * j + g;
        const T* const from = k + key * sizes.k.step;
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            const int d = s * STEP + w * PAIR;
            float values[PAIR];
            load_row<PAIR, IS_WHOLE>(values, from + d * sizes.k.each, sizes.k.each,
                                     key < sizes.Sk ? sizes.D - d : 0);
            Fragment<P, 2> keys;
            if constexpr (PAIR == 4) keys.set(0, values[0], values[1]), keys.set(1, values[2], values[3]);
            else keys.set(0, values[0]), keys.set(1, values[1]);
            multiply<P>(c, queries[s], keys);
            end_partial_sum<P>(scores[j], c, s, STEPS);
        }
    }

    const float score_scale = scale == nullptr ? 1.0f : *scale;
    float row_max[2] = {minus_infinity(), minus_infinity()}, sums[2] = {};
#pragma unroll
    for (int j = 0; j < KEYS / 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int key = 8 * j + 2 * w + i % 2, query_row = first + g + i / 2 * 8;
            const bool is_valid = key < sizes.Sk && query_row < sizes.Sq;
            float score = score_scale * scores[j][i];
            if (shift != nullptr && is_valid)
                score += shift[head * sizes.shift_head + static_cast<long long>(query_row) * sizes.Sk + key];
            scores[j][i] = key < sizes.Sk ? score : minus_infinity();
            row_max[i / 2] = fmaxf(row_max[i / 2], scores[j][i]);
        }
    row_max[0] = max_over_lanes(row_max[0]), row_max[1] = max_over_lanes(row_max[1]);
#pragma unroll
    for (int j = 0; j < KEYS / 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float shifted = scores[j][i] - row_max[i / 2];
            const float exponential = sizeof(T) == 2 ? exp2_of(1.44269504f * shifted) : expf(shifted);
            scores[j][i] = 8 * j + 2 * w + i % 2 < sizes.Sk ? exponential : 0.0f;
            sums[i / 2] += scores[j][i];
        }
    const float inverse_sums[2] = {1.0f / sum_over_lanes(sums[0]), 1.0f / sum_over_lanes(sums[1])};

#pragma unroll
    for (int n = 0; n < WIDTH; n += 16) {
        float even[4] = {}, odd[4] = {}, evens[4] = {}, odds[4] = {};  // columns n + 2 c and n + 2 c + 1
#pragma unroll
        for (int s = 0; s < KEY_STEPS; ++s) {
            Fragment<P, 4> weights;
            Fragment<P, 2> left, right;
            float pairs[PAIR][2];
#pragma unroll
            for (int i = 0; i < PAIR; ++i) {
                const int key = s * STEP + 2 * w + i % 2 + i / 2 * 8;
                const int column = n + 2 * g, valid = key < sizes.Sk ? sizes.V - column : 0;
                load_row<2, IS_WHOLE>(pairs[i], v + key * sizes.v.step + column * sizes.v.each, sizes.v.each, valid);
            }
            if constexpr (PAIR == 4) {
                const float(&low)[4] = scores[2 * s], (&high)[4] = scores[2 * s + 1];
                weights.set(0, low[0], low[1]), weights.set(1, low[2], low[3]);
                weights.set(2, high[0], high[1]), weights.set(3, high[2], high[3]);
                left.set(0, pairs[0][0], pairs[1][0]), left.set(1, pairs[2][0], pairs[3][0]);
                right.set(0, pairs[0][1], pairs[1][1]), right.set(1, pairs[2][1], pairs[3][1]);
            } else {
                weights.set(0, scores[s][0]), weights.set(1, scores[s][2]);
                weights.set(2, scores[s][1]), weights.set(3, scores[s][3]);
                left.set(0, pairs[0][0]), left.set(1, pairs[1][0]);
                right.set(0, pairs[0][1]), right.set(1, pairs[1][1]);
            }
            multiply<P>(even, weights, left), multiply<P>(odd, weights, right);
            end_partial_sum<P>(evens, even, s, KEY_STEPS), end_partial_sum<P>(odds, odd, s, KEY_STEPS);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int query_row = first + g + 8 * half, column = n + 4 * w;
            const float inverse_sum = inverse_sums[half];
            alignas(16) const float outputs[4] = {evens[2 * half] * inverse_sum, odds[2 * half] * inverse_sum,
                                                  evens[2 * half + 1] * inverse_sum, odds[2 * half + 1] * inverse_sum};
            T* const to = y + query_row * sizes.y.step + column * sizes.y.each;
            if (query_row >= sizes.Sq) continue;
            if constexpr (IS_WHOLE) {
                store_vector(to, outputs);
            } else {
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (column + i < sizes.V) store1(to + i * sizes.y.each, outputs[i]);
            }
        }
    }
}
