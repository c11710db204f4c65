// mlp/rows_out.cuh: epilogue of the last layer, from accumulators to rows of y.
#pragma once

#include "common/dtype.cuh"
#include "mlp/rows_in.cuh"
#include "common/softmax.cuh"

// Columns of the last layer are permuted so that each lane stores contiguous ones: of BLOCKS * 8 columns lane q has the
// 2 * BLOCKS from 2 * BLOCKS * q on, in its accumulator pairs of BLOCKS n-tiles. BLOCKS is 4, then 2 and 1 for the rest
// of NT. The host packs the rows of W in this order (mlp/packing.py).
template <int NT>
__device__ constexpr int blocks_at(int j) { return NT - j / 4 * 4 >= 4 ? 4 : NT - j / 2 * 2 >= 2 ? 2 : 1; }
template <int NT>
__device__ __forceinline__ int column_of(int j, int q, int i) {
    const int blocks = blocks_at<NT>(j);
    return j / blocks * blocks * 8 + 2 * blocks * q + j % blocks * 2 + i;
}
// Whether a lane's column is inside D. Mostly a compile-time constant.
template <int D, int NT>
__device__ __forceinline__ bool in_bounds(int j, int q, int i) {
    return (j / blocks_at<NT>(j) + 1) * blocks_at<NT>(j) * 8 <= D || column_of<NT>(j, q, i) < D;
}

// A row is spread over four lanes: each reduces its own columns in order, then a shuffle tree combines the four.
template <int D, int NT>
struct LanesRow {
    float (&c)[NT][4];
    int half, q;

    __device__ __forceinline__ float max() const {
        float max_value = -__uint_as_float(0x7F800000);
#pragma unroll
        for (int n = 0; n < 2 * NT; ++n)
            if (in_bounds<D, NT>(n / 2, q, n % 2)) max_value = fmaxf(max_value, c[n / 2][2 * half + n % 2]);
        max_value = fmaxf(max_value, __shfl_xor_sync(0xFFFFFFFF, max_value, 1));
        return fmaxf(max_value, __shfl_xor_sync(0xFFFFFFFF, max_value, 2));
    }
    template <class Function>
    __device__ __forceinline__ float sum(Function f) const {
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < 2 * NT; ++n)
            if (in_bounds<D, NT>(n / 2, q, n % 2)) sum += f(c[n / 2][2 * half + n % 2]);
        sum += __shfl_xor_sync(0xFFFFFFFF, sum, 1);
        return sum + __shfl_xor_sync(0xFFFFFFFF, sum, 2);
    }
    template <class Function>
    __device__ __forceinline__ void each(Function f) const {
#pragma unroll
        for (int n = 0; n < 2 * NT; ++n) c[n / 2][2 * half + n % 2] = f(c[n / 2][2 * half + n % 2]);
    }
};

// Stores the last layer's accumulators to y (left, D_out); rows from `left` on are masked.
template <class Layer, class Normaliser, class Out, int ROW_BYTES>
struct Store {
    static constexpr bool NEEDS_ROWS = !is_same<Normaliser, NoNormaliser>;
    Out* y;
    int left, g, q;

    // Stores D columns from `column` on.
    template <int D, int MT, int NT>
    __device__ __forceinline__ void store(const float (&sums)[MT][NT][4], int column) const {
#pragma unroll
        for (int i = 0; i < MT; ++i) {
            float v[NT][4];
#pragma unroll
            for (int j = 0; j < NT; ++j)
#pragma unroll
                for (int n = 0; n < 4; ++n) v[j][n] = Layer::Act::apply(sums[i][j][n]);
#pragma unroll
            for (int half = 0; half < 2; ++half) Normaliser::apply(LanesRow<D, NT>{v, half, q});
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = 16 * i + 8 * half + row_of<ROW_BYTES>(g);
                if (row < left) store_row<D, 0>(y + static_cast<long long>(row) * Layer::D_out + column, v, half);
            }
        }
    }

private:
    // A lane's columns of one row from block j on, in vector stores as wide as the group and the alignment of y allow.
    template <int D, int j, int NT>
    __device__ __forceinline__ void store_row(Out* row, const float (&v)[NT][4], int half) const {
        constexpr int BLOCKS = blocks_at<NT>(j);
        constexpr int V = vector_width<Out, Layer::D_out>(2 * BLOCKS);
        const int first = 8 * j + 2 * BLOCKS * q;
#pragma unroll
        for (int n = 0; n < 2 * BLOCKS; n += V) {
            if (8 * (j + BLOCKS) > D && first + n >= D) continue;
            float values[V];
#pragma unroll
            for (int i = 0; i < V; ++i) values[i] = v[j + (n + i) / 2][2 * half + (n + i) % 2];
            store_vector(row + first + n, values);
        }
        if constexpr (j + BLOCKS < NT) store_row<D, j + BLOCKS>(row, v, half);
    }
};
