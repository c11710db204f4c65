// recurrent/gradient_resident.cu: back through an LSTM, GRU or RNN over few sequences, all time steps in one launch;
// recurrent weights stay in registers.
//
// Idea    A warp owns U units of NS sequences. Its lanes hold the weights from all G H gates to these units, 4 * CHUNKS
//         gates per lane, and multiply the gates' gradients by them; a shuffle tree leaves each lane one unit of one
//         sequence. The gradients of its gates go to one of two buffers in every block of the cluster (DSMEM); one
//         barrier ends the step. Lanes with the same unit each compute the activations of a different step, between
//         arrive and wait. An LSTM first computes its cells, without products.
// Floor   Latency: S * (cluster barrier and DSMEM round trip + K terms + tree). LSTM, H = 128: 64 FFMAs per lane, 6
//         shuffles and a barrier per step, an estimated 0.7 us. 64 sequences of 64 steps move 31 MB: 6.6 us.
// Order   K (unit, gate): a lane's elements in order, then a tree over lanes. Depends on G and H alone.
// Layout  As in recurrent/gradient.cu.
// Shared  2 * NS * 128 * CHUNKS floats: 4 KB for an LSTM of 128 units and one sequence.
// Limits  G H <= 128 * CHUNKS; U * NS <= 32, powers of 2; no GruBefore: its reset needs a second product; float32,
//         float16, bfloat16; blocks > 1 from sm_90 on, else sm_80 up.
#include "mma/cluster.cuh"
#include "recurrent/gradient.cuh"
#include "recurrent/slices.cuh"

// What a lane reads of a step.
template <class Cell>
struct StepInputs {
    float x[GATES<Cell>], h[GATES<Cell>];  // gate pre-activations from the input, and from the states before
    float dy, state, c;                    // state, c: before the step
};

template <class Cell>
__device__ __forceinline__ Derivatives<Cell, float> shuffle(const Derivatives<Cell, float>& d, int lane) {
    Derivatives<Cell, float> v;
#pragma unroll
    for (int g = 0; g < OUT_GATES<Cell>; ++g) v.gates[g] = __shfl_sync(~0u, d.gates[g], lane);
    if constexpr (is_same<Cell, Lstm>) v.cell = __shfl_sync(~0u, d.cell, lane);
    if constexpr (is_same<Cell, Lstm> || IS_GRU<Cell>) v.carry = __shfl_sync(~0u, d.carry, lane);
    return v;
}

