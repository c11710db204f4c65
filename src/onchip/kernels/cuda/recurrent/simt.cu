// recurrent/simt.cu: LSTM, GRU or RNN on the CUDA cores, all time steps in one launch.
//
// Idea    A block steps through some sequences of one direction; their states stay in shared memory. A thread computes
//         the gates of a unit for ROWS sequences: each recurrent weight loaded (L1/L2) serves ROWS FFMAs, each state
//         loaded (shared memory) serves all gates. The input gemm is a separate kernel; its output is prefetched to L2
//         one step ahead.
// Floor   2 G H^2 flop per sequence, step and direction: 4,096 sequences of 64 steps, LSTM, H = 128: 34.4 Gflop /
//         67 Tflop/s = 513 us; x and y are 671 MB in float32, 140 us at 4.8 TB/s. Few sequences: each block reads all
//         of R, 262 KB here, per step.
// Order   Units in order, in partial sums of CHUNK added in order; then the input is added. Independent of ROWS.
// Layout  x (N, S, D, G, H); initial states (N, D, H) or null; y (N, S, D, H), or (N, D, H) for the last step; gates
//         as in network/layers/recurrent.py. R (D, H from, H to, G); GruBefore: z, r (D, H, H, 2), then n (D, H, H).
// Shared  2 H * sequences of the block for the states, and H * sequences for cells or z.
// Limits  Run-time sizes; float32, float16, bfloat16 accumulate in float32, float64 in float64; H up to 19,370 with
//         227 KB, half of that in float64; sm_80 up.
#include "recurrent/cells.cuh"

constexpr int THREADS = 256, CHUNK = 64;

// total[g][r] = sum over k of R[k][u][g] h[k][r]
template <class W, int G, int ROWS>
__device__ __forceinline__ void sum_units(W (&total)[G][ROWS], const W* R, const W* h, int H, int u,
                                          int stride) {
#pragma unroll
    for (int g = 0; g < G; ++g)
#pragma unroll
        for (int r = 0; r < ROWS; ++r) total[g][r] = 0;
    const W* from = R + static_cast<long long>(u) * G;
    const long long step = static_cast<long long>(H) * G;
    for (int begin = 0; begin < H; begin += CHUNK) {
        const int end = begin + CHUNK < H ? begin + CHUNK : H;
        W partial[G][ROWS];
#pragma unroll
        for (int g = 0; g < G; ++g)
#pragma unroll
            for (int r = 0; r < ROWS; ++r) partial[g][r] = 0;
#pragma unroll 4
        for (int k = begin; k < end; ++k, from += step, h += stride) {
            alignas(16) W w[G], v[ROWS];
            load_vectors(w, from);
            load_vectors(v, h);
#pragma unroll
            for (int g = 0; g < G; ++g)
#pragma unroll
                for (int r = 0; r < ROWS; ++r) partial[g][r] = multiply_add(w[g], v[r], partial[g][r]);
        }
#pragma unroll
        for (int g = 0; g < G; ++g)
#pragma unroll
            for (int r = 0; r < ROWS; ++r) total[g][r] += partial[g][r];
    }
}

