// conv/direct.cu: 1D and 2D convolution and transposed convolution of any shape (FFMA). Sizes are run-time values.
//
// Idea    conv_tile: implicit GEMM. A block computes BP output positions x BN channels; k runs over taps and channels
//         in double-buffered slices of 16. Offsets in x: a table entry per position plus one per k. A transposed
//         convolution tiles each phase (output mod stride) separately: no inserted zero is multiplied.
//         conv_narrow, for few output channels: 4 channels x 4 positions per thread, PART rows of w staged at a time.
//         conv_direct, for groups of very few channels: one output per thread.
// Order   k runs over the phase's taps, channels innermost. Partial sums of PART fma are added to a total; then bias,
//         activation. Bit-identical in all three kernels, for any tile and B.
// Floor   2 flop per fma. 64 -> 64 channels, 3x3, 32x32, B = 256: 19.3 Gflop / 66.9 Tflop/s = 289 us; 134 MB: 28 us. A
//         thread's 8 x 4 tile reads 12 elements of shared memory per 32 fma, which keeps it well below peak.
// Layout  x (B, groups * C, H, W), y (B, groups * N, ...) or NHWC by flags, 16 B aligned. w (taps..., C, groups * N),
//         transposed: (taps..., groups * C, N); bias (groups * N) or nullptr. int2 is (H, W); 1D is one row.
// Shared  2 * 16 * (BP + BN + 4) elements, 24 B per position, 32 B per k: 28 672 B for 128 x 64. conv_narrow: 4 * PART.
// Limits  x, y float32, float16 or bfloat16 with w float32, or all float64; 32-bit offsets in an image; sm_80 up.
#include "common/epilogue.cuh"
#include "common/accumulator.cuh"

constexpr int DEPTH = 16;  // k per slice
constexpr int PART = 128;  // K elements per partial sum
constexpr int OUT_OF_BOUNDS = -(1 << 30);  // stays out of bounds after any offset
constexpr int DIRECT_THREADS = 256;
constexpr int NARROW_THREADS = 256, PER_THREAD = 4;  // channels, and positions, per thread
enum Flag : u32 { TRANSPOSED = 1, X_NHWC = 2, Y_NHWC = 4 };

// Axis h or v (columns): y[phase + phases * q] = sum over j of x[q * step + begin + j * delta] w[first + j * tap_step].
struct Axis {
    int first, count, begin, delta;  // j < count

    __device__ Axis(bool is_transposed, int phase, int taps, int stride, int before, int dilation, int tap_step)
        : first(0), count(taps), begin(-before), delta(dilation) {
        if (!is_transposed) return;
        while (first < tap_step && (phase + before - first * dilation) % stride != 0) ++first;
        count = first < tap_step && first < taps ? (taps - 1 - first) / tap_step + 1 : 0;
        begin = (phase + before - first * dilation) / stride;
        delta = -(tap_step * dilation / stride);
    }
};

// Strides of an image: channel, row, column; and its size.
struct Image {
    int channel, row, column, size;

    __device__ Image(int channels, int2 image_size, bool is_nhwc)
        : channel(is_nhwc ? 1 : image_size.x * image_size.y), row(is_nhwc ? image_size.y * channels : image_size.y),
          column(is_nhwc ? channels : 1), size(channels * image_size.x * image_size.y) {}
};

// A block's tile: positions of a phase from `first` on, channels of a group from `n` on. Blocks that read the same
// positions of x are adjacent.
struct Block {
    int n, group;
    int2 phase;
    long long first;

    __device__ Block(int positions, int channels, int N, int groups, int2 phases) {
        const int n_tiles = (N + channels - 1) / channels;
        u32 tile = blockIdx.x;
        n = static_cast<int>(tile % n_tiles) * channels;
        group = static_cast<int>((tile /= n_tiles) % groups);
        phase = {static_cast<int>((tile /= groups) / phases.y % phases.x), static_cast<int>(tile % phases.y)};
        first = static_cast<long long>(tile / (phases.x * phases.y)) * positions;
    }
};

