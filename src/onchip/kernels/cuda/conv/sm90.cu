// conv/sm90.cu: convolutions and transposed ones over one or two axes, channels last, at the tensor cores' rate.
//
// Idea    mma/wgmma_tile.cuh, where a row is a place of y, and k runs over taps and channels: what a tap adds to a tile is a
//         box of pixels of x, one behind the other as the tensor memory accelerator walks over lines and images, zeros
//         where the window hangs over. No matrix of windows is ever made.
//         Of a transposed convolution with stride s, outputs p, p + s, p + 2s, ... along an axis (phase p) have the same
//         taps, over neighbouring pixels: each phase is a convolution without a stride. One walk serves all of them, a
//         phase begins some pixels further; its rows go to every s-th place of y.
//         A slice of k is 128 bytes of one tap's channels. Of 16 bits with few channels it is several taps of 16 or 32
//         channels each, a box of pixels a tap: zeros would be brought and multiplied else. The last slice of a phase has
//         the boxes and steps of the taps that are left, and no others: what another tile left there may be infinite.
//         What else is added to y (a residual) is read where a tile is finished. Groups are zeros in w: to multiply them
//         takes less than to do without, where the ordinary cores would.
// Order   Taps from the first pixel of the window to the last, then channels, as in mma/wgmma_tile.cuh; then the bias, the
//         residual and the activation.
// Floor   2 flop a term. 64 -> 64 channels, 3x3, 32x32 places, B = 1,024: 77.3 Gflop / 989 Tflop/s = 78 us in fp16,
//         3 * 77.3 / 494.5 = 469 us in fp32; its 537 MB of float32 take 112 us.
//         16 -> 16 channels, 3x3, 32x32 places, B = 4,096, in fp16: 268 MB / 4.8 TB/s = 56 us. 19.3 Gflop are 20 us; a turned
//         tile has 64 columns of which y has 16: 78 us.
// Layout  x (B, H, W, C), y and the residual (B, HO, WO, N); w (PARTS, N, taps of all phases * channels): channels of a tap
//         filled up with zeros to whole boxes.
// Limits  C numbers are a multiple of 16 B; pads below 128, windows that reach less than 256; strides up to 8; every phase
//         has a tap; B * places < 2^32; sm_90a.
#include "mma/wgmma_tile.cuh"

constexpr int MOST_PHASES = 8;  // of an axis

struct Phase {
    u32 taps, taps_before;  // along the axis: its own, and those of the phases before it
    u32 begin;              // of its windows: pixels behind where the walk is
    u32 places;             // that it has in an image of y
};

struct Windows {
    u32 blocks;                    // slices of k a tap; 1 where a slice has several taps
    u32 channels;                  // of w, a tap
    u32 taps_w;                    // of all phases, along a line
    u32 places, columns;           // of the walk over an image, and over a line
    u32 lines_out, columns_out;    // of y
    u32 phases_h, phases_w;
    int stride_h, stride_w, before_h, before_w, dilation_h, dilation_w;
    Phase down[MOST_PHASES], right[MOST_PHASES];
};

// SLICE_TAPS  in a slice of k, a box of channels each
template <int SLICE_TAPS>
struct WindowLoader {
    static constexpr int TAPS = SLICE_TAPS;
    const TensorMap& map;
    const Windows& windows;
    int image, h, w;
    u32 taps_w, begin_w;  // of the tile's phase
    // The next box: its tap in the window's line, where that lies, and its channels. One thread brings all boxes: it counts
    // on instead of dividing.
    u32 column, tap_h, tap_w, block;