// blocks  per cluster
// of_last  0: dy is of every step, 1: of the last h, 2: of the last c
// index   y is 0: the gradients of the gates, 1: of the initial h, 2: of the initial c
template <class Cell, class T, int CHUNKS, int U, int NS, int MAX_THREADS>
__global__ void __launch_bounds__(MAX_THREADS)
    recurrent_grad_resident(const __grid_constant__ Arrays<T> arrays, long long N, long long S, u32 D, int H,
                            u32 blocks, u32 backwards, u32 of_last, u32 index) {
    constexpr bool IS_LSTM = is_same<Cell, Lstm>;
    constexpr int G = GATES<Cell>, OUT = OUT_GATES<Cell>, PADDED = 128 * CHUNKS;
    constexpr int PAIRS = U * NS, REPLICAS = 32 / PAIRS;  // lanes with the same unit and sequence
    __shared__ __align__(16) float gates[2][NS][PADDED];
    const int lane = threadIdx.x % 32, replica = lane % REPLICAS, pair = lane / REPLICAS;
    const int first_unit = (cluster_rank() * (blockDim.x / 32) + threadIdx.x / 32) * U, unit = first_unit + pair % U;
    const u32 d = blockIdx.x / blocks % D;
    const long long n = static_cast<long long>(blockIdx.x / blocks / D) * NS + pair / U;
    const bool has_unit = unit < H, is_valid = has_unit && n < N, reverse = backwards || d == 1;
    const long long of_state = (n * D + d) * H + unit;

    float weights[CHUNKS][4][U];
#pragma unroll
    for (int i = 0; i < 4 * CHUNKS; ++i) {
        const int k = 4 * (32 * (i / 4) + lane) + i % 4;
        const float* const row = arrays.R + ((static_cast<long long>(d) * G + k % G) * H + k / G) * H + first_unit;
#pragma unroll
        for (int u = 0; u < U; ++u) weights[i / 4][i % 4][u] = k < G * H && first_unit + u < H ? row[u] : 0.0f;
    }
    for (int i = threadIdx.x; i < 2 * NS * PADDED; i += blockDim.x)
        gates[i / (NS * PADDED)][i / PADDED % NS][i % PADDED] = 0.0f;  // those past G H stay 0

    const long long of_cells = (n * D + d) * S * H + unit, x_step = static_cast<long long>(D) * G * H;
    const auto load_gates = [&](long long k) {
        StepInputs<Cell> step = {};
        if (!is_valid || k < 0 || k >= S) return step;
        const long long at = n * S + (reverse ? S - 1 - k : k);
        const T *const x = arrays.x + at * x_step + d * G * H + unit, *const h = arrays.sums[d] + at * G * H + unit;
#pragma unroll
        for (int g = 0; g < G; ++g) step.x[g] = load_acc(x + g * H), step.h[g] = load_acc(h + g * H);
        return step;
    };
    const float first_c = IS_LSTM && arrays.first_c && is_valid ? load_acc(arrays.first_c + of_state) : 0.0f;
    if constexpr (IS_LSTM) {
        float c = first_c;
        StepInputs<Cell> next = load_gates(replica);
        for (long long k = replica; k - replica < S; k += REPLICAS) {
            const CellStep<float> step = cell_step(next.x, next.h);
            next = load_gates(k + REPLICAS);
            float own = 0.0f;
#pragma unroll
            for (int r = 0; r < REPLICAS; ++r) {
                const int from = lane - replica + r;
                c = fmaf(__shfl_sync(~0u, step.forget, from), c, __shfl_sync(~0u, step.added, from));
                own = r == replica ? c : own;
            }
            if (is_valid && k < S) arrays.cells[of_cells + k * H] = own;
        }
    }

    const auto load = [&](long long k) {
        StepInputs<Cell> step = load_gates(k);
        if (!is_valid || k < 0) return step;
        const long long at = n * S + (reverse ? S - 1 - k : k);
        if (of_last == 0) step.dy = load_acc(arrays.dy + (at * D + d) * H + unit);
        else if (of_last == 1 && k == S - 1) step.dy = load_acc(arrays.dy + of_state);
        if constexpr (IS_GRU<Cell>) step.state = load_acc(arrays.before[d] + at * H + unit);
        if constexpr (IS_LSTM) step.c = k > 0 ? arrays.cells[of_cells + (k - 1) * H] : first_c;
        return step;
    };
    const auto product = [&](const float (&v)[NS][PADDED]) {
        float sums[1][PAIRS];
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) sums[0][i] = 0.0f;
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i)
#pragma unroll
            for (int r = 0; r < NS; ++r) {
                const float4 four = *reinterpret_cast<const float4*>(&v[r][4 * (32 * i + lane)]);
                const float gate[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                for (int j = 0; j < 4; ++j)
#pragma unroll
                    for (int u = 0; u < U; ++u)
                        sums[0][r * U + u] = fmaf(weights[i][j][u], gate[j], sums[0][r * U + u]);
            }
        reduce_slices<PAIRS, 16>(sums, lane);
        return sums[0][0];
    };
    const auto wait = [&] {
        if (blocks > 1) cluster_wait();
        else __syncthreads();
    };

    const float inner = is_same<Cell, GruAfter> && arrays.bias && has_unit ? arrays.bias[d * H + unit] : 0.0f;
    float carried = IS_LSTM && of_last == 2 && is_valid ? load_acc(arrays.dy + of_state) : 0.0f, dy = 0.0f;
    T* y = arrays.y + ((n * S + (reverse ? 0 : S - 1)) * D + d) * OUT * H + unit;
    const long long y_step = (reverse ? 1 : -1) * static_cast<long long>(D) * OUT * H;
    if (blocks > 1) cluster_arrive();
    wait();  // blocks have started, cells are stored
    StepInputs<Cell> next = load(S - 1 - replica);
    Derivatives<Cell, float> own;
    for (long long k = S - 1, r = 0; k >= 0; --k, r = r + 1 == REPLICAS ? 0 : r + 1) {
        if (r == 0) {
            own = derivatives_of<Cell>(next.x, next.h, inner, next.state, next.c);
            dy = next.dy;
            next = load(k - REPLICAS - replica);
        }
        const int from = lane - replica + static_cast<int>(r);
        const Derivatives<Cell, float> step = shuffle(own, from);
        float dh = __shfl_sync(~0u, dy, from), out[OUT];
        if constexpr (IS_GRU<Cell>) dh += carried;
        if (k < S - 1) {
            wait();
            dh += product(gates[(k + 1) % 2]);
        }
        step_back(step, dh, carried, out);
        if (has_unit) {
            float* const to = &gates[k % 2][pair / U][unit * G];
            if (blocks == 1 && replica == 0) {
#pragma unroll
                for (int g = 0; g < G; ++g) to[g] = out[g];
            }
            for (u32 block = replica; blocks > 1 && block < blocks; block += REPLICAS) {
                if constexpr (G == 4) {
                    dsmem_store4(to, block, {out[0], out[1], out[2], out[3]});
                } else {
#pragma unroll
                    for (int g = 0; g < G; ++g) dsmem_store(to + g, block, out[g]);
                }
            }
        }
        if (blocks > 1) cluster_arrive();
        if (index == 0 && is_valid && replica == 0) {
#pragma unroll
            for (int g = 0; g < OUT; ++g) store_acc(y + g * H, out[g]);
        }
        y += y_step;
    }
    wait();
    if (index == 0) return;
    const float of_first = index == 2 ? carried : (IS_GRU<Cell> ? carried : 0.0f) + product(gates[0]);
    if (is_valid && replica == 0) store_acc(arrays.y + of_state, of_first);
}
