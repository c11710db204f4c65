// conv/last_layer/mma.cu: convolution and transposed convolution to few output channels (last layers) by mma.sync.
//
// Idea    y is split into cells of a few positions; their channels are the columns of one gemm. k is the union of their
//         windows, with zero weights where a position does not reach. A cell of a transposed convolution has all
//         phases. A persistent block stages the pixels under a tile of cells once; ldmatrix reads windows at any
//         offset. y is assembled in shared memory and stored in whole rows while cp.async loads the next tile.
// Order   k over the window's taps, then channels, STEP per instruction; fp32 is added to a total every PART elements.
// Floor   64 -> 3, 5x5, stride 2, 32x32 -> 64x64, B = 5,248, float16: 817 MB / 4.8 TB/s = 170 us. Cells of 2x2 read 9.3
//         GB of shared memory: 313 us. H200: 661 us, issue-bound (sm90.cu: 280 us); fp32, 4x2: 2.56 ms.
// Layout  x (B, H, W, C), y (B, HO, WO, N) or (B, N, HO, WO); w as in conv/warp_mma.cuh, k = (taps, channels), columns
//         = (positions of a cell, channels); bias (N) or nullptr. 1D is an image of one row.
// Shared  Padded channels + 16 B per pixel (no bank conflicts); a tile of y; 8 B per column; weights if they fit.
// Limits  < 2^31 tiles; C a multiple of 16 B; < 2^31 elements per image; sm_80 up. Inf or NaN spreads to its cells.
#include "mma/tma.cuh"
#include "conv/last_layer/cells.cuh"
#include "conv/warp_mma.cuh"
#include "common/fast_divide.cuh"

constexpr int BLOCK_WARPS = 8, BLOCK_THREADS = 32 * BLOCK_WARPS;  // warps, and threads, per block
constexpr int STEP_BYTES = 32;                                    // bytes of channels per step of k

struct Axis {
    int side_in, side_out;  // pixels of x, positions of y
    int cell, step;         // positions per cell; pixels from one cell to the next
    int first;              // the pixel at the first tap of the first cell
    int taps, dilation;     // taps of a cell's window, and their distance in pixels
    int cells, pixels;      // cells per tile, and pixels of x under it
    Divider by_cells, by_pixels, by_tiles;  // by_tiles: per image
};

struct Layer {
    int C, N;
    int steps, chunks;  // steps of k per tap; chunks of 8 NT columns
    int pitch;          // bytes per pixel in shared memory
    int images;         // images per tile
    u32 is_nhwc;        // whether y is NHWC
    int unit;           // bytes per store
    u32 holds_weights;  // whether weights are in shared memory
    Axis h, w;
    Divider by_chunks;  // chunks of channels per pixel

    __device__ __forceinline__ int lines() const { return h.cells * h.cell; }  // of a tile of y
    __device__ __forceinline__ int positions() const { return w.cells * w.cell; }
    __device__ __forceinline__ int cells() const { return images * h.cells * w.cells; }
};

// A tile: its first image, and its first cell in each.
struct Tile {
    long long image;
    int top, left;

    __device__ __forceinline__ Tile(const Layer& t, u32 tile_index) {
        left = static_cast<int>(pop_index(tile_index, t.w.by_tiles)) * t.w.cells;
        top = static_cast<int>(pop_index(tile_index, t.h.by_tiles)) * t.h.cells;
        image = static_cast<long long>(tile_index) * t.images;
    }
};

// A cell of a tile.
struct Cell {
    u32 image, h, w;

    __device__ __forceinline__ Cell(const Layer& t, u32 cell_index) {
        w = pop_index(cell_index, t.w.by_cells);
        h = pop_index(cell_index, t.h.by_cells);
        image = cell_index;
    }
};

// Assigns rows to groups of threads: a warp per row, or the whole block if there are few rows.
struct RowGroup {
    int size, first, count, member;  // threads per group; its index; number of groups; the thread's index in it

    __device__ __forceinline__ explicit RowGroup(int lines) {
        size = lines < BLOCK_WARPS ? BLOCK_THREADS : 32;
        first = threadIdx.x / size, count = BLOCK_THREADS / size, member = threadIdx.x % size;
    }
};

