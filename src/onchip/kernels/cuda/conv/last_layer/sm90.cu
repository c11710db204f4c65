// conv/last_layer/sm90.cu: convolution and transposed convolution to few output channels, 16 bits, by TMA and wgmma.
//
// Idea    Cells as in conv/last_layer/mma.cu, one pixel of x apart along a row: 64 cells are the M of a gemm, the
//         channels of a cell's positions its N. Persistent: weights stay in shared memory, a producer warp loads
//         patches of x by TMA. Adjacent cells are adjacent pixels and groups of eight have a fixed pitch, so a wgmma
//         descriptor addresses a tap of 64 windows in place. Epilogues overlap the wgmma of the other TEAMS - 1
//         warpgroups. It issues 320,000 instructions per scheduler for the case below, mma.cu 805,000.
// Order   k over the window's taps, then channels, 16 per instruction; then the bias. Independent of patch and B.
// Floor   64 -> 3, 5x5, stride 2, 32x32 -> 64x64, B = 5,248, float16: 817 MB / 4.8 TB/s = 170 us. Shared memory, cells
//         of 4x2: 2.75 KB per wgmma (22 clocks; math 12): 335,000 clocks per SM, 191 us at 1.755 GHz, + 28 us to load
//         pixels. H200: 280 us, shared memory busy 83 % (mma.cu: 661 us); to float32 303 us, to uint8 pixels 285 us.
// Layout  x (B, H, W, C), y NHWC or NCHW; w (taps, blocks of 64 channels, columns, 64); bias (N) or nullptr.
// Shared  STAGES patches of 128 B per pixel and 64 channels; weights; y of TEAMS tiles, its piece list; 1 KB alignment.
// Limits  Stride 1 along a row unless transposed; C a multiple of 16 B; < 2^31 patches; weights and two patches fit;
//         sm_90a. Inf or NaN in x spreads to its cells.
#include "mma/tma.cuh"
#include "conv/last_layer/cells.cuh"
#include "common/fast_divide.cuh"
#include "mma/wgmma.cuh"

constexpr int WARPGROUP = 128, WARPGROUP_WARPS = 4;  // a consumer warpgroup: 64 cells
constexpr int LINE = 128;                  // bytes of a pixel's channels per block
constexpr int STEP_BYTES = 32, STEPS = LINE / STEP_BYTES;  // bytes per step of k; steps per block
constexpr int MAX_STAGES = 8;

struct Axis {
    int out;              // positions of y
    int cell, step;       // positions per cell; pixels from one cell to the next
    int first;            // the pixel at the first tap of the first cell
    int taps, apart;      // taps of a cell's window, and their distance in pixels
    int cells, part;      // cells per warpgroup tile, and per warp
    Divider by_tiles, by_patches;  // tiles per patch, patches per image
};

struct Layer {
    int N;
    int blocks, steps;  // blocks of LINE bytes of channels; steps of k in the last of them
    int columns;        // pixels per row of a patch
    int pitch;          // bytes from 8 cells of a tile to the next 8
    int patch_bytes;    // per block of channels
    int stages;         // patches resident or in flight
    u32 is_last;        // whether y is NHWC
    int unit, pieces;   // bytes per store; stores per warp tile, padded to 16 B
    Axis h, w;
    Divider by_units, by_lines;  // units per row, and rows, of a warp's part of y

