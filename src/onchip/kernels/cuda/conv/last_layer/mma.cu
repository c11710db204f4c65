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

constexpr int CREW = 8, CREW_THREADS = 32 * CREW;  // warps per block
constexpr int STEP_BYTES = 32;                     // bytes of channels per step of k

struct Axis {
    int in, out;        // pixels of x, positions of y
    int cell, step;     // positions per cell; pixels from one cell to the next
    int first;          // the pixel at the first tap of the first cell
    int taps, apart;    // taps of a cell's window, and their distance in pixels
    int cells, pixels;  // cells per tile, and pixels of x under it
    Divider by_cells, by_pixels, by_tiles;  // by_tiles: per image
};

struct Layer {
    int C, N;
    int steps, chunks;  // steps of k per tap; chunks of 8 NT columns
    int pitch;          // bytes per pixel in shared memory
    int images;         // images per tile
    u32 is_last;        // whether y is NHWC
    int unit;           // bytes per store
    u32 holds_weights;  // whether weights are in shared memory
    Axis h, w;
    Divider by_pieces;  // pieces per pixel

    __device__ __forceinline__ int lines() const { return h.cells * h.cell; }  // of a tile of y
    __device__ __forceinline__ int places() const { return w.cells * w.cell; }
    __device__ __forceinline__ int cells() const { return images * h.cells * w.cells; }
};

// A tile: its first image, and its first cell in each.
struct Tile {
    long long image;
    int top, left;

    __device__ __forceinline__ Tile(const Layer& t, u32 number) {
        left = static_cast<int>(take_rest(number, t.w.by_tiles)) * t.w.cells;
        top = static_cast<int>(take_rest(number, t.h.by_tiles)) * t.h.cells;
        image = static_cast<long long>(number) * t.images;
    }
};

// A cell of a tile.
struct Cell {
    u32 image, h, w;

    __device__ __forceinline__ Cell(const Layer& t, u32 number) {
        w = take_rest(number, t.w.by_cells);
        h = take_rest(number, t.h.by_cells);
        image = number;
    }
};

// Assigns rows to groups of threads: a warp per row, or the whole block if there are few rows.
struct Team {
    int size, first, count, mine;  // threads per group; its index; number of groups; the thread's index in it

    __device__ __forceinline__ explicit Team(int lines) {
        size = lines < CREW ? CREW_THREADS : 32;
        first = threadIdx.x / size, count = CREW_THREADS / size, mine = threadIdx.x % size;
    }
};

// Loads the pixels under a tile, zeros in the padding: by cp.async, or through registers if they are converted.
template <class P, class X>
__device__ __forceinline__ void fetch_pixels(const Layer& t, const Tile& tile, const X* x, long long B, char* room) {
    using Element = typename P::Element;
    constexpr bool IS_DIRECT = is_same<X, Element>;
    constexpr int E = IS_DIRECT ? 16 / static_cast<int>(sizeof(X)) : 4;  // elements per piece
    const Team warpgroup(t.images * t.h.pixels);
    u32 first = warpgroup.mine, step = warpgroup.size;
    const int first_piece = take_rest(first, t.by_pieces), step_piece = take_rest(step, t.by_pieces);
    const int h0 = tile.top * t.h.step + t.h.first, w0 = tile.left * t.w.step + t.w.first;
    for (int line = warpgroup.first; line < t.images * t.h.pixels; line += warpgroup.count) {
        u32 image = line;
        const int h = h0 + static_cast<int>(take_rest(image, t.h.by_pixels));
        const bool has_line = h >= 0 && h < t.h.in && tile.image + image < B;
        const X* const from = x + ((tile.image + image) * t.h.in + (has_line ? h : 0)) * t.w.in * t.C;
        char* const to = room + line * t.w.pixels * t.pitch;
        for (int pixel = first, piece = first_piece; pixel < t.w.pixels;) {
            const int c = piece * E, w = w0 + pixel;
            const bool is_there = has_line && w >= 0 && w < t.w.in && c < t.C;
            const X* const there = is_there ? from + (w * t.C + c) : x;
            char* const at = to + pixel * t.pitch + c * static_cast<int>(sizeof(Element));
            if constexpr (IS_DIRECT) {
                const int bytes = is_there ? 16 : 0;
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                             :: "r"(shared_address(at)), "l"(there), "r"(bytes)
                             : "memory");
            } else {
                store4(reinterpret_cast<Element*>(at), is_there ? load4(there) : float4{});
            }
            pixel += step, piece += step_piece;  // increments instead of dividing
            if (piece >= static_cast<int>(t.by_pieces.size)) piece -= t.by_pieces.size, ++pixel;
        }
    }
}

// Operands of a warp's step: 16 MT cells, 8 NT columns.
template <class P, int MT, int NT>
struct Fragments {
    static constexpr int PARTS = is_same<P, Fp32> ? 2 : 1;
    u32 rows[MT][4];
    uint2 weights[PARTS][NT];

