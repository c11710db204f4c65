// conv/sm90_images.cu: convolution and transposed convolution of many images, NHWC, 16 bits, by TMA and wgmma.
//
// Idea    A tile is the same positions of IMAGES images, so taps in the padding are skipped: 28 % of the flop for 5x5,
//         stride 2 over 4x4, 7 % over 16x16. A tile has UNITS units: 64 channels of one position each. The positions
//         of a tile are a cell of adjacent ones, which share pixels: 9 pixels serve 25 taps. Persistent: four
//         producer warps load weights (a unit each) and pixels by TMA; two consumer warpgroups, two units each, finish
//         at different times, so epilogue and wgmma overlap. M = channels, N = images; stores by stmatrix.trans, TMA.
// Order   Bit-identical to conv/sm90.cu: taps, then channels; then bias, residual, activation.
// Floor   128 -> 64, 5x5, 16x16 -> 32x32, B = 5,248: 509 Gflop / 989 Tflop/s = 515 us; 6.7 GB from L2. H200: 895 us
//         (996 with one producer warp, 1,062 with weights shared in a cluster). 512 -> 256 on 4x4: 603 us (floor 403);
//         256 -> 128 on 8x8: 779 us (477). 64 -> 64, 3x3, 32x32 with a residual, B = 4,096: 309 Gflop, 313 us.
// Layout  x (B, H, W, C), y and residual (B, HO, WO, N); w (N, taps * channels) as in conv/sm90.cu; bias (N) or null.
// Shared  STAGES * 48 KB + 32 KB for stores + 1 KB alignment: 225 KB. With a residual one stage less, 64 KB: 209 KB.
// Limits  C and N multiples of 16 B; up to MAX_STEPS pixels under a cell; sm_90a.
#include "mma/tma.cuh"
#include "common/epilogue.cuh"
#include "mma/wgmma.cuh"

constexpr int WARPGROUP = 128, WARPGROUPS = 2, LINE = 128;
constexpr int IMAGES = 128, UNIT = 64, UNITS = 4, LOCAL_UNITS = UNITS / WARPGROUPS;  // UNIT: channels per unit
constexpr int X_BYTES = IMAGES * LINE, UNIT_BYTES = UNIT * LINE, STAGE_BYTES = X_BYTES + UNITS * UNIT_BYTES;
constexpr int DEPTH = 64, SLICE_STEPS = 4;  // k per slice, and wgmma instructions per unit
constexpr int OUT_IMAGES = 64, OUT_BYTES = OUT_IMAGES * LINE;  // per TMA store; buffers per warpgroup: two,
constexpr int OUT_TILES = IMAGES / OUT_IMAGES;                 // or with a residual one per store of a tile
constexpr int MAX_STEPS = 100;
constexpr u32 NO_TAP = 0xffff;

// A pixel under a cell, relative to the cell's first, and its tap for each unit.
struct Step {
    short down, right;
    unsigned short taps[UNITS];  // NO_TAP: outside the unit's window
};
struct Unit {
    unsigned short down, right;  // position in the cell
    u32 n;                       // its first channel, relative to the tile's
};
struct Cells {
    u32 chunks, channels;  // slices of k, and channels of w, per tap
    u32 tiles_n, tile_n;   // tiles over the channels of y; channels per tile
    u32 lines, columns;    // cells per image
    u32 cell_h, cell_w;    // positions per cell
    u32 step_h, step_w;    // pixels from one cell to the next
    u32 lines_in, columns_in;
    u32 steps;
    Unit units[UNITS];
    Step list[MAX_STEPS];
};

// One cell of a group of images.
struct Tile {
    u32 group, line, column, n;

    __device__ __forceinline__ Tile(const Cells& cells, u32 tile_index) {
        const u32 all = cells.tiles_n * cells.columns * cells.lines;
        group = tile_index / all;
        u32 at = (tile_index + group) % all;  // rotated: edge cells are cheaper, so blocks should not repeat them
        n = at % cells.tiles_n * cells.tile_n, at /= cells.tiles_n;
        column = at % cells.columns, line = at / cells.columns;
    }
    // Calls visit(step, h, w) for each pixel in bounds.
    template <class Visit>
    __device__ __forceinline__ void each_step(const Cells& cells, const Visit& visit) const {
        const int top = line * cells.step_h, left = column * cells.step_w;
        for (u32 i = 0; i < cells.steps; ++i) {
            const int h = top + cells.list[i].down, w = left + cells.list[i].right;
            if (static_cast<u32>(h) < cells.lines_in && static_cast<u32>(w) < cells.columns_in)
                visit(cells.list[i], h, w);
        }
    }
};

