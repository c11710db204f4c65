// conv/last_layer/sm90.cu: convolution and transposed convolution to few output channels, 16 bits, by TMA and wgmma.
//
// Idea    Cells as in conv/last_layer/mma.cu, one pixel of x apart along a row: 64 cells are the M of a gemm, the
//         channels of a cell's positions its N. Persistent: weights stay in shared memory, a producer warp loads
//         patches of x by TMA. Adjacent cells are adjacent pixels and groups of eight have a fixed pitch, so a wgmma
//         descriptor addresses a tap of 64 windows in place. Epilogues overlap the wgmma of the other WARPGROUPS - 1
//         warpgroups. The case below issues 320,000 instructions per scheduler, in mma.cu 805,000.
// Order   k over the window's taps, then channels, 16 per instruction; then the bias. Independent of patch and B.
// Floor   64 -> 3, 5x5, stride 2, 32x32 -> 64x64, B = 5,248, float16: 817 MB / 4.8 TB/s = 170 us. Shared memory, cells
//         of 4x2: 2.75 KB per wgmma (22 clocks; math 12): 335,000 clocks per SM, 191 us at 1.755 GHz, + 28 us to load
//         pixels. H200: 280 us, shared memory busy 83 % (mma.cu: 661 us); to float32 303 us, to uint8 pixels 285 us.
// Layout  x (B, H, W, C), y NHWC or NCHW; w (taps, chunks of 64 channels, columns, 64); bias (N) or nullptr.
// Shared  STAGES patches of 128 B per pixel and 64 channels; weights; y of WARPGROUPS tiles; stores; 1 KB alignment.
// Limits  Stride 1 along a row unless transposed; C a multiple of 16 B; < 2^31 patches; weights and two patches fit;
//         sm_90a. Inf or NaN in x spreads to its cells.
#include "mma/tma.cuh"
#include "conv/last_layer/cells.cuh"
#include "common/fast_divide.cuh"
#include "mma/wgmma.cuh"

constexpr int WARPGROUP = 128, WARPGROUP_WARPS = 4;  // a consumer warpgroup: 64 cells
constexpr int LINE = 128;  // bytes of a pixel's channels per chunk
constexpr int STEP_BYTES = 32, STEPS = LINE / STEP_BYTES;  // bytes per step of k; steps per chunk
constexpr int MAX_STAGES = 8;

struct Axis {
    int side_out;           // positions of y
    int cell, step;         // positions per cell; pixels from one cell to the next
    int first;              // the pixel at the first tap of the first cell
    int taps, dilation;     // taps of a cell's window, and their distance in pixels
    int cells, warp_cells;  // cells per warpgroup tile, and per warp
    Divider by_tiles, by_patches;  // tiles per patch, patches per image
};

struct Layer {
    int N;
    int chunks, steps;  // chunks of LINE bytes of channels; steps of k in the last
    int columns;        // pixels per row of a patch
    int pitch;          // bytes from 8 cells of a tile to the next 8
    int patch_bytes;    // per chunk of channels
    int stages;         // patches resident or in flight
    u32 is_nhwc;        // whether y is NHWC
    int unit, stores;   // bytes per store; stores per warp tile, padded to 16 B
    Axis h, w;
    Divider by_units, by_lines;  // units per row, and rows, of a warp's tile of y

    __device__ __forceinline__ int lines() const { return h.warp_cells * h.cell; }  // of a warp's tile of y
    __device__ __forceinline__ int positions() const { return w.warp_cells * w.cell; }
};

// A patch: its image, and its first cell.
struct Patch {
    int image, top, left;

    __device__ __forceinline__ Patch(const Layer& t, u32 index) {
        left = static_cast<int>(pop_index(index, t.w.by_patches)) * static_cast<int>(t.w.by_tiles.size) * t.w.cells;
        top = static_cast<int>(pop_index(index, t.h.by_patches)) * static_cast<int>(t.h.by_tiles.size) * t.h.cells;
        image = index;
    }
};

// One store of a warp's tile of y.
struct Store {
    int to;            // offset in y from the tile's first element
    short line, unit;  // row of the tile, unit of the row: for bounds checks
};

// Fills the list of stores, the same for every warp tile.
template <class Y>
__device__ __forceinline__ void list_stores(const Layer& t, Store* stores, int threads) {
    const int planes = t.is_nhwc ? 1 : t.N, inner = t.is_nhwc ? t.N : 1, V = t.unit / static_cast<int>(sizeof(Y));
    for (u32 i = threadIdx.x; i < planes * t.lines() * t.by_units.size; i += threads) {
        u32 plane = i;
        const int unit = pop_index(plane, t.by_units), line = pop_index(plane, t.by_lines);
        const int lines = static_cast<int>(plane) * t.h.side_out + line;
        stores[i] = {lines * t.w.side_out * inner + unit * V, static_cast<short>(line), static_cast<short>(unit)};
    }
}
// Stores a warp's tile of y from (top, left) of an image on, clipped to y.
template <class Unit, class Y>
__device__ __forceinline__ void store_tile(const Layer& t, const Store* stores, const Y* y_tile, Y* y, int image,
                                           int top, int left) {
    constexpr int V = sizeof(Unit) / sizeof(Y);
    const int planes = t.is_nhwc ? 1 : t.N, inner = t.is_nhwc ? t.N : 1;
    const int all = planes * t.lines() * t.by_units.size;
    const int lines = t.h.side_out - top, units = (t.w.side_out - left) * inner / V;  // in bounds
    Y* const dst = y + ((static_cast<long long>(image) * planes * t.h.side_out + top) * t.w.side_out + left) * inner;
#pragma unroll 2
    for (int i = threadIdx.x % 32; i < all; i += 32) {
        const Store store = stores[i];
        if (store.line < lines && store.unit < units)
            *reinterpret_cast<Unit*>(dst + store.to) = reinterpret_cast<const Unit*>(y_tile)[i];
    }
}

