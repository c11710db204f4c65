// conv_last.cu: convolutions and transposed ones to few channels of y, as the last layers of networks that make images
// are, on the tensor cores.
//
// Idea    A block makes tiles of y. It multiplies every pixel of x under a tile, once, by the weights of all taps and
//         channels of y: a product of N * taps columns, which come to lie in shared memory, column by column. A number of
//         y is then a sum of those that its window reaches. So x is read once, and nothing is multiplied in vain, with a
//         stride of a transposed convolution or without. A lane reads 16 bytes of channels at a time: which k they are is
//         free, and the weights are packed in that order. While it adds up, a block asks for the next tile's pixels.
// Order   A product runs over channels, in the order of the lanes, STEP terms an instruction; of fp32 it is added to a
//         total every PART terms. A sum runs over taps. Then comes the bias. Neither the tile nor B decides anything.
// Floor   x in and y out. 64 -> 3 channels, 4x4 by steps of 2, 32x32 -> 64x64, B = 5,248, float16: 817 MB / 4.8 TB/s =
//         170 us; 33 Gflop / 989 Tflop/s = 33 us.
// Layout  x (B, H, W, C), y (B, N, HO, WO); w as conv_mma.cuh has it, columns (KH, KW, N); bias (N) or none. One axis is
//         an image of one row.
// Shared  PARTS * K * N * taps numbers of w, 4 * N * taps B for each pixel under a tile, 8 B a line and a column of it.
// Limits  Less than 2^31 tiles; C numbers are a multiple of 16 B; transposed ones without dilation; images of less than
//         2^31 numbers; sm_80 up.
#include "conv_mma.cuh"
#include "divide.cuh"

struct Axis {
    int in, out, taps, stride, before, dilation;
    int count;  // outputs of a tile
    Divider by_count, by_tiles, by_stride, by_dilation;  // by_tiles: of an image
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
        int from = top * axis.stride - axis.before, end = last * axis.stride - axis.before + far;
        if (is_transposed) {
            from = quotient(static_cast<u32>(max(top + axis.before - far, 0) + axis.stride - 1), axis.by_stride);
            end = quotient(static_cast<u32>(last + axis.before), axis.by_stride);
        }
        first = max(from, 0);
        count = max(min(end, axis.in - 1) + 1 - first, 0);
    }
};

// Of an output along an axis: where the product of its first tap inside of x lies, and how many such taps there are.
struct Taps {
    int offset, count;
};

// tap_apart, pixel_apart  from a tap, and from a pixel, to the next
__device__ __forceinline__ Taps taps_of(const Axis& axis, int at, const Reach& reach, bool is_transposed, int tap_apart,
                                        int pixel_apart) {
    const int last = reach.first + reach.count - 1;
    int tap, pixel, end, skipped;
    if (is_transposed) {  // the next tap is a stride further, and the pixel before
        u32 whole = at + axis.before;
        tap = take_rest(whole, axis.by_stride);
        pixel = whole;
        skipped = max(pixel - last, 0);
        end = min(static_cast<int>(quotient(static_cast<u32>(max(axis.taps - tap, 0) + axis.stride - 1), axis.by_stride)),
                  pixel - reach.first + 1);
        tap += skipped * axis.stride;
        pixel -= skipped;
    } else {
        pixel = at * axis.stride - axis.before;
        skipped = quotient(static_cast<u32>(max(reach.first - pixel, 0) + axis.dilation - 1), axis.by_dilation);
        const int further = quotient(static_cast<u32>(max(last - pixel, 0)), axis.by_dilation);
        end = last < pixel ? 0 : min(axis.taps, further + 1);
        tap = skipped;
        pixel += skipped * axis.dilation;
    }
    return {tap * tap_apart + (pixel - reach.first) * pixel_apart, max(end - skipped, 0)};
}

// 4 E channels of 16 rows: a lane has E of each of its two.
template <class P, class X>
struct Piece {
    static constexpr int E = 16 / static_cast<int>(sizeof(X)), STEPS = E / (2 * P::PER_WORD);
    uint4 held[2];

