// conv/first_layer.cu: convolution of few input channels (first layers of image networks) on the tensor cores.
//
// Idea    Implicit GEMM by mma.sync. A persistent block stages the patch of x under a tile of outputs once, 32
//         bits per pixel; for 16-bit types these are the pixel and its neighbour at the next tap. They are a fragment
//         register at any window offset; a table maps k to them. Weights stay in shared memory as fragments. The next
//         tile is prefetched into L2. Small NCHW images are assembled in shared memory to store whole 32 B sectors. A
//         non-overlapping pool is fused: windows are contiguous across lanes.
// Order   k over channels, then taps, STEP per instruction; fp32 is added to a total every PART elements. Then the
//         bias. A mean adds pairs, then pairs of pairs. Independent of the tile and of B.
// Floor   Read x, write y. 3 -> 64 channels, 3x3, 32x32, B = 4,096, float32 to float16: 587 MB / 4.8 TB/s = 122 us;
//         14.5 Gflop / 989 Tflop/s = 15 us. fp32: 1.1 GB, 231 us; 3 * 14.5 / 494.5 = 88 us.
// Layout  x (B, C, H, W), y (B, N, YH, YW) or NHWC; w as in conv/warp_mma.cuh, k = (C, KH, KW), KW zero-padded to even
//         for 16-bit types; bias (N) or nullptr. 1D is an image of one row. Pools: YH, YW count windows.
// Shared  SPLITS * K * N elements, 4 B per patch pixel, 16 B per 2 registers of k, 8 B per position, the tile of y.
// Limits  < 2^31 tiles, < 2^31 elements per image; x 16 B aligned; pool windows of 2^n <= 16, all whole; sm_80 up.
#include "conv/warp_mma.cuh"
#include "common/fast_divide.cuh"
#include "common/accumulator.cuh"

constexpr int MT = 2;    // 16 MT positions per warp tile
constexpr int UNIT = 8;  // pixels of a row per thread and load

struct Tiles {
    int C, H, W, N, HO, WO;
    int taps_h, taps_w, stride_h, stride_w, before_h, before_w, dilation_h, dilation_w;
    int images, rows, columns;  // of a tile
    int patch_rows, pitch;      // rows of x under an image's outputs; pixels per row, a multiple of UNIT
    u32 tiles;
    int vector_size;              // elements per vector load: rows are aligned to it
    int steps, is_nhwc;           // steps of k; whether y is NHWC
    int is_staged;                // whether a tile of y is assembled in shared memory: whole NCHW images
    int down_bits, across_bits;   // a pool window is 2^down_bits x 2^across_bits positions; 0: no pool
    int YH, YW;                   // of y: positions, or pool windows
    Divider by_columns, by_rows;  // windows of a tile
    Divider by_units, by_patch_rows, by_channels;
    Divider by_across, by_down;  // tiles of an image
    Divider by_groups;           // groups of 8 NT channels
};

// Origin of a tile.
struct Tile {
    long long first;  // first image
    int images;       // images in bounds
    int top, left;    // first position of y

    __device__ __forceinline__ Tile(const Tiles& t, u32 tile, long long B) {
        left = static_cast<int>(pop_index(tile, t.by_across)) * t.columns;
        top = static_cast<int>(pop_index(tile, t.by_down)) * t.rows;
        first = static_cast<long long>(tile) * t.images;
        images = static_cast<int>(B - first < t.images ? B - first : t.images);
    }
    __device__ __forceinline__ bool is_whole(const Tiles& t) const {
        return images == t.images && top + t.rows <= t.HO && left + t.columns <= t.WO;
    }
    __device__ __forceinline__ bool has(const Tiles& t, u32 position) const {
        u32 window = position >> (t.down_bits + t.across_bits);  // a window is in bounds as a whole
        const int column = pop_index(window, t.by_columns) << t.across_bits;
        const int row = pop_index(window, t.by_rows) << t.down_bits;
        return static_cast<int>(window) < images && top + row < t.HO && left + column < t.WO;
    }
    // Prefetches the tile's rows of x into L2.
    template <class X>
    __device__ __forceinline__ void prefetch(const Tiles& t, const X* x) const {
        const int begin = top * t.stride_h - t.before_h, from = max(begin, 0), end = min(begin + t.patch_rows, t.H);
        const int nbytes = max(end - from, 0) * t.W * static_cast<int>(sizeof(X)), count = nbytes / LINE_BYTES + 1;
        const X* const first_line = x + (first * t.C * t.H + from) * t.W;
        for (int i = threadIdx.x; i < images * t.C * count; i += THREADS) {
            const int channel = i / count, at = (i - channel * count) * LINE_BYTES;
            const X* const lines = first_line + static_cast<long long>(channel) * (t.H * t.W);
            if (at < nbytes) prefetch_line(reinterpret_cast<const char*>(lines) + at);
        }
    }
};

