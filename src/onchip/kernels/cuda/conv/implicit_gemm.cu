// conv/implicit_gemm.cu: 1D and 2D convolution and transposed convolution, NHWC, by mma.sync; also over embedded ids.
//
// Idea    Implicit GEMM on mma/mma_tile.cuh: a row is an output position, k runs over taps and channels. A unit of k is
//         a few channels of one pixel, copied straight from x, zeros in the padding. A transposed convolution with
//         stride s splits into phases: outputs p, p + s, p + 2s, ... share their taps, so each phase is a stride-1
//         convolution that writes every s-th position. Phases and groups are tiles of the same launch. With ids a pixel
//         is a row of the embedding table: the embedding is fused into the Linear or convolution that reads it. A
//         Linear over the whole text is one window, a Linear per token is a window of one tap.
// Order   Taps from the first pixel of the window to the last, then channels, as in mma/mma_tile.cuh.
// Floor   64 -> 64 channels, 3x3, 32x32, B = 1,024, fp16, A100: 77.3 Gflop / 312 Tflop/s = 248 us; 268 MB: 132 us.
// Layout  x (B, H, W, channels), y and residual (B, HO, WO, N); w (SPLITS, N, all phases' taps * channels of a group),
//         a tap's channels zero-padded to whole units; table (V, channels), ids (B, W). Shared as in mma/mma_tile.cuh.
// Limits  Up to 8 phases per axis; < 2^30 elements and < 2^23 pixels per image with padding; < 2^31 tiles; x, y
//         float32, float16 or bfloat16; sm_80 up.
#include "common/fast_divide.cuh"
#include "mma/mma_tile.cuh"
#include "common/status.cuh"

constexpr int MAX_PHASES = 8;  // per axis
constexpr int OUT_OF_BOUNDS = -(1 << 30);

struct Phase {
    Divider by_taps;  // taps along the axis
    u32 taps_before;  // taps of the previous phases
    int begin;        // before_h (or before_w) minus its own padding
    int positions;    // outputs per image along the axis
};

struct Windows {
    int H, W, C;                 // of x; channels per group
    int channels, channels_out;  // per pixel of x and of y, over all groups
    int lines_out, columns_out;  // of y
    int stride_h, stride_w, before_h, before_w, dilation_h, dilation_w;
    int alignment;  // of a group's channels in a pixel, in bytes
    int phases_h;
    u32 taps_w;                     // along W, over all phases
    u32 row_units;                  // units per row of w
    Divider by_units;               // units of a tap
    Divider by_positions, by_line;  // positions of the largest phase per image, and per line
    Divider by_groups, by_phases, by_phases_w;
    Phase down[MAX_PHASES], right[MAX_PHASES];
};

// The phase of a tile.
struct TilePhase {
    u32 h, w;
    const Phase &down, &right;

    __device__ __forceinline__ TilePhase(const Windows& windows, u32 phase)
        : h(quotient(phase, windows.by_phases_w)), w(phase - h * windows.by_phases_w.size), down(windows.down[h]),
          right(windows.right[w]) {}
    __device__ __forceinline__ u32 units(const Windows& windows) const {
        return down.by_taps.size * right.by_taps.size * windows.by_units.size;
    }
    __device__ __forceinline__ u32 first_unit(const Windows& windows) const {
        return (down.taps_before * windows.taps_w + down.by_taps.size * right.taps_before) * windows.by_units.size;
    }
};

// A tile's first position: its image, and its index among the positions of the image.
struct TileStart {
    long long image;
    u32 offset;

    __device__ __forceinline__ TileStart(const Windows& windows, long long m)
        : image(m / windows.by_positions.size), offset(static_cast<u32>(m - image * windows.by_positions.size)) {}
};

// The position of a tile's row: image counted from the tile's first image, line and column in its phase.
struct Position {
    int image, line, column;

    __device__ __forceinline__ Position(const Windows& windows, u32 offset, u32 row) {
        u32 index = offset + row;
        const u32 position = pop_index(index, windows.by_positions);
        image = index;
        line = quotient(position, windows.by_line);
        column = position - line * windows.by_line.size;
    }
};

// Loads the pixels of BM windows, one slice of k at a time. Id: void for images, else x is an embedding table.
// IS_WHOLE: channels are whole units of k, 16-byte aligned
template <class P, class X, class Id, int BM, int THREADS, bool IS_WHOLE>
struct PixelLoader {
    static constexpr bool IS_TABLE = !is_same<Id, void>;
    using Loads = UnitLoads<P, X, BM, THREADS>;
    const X* x;  // first image of the tile, first channel of the group; or the table
    const Id* ids;
    u64* status;
    long long V;
    const Windows& windows;
    const TilePhase& phase;
    u32 units, k;        // units of the phase; the thread's next unit
    int to;              // destination in shared memory
    long long first_id;  // index of the first id of the tile's first image
    // Per row this thread loads: pixel of its window's first tap, as index from the tile's first image and as (h, w).
    int at[Loads::ROWS_PER_THREAD], h[Loads::ROWS_PER_THREAD], w[Loads::ROWS_PER_THREAD];