    // at  where in x its rows begin; < 0: there is none, and zeros stand for it
    __device__ __forceinline__ void read(const X* x, const int (&at)[2], int channel, int C) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            held[half] = {0, 0, 0, 0};
            if (at[half] >= 0 && channel < C) held[half] = *reinterpret_cast<const uint4*>(x + at[half] + channel);
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

// Up to CH channels of a place, of which `left` are there: the sums of their products, the bias, the activation.
// down, right  from a product to that of the next tap, below and to the right
constexpr int AT_ONCE = 3;
template <int CH, class Y>
__device__ __forceinline__ void finish_place(const float* row, int pitch, const Taps& lines, const Taps& places, int down,
                                             int right, const float* bias, Y* y, long long y_apart, int left,
                                             const Activation& activation) {
    float totals[CH] = {};
#pragma unroll 1
    for (int a = 0; a < lines.count; ++a, row += down) {
        // Few taps: up to AT_ONCE of them are read before the first is added.
#pragma unroll 1
        for (int b = 0; b < places.count; b += AT_ONCE) {
            float held[AT_ONCE][CH];
#pragma unroll
            for (int i = 0; i < AT_ONCE * CH; ++i)
                if (b + i / CH < places.count && i % CH < left)
                    held[i / CH][i % CH] = row[(b + i / CH) * right + i % CH * pitch];
#pragma unroll
            for (int i = 0; i < AT_ONCE * CH; ++i)
                if (b + i / CH < places.count && i % CH < left) totals[i % CH] += held[i / CH][i % CH];
        }
    }
#pragma unroll
    for (int n = 0; n < CH; ++n)
        if (n < left) store_number(y + n * y_apart, activation(bias != nullptr ? totals[n] + bias[n] : totals[n]));
}

// A tile of y: where it begins, and the pixels of x under it.
struct Tile {
    long long image;
    int top, left;
    Reach rows, line;

