// attention/fused.cu: y = softmax(scale q k^T + shift) v of short sequences on the tensor cores of every chip, in one launch.
//
// Idea    A warp has 16 queries of a head and all keys: their scores stay in its registers, from the first product by way
//         of the softmax to the second, since what mma.sync makes is what it takes. Operands come to registers straight
//         from memory, each number once a warp, warps of a head find them in L1; nobody waits for anybody. Numbers of q
//         and k may meet in any order, so a lane reads neighbours; a key's numbers of v, too, for two blocks of columns
//         at once, of which a lane then has four neighbours of y. Heads lie wherever the moves before and behind have
//         them: four strides each.
// Floor   Bytes of q, k, v and y: 4,096 rows of 4 heads of 32 x 16 in float32: 134 MB / 4.8 TB/s = 28 us; 2 * 1.07 Gflop
//         as three products of tf32 / 494 Tflop/s = 13 us.
// Order   A score's sum runs over the head's numbers, STEP an instruction, those of y over the keys; of float32, they are
//         added to a total every 32 terms. The sum of a row of exponentials: keys 8 j + 2 q, + 1 in order, of four lanes
//         in pairs. The whole sum divides y. Nothing depends on the number of rows.
// Layout  q (Sq, D), k (Sk, D), v (Sk, V), y (Sq, V) of each head by strides; shift (heads or 1, Sq, Sk) in float32, or
//         none.
// Shared  None.
// Limits  Sk <= KEYS, D and V <= WIDTH, any Sq; KEYS 16 to 128, WIDTH 16 to 64. IS_WHOLE: D and V are WIDTH, and numbers
//         lie side by side, four of them aligned. float32, float16 or bfloat16 in memory; sm_80 up. In fp32, what meets
//         an infinity is a NaN.
#include "common/activation.cuh"
#include "mma/fragments.cuh"

constexpr int ROWS = 16, WARPS = 4;

__device__ __forceinline__ float below_all() { return __uint_as_float(0xff800000u); }  // minus infinity

// Where the numbers of a head are, counted in numbers: the first of all, then from row to row of the batch, from head to
// head, along the sequence, and along a head's numbers.
struct Heads {
    long long first, row, head, step, each;
};
struct Sizes {
    long long count;             // heads of all rows
    int heads, Sq, Sk, D, V;     // of a row; queries, keys; numbers of a query, of a value
    int shift_head;              // from head to head of the shift: 0 where all have the same
    Heads q, k, v, y;
};

