// rotating.cu: the whole network with weights in registers, in fp16, a tile of rows per iteration; six rungs.
//
// Idea    SHARE threads split a neuron; each holds a part of its weights in registers. A thread loops over the rows
//         of a tile, so TILE rows cost three barriers. Neighbouring neurons start at neighbouring rows and wrap around:
//         while neuron 0 is at row 3, neuron 1 is at row 4. The lanes of a warp then read different rows, and the row
//         strides avoid bank conflicts (offsets in 32-bit words; each load covers all 32 banks):
//           SHARE = 2, 8-byte loads, 16 lanes per access:  x 36*row + 18*part, h 34*row + 16*part
//           SHARE = 4, x by 4-byte loads, 32 lanes:        36*row + 9*part
//                      h by 8-byte loads, 16 lanes:        34*row + 8*part
// Floor   152 B per row. Each FMA is scalar: no tensor cores, and fma.f16x2 would halve the instructions.
// Layout  x (B, 72), y (B, 4), w0 (64, 72), w1 (64, 64), w2 (4, 64): f16, row-major, 16 B aligned. If IS_TRANSPOSED:
//         w0 (72, 64) and w1 (64, 64) are (D_in, D_out).
// Shared  TILE*(72 + 68 + 68)*2 B = 13 312 B with TILE = 32
// Limits  Any B (rows past B are zero and not written); fp16 accumulators, error up to 0.15; sm_80 up.
#include "decode.cuh"

constexpr int STRIDE = W + 4;  // of hidden rows: 34 words, free of bank conflicts (see above)

template <int TILE, int LOADERS>
__device__ __forceinline__ void load_tile(const f16* x, f16* tile, long long first, long long B, int thread) {
    using Chunk = Vector<f16, 8>;  // 16 B: a row is 9 chunks; rows are contiguous in x and in the tile
    const auto* source = reinterpret_cast<const Chunk*>(x + first * COLUMNS);
#pragma unroll 1
    for (int i = thread; i < TILE * COLUMNS / 8; i += LOADERS)
        reinterpret_cast<Chunk*>(tile)[i] = first + i / (COLUMNS / 8) < B ? source[i] : Chunk{};
}

// Load part `part` of the weights of neuron n, w[n][part * K : (part + 1) * K].
template <int K, bool IS_TRANSPOSED>
__device__ __forceinline__ void load_weights(const f16* w, f16 (&r)[K], int width, int n, int part) {
#pragma unroll
    for (int i = 0; i < K; ++i) r[i] = IS_TRANSPOSED ? w[(part * K + i) * W + n] : w[n * width + part * K + i];
}

// One hidden layer over the rows of this thread's group, in (ROWS, IN) -> out (ROWS, STRIDE); neuron n starts at row n.
template <int SHARE, int ROWS, int IN, int STEP, int K>
__device__ __forceinline__ void run_hidden(const f16 (&r)[K], const f16* in, f16* out, int n, int part) {
#pragma unroll 1
    for (int i = 0; i < ROWS; ++i) {
        const int row = (n + i) & (ROWS - 1);
        const f16 sum = sum_lanes<SHARE>(dot<STEP>(r, in + row * IN + part * K));
        if (part == 0) out[row * STRIDE + n] = relu(sum);
    }
}

// IS_TRANSPOSED  neighbouring neurons load neighbouring weights: a few cache lines per load instead of one per neuron.
// LAST           weights of the last layer per thread: 64 / LAST threads share an output and reduce by shuffles.
// HIDES_LOADS    half of the threads compute the last layer while the others load the next tile.
// RELOADS        each layer's weights are loaded when it starts, into the registers of the previous layer: fewer
//                registers and higher occupancy, for a grid with one block per tile, which loads each weight once.
template <int SHARE, int TILE, bool IS_TRANSPOSED, int LAST, bool HIDES_LOADS, bool RELOADS, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS)
rotating(const f16* __restrict__ x, const f16* __restrict__ w0, const f16* __restrict__ w1, const f16* __restrict__ w2,
         f16* __restrict__ y, long long B) {
    constexpr int GROUPS = THREADS / (W * SHARE), ROWS = TILE / GROUPS;  // a group of threads covers all neurons
    constexpr int STEP = SHARE == 2 ? 4 : 2;  // values of x per load; a thread's 18 with SHARE = 4 are no multiple of 4
    constexpr int PARTS = W / LAST;  // threads that share an output
    constexpr int LAST_THREADS = HIDES_LOADS ? THREADS / 2 : THREADS, LAST_ROWS = LAST_THREADS / (D_out * PARTS);
    static_assert((SHARE == 2 || SHARE == 4) && ROWS % (32 / SHARE) == 0, "a warp's neurons must be at different rows");
    static_assert(PARTS <= 32 && TILE % LAST_ROWS == 0, "an output must be reduced within a warp");

    alignas(16) __shared__ f16 tile[TILE * COLUMNS], h0[TILE * STRIDE], h1[TILE * STRIDE];
    const int thread = threadIdx.x, group = thread / (W * SHARE);
    const int n = thread % (W * SHARE) / SHARE, part = thread % SHARE;
    const int output = thread / PARTS % D_out, output_part = thread % PARTS, output_row = thread / (D_out * PARTS);
    f16 r0[COLUMNS / SHARE], r1[W / SHARE], r2[LAST];

    if (!RELOADS) {
        load_weights<COLUMNS / SHARE, IS_TRANSPOSED>(w0, r0, COLUMNS, n, part);
        load_weights<W / SHARE, IS_TRANSPOSED>(w1, r1, W, n, part);
        load_weights<LAST, false>(w2, r2, W, output, output_part);
    }
    const long long step = 1LL * TILE * gridDim.x;
    long long first = 1LL * TILE * blockIdx.x;
    load_tile<TILE, THREADS>(x, tile, first, B, thread);
    for (; first < B; first += step) {
        if (RELOADS) load_weights<COLUMNS / SHARE, IS_TRANSPOSED>(w0, r0, COLUMNS, n, part);
        __syncthreads();
        run_hidden<SHARE, ROWS, COLUMNS, STEP>(r0, tile + group * ROWS * COLUMNS, h0 + group * ROWS * STRIDE, n, part);
        if (RELOADS) load_weights<W / SHARE, IS_TRANSPOSED>(w1, r1, W, n, part);
        __syncthreads();
        run_hidden<SHARE, ROWS, STRIDE, 4>(r1, h0 + group * ROWS * STRIDE, h1 + group * ROWS * STRIDE, n, part);
        if (RELOADS) load_weights<LAST, false>(w2, r2, W, output, output_part);
        __syncthreads();
        if (thread < LAST_THREADS) {
#pragma unroll 1
            for (int row = output_row; row < TILE; row += LAST_ROWS) {
                const f16* h = h1 + row * STRIDE + output_part * LAST;
                const f16 sum = sum_lanes<PARTS>(dot<(LAST < 4 ? LAST : 4)>(r2, h));
                if (output_part == 0 && first + row < B) y[(first + row) * D_out + output] = sum;
            }
        }
        if (RELOADS) break;  // one tile per block
        // No thread reads `tile` after the barrier that follows the first layer, so it can be overwritten.
        if (!HIDES_LOADS) load_tile<TILE, THREADS>(x, tile, first + step, B, thread);
        else if (thread >= LAST_THREADS)
            load_tile<TILE, THREADS - LAST_THREADS>(x, tile, first + step, B, thread - LAST_THREADS);
    }
}
