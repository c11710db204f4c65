// conv/last_layer/sm90.cu: convolutions and transposed ones to few channels of y, as conv/last_layer/mma.cu makes them, in 16 bits at the
// rate at which Hopper's tensor cores read shared memory.
//
// Idea    y falls into cells as in conv/last_layer/mma.cu, one pixel of x apart along a line: 64 cells are the rows of a product, the
//         channels of a cell's places its columns. One warp has patches of pixels brought by the tensor memory accelerator,
//         several ahead, each pixel once, zeros where there are none. Eight cells of a line are eight neighbouring pixels
//         there, and eight lines of cells lie as many lines of the patch apart as cells do: the tensor cores read a tap of
//         64 windows where the patch lies, and the next tap is another address. Weights lie in shared memory for the whole
//         launch. TEAMS times four warps have a tile of 64 cells each; while some finish theirs, others multiply. What a
//         warp has made is put together in shared memory as y lies, and leaves in runs of a few lines.
//         What conv/last_layer/mma.cu does by ldmatrix and mma.sync takes 805,000 instructions of a scheduler for the case below,
//         which is what it waits for; this takes 320,000.
// Order   A sum runs over the window's taps, then channels, 16 terms an instruction. Then comes the bias. Neither the patch
//         nor B decides anything.
// Floor   x in and y out. 64 -> 3 channels, 5x5 by steps of 2, 32x32 -> 64x64, B = 5,248, float16: 817 MB / 4.8 TB/s =
//         170 us. Cells of 4x2 places have windows of 12 taps and 24 columns: a product of 64 cells and 16 terms reads
//         2 KB of rows and 0.75 KB of weights, 22 clocks at 128 B each, and multiplies for 12. That is 335,000 clocks of a
//         multiprocessor, 191 us at 1.755 GHz; the pixels' way into shared memory takes 28 us more of it. An H200 took
//         280 us with shared memory busy for 83 % of them (conv/last_layer/mma.cu: 661 us); to float32 303 us, to pixels 285 us.
// Layout  x (B, H, W, C), y (B, HO, WO, N) or (B, N, HO, WO); w (taps, blocks of 64 channels, columns, 64); bias (N) or
//         none. One axis is an image of one line.
// Shared  STAGES patches: 128 B a pixel and block of 64 channels; the weights; y of TEAMS tiles; 8 B a column, and a piece
//         of what a warp makes; 1 KB to begin at a multiple of it.
// Limits  Cells are one pixel apart along a line: no strides there but a transposed convolution's. C numbers are a multiple
//         of 16 B; less than 2^31 patches; weights and two patches fit; sm_90a. A number that is not finite makes NaNs of
//         all places of the cells whose windows have it.
#include "mma/tma.cuh"
#include "conv/last_layer/cells.cuh"
#include "common/fast_divide.cuh"
#include "mma/wgmma.cuh"

constexpr int TEAM = 128, TEAM_WARPS = 4;  // threads that multiply 64 cells
constexpr int LINE = 128;                  // bytes of a pixel's channels, in a block of them
constexpr int STEP_BYTES = 32, STEPS = LINE / STEP_BYTES;  // of a step of k; in a block
constexpr int MOST_STAGES = 8;

struct Axis {
    int out;              // places of y
    int cell, step;       // places of a cell; pixels from one cell to the next
    int first;            // the pixel at the first tap of the first cell
    int taps, apart;      // of a cell's window, and from one to the next in pixels
    int cells, part;      // cells of a team's tile, and of what a warp has of it
    Divider by_tiles, by_patches;  // tiles of a patch, patches of an image
};

struct Layer {
    int N;
    int blocks, steps;  // blocks of LINE bytes of channels; steps of k in the last of them
    int columns;        // pixels of a patch's line
    int pitch;          // bytes of a patch from 8 cells of a tile to the next 8
    int patch_bytes;    // of a block of channels
    int stages;         // patches that are there or on their way
    u32 is_last;        // whether y's channels are
    int unit, pieces;   // bytes that leave at once; how many pieces a warp makes, filled up to 16 B
    Axis h, w;
    Divider by_units, by_lines;  // units of a line, and lines, of what a warp makes

    __device__ __forceinline__ int lines() const { return h.part * h.cell; }  // of what a warp makes
    __device__ __forceinline__ int places() const { return w.part * w.cell; }
};

// A patch: its image, and its first cell.
struct Patch {
    int image, top, left;

    __device__ __forceinline__ Patch(const Layer& t, u32 number) {
        left = static_cast<int>(take_rest(number, t.w.by_patches)) * static_cast<int>(t.w.by_tiles.size) * t.w.cells;
        top = static_cast<int>(take_rest(number, t.h.by_patches)) * static_cast<int>(t.h.by_tiles.size) * t.h.cells;
        image = number;
    }
};

// A unit of what a warp makes, on its way out.
struct Piece {
    int to;            // numbers of y from the part's first on
    short line, unit;  // of the part, and of the line: whether it is there at all
};