// N neighbours of a row, of which `left` are there.
template <int N, bool IS_WHOLE, class T>
__device__ __forceinline__ void read_several(float (&v)[N], const T* from, long long each, int left) {
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

// Of a warp's rows g and g + 8: over the four lanes that share them.
__device__ __forceinline__ float largest(float v) {
    v = fmaxf(v, __shfl_xor_sync(~0u, v, 1));
    return fmaxf(v, __shfl_xor_sync(~0u, v, 2));
}
__device__ __forceinline__ float sum_of(float v) {
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

    Words<P, 4> queries[STEPS];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int mine = first + g + 8 * half;
        const T* const from = q + mine * sizes.q.step;
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            const int d = s * STEP + w * PAIR;
            float several[PAIR];
            read_several<PAIR, IS_WHOLE>(several, from + d * sizes.q.each, sizes.q.each, mine < sizes.Sq ? sizes.D - d : 0);
            if constexpr (PAIR == 4) {
                queries[s].set(half, several[0], several[1]), queries[s].set(half + 2, several[2], several[3]);
            } else {
                queries[s].set(half, several[0]), queries[s].set(half + 2, several[1]);
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
            float several[PAIR];
            read_several<PAIR, IS_WHOLE>(several, from + d * sizes.k.each, sizes.k.each, key < sizes.Sk ? sizes.D - d : 0);
            Words<P, 2> keys;
            if constexpr (PAIR == 4) keys.set(0, several[0], several[1]), keys.set(1, several[2], several[3]);
            else keys.set(0, several[0]), keys.set(1, several[1]);
            multiply<P>(c, queries[s], keys);
            close_part<P>(scores[j], c, s, STEPS);
        }
    }

    const float factor = scale == nullptr ? 1.0f : *scale;
    float most[2] = {below_all(), below_all()}, sums[2] = {};
#pragma unroll
    for (int j = 0; j < KEYS / 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int key = 8 * j + 2 * w + i % 2, mine = first + g + i / 2 * 8;
            const bool is_there = key < sizes.Sk && mine < sizes.Sq;
            float score = factor * scores[j][i];
            if (shift != nullptr && is_there)
                score += shift[head * sizes.shift_head + static_cast<long long>(mine) * sizes.Sk + key];
            scores[j][i] = key < sizes.Sk ? score : below_all();
            most[i / 2] = fmaxf(most[i / 2], scores[j][i]);
        }
    most[0] = largest(most[0]), most[1] = largest(most[1]);
#pragma unroll
    for (int j = 0; j < KEYS / 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float below = scores[j][i] - most[i / 2];
            const float exponential = sizeof(T) == 2 ? exp2_of(1.44269504f * below) : expf(below);
            scores[j][i] = 8 * j + 2 * w + i % 2 < sizes.Sk ? exponential : 0.0f;
            sums[i / 2] += scores[j][i];
        }
    const float shares[2] = {1.0f / sum_of(sums[0]), 1.0f / sum_of(sums[1])};

#pragma unroll
    for (int n = 0; n < WIDTH; n += 16) {
        float even[4] = {}, odd[4] = {}, evens[4] = {}, odds[4] = {};  // columns n + 2 c and n + 2 c + 1, as block c has them
#pragma unroll
        for (int s = 0; s < KEY_STEPS; ++s) {
            Words<P, 4> weights;
            Words<P, 2> left, right;
            float two[PAIR][2];
#pragma unroll
            for (int i = 0; i < PAIR; ++i) {
                const int key = s * STEP + 2 * w + i % 2 + i / 2 * 8;
                const int column = n + 2 * g, there = key < sizes.Sk ? sizes.V - column : 0;
                read_several<2, IS_WHOLE>(two[i], v + key * sizes.v.step + column * sizes.v.each, sizes.v.each, there);
            }
            if constexpr (PAIR == 4) {
                const float(&low)[4] = scores[2 * s], (&high)[4] = scores[2 * s + 1];
                weights.set(0, low[0], low[1]), weights.set(1, low[2], low[3]);
                weights.set(2, high[0], high[1]), weights.set(3, high[2], high[3]);
                left.set(0, two[0][0], two[1][0]), left.set(1, two[2][0], two[3][0]);
                right.set(0, two[0][1], two[1][1]), right.set(1, two[2][1], two[3][1]);
            } else {
                weights.set(0, scores[s][0]), weights.set(1, scores[s][2]);
                weights.set(2, scores[s][1]), weights.set(3, scores[s][3]);
                left.set(0, two[0][0]), left.set(1, two[1][0]);
                right.set(0, two[0][1]), right.set(1, two[1][1]);
            }
            multiply<P>(even, weights, left), multiply<P>(odd, weights, right);
            close_part<P>(evens, even, s, KEY_STEPS), close_part<P>(odds, odd, s, KEY_STEPS);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int mine = first + g + 8 * half, column = n + 4 * w;
            const float share = shares[half];
            alignas(16) const float four[4] = {evens[2 * half] * share, odds[2 * half] * share,
                                               evens[2 * half + 1] * share, odds[2 * half + 1] * share};
            T* const to = y + mine * sizes.y.step + column * sizes.y.each;
            if (mine >= sizes.Sq) continue;
            if constexpr (IS_WHOLE) {
                store_several(to, four);
            } else {
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (column + i < sizes.V) store1(to + i * sizes.y.each, four[i]);
            }
        }
    }
}