// lanes      threads that share the units of ROWS sequences, a power of 2; a block has THREADS / lanes such groups
// backwards  direction 0 runs from the last step to the first; direction 1 always does
// output     0: every step, 1: the last state, 2: the last cell
template <class Cell, class T, int ROWS>
__global__ void __launch_bounds__(THREADS)
    recurrent(const T* x, const acc_t<T>* R, const acc_t<T>* bias, const T* first_h, const T* first_c, T* y,
              long long N, long long S, unsigned D, unsigned units, unsigned lanes, unsigned backwards,
              unsigned output) {
    using W = acc_t<T>;
    constexpr bool IS_LSTM = is_same<Cell, Lstm>, RESETS_FIRST = is_same<Cell, GruBefore>;
    constexpr int G = GATES<Cell>, PASS_GATES = RESETS_FIRST ? 2 : G;  // gates; those summed in one pass
    extern __shared__ uint4 smem[];
    const int H = units, stride = THREADS / lanes * ROWS;  // sequences of the block
    const int lane = threadIdx.x % lanes, base = threadIdx.x / lanes * ROWS;  // first sequence of the thread
    W* h = reinterpret_cast<W*>(smem);
    W* next = h + H * stride;
    W* saved = next + H * stride;  // cells, or z of a GruBefore
    const unsigned d = blockIdx.x % D;
    const long long begin = blockIdx.x / D * static_cast<long long>(stride) + base;
    const long long left = N - begin;  // valid sequences from `begin` on
    const long long x_step = static_cast<long long>(D) * G * H;
    const bool is_reverse = backwards || d == 1;
    x += (begin * S * D + d) * G * H;
    const long long square = static_cast<long long>(H) * H;
    const W* const candidate_R = R + (PASS_GATES * D + d) * square;  // n of a GruBefore
    R += d * PASS_GATES * square;

    for (int u = lane; u < H; u += lanes)
        for (int r = 0; r < ROWS; ++r) {
            const long long from = ((begin + r) * D + d) * H + u;
            h[u * stride + base + r] = first_h && r < left ? load_acc(first_h + from) : W(0);
            if constexpr (IS_LSTM) saved[u * stride + base + r] = first_c && r < left ? load_acc(first_c + from) : W(0);
        }
    __syncthreads();

    for (long long step = 0; step < S; ++step) {
        const long long s = is_reverse ? S - 1 - step : step;
        const T* input = x + s * x_step;
        const T* next_input = step + 1 < S ? input + (is_reverse ? -x_step : x_step) : input;
        for (int u = lane; u < H; u += lanes) {
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
                if (r < left)
#pragma unroll
                    for (int g = 0; g < G; ++g) prefetch(next_input + r * S * x_step + g * H + u);
            alignas(16) W total[PASS_GATES][ROWS];
            sum_units(total, R, h + base, H, u, stride);
            const W inner_bias = is_same<Cell, GruAfter> && bias ? bias[d * H + u] : W(0);
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                W v[G];
#pragma unroll
                for (int g = 0; g < G; ++g) v[g] = r < left ? load_acc(input + r * S * x_step + g * H + u) : W(0);
                const int at = u * stride + base + r;
                if constexpr (RESETS_FIRST) {
                    saved[at] = exact_sigmoid(v[0] + total[0][r]);
                    next[at] = exact_sigmoid(v[1] + total[1][r]) * h[at];
                } else {
                    W sums[G], cell = IS_LSTM ? saved[at] : W(0);
#pragma unroll
                    for (int g = 0; g < G; ++g) sums[g] = total[g][r];
                    next[at] = next_state<Cell>(v, sums, inner_bias, h[at], cell);
                    if constexpr (IS_LSTM) saved[at] = cell;
                }
            }
        }
        __syncthreads();
        if constexpr (RESETS_FIRST) {  // n, from r h; each thread reads and writes only its own units' states
            for (int u = lane; u < H; u += lanes) {
                alignas(16) W total[1][ROWS];
                sum_units(total, candidate_R, next + base, H, u, stride);
#pragma unroll
                for (int r = 0; r < ROWS; ++r) {
                    const W v = r < left ? load_acc(input + r * S * x_step + 2 * H + u) : W(0);
                    const int at = u * stride + base + r;
                    h[at] = multiply_add(saved[at], h[at], (W(1) - saved[at]) * exact_tanh(v + total[0][r]));
                }
            }
            __syncthreads();
        } else {
            W* previous = h;
            h = next;
            next = previous;
        }
        if (output == 0)
            for (int u = lane; u < H; u += lanes)
                for (int r = 0; r < ROWS && r < left; ++r)
                    store_acc(y + (((begin + r) * S + s) * D + d) * H + u, h[u * stride + base + r]);
    }
    if (output != 0)
        for (int u = lane; u < H; u += lanes)
            for (int r = 0; r < ROWS && r < left; ++r)
                store_acc(y + ((begin + r) * D + d) * H + u, (output == 2 ? saved : h)[u * stride + base + r]);
}