// Where all units of a part go: the same for every part.
template <class Y>
__device__ __forceinline__ void list_pieces(const Layer& t, Piece* pieces, int threads) {
    const int planes = t.is_last ? 1 : t.N, numbers = t.is_last ? t.N : 1, V = t.unit / static_cast<int>(sizeof(Y));
    for (u32 i = threadIdx.x; i < planes * t.lines() * t.by_units.size; i += threads) {
        u32 plane = i;
        const int unit = take_rest(plane, t.by_units), line = take_rest(plane, t.by_lines);
        const int lines = static_cast<int>(plane) * t.h.out + line;
        pieces[i] = {lines * t.w.out * numbers + unit * V, static_cast<short>(line), static_cast<short>(unit)};
    }
}
// What a warp has made goes out: from place (top, left) of an image on, what there is of it.
template <class Unit, class Y>
__device__ __forceinline__ void move_out(const Layer& t, const Piece* pieces, const Y* made, Y* y, int image, int top,
                                         int left) {
    constexpr int V = sizeof(Unit) / sizeof(Y);
    const int planes = t.is_last ? 1 : t.N, numbers = t.is_last ? t.N : 1;
    const int all = planes * t.lines() * t.by_units.size;
    const int lines = t.h.out - top, units = (t.w.out - left) * numbers / V;  // that there are
    Y* const there = y + ((static_cast<long long>(image) * planes * t.h.out + top) * t.w.out + left) * numbers;
#pragma unroll 2
    for (int i = threadIdx.x % 32; i < all; i += 32) {
        const Piece piece = pieces[i];
        if (piece.line < lines && piece.unit < units)
            *reinterpret_cast<Unit*>(there + piece.to) = reinterpret_cast<const Unit*>(made)[i];
    }
}

// What a lane has of its two cells. offsets: of the lane's first column
template <bool HAS_PAIRS, class Y, int NT>
__device__ __forceinline__ void store_cells(Y* first, Y* second, const int* offsets, const float (&c)[NT][4]) {
#pragma unroll
    for (int j = 0; j < NT; ++j) {
        const int2 two = *reinterpret_cast<const int2*>(offsets + 8 * j);
        const int at[2] = {two.x, two.y};
        store_two<HAS_PAIRS>(first, at, c[j][0], c[j][1]);
        store_two<HAS_PAIRS>(second, at, c[j][2], c[j][3]);
    }
}

// Steps of k, one behind the other, of rows x and weights w. The first makes the sums if there are none yet.
template <class P, int NT, int COUNT>
__device__ __forceinline__ void add_steps(float (&c)[NT][4], unsigned long long x, unsigned long long w, bool sums) {
#pragma unroll
    for (int step = 0; step < COUNT; ++step)
        Wgmma<P, 8 * NT>::add(c, behind(x, step * STEP_BYTES), behind(w, step * STEP_BYTES), sums || step > 0);
}