// wgmma of one slice for the warpgroup's units FIRST to LAST.
template <class P, int FIRST, int LAST>
__device__ __forceinline__ void multiply(float (&sums)[LOCAL_UNITS][IMAGES / 8][4], u32 x_at, u32 w_at) {
    const unsigned long long x = swizzled_descriptor(x_at), w = swizzled_descriptor(w_at);  // in units of 16 bytes
    wgmma_fence();
#pragma unroll
    for (int i = FIRST; i <= LAST; ++i)
#pragma unroll
        for (int step = 0; step < SLICE_STEPS; ++step)
            Wgmma<P, IMAGES>::add(sums[i], w + (i * UNIT_BYTES + 32 * step) / 16, x + 2 * step, true);
    wgmma_commit();
}

// Adds a unit's residual tiles, one image per line, to its transposed accumulators.
template <class Y>
__device__ __forceinline__ void add_residual(float (&sums)[IMAGES / 8][4], const char* residual_tiles) {
    const int warp = threadIdx.x % WARPGROUP / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < IMAGES / 8; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const char* const chunk = residual_tiles + (8 * j + g) * LINE + ((2 * warp + half) ^ g) * 16;
            const u32 pair = transposed(*reinterpret_cast<const u32*>(chunk + 4 * q));
            sums[j][2 * half] += to_float(Y{static_cast<unsigned short>(pair)});
            sums[j][2 * half + 1] += to_float(Y{static_cast<unsigned short>(pair >> 16)});
        }
}

