// conv/sm90_images.cu: convolution and transposed convolution of many images, NHWC, 16 bits, by TMA and wgmma.
//
// Idea    A tile is the same positions of IMAGES images, so taps in the padding are skipped: 28 % of the flop for 5x5,
//         stride 2 over 4x4, 7 % over 16x16. A tile has UNITS units of 64 channels, of one position or of a cell of
//         adjacent ones (phases). A pixel is loaded once for all units: 9 pixels serve 25 taps. Persistent: four
//         producer warps load weights (a unit each) and pixels by TMA; two consumer warpgroups, two units each, finish
//         at different times, so epilogue and wgmma overlap. M = channels, N = images; y goes out by stmatrix.trans and
//         TMA.
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
constexpr int IMAGES = 128, UNIT = 64, UNITS = 4, MINE = UNITS / WARPGROUPS;  // UNIT: channels; MINE: units per warpgroup
constexpr int X_BYTES = IMAGES * LINE, UNIT_BYTES = UNIT * LINE, STAGE_BYTES = X_BYTES + UNITS * UNIT_BYTES;
constexpr int DEPTH = 64, SLICE_STEPS = 4;  // k per slice, and wgmma instructions per unit
constexpr int OUT_IMAGES = 64, OUT_BYTES = OUT_IMAGES * LINE;  // per TMA store; a warpgroup has two buffers,
constexpr int PARTS = IMAGES / OUT_IMAGES;                     // or, with a residual, one for each part of its units
constexpr int MAX_STEPS = 100;
constexpr u32 NO_TAP = 0xffff;

// A pixel under a cell, relative to the cell's first, and its tap for each unit.
struct Step {
    short down, right;
    unsigned short taps[UNITS];  // NO_TAP: outside the unit's window
};
struct Unit {
    unsigned short down, right;  // position in the cell
    u32 n;                       // its first channel, relative to the cell's
};
struct Cells {
    u32 blocks, channels;  // slices of k per tap; channels of w per tap
    u32 tiles_n, cell_n;   // cells over all channels of y; channels per cell
    u32 lines, columns;    // cells per image
    u32 cell_h, cell_w;    // positions per cell
    u32 step_h, step_w;    // pixels from one cell to the next
    u32 lines_in, columns_in, lines_out, columns_out;
    u32 steps;
    Unit units[UNITS];
    Step list[MAX_STEPS];
};

// One cell of a group of images.
struct Tile {
    u32 group, line, column, n;

    __device__ __forceinline__ Tile(const Cells& cells, u32 number) {
        const u32 all = cells.tiles_n * cells.columns * cells.lines;
        group = number / all;
        u32 at = (number + group) % all;  // rotated: edge cells are cheaper, so blocks should not repeat them
        n = at % cells.tiles_n * cells.cell_n, at /= cells.tiles_n;
        column = at % cells.columns, line = at / cells.columns;
    }
    // Calls what(step, line, column) for each pixel in bounds.
    template <class What>
    __device__ __forceinline__ void each_step(const Cells& cells, const What& what) const {
        const int top = line * cells.step_h, left = column * cells.step_w;
        for (u32 i = 0; i < cells.steps; ++i) {
            const int h = top + cells.list[i].down, w = left + cells.list[i].right;
            if (static_cast<u32>(h) < cells.lines_in && static_cast<u32>(w) < cells.columns_in)
                what(cells.list[i], h, w);
        }
    }
};

// wgmma of one slice for the warpgroup's units FIRST to LAST.
template <class P, int FIRST, int LAST>
__device__ __forceinline__ void multiply(float (&sums)[MINE][IMAGES / 8][4], u32 x_at, u32 w_at) {
    const unsigned long long x = mixed_tile(x_at), w = mixed_tile(w_at);  // descriptors count in 16 bytes
    begin_products();
#pragma unroll
    for (int i = FIRST; i <= LAST; ++i)
#pragma unroll
        for (int step = 0; step < SLICE_STEPS; ++step)
            Wgmma<P, IMAGES>::add(sums[i], w + (i * UNIT_BYTES + 32 * step) / 16, x + 2 * step, true);
    end_products();
}

