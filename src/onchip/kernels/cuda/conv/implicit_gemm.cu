// conv/implicit_gemm.cu: convolutions and transposed ones over one or two axes, channels last, on the tensor cores of every
// chip; and the same over rows of a table that ids choose.
//
// Idea    mma/mma_tile.cuh, where a row is a place of y and k runs over taps and channels: a unit of k is some channels of one
//         pixel, brought from where it lies, zeros where the window hangs over. No matrix of windows is ever made.
//         Of a transposed convolution with stride s, outputs p, p + s, p + 2s, ... along an axis (phase p) have the same
//         taps, over neighbouring pixels: each phase is a convolution without a stride, whose rows go to every s-th place
//         of y. Phases and groups of channels are tiles of the same launch.
//         With ids, a pixel is the row of the table that its id names: an embedding and the Linear or the convolution that
//         reads it, and no embedded text in memory. A Linear over all of a text is one window, over each word windows of
//         one tap.
// Order   Taps from the first pixel of the window to the last, then channels, as in mma/mma_tile.cuh.
// Floor   2 flop a term. 64 -> 64 channels, 3x3, 32x32 places, B = 1,024 in fp16: 77.3 Gflop / 312 Tflop/s = 248 us on an
//         A100; its 268 MB of float16 take 132 us.
// Layout  x (B, H, W, channels), y and what is added to it (B, HO, WO, N); w (PARTS, N, taps of all phases * channels of a
//         group), channels of a tap filled up with zeros to whole units; a table is (V, channels), ids (B, W).
// Shared  As mma/mma_tile.cuh says.
// Limits  Up to 8 phases a side; images of less than 2^30 numbers and 2^23 pixels, what windows hang over included; less
//         than 2^31 tiles; x and y of float32, float16 or bfloat16; sm_80 up.
#include "common/fast_divide.cuh"
#include "mma/mma_tile.cuh"
#include "common/status.cuh"

constexpr int MOST_PHASES = 8;  // of an axis
constexpr int NOWHERE = -(1 << 30);

struct Phase {
    Divider by_taps;    // along the axis
    u32 taps_before;    // of the phases before it
    int begin;          // of its windows: pixels behind where the walk is
    int places;         // that it has in an image of y
};

struct Windows {
    int H, W, C;                  // of x; channels of a group
    int channels, columns;        // of a pixel of x and of y: of all groups
    int lines_out, columns_out;   // of y
    int stride_h, stride_w, before_h, before_w, dilation_h, dilation_w;
    int piece;                    // bytes that channels of x are a multiple of
    int phases_h;
    u32 taps_w;                   // of all phases, along a line
    u32 row_units;                // of w
    Divider by_units;             // of a tap
    Divider by_places, by_line;   // of the walk over an image, and over a line
    Divider by_groups, by_phases, by_phases_w;
    Phase down[MOST_PHASES], right[MOST_PHASES];
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

// A tile's first place: its image, and how many places into it.
struct TileStart {
    long long image;
    u32 rest;

    __device__ __forceinline__ TileStart(const Windows& windows, long long m)
        : image(m / windows.by_places.size), rest(static_cast<u32>(m - image * windows.by_places.size)) {}
};

// A walk's place, `row` behind the first of a tile: its image from the tile's first on, and where it is in that.
struct Spot {
    int image, line, column;

    __device__ __forceinline__ Spot(const Windows& windows, u32 rest, u32 row) {
        u32 more = rest + row;
        const u32 place = take_rest(more, windows.by_places);
        image = more;
        line = quotient(place, windows.by_line);
        column = place - line * windows.by_line.size;
    }
};

// The pixels under BM places, slice by slice. Id: void where they are an image's, else they are rows of a table.
// IS_WHOLE: channels are whole units of k, 16-byte aligned
template <class P, class X, class Id, int BM, int THREADS, bool IS_WHOLE>
struct WindowRows {
    static constexpr bool IS_TABLE = !is_same<Id, void>;
    using Places = UnitPlaces<P, X, BM, THREADS>;
    const X* x;  // the first image of the tile, the group's first channel; or the table
    const Id* ids;
    u64* status;
    long long V;
    const Windows& windows;
    const TilePhase& phase;
    u32 units, k;           // of the phase, and the thread's next
    int to;                 // where units go
    long long first_place;  // of ids, of the tile's first image
    // Of each row that the thread brings: its window's first pixel, and where that is, from the tile's first image on.
    int at[Places::EACH], h[Places::EACH], w[Places::EACH];