struct __align__(16) OutputPosition {  // an output's first tap: offset (conv_narrow: of the image), pixel
    long long at;
    int h, w;
};
struct __align__(16) Term {  // one k: offset and pixel from the first tap; row of w
    int at, h, w, row;
};

template <class X>
__device__ __forceinline__ acc_t<X> read(const X* x, const OutputPosition& position, const Term& term, int2 size) {
    // Load both entries whole and without a branch: each becomes one vector load.
    const u32 h = position.h + term.h, w = position.w + term.w;
    const X* at = x + (position.at + term.at);
    const bool is_inside = (h < size.x) & (w < size.y);
    return is_inside ? load_acc(at) : 0;
}

template <class X, class Y, int BP, int BN, int TP, int TN>
__global__ void __launch_bounds__(BP / TP * (BN / TN), 512 / (BP / TP * (BN / TN)))
conv_tile(const X* __restrict__ x, const acc_t<X>* __restrict__ w, const acc_t<X>* __restrict__ bias, Y* y,
          long long B, int C, int N, int groups, int2 in, int2 out, int2 taps, int2 stride, int2 before, int2 dilation,
          int2 tap_step, u32 flags, u32 code, u32 a_bits, u32 b_bits) {
    using Element = acc_t<X>;
    constexpr int THREADS = BP / TP * (BN / TN), X_LOADS = BP * DEPTH / THREADS, W_LOADS = BN * DEPTH / THREADS;
    // Lanes form a rectangle: a warp reads at most 128 bytes of a slice per load.
    constexpr int THREADS_N = BN / TN, LANES_N = THREADS_N < 8 ? THREADS_N : 8, LANES_P = 32 / LANES_N;
    static_assert(TP % 4 == 0 && TN % 4 == 0 && THREADS_N % LANES_N == 0 && BP / TP % LANES_P == 0, "whole warps");
    static_assert(THREADS % BP == 0 && THREADS % BN == 0 && THREADS % DEPTH == 0, "threads must divide the tile");
    // +4: rows stay 16 B aligned, and writes along k hit different banks
    __shared__ __align__(16) Element xs[2][DEPTH][BP + 4];
    __shared__ __align__(16) Element ws[2][DEPTH][BN];
    __shared__ OutputPosition positions[BP];
    __shared__ long long y_offsets[BP];  // offset of the output in y; < 0: none
    __shared__ Term terms[2][DEPTH];
    const bool is_transposed = flags & TRANSPOSED;
    const int2 phases = is_transposed ? stride : int2{1, 1}, step = is_transposed ? int2{1, 1} : stride;
    const int2 sizes = {(out.x + phases.x - 1) / phases.x, (out.y + phases.y - 1) / phases.y};  // of a phase
    const Image x_image(groups * C, in, flags & X_NHWC), y_image(groups * N, out, flags & Y_NHWC);

    const Block block(BP, BN, N, groups, phases);
    const int first_n = block.n, group = block.group;
    const int2 phase = block.phase;
    const Axis h(is_transposed, phase.x, taps.x, stride.x, before.x, dilation.x, tap_step.x);
    const Axis v(is_transposed, phase.y, taps.y, stride.y, before.y, dilation.y, tap_step.y);
    const int K = h.count * v.count * C;

    for (int i = threadIdx.x; i < BP; i += THREADS) {
        const long long row = (block.first + i) / (sizes.x * sizes.y);
        const int pixel_index = static_cast<int>(block.first + i - row * (sizes.x * sizes.y));
        const int2 q = {pixel_index / sizes.y, pixel_index % sizes.y};
        const int2 to = {phase.x + q.x * phases.x, phase.y + q.y * phases.y};
        const bool is_valid = row < B && to.x < out.x && to.y < out.y;
        const int2 from = {q.x * step.x + h.begin, q.y * step.y + v.begin};
        positions[i] = {row * x_image.size + static_cast<long long>(group * C) * x_image.channel +
                         static_cast<long long>(from.x) * x_image.row + static_cast<long long>(from.y) * x_image.column,
                        is_valid ? from.x : OUT_OF_BOUNDS, from.y};
        y_offsets[i] = is_valid ? row * y_image.size + static_cast<long long>(group * N) * y_image.channel +
                                 to.x * y_image.row + to.y * y_image.column
                           : -1;
    }
    const auto find_term = [&](int k) -> Term {
        if (k >= K) return {0, OUT_OF_BOUNDS, OUT_OF_BOUNDS, -1};
        const int c = k % C, j = k / C;
        const int2 shift = {j / v.count * h.delta, j % v.count * v.delta};
        const int tap = (h.first + j / v.count * tap_step.x) * taps.y + v.first + j % v.count * tap_step.y;
        return {shift.x * x_image.row + shift.y * x_image.column + c * x_image.channel, shift.x, shift.y,
                is_transposed ? (tap * groups + group) * C + c : tap * C + c};
    };
    if (threadIdx.x < 2 * DEPTH) terms[threadIdx.x / DEPTH][threadIdx.x % DEPTH] = find_term(threadIdx.x);
    __syncthreads();

    // Prefetch a slice into registers. Adjacent threads load adjacent elements: positions, or channels in NHWC.
    Element x_regs[X_LOADS], w_regs[W_LOADS];
    const OutputPosition first = positions[threadIdx.x % BP];
    const int w_column = threadIdx.x % BN, w_pitch = is_transposed ? N : groups * N;
    const Element* columns = w + (is_transposed ? 0 : group * N) + first_n + w_column;
    const auto read_slice = [&](const Term(&of)[DEPTH]) {
        if (flags & X_NHWC) {
            const Term term = of[threadIdx.x % DEPTH];
#pragma unroll
            for (int i = 0; i < X_LOADS; ++i)
                x_regs[i] = read(x, positions[threadIdx.x / DEPTH + i * (THREADS / DEPTH)], term, in);
        } else {
#pragma unroll
            for (int i = 0; i < X_LOADS; ++i) x_regs[i] = read(x, first, of[threadIdx.x / BP + i * (THREADS / BP)], in);
        }
#pragma unroll
        for (int i = 0; i < W_LOADS; ++i) {
            const int row = of[threadIdx.x / BN + i * (THREADS / BN)].row;
            const bool is_valid = row >= 0 && first_n + w_column < N;
            w_regs[i] = is_valid ? columns[static_cast<long long>(row) * w_pitch] : 0;
        }
    };
    const auto write_slice = [&](int to) {
        if (flags & X_NHWC) {
#pragma unroll
            for (int i = 0; i < X_LOADS; ++i)
                xs[to][threadIdx.x % DEPTH][threadIdx.x / DEPTH + i * (THREADS / DEPTH)] = x_regs[i];
        } else {
#pragma unroll
            for (int i = 0; i < X_LOADS; ++i)
                xs[to][threadIdx.x / BP + i * (THREADS / BP)][threadIdx.x % BP] = x_regs[i];
        }
#pragma unroll
        for (int i = 0; i < W_LOADS; ++i) ws[to][threadIdx.x / BN + i * (THREADS / BN)][w_column] = w_regs[i];
    };

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int tp = (warp / (THREADS_N / LANES_N) * LANES_P + lane / LANES_N) * 4;
    const int tn = (warp % (THREADS_N / LANES_N) * LANES_N + lane % LANES_N) * 4;
    Element sums[TP][TN] = {}, totals[TP][TN] = {};
    read_slice(terms[0]);
    write_slice(0);
    __syncthreads();
    int current = 0;
    for (int k = 0; k < K; k += DEPTH, current ^= 1) {
        const bool is_more = k + DEPTH < K;
        if (is_more) read_slice(terms[current ^ 1]);
        // All threads read these entries before the barrier: reuse.
        if (threadIdx.x < DEPTH) terms[current][threadIdx.x] = find_term(k + 2 * DEPTH + threadIdx.x);
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
            // A thread's positions and channels are groups of four, contiguous across threads: no bank conflicts.
            Element xv[TP], wv[TN];
#pragma unroll
            for (int i = 0; i < TP; ++i) xv[i] = xs[current][d][i / 4 * (BP / (TP / 4)) + tp + i % 4];
#pragma unroll
            for (int j = 0; j < TN; ++j) wv[j] = ws[current][d][j / 4 * (BN / (TN / 4)) + tn + j % 4];
#pragma unroll
            for (int i = 0; i < TP; ++i)
#pragma unroll
                for (int j = 0; j < TN; ++j) sums[i][j] = multiply_add(xv[i], wv[j], sums[i][j]);
        }
        if ((k + DEPTH) % PART == 0 || !is_more) {
#pragma unroll
            for (int i = 0; i < TP; ++i)
#pragma unroll
                for (int j = 0; j < TN; ++j) {
                    totals[i][j] += sums[i][j];
                    sums[i][j] = 0;
                }
        }
        if (is_more) {
            write_slice(current ^ 1);
            __syncthreads();
        }
    }

