// common/epilogue.cuh: tile scheduler and epilogue (bias, residual add, activation, store) of GEMMs and convolutions.
//
// TileOrigin maps a tile index to its position in y. finish serves CUDA-core kernels (gemm/simt.cu); finish_rows serves
// tensor-core accumulators, laid out as in mma/wgmma.cuh.
#pragma once

#include "common/fast_math.cuh"
#include "common/dtype.cuh"

// Tile order: GROUP tiles down, then one column to the right, so concurrent blocks share rows of x and w in L2.
constexpr int GROUP = 8;

template <int BM, int BN>
struct TileOrigin {
    long long m, n;  // the tile's first row and column of y

    static __device__ __forceinline__ u32 count(long long M, long long N) {
        return static_cast<u32>((M + BM - 1) / BM) * static_cast<u32>((N + BN - 1) / BN);
    }
    __device__ __forceinline__ TileOrigin(long long M, long long N, u32 tile) {
        const u32 tiles_m = static_cast<u32>((M + BM - 1) / BM), tiles_n = static_cast<u32>((N + BN - 1) / BN);
        m = static_cast<long long>(tile) * BM, n = 0;
        if (tiles_n == 1) return;  // skips the divisions: the TMA producer thread would wait for them
        const u32 first = tile / (GROUP * tiles_n) * GROUP, index = tile % (GROUP * tiles_n);
        const u32 rows = tiles_m - first < GROUP ? tiles_m - first : GROUP;
        m = static_cast<long long>(first + index % rows) * BM;
        n = static_cast<long long>(index / rows) * BN;
    }
};

// Four elements of a row; those past the first `left` are zero.
template <class T>
__device__ __forceinline__ float4 read4(const T* from, long long left, bool is_aligned) {
    if (is_aligned && left >= 4) return load4(from);
    return {left > 0 ? to_float(from[0]) : 0.0f, left > 1 ? to_float(from[1]) : 0.0f,
            left > 2 ? to_float(from[2]) : 0.0f, left > 3 ? to_float(from[3]) : 0.0f};
}

// -- activations ----------------------------------------------------------------------------------------------------

// The variant of an activation for results stored as Y: the fast-math one for 16 bits.
template <class Y, class Function>
struct StoredAs {
    using type = Function;
};
template <class Function>
struct StoredAs<f16, Function> {
    using type = FastMath<Function>;
};
template <class Function>
struct StoredAs<bf16, Function> {
    using type = FastMath<Function>;
};

// An activation selected at launch. Code 0 is none; the others are CODES of kernels/pointwise.py.
struct Activation {
    u32 code;
    float a, b;  // parameters: the slope of a LeakyReLU, the bounds of a Clip

    template <class Y, int V>
    __device__ __forceinline__ void apply(float (&v)[V]) const {
        switch (code) {
#define CASE(CODE, FUNCTION, ...) \
    case CODE: return each<typename StoredAs<Y, FUNCTION>::type>(__VA_ARGS__);
            EACH_ACTIVATION(CASE)
#undef CASE
        }
    }
    __device__ __forceinline__ float operator()(float v) const {
        float one[1] = {v};
        apply<float>(one);
        return one[0];
    }

private:
    template <class Function, int V, class... Args>
    static __device__ __forceinline__ void each(float (&v)[V], Args... args) {
#pragma unroll
        for (int i = 0; i < V; ++i) v[i] = Function::apply(v[i], args...);
    }
};

// A parameterless activation fixed at compile time. A call costs more than 15 inlined instructions: where a thread has
// many accumulators, each of the longer activations has its own kernel.
template <class Function>
struct Always {
    template <class Y, int V>
    __device__ __forceinline__ void apply(float (&v)[V]) const {
#pragma unroll
        for (int i = 0; i < V; ++i) v[i] = StoredAs<Y, Function>::type::apply(v[i]);
    }
};
// Either kind of activation, from the kernel arguments.
template <class Act>
__device__ __forceinline__ Act activation_of(u32 code, u32 a_bits, u32 b_bits) {
    if constexpr (is_same<Act, Activation>) return {code, __uint_as_float(a_bits), __uint_as_float(b_bits)};
    else return {};
}

// -- epilogue of CUDA-core kernels ----------------------------------------------------------------------------------

// Not inlined: a thread has many accumulators, and a copy per accumulator would be most of the kernel.
template <class Y>
__device__ __noinline__ void finish_one(float v, Y* y, const Activation activation) {
    float one[1] = {v};
    activation.apply<Y>(one);
    store1(y, one[0]);
}

// Epilogue for V contiguous elements of a row of y, of which `left` exist: bias, activation, store.
template <int V, class Acc, class Y>
__device__ __forceinline__ void finish(const Acc (&sums)[V], Y* y, const float* bias, long long left, bool is_aligned,
                                       const Activation& activation) {
    float v[V];
#pragma unroll
    for (int i = 0; i < V; ++i) {
        v[i] = static_cast<float>(sums[i]);
        if (bias != nullptr && i < left) v[i] += bias[i];
    }
    if (activation.code <= 1 && is_aligned && left >= V) {
        if (activation.code == 1) {
#pragma unroll
            for (int i = 0; i < V; ++i) v[i] = ReLU::apply(v[i]);
        }
        store_vector(y, v);
    } else {
#pragma unroll
        for (int i = 0; i < V; ++i)
            if (i < left) finish_one(v[i], y + i, activation);
    }
}

