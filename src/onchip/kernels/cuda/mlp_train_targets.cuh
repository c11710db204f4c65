// mlp_train_targets.cuh: of rows that a block takes through all layers, what they should give, and how far off they are.
#pragma once

#include "mlp_train_finish.cuh"
#include "mlp_train_layers.cuh"

// What a layer gives: N numbers a row, by an activation.
template <int N_, u32 CODE_>
struct Gives {
    static constexpr int N = N_;
    static constexpr u32 CODE = CODE_;
};

// Rows that a block takes through at a time, as all threads know them.
template <int ROWS>
struct TileRows {
    int first, size;  // the first of the tile, and all of the step

    __device__ __forceinline__ int there() const { return size - first < ROWS ? size - first : ROWS; }
};

// Rows that a thread works out the loss of: LANES lanes have one. OF_BLOCK threads of a block take part.
template <int ROWS, int OF_BLOCK, u32 LOSS, int N, u32 CODE>
struct Targets {
    static constexpr int LANES = N > 16 || OF_BLOCK > 16 * ROWS ? 32 : 16;
    static constexpr int AT_ONCE = OF_BLOCK / LANES, TURNS = ROWS / AT_ONCE;
    static constexpr bool HAS_CLASSES = LOSS == CROSS_ENTROPY;
    static_assert(TURNS * AT_ONCE == ROWS, "all lanes have rows");
    long long number[TURNS];
    int truth[TURNS], best[TURNS];
    float weight[TURNS], total[TURNS], above[TURNS];

    static __device__ __forceinline__ int row(int turn) { return threadIdx.x / LANES + turn * AT_ONCE; }
    __device__ __forceinline__ void find(const Step& step, const RowLayers& layers, const TileRows<ROWS>& rows) {
#pragma unroll
        for (int i = 0; i < TURNS; ++i)
            number[i] = step.rows()[rows.first + row(i) < rows.size ? rows.first + row(i) : rows.size - 1];
#pragma unroll
        for (int i = 0; i < TURNS; ++i) {
            truth[i] = HAS_CLASSES ? static_cast<int>(static_cast<const long long*>(layers.targets)[number[i]]) : 0;
            weight[i] = row(i) >= rows.there() ? 0.0f : layers.weights ? step.mine(layers.weights)[number[i]] : 1.0f;
        }
    }
    // Of a row whose outputs are at `made`, a lane each: their gradients replace them.
    __device__ __forceinline__ void to_gradient(int i, const RowLayers& layers, u32 slope, float* made) {
        const int n = threadIdx.x % LANES;
        const float out = n < N ? made[n] : 0.0f;
        float gradient;
        if constexpr (HAS_CLASSES) {
            float most = n < N ? out : __uint_as_float(0xff800000u);
            best[i] = n < N ? n : N;
            join_largest<LANES>(most, best[i], N);
            const float share = n < N ? expf(out - most) : 0.0f, rest = layers.smoothing / N;
            total[i] = reduce_lanes<Sum, LANES>(share);
            gradient = share / total[i] - (n == truth[i] ? 1.0f - layers.smoothing + rest : rest);
            above[i] = (1.0f - layers.smoothing) * (__shfl_sync(~0u, out, truth[i], LANES) - most);
            if (layers.smoothing > 0.0f) above[i] += rest * reduce_lanes<Sum, LANES>(n < N ? out - most : 0.0f);
        } else {
            const float difference = n < N ? out - static_cast<const float*>(layers.targets)[number[i] * N + n] : 0.0f;
            gradient = through(CODE, __uint_as_float(slope), difference, out);
            total[i] = reduce_lanes<Sum, LANES>(difference * difference);
        }
        if (n < N) made[n] = weight[i] * gradient;
    }
    // Losses, hits and the gradients at `made`, `pitch` floats a row, to memory.
    __device__ __forceinline__ void store(const Step& step, const RowLayers& layers, const TileRows<ROWS>& rows, float* dz,
                                          int stride, const float* made, int pitch) const {
#pragma unroll
        for (int i = 0; i < TURNS; ++i) {
            const int lane = threadIdx.x % LANES;
            const long long at = rows.first + row(i);
            if (row(i) >= rows.there()) continue;
            if (lane == 0) {
                step.mine(layers.losses)[at] = loss(i);
                step.mine(layers.hits)[at] = HAS_CLASSES && best[i] == truth[i];
            }
            if (lane < N) step.mine(dz)[at * stride + lane] = made[row(i) * pitch + lane];
        }
    }

private:
    __device__ __forceinline__ float loss(int i) const {
        if constexpr (HAS_CLASSES) return weight[i] * (logf(total[i]) - above[i]);
        else return weight[i] * total[i] * (LOSS == HALF_SSE ? 0.5f : 1.0f / N);
    }
};
