// conv_first.cu: convolutions of few channels of x, as the first layers of image networks are, on the tensor cores.
//
// Idea    A block makes tiles of places of y, all channels. It brings the patch of x under a tile to shared memory once,
//         a word for each pixel: a number, or, of 16 bits, the pixel and its neighbour at the next tap. So a word is what
//         a lane multiplies, wherever a window begins: k runs over channels, rows of taps and taps, two taps a word,
//         and a table says where each word of a window lies. The weights stay in shared memory as fragments.
// Order   A sum runs over channels, then taps, STEP terms an instruction; of fp32 it is added to a total every PART
//         terms. Then comes the bias. Neither the tile nor B decides anything.
// Floor   x in and y out. 3 -> 64 channels, 3x3, 32x32 places, B = 4,096, float32 to float16: 587 MB / 4.8 TB/s = 122 us;
//         14.5 Gflop / 989 Tflop/s = 15 us; in fp32, 1.1 GB and 231 us, 3 * 14.5 / 494.5 = 88 us.
// Layout  x (B, C, H, W), y (B, N, HO, WO) or with channels last; w as conv_mma.cuh has it, k (C, KH, KW), of 16 bits an
//         odd KW filled up with a tap of zeros; bias (N) or none. One axis is an image of one row.
// Shared  PARTS * K * N numbers, 4 B a pixel of the patch, 16 B for 2 words of k, 12 B a place.
// Limits  At most 256 places a tile; all of it within a block's shared memory; images of less than 2^31 numbers; sm_80 up.
#include "conv_mma.cuh"
#include "divide.cuh"

constexpr int MOST_PLACES = 256, MT = 2;  // 16 MT places a warp at a time

struct Tiles {
    int C, H, W, N, HO, WO;
    int taps_h, taps_w, stride_h, stride_w, before_h, before_w, dilation_h, dilation_w;
    int images, rows, columns;    // of a tile
    int patch_rows, patch_columns;
    u32 down, across;             // tiles of an image
    int steps, y_last;            // of k; whether channels of y lie last
    Divider by_columns, by_rows;  // of a tile
    Divider by_patch_columns, by_patch_rows, by_channels;
};

// What a lane has of rows 2g and 2g + 1 of a tile of 16 places, of 8 NT channels from n on; to[half] < 0: no such place.
template <int NT, class Y>
__device__ __forceinline__ void finish_places(float (&c)[NT][4], Y* y, const float* shifts, const long long (&to)[2],
                                              int n, int q, const Tiles& t, const Activation& activation) {
#pragma unroll
    for (int j = 0; j < NT; ++j) {
        const float2 shift = *reinterpret_cast<const float2*>(shifts + n + 8 * j + 2 * q);
        c[j][0] += shift.x, c[j][1] += shift.y, c[j][2] += shift.x, c[j][3] += shift.y;
        if (activation.code == 1) {
#pragma unroll
            for (int i = 0; i < 4; ++i) c[j][i] = ReLU::apply(c[j][i]);
        } else if (activation.code > 1) {
            const float4 four = activated({c[j][0], c[j][1], c[j][2], c[j][3]}, activation);
            c[j][0] = four.x, c[j][1] = four.y, c[j][2] = four.z, c[j][3] = four.w;
        }
    }
    if (!t.y_last) {
        const long long pixels = static_cast<long long>(t.HO) * t.WO;
#pragma unroll
        for (int i = 0; i < 2 * NT; ++i) {
            const int channel = n + i / 2 * 8 + 2 * q + i % 2;
            if (channel >= t.N || to[0] < 0) continue;
            Y* const at = y + to[0] + channel * pixels;
            const float two[2] = {c[i / 2][i % 2], c[i / 2][2 + i % 2]};
            if (to[1] == to[0] + 1 && (to[0] + channel * pixels) % 2 == 0) {
                store_several(at, two);
            } else {
                store1(at, two[0]);
                if (to[1] >= 0) store1(y + to[1] + channel * pixels, two[1]);
            }
        }
        return;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if constexpr (sizeof(Y) == 2 && NT == 4) {
            if (t.N % 8 == 0) {  // 16 bytes a lane
                u32 words[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) words[j] = pack<Y>(c[j][2 * half], c[j][2 * half + 1]);
                collect_piece(words, q);
                if (to[half] >= 0 && n + 8 * q < t.N)
                    *reinterpret_cast<uint4*>(y + to[half] + n + 8 * q) = {words[0], words[1], words[2], words[3]};
                continue;
            }
        }
        if (to[half] < 0) continue;
#pragma unroll
        for (int j = 0; j < NT; ++j) {
            const int channel = n + 8 * j + 2 * q;
            const float two[2] = {c[j][2 * half], c[j][2 * half + 1]};
            if (t.N % 2 == 0 && channel < t.N) {
                store_several(y + to[half] + channel, two);
            } else {
                if (channel < t.N) store1(y + to[half] + channel, two[0]);
                if (channel + 1 < t.N) store1(y + to[half] + channel + 1, two[1]);
            }
        }
    }
}