template <int V, class Y, class Function>
__device__ __forceinline__ void finish(const float (&sums)[V], Y* y, const float* bias, long long left, bool is_aligned,
                                       const Always<Function>& activation) {
    float v[V];
#pragma unroll
    for (int i = 0; i < V; ++i) v[i] = sums[i] + (bias != nullptr && i < left ? bias[i] : 0.0f);
    activation.template apply<Y>(v);
    if (is_aligned && left >= V) {
        store_vector(y, v);
    } else {
#pragma unroll
        for (int i = 0; i < V; ++i)
            if (i < left) store1(y + i, v[i]);
    }
}

// Not inlined, for the same reason as finish_one.
template <class Y = float>
__device__ __noinline__ float4 activated(float4 v, const Activation activation) {
    float four[4] = {v.x, v.y, v.z, v.w};
    activation.apply<Y>(four);
    return {four[0], four[1], four[2], four[3]};
}

// Applies the activation to V float accumulators; double accumulators have none.
template <class Y, class Element, int V>
__device__ __forceinline__ void finish_sums(Element (&v)[V], const Activation& activation) {
    if constexpr (is_same<Element, float>) {
        if (activation.code == 1) {
#pragma unroll
            for (int i = 0; i < V; ++i) v[i] = ReLU::apply(v[i]);
        } else if (activation.code > 1) {
#pragma unroll
            for (int i = 0; i < V; i += 4) {
                const float4 four = activated<Y>({v[i], v[i + 1], v[i + 2], v[i + 3]}, activation);
                v[i] = four.x, v[i + 1] = four.y, v[i + 2] = four.z, v[i + 3] = four.w;
            }
        }
    }
}

// -- epilogue of tensor-core kernels --------------------------------------------------------------------------------

template <class Y, int J, class Function>
__device__ __forceinline__ void activate_all(float (&c)[J][4], const Always<Function>& activation) {
#pragma unroll
    for (int j = 0; j < J; ++j) activation.template apply<Y>(c[j]);
}
template <class Y, int J>
__device__ __forceinline__ void activate_all(float (&c)[J][4], const Activation& activation) {
    if (activation.code == 1) {
#pragma unroll
        for (int i = 0; i < 4 * J; ++i) c[i / 4][i % 4] = ReLU::apply(c[i / 4][i % 4]);
    } else if (activation.code > 1) {
#pragma unroll
        for (int j = 0; j < J; ++j) {
            const float4 four = activated<Y>({c[j][0], c[j][1], c[j][2], c[j][3]}, activation);
            c[j][0] = four.x, c[j][1] = four.y, c[j][2] = four.z, c[j][3] = four.w;
        }
    }
}

// 4 x 4 transpose over four adjacent lanes: each lane holds one word of each of four vectors; lane q gets vector q.
__device__ __forceinline__ void transpose_words(u32 (&words)[4], int q) {
    const bool is_odd = q & 1, is_upper = q & 2;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const u32 received = __shfl_xor_sync(~0u, is_odd ? words[i] : words[i + 1], 1);
        (is_odd ? words[i] : words[i + 1]) = received;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const u32 received = __shfl_xor_sync(~0u, is_upper ? words[i] : words[i + 2], 2);
        (is_upper ? words[i] : words[i + 2]) = received;
    }
}

// The same for float32: each lane holds a 64-bit pair of each of two column groups and gets one 16-byte vector.
__device__ __forceinline__ void transpose_pairs(u32 (&words)[4], int q) {
#pragma unroll
    for (int by = 2; by > 0; --by) {
        const bool is_second = q & by;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const u32 received = __shfl_xor_sync(~0u, is_second ? words[i] : words[2 + i], by);
            (is_second ? words[i] : words[2 + i]) = received;
        }
    }
}

// The lane's 16-byte vector of the 64 bytes of a row, from column 8 j on, that four lanes hold.
template <class Y, int J>
__device__ __forceinline__ uint4 row_vector(const float (&c)[J][4], int j, int half, int q) {
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if constexpr (sizeof(Y) == 2) words[i] = pack<Y>(c[j + i][2 * half], c[j + i][2 * half + 1]);
        else words[i] = __float_as_uint(c[j + i / 2][2 * half + i % 2]);
    }
    if constexpr (sizeof(Y) == 2) transpose_words(words, q);
    else transpose_pairs(words, q);
    return {words[0], words[1], words[2], words[3]};
}