#pragma unroll
    for (int j = 0; j < TN; ++j) {
        const int n = first_n + j / 4 * (BN / (TN / 4)) + tn + j % 4;
        const Element bias_value = bias && n < N ? bias[group * N + n] : 0;
#pragma unroll
        for (int i = 0; i < TP; ++i) totals[i][j] += bias_value;
    }
    const Activation activation{code, __uint_as_float(a_bits), __uint_as_float(b_bits)};
#pragma unroll
    for (int i = 0; i < TP; ++i) finish_sums<Y>(totals[i], activation);
    // Vector stores of four aligned neighbours: channels, or positions of one channel.
    const bool by_channels = flags & Y_NHWC && N % 4 == 0;
    const bool by_positions = !(flags & Y_NHWC) && phases.x * phases.y == 1 && sizes.x * sizes.y % 4 == 0;
#pragma unroll
    for (int i = 0; i < TP; i += 4) {
        const int p = i / 4 * (BP / (TP / 4)) + tp;
#pragma unroll
        for (int j = 0; j < TN; j += 4) {
            const int n = first_n + j / 4 * (BN / (TN / 4)) + tn;
            if (by_positions) {
#pragma unroll
                for (int b = 0; b < 4; ++b) {
                    const Element four[] = {totals[i][j + b], totals[i + 1][j + b], totals[i + 2][j + b],
                                           totals[i + 3][j + b]};
                    if (y_offsets[p] >= 0 && n + b < N)
                        store_contiguous(y + y_offsets[p] + static_cast<long long>(n + b) * y_image.channel, four);
                }
                continue;
            }
#pragma unroll
            for (int a = 0; a < 4; ++a) {
                const Element(&sum)[TN] = totals[i + a];
                Y* to = y + y_offsets[p + a] + static_cast<long long>(n) * y_image.channel;
                if (y_offsets[p + a] < 0 || n >= N) continue;
                if (by_channels) {
                    const Element four[] = {sum[j], sum[j + 1], sum[j + 2], sum[j + 3]};
                    store_contiguous(to, four);
                } else {
#pragma unroll
                    for (int b = 0; b < 4; ++b)
                        if (n + b < N) store_acc(to + static_cast<long long>(b) * y_image.channel, sum[j + b]);
                }
            }
        }
    }
}