// 64 cells a team at a time, 8 NT columns; a warp more than TEAMS teams.
template <class P, class Y, int NT, int TEAMS, class Act>
__global__ void __launch_bounds__(TEAM * TEAMS + 32, 1)
conv_last_wgmma(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map, const float* bias, Y* y,
                u32 patches, const __grid_constant__ Layer t, u32 code, u32 a_bits, u32 b_bits) {
    using Stored = typename StoredOf<sizeof(typename P::Number)>::type;
    constexpr int THREADS = TEAM * TEAMS + 32, COLUMNS = 8 * NT;
    constexpr int TILE_BYTES = COLUMNS * LINE;  // of weights, of a tap and a block of channels
    extern __shared__ uint4 room[];
    __shared__ Signal full[MOST_STAGES], empty[MOST_STAGES], has_weights;
    __shared__ __align__(8) int offsets[COLUMNS];
    __shared__ __align__(8) float shifts[COLUMNS];
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, stages = t.stages;
    const int weights = t.h.taps * t.w.taps * t.blocks, stage_bytes = t.blocks * t.patch_bytes;
    char* const held = reinterpret_cast<char*>(room) + (-shared_address(room) & 1023);
    char* const pixels = held + round_up(weights * TILE_BYTES, 1024);
    Piece* const pieces = reinterpret_cast<Piece*>(pixels + stages * stage_bytes);
    Y* const all_made = reinterpret_cast<Y*>(pieces + t.pieces);

    let_next_begin();
    const u32 tiles = t.h.by_tiles.size * t.w.by_tiles.size;  // of a patch
    if (threadIdx.x == 0) {
        for (int s = 0; s < stages; ++s) {
            full[s].init(1);
            empty[s].init(TEAM_WARPS * TEAMS);
        }
        has_weights.init(1);
        show_signals();
    }
    // Of each column: where its number lies, from the cell's first on, and its bias. Those behind the last have none.
    const int numbers = t.is_last ? t.N : 1;
    for (int i = threadIdx.x; i < COLUMNS; i += THREADS) {
        const int n = i % t.N, place = i / t.N;
        const int at = (place / t.w.cell * t.places() + place % t.w.cell) * numbers;
        offsets[i] = place < t.h.cell * t.w.cell ? at + (t.is_last ? n : n * t.lines() * t.places()) : -1;
        shifts[i] = bias != nullptr && offsets[i] >= 0 ? bias[n] : 0.0f;
    }
    list_pieces<Y>(t, pieces, THREADS);
    __syncthreads();

    if (warp == TEAM_WARPS * TEAMS) {
        if (lane != 0) return;
        has_weights.arrive_expecting(weights * TILE_BYTES);
        for (int i = 0; i < weights; ++i) load_box(held + i * TILE_BYTES, w_map, has_weights, 0, i * COLUMNS);
        wait_for_kernel_before();
        const int lines = (t.h.by_tiles.size * t.h.cells - 1) * t.h.step + (t.h.taps - 1) * t.h.apart + 1;
        int s = 0;
        u32 turn = 0;
        for (u32 number = blockIdx.x; number < patches; number += gridDim.x) {
            const Patch patch(t, number);
            if (turn > 0) empty[s].wait((turn - 1) & 1);
            full[s].arrive_expecting(t.blocks * lines * t.columns * LINE);
            for (int block = 0; block < t.blocks; ++block)
                load_box(pixels + s * stage_bytes + block * t.patch_bytes, x_map, full[s], block * (LINE / 2),
                         patch.left + t.w.first, patch.top * t.h.step + t.h.first, patch.image);
            if (++s == stages) s = 0, ++turn;
        }
        return;
    }

    const Act activation = activation_of<Act>(code, a_bits, b_bits);
    const bool has_pairs = t.is_last && t.w.cell * t.N % 2 == 0;  // of columns, that are neighbours in y
    const int team = warp / TEAM_WARPS, mine = warp % TEAM_WARPS, g = lane / 4, q = lane % 4;
    Y* const made = all_made + warp * t.lines() * t.places() * t.N;
    Y* const cell = made + g * t.w.cell * numbers;  // the lane's first; the other is in the next line, or 8 on
    Y* const other = cell + (t.h.part == 2 ? t.h.cell * t.places() : 8 * t.w.cell) * numbers;
    wait_for_kernel_before();
    has_weights.wait(0);
    int s = 0;
    u32 parity = 0, next = team;  // the team's next tile, from the patch's first on
    for (u32 number = blockIdx.x; number < patches; number += gridDim.x) {
        full[s].wait(parity);  // even where the team has no tile: a parity tells a turn from the next alone
        if (next >= tiles) {
            __syncwarp();  // all lanes have seen it
            if (lane == 0) empty[s].arrive();
        }
        for (; next < tiles; next += TEAMS) {
            u32 rest = next;
            const int tile_w = take_rest(rest, t.w.by_tiles) * t.w.cells, tile_h = rest * t.h.cells;
            float c[NT][4];
            const u32 first = shared_address(pixels) + s * stage_bytes + (tile_h * t.h.step * t.columns + tile_w) * LINE;
            unsigned long long line = mixed_tile(first, t.pitch), w = mixed_tile(shared_address(held));
            begin_products();
            bool sums = false;  // the first product makes them
            for (int tap_h = 0; tap_h < t.h.taps; ++tap_h, line = behind(line, t.h.apart * t.columns * LINE)) {
                unsigned long long tap = line;
                for (int tap_w = 0; tap_w < t.w.taps; ++tap_w, tap = behind(tap, t.w.apart * LINE)) {
                    unsigned long long x = tap;
                    for (int block = 0; block < t.blocks; ++block) {
                        if (block + 1 < t.blocks || t.steps == STEPS) add_steps<P, NT, STEPS>(c, x, w, sums);
                        else
                            for (int step = 0; step < t.steps; ++step) {
                                const u32 further = step * STEP_BYTES;
                                add_steps<P, NT, 1>(c, behind(x, further), behind(w, further), sums || step > 0);
                            }
                        sums = true;
                        x = behind(x, t.patch_bytes), w = behind(w, TILE_BYTES);
                    }
                }
            }
            end_products();
            wait_for_products<0>();
            if (next + TEAMS >= tiles && lane == 0) empty[s].arrive();

            const Patch patch(t, number);
#pragma unroll
            for (int j = 0; j < NT; ++j) {
                const float2 two = *reinterpret_cast<const float2*>(shifts + 8 * j + 2 * q);
                c[j][0] += two.x, c[j][1] += two.y, c[j][2] += two.x, c[j][3] += two.y;
            }
            activate_all<Stored>(c, activation);
            __syncwarp();  // nobody moves the last tile out any more
            if (has_pairs) store_cells<true>(cell, other, offsets + 2 * q, c);
            else store_cells<false>(cell, other, offsets + 2 * q, c);
            __syncwarp();
            const int top = (patch.top + tile_h + (t.h.part == 2 ? 2 * mine : 0)) * t.h.cell;
            const int left = (patch.left + tile_w + (t.h.part == 2 ? 0 : 16 * mine)) * t.w.cell;
            if (t.unit == 16) move_out<uint4>(t, pieces, made, y, patch.image, top, left);
            else if (t.unit == 4 && sizeof(Y) < 4) move_out<u32>(t, pieces, made, y, patch.image, top, left);
            else move_out<Y>(t, pieces, made, y, patch.image, top, left);
        }
        next -= tiles;
        if (++s == stages) s = 0, parity ^= 1;
    }
}