// Loads the pixels under a tile, zeros in the padding: by cp.async, or through registers if they are converted.
template <class P, class X>
__device__ __forceinline__ void load_pixels(const Layer& t, const Tile& tile, const X* x, long long B, char* smem) {
    using Element = typename P::Element;
    constexpr bool IS_DIRECT = is_same<X, Element>;
    constexpr int E = IS_DIRECT ? 16 / static_cast<int>(sizeof(X)) : 4;  // elements per chunk
    const RowGroup group(t.images * t.h.pixels);
    u32 first = group.member, step = group.size;
    const int first_chunk = pop_index(first, t.by_chunks), step_chunks = pop_index(step, t.by_chunks);
    const int h0 = tile.top * t.h.step + t.h.first, w0 = tile.left * t.w.step + t.w.first;
    for (int line = group.first; line < t.images * t.h.pixels; line += group.count) {
        u32 image = line;
        const int h = h0 + static_cast<int>(pop_index(image, t.h.by_pixels));
        const bool has_line = h >= 0 && h < t.h.side_in && tile.image + image < B;
        const X* const from = x + ((tile.image + image) * t.h.side_in + (has_line ? h : 0)) * t.w.side_in * t.C;
        char* const to = smem + line * t.w.pixels * t.pitch;
        for (int pixel = first, chunk = first_chunk; pixel < t.w.pixels;) {
            const int c = chunk * E, w = w0 + pixel;
            const bool is_valid = has_line && w >= 0 && w < t.w.side_in && c < t.C;
            const X* const src = is_valid ? from + (w * t.C + c) : x;
            char* const at = to + pixel * t.pitch + c * static_cast<int>(sizeof(Element));
            if constexpr (IS_DIRECT) {
                const int bytes = is_valid ? 16 : 0;
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                             :: "r"(shared_address(at)), "l"(src), "r"(bytes)
                             : "memory");
            } else {
                store4(reinterpret_cast<Element*>(at), is_valid ? load4(src) : float4{});
            }
            pixel += step, chunk += step_chunks;  // increments instead of dividing
            if (chunk >= static_cast<int>(t.by_chunks.size)) chunk -= t.by_chunks.size, ++pixel;
        }
    }
}

// Operands of a warp's step: 16 MT cells, 8 NT columns.
template <class P, int MT, int NT>
struct Fragments {
    static constexpr int SPLITS = is_same<P, Fp32> ? 2 : 1;
    u32 rows[MT][4];
    uint2 weights[SPLITS][NT];

    // at  the lane's row of each 16; lanes from 16 on address the second half of the step
    __device__ __forceinline__ void read(const u32 (&at)[MT], u32 step_offset, const uint2* w, int low_offset) {
#pragma unroll
        for (int i = 0; i < MT; ++i)
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                         : "=r"(rows[i][0]), "=r"(rows[i][1]), "=r"(rows[i][2]), "=r"(rows[i][3])
                         : "r"(at[i] + step_offset));
#pragma unroll
        for (int i = 0; i < SPLITS * NT; ++i) weights[i / NT][i % NT] = w[i / NT * low_offset + i % NT * 32];
    }
    __device__ __forceinline__ Step<P> step(int i) const {
        Step<P> result;
#pragma unroll
        for (int word = 0; word < 4; ++word) {
            if constexpr (is_same<P, Tf32>) result.set(word, Tf32::word(__uint_as_float(rows[i][word])));
            else result.set(word, rows[i][word]);
        }
        return result;
    }
};

// Offset of the next step's channels from a cell's first pixel; increments instead of dividing.
struct StepOffset {
    u32 at = 0;
    int step = 0, tap = 0;

    __device__ __forceinline__ void advance(const Layer& t, int tap_stride, int line_stride) {
        at += STEP_BYTES;
        if (++step < t.steps) return;
        step = 0, at += tap_stride;
        if (++tap == t.w.taps) tap = 0, at += line_stride;
    }
};