// Loads V elements of a row, or zeros.
template <int V, class X>
__device__ __forceinline__ void load_vector(X* to, const X* from, bool is_valid) {
    using Word = typename Vector<V * sizeof(X)>::type;
    Word word{};
    if (is_valid) word = *reinterpret_cast<const Word*>(from);
    *reinterpret_cast<Word*>(to) = word;
}

// Stages a tile's patch, V elements of x per load.
// is_next  whether a register's second element is the next pixel; else it is dilation_w further
template <class P, int V, bool is_next, class X>
__device__ __forceinline__ void load_patch(uint4* patch, const X* x, const Tiles& t, const Tile& tile) {
    constexpr bool IS_PAIR = P::PER_WORD == 2;
    constexpr int BATCH = IS_PAIR && !is_next ? 1 : 2;
    const int units = t.images * t.C * t.patch_rows * (t.pitch / UNIT), plane = t.H * t.W;
    const int h_first = tile.top * t.stride_h - t.before_h, w_first = (tile.left * t.stride_w - t.before_w) & -UNIT;
    const X* const images = x + tile.first * t.C * plane;
    for (int begin = threadIdx.x; begin < units; begin += BATCH * THREADS) {
        alignas(16) X values[BATCH][UNIT], next[BATCH][is_next ? 1 : UNIT];  // next: of the last, or of each
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            if (begin + i * THREADS >= units) break;
            u32 line = begin + i * THREADS;
            const int w_at = w_first + UNIT * static_cast<int>(pop_index(line, t.by_units));
            const int h_at = h_first + static_cast<int>(pop_index(line, t.by_patch_rows));
            const int c = pop_index(line, t.by_channels), image = line;
            const u32 W = image < tile.images && static_cast<u32>(h_at) < static_cast<u32>(t.H) ? t.W : 0;
            const X* const from = images + static_cast<long long>(image * t.C + c) * plane + (h_at * t.W + w_at);
#pragma unroll
            for (int k = 0; k < UNIT; k += V)
                load_vector<V>(values[i] + k, from + k, static_cast<u32>(w_at + k) < W);
            if constexpr (IS_PAIR && is_next) {
                load_vector<1>(next[i], from + UNIT, static_cast<u32>(w_at + UNIT) < W);
            } else if constexpr (IS_PAIR) {
#pragma unroll
                for (int k = 0; k < UNIT; ++k) {
                    const int second = k + t.dilation_w;
                    load_vector<1>(next[i] + k, from + second, static_cast<u32>(w_at + second) < W);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            if (begin + i * THREADS >= units) break;
            u32 words[UNIT];
#pragma unroll
            for (int k = 0; k < UNIT; ++k) {
                const bool inside = is_next && k + 1 < UNIT;
                words[k] = operand_word<P>(values[i][k], inside ? values[i][(k + 1) % UNIT] : next[i][is_next ? 0 : k]);
            }
            patch[2 * (begin + i * THREADS)] = {words[0], words[1], words[2], words[3]};
            patch[2 * (begin + i * THREADS) + 1] = {words[4], words[5], words[6], words[7]};
        }
    }
}

template <class P, class X>
__device__ __forceinline__ void load_patch(uint4* patch, const X* x, const Tiles& t, const Tile& tile) {
    constexpr int WIDEST = 16 / sizeof(X);
    if (P::PER_WORD == 2 && t.dilation_w != 1) load_patch<P, 1, false>(patch, x, t, tile);
    else if (t.vector_size == WIDEST) load_patch<P, WIDEST, true>(patch, x, t, tile);
    else if (t.vector_size == WIDEST / 2) load_patch<P, WIDEST / 2, true>(patch, x, t, tile);
    else if (WIDEST == 8 && t.vector_size == 2) load_patch<P, 2, true>(patch, x, t, tile);
    else load_patch<P, 1, true>(patch, x, t, tile);
}

// A position of a tile.
struct Offsets {
    int start;  // byte offset of its window in the patch
    int to;     // offset in y of its first channel (or of its pool window), relative to the tile
};

struct NoPool {};
struct MaxPool {
    static __device__ __forceinline__ float both(float a, float b) { return larger(a, b); }
};
struct MeanPool {
    static __device__ __forceinline__ float both(float a, float b) { return a + b; }
};

// Reduces pool windows of 2^bits positions. A lane has positions 2g and 2g + 1 of 16; afterwards c[..][0] and c[..][1]
// of the lane with a window's first position hold the result.
template <class Pool, int NT>
__device__ __forceinline__ void pool_windows(float (&c)[NT][4], int bits) {
#pragma unroll
    for (int i = 0; i < 2 * NT; ++i) {
        float& result = c[i / 2][i % 2];
        result = Pool::both(result, c[i / 2][2 + i % 2]);
        for (int stride = 2; stride < 1 << bits; stride *= 2)  // lanes g and g + 1 are four lanes apart
            result = Pool::both(result, __shfl_xor_sync(~0u, result, 2 * stride));
        if constexpr (is_same<Pool, MeanPool>) result *= __int_as_float((127 - bits) << 23);  // 2^-bits
    }
}

// Stores channels n, n + 1, n + 8, ... of two positions. here  bit mask: which of the two are in bounds
template <int NT, class Y>
__device__ __forceinline__ void store_rows(const float (&c)[NT][4], Y* y, const Offsets* offsets, u32 in_bounds, int n,
                                           const Tiles& t) {
    const int pixels = t.YH * t.YW, stride = offsets[1].to - offsets[0].to;
    Y* const first = y + (static_cast<long long>(n) * pixels + offsets[0].to);
    if (in_bounds == 3 && stride == 1 && pixels % 2 == 0 && reinterpret_cast<size_t>(first) % (2 * sizeof(Y)) == 0) {
#pragma unroll
        for (int i = 0; i < 2 * NT; ++i) {
            const int k = i / 2 * 8 + i % 2;
            const float two[2] = {c[i / 2][i % 2], c[i / 2][2 + i % 2]};
            if (n + k < t.N) store_vector(first + k * pixels, two);
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < 2 * NT; ++i) {
        const int k = i / 2 * 8 + i % 2;
        if (n + k >= t.N) continue;
        if (in_bounds & 1) store1(first + k * pixels, c[i / 2][i % 2]);
        if (in_bounds & 2) store1(first + k * pixels + stride, c[i / 2][2 + i % 2]);
    }
}

// Stores channels `channel` and the next of a pool window. to  its first channel in y
template <class Y>
__device__ __forceinline__ void store_window(const float (&c)[4], Y* to, int channel, const Tiles& t) {
    const float two[2] = {c[0], c[1]};
    if (t.is_nhwc && t.N % 2 == 0 && channel < t.N) {
        store_vector(to + channel, two);
        return;
    }
    const int stride = t.is_nhwc ? 1 : t.YH * t.YW;
    if (channel < t.N) store1(to + static_cast<long long>(channel) * stride, two[0]);
    if (channel + 1 < t.N) store1(to + static_cast<long long>(channel + 1) * stride, two[1]);
}

template <class P, class X, class Y, int NT, class Pool>
__global__ void __launch_bounds__(THREADS, is_same<P, Fp32> ? 2 : 3)
conv_first_layer(const X* __restrict__ x, const uint4* __restrict__ w, const float* __restrict__ bias, Y* y,
                 long long B, const __grid_constant__ Tiles t, u32 code, u32 a_bits, u32 b_bits) {
    constexpr int SPLITS = is_same<P, Fp32> ? 2 : 1;
    extern __shared__ uint4 smem[];
    const Activation activation{code, __uint_as_float(a_bits), __uint_as_float(b_bits)};
    const int groups = t.by_groups.size, tiles_n = groups * NT, low_offset = t.steps * tiles_n * 32;
    const int positions = t.images * t.rows * t.columns, warp_tiles = (positions + 16 * MT - 1) / (16 * MT);
    uint2* const ws = reinterpret_cast<uint2*>(smem);
    uint4* const table = smem + SPLITS * low_offset / 2;  // per step and q: byte offset and mask of two registers
    float* const smem_bias = reinterpret_cast<float*>(table + 4 * t.steps);
    Offsets* const offsets = reinterpret_cast<Offsets*>(smem_bias + 8 * tiles_n);
    uint4* const patch = reinterpret_cast<uint4*>(offsets + 16 * MT * warp_tiles);
    uint4* const stage = patch + t.images * t.C * t.patch_rows * t.pitch / 4;

    copy_vectors(smem, w, SPLITS * low_offset / 2);
    for (int n = threadIdx.x; n < 8 * tiles_n; n += THREADS) smem_bias[n] = bias != nullptr && n < t.N ? bias[n] : 0.0f;
    const int words_w = (t.taps_w + P::PER_WORD - 1) / P::PER_WORD;  // registers per row of taps
    for (int i = threadIdx.x; i < 4 * t.steps; i += THREADS) {
        u32 packed[4];
#pragma unroll
        for (int word = 0; word < 2; ++word) {
            const int unit = i / 4 * 8 + 4 * word + i % 4, line = unit / words_w, tap = unit % words_w * P::PER_WORD;
            const bool is_valid = line < t.C * t.taps_h;
            const int row = line / t.taps_h * t.patch_rows + line % t.taps_h * t.dilation_h;
            packed[2 * word] = is_valid ? 4 * (row * t.pitch + tap * t.dilation_w) : 0;
            // Padding registers are masked: they may hold a NaN.
            packed[2 * word + 1] = !is_valid ? 0 : P::PER_WORD == 2 && tap + 1 == t.taps_w ? 0xffff : ~0u;
        }
        table[i] = {packed[0], packed[1], packed[2], packed[3]};
    }
    const int stride = t.is_nhwc ? t.N : 1;  // stride between positions of y
    for (int p = threadIdx.x; p < 16 * MT * warp_tiles; p += THREADS) {
        const int position = p < positions ? p : 0, down = position >> t.across_bits;
        u32 image = down >> t.down_bits;
        const int to_column = pop_index(image, t.by_columns), to_row = pop_index(image, t.by_rows);
        const int column = to_column << t.across_bits | position & ((1 << t.across_bits) - 1);
        const int row = to_row << t.down_bits | down & ((1 << t.down_bits) - 1);
        const int line = image * t.C * t.patch_rows + row * t.stride_h;
        offsets[p] = {4 * (line * t.pitch + column * t.stride_w),
                             static_cast<int>(image) * t.N * t.YH * t.YW + (to_row * t.YW + to_column) * stride};
    }

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    for (u32 tile_index = blockIdx.x; tile_index < t.tiles; tile_index += gridDim.x) {
        const Tile tile(t, tile_index, B);
        const bool is_whole = tile.is_whole(t);
        __syncthreads();  // all warps are done with the previous patch
        load_patch<P>(patch, x, t, tile);
        __syncthreads();
        const u32 next = tile_index + gridDim.x;
        if (t.by_across.size == 1 && next < t.tiles) Tile(t, next, B).prefetch(t, x);

        const int to_first = (tile.top >> t.down_bits) * t.YW + (tile.left >> t.across_bits);
        Y* const y_tile = y + tile.first * t.N * (t.YH * t.YW) + static_cast<long long>(to_first) * stride;
        Y* const y_out = t.is_staged ? reinterpret_cast<Y*>(stage) : y_tile;
        const int shift = (tile.left * t.stride_w - t.before_w) & (UNIT - 1);  // of windows in the patch
        const char* const windows = reinterpret_cast<const char*>(patch) + 4 * shift;
        for (int warp_tile = warp; warp_tile < warp_tiles * groups; warp_tile += WARPS) {
            u32 index = warp_tile;
            const int n = static_cast<int>(pop_index(index, t.by_groups)) * 8 * NT;
            const int first = static_cast<int>(index) * 16 * MT;
            const char* from[MT][2];
#pragma unroll
            for (int i = 0; i < 2 * MT; ++i)
                from[i / 2][i % 2] = windows + offsets[first + 2 * g + i / 2 * 16 + i % 2].start;
            u32 in_bounds = (1 << 2 * MT) - 1;  // bit mask: which of the lane's positions are in bounds
            if (!is_whole || first + 16 * MT > positions) {
                in_bounds = 0;
#pragma unroll 1
                for (int i = 0; i < 2 * MT; ++i) {
                    const int position = first + 2 * g + i / 2 * 16 + i % 2;
                    if (position < positions && tile.has(t, position)) in_bounds |= 1 << i;
                }
            }
            Sums<P, NT> sums[MT];
            const uint2* weights = ws + n / 8 * 32 + lane;
            for (int step = 0; step < t.steps; ++step, weights += tiles_n * 32) {
                const uint4 entry = table[4 * step + q];
#pragma unroll
                for (int i = 0; i < MT; ++i) {
                    Step<P> words;
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        words.set(half, *reinterpret_cast<const u32*>(from[i][half] + entry.x) & entry.y);
                        words.set(half + 2, *reinterpret_cast<const u32*>(from[i][half] + entry.z) & entry.w);
                    }
                    sums[i].add(words, weights, low_offset);
                    sums[i].end_step(step, step + 1 == t.steps);
                }
            }
#pragma unroll
            for (int i = 0; i < MT; ++i) {
                float(&c)[NT][4] = sums[i].result();
#pragma unroll
                for (int j = 0; j < NT; ++j) {
                    const float2 each = *reinterpret_cast<const float2*>(smem_bias + n + 8 * j + 2 * q);
                    c[j][0] += each.x, c[j][1] += each.y, c[j][2] += each.x, c[j][3] += each.y;
                }
                activate_all<Y>(c, activation);
            }

            if constexpr (!is_same<Pool, NoPool>) {
                const int bits = t.down_bits + t.across_bits;
#pragma unroll
                for (int i = 0; i < MT; ++i) {
                    float(&c)[NT][4] = sums[i].result();
                    pool_windows<Pool>(c, bits);
                    if (!(in_bounds >> 2 * i & 1) || (2 * g & ((1 << bits) - 1)) != 0) continue;
                    Y* const to = y_out + offsets[first + 2 * g + 16 * i].to;
#pragma unroll
                    for (int j = 0; j < NT; ++j) store_window(c[j], to, n + 8 * j + 2 * q, t);
                }
                continue;
            }
            if (sizeof(Y) == 2 && t.is_nhwc && t.N % 8 == 0) {
                // 8 channels of a position are one 16 B store; each of four lanes stores one of four such vectors.
                if constexpr (sizeof(Y) == 2) {
#pragma unroll
                    for (int k = 0; k < 2 * MT * NT; k += 4) {
                        u32 words[4];
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            const int half = (k + i) / NT % 2;
                            const float(&c)[4] = sums[(k + i) / (2 * NT)].result()[(k + i) % NT];
                            words[i] = pack<Y>(c[2 * half], c[2 * half + 1]);
                        }
                        transpose_words(words, q);
                        const int at = (k + q) / NT, position = first + 2 * g + at / 2 * 16 + at % 2;
                        const int channel = n + (k + q) % NT * 8;
                        if (channel < t.N && (in_bounds >> at & 1))
                            *reinterpret_cast<uint4*>(y_tile + offsets[position].to + channel) = 
                                {words[0], words[1], words[2], words[3]};
                    }
                }
                continue;
            }
#pragma unroll
            for (int i = 0; i < MT; ++i) {
                const int position = first + 2 * g + 16 * i;
                const float(&c)[NT][4] = sums[i].result();
                if (!t.is_nhwc) {
                    store_rows<NT>(c, y_out, offsets + position, in_bounds >> 2 * i & 3, n + 2 * q, t);
                    continue;
                }
#pragma unroll
                for (int j = 0; j < 2 * NT; ++j) {
                    const int half = j % 2, channel = n + j / 2 * 8 + 2 * q;
                    Y* const at = y_tile + offsets[position + half].to + channel;
                    const float two[2] = {c[j / 2][2 * half], c[j / 2][2 * half + 1]};
                    if (!(in_bounds >> (2 * i + half) & 1)) continue;
                    if (t.N % 2 == 0 && channel < t.N) {
                        store_vector(at, two);
                    } else {
                        if (channel < t.N) store1(at, two[0]);
                        if (channel + 1 < t.N) store1(at + 1, two[1]);
                    }
                }
            }
        }
        if (!t.is_staged) continue;
        __syncthreads();
        const int vectors = tile.images * (t.N * t.YH * t.YW * static_cast<int>(sizeof(Y)) / 16);
        copy_vectors(reinterpret_cast<uint4*>(y_tile), stage, vectors);
    }
}