template <class P, class X, class Y, int NT>
__global__ void __launch_bounds__(THREADS, is_same<P, Fp32> ? 2 : 3)
conv_first(const X* __restrict__ x, const uint4* __restrict__ w, const float* __restrict__ bias, Y* y, long long B,
           const __grid_constant__ Tiles t, u32 code, u32 a_bits, u32 b_bits) {
    constexpr int PARTS = is_same<P, Fp32> ? 2 : 1, BATCH = 4;
    extern __shared__ uint4 room[];
    __shared__ long long made[MOST_PLACES];  // where in y a place's first channel goes; < 0: there is none
    __shared__ int starts[MOST_PLACES];      // where in the patch its window begins, in bytes
    const Activation activation{code, __uint_as_float(a_bits), __uint_as_float(b_bits)};
    const int groups = (t.N + 8 * NT - 1) / (8 * NT), tiles_n = groups * NT, lower = t.steps * tiles_n * 32;
    uint2* const ws = reinterpret_cast<uint2*>(room);
    uint4* const table = room + PARTS * lower / 2;  // of each step and lane: where two words lie in bytes, what counts
    float* const shifts = reinterpret_cast<float*>(table + 4 * t.steps);
    u32* const patch = reinterpret_cast<u32*>(shifts + 8 * tiles_n);
    const int pitch = t.patch_columns, lines = t.images * t.C * t.patch_rows, places = t.images * t.rows * t.columns;

    copy_pieces(room, w, PARTS * lower / 2);
    for (int n = threadIdx.x; n < 8 * tiles_n; n += THREADS) shifts[n] = bias != nullptr && n < t.N ? bias[n] : 0.0f;
    const int words_w = (t.taps_w + P::PER_WORD - 1) / P::PER_WORD;  // of a row of taps
    for (int i = threadIdx.x; i < 4 * t.steps; i += THREADS) {
        u32 found[4];
#pragma unroll
        for (int word = 0; word < 2; ++word) {
            const int unit = i / 4 * 8 + 4 * word + i % 4, line = unit / words_w, tap = unit % words_w * P::PER_WORD;
            const bool is_there = line < t.C * t.taps_h;
            const int row = line / t.taps_h * t.patch_rows + line % t.taps_h * t.dilation_h;
            found[2 * word] = is_there ? 4 * (row * pitch + tap * t.dilation_w) : 0;
            // What is no tap may be a NaN.
            found[2 * word + 1] = !is_there ? 0 : P::PER_WORD == 2 && tap + 1 == t.taps_w ? 0xffff : ~0u;
        }
        table[i] = {found[0], found[1], found[2], found[3]};
    }
    for (int p = threadIdx.x; p < MOST_PLACES; p += THREADS) {
        u32 image = p;
        const int column = take_rest(image, t.by_columns), row = take_rest(image, t.by_rows);
        const int line = image * t.C * t.patch_rows + row * t.stride_h;
        starts[p] = p < places ? 4 * (line * pitch + column * t.stride_w) : 0;
    }

    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    const long long tiles = (B + t.images - 1) / t.images * t.down * t.across;
    for (long long tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const long long above = tile / t.across, first = above / t.down * t.images;
        const int top = static_cast<int>(above % t.down) * t.rows, left = static_cast<int>(tile % t.across) * t.columns;
        __syncthreads();  // nobody reads the patch before
        for (int p = threadIdx.x; p < places; p += THREADS) {
            u32 image = p;
            const int w_at = left + take_rest(image, t.by_columns), h_at = top + take_rest(image, t.by_rows);
            const long long row = first + image;
            const bool is_there = row < B && h_at < t.HO && w_at < t.WO;
            const long long pixel = (t.y_last ? row : row * t.N) * t.HO * t.WO + h_at * t.WO + w_at;
            made[p] = is_there ? pixel * (t.y_last ? t.N : 1) : -1;
        }
        const int h_first = top * t.stride_h - t.before_h, w_first = left * t.stride_w - t.before_w;
        for (int begin = threadIdx.x; begin < lines * pitch; begin += BATCH * THREADS) {
            u32 held[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                u32 line = begin + i * THREADS;
                const int w_at = w_first + static_cast<int>(take_rest(line, t.by_patch_columns));
                const int h_at = h_first + static_cast<int>(take_rest(line, t.by_patch_rows));
                const int c = take_rest(line, t.by_channels);
                const bool is_line = static_cast<int>(line) < t.images && first + line < B &&
                                     static_cast<u32>(h_at) < static_cast<u32>(t.H);
                const X* const from = x + (is_line ? ((first + line) * t.C + c) * t.H + h_at : 0) * t.W;
                const int next = w_at + t.dilation_w;
                X pair[2] = {};
                if (is_line && static_cast<u32>(w_at) < static_cast<u32>(t.W)) pair[0] = from[w_at];
                if (P::PER_WORD == 2 && is_line && static_cast<u32>(next) < static_cast<u32>(t.W)) pair[1] = from[next];
                held[i] = word_of<P>(pair[0], pair[1]);
            }
#pragma unroll
            for (int i = 0; i < BATCH; ++i)
                if (begin + i * THREADS < lines * pitch) patch[begin + i * THREADS] = held[i];
        }
        __syncthreads();

        const int jobs = (places + 16 * MT - 1) / (16 * MT) * groups;
        for (int job = warp; job < jobs; job += WARPS) {
            const int p = job / groups * (16 * MT) + 2 * g, group = job % groups;
            const char* from[MT][2];
#pragma unroll
            for (int i = 0; i < 2 * MT; ++i) from[i / 2][i % 2] = reinterpret_cast<const char*>(patch) + starts[p + i / 2 * 16 + i % 2];
            Sums<P, NT> sums[MT];
            for (int step = 0; step < t.steps; ++step) {
                const uint4 entry = table[4 * step + q];
                const uint2* const weights = ws + (step * tiles_n + group * NT) * 32 + threadIdx.x % 32;
#pragma unroll
                for (int i = 0; i < MT; ++i) {
                    Step<P> words;
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        words.take(half, *reinterpret_cast<const u32*>(from[i][half] + entry.x) & entry.y);
                        words.take(half + 2, *reinterpret_cast<const u32*>(from[i][half] + entry.z) & entry.w);
                    }
                    sums[i].add(words, weights, lower);
                    sums[i].end_step(step, step + 1 == t.steps);
                }
            }
#pragma unroll
            for (int i = 0; i < MT; ++i) {
                const int at = p + 16 * i;
                const long long to[2] = {at < places ? made[at] : -1, at + 1 < places ? made[at + 1] : -1};
                finish_places<NT>(sums[i].made(), y, shifts, to, group * 8 * NT, q, t, activation);
            }
        }
    }
}