    // at  the lane's row of each 16; lanes from 16 on address the second half of the step
    __device__ __forceinline__ void read(const u32 (&at)[MT], u32 further, const uint2* w, int lower) {
#pragma unroll
        for (int i = 0; i < MT; ++i)
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                         : "=r"(rows[i][0]), "=r"(rows[i][1]), "=r"(rows[i][2]), "=r"(rows[i][3])
                         : "r"(at[i] + further));
#pragma unroll
        for (int i = 0; i < PARTS * NT; ++i) weights[i / NT][i % NT] = w[i / NT * lower + i % NT * 32];
    }
    __device__ __forceinline__ Step<P> step(int i) const {
        Step<P> made;
#pragma unroll
        for (int word = 0; word < 4; ++word) {
            if constexpr (is_same<P, Tf32>) made.take(word, Tf32::word(__uint_as_float(rows[i][word])));
            else made.take(word, rows[i][word]);
        }
        return made;
    }
};

// Offset of the next step's channels from a cell's first pixel; increments instead of dividing.
struct Walk {
    u32 at = 0;
    int step = 0, tap = 0;

    __device__ __forceinline__ void go_on(const Layer& t, int tap_apart, int line_apart) {
        at += STEP_BYTES;
        if (++step < t.steps) return;
        step = 0, at += tap_apart;
        if (++tap == t.w.taps) tap = 0, at += line_apart;
    }
};

// Stores a tile of y in contiguous runs, by elements of type Unit.
template <class Unit, class Y>
__device__ __forceinline__ void move_out(const Layer& t, const Tile& tile, const Y* made, Y* y, long long B) {
    const int planes = t.is_last ? 1 : t.N, numbers = t.is_last ? t.N : 1;  // contiguous per position
    const int top = tile.top * t.h.cell, left = tile.left * t.w.cell;
    const int lines = min(t.lines(), t.h.out - top), places = min(t.places(), t.w.out - left);
    const long long images = min(static_cast<long long>(t.images), B - tile.image);
    const bool joins_lines = t.places() == t.w.out, joins_planes = joins_lines && t.lines() == t.h.out;
    const int all_lines = static_cast<int>(images) * planes * lines,
              run_lines = joins_planes ? all_lines : joins_lines ? lines : 1;
    const u32 runs = all_lines / run_lines, runs_per_plane = joins_planes ? 1 : lines / run_lines;
    constexpr u32 V = sizeof(Unit) / sizeof(Y);
    const u32 units = run_lines * places * numbers / V;
    const long long line_out = static_cast<long long>(t.w.out) * numbers;
    Y* const to = y + (tile.image * planes * t.h.out + top) * line_out + left * numbers;
    const Team warpgroup(runs);
    for (u32 run = warpgroup.first; run < runs; run += warpgroup.count) {
        const u32 plane = run / runs_per_plane, line = run % runs_per_plane;
        const Unit* const from =
            reinterpret_cast<const Unit*>(made + (plane * t.lines() + line) * t.places() * numbers);
        Unit* const there = reinterpret_cast<Unit*>(to + (static_cast<long long>(plane) * t.h.out + line) * line_out);
        for (u32 at = warpgroup.mine; at < units; at += warpgroup.size) there[at] = from[at];
    }
}