    static __device__ __forceinline__ Tile at(const Layer& t, u32 number) {
        const int left = static_cast<int>(take_rest(number, t.w.by_tiles)) * t.w.count;
        const int top = static_cast<int>(take_rest(number, t.h.by_tiles)) * t.h.count;
        return {number, top, left, Reach(t.h, top, t.is_transposed), Reach(t.w, left, t.is_transposed)};
    }
    // Its first pixel of x.
    template <class X>
    __device__ __forceinline__ const X* corner(const Layer& t, const X* x) const {
        return x + ((image * t.h.in + rows.first) * t.w.in + line.first) * t.C;
    }
    // Asks for its pixels, where they are whole lines, so that they lie in the L2 cache when they are read.
    template <class X>
    __device__ __forceinline__ void fetch_early(const Layer& t, const X* x) const {
        const char* const from = reinterpret_cast<const char*>(corner(t, x));
        const int pixels = line.count == t.w.in ? rows.count * line.count : 0;
        const int nbytes = pixels * t.C * static_cast<int>(sizeof(X));
        for (int at = LINE_BYTES * threadIdx.x; at < nbytes; at += LINE_BYTES * THREADS)
            fetch_line(from + at);
    }
};

// 16 MT pixels a warp at a time, 8 NT columns.
template <class P, class X, class Y, int NT>
__global__ void __launch_bounds__(THREADS, NT == 2 && !is_same<P, Fp32> ? 3 : 2)
conv_last(const X* __restrict__ x, const uint4* __restrict__ w, const float* __restrict__ bias, Y* y, long long B,
          const __grid_constant__ Layer t, u32 code, u32 a_bits, u32 b_bits) {
    using Held = Piece<P, X>;
    constexpr int PARTS = is_same<P, Fp32> ? 2 : 1, MT = PARTS == 2 ? 1 : 2;
    extern __shared__ uint4 room[];
    const Activation activation{code, __uint_as_float(a_bits), __uint_as_float(b_bits)};
    const int tiles_n = t.chunks * NT, steps = t.blocks * Held::STEPS, lower = steps * tiles_n * 32;
    const uint2* const ws = reinterpret_cast<const uint2*>(room);
    float* const products = reinterpret_cast<float*>(room + PARTS * lower / 2);  // (columns, pitch)
    const int columns = t.h.taps * t.w.taps * t.N, tap_apart = t.N * t.pitch;
    Taps* const taps = reinterpret_cast<Taps*>(products + columns * t.pitch);  // of the tile's lines, then its columns
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    copy_pieces(room, w, PARTS * lower / 2);

    const u32 tiles = static_cast<u32>(B) * t.h.by_tiles.size * t.w.by_tiles.size;
    for (u32 number = blockIdx.x; number < tiles; number += gridDim.x) {
        const Tile tile = Tile::at(t, number);
        const Reach rows = tile.rows, line = tile.line;
        const int pixels = rows.count * line.count;
        const X* const corner = tile.corner(t, x);
        __syncthreads();  // the weights are there, and nobody reads products of the tile before
        for (int i = threadIdx.x; i < t.h.count + t.w.count; i += THREADS)
            taps[i] = i < t.h.count
                          ? taps_of(t.h, tile.top + i, rows, t.is_transposed, t.w.taps * tap_apart, line.count)
                          : taps_of(t.w, tile.left + i - t.h.count, line, t.is_transposed, tap_apart, 1);

        const int jobs = (pixels + 16 * MT - 1) / (16 * MT) * t.chunks;
        for (int job = warp; job < jobs; job += WARPS) {
            const int first = job / t.chunks * (16 * MT) + g, chunk = job % t.chunks;
            int at[MT][2];
#pragma unroll
            for (int i = 0; i < 2 * MT; ++i) {
                const int pixel = first + 8 * i, beside = t.w.in - line.count;  // of a line, those that nobody reaches
                const int on = pixel + (beside ? pixel / line.count * beside : 0);
                at[i / 2][i % 2] = pixel < pixels ? on * t.C : -1;
            }
            Sums<P, NT> sums[MT];
            Held now[MT], next[MT];
#pragma unroll
            for (int i = 0; i < MT; ++i) next[i].read(corner, at[i], q * Held::E, t.C);
            for (int block = 0; block < t.blocks; ++block) {
#pragma unroll
                for (int i = 0; i < MT; ++i) {
                    now[i] = next[i];
                    next[i].read(corner, at[i], (4 * (block + 1) + q) * Held::E, t.C);
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
        if (number + gridDim.x < tiles) Tile::at(t, number + gridDim.x).fetch_early(t, x);
        __syncthreads();

        const int down = t.is_transposed ? t.h.stride * t.w.taps * tap_apart - line.count
                                         : t.w.taps * tap_apart + t.h.dilation * line.count;
        const int right = t.is_transposed ? t.w.stride * tap_apart - 1 : tap_apart + t.w.dilation;
        const long long y_apart = static_cast<long long>(t.h.out) * t.w.out;
        Y* const y_tile = y + tile.image * t.N * y_apart + static_cast<long long>(tile.top) * t.w.out + tile.left;
        for (int i = threadIdx.x; i < t.h.count * t.w.count; i += THREADS) {
            u32 h_at = i;
            const u32 w_at = take_rest(h_at, t.w.by_count);
            if (tile.top + h_at >= t.h.out || tile.left + w_at >= t.w.out) continue;
            const Taps lines = taps[h_at], places = taps[t.h.count + w_at];
            const float* const from = products + lines.offset + places.offset;
            Y* const to = y_tile + (h_at * t.w.out + w_at);
            for (int n = 0; n < t.N;) {
                const int left_n = t.N - n;
                const float* const shift = bias != nullptr ? bias + n : nullptr;
                if (left_n > 2) {
                    finish_place<4>(from + n * t.pitch, t.pitch, lines, places, down, right, shift, to + n * y_apart,
                                    y_apart, left_n, activation);
                    n += 4;
                } else {
                    finish_place<1>(from + n * t.pitch, t.pitch, lines, places, down, right, shift, to + n * y_apart,
                                    y_apart, left_n, activation);
                    n += 1;
                }
            }
        }
    }
}
