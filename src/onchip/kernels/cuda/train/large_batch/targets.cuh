// train/large_batch/targets.cuh: targets, loss and output gradients of the rows that a block runs through all layers.
#pragma once

#include "train/large_batch/epilogue.cuh"
#include "train/large_batch/layers.cuh"

// A layer's width and activation.
template <int N_, u32 CODE_>
struct LayerSpec {
    static constexpr int N = N_;
    static constexpr u32 CODE = CODE_;
};

// A block's current tile of rows.
template <int ROWS>
struct TileRows {
    int first, size;  // first row of the tile; rows of the step

    __device__ __forceinline__ int count() const { return size - first < ROWS ? size - first : ROWS; }
};

// Targets and losses of a thread's rows; LANES lanes share a row. N_THREADS threads of a block share the rows.
template <int ROWS, int N_THREADS, u32 LOSS, int N, u32 CODE, int LANES = (N > 16 || N_THREADS > 16 * ROWS ? 32 : 16)>
struct Targets {
    static constexpr int AT_ONCE = N_THREADS / LANES, ROUNDS = ROWS / AT_ONCE, PER_LANE = (N + LANES - 1) / LANES;
    static constexpr bool HAS_CLASSES = LOSS == CROSS_ENTROPY;
    static_assert(ROUNDS * AT_ONCE == ROWS, "the lanes divide the rows");
    int truth[ROUNDS], best[ROUNDS];
    float target[ROUNDS][PER_LANE], weight[ROUNDS], total[ROUNDS], log_share[ROUNDS];

    static __device__ __forceinline__ int row(int round) { return threadIdx.x % N_THREADS / LANES + round * AT_ONCE; }
    static __device__ __forceinline__ int output(int i) { return threadIdx.x % LANES + i * LANES; }
    __device__ __forceinline__ void load(const Step& step, const RowLayers& layers, const TileRows<ROWS>& rows) {
        long long row_ids[ROUNDS];
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i)
            row_ids[i] = step.rows()[rows.first + row(i) < rows.size ? rows.first + row(i) : rows.size - 1];
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) {
            truth[i] = HAS_CLASSES ? static_cast<int>(static_cast<const long long*>(layers.targets)[row_ids[i]]) : 0;
#pragma unroll
            for (int j = 0; j < PER_LANE; ++j) {
                const float* const targets = static_cast<const float*>(layers.targets) + row_ids[i] * N;
                target[i][j] = !HAS_CLASSES && output(j) < N ? targets[output(j)] : 0.0f;
            }
            weight[i] = row(i) >= rows.count() ? 0.0f : layers.weights ? step.local(layers.weights)[row_ids[i]] : 1.0f;
        }
    }
    // Replaces a row's outputs z, PER_LANE per lane, by their gradients.
    __device__ __forceinline__ void to_gradient(int i, const RowLayers& layers, u32 slope, float* z) {
        float out[PER_LANE], gradient[PER_LANE];
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j) out[j] = output(j) < N ? z[output(j)] : 0.0f;
        total[i] = 0.0f;
        if constexpr (HAS_CLASSES) {
            float top = __uint_as_float(0xff800000u), at_truth = 0.0f;
            best[i] = N;
#pragma unroll
            for (int j = 0; j < PER_LANE; ++j) {
                if (output(j) < N && (best[i] == N || out[j] > top)) top = out[j], best[i] = output(j);
                if (output(j) == truth[i]) at_truth = out[j];
            }
            argmax_lanes<LANES>(top, best[i], N);
            float shifted_sum = 0.0f;
#pragma unroll
            for (int j = 0; j < PER_LANE; ++j) {
                gradient[j] = output(j) < N ? expf(out[j] - top) : 0.0f;
                total[i] += gradient[j], shifted_sum += output(j) < N ? out[j] - top : 0.0f;
            }
            total[i] = reduce_lanes<Sum, LANES>(total[i]);
            const float soft = layers.smoothing / N;
#pragma unroll
            for (int j = 0; j < PER_LANE; ++j)
                gradient[j] = gradient[j] / total[i] - (output(j) == truth[i] ? 1.0f - layers.smoothing + soft : soft);
            log_share[i] = (1.0f - layers.smoothing) * (__shfl_sync(~0u, at_truth, truth[i] % LANES, LANES) - top);
            if (layers.smoothing > 0.0f) log_share[i] += soft * reduce_lanes<Sum, LANES>(shifted_sum);
        } else {
#pragma unroll
            for (int j = 0; j < PER_LANE; ++j) {
                const float difference = out[j] - target[i][j];  // 0 past the outputs
                gradient[j] = act_grad(CODE, __uint_as_float(slope), difference, out[j]);
                total[i] += difference * difference;
            }
            total[i] = reduce_lanes<Sum, LANES>(total[i]);
        }
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j)
            if (output(j) < N) z[output(j)] = weight[i] * gradient[j];
    }
    // Stores losses and correct predictions.
    __device__ __forceinline__ void store_losses(const Step& step, const RowLayers& layers,
                                                 const TileRows<ROWS>& rows) const {
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) {
            if (row(i) >= rows.count() || threadIdx.x % LANES > 0) continue;
            step.local(layers.losses)[rows.first + row(i)] = loss(i);
            step.local(layers.correct)[rows.first + row(i)] = HAS_CLASSES && best[i] == truth[i];
        }
    }
    // Also stores the gradients in z, with row pitch `pitch`.
    __device__ __forceinline__ void store(const Step& step, const RowLayers& layers, const TileRows<ROWS>& rows,
                                          float* dz, int stride, const float* z, int pitch) const {
        store_losses(step, layers, rows);
#pragma unroll
        for (int i = 0; i < ROUNDS * PER_LANE; ++i) {
            const int tile_row = row(i / PER_LANE), n = output(i % PER_LANE);
            const long long at = rows.first + tile_row;
            if (tile_row < rows.count() && n < N) step.local(dz)[at * stride + n] = z[tile_row * pitch + n];
        }
    }

private:
    __device__ __forceinline__ float loss(int i) const {
        if constexpr (HAS_CLASSES) return weight[i] * (logf(total[i]) - log_share[i]);
        else return weight[i] * total[i] * (LOSS == HALF_SSE ? 0.5f : 1.0f / N);
    }
};