    __device__ __forceinline__ PixelLoader(const X* x, const Id* ids, u64* status, long long V, const Windows& windows,
                                           const TilePhase& phase, const TileStart& start, long long rows_left,
                                           u32 group)
        : x(x), ids(ids), status(status), V(V), windows(windows), phase(phase), units(phase.units(windows)),
          k(Loads::unit()), to(Loads::first()) {
        first_id = static_cast<long long>(windows.H) * windows.W * start.image;
        if constexpr (!IS_TABLE) this->x += first_id * windows.channels + static_cast<int>(group) * windows.C;
#pragma unroll
        for (int i = 0; i < Loads::ROWS_PER_THREAD; ++i) {
            const u32 row = Loads::row() + i * Loads::ROW_STEP;
            const Position position(windows, start.offset, row);
            const int line = position.line * windows.stride_h - windows.before_h + phase.down.begin;
            w[i] = position.column * windows.stride_w - windows.before_w + phase.right.begin;
            h[i] = row < rows_left ? line : OUT_OF_BOUNDS;
            at[i] = (position.image * windows.H + line) * windows.W + w[i];
        }
    }
    __device__ __forceinline__ void load_slice(char* smem) {
        constexpr int UNIT = Loads::UNIT;
        u32 tap = k;
        const int c = static_cast<int>(pop_index(tap, windows.by_units)) * UNIT;
        const int right = static_cast<int>(pop_index(tap, phase.right.by_taps)) * windows.dilation_w;
        const int down = static_cast<int>(tap) * windows.dilation_h, pixels = down * windows.W + right;
        const int valid = k >= units ? 0 : IS_WHOLE ? UNIT : min(windows.C - c, UNIT);
        const X* const channels = x + c;
#pragma unroll
        for (int i = 0; i < Loads::ROWS_PER_THREAD; ++i) {
            if (!Loads::has(i)) break;
            const bool is_inside = static_cast<u32>(h[i] + down) < static_cast<u32>(windows.H) &&
                                   static_cast<u32>(w[i] + right) < static_cast<u32>(windows.W) && valid > 0;
            const X* from = channels;
            if constexpr (!IS_TABLE) from += static_cast<long long>(at[i] + pixels) * windows.channels;
            else if (is_inside) from += checked_id(ids, first_id + at[i] + pixels, V, status) * windows.C;
            load_unit<Loads, IS_WHOLE>(smem, to + i * Loads::ROW_STEP * Loads::Buffer::ROW_BYTES, from,
                                       is_inside ? valid : 0, windows.alignment);
        }
        k += UNITS;
    }
};

// Output rows of a tile's phase, and columns of its group.
template <class Y>
struct PhaseRows {
    using Element = Y;
    Y* y;  // first column of the group
    long long M, N;
    const Y* residual;
    const Windows& windows;
    const TilePhase& phase;
    long long m;  // first position of the tile
    const TileStart& start;

    __device__ __forceinline__ long long row(long long m_index) const {
        if (m_index >= M) return -1;
        if (windows.by_phases.size == 1) return m_index * windows.channels_out;
        const Position position(windows, start.offset, static_cast<u32>(m_index - m));
        if (position.line >= phase.down.positions || position.column >= phase.right.positions) return -1;
        const int line = position.line * windows.phases_h + static_cast<int>(phase.h);
        const int column = position.column * static_cast<int>(windows.by_phases_w.size) + static_cast<int>(phase.w);
        return (((start.image + position.image) * windows.lines_out + line) * windows.columns_out + column) *
               windows.channels_out;
    }
};

// N  columns per group
template <class P, class X, class Y, class Id, int BM, int BN, int WM, int WN, int STAGES, bool IS_WHOLE>
__global__ void __launch_bounds__(32 * WM * WN, (MMA_BLOCKS<P, BM, BN, WM * WN>))
conv_implicit_gemm(const X* __restrict__ x, const Id* __restrict__ ids, const typename P::Element* __restrict__ w,
                const float* __restrict__ bias, const Y* residual, Y* y, u64* status, long long V, long long M,
                long long N, const __grid_constant__ Windows windows, u32 code, u32 a_bits, u32 b_bits) {
    using W = typename P::Element;
    constexpr int THREADS = 32 * WM * WN, UNIT = MmaSlice<P>::UNIT;
    extern __shared__ uint4 smem[];
    u32 tile_index = blockIdx.x;
    const u32 phase_index = pop_index(tile_index, windows.by_phases), group = pop_index(tile_index, windows.by_groups);
    const TileOrigin<BM, BN> tile(M, N, tile_index);
    const TilePhase phase(windows, phase_index);
    const TileStart start(windows, tile.m);

    PixelLoader<P, X, Id, BM, THREADS, IS_WHOLE> rows(x, ids, status, V, windows, phase, start, M - tile.m, group);
    const long long pitch = static_cast<long long>(windows.row_units) * UNIT, column = group * N + tile.n;
    const u32 units = rows.units;
    MatrixLoader<P, W, BN, THREADS, MmaSlice<P>::SPLITS, true> weights(
        w + column * pitch + phase.first_unit(windows) * UNIT, pitch, N - tile.n, static_cast<long long>(units) * UNIT,
        16, windows.channels_out * pitch);
    const Y* const group_residual = residual == nullptr ? nullptr : residual + group * N;
    const PhaseRows<Y> out{y + group * N, M, N, group_residual, windows, phase, tile.m, start};
    multiply_tile<P, X, BM, BN, WM, WN, STAGES>(
        smem, rows, weights, (units + UNITS - 1) / UNITS, bias == nullptr ? nullptr : bias + column, out, tile.m,
        tile.n, Activation{code, __uint_as_float(a_bits), __uint_as_float(b_bits)});
}