// A lane's two cells. offsets: of the lane's first column
template <bool HAS_PAIRS, class Y, int NT>
__device__ __forceinline__ void store_cells(Y* first, Y* second, const int* offsets, const float (&c)[NT][4]) {
#pragma unroll
    for (int j = 0; j < NT; ++j) {
        const int2 pair = *reinterpret_cast<const int2*>(offsets + 8 * j);
        const int at[2] = {pair.x, pair.y};
        store_two<HAS_PAIRS>(first, at, c[j][0], c[j][1]);
        store_two<HAS_PAIRS>(second, at, c[j][2], c[j][3]);
    }
}

// COUNT consecutive steps of k of rows x and weights w. adds = false: the first step overwrites c.
template <class P, int NT, int COUNT>
__device__ __forceinline__ void add_steps(float (&c)[NT][4], unsigned long long x, unsigned long long w, bool adds) {
#pragma unroll
    for (int step = 0; step < COUNT; ++step)
        Wgmma<P, 8 * NT>::add(c, advance(x, step * STEP_BYTES), advance(w, step * STEP_BYTES), adds || step > 0);
}

// A warpgroup computes 64 cells x 8 NT columns at a time; one more warp is the TMA producer.
template <class P, class Y, int NT, int WARPGROUPS, class Act>
__global__ void __launch_bounds__(WARPGROUP * WARPGROUPS + 32, 1)
conv_last_layer_sm90(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map,
                const float* bias, Y* y, u32 patches, const __grid_constant__ Layer t, u32 code, u32 a_bits,
                u32 b_bits) {
    using Stored = typename ActivationDtype<sizeof(typename P::Element)>::type;
    constexpr int THREADS = WARPGROUP * WARPGROUPS + 32, COLUMNS = 8 * NT;
    constexpr int TILE_BYTES = COLUMNS * LINE;  // weights per tap and chunk of channels
    extern __shared__ uint4 smem[];
    __shared__ Mbarrier full[MAX_STAGES], empty[MAX_STAGES], weights_ready;
    __shared__ __align__(8) int offsets[COLUMNS];
    __shared__ __align__(8) float smem_bias[COLUMNS];
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, stages = t.stages;
    const int weights = t.h.taps * t.w.taps * t.chunks, stage_bytes = t.chunks * t.patch_bytes;
    char* const smem_w = reinterpret_cast<char*>(smem) + (-shared_address(smem) & 1023);
    char* const pixels = smem_w + round_up(weights * TILE_BYTES, 1024);
    Store* const stores = reinterpret_cast<Store*>(pixels + stages * stage_bytes);
    Y* const y_tiles = reinterpret_cast<Y*>(stores + t.stores);

    launch_dependent_grids();
    const u32 tiles = t.h.by_tiles.size * t.w.by_tiles.size;  // per patch
    if (threadIdx.x == 0) {
        for (int s = 0; s < stages; ++s) {
            full[s].init(1);
            empty[s].init(WARPGROUP_WARPS * WARPGROUPS);
        }
        weights_ready.init(1);
        fence_mbarriers();
    }
    // Per column: its offset from the cell's first element, and its bias. Padding columns have offset -1.
    const int inner = t.is_nhwc ? t.N : 1;
    for (int i = threadIdx.x; i < COLUMNS; i += THREADS) {
        const int n = i % t.N, position = i / t.N;
        const int at = (position / t.w.cell * t.positions() + position % t.w.cell) * inner;
        offsets[i] = position < t.h.cell * t.w.cell ? at + (t.is_nhwc ? n : n * t.lines() * t.positions()) : -1;
        smem_bias[i] = bias != nullptr && offsets[i] >= 0 ? bias[n] : 0.0f;
    }
    list_stores<Y>(t, stores, THREADS);
    __syncthreads();

    if (warp == WARPGROUP_WARPS * WARPGROUPS) {
        if (lane != 0) return;
        weights_ready.arrive_expect_tx(weights * TILE_BYTES);
        for (int i = 0; i < weights; ++i) tma_load(smem_w + i * TILE_BYTES, w_map, weights_ready, 0, i * COLUMNS);
        wait_on_dependent_grids();
        const int lines = (t.h.by_tiles.size * t.h.cells - 1) * t.h.step + (t.h.taps - 1) * t.h.dilation + 1;
        int s = 0;
        u32 iteration = 0;
        for (u32 index = blockIdx.x; index < patches; index += gridDim.x) {
            const Patch patch(t, index);
            if (iteration > 0) empty[s].wait((iteration - 1) & 1);
            full[s].arrive_expect_tx(t.chunks * lines * t.columns * LINE);
            for (int chunk = 0; chunk < t.chunks; ++chunk)
                tma_load(pixels + s * stage_bytes + chunk * t.patch_bytes, x_map, full[s], chunk * (LINE / 2),
                         patch.left + t.w.first, patch.top * t.h.step + t.h.first, patch.image);
            if (++s == stages) s = 0, ++iteration;
        }
        return;
    }

    const Act activation = activation_of<Act>(code, a_bits, b_bits);
    const bool has_pairs = t.is_nhwc && t.w.cell * t.N % 2 == 0;  // adjacent columns are adjacent in y
    const int warpgroup = warp / WARPGROUP_WARPS, rank = warp % WARPGROUP_WARPS, g = lane / 4, q = lane % 4;
    Y* const y_tile = y_tiles + warp * t.lines() * t.positions() * t.N;
    Y* const cell = y_tile + g * t.w.cell * inner;  // the lane's first; the other is a row or 8 cells further
    Y* const second_cell = cell + (t.h.warp_cells == 2 ? t.h.cell * t.positions() : 8 * t.w.cell) * inner;
    wait_on_dependent_grids();
    weights_ready.wait(0);
    int s = 0;
    u32 parity = 0, next = warpgroup;  // the warpgroup's next tile, relative to the patch
    for (u32 index = blockIdx.x; index < patches; index += gridDim.x) {
        full[s].wait(parity);  // even without a tile of its own: parity only distinguishes adjacent phases
        if (next >= tiles) {
            __syncwarp();  // all lanes have passed the wait
            if (lane == 0) empty[s].arrive();
        }
        for (; next < tiles; next += WARPGROUPS) {
            u32 tile_index = next;
            const int tile_w = pop_index(tile_index, t.w.by_tiles) * t.w.cells, tile_h = tile_index * t.h.cells;
            float c[NT][4];
            const u32 first =
                shared_address(pixels) + s * stage_bytes + (tile_h * t.h.step * t.columns + tile_w) * LINE;
            unsigned long long line = swizzled_descriptor(first, t.pitch),
                               w = swizzled_descriptor(shared_address(smem_w));
            wgmma_fence();
            bool adds = false;  // the first wgmma overwrites c
            for (int tap_h = 0; tap_h < t.h.taps; ++tap_h, line = advance(line, t.h.dilation * t.columns * LINE)) {
                unsigned long long tap = line;
                for (int tap_w = 0; tap_w < t.w.taps; ++tap_w, tap = advance(tap, t.w.dilation * LINE)) {
                    unsigned long long x = tap;
                    for (int chunk = 0; chunk < t.chunks; ++chunk) {
                        if (chunk + 1 < t.chunks || t.steps == STEPS) add_steps<P, NT, STEPS>(c, x, w, adds);
                        else
                            for (int step = 0; step < t.steps; ++step) {
                                const u32 offset = step * STEP_BYTES;
                                add_steps<P, NT, 1>(c, advance(x, offset), advance(w, offset), adds || step > 0);
                            }
                        adds = true;
                        x = advance(x, t.patch_bytes), w = advance(w, TILE_BYTES);
                    }
                }
            }
            wgmma_commit();
            wgmma_wait<0>();
            if (next + WARPGROUPS >= tiles && lane == 0) empty[s].arrive();

            const Patch patch(t, index);
#pragma unroll
            for (int j = 0; j < NT; ++j) {
                const float2 pair = *reinterpret_cast<const float2*>(smem_bias + 8 * j + 2 * q);
                c[j][0] += pair.x, c[j][1] += pair.y, c[j][2] += pair.x, c[j][3] += pair.y;
            }
            activate_all<Stored>(c, activation);
            __syncwarp();  // all lanes have stored the previous tile
            if (has_pairs) store_cells<true>(cell, second_cell, offsets + 2 * q, c);
            else store_cells<false>(cell, second_cell, offsets + 2 * q, c);
            __syncwarp();
            const int top = (patch.top + tile_h + (t.h.warp_cells == 2 ? 2 * rank : 0)) * t.h.cell;
            const int left = (patch.left + tile_w + (t.h.warp_cells == 2 ? 0 : 16 * rank)) * t.w.cell;
            if (t.unit == 16) store_tile<uint4>(t, stores, y_tile, y, patch.image, top, left);
            else if (t.unit == 4 && sizeof(Y) < 4) store_tile<u32>(t, stores, y_tile, y, patch.image, top, left);
            else store_tile<Y>(t, stores, y_tile, y, patch.image, top, left);
        }
        next -= tiles;
        if (++s == stages) s = 0, parity ^= 1;
    }
}
