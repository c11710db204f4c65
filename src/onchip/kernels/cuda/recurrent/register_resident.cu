// recurrent/register_resident.cu: LSTM, GRU or RNN over few sequences, all time steps in one launch; recurrent weights
// stay in registers.
//
// Idea    Each block of a cluster owns `units` units and holds their recurrent weights in registers from the first step
//         to the last. SLICES adjacent lanes share a unit: each multiplies CHUNKS * 4 states of NS sequences by all
//         gates' weights. A shuffle tree reduces the lanes' sums and leaves each lane one sequence. Its next state goes
//         to the shared memory of every block of the cluster (DSMEM); a barrier ends the step. The input gemm is a
//         separate kernel; its output is loaded one step ahead.
// Floor   Latency: one sequence of 64 steps of an LSTM of 128 units moves only 164 KB. A step is a chain of FFMAs,
//         three activations and a DSMEM round trip, some 0.5 us.
// Order   A lane's K elements in order, then a tree over lanes, then the input. Independent of NS and blocks.
// Layout  As in recurrent/simt.cu.
// Shared  2 * NS * 4 * SLICES * CHUNKS floats: 8 KB for 128 units and 8 sequences.
// Limits  H <= 4 * SLICES * CHUNKS; units * SLICES <= MAX_THREADS; no GruBefore; NS <= SLICES; float32, float16,
//         bfloat16; blocks > 1 from sm_90 on, else sm_80 up.
#include "mma/cluster.cuh"
#include "recurrent/cells.cuh"
#include "recurrent/slices.cuh"

// blocks   per cluster
// backwards  direction 0 runs from the last step to the first; direction 1 always does
// output   0: every step, 1: the last state, 2: the last cell
template <class Cell, class T, int SLICES, int CHUNKS, int NS, int MAX_THREADS>
__global__ void __launch_bounds__(MAX_THREADS)
    recurrent_register_resident(const T* x, const float* R, const float* bias, const T* first_h, const T* first_c, T* y,
                   long long N, long long S, unsigned D, int H, int units, unsigned blocks,
                   unsigned backwards, unsigned output) {
    constexpr int G = GATES<Cell>, PADDED = 4 * SLICES * CHUNKS, REPLICAS = SLICES / NS;  // lanes with the same sums
    static_assert(REPLICAS * NS == SLICES, "NS must divide SLICES");
    __shared__ __align__(16) float states[2][NS][PADDED];
    const int slice = threadIdx.x % SLICES, unit = cluster_rank() * units + threadIdx.x / SLICES;
    const bool has_unit = static_cast<int>(threadIdx.x) / SLICES < units && unit < H;
    const unsigned d = blockIdx.x / blocks % D;
    const long long first = static_cast<long long>(blockIdx.x / blocks / D) * NS, n = first + slice / REPLICAS;
    const bool is_valid = has_unit && n < N, reverse = backwards || d == 1;
    const long long x_step = static_cast<long long>(D) * G * H, start = reverse ? S - 1 : 0, sign = reverse ? -1 : 1;

    float weights[CHUNKS][4][G];
#pragma unroll
    for (int i = 0; i < 4 * CHUNKS; ++i) {
        const int k = 4 * (SLICES * (i / 4) + slice) + i % 4;
#pragma unroll
        for (int g = 0; g < G; ++g)
            weights[i / 4][i % 4][g] =
                has_unit && k < H ? R[((static_cast<long long>(d) * H + k) * H + unit) * G + g] : 0.0f;
    }
    for (int i = threadIdx.x; i < NS * PADDED; i += blockDim.x) {
        const int r = i / PADDED, k = i % PADDED;
        const bool has_initial = first_h != nullptr && k < H && first + r < N;
        states[0][r][k] = has_initial ? load_acc(first_h + ((first + r) * D + d) * H + k) : 0.0f;
        states[1][r][k] = 0.0f;
    }
    const long long offset = (n * D + d) * H + unit;
    float state = first_h != nullptr && is_valid ? load_acc(first_h + offset) : 0.0f;
    float cell = first_c != nullptr && is_valid ? load_acc(first_c + offset) : 0.0f;
    const float inner_bias = is_same<Cell, GruAfter> && bias != nullptr && has_unit ? bias[d * H + unit] : 0.0f;
    x += ((n * S + start) * D + d) * G * H + unit;
    y += ((n * S + start) * D + d) * H + unit;
    float x_gates[G], next_gates[G];
#pragma unroll
    for (int g = 0; g < G; ++g) next_gates[g] = is_valid ? load_acc(x + g * H) : 0.0f;
    if (blocks > 1) cluster_sync();
    else __syncthreads();

    for (long long step = 0; step < S; ++step) {
        x += sign * x_step;
#pragma unroll
        for (int g = 0; g < G; ++g) {
            x_gates[g] = next_gates[g];
            next_gates[g] = is_valid && step + 1 < S ? load_acc(x + g * H) : 0.0f;
        }
        float sums[G][NS];
#pragma unroll
        for (int i = 0; i < G * NS; ++i) sums[i / NS][i % NS] = 0.0f;
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i)
#pragma unroll
            for (int r = 0; r < NS; ++r) {
                const float4 four = *reinterpret_cast<const float4*>(&states[step % 2][r][4 * (SLICES * i + slice)]);
                const float h[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                for (int j = 0; j < 4; ++j)
#pragma unroll
                    for (int g = 0; g < G; ++g) sums[g][r] = fmaf(weights[i][j][g], h[j], sums[g][r]);
            }
        reduce_slices<NS, SLICES / 2>(sums, slice);
        float h_gates[G];
#pragma unroll
        for (int g = 0; g < G; ++g) h_gates[g] = sums[g][0];
        state = next_state<Cell>(x_gates, h_gates, inner_bias, state, cell);
        if (has_unit) {
            float* const to = &states[(step + 1) % 2][slice / REPLICAS][unit];
            if (blocks == 1 && slice % REPLICAS == 0) *to = state;
            for (unsigned block = slice % REPLICAS; blocks > 1 && block < blocks; block += REPLICAS)
                dsmem_store(to, block, state);
        }
        if (output == 0 && is_valid && slice % REPLICAS == 0) store_acc(y, state);
        y += sign * static_cast<long long>(D) * H;
        if (blocks > 1) cluster_sync();
        else __syncthreads();
    }
    y += offset - ((n * S + start + sign * S) * D + d) * H - unit;  // rewind to the offset of the last state
    if (output != 0 && is_valid && slice % REPLICAS == 0) store_acc(y, output == 2 ? cell : state);
}