// Stores the accumulators of two rows that begin at rows[half], from column n on. L2 takes as long for 16 bytes as for
// a 128-byte line, so the lanes of two rows write a full line of one row, then of the other. N: a multiple of a vector.
template <int BN, class Out>
__device__ __forceinline__ void store_lines(const float (&c)[BN / 8][4], const Out& out, const long long (&rows)[2],
                                            long long n, int q) {
    using Y = typename Out::Element;
    constexpr int LANE = 16 / static_cast<int>(sizeof(Y)), GROUPS = LANE / 2;  // column groups of 8 per 64 bytes
    const bool is_odd = threadIdx.x & 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if constexpr (BN / 8 % (2 * GROUPS) == 0) {
            const long long swapped = __shfl_xor_sync(~0u, rows[half], 4);
            const long long first = is_odd ? swapped : rows[half], second = is_odd ? rows[half] : swapped;
#pragma unroll
            for (int j = 0; j < BN / 8; j += 2 * GROUPS) {
                const uint4 a = row_vector<Y>(c, j, half, q), b = row_vector<Y>(c, j + GROUPS, half, q);
                const uint4 sent = is_odd ? a : b;
                const uint4 received = {__shfl_xor_sync(~0u, sent.x, 4), __shfl_xor_sync(~0u, sent.y, 4),
                                     __shfl_xor_sync(~0u, sent.z, 4), __shfl_xor_sync(~0u, sent.w, 4)};
                const long long column = n + 8 * (is_odd ? j + GROUPS : j) + LANE * q;
                const bool is_valid = column < out.N;
                if (is_valid && first >= 0) *reinterpret_cast<uint4*>(out.y + first + column) = is_odd ? received : a;
                if (is_valid && second >= 0) *reinterpret_cast<uint4*>(out.y + second + column) = is_odd ? b : received;
            }
        } else {
#pragma unroll
            for (int j = 0; j < BN / 8; j += GROUPS) {
                const uint4 vector = row_vector<Y>(c, j, half, q);
                const long long column = n + 8 * j + LANE * q;
                if (rows[half] >= 0 && column < out.N) *reinterpret_cast<uint4*>(out.y + rows[half] + column) = vector;
            }
        }
    }
}

// Contiguous rows of y (M, N), and the residual (M, N) added to them, or nullptr.
template <class Y>
struct RowsOut {
    using Element = Y;
    Y* y;
    long long M, N;
    const Y* residual = nullptr;

    __device__ __forceinline__ void begin_tile(u32) {}
    // Offset of row m; negative if it is out of range.
    __device__ __forceinline__ long long row(long long m) const { return m < M ? m * N : -1; }
};

// Epilogue of a warp's accumulators: per lane, BN columns from n on of rows m and m + 8 (layout: mma/wgmma.cuh). Adds
// the bias and the residual, applies the activation, stores. Called by all lanes; q is lane % 4.
// smem_bias  the bias of these columns, or zeros
template <int BN, class Out, class Act>
__device__ __forceinline__ void finish_rows(float (&c)[BN / 8][4], const Out& out, const float* smem_bias, long long m,
                                            long long n, int q, const Act& activation) {
    using Y = typename Out::Element;
    const long long N = out.N, rows[2] = {out.row(m), out.row(m + 8)};
    const bool has_pairs = N % 2 == 0;
#pragma unroll
    for (int j = 0; j < BN / 8; ++j) {
        const float2 column_bias = *reinterpret_cast<const float2*>(smem_bias + 8 * j + 2 * q);
        c[j][0] += column_bias.x, c[j][1] += column_bias.y, c[j][2] += column_bias.x, c[j][3] += column_bias.y;
    }
    if (out.residual != nullptr) {  // every path writes the accumulators, or the compiler serialises their wgmma
#pragma unroll
        for (int i = 0; i < BN / 4; ++i) {
            const int half = i % 2, column = i / 2 * 8 + 2 * q;
            const Y* const from = out.residual + rows[half] + n + column;
            float2 two = {};
            if (rows[half] >= 0 && n + column < N) {
                if (has_pairs) two = load2(from);
                else two = {to_float(from[0]), n + column + 1 < N ? to_float(from[1]) : 0.0f};
            }
            c[i / 2][2 * half] += two.x, c[i / 2][2 * half + 1] += two.y;
        }
    }
    activate_all<Y>(c, activation);
    constexpr int LANE = 16 / static_cast<int>(sizeof(Y));  // elements per lane
    if (N % LANE == 0) {
        store_lines<BN>(c, out, rows, n, q);
        return;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const bool is_valid = rows[half] >= 0;
        Y* const to = out.y + rows[half] + n;
        if (!is_valid) continue;
#pragma unroll
        for (int j = 0; j < BN / 8; ++j) {
            const int column = 8 * j + 2 * q;
            const float two[2] = {c[j][2 * half], c[j][2 * half + 1]};
            if (has_pairs && n + column < N) {
                store_vector(to + column, two);
            } else {
                if (n + column < N) store1(to + column, two[0]);
                if (n + column + 1 < N) store1(to + column + 1, two[1]);
            }
        }
    }
}
