// conv/sm90_images.cu: convolutions and transposed ones of many images, channels last, 16 bits, at the tensor cores' rate.
//
// Idea    A tile is IMAGES images, all at the same places of y. So a tap that lies outside of the image there is left out,
//         for the whole tile: of 5x5 taps by steps of 2 over 4x4 pixels that is 28 % of the products, over 16x16 7 %.
//         A tile has UNITS units of 64 channels of y: of one place, or of the neighbouring places of a cell (of a transposed
//         convolution: its phases). A pixel of x that several units reach is brought once for all of them: of 5x5 taps by
//         steps of 2, 9 pixels serve 25 products.
//         Four warps bring boxes of weights, a unit each, and of pixels, STAGES slices ahead. Two teams of four have two units
//         each, one those that get their last tap first: so one team multiplies while the other ends its tile. Products are
//         turned: channels of y are the rows, images the columns. What is made is turned back on its way to shared memory,
//         and leaves as boxes while the next products are made. What else is added to y (a residual) comes to where that
//         leaves from while products are made.
// Order   That of conv/sm90.cu, bit by bit: taps from the first pixel of the window to the last, then channels; products
//         that are left out here are zeros there. Then the bias, the residual and the activation.
// Floor   2 flop a term inside the image. 128 -> 64 channels, 5x5 by steps of 2, 16x16 -> 32x32, B = 5,248: 509 Gflop / 989
//         Tflop/s = 515 us. L2 gives 9 * 32 KB of pixels for 128 images of a cell and 410 KB of weights, 6.7 GB in all. An
//         H200 took 895 us in the whole network, of 512 -> 256 channels on 4x4 603 us (403 of its products) and of 256 -> 128
//         on 8x8 779 us (477); 128 -> 64 took 996 us when one warp brought all boxes, and 1,062 us with weights shared by
//         the two blocks of a cluster. 64 -> 64 channels, 3x3 over 32x32 with a residual, B = 4,096: 309 Gflop, 313 us.
// Layout  x (B, H, W, C), y and the residual (B, HO, WO, N); w (N, taps * channels), as conv/sm90.cu has it; bias (N) or none.
// Shared  STAGES * 48 KB + 32 KB of what leaves, and 1 KB to begin at a multiple of it: 225 KB. With a residual a stage less,
//         and 64 KB of what leaves: 209 KB.
// Limits  C and N numbers are multiples of 16 B; up to MOST_STEPS pixels under a cell; sm_90a.
#include "mma/tma.cuh"
#include "common/epilogue.cuh"
#include "mma/wgmma.cuh"

constexpr int TEAM = 128, TEAMS = 2, LINE = 128;
constexpr int IMAGES = 128, UNIT = 64, UNITS = 4, MINE = UNITS / TEAMS;  // UNIT: channels; MINE: units of a team
constexpr int X_BYTES = IMAGES * LINE, UNIT_BYTES = UNIT * LINE, STAGE_BYTES = X_BYTES + UNITS * UNIT_BYTES;
constexpr int DEPTH = 64, SLICE_STEPS = 4;  // numbers of k in a slice, and the instructions that they take
constexpr int OUT_IMAGES = 64, OUT_BYTES = OUT_IMAGES * LINE;  // of a box that leaves; a team has two on their way,
constexpr int PARTS = IMAGES / OUT_IMAGES;                     // or one for each part of its units, with a residual
constexpr int MOST_STEPS = 100;
constexpr u32 NO_TAP = 0xffff;

// A pixel under a cell, from the cell's first on, and the tap that takes it to each unit.
struct Step {
    short down, right;
    unsigned short taps[UNITS];  // NO_TAP: it does not reach that far
};
struct Unit {
    unsigned short down, right;  // its place in the cell
    u32 n;                       // the first of its channels, of those that the cell has
};
struct Cells {
    u32 blocks, channels;  // slices of k a tap; channels of w a tap
    u32 tiles_n, cell_n;   // cells over all channels of y; channels of one
    u32 lines, columns;    // cells of an image
    u32 cell_h, cell_w;    // places of a cell
    u32 step_h, step_w;    // pixels from a cell to the next
    u32 lines_in, columns_in, lines_out, columns_out;
    u32 steps;
    Unit units[UNITS];
    Step list[MOST_STEPS];
};

// A cell of a group of images.
struct Tile {
    u32 group, line, column, n;

    __device__ __forceinline__ Tile(const Cells& cells, u32 number) {
        const u32 all = cells.tiles_n * cells.columns * cells.lines;
        group = number / all;
        u32 at = (number + group) % all;  // no block has the same cells of all images: at the edge they take less time
        n = at % cells.tiles_n * cells.cell_n, at /= cells.tiles_n;
        column = at % cells.columns, line = at / cells.columns;
    }
    // Calls what(step, line, column) for each pixel that is there.
    template <class What>
    __device__ __forceinline__ void each_step(const Cells& cells, const What& what) const {
        const int top = line * cells.step_h, left = column * cells.step_w;
        for (u32 i = 0; i < cells.steps; ++i) {
            const int h = top + cells.list[i].down, w = left + cells.list[i].right;
            if (static_cast<u32>(h) < cells.lines_in && static_cast<u32>(w) < cells.columns_in) what(cells.list[i], h, w);
        }
    }
};