// Stores a tile of y in contiguous runs, by elements of type Unit.
template <class Unit, class Y>
__device__ __forceinline__ void store_tile(const Layer& t, const Tile& tile, const Y* y_tile, Y* y, long long B) {
    const int planes = t.is_nhwc ? 1 : t.N, inner = t.is_nhwc ? t.N : 1;  // contiguous per position
    const int top = tile.top * t.h.cell, left = tile.left * t.w.cell;
    const int lines = min(t.lines(), t.h.side_out - top), positions = min(t.positions(), t.w.side_out - left);
    const long long images = min(static_cast<long long>(t.images), B - tile.image);
    const bool joins_lines = t.positions() == t.w.side_out, joins_planes = joins_lines && t.lines() == t.h.side_out;
    const int all_lines = static_cast<int>(images) * planes * lines,
              run_lines = joins_planes ? all_lines : joins_lines ? lines : 1;
    const u32 runs = all_lines / run_lines, runs_per_plane = joins_planes ? 1 : lines / run_lines;
    constexpr u32 V = sizeof(Unit) / sizeof(Y);
    const u32 units = run_lines * positions * inner / V;
    const long long line_out = static_cast<long long>(t.w.side_out) * inner;
    Y* const to = y + (tile.image * planes * t.h.side_out + top) * line_out + left * inner;
    const RowGroup group(runs);
    for (u32 run = group.first; run < runs; run += group.count) {
        const u32 plane = run / runs_per_plane, line = run % runs_per_plane;
        const Unit* const from =
            reinterpret_cast<const Unit*>(y_tile + (plane * t.lines() + line) * t.positions() * inner);
        Unit* const dst =
            reinterpret_cast<Unit*>(to + (static_cast<long long>(plane) * t.h.side_out + line) * line_out);
        for (u32 at = group.member; at < units; at += group.size) dst[at] = from[at];
    }
}

