// train/large_batch/targets.cuh: targets, loss and output gradients of the rows that a block runs through all layers.
#pragma once

#include "train/large_batch/epilogue.cuh"
#include "train/large_batch/layers.cuh"

// A layer's width and activation.
template <int N_, u32 CODE_>
struct Gives {
    static constexpr int N = N_;
    static constexpr u32 CODE = CODE_;
};

// A block's current tile of rows.
template <int ROWS>
struct TileRows {
    int first, size;  // first row of the tile; rows of the step

    __device__ __forceinline__ int there() const { return size - first < ROWS ? size - first : ROWS; }
};

// Targets and losses of a thread's rows; LANES lanes share a row. OF_BLOCK threads take part, or groups of that many in
// a larger block.
template <int ROWS, int OF_BLOCK, u32 LOSS, int N, u32 CODE, int LANES = (N > 16 || OF_BLOCK > 16 * ROWS ? 32 : 16)>
struct Targets {
    static constexpr int AT_ONCE = OF_BLOCK / LANES, TURNS = ROWS / AT_ONCE, EACH = (N + LANES - 1) / LANES;
    static constexpr bool HAS_CLASSES = LOSS == CROSS_ENTROPY;
    static_assert(TURNS * AT_ONCE == ROWS, "all lanes have rows");
    int truth[TURNS], best[TURNS];
    float wanted[TURNS][EACH], weight[TURNS], total[TURNS], above[TURNS];

    static __device__ __forceinline__ int row(int turn) { return threadIdx.x % OF_BLOCK / LANES + turn * AT_ONCE; }
    static __device__ __forceinline__ int output(int i) { return threadIdx.x % LANES + i * LANES; }
    __device__ __forceinline__ void find(const Step& step, const RowLayers& layers, const TileRows<ROWS>& rows) {
        long long number[TURNS];
#pragma unroll
        for (int i = 0; i < TURNS; ++i)
            number[i] = step.rows()[rows.first + row(i) < rows.size ? rows.first + row(i) : rows.size - 1];
#pragma unroll
        for (int i = 0; i < TURNS; ++i) {
            truth[i] = HAS_CLASSES ? static_cast<int>(static_cast<const long long*>(layers.targets)[number[i]]) : 0;
#pragma unroll
            for (int j = 0; j < EACH; ++j) {
                const float* const targets = static_cast<const float*>(layers.targets) + number[i] * N;
                wanted[i][j] = !HAS_CLASSES && output(j) < N ? targets[output(j)] : 0.0f;
            }
            weight[i] = row(i) >= rows.there() ? 0.0f : layers.weights ? step.mine(layers.weights)[number[i]] : 1.0f;
        }
    }
    // Replaces a row's outputs at `made`, EACH per lane, by their gradients.
    __device__ __forceinline__ void to_gradient(int i, const RowLayers& layers, u32 slope, float* made) {
        float out[EACH], gradient[EACH];
#pragma unroll
        for (int j = 0; j < EACH; ++j) out[j] = output(j) < N ? made[output(j)] : 0.0f;
        total[i] = 0.0f;
        if constexpr (HAS_CLASSES) {
            float most = __uint_as_float(0xff800000u), at_truth = 0.0f;
            best[i] = N;
#pragma unroll
            for (int j = 0; j < EACH; ++j) {
                if (output(j) < N && (best[i] == N || out[j] > most)) most = out[j], best[i] = output(j);
                if (output(j) == truth[i]) at_truth = out[j];
            }
            join_largest<LANES>(most, best[i], N);
            float all = 0.0f;
#pragma unroll
            for (int j = 0; j < EACH; ++j) {
                gradient[j] = output(j) < N ? expf(out[j] - most) : 0.0f;
                total[i] += gradient[j], all += output(j) < N ? out[j] - most : 0.0f;
            }
            total[i] = reduce_lanes<Sum, LANES>(total[i]);
            const float rest = layers.smoothing / N;
#pragma unroll
            for (int j = 0; j < EACH; ++j)
                gradient[j] = gradient[j] / total[i] - (output(j) == truth[i] ? 1.0f - layers.smoothing + rest : rest);
            above[i] = (1.0f - layers.smoothing) * (__shfl_sync(~0u, at_truth, truth[i] % LANES, LANES) - most);
            if (layers.smoothing > 0.0f) above[i] += rest * reduce_lanes<Sum, LANES>(all);
        } else {
#pragma unroll
            for (int j = 0; j < EACH; ++j) {
                const float difference = out[j] - wanted[i][j];  // 0 past the outputs
                gradient[j] = through(CODE, __uint_as_float(slope), difference, out[j]);
                total[i] += difference * difference;
            }
            total[i] = reduce_lanes<Sum, LANES>(total[i]);
        }
#pragma unroll
        for (int j = 0; j < EACH; ++j)
            if (output(j) < N) made[output(j)] = weight[i] * gradient[j];
    }
    // Stores losses and correct predictions.
    __device__ __forceinline__ void store_losses(const Step& step, const RowLayers& layers, const TileRows<ROWS>& rows) const {
#pragma unroll
        for (int i = 0; i < TURNS; ++i) {
            if (row(i) >= rows.there() || threadIdx.x % LANES > 0) continue;
            step.mine(layers.losses)[rows.first + row(i)] = loss(i);
            step.mine(layers.correct)[rows.first + row(i)] = HAS_CLASSES && best[i] == truth[i];
        }
    }
    // Also stores the gradients at `made`, with row pitch `pitch`.
    __device__ __forceinline__ void store(const Step& step, const RowLayers& layers, const TileRows<ROWS>& rows, float* dz,
                                          int stride, const float* made, int pitch) const {
        store_losses(step, layers, rows);
#pragma unroll
        for (int i = 0; i < TURNS * EACH; ++i) {
            const int of = row(i / EACH), n = output(i % EACH);
            const long long at = rows.first + of;
            if (of < rows.there() && n < N) step.mine(dz)[at * stride + n] = made[of * pitch + n];
        }
    }

private:
    __device__ __forceinline__ float loss(int i) const {
        if constexpr (HAS_CLASSES) return weight[i] * (logf(total[i]) - above[i]);
        else return weight[i] * total[i] * (LOSS == HALF_SSE ? 0.5f : 1.0f / N);
    }
};
