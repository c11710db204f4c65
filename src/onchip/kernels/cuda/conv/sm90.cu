// conv/sm90.cu: 1D and 2D convolution and transposed convolution, NHWC, by TMA and wgmma.
//
// Idea    Implicit GEMM on mma/wgmma_tile.cuh (persistent): rows are output positions, k runs over taps and channels.
//         TMA in im2col mode loads a tap's pixels, zero-filled. A transposed convolution with stride s has s phases per
//         axis: outputs p, p + s, ... share their taps and form a stride-1 convolution. A slice of k is 128 bytes of a
//         tap, or several taps of 16 or 32 channels in 16 bits; a partial last slice skips the rest, as stale shared
//         memory may be infinite. The epilogue adds a residual. Groups run dense, with zeros in w: faster than FFMA.
// Order   Taps from the first pixel of the window to the last, then channels as in mma/wgmma_tile.cuh.
// Floor   64 -> 64 channels, 3x3, 32x32, B = 1,024: 77.3 Gflop / 989 Tflop/s = 78 us in fp16; fp32: 3 * 77.3 / 494.5 =
//         469 us, 537 MB = 112 us. 16 -> 16, B = 4,096, fp16: 268 MB = 56 us, 19.3 Gflop = 20 us; the transposed tile
//         computes 64 columns for 16: 78 us.
// Layout  x (B, H, W, C), y and residual (B, HO, WO, N); w (SPLITS, N, taps of all phases * channels), channels padded.
// Limits  C a multiple of 16 B; pads < 128, window extent < 256, strides up to 8; every phase has a tap; B * positions
//         < 2^32; sm_90a.
#include "mma/wgmma_tile.cuh"

constexpr int MAX_PHASES = 8;  // per axis

struct Phase {
    u32 taps, taps_before;  // along the axis: of this phase, and of the previous ones
    u32 begin;              // first pixel of its windows, relative to the base pixel
    u32 positions;          // positions it has in an image of y
};

struct Windows {
    u32 chunks;                  // chunks of channels per tap, a slice of k each; 1 if a slice has several taps
    u32 channels;                // of w per tap
    u32 taps_w;                  // of all phases, along a row
    u32 positions, columns;      // of the largest phase: per image, and per row
    u32 lines_out, columns_out;  // of y
    u32 phases_h, phases_w;
    int stride_h, stride_w, before_h, before_w, dilation_h, dilation_w;
    Phase down[MAX_PHASES], right[MAX_PHASES];
};

// SLICE_TAPS  taps per slice of k, one TMA tile each
template <int SLICE_TAPS>
struct Im2colLoader {
    static constexpr int TAPS = SLICE_TAPS;
    const TensorMap& map;
    const Windows& windows;
    int image, h, w;      // base pixel of the tile's first position
    u32 taps_w, begin_w;  // of the tile's phase
    // The next tile to load: tap column, tap offset and chunk of channels. A single producer thread issues all loads,
    // so it increments instead of dividing.
    u32 column, tap_h, tap_w, chunk;

    __device__ __forceinline__ u32 phases() const { return windows.phases_h * windows.phases_w; }
    // Adjacent tiles are the phases of the same pixels. Rotated so that no block always gets the same phase.
    __device__ __forceinline__ u32 phase_of(u32 tile) const {
        const u32 count = phases();
        return count == 1 ? 0 : (tile + (gridDim.x % count ? 0 : tile / gridDim.x)) % count;
    }
    __device__ __forceinline__ const Phase& down_of(u32 phase) const { return windows.down[phase / windows.phases_w]; }
    __device__ __forceinline__ const Phase& right_of(u32 phase) const {
        return windows.right[phase % windows.phases_w];
    }
    __device__ __forceinline__ int first_k(u32 phase) const {
        const Phase &down = down_of(phase), &right = right_of(phase);
        return (down.taps_before * windows.taps_w + down.taps * right.taps_before) * windows.channels;
    }
    __device__ __forceinline__ int taps(u32 phase) const { return down_of(phase).taps * right_of(phase).taps; }
    __device__ __forceinline__ int slices(u32 phase) const { return (taps(phase) + TAPS - 1) / TAPS * windows.chunks; }
    __device__ __forceinline__ void begin_tile(long long m, u32 phase, int slice) {
        const u32 position = static_cast<u32>(m), offset = position % windows.positions;
        image = position / windows.positions;
        h = static_cast<int>(offset / windows.columns) * windows.stride_h - windows.before_h;
        w = static_cast<int>(offset % windows.columns) * windows.stride_w - windows.before_w;
        const Phase &down = down_of(phase), &right = right_of(phase);
        taps_w = right.taps, begin_w = right.begin;
        const u32 tap = slice * TAPS / windows.chunks;
        chunk = slice % windows.chunks, column = tap % taps_w;
        tap_w = begin_w + column * windows.dilation_w, tap_h = down.begin + tap / taps_w * windows.dilation_h;
    }
    template <int DEPTH, int X_TILES>
    __device__ __forceinline__ void load(void* to, Mbarrier& mbarrier, int, int tile) {
        tma_load_im2col(to, map, mbarrier, chunk * DEPTH + (TAPS == 1 ? tile * (LINE / 4) : 0), w, h, image, tap_w,
                        tap_h);
        if (TAPS == 1 && (tile + 1 < X_TILES || ++chunk < windows.chunks)) return;
        chunk = 0, tap_w += windows.dilation_w;
        if (++column == taps_w) column = 0, tap_w = begin_w, tap_h += windows.dilation_h;
    }
};

// Output rows of the tile's phase: every phases-th position.
template <class Y>
struct PhaseRows {
    using Element = Y;
    Y* y;
    long long M, N;
    const Y* residual;
    const Windows& windows;
    u32 phase;

    __device__ __forceinline__ void begin_tile(u32 phase_index) { phase = phase_index; }
    __device__ __forceinline__ long long row(long long m) const {
        if (m >= M) return -1;
        if (windows.phases_h * windows.phases_w == 1) return m * N;
        const u32 phase_h = phase / windows.phases_w, phase_w = phase % windows.phases_w;
        const u32 position = static_cast<u32>(m), offset = position % windows.positions;
        const u32 line = offset / windows.columns, column = offset % windows.columns;
        if (line >= windows.down[phase_h].positions || column >= windows.right[phase_w].positions) return -1;
        const long long lines = static_cast<long long>(position / windows.positions) * windows.lines_out;
        return ((lines + line * windows.phases_h + phase_h) * windows.columns_out + column * windows.phases_w +
                phase_w) * N;
    }
};

// Two blocks per SM for cluster split-K: blocks of the next kernel can start before this one ends.
template <class P, class X, class Y, int WARPGROUP_ROWS, int BN, int WARPGROUPS, int STAGES, Split SPLIT, int TAPS>
__global__ void __launch_bounds__(WARPGROUP * (WARPGROUPS + 1), SPLIT == CLUSTER ? 2 : 1)
conv_sm90(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map, const float* bias,
           const Y* residual, Y* y, long long M, long long N, u32 x_tile_rows, u32 split_k,
           const __grid_constant__ Windows windows, u32 code, u32 a_bits, u32 b_bits) {
    multiply_tiles<P, X, WARPGROUP_ROWS, BN, WARPGROUPS, STAGES, SPLIT>(
        Im2colLoader<TAPS>{x_map, windows, 0, 0, 0, 0, 0, 0, 0, 0, 0}, w_map, bias,
        PhaseRows<Y>{y, M, N, residual, windows, 0}, M,
        x_tile_rows, split_k, Activation{code, __uint_as_float(a_bits), __uint_as_float(b_bits)});
}