template <class X, class Y>
__global__ void __launch_bounds__(NARROW_THREADS, 2)
conv_narrow(const X* __restrict__ x, const acc_t<X>* __restrict__ w, const acc_t<X>* __restrict__ bias, Y* y,
            long long B, int C, int N, int groups, int2 in, int2 out, int2 taps, int2 stride, int2 before,
            int2 dilation, int2 tap_step, u32 flags, u32 code, u32 a_bits, u32 b_bits) {
    using Element = acc_t<X>;
    __shared__ __align__(16) Element ws[PART][PER_THREAD];
    const bool is_transposed = flags & TRANSPOSED;
    const int2 phases = is_transposed ? stride : int2{1, 1}, step = is_transposed ? int2{1, 1} : stride;
    const int2 sizes = {(out.x + phases.x - 1) / phases.x, (out.y + phases.y - 1) / phases.y};  // of a phase
    const Image x_image(groups * C, in, flags & X_NHWC), y_image(groups * N, out, flags & Y_NHWC);
    const Block block(NARROW_THREADS * PER_THREAD, PER_THREAD, N, groups, phases);
    const Axis h(is_transposed, block.phase.x, taps.x, stride.x, before.x, dilation.x, tap_step.x);
    const Axis v(is_transposed, block.phase.y, taps.y, stride.y, before.y, dilation.y, tap_step.y);
    const int K = h.count * v.count * C, w_pitch = is_transposed ? N : groups * N;
    const Element* columns = w + (is_transposed ? 0 : block.group * N) + block.n;

    // Adjacent threads have adjacent positions; a thread's positions are NARROW_THREADS apart.
    OutputPosition positions[PER_THREAD];
    long long y_offsets[PER_THREAD];  // offsets in y; < 0: none
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
        const long long position = block.first + threadIdx.x + i * NARROW_THREADS, row = position / (sizes.x * sizes.y);
        const int pixel_index = static_cast<int>(position - row * (sizes.x * sizes.y));
        const int2 q = {pixel_index / sizes.y, pixel_index % sizes.y};
        const int2 to = {block.phase.x + q.x * phases.x, block.phase.y + q.y * phases.y};
        const bool is_valid = row < B && to.x < out.x && to.y < out.y;
        positions[i] = {row * x_image.size + static_cast<long long>(block.group * C) * x_image.channel,
                        is_valid ? q.x * step.x + h.begin : OUT_OF_BOUNDS, q.y * step.y + v.begin};
        y_offsets[i] = is_valid ? row * y_image.size + static_cast<long long>(block.group * N + block.n) *
                                      y_image.channel + to.x * y_image.row + to.y * y_image.column
                                : -1;
    }

    Element sums[PER_THREAD][PER_THREAD] = {}, totals[PER_THREAD][PER_THREAD] = {};
    for (int first = 0; first < K; first += PART) {
        const int end = min(K, first + PART);
        if (first > 0) __syncthreads();
        for (int i = threadIdx.x; i < (end - first) * PER_THREAD; i += NARROW_THREADS) {
            const int k = first + i / PER_THREAD, n = i % PER_THREAD, c = k % C, j = k / C;
            const int tap = (h.first + j / v.count * tap_step.x) * taps.y + v.first + j % v.count * tap_step.y;
            const int row = is_transposed ? (tap * groups + block.group) * C + c : tap * C + c;
            ws[i / PER_THREAD][n] = block.n + n < N ? columns[static_cast<long long>(row) * w_pitch + n] : 0;
        }
        __syncthreads();
        for (int k = first; k < end;) {  // tap by tap
            const int j = k / C, stop = min(end, (j + 1) * C);
            const X* from[PER_THREAD];
            bool is_inside[PER_THREAD];
#pragma unroll
            for (int i = 0; i < PER_THREAD; ++i) {
                const u32 at_h = positions[i].h + j / v.count * h.delta, at_w = positions[i].w + j % v.count * v.delta;
                is_inside[i] = (at_h < in.x) & (at_w < in.y);
                from[i] = x + (is_inside[i] ? positions[i].at + at_h * x_image.row + at_w * x_image.column +
                                                  static_cast<long long>(k - j * C) * x_image.channel
                                            : 0);
            }
#pragma unroll 4
            for (; k < stop; ++k) {
                Element weights[PER_THREAD];
#pragma unroll
                for (int n = 0; n < PER_THREAD; ++n) weights[n] = ws[k - first][n];
#pragma unroll
                for (int i = 0; i < PER_THREAD; ++i) {
                    const Element value = is_inside[i] ? load_acc(from[i]) : 0;
                    from[i] += x_image.channel;
#pragma unroll
                    for (int n = 0; n < PER_THREAD; ++n) sums[i][n] = multiply_add(value, weights[n], sums[i][n]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < PER_THREAD; ++i)
#pragma unroll
            for (int n = 0; n < PER_THREAD; ++n) {
                totals[i][n] += sums[i][n];
                sums[i][n] = 0;
            }
    }
    const Activation activation{code, __uint_as_float(a_bits), __uint_as_float(b_bits)};
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
#pragma unroll
        for (int n = 0; n < PER_THREAD; ++n)
            totals[i][n] += bias && block.n + n < N ? bias[block.group * N + block.n + n] : Element(0);
        finish_sums<Y>(totals[i], activation);
#pragma unroll
        for (int n = 0; n < PER_THREAD; ++n)
            if (y_offsets[i] >= 0 && block.n + n < N)
                store_acc(y + y_offsets[i] + static_cast<long long>(n) * y_image.channel, totals[i][n]);
    }
}

// Three blocks per SM: four spill from sm_100 on.
template <class X, class Y>
__global__ void __launch_bounds__(DIRECT_THREADS, 3)
conv_direct(const X* __restrict__ x, const acc_t<X>* __restrict__ w, const acc_t<X>* __restrict__ bias, Y* y,
            long long B, int C, int N, int groups, int2 in, int2 out, int2 taps, int2 stride, int2 before,
            int2 dilation, int2 tap_step, u32 flags, u32 code, u32 a_bits, u32 b_bits) {
    using Element = acc_t<X>;
    const bool is_transposed = flags & TRANSPOSED;
    const int2 phases = is_transposed ? stride : int2{1, 1}, step = is_transposed ? int2{1, 1} : stride;
    const Image x_image(groups * C, in, flags & X_NHWC), y_image(groups * N, out, flags & Y_NHWC);
    const long long index = static_cast<long long>(blockIdx.x) * DIRECT_THREADS + threadIdx.x;
    const long long row = index / y_image.size;
    if (row >= B) return;
    const int pixel_index = static_cast<int>(index - row * y_image.size), channels = groups * N, pixels = out.x * out.y;
    const int channel = flags & Y_NHWC ? pixel_index % channels : pixel_index / pixels;
    const int pixel = flags & Y_NHWC ? pixel_index / channels : pixel_index % pixels;
    const int2 to = {pixel / out.y, pixel % out.y};
    const Axis h(is_transposed, to.x % phases.x, taps.x, stride.x, before.x, dilation.x, tap_step.x);
    const Axis v(is_transposed, to.y % phases.y, taps.y, stride.y, before.y, dilation.y, tap_step.y);
    const int2 from = {to.x / phases.x * step.x + h.begin, to.y / phases.y * step.y + v.begin};
    const int group = channel / N, w_pitch = is_transposed ? N : channels;
    const Element* column = w + (is_transposed ? static_cast<long long>(group * C) * N + channel % N : channel);
    const X* image = x + row * x_image.size + static_cast<long long>(group * C) * x_image.channel;

    Element sum = 0, total = 0;
    int part_index = 0;
    for (int a = 0; a < h.count; ++a)
        for (int b = 0; b < v.count; ++b) {
            const u32 at_h = from.x + a * h.delta, at_w = from.y + b * v.delta;
            if (at_h >= in.x || at_w >= in.y) continue;  // zero terms do not change the sum
            const int tap = (h.first + a * tap_step.x) * taps.y + v.first + b * tap_step.y;
            const Element* weights = column + static_cast<long long>(tap) * (is_transposed ? groups * C : C) * w_pitch;
            const X* x_pixel = image + at_h * x_image.row + at_w * x_image.column;
            for (int c = 0; c < C;) {
                const int k = (a * v.count + b) * C + c, end = min(C, c + PART - k % PART);
                if (k / PART != part_index) {
                    total += sum;
                    sum = 0;
                    part_index = k / PART;
                }
                for (; c < end; ++c)
                    sum = multiply_add(load_acc(x_pixel + static_cast<long long>(c) * x_image.channel),
                                       weights[static_cast<long long>(c) * w_pitch], sum);
            }
        }
    total += sum;
    Element result[4] = {total + (bias ? bias[channel] : 0)};  // finish_sums works on four; three are unused
    finish_sums<Y>(result, Activation{code, __uint_as_float(a_bits), __uint_as_float(b_bits)});
    store_acc(y + index, result[0]);
}