// Adds a unit's residual tiles, one image per line, to its transposed accumulators.
template <class Y>
__device__ __forceinline__ void add_boxes(float (&sums)[IMAGES / 8][4], const char* boxes) {
    const int warp = threadIdx.x % WARPGROUP / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < IMAGES / 8; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const char* const piece = boxes + (8 * j + g) * LINE + ((2 * warp + half) ^ g) * 16;
            const u32 two = turned(*reinterpret_cast<const u32*>(piece + 4 * q));
            sums[j][2 * half] += to_float(Y{static_cast<unsigned short>(two)});
            sums[j][2 * half + 1] += to_float(Y{static_cast<unsigned short>(two >> 16)});
        }
}

// ADDS  whether there is a residual
template <class P, int STAGES, bool ADDS>
__global__ void __launch_bounds__(WARPGROUP * (WARPGROUPS + 1), 1)
conv_sm90_images(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map,
            const __grid_constant__ TensorMap y_map, const __grid_constant__ TensorMap other_map, const float* bias,
            u32 N, u32 box_images, u32 tiles, const __grid_constant__ Cells cells, u32 code, u32 a_bits, u32 b_bits) {
    using Y = typename P::Element;
    extern __shared__ uint4 room[];
    __shared__ Signal full[STAGES], empty[STAGES], added[WARPGROUPS];
    char* const stages = reinterpret_cast<char*>(room) + (-shared_address(room) & 1023);
    const int warpgroup = threadIdx.x / WARPGROUP, warp = threadIdx.x % WARPGROUP / 32, lane = threadIdx.x % 32;
    let_next_begin();
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            full[s].init(UNITS);
            empty[s].init(4 * WARPGROUPS);
        }
        for (int i = 0; i < WARPGROUPS; ++i) added[i].init(1);
        show_signals();
    }
    __syncthreads();

    if (warpgroup == WARPGROUPS) {
        keep_registers<40>();
        // One producer warp per unit, the last one also for pixels: a single warp issues a slice slower than wgmma uses
        // it.
        if (lane == 0) {
            wait_for_kernel_before();
            u32 turn = 0;
            for (u32 number = blockIdx.x; number < tiles; number += gridDim.x) {
                const Tile tile(cells, number);
                const int image = tile.group * IMAGES;
                const int n = tile.n + cells.units[warp].n;
                const bool has_pixels = warp == UNITS - 1;
                tile.each_step(cells, [&](const Step& step, int h, int w) {
                    const u32 tap = step.taps[warp];
                    const u32 bytes = (tap != NO_TAP ? UNIT_BYTES : 0) + (has_pixels ? box_images * LINE : 0);
                    int k = tap * cells.channels;
                    for (u32 block = 0; block < cells.blocks; ++block, ++turn, k += DEPTH) {
                        const u32 s = turn % STAGES;
                        char* const stage = stages + s * STAGE_BYTES;
                        empty[s].wait(turn / STAGES % 2 ^ 1);
                        if (bytes > 0) full[s].arrive_expecting(bytes);
                        else full[s].arrive();
                        if (has_pixels) load_box(stage, x_map, full[s], block * DEPTH, w, h, image);
                        if (tap == NO_TAP) continue;
                        load_box(stage + X_BYTES + warp * UNIT_BYTES, w_map, full[s], k, n);
                    }
                });
            }
        }
    } else {
        take_registers<232>();
        const bool is_first = threadIdx.x % WARPGROUP == 0;  // the warpgroup's TMA store thread
        constexpr int OUTLETS = ADDS ? MINE * PARTS : 2;
        char* const outlets = stages + STAGES * STAGE_BYTES + warpgroup * (OUTLETS * OUT_BYTES);
        const Activation activation{code, __uint_as_float(a_bits), __uint_as_float(b_bits)};
        const auto give_back = [&](u32 turn) {
            if (lane == 0) empty[turn % STAGES].arrive();
        };
        u32 turn = 0, round = 0;
        if (ADDS && is_first) wait_for_kernel_before();  // it may have written the residual
        for (u32 number = blockIdx.x; number < tiles; number += gridDim.x, ++round) {
            const Tile tile(cells, number);
            const Unit* const units = cells.units + warpgroup * MINE;
            const int image = tile.group * IMAGES;
            const auto line_of = [&](const Unit& unit) { return tile.line * cells.cell_h + unit.down; };
            const auto column_of = [&](const Unit& unit) { return tile.column * cells.cell_w + unit.right; };
            if (ADDS && is_first) {
                wait_for_stores<0>();  // the buffers are free
                added[warpgroup].arrive_expecting(OUTLETS * OUT_BYTES);
                for (int i = 0; i < OUTLETS; ++i) {
                    const Unit& unit = units[i / PARTS];
                    load_box(outlets + i * OUT_BYTES, other_map, added[warpgroup], tile.n + unit.n, column_of(unit),
                             line_of(unit), image + i % PARTS * OUT_IMAGES);
                }
            }
            float shifts[MINE][2];  // bias of the lane's channels
#pragma unroll
            for (int i = 0; i < 2 * MINE; ++i) {
                const u32 n = tile.n + units[i / 2].n + 16 * warp + lane / 4 + i % 2 * 8;
                shifts[i / 2][i % 2] = bias != nullptr && n < N ? bias[n] : 0.0f;
            }
            float sums[MINE][IMAGES / 8][4] = {};
            const u32 begin = turn;
            tile.each_step(cells, [&](const Step& step, int, int) {
                // The votes make the conditions warp-uniform for the compiler; otherwise it serialises wgmma.
                const unsigned short* const taps = step.taps + warpgroup * MINE;
                const bool has_first = __any_sync(~0u, taps[0] != NO_TAP);
                const bool has_last = __any_sync(~0u, taps[MINE - 1] != NO_TAP);
                for (u32 block = 0; block < cells.blocks; ++block, ++turn) {
                    const u32 s = turn % STAGES, x_at = shared_address(stages + s * STAGE_BYTES);
                    const u32 w_at = x_at + X_BYTES + warpgroup * (MINE * UNIT_BYTES);
                    full[s].wait(turn / STAGES % 2);
                    if (has_first && has_last) multiply<P, 0, MINE - 1>(sums, x_at, w_at);
                    else if (has_first) multiply<P, 0, 0>(sums, x_at, w_at);
                    else if (has_last) multiply<P, MINE - 1, MINE - 1>(sums, x_at, w_at);
                    else end_products();
                    // The previous wgmma group is done: release its stage.
                    wait_for_products<1>();
                    if (turn > begin) give_back(turn - 1);
                }
            });
            wait_for_products<0>();
            if (turn > begin) give_back(turn - 1);
            if (ADDS) added[warpgroup].wait(round % 2);
#pragma unroll
            for (int i = 0; i < MINE; ++i) {
#pragma unroll
                for (int j = 0; j < IMAGES / 8; ++j)
#pragma unroll
                    for (int k = 0; k < 4; ++k) sums[i][j][k] += shifts[i][k / 2];
                if (ADDS) add_boxes<Y>(sums[i], outlets + i * PARTS * OUT_BYTES);
                activate_all<Y>(sums[i], activation);
                const u32 h = line_of(units[i]), w = column_of(units[i]);
#pragma unroll
                for (int part = 0; part < PARTS; ++part) {
                    char* const outlet = outlets + (ADDS ? i * PARTS + part : part % 2) * OUT_BYTES;
                    if (!ADDS) {
                        if (is_first) wait_for_stores<1>();  // the buffer is free
                        wait_for_warpgroup(warpgroup);
                    }
#pragma unroll
                    for (int j = 0; j < OUT_IMAGES / 8; j += 2) {
                        u32 words[4];
#pragma unroll
                        for (int k = 0; k < 4; ++k) {
                            const float(&c)[4] = sums[i][part * (OUT_IMAGES / 8) + j + k / 2];
                            words[k] = pack<Y>(c[k % 2 * 2], c[k % 2 * 2 + 1]);
                        }
                        const int to = 8 * (j + lane / 16) + lane % 8, piece = 2 * warp + lane / 8 % 2;
                        store_turned(outlet + to * LINE + ((piece ^ to % 8) * 16), words);
                    }
                    show_box();
                    wait_for_warpgroup(warpgroup);
                    if (is_first && h < cells.lines_out && w < cells.columns_out)
                        store_box(y_map, outlet, tile.n + units[i].n, w, h, image + part * OUT_IMAGES);
                }
            }
        }
        if (is_first) wait_for_stores<0>();
    }
}
