// conv_last.cu: convolutions and transposed ones to few channels of y, as the last layers of networks that make images
// are, on the tensor cores.
//
// Idea    A block makes tiles of y. It multiplies every pixel of x under a tile, once, by the weights of all taps and
//         channels of y: a product of N * taps columns, which come to lie in shared memory, column by column. A number of
//         y is then a sum of those that its window reaches. So x is read once, and nothing is multiplied in vain, with a
//         stride of a transposed convolution or without. A lane reads 16 bytes of channels at a time: which k they are is
//         free, and the weights are packed in that order.
// Order   A product runs over channels, in the order of the lanes, STEP terms an instruction; of fp32 it is added to a
//         total every PART terms. A sum runs over taps. Then comes the bias. Neither the tile nor B decides anything.
// Floor   x in and y out. 64 -> 3 channels, 4x4 by steps of 2, 32x32 -> 64x64, B = 5,248, float16: 817 MB / 4.8 TB/s =
//         170 us; 33 Gflop / 989 Tflop/s = 33 us.
// Layout  x (B, H, W, C), y (B, N, HO, WO); w as conv_mma.cuh has it, columns (KH, KW, N); bias (N) or none. One axis is
//         an image of one row.
// Shared  PARTS * K * N * taps numbers of w, and 4 * N * taps B for each pixel under a tile.
// Limits  C numbers are a multiple of 16 B; transposed ones without dilation; images of less than 2^31 numbers; sm_80 up.
#include "conv_mma.cuh"
#include "divide.cuh"

struct Axis {
    int in, out, taps, stride, before, dilation;
    int count;   // outputs of a tile
    u32 tiles;   // of an image
    Divider by_stride, by_count;
};

struct Layer {
    int C, N;
    int blocks, chunks;  // of channels that four lanes read at once; of 8 NT columns
    int pitch;           // pixels, of a column of products
    u32 is_transposed;
    Axis h, w;
};

// Pixels of x that outputs from `first` on reach, along an axis.
struct Reach {
    int first, count;

    __device__ __forceinline__ Reach(const Axis& axis, int top, bool is_transposed) {
        const int last = min(top + axis.count, axis.out) - 1, far = (axis.taps - 1) * axis.dilation;
        const int begin = top + axis.before - far;
        const int from = is_transposed ? (begin + axis.stride - 1) / axis.stride : top * axis.stride - axis.before;
        const int end = is_transposed ? (last + axis.before) / axis.stride : last * axis.stride - axis.before + far;
        first = is_transposed && begin < 0 ? 0 : max(from, 0);
        count = max(min(end, axis.in - 1) + 1 - first, 0);
    }
};

// The taps of an output along an axis, and the pixels under them.
struct Window {
    int tap, every, count;  // the first tap, how far the next one is, how many there are
    int pixel, move;        // the first pixel, and how far the next one is

    __device__ __forceinline__ Window(const Axis& axis, int at, bool is_transposed) {
        if (is_transposed) {
            u32 from = at + axis.before;
            tap = take_rest(from, axis.by_stride);
            every = axis.stride;
            count = tap < axis.taps ? quotient(static_cast<u32>(axis.taps - tap + axis.stride - 1), axis.by_stride) : 0;
            pixel = from;
            move = -1;
        } else {
            tap = 0, every = 1, count = axis.taps;
            pixel = at * axis.stride - axis.before;
            move = axis.dilation;
        }
    }
};

// 4 E channels of 16 rows: a lane has E of each of its two.
template <class P, class X>
struct Piece {
    static constexpr int E = 16 / static_cast<int>(sizeof(X)), STEPS = E / (2 * P::PER_WORD);
    uint4 held[2];

    __device__ __forceinline__ void read(const X* const (&from)[2], int channel, int C) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            held[half] = {0, 0, 0, 0};
            if (from[half] != nullptr && channel < C) held[half] = *reinterpret_cast<const uint4*>(from[half] + channel);
        }
    }
    __device__ __forceinline__ Step<P> step(int s) const {
        Step<P> made;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const X* numbers = reinterpret_cast<const X*>(held + i % 2) + (2 * s + i / 2) * P::PER_WORD;
            made.take(i, word_of<P>(numbers[0], numbers[P::PER_WORD - 1]));
        }
        return made;
    }
};

template <class Y>
__device__ __forceinline__ void store_number(Y* y, float v) {
    if constexpr (is_same<Y, unsigned char>) *y = static_cast<unsigned char>(ToPixels::apply(v));
    else store1(y, v);
}