    __device__ __forceinline__ int lines() const { return h.part * h.cell; }  // of a warp's part of y
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

// One store of a warp's part of y.
struct Piece {
    int to;            // offset in y from the part's first element
    short line, unit;  // row of the part, unit of the row: for bounds checks
};

// Fills the list of stores of a part: the same for every part.
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
// Stores a warp's part of y from position (top, left) of an image on, clipped to y.
template <class Unit, class Y>
__device__ __forceinline__ void move_out(const Layer& t, const Piece* pieces, const Y* made, Y* y, int image, int top,
                                         int left) {
    constexpr int V = sizeof(Unit) / sizeof(Y);
    const int planes = t.is_last ? 1 : t.N, numbers = t.is_last ? t.N : 1;
    const int all = planes * t.lines() * t.by_units.size;
    const int lines = t.h.out - top, units = (t.w.out - left) * numbers / V;  // in bounds
    Y* const there = y + ((static_cast<long long>(image) * planes * t.h.out + top) * t.w.out + left) * numbers;
#pragma unroll 2
    for (int i = threadIdx.x % 32; i < all; i += 32) {
        const Piece piece = pieces[i];
        if (piece.line < lines && piece.unit < units)
            *reinterpret_cast<Unit*>(there + piece.to) = reinterpret_cast<const Unit*>(made)[i];
    }
}

// A lane's two cells. offsets: of the lane's first column
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

// COUNT consecutive steps of k of rows x and weights w. sums = false: the first one overwrites c.
template <class P, int NT, int COUNT>
__device__ __forceinline__ void add_steps(float (&c)[NT][4], unsigned long long x, unsigned long long w, bool sums) {
#pragma unroll
    for (int step = 0; step < COUNT; ++step)
        Wgmma<P, 8 * NT>::add(c, behind(x, step * STEP_BYTES), behind(w, step * STEP_BYTES), sums || step > 0);
}

// A warpgroup computes 64 cells x 8 NT columns at a time; one more warp is the TMA producer.
template <class P, class Y, int NT, int WARPGROUPS, class Act>
__global__ void __launch_bounds__(WARPGROUP * WARPGROUPS + 32, 1)
conv_last_layer_sm90(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map, const float* bias,
                Y* y, u32 patches, const __grid_constant__ Layer t, u32 code, u32 a_bits, u32 b_bits) {
    using Stored = typename StoredOf<sizeof(typename P::Element)>::type;
    constexpr int THREADS = WARPGROUP * WARPGROUPS + 32, COLUMNS = 8 * NT;
    constexpr int TILE_BYTES = COLUMNS * LINE;  // weights per tap and block of channels
    extern __shared__ uint4 room[];
    __shared__ Signal full[MAX_STAGES], empty[MAX_STAGES], has_weights;
    __shared__ __align__(8) int offsets[COLUMNS];
    __shared__ __align__(8) float shifts[COLUMNS];
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, stages = t.stages;
    const int weights = t.h.taps * t.w.taps * t.blocks, stage_bytes = t.blocks * t.patch_bytes;
    char* const held = reinterpret_cast<char*>(room) + (-shared_address(room) & 1023);
    char* const pixels = held + round_up(weights * TILE_BYTES, 1024);
    Piece* const pieces = reinterpret_cast<Piece*>(pixels + stages * stage_bytes);
    Y* const all_made = reinterpret_cast<Y*>(pieces + t.pieces);

    let_next_begin();
    const u32 tiles = t.h.by_tiles.size * t.w.by_tiles.size;  // per patch
    if (threadIdx.x == 0) {
        for (int s = 0; s < stages; ++s) {
            full[s].init(1);
            empty[s].init(WARPGROUP_WARPS * WARPGROUPS);
        }
        has_weights.init(1);
        show_signals();
    }
    // Per column: its offset from the cell's first element, and its bias. Padding columns have offset -1.
    const int numbers = t.is_last ? t.N : 1;
    for (int i = threadIdx.x; i < COLUMNS; i += THREADS) {
        const int n = i % t.N, place = i / t.N;
        const int at = (place / t.w.cell * t.places() + place % t.w.cell) * numbers;
        offsets[i] = place < t.h.cell * t.w.cell ? at + (t.is_last ? n : n * t.lines() * t.places()) : -1;
        shifts[i] = bias != nullptr && offsets[i] >= 0 ? bias[n] : 0.0f;
    }
    list_pieces<Y>(t, pieces, THREADS);
    __syncthreads();

    if (warp == WARPGROUP_WARPS * WARPGROUPS) {
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
    const bool has_pairs = t.is_last && t.w.cell * t.N % 2 == 0;  // adjacent columns are adjacent in y
    const int warpgroup = warp / WARPGROUP_WARPS, mine = warp % WARPGROUP_WARPS, g = lane / 4, q = lane % 4;
    Y* const made = all_made + warp * t.lines() * t.places() * t.N;
    Y* const cell = made + g * t.w.cell * numbers;  // the lane's first; the other is a row or 8 cells further
    Y* const other = cell + (t.h.part == 2 ? t.h.cell * t.places() : 8 * t.w.cell) * numbers;
    wait_for_kernel_before();
    has_weights.wait(0);
    int s = 0;
    u32 parity = 0, next = warpgroup;  // the warpgroup's next tile, relative to the patch
    for (u32 number = blockIdx.x; number < patches; number += gridDim.x) {
        full[s].wait(parity);  // also without a tile: a parity only distinguishes adjacent phases
        if (next >= tiles) {
            __syncwarp();  // all lanes have passed the wait
            if (lane == 0) empty[s].arrive();
        }
        for (; next < tiles; next += WARPGROUPS) {
            u32 rest = next;
            const int tile_w = take_rest(rest, t.w.by_tiles) * t.w.cells, tile_h = rest * t.h.cells;
            float c[NT][4];
            const u32 first =
                shared_address(pixels) + s * stage_bytes + (tile_h * t.h.step * t.columns + tile_w) * LINE;
            unsigned long long line = mixed_tile(first, t.pitch), w = mixed_tile(shared_address(held));
            begin_products();
            bool sums = false;  // the first wgmma overwrites c
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
            if (next + WARPGROUPS >= tiles && lane == 0) empty[s].arrive();

            const Patch patch(t, number);
#pragma unroll
            for (int j = 0; j < NT; ++j) {
                const float2 two = *reinterpret_cast<const float2*>(shifts + 8 * j + 2 * q);
                c[j][0] += two.x, c[j][1] += two.y, c[j][2] += two.x, c[j][3] += two.y;
            }
            activate_all<Stored>(c, activation);
            __syncwarp();  // all lanes have stored the previous tile
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