// A slice of the team's units FIRST to LAST.
template <class P, int FIRST, int LAST>
__device__ __forceinline__ void multiply(float (&sums)[MINE][IMAGES / 8][4], u32 x_at, u32 w_at) {
    const unsigned long long x = mixed_tile(x_at), w = mixed_tile(w_at);  // they count in 16 bytes
    begin_products();
#pragma unroll
    for (int i = FIRST; i <= LAST; ++i)
#pragma unroll
        for (int step = 0; step < SLICE_STEPS; ++step)
            Wgmma<P, IMAGES>::add(sums[i], w + (i * UNIT_BYTES + 32 * step) / 16, x + 2 * step, true);
    end_products();
}

// Adds what lies in a unit's boxes, an image a line, to its sums, which are turned.
template <class Y>
__device__ __forceinline__ void add_boxes(float (&sums)[IMAGES / 8][4], const char* boxes) {
    const int warp = threadIdx.x % TEAM / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
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
__global__ void __launch_bounds__(TEAM * (TEAMS + 1), 1)
conv_images(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map,
            const __grid_constant__ TensorMap y_map, const __grid_constant__ TensorMap other_map, const float* bias, u32 N, u32 box_images, u32 tiles,
            const __grid_constant__ Cells cells, u32 code, u32 a_bits, u32 b_bits) {
    using Y = typename P::Number;
    extern __shared__ uint4 room[];
    __shared__ Signal full[STAGES], empty[STAGES], added[TEAMS];
    char* const stages = reinterpret_cast<char*>(room) + (-shared_address(room) & 1023);
    const int team = threadIdx.x / TEAM, warp = threadIdx.x % TEAM / 32, lane = threadIdx.x % 32;
    let_next_begin();
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            full[s].init(UNITS);
            empty[s].init(4 * TEAMS);
        }
        for (int i = 0; i < TEAMS; ++i) added[i].init(1);
        show_signals();
    }
    __syncthreads();

    if (team == TEAMS) {
        keep_registers<40>();
        // A warp a unit, the last one also pixels: one alone would take longer to ask for a slice than its products take.
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
        const bool is_first = threadIdx.x % TEAM == 0;  // of the team: stores
        constexpr int OUTLETS = ADDS ? MINE * PARTS : 2;
        char* const outlets = stages + STAGES * STAGE_BYTES + team * (OUTLETS * OUT_BYTES);
        const Activation activation{code, __uint_as_float(a_bits), __uint_as_float(b_bits)};
        const auto give_back = [&](u32 turn) {
            if (lane == 0) empty[turn % STAGES].arrive();
        };
        u32 turn = 0, round = 0;
        if (ADDS && is_first) wait_for_kernel_before();  // who may have made the residual
        for (u32 number = blockIdx.x; number < tiles; number += gridDim.x, ++round) {
            const Tile tile(cells, number);
            const Unit* const units = cells.units + team * MINE;
            const int image = tile.group * IMAGES;
            const auto line_of = [&](const Unit& unit) { return tile.line * cells.cell_h + unit.down; };
            const auto column_of = [&](const Unit& unit) { return tile.column * cells.cell_w + unit.right; };
            if (ADDS && is_first) {
                wait_for_stores<0>();  // what left from there is gone
                added[team].arrive_expecting(OUTLETS * OUT_BYTES);
                for (int i = 0; i < OUTLETS; ++i) {
                    const Unit& unit = units[i / PARTS];
                    load_box(outlets + i * OUT_BYTES, other_map, added[team], tile.n + unit.n, column_of(unit), line_of(unit),
                             image + i % PARTS * OUT_IMAGES);
                }
            }
            float shifts[MINE][2];  // the bias of the lane's channels
#pragma unroll
            for (int i = 0; i < 2 * MINE; ++i) {
                const u32 n = tile.n + units[i / 2].n + 16 * warp + lane / 4 + i % 2 * 8;
                shifts[i / 2][i % 2] = bias != nullptr && n < N ? bias[n] : 0.0f;
            }
            float sums[MINE][IMAGES / 8][4] = {};
            const u32 begin = turn;
            tile.each_step(cells, [&](const Step& step, int, int) {
                // Votes: so the compiler knows that all agree, else products would wait for each other.
                const unsigned short* const taps = step.taps + team * MINE;
                const bool has_first = __any_sync(~0u, taps[0] != NO_TAP);
                const bool has_last = __any_sync(~0u, taps[MINE - 1] != NO_TAP);
                for (u32 block = 0; block < cells.blocks; ++block, ++turn) {
                    const u32 s = turn % STAGES, x_at = shared_address(stages + s * STAGE_BYTES);
                    const u32 w_at = x_at + X_BYTES + team * (MINE * UNIT_BYTES);
                    full[s].wait(turn / STAGES % 2);
                    if (has_first && has_last) multiply<P, 0, MINE - 1>(sums, x_at, w_at);
                    else if (has_first) multiply<P, 0, 0>(sums, x_at, w_at);
                    else if (has_last) multiply<P, MINE - 1, MINE - 1>(sums, x_at, w_at);
                    else end_products();
                    // The products before are done: their room goes back.
                    wait_for_products<1>();
                    if (turn > begin) give_back(turn - 1);
                }
            });
            wait_for_products<0>();
            if (turn > begin) give_back(turn - 1);
            if (ADDS) added[team].wait(round % 2);
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
                        if (is_first) wait_for_stores<1>();  // what left from here is gone
                        wait_for_team(team);
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
                    wait_for_team(team);
                    if (is_first && h < cells.lines_out && w < cells.columns_out)
                        store_box(y_map, outlet, tile.n + units[i].n, w, h, image + part * OUT_IMAGES);
                }
            }
        }
        if (is_first) wait_for_stores<0>();
    }
}