    __device__ __forceinline__ u32 phases() const { return windows.phases_h * windows.phases_w; }
    // Neighbouring tiles are the phases of the same pixels. A block should not have the same phase all the time.
    __device__ __forceinline__ u32 phase_of(u32 tile) const {
        const u32 count = phases();
        return count == 1 ? 0 : (tile + (gridDim.x % count ? 0 : tile / gridDim.x)) % count;
    }
    __device__ __forceinline__ const Phase& down_of(u32 phase) const { return windows.down[phase / windows.phases_w]; }
    __device__ __forceinline__ const Phase& right_of(u32 phase) const { return windows.right[phase % windows.phases_w]; }
    __device__ __forceinline__ int first_number(u32 phase) const {
        const Phase &down = down_of(phase), &right = right_of(phase);
        return (down.taps_before * windows.taps_w + down.taps * right.taps_before) * windows.channels;
    }
    __device__ __forceinline__ int taps(u32 phase) const { return down_of(phase).taps * right_of(phase).taps; }
    __device__ __forceinline__ int slices(u32 phase) const { return (taps(phase) + TAPS - 1) / TAPS * windows.blocks; }
    __device__ __forceinline__ void begin_tile(long long m, u32 phase, int slice) {
        const u32 place = static_cast<u32>(m), rest = place % windows.places;
        image = place / windows.places;
        h = static_cast<int>(rest / windows.columns) * windows.stride_h - windows.before_h;
        w = static_cast<int>(rest % windows.columns) * windows.stride_w - windows.before_w;
        const Phase &down = down_of(phase), &right = right_of(phase);
        taps_w = right.taps, begin_w = right.begin;
        const u32 tap = slice * TAPS / windows.blocks;
        block = slice % windows.blocks, column = tap % taps_w;
        tap_w = begin_w + column * windows.dilation_w, tap_h = down.begin + tap / taps_w * windows.dilation_h;
    }
    template <int DEPTH, int X_BOXES>
    __device__ __forceinline__ void load(void* to, Signal& signal, int, int box) {
        load_pixels(to, map, signal, block * DEPTH + (TAPS == 1 ? box * (LINE / 4) : 0), w, h, image, tap_w, tap_h);
        if (TAPS == 1 && (box + 1 < X_BOXES || ++block < windows.blocks)) return;
        block = 0, tap_w += windows.dilation_w;
        if (++column == taps_w) column = 0, tap_w = begin_w, tap_h += windows.dilation_h;
    }
};

// The places of y of the tile's phase: with more phases than one, every so many.
template <class Y>
struct PlacesOut {
    using Number = Y;
    Y* y;
    long long M, N;
    const Y* other;
    const Windows& windows;
    u32 phase;

    __device__ __forceinline__ void begin_tile(u32 of) { phase = of; }
    __device__ __forceinline__ long long row(long long m) const {
        if (m >= M) return -1;
        if (windows.phases_h * windows.phases_w == 1) return m * N;
        const u32 phase_h = phase / windows.phases_w, phase_w = phase % windows.phases_w;
        const u32 place = static_cast<u32>(m), rest = place % windows.places;
        const u32 line = rest / windows.columns, column = rest % windows.columns;
        if (line >= windows.down[phase_h].places || column >= windows.right[phase_w].places) return -1;
        const long long lines = static_cast<long long>(place / windows.places) * windows.lines_out;
        return ((lines + line * windows.phases_h + phase_h) * windows.columns_out + column * windows.phases_w + phase_w) * N;
    }
};

// A cluster's blocks leave room for those of the next kernel, which then begins before this one ends.
template <class P, class X, class Y, int TEAM_ROWS, int BN, int TEAMS, int STAGES, Split SPLIT, int TAPS>
__global__ void __launch_bounds__(TEAM * (TEAMS + 1), SPLIT == TOGETHER ? 2 : 1)
conv_wgmma(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map, const float* bias,
           const Y* other, Y* y, long long M, long long N, u32 box_rows, u32 parts,
           const __grid_constant__ Windows windows, u32 code, u32 a_bits, u32 b_bits) {
    multiply_tiles<P, X, TEAM_ROWS, BN, TEAMS, STAGES, SPLIT>(
        WindowLoader<TAPS>{x_map, windows, 0, 0, 0, 0, 0, 0, 0, 0, 0}, w_map, bias, PlacesOut<Y>{y, M, N, other, windows, 0}, M,
        box_rows, parts, Activation{code, __uint_as_float(a_bits), __uint_as_float(b_bits)});
}