// A warp computes 16 MT cells x 8 NT columns at a time.
template <class P, class X, class Y, int NT>
__global__ void __launch_bounds__(CREW_THREADS, is_same<P, Fp32> ? 2 : 3)
conv_last_layer(const X* __restrict__ x, const uint2* __restrict__ w, const float* __restrict__ bias, Y* y, long long B,
          const __grid_constant__ Layer t, u32 code, u32 a_bits, u32 b_bits) {
    constexpr int MT = 2;
    using Stored = typename StoredOf<sizeof(typename P::Element)>::type;
    extern __shared__ uint4 room[];
    const Activation activation{code, __uint_as_float(a_bits), __uint_as_float(b_bits)};
    const int columns = t.h.cell * t.w.cell * t.N, all_columns = t.chunks * NT * 8;
    const int all_steps = t.h.taps * t.w.taps * t.steps, lower = all_steps * all_columns * 4;
    char* const pixels = reinterpret_cast<char*>(room);
    int* const offsets = reinterpret_cast<int*>(pixels + t.images * t.h.pixels * t.w.pixels * t.pitch);
    float* const shifts = reinterpret_cast<float*>(offsets + all_columns);
    const int pieces = t.holds_weights ? is_same<P, Fp32> + 1 : 0;
    uint2* const held = reinterpret_cast<uint2*>(shifts + all_columns);
    Y* const made = reinterpret_cast<Y*>(held + pieces * lower);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;

    let_next_begin();
    // Per column: its offset from the cell's first element, and its bias. Padding columns have offset -1.
    const int numbers = t.is_last ? t.N : 1, plane = t.is_last ? 0 : t.lines() * t.places();
    const bool has_pairs = t.is_last && t.w.cell * t.N % 2 == 0;  // adjacent columns are adjacent in y
    for (int i = threadIdx.x; i < all_columns; i += CREW_THREADS) {
        const int n = i % t.N, place = i / t.N;
        const int at = (place / t.w.cell * t.places() + place % t.w.cell) * numbers + (t.is_last ? n : n * plane);
        offsets[i] = i < columns ? at : -1;
        shifts[i] = bias != nullptr && i < columns ? bias[n] : 0.0f;
    }
    for (int i = threadIdx.x; i < pieces * lower / 2; i += CREW_THREADS)
        reinterpret_cast<uint4*>(held)[i] = reinterpret_cast<const uint4*>(w)[i];
    const uint2* const all_weights = t.holds_weights ? held : w;
    const u32 across = t.h.by_tiles.size * t.w.by_tiles.size;
    const u32 tiles = static_cast<u32>((B + t.images - 1) / t.images) * across;
    wait_for_kernel_before();
    if (blockIdx.x < tiles) fetch_pixels<P>(t, Tile(t, blockIdx.x), x, B, pixels);
    const int tap_apart = t.w.apart * t.pitch - t.steps * STEP_BYTES;
    const int line_apart = (t.h.apart * t.w.pixels - t.w.taps * t.w.apart) * t.pitch;
    const int cells = t.cells(), jobs = (cells + 16 * MT - 1) / (16 * MT) * t.chunks;
    for (u32 number = blockIdx.x; number < tiles; number += gridDim.x) {
        const Tile tile(t, number);
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncthreads();  // the pixels have landed, and the previous tile is stored
        for (int job = warp; job < jobs; job += CREW) {
            const int first = job / t.chunks * (16 * MT), chunk = job % t.chunks;
            u32 at[MT];
#pragma unroll
            for (int i = 0; i < MT; ++i) {
                const int mine = first + 16 * i + lane % 16;
                const Cell cell(t, mine < cells ? mine : 0);
                const u32 line = cell.image * t.h.pixels + cell.h * t.h.step;
                at[i] = shared_address(pixels) + (line * t.w.pixels + cell.w * t.w.step) * t.pitch +
                        lane / 16 * (STEP_BYTES / 2);
            }
            const uint2* weights = all_weights + chunk * NT * 32 + lane;
            Sums<P, NT> sums[MT];
            Fragments<P, MT, NT> now, next;
            Walk walk;
            next.read(at, 0, weights, lower);
#pragma unroll 2
            for (int step = 0; step < all_steps; ++step) {
                now = next;
                walk.go_on(t, tap_apart, line_apart);
                weights += all_columns * 4;
                if (step + 1 < all_steps) next.read(at, walk.at, weights, lower);
#pragma unroll
                for (int i = 0; i < MT; ++i) {
                    const Step<P> rows = now.step(i);
#pragma unroll
                    for (int j = 0; j < NT; ++j) sums[i].add(j, rows, now.weights[0][j], now.weights[now.PARTS - 1][j]);
                    sums[i].end_step(step, step + 1 == all_steps);
                }
            }
            int at_columns[2 * NT];
            float of_columns[2 * NT];
#pragma unroll
            for (int j = 0; j < 2 * NT; ++j) {
                const int column = (chunk * NT + j / 2) * 8 + 2 * q + j % 2;
                at_columns[j] = offsets[column], of_columns[j] = shifts[column];
            }
#pragma unroll
            for (int i = 0; i < MT; ++i) {
                float(&c)[NT][4] = sums[i].made();
#pragma unroll
                for (int j = 0; j < 4 * NT; ++j) c[j / 4][j % 4] += of_columns[j / 4 * 2 + j % 2];
                activate_all<Stored>(c, activation);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int mine = first + 16 * i + 8 * half + g;
                    if (mine >= cells) continue;
                    const Cell cell(t, mine);
                    const int line = cell.image * (t.is_last ? 1 : t.N) * t.lines() + cell.h * t.h.cell;
                    Y* const row = made + (line * t.places() + cell.w * t.w.cell) * numbers;
#pragma unroll
                    for (int j = 0; j < NT; ++j) {
                        const int at[2] = {at_columns[2 * j], at_columns[2 * j + 1]};
                        if (has_pairs) store_two<true>(row, at, c[j][2 * half], c[j][2 * half + 1]);
                        else store_two<false>(row, at, c[j][2 * half], c[j][2 * half + 1]);
                    }
                }
            }
        }
        __syncthreads();  // the tile is complete, and its pixels are free
        if (number + gridDim.x < tiles) fetch_pixels<P>(t, Tile(t, number + gridDim.x), x, B, pixels);
        if (t.unit == 16) move_out<uint4>(t, tile, made, y, B);
        else if (t.unit == 4 && sizeof(Y) < 4) move_out<u32>(t, tile, made, y, B);
        else move_out<Y>(t, tile, made, y, B);
    }
}
