// backprop_atomics.cu: both backward gemms of a layer in one kernel, results added by atomics.
//
// Idea    A block keeps a 16 x 16 tile of w and slides over the patterns, 16 at a time. The tiles of x and dz that it
//         loads serve both products: x^T @ dz for the gradient, which stays in a register to the end, and dz @ w^T for
//         the previous layer, which is added to dz_previous at once, by the blocks of all columns. The patterns are
//         divided into slices, one per row of the grid, so the gradients of small layers use more than a few SMs.
// Floor   x and dz are read once per column and row of tiles, as in backprop_tiles.cu, but by one kernel. An atomic add
//         per element of dz_previous and column of tiles: 60,000 * 28 for the last layer, twice 60,000 * 56 before.
// Order   Atomic adds arrive in any order: non-deterministic.
// Shared  3 * 16 * 17 * 4 = 3 264 B
// Limits  g, g_bias and dz_previous are zero before; B * K below 2^31; fp32; sm_80 up.
#include "backprop.cuh"

__global__ void __launch_bounds__(THREADS) clear_values(float* values, int count) {
    const int i = THREADS * blockIdx.x + threadIdx.x;
    if (i < count) values[i] = 0.0f;
}

// x (B, K) is the layer's input; where PROPAGATES, it is the previous layer's sigmoid.
template <bool PROPAGATES>
__global__ void __launch_bounds__(THREADS)
backward_atomics(const float* x, const float* dz, const float* w, float* g, float* g_bias, float* dz_previous, int B,
                 int K, int N) {
    __shared__ float xs[TILE][TILE + PAD], ds[TILE][TILE + PAD], ws[TILE][TILE + PAD];
    const int columns = (N + TILE - 1) / TILE;
    const int first_k = blockIdx.x / columns * TILE, first_n = blockIdx.x % columns * TILE;
    const Position at = in_tile();
    float gradient = 0.0f, bias = 0.0f;
    load_tile<PAD>(ws, w, {first_k, first_n}, K, N);
    for (int first = TILE * blockIdx.y; first < B; first += TILE * gridDim.y) {
        load_tile<PAD>(xs, x, {first, first_k}, B, K);
        load_tile<PAD>(ds, dz, {first, first_n}, B, N);
        __syncthreads();
        float propagated = 0.0f;
#pragma unroll
        for (int i = 0; i < TILE; ++i) {
            gradient += xs[i][at.row] * ds[i][at.column];            // element (first_k + row, first_n + column)
            propagated += ds[at.row][i] * ws[at.column][i];          // pattern first + row, unit first_k + column
        }
        bias += ds[at.row][at.column];
        const int pattern = first + at.row, unit = first_k + at.column;
        if (PROPAGATES && pattern < B && unit < K)
            atomicAdd(dz_previous + pattern * K + unit, propagated * sigmoid_derivative(xs[at.row][at.column]));
        __syncthreads();
    }
    const int row = first_k + at.row, column = first_n + at.column;
    if (row < K && column < N) atomicAdd(g + row * N + column, gradient);
    if (first_k == 0 && column < N) atomicAdd(g_bias + column, bias);
}
