// recurrent/register_resident.cu: LSTM, GRU or RNN over few sequences, all time steps in one launch; recurrent weights
// stay in registers.
//
// Idea    Each block of a cluster owns `units` units and holds their recurrent weights in registers from the first step
//         to the last. SLICES adjacent lanes share a unit: each multiplies PIECES * 4 states of NS sequences by all
//         gates' weights. A shuffle tree reduces the lanes' sums and leaves each lane one sequence. Its next state goes
//         to the shared memory of every block of the cluster (DSMEM); a barrier ends the step. The input gemm is a
//         separate kernel; its output is loaded one step ahead.
// Floor   Latency: one sequence of 64 steps of an LSTM of 128 units moves only 164 KB. A step is a chain of FFMAs,
//         three activations and a DSMEM round trip, some 0.5 us.
// Order   A lane's K elements in order, then a tree over lanes, then the input. Independent of NS and blocks.
// Layout  As in recurrent/simt.cu.
// Shared  2 * NS * 4 * SLICES * PIECES floats: 8 KB for 128 units and 8 sequences.
// Limits  H <= 4 * SLICES * PIECES; units * SLICES <= MOST threads; no GruBefore; NS <= SLICES; float32, float16,
//         bfloat16; blocks > 1 from sm_90 on, else sm_80 up.
#include "mma/cluster.cuh"
#include "recurrent/cells.cuh"

// Reduces COUNT sequences' gate sums over SLICES lanes. Each lane ends with the sums of one sequence, in v[.][0].
template <int COUNT, int MASK, int G, int NS>
__device__ __forceinline__ void add_up(float (&v)[G][NS], int slice) {
    if constexpr (MASK > 0) {
        const bool is_upper = slice & MASK;
#pragma unroll
        for (int g = 0; g < G; ++g) {
            if constexpr (COUNT > 1) {
#pragma unroll
                for (int r = 0; r < COUNT / 2; ++r) {
                    const float kept = is_upper ? v[g][r + COUNT / 2] : v[g][r];
                    const float sent = is_upper ? v[g][r] : v[g][r + COUNT / 2];
                    v[g][r] = kept + __shfl_xor_sync(~0u, sent, MASK);
                }
            } else {
                v[g][0] += __shfl_xor_sync(~0u, v[g][0], MASK);
            }
        }
        add_up<(COUNT > 1 ? COUNT / 2 : 1), MASK / 2>(v, slice);
    }
}

// blocks   per cluster
// backwards  direction 0 runs from the last step to the first; direction 1 always does
// output   0: every step, 1: the last state, 2: the last cell
template <class Cell, class T, int SLICES, int PIECES, int NS, int MOST>
__global__ void __launch_bounds__(MOST)
    recurrent_register_resident(const T* x, const float* R, const float* bias, const T* first_h, const T* first_c, T* y, long long N,
                   long long S, unsigned D, int H, int units, unsigned blocks, unsigned backwards, unsigned output) {
    constexpr int G = GATES<Cell>, PADDED = 4 * SLICES * PIECES, ALIKE = SLICES / NS;  // lanes with the same sums
    static_assert(ALIKE * NS == SLICES, "as many lanes for each sequence");
    __shared__ __align__(16) float states[2][NS][PADDED];
    const int slice = threadIdx.x % SLICES, unit = cluster_rank() * units + threadIdx.x / SLICES;
    const bool has_unit = static_cast<int>(threadIdx.x) / SLICES < units && unit < H;
    const unsigned d = blockIdx.x / blocks % D;
    const long long first = static_cast<long long>(blockIdx.x / blocks / D) * NS, mine = first + slice / ALIKE;
    const bool is_there = has_unit && mine < N, goes_back = backwards || d == 1;
    const long long x_step = static_cast<long long>(D) * G * H, start = goes_back ? S - 1 : 0, way = goes_back ? -1 : 1;

    float weights[PIECES][4][G];
#pragma unroll
    for (int i = 0; i < 4 * PIECES; ++i) {
        const int k = 4 * (SLICES * (i / 4) + slice) + i % 4;
#pragma unroll
        for (int g = 0; g < G; ++g)
            weights[i / 4][i % 4][g] =
                has_unit && k < H ? R[((static_cast<long long>(d) * H + k) * H + unit) * G + g] : 0.0f;
    }
    for (int i = threadIdx.x; i < NS * PADDED; i += blockDim.x) {
        const int r = i / PADDED, k = i % PADDED;
        const bool is_given = first_h != nullptr && k < H && first + r < N;
        states[0][r][k] = is_given ? load_acc(first_h + ((first + r) * D + d) * H + k) : 0.0f;
        states[1][r][k] = 0.0f;
    }
    const long long own = (mine * D + d) * H + unit;
    float state = first_h != nullptr && is_there ? load_acc(first_h + own) : 0.0f;
    float cell = first_c != nullptr && is_there ? load_acc(first_c + own) : 0.0f;
    const float inside = is_same<Cell, GruAfter> && bias != nullptr && has_unit ? bias[d * H + unit] : 0.0f;
    x += ((mine * S + start) * D + d) * G * H + unit;
    y += ((mine * S + start) * D + d) * H + unit;
    float given[G], ahead[G];
#pragma unroll
    for (int g = 0; g < G; ++g) ahead[g] = is_there ? load_acc(x + g * H) : 0.0f;
    if (blocks > 1) wait_for_cluster();
    else __syncthreads();

    for (long long step = 0; step < S; ++step) {
        x += way * x_step;
#pragma unroll
        for (int g = 0; g < G; ++g) {
            given[g] = ahead[g];
            ahead[g] = is_there && step + 1 < S ? load_acc(x + g * H) : 0.0f;
        }
        float sums[G][NS];
#pragma unroll
        for (int i = 0; i < G * NS; ++i) sums[i / NS][i % NS] = 0.0f;
#pragma unroll
        for (int i = 0; i < PIECES; ++i)
#pragma unroll
            for (int r = 0; r < NS; ++r) {
                const float4 four = *reinterpret_cast<const float4*>(&states[step % 2][r][4 * (SLICES * i + slice)]);
                const float h[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                for (int j = 0; j < 4; ++j)
#pragma unroll
                    for (int g = 0; g < G; ++g) sums[g][r] = fmaf(weights[i][j][g], h[j], sums[g][r]);
            }
        add_up<NS, SLICES / 2>(sums, slice);
        float of_mine[G];
#pragma unroll
        for (int g = 0; g < G; ++g) of_mine[g] = sums[g][0];
        state = next_state<Cell>(given, of_mine, inside, state, cell);
        if (has_unit) {
            float* const to = &states[(step + 1) % 2][slice / ALIKE][unit];
            if (blocks == 1 && slice % ALIKE == 0) *to = state;
            for (unsigned block = slice % ALIKE; blocks > 1 && block < blocks; block += ALIKE)
                store_to_block(to, block, state);
        }
        if (output == 0 && is_there && slice % ALIKE == 0) store_acc(y, state);
        y += way * static_cast<long long>(D) * H;
        if (blocks > 1) wait_for_cluster();
        else __syncthreads();
    }
    y += own - ((mine * S + start + way * S) * D + d) * H - unit;  // rewind to the offset of the last state
    if (output != 0 && is_there && slice % ALIKE == 0) store_acc(y, output == 2 ? cell : state);
}