// A warp computes 16 MT cells x 8 NT columns at a time.
template <class P, class X, class Y, int NT>
__global__ void __launch_bounds__(BLOCK_THREADS, is_same<P, Fp32> ? 2 : 3)
conv_last_layer(const X* __restrict__ x, const uint2* __restrict__ w, const float* __restrict__ bias, Y* y, long long B,
          const __grid_constant__ Layer t, u32 code, u32 a_bits, u32 b_bits) {
    constexpr int MT = 2;
    using Stored = typename ActivationDtype<sizeof(typename P::Element)>::type;
    extern __shared__ uint4 smem[];
    const Activation activation{code, __uint_as_float(a_bits), __uint_as_float(b_bits)};
    const int columns = t.h.cell * t.w.cell * t.N, padded_columns = t.chunks * NT * 8;
    const int all_steps = t.h.taps * t.w.taps * t.steps, low_offset = all_steps * padded_columns * 4;
    char* const pixels = reinterpret_cast<char*>(smem);
    int* const offsets = reinterpret_cast<int*>(pixels + t.images * t.h.pixels * t.w.pixels * t.pitch);
    float* const smem_bias = reinterpret_cast<float*>(offsets + padded_columns);
    const int weight_copies = t.holds_weights ? is_same<P, Fp32> + 1 : 0;
    uint2* const smem_weights = reinterpret_cast<uint2*>(smem_bias + padded_columns);
    Y* const y_tile = reinterpret_cast<Y*>(smem_weights + weight_copies * low_offset);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;

    launch_dependent_grids();
    // Per column: its offset from the cell's first element, and its bias. Padding columns have offset -1.
    const int inner = t.is_nhwc ? t.N : 1, plane = t.is_nhwc ? 0 : t.lines() * t.positions();
    const bool has_pairs = t.is_nhwc && t.w.cell * t.N % 2 == 0;  // adjacent columns are adjacent in y
    for (int i = threadIdx.x; i < padded_columns; i += BLOCK_THREADS) {
        const int n = i % t.N, pos = i / t.N;
        const int to = (pos / t.w.cell * t.positions() + pos % t.w.cell) * inner + (t.is_nhwc ? n : n * plane);
        offsets[i] = i < columns ? to : -1;
        smem_bias[i] = bias != nullptr && i < columns ? bias[n] : 0.0f;
    }
    for (int i = threadIdx.x; i < weight_copies * low_offset / 2; i += BLOCK_THREADS)
        reinterpret_cast<uint4*>(smem_weights)[i] = reinterpret_cast<const uint4*>(w)[i];
    const uint2* const all_weights = t.holds_weights ? smem_weights : w;
    const u32 tiles_per_image = t.h.by_tiles.size * t.w.by_tiles.size;
    const u32 tiles = static_cast<u32>((B + t.images - 1) / t.images) * tiles_per_image;
    wait_on_dependent_grids();
    if (blockIdx.x < tiles) load_pixels<P>(t, Tile(t, blockIdx.x), x, B, pixels);
    const int tap_stride = t.w.dilation * t.pitch - t.steps * STEP_BYTES;
    const int line_stride = (t.h.dilation * t.w.pixels - t.w.taps * t.w.dilation) * t.pitch;
    const int cells = t.cells(), warp_tiles = (cells + 16 * MT - 1) / (16 * MT) * t.chunks;
    for (u32 tile_index = blockIdx.x; tile_index < tiles; tile_index += gridDim.x) {
        const Tile tile(t, tile_index);
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncthreads();  // the pixels have landed, and the previous tile is stored
        for (int warp_tile = warp; warp_tile < warp_tiles; warp_tile += BLOCK_WARPS) {
            const int first = warp_tile / t.chunks * (16 * MT), chunk = warp_tile % t.chunks;
            u32 at[MT];
#pragma unroll
            for (int i = 0; i < MT; ++i) {
                const int cell_index = first + 16 * i + lane % 16;
                const Cell cell(t, cell_index < cells ? cell_index : 0);
                const u32 line = cell.image * t.h.pixels + cell.h * t.h.step;
                at[i] = shared_address(pixels) + (line * t.w.pixels + cell.w * t.w.step) * t.pitch +
                        lane / 16 * (STEP_BYTES / 2);
            }
            const uint2* weights = all_weights + chunk * NT * 32 + lane;
            Sums<P, NT> sums[MT];
            Fragments<P, MT, NT> cur, next;
            StepOffset offset;
            next.read(at, 0, weights, low_offset);
#pragma unroll 2
            for (int step = 0; step < all_steps; ++step) {
                cur = next;
                offset.advance(t, tap_stride, line_stride);
                weights += padded_columns * 4;
                if (step + 1 < all_steps) next.read(at, offset.at, weights, low_offset);
#pragma unroll
                for (int i = 0; i < MT; ++i) {
                    const Step<P> a = cur.step(i);
#pragma unroll
                    for (int j = 0; j < NT; ++j) sums[i].add(j, a, cur.weights[0][j], cur.weights[cur.SPLITS - 1][j]);
                    sums[i].end_step(step, step + 1 == all_steps);
                }
            }
            int column_offsets[2 * NT];
            float column_bias[2 * NT];
#pragma unroll
            for (int j = 0; j < 2 * NT; ++j) {
                const int column = (chunk * NT + j / 2) * 8 + 2 * q + j % 2;
                column_offsets[j] = offsets[column], column_bias[j] = smem_bias[column];
            }
#pragma unroll
            for (int i = 0; i < MT; ++i) {
                float(&c)[NT][4] = sums[i].result();
#pragma unroll
                for (int j = 0; j < 4 * NT; ++j) c[j / 4][j % 4] += column_bias[j / 4 * 2 + j % 2];
                activate_all<Stored>(c, activation);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int cell_index = first + 16 * i + 8 * half + g;
                    if (cell_index >= cells) continue;
                    const Cell cell(t, cell_index);
                    const int line = cell.image * (t.is_nhwc ? 1 : t.N) * t.lines() + cell.h * t.h.cell;
                    Y* const row = y_tile + (line * t.positions() + cell.w * t.w.cell) * inner;
#pragma unroll
                    for (int j = 0; j < NT; ++j) {
                        const int at[2] = {column_offsets[2 * j], column_offsets[2 * j + 1]};
                        if (has_pairs) store_two<true>(row, at, c[j][2 * half], c[j][2 * half + 1]);
                        else store_two<false>(row, at, c[j][2 * half], c[j][2 * half + 1]);
                    }
                }
            }
        }
        __syncthreads();  // the tile is complete, and its pixels are free
        if (tile_index + gridDim.x < tiles) load_pixels<P>(t, Tile(t, tile_index + gridDim.x), x, B, pixels);
        if (t.unit == 16) store_tile<uint4>(t, tile, y_tile, y, B);
        else if (t.unit == 4 && sizeof(Y) < 4) store_tile<u32>(t, tile, y_tile, y, B);
        else store_tile<Y>(t, tile, y_tile, y, B);
    }
}