// 16 MT pixels a warp at a time, 8 NT columns.
template <class P, class X, class Y, int NT>
__global__ void __launch_bounds__(THREADS, 2)
conv_last(const X* __restrict__ x, const uint4* __restrict__ w, const float* __restrict__ bias, Y* y, long long B,
          const __grid_constant__ Layer t, u32 code, u32 a_bits, u32 b_bits) {
    using Held = Piece<P, X>;
    constexpr int PARTS = is_same<P, Fp32> ? 2 : 1, MT = PARTS == 2 ? 1 : 2;
    extern __shared__ uint4 room[];
    const Activation activation{code, __uint_as_float(a_bits), __uint_as_float(b_bits)};
    const int tiles_n = t.chunks * NT, steps = t.blocks * Held::STEPS, lower = steps * tiles_n * 32;
    const uint2* const ws = reinterpret_cast<const uint2*>(room);
    float* const products = reinterpret_cast<float*>(room + PARTS * lower / 2);  // (columns, pitch)
    const int columns = t.h.taps * t.w.taps * t.N, outputs = t.N * t.h.count * t.w.count;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    copy_pieces(room, w, PARTS * lower / 2);

    const long long tiles = B * t.h.tiles * t.w.tiles;
    for (long long tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const long long above = tile / t.w.tiles, image = above / t.h.tiles;
        const int top = static_cast<int>(above % t.h.tiles) * t.h.count;
        const int left = static_cast<int>(tile % t.w.tiles) * t.w.count;
        const Reach rows(t.h, top, t.is_transposed), line(t.w, left, t.is_transposed);
        const int pixels = rows.count * line.count;
        __syncthreads();  // the weights are there, and nobody reads products of the tile before

        const int jobs = (pixels + 16 * MT - 1) / (16 * MT) * t.chunks;
        for (int job = warp; job < jobs; job += WARPS) {
            const int first = job / t.chunks * (16 * MT) + g, chunk = job % t.chunks;
            const X* from[MT][2];
#pragma unroll
            for (int i = 0; i < 2 * MT; ++i) {
                const int pixel = first + 8 * i, down = pixel / line.count, right = pixel - down * line.count;
                const long long at = (image * t.h.in + rows.first + down) * t.w.in + line.first + right;
                from[i / 2][i % 2] = pixel < pixels ? x + at * t.C : nullptr;
            }
            Sums<P, NT> sums[MT];
            Held now[MT], next[MT];
#pragma unroll
            for (int i = 0; i < MT; ++i) next[i].read(from[i], q * Held::E, t.C);
            for (int block = 0; block < t.blocks; ++block) {
#pragma unroll
                for (int i = 0; i < MT; ++i) {
                    now[i] = next[i];
                    next[i].read(from[i], (4 * (block + 1) + q) * Held::E, t.C);
                }
#pragma unroll
                for (int s = 0; s < Held::STEPS; ++s) {
                    const int step = block * Held::STEPS + s;
                    const uint2* const weights = ws + (step * tiles_n + chunk * NT) * 32 + lane;
#pragma unroll
                    for (int i = 0; i < MT; ++i) {
                        sums[i].add(now[i].step(s), weights, lower);
                        sums[i].end_step(step, step + 1 == steps);
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < MT; ++i) {
                const float(&made)[NT][4] = sums[i].made();
#pragma unroll
                for (int j = 0; j < 4 * NT; ++j) {
                    // Lanes are 8 banks apart along q, as the pitch is 4 more than a multiple of 32.
                    const int column = (chunk * NT + j / 4) * 8 + 2 * q + j % 2;
                    if (column < columns) products[column * t.pitch + first + 16 * i + j % 4 / 2 * 8] = made[j / 4][j % 4];
                }
            }
        }
        __syncthreads();

        for (int i = threadIdx.x; i < outputs; i += THREADS) {
            u32 n = i;
            const int w_at = left + static_cast<int>(take_rest(n, t.w.by_count));
            const int h_at = top + static_cast<int>(take_rest(n, t.h.by_count));
            if (h_at >= t.h.out || w_at >= t.w.out) continue;
            const Window down(t.h, h_at, t.is_transposed), right(t.w, w_at, t.is_transposed);
            float total = 0.0f;
            for (int a = 0; a < down.count; ++a) {
                const int row = down.pixel + a * down.move - rows.first;
                if (static_cast<u32>(row) >= static_cast<u32>(rows.count)) continue;
                const int tap = (down.tap + a * down.every) * t.w.taps + right.tap;
                const float* const from = products + (tap * t.N + n) * t.pitch + row * line.count;
                for (int b = 0; b < right.count; ++b) {
                    const int column = right.pixel + b * right.move - line.first;
                    if (static_cast<u32>(column) < static_cast<u32>(line.count))
                        total += from[b * right.every * t.N * t.pitch + column];
                }
            }
            if (bias != nullptr) total += bias[n];
            const long long at = ((image * t.N + n) * t.h.out + h_at) * t.w.out + w_at;
            store_number(y + at, activation(total));
        }
    }
}