    __device__ __forceinline__ WindowRows(const X* x, const Id* ids, u64* status, long long V, const Windows& windows,
                                          const TilePhase& phase, const TileStart& start, long long rows_left, u32 group)
        : x(x), ids(ids), status(status), V(V), windows(windows), phase(phase), units(phase.units(windows)), k(Places::unit()),
          to(Places::first()) {
        first_place = static_cast<long long>(windows.H) * windows.W * start.image;
        if constexpr (!IS_TABLE) this->x += first_place * windows.channels + static_cast<int>(group) * windows.C;
#pragma unroll
        for (int i = 0; i < Places::EACH; ++i) {
            const u32 row = Places::row() + i * Places::DOWN;
            const Spot spot(windows, start.rest, row);
            const int line = spot.line * windows.stride_h - windows.before_h + phase.down.begin;
            w[i] = spot.column * windows.stride_w - windows.before_w + phase.right.begin;
            h[i] = row < rows_left ? line : NOWHERE;
            at[i] = (spot.image * windows.H + line) * windows.W + w[i];
        }
    }
    __device__ __forceinline__ void bring(char* room) {
        constexpr int UNIT = Places::UNIT;
        u32 tap = k;
        const int c = static_cast<int>(take_rest(tap, windows.by_units)) * UNIT;
        const int right = static_cast<int>(take_rest(tap, phase.right.by_taps)) * windows.dilation_w;
        const int down = static_cast<int>(tap) * windows.dilation_h, pixels = down * windows.W + right;
        const int there = k >= units ? 0 : IS_WHOLE ? UNIT : min(windows.C - c, UNIT);
        const X* const channels = x + c;
#pragma unroll
        for (int i = 0; i < Places::EACH; ++i) {
            if (!Places::has(i)) break;
            const bool is_inside = static_cast<u32>(h[i] + down) < static_cast<u32>(windows.H) &&
                                   static_cast<u32>(w[i] + right) < static_cast<u32>(windows.W) && there > 0;
            const X* from = channels;
            if constexpr (!IS_TABLE) from += static_cast<long long>(at[i] + pixels) * windows.channels;
            else if (is_inside) from += checked_id(ids, first_place + at[i] + pixels, V, status) * windows.C;
            bring_unit<Places, IS_WHOLE>(room, to + i * Places::DOWN * Places::Room::LINE, from, is_inside ? there : 0,
                                         windows.piece);
        }
        k += UNITS;
    }
};

// The places of y of a tile's phase, and the columns of its group.
template <class Y>
struct PlacesOut {
    using Number = Y;
    Y* y;  // the group's first column
    long long M, N;
    const Y* other;
    const Windows& windows;
    const TilePhase& phase;
    long long m;  // the tile's first place
    const TileStart& start;

    __device__ __forceinline__ long long row(long long of) const {
        if (of >= M) return -1;
        if (windows.by_phases.size == 1) return of * windows.columns;
        const Spot spot(windows, start.rest, static_cast<u32>(of - m));
        if (spot.line >= phase.down.places || spot.column >= phase.right.places) return -1;
        const int line = spot.line * windows.phases_h + static_cast<int>(phase.h);
        const int column = spot.column * static_cast<int>(windows.by_phases_w.size) + static_cast<int>(phase.w);
        return (((start.image + spot.image) * windows.lines_out + line) * windows.columns_out + column) * windows.columns;
    }
};

// N  columns of a group
template <class P, class X, class Y, class Id, int BM, int BN, int WM, int WN, int STAGES, bool IS_WHOLE>
__global__ void __launch_bounds__(32 * WM * WN, (MMA_BLOCKS<P, BM, BN, WM * WN>))
product_windows(const X* __restrict__ x, const Id* __restrict__ ids, const typename P::Number* __restrict__ w,
                const float* __restrict__ bias, const Y* other, Y* y, u64* status, long long V, long long M, long long N,
                const __grid_constant__ Windows windows, u32 code, u32 a_bits, u32 b_bits) {
    using W = typename P::Number;
    constexpr int THREADS = 32 * WM * WN, UNIT = MmaSlice<P>::UNIT;
    extern __shared__ uint4 room[];
    u32 number = blockIdx.x;
    const u32 of_phase = take_rest(number, windows.by_phases), group = take_rest(number, windows.by_groups);
    const Place<BM, BN> tile(M, N, number);
    const TilePhase phase(windows, of_phase);
    const TileStart start(windows, tile.m);

    WindowRows<P, X, Id, BM, THREADS, IS_WHOLE> rows(x, ids, status, V, windows, phase, start, M - tile.m, group);
    const long long pitch = static_cast<long long>(windows.row_units) * UNIT, column = group * N + tile.n;
    const u32 units = rows.units;
    Lines<P, W, BN, THREADS, MmaSlice<P>::PARTS, true> weights(
        w + column * pitch + phase.first_unit(windows) * UNIT, pitch, N - tile.n, static_cast<long long>(units) * UNIT, 16,
        windows.columns * pitch);
    const Y* const added = other == nullptr ? nullptr : other + group * N;
    const PlacesOut<Y> out{y + group * N, M, N, added, windows, phase, tile.m, start};
    multiply_tile<P, X, BM, BN, WM, WN, STAGES>(
        room, rows, weights, (units + UNITS - 1) / UNITS, bias == nullptr ? nullptr : bias + column, out, tile.m, tile.n,
        Activation{code, __uint_as_float(a_bits), __uint_as_float(b_bits)});
}
