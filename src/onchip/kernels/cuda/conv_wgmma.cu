// conv_wgmma.cu: convolutions over one or two axes, channels last, at the tensor cores' rate.
//
// Idea    tensor_tiles.cuh, where a row is a place of y, and k runs over taps and channels: what a tap adds to a tile is a
//         box of pixels of x, one behind the other as the tensor memory accelerator walks over lines and images, zeros
//         where the window hangs over. No matrix of windows is ever made.
// Floor   2 flop a term. 64 -> 64 channels, 3x3, 32x32 places, B = 1,024: 77.3 Gflop / 989 Tflop/s = 78 us in fp16,
//         3 * 77.3 / 494.5 = 469 us in fp32; its 537 MB of float32 take 112 us.
// Layout  x (B, H, W, C), y (B, HO, WO, N); w (PARTS, N, taps * blocks * DEPTH): channels of a tap filled up with zeros
//         to whole boxes.
// Limits  C numbers are a multiple of 16 B; pads below 128, windows that reach less than 256; B * HO * WO < 2^32; sm_90a.
#include "tensor_tiles.cuh"

struct Windows {
    u32 blocks;      // boxes of channels a tap
    u32 taps_w;      // of a line of the window
    u32 places, columns;  // of an image of y, and of a line
    int stride_h, stride_w, before_h, before_w, dilation_h, dilation_w;
};

struct WindowLoader {
    const TensorMap& map;
    const Windows& windows;
    int image, h, w;

    __device__ __forceinline__ void begin_tile(long long m) {
        const u32 place = static_cast<u32>(m), rest = place % windows.places;
        image = place / windows.places;
        h = static_cast<int>(rest / windows.columns) * windows.stride_h - windows.before_h;
        w = static_cast<int>(rest % windows.columns) * windows.stride_w - windows.before_w;
    }
    template <int DEPTH>
    __device__ __forceinline__ void load(void* to, Signal& signal, int slice, int box) const {
        const u32 tap = slice / windows.blocks, block = slice % windows.blocks;
        load_pixels(to, map, signal, block * DEPTH + box * (LINE / 4), w, h, image,
                    tap % windows.taps_w * windows.dilation_w, tap / windows.taps_w * windows.dilation_h);
    }
};

template <class P, class X, class Y, int BN, int TEAMS, int STAGES>
__global__ void __launch_bounds__(TEAM * (TEAMS + 1), 1)
conv_wgmma(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map, const float* bias, Y* y,
           long long M, long long N, u32 slices, u32 box_rows, const __grid_constant__ Windows windows, u32 code,
           u32 a_bits, u32 b_bits) {
    multiply_tiles<P, X, Y, BN, TEAMS, STAGES, NONE>(
        WindowLoader{x_map, windows, 0, 0, 0}, w_map, bias, y, M, N, slices, box_rows, 1,
        Activation{code, __uint_as_float(a_bits), __uint_as_float(b_bits)});
}