// RESIDUAL  whether the epilogue adds one
template <class P, int STAGES, bool RESIDUAL>
__global__ void __launch_bounds__(WARPGROUP * (WARPGROUPS + 1), 1)
conv_sm90_images(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map,
            const __grid_constant__ TensorMap y_map, const __grid_constant__ TensorMap residual_map, const float* bias,
            u32 N, u32 tile_images, u32 tiles, const __grid_constant__ Cells cells, u32 code, u32 a_bits, u32 b_bits) {
    using Y = typename P::Element;
    extern __shared__ uint4 smem[];
    __shared__ Mbarrier full[STAGES], empty[STAGES], residual_ready[WARPGROUPS];
    char* const stages = reinterpret_cast<char*>(smem) + (-shared_address(smem) & 1023);
    const int warpgroup = threadIdx.x / WARPGROUP, warp = threadIdx.x % WARPGROUP / 32, lane = threadIdx.x % 32;
    launch_dependent_grids();
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            full[s].init(UNITS);
            empty[s].init(4 * WARPGROUPS);
        }
        for (int i = 0; i < WARPGROUPS; ++i) residual_ready[i].init(1);
        fence_mbarriers();
    }
    __syncthreads();

    if (warpgroup == WARPGROUPS) {
        warpgroup_reg_dealloc<40>();
        // One producer warp per unit, the last one also for pixels: a single warp would be slower than wgmma.
        if (lane == 0) {
            wait_on_dependent_grids();
            u32 iteration = 0;
            for (u32 tile_index = blockIdx.x; tile_index < tiles; tile_index += gridDim.x) {
                const Tile tile(cells, tile_index);
                const int image = tile.group * IMAGES;
                const int n = tile.n + cells.units[warp].n;
                const bool has_pixels = warp == UNITS - 1;
                tile.each_step(cells, [&](const Step& step, int h, int w) {
                    const u32 tap = step.taps[warp];
                    const u32 bytes = (tap != NO_TAP ? UNIT_BYTES : 0) + (has_pixels ? tile_images * LINE : 0);
                    int k = tap * cells.channels;
                    for (u32 chunk = 0; chunk < cells.chunks; ++chunk, ++iteration, k += DEPTH) {
                        const u32 s = iteration % STAGES;
                        char* const stage = stages + s * STAGE_BYTES;
                        empty[s].wait(iteration / STAGES % 2 ^ 1);
                        if (bytes > 0) full[s].arrive_expect_tx(bytes);
                        else full[s].arrive();
                        if (has_pixels) tma_load(stage, x_map, full[s], chunk * DEPTH, w, h, image);
                        if (tap == NO_TAP) continue;
                        tma_load(stage + X_BYTES + warp * UNIT_BYTES, w_map, full[s], k, n);
                    }
                });
            }
        }
    } else {
        warpgroup_reg_alloc<232>();
        const bool is_first = threadIdx.x % WARPGROUP == 0;  // the warpgroup's TMA store thread
        constexpr int STAGING_TILES = RESIDUAL ? LOCAL_UNITS * OUT_TILES : 2;
        char* const staging = stages + STAGES * STAGE_BYTES + warpgroup * (STAGING_TILES * OUT_BYTES);
        const Activation activation{code, __uint_as_float(a_bits), __uint_as_float(b_bits)};
        const auto release_stage = [&](u32 iteration) {
            if (lane == 0) empty[iteration % STAGES].arrive();
        };
        u32 iteration = 0, round = 0;
        // The previous kernel may write the residual, and read the memory of y: a tile in the padding loads no pixel.
        if (is_first) wait_on_dependent_grids();
        for (u32 tile_index = blockIdx.x; tile_index < tiles; tile_index += gridDim.x, ++round) {
            const Tile tile(cells, tile_index);
            const Unit* const units = cells.units + warpgroup * LOCAL_UNITS;
            const int image = tile.group * IMAGES;
            const auto line_of = [&](const Unit& unit) { return tile.line * cells.cell_h + unit.down; };
            const auto column_of = [&](const Unit& unit) { return tile.column * cells.cell_w + unit.right; };
            if (RESIDUAL && is_first) {
                tma_store_wait<0>();  // the buffers are free
                residual_ready[warpgroup].arrive_expect_tx(STAGING_TILES * OUT_BYTES);
                for (int i = 0; i < STAGING_TILES; ++i) {
                    const Unit& unit = units[i / OUT_TILES];
                    tma_load(staging + i * OUT_BYTES, residual_map, residual_ready[warpgroup], tile.n + unit.n,
                             column_of(unit), line_of(unit), image + i % OUT_TILES * OUT_IMAGES);
                }
            }
            float lane_bias[LOCAL_UNITS][2];  // bias of the lane's channels
#pragma unroll
            for (int i = 0; i < 2 * LOCAL_UNITS; ++i) {
                const u32 n = tile.n + units[i / 2].n + 16 * warp + lane / 4 + i % 2 * 8;
                lane_bias[i / 2][i % 2] = bias != nullptr && n < N ? bias[n] : 0.0f;
            }
            float sums[LOCAL_UNITS][IMAGES / 8][4] = {};
            const u32 begin = iteration;
            tile.each_step(cells, [&](const Step& step, int, int) {
                // The votes make the conditions warp-uniform for the compiler; otherwise it serialises wgmma.
                const unsigned short* const taps = step.taps + warpgroup * LOCAL_UNITS;
                const bool has_first = __any_sync(~0u, taps[0] != NO_TAP);
                const bool has_last = __any_sync(~0u, taps[LOCAL_UNITS - 1] != NO_TAP);
                for (u32 chunk = 0; chunk < cells.chunks; ++chunk, ++iteration) {
                    const u32 s = iteration % STAGES, x_at = shared_address(stages + s * STAGE_BYTES);
                    const u32 w_at = x_at + X_BYTES + warpgroup * (LOCAL_UNITS * UNIT_BYTES);
                    full[s].wait(iteration / STAGES % 2);
                    if (has_first && has_last) multiply<P, 0, LOCAL_UNITS - 1>(sums, x_at, w_at);
                    else if (has_first) multiply<P, 0, 0>(sums, x_at, w_at);
                    else if (has_last) multiply<P, LOCAL_UNITS - 1, LOCAL_UNITS - 1>(sums, x_at, w_at);
                    else wgmma_commit();
                    // The previous wgmma group is done: release its stage.
                    wgmma_wait<1>();
                    if (iteration > begin) release_stage(iteration - 1);
                }
            });
            wgmma_wait<0>();
            if (iteration > begin) release_stage(iteration - 1);
            if (RESIDUAL) residual_ready[warpgroup].wait(round % 2);
#pragma unroll
            for (int i = 0; i < LOCAL_UNITS; ++i) {
#pragma unroll
                for (int j = 0; j < IMAGES / 8; ++j)
#pragma unroll
                    for (int k = 0; k < 4; ++k) sums[i][j][k] += lane_bias[i][k / 2];
                if (RESIDUAL) add_residual<Y>(sums[i], staging + i * OUT_TILES * OUT_BYTES);
                activate_all<Y>(sums[i], activation);
                const u32 h = line_of(units[i]), w = column_of(units[i]);
#pragma unroll
                for (int out = 0; out < OUT_TILES; ++out) {
                    char* const staging_tile = staging + (RESIDUAL ? i * OUT_TILES + out : out % 2) * OUT_BYTES;
                    if (!RESIDUAL) {
                        if (is_first) tma_store_wait<1>();  // the buffer is free
                        wait_for_warpgroup(warpgroup);
                    }
#pragma unroll
                    for (int j = 0; j < OUT_IMAGES / 8; j += 2) {
                        u32 words[4];
#pragma unroll
                        for (int k = 0; k < 4; ++k) {
                            const float(&c)[4] = sums[i][out * (OUT_IMAGES / 8) + j + k / 2];
                            words[k] = pack<Y>(c[k % 2 * 2], c[k % 2 * 2 + 1]);
                        }
                        const int to = 8 * (j + lane / 16) + lane % 8, chunk = 2 * warp + lane / 8 % 2;
                        store_transposed(staging_tile + to * LINE + ((chunk ^ to % 8) * 16), words);
                    }
                    fence_for_tma();
                    wait_for_warpgroup(warpgroup);
                    // Also of positions outside y, which TMA drops: tma_store_wait counts a store per buffer.
                    if (is_first) tma_store(y_map, staging_tile, tile.n + units[i].n, w, h, image + out * OUT_IMAGES);
                }
            }
        }
        if (is_first) tma_store_wait<0>();
    }
}
