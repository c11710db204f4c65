// conv/direct.cu: 1D and 2D convolution and transposed convolution of any shape (FFMA). Sizes are run-time values.
//
// Idea    conv_tile: implicit GEMM. A block computes BP output positions x BN channels; k runs over taps and channels
//         in double-buffered slices of 16. A table per position and one per k sum to the address in x. A transposed
//         convolution tiles each phase (output mod stride) separately: no inserted zero is multiplied. conv_narrow, for
//         few channels of y: 4 channels x 4 positions per thread, PART rows of w staged at a time. conv_direct, for
//         groups of very few channels: one output per thread.
// Order   fma over the phase's taps, then channels, from zero, added to a total every PART elements. Then bias and
//         activation. The same bits from all three kernels, for any tile and B.
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
constexpr int NOWHERE = -(1 << 30);  // out of bounds, whatever is added to it
constexpr int DIRECT_THREADS = 256;
constexpr int NARROW_THREADS = 256, NARROW = 4;  // channels, and positions, per thread
enum Flag : u32 { TRANSPOSED = 1, X_LAST = 2, Y_LAST = 4 };

// One axis: outputs phase + phases * q read x at q * step + begin + j * move through tap first + j * every, j < count.
struct Axis {
    int first, count, begin, move;

    __device__ Axis(bool is_transposed, int phase, int taps, int stride, int before, int dilation, int every)
        : first(0), count(taps), begin(-before), move(dilation) {
        if (!is_transposed) return;
        while (first < every && (phase + before - first * dilation) % stride != 0) ++first;
        count = first < every && first < taps ? (taps - 1 - first) / every + 1 : 0;
        begin = (phase + before - first * dilation) / stride;
        move = -(every * dilation / stride);
    }
};

// Strides of an image: channel, row, column; and its size.
struct Image {
    int channel, row, column, size;

    __device__ Image(int channels, int2 sides, bool is_last)
        : channel(is_last ? 1 : sides.x * sides.y), row(is_last ? sides.y * channels : sides.y),
          column(is_last ? channels : 1), size(channels * sides.x * sides.y) {}
};

// A block's tile: positions of a phase from `first` on, channels of a group from `n` on. Blocks that read the same
// positions of x are adjacent.
struct Block {
    int n, group;
    int2 phase;
    long long first;

    __device__ Block(int places, int channels, int N, int groups, int2 phases) {
        const int n_tiles = (N + channels - 1) / channels;
        u32 tile = blockIdx.x;
        n = static_cast<int>(tile % n_tiles) * channels;
        group = static_cast<int>((tile /= n_tiles) % groups);
        phase = {static_cast<int>((tile /= groups) / phases.y % phases.x), static_cast<int>(tile % phases.y)};
        first = static_cast<long long>(tile / (phases.x * phases.y)) * places;
    }
};

struct __align__(16) OutputPlace {  // an output: its window's first element
    long long at;
    int h, w;
};
struct __align__(16) Term {  // one k: offset from there, and its row of w
    int at, h, w, row;
};

template <class X>
__device__ __forceinline__ acc_t<X> read(const X* x, const OutputPlace& place, const Term& term, int2 sides) {
    // Load both entries whole and without a branch: each becomes one vector load.
    const u32 h = place.h + term.h, w = place.w + term.w;
    const X* at = x + (place.at + term.at);
    const bool is_inside = (h < sides.x) & (w < sides.y);
    return is_inside ? load_acc(at) : 0;
}

template <class X, class Y, int BP, int BN, int TP, int TN>
__global__ void __launch_bounds__(BP / TP * (BN / TN), 512 / (BP / TP * (BN / TN)))
conv_tile(const X* __restrict__ x, const acc_t<X>* __restrict__ w, const acc_t<X>* __restrict__ bias, Y* y,
          long long B, int C, int N, int groups, int2 in, int2 out, int2 taps, int2 stride, int2 before, int2 dilation,
          int2 every, u32 flags, u32 code, u32 a_bits, u32 b_bits) {
    using Element = acc_t<X>;
    constexpr int THREADS = BP / TP * (BN / TN), X_EACH = BP * DEPTH / THREADS, W_EACH = BN * DEPTH / THREADS;
    // Lanes form a rectangle: a warp reads at most 128 bytes of a slice per load.
    constexpr int ACROSS = BN / TN, LANES_N = ACROSS < 8 ? ACROSS : 8, LANES_P = 32 / LANES_N;
    static_assert(TP % 4 == 0 && TN % 4 == 0 && ACROSS % LANES_N == 0 && BP / TP % LANES_P == 0, "whole warps");
    static_assert(THREADS % BP == 0 && THREADS % BN == 0 && THREADS % DEPTH == 0, "a thread stays in its column");
    // +4: rows stay 16 B aligned, and writes along k hit different banks
    __shared__ __align__(16) Element xs[2][DEPTH][BP + 4];
    __shared__ __align__(16) Element ws[2][DEPTH][BN];
    __shared__ OutputPlace places[BP];
    __shared__ long long made[BP];  // offset of the output in y; < 0: none
    __shared__ Term terms[2][DEPTH];
    const bool is_transposed = flags & TRANSPOSED;
    const int2 phases = is_transposed ? stride : int2{1, 1}, step = is_transposed ? int2{1, 1} : stride;
    const int2 sides = {(out.x + phases.x - 1) / phases.x, (out.y + phases.y - 1) / phases.y};  // of a phase
    const Image x_image(groups * C, in, flags & X_LAST), y_image(groups * N, out, flags & Y_LAST);

    const Block block(BP, BN, N, groups, phases);
    const int n_first = block.n, group = block.group;
    const int2 phase = block.phase;
    const Axis h(is_transposed, phase.x, taps.x, stride.x, before.x, dilation.x, every.x);
    const Axis v(is_transposed, phase.y, taps.y, stride.y, before.y, dilation.y, every.y);
    const int K = h.count * v.count * C;

    for (int i = threadIdx.x; i < BP; i += THREADS) {
        const long long row = (block.first + i) / (sides.x * sides.y);
        const int rest = static_cast<int>(block.first + i - row * (sides.x * sides.y));
        const int2 q = {rest / sides.y, rest % sides.y};
        const int2 to = {phase.x + q.x * phases.x, phase.y + q.y * phases.y};
        const bool is_there = row < B && to.x < out.x && to.y < out.y;
        const int2 from = {q.x * step.x + h.begin, q.y * step.y + v.begin};
        places[i] = {row * x_image.size + static_cast<long long>(group * C) * x_image.channel +
                         static_cast<long long>(from.x) * x_image.row + static_cast<long long>(from.y) * x_image.column,
                     is_there ? from.x : NOWHERE, from.y};
        made[i] = is_there ? row * y_image.size + static_cast<long long>(group * N) * y_image.channel +
                                 to.x * y_image.row + to.y * y_image.column
                           : -1;
    }
    const auto find_term = [&](int k) -> Term {
        if (k >= K) return {0, NOWHERE, NOWHERE, -1};
        const int c = k % C, j = k / C;
        const int2 far = {j / v.count * h.move, j % v.count * v.move};
        const int tap = (h.first + j / v.count * every.x) * taps.y + v.first + j % v.count * every.y;
        return {far.x * x_image.row + far.y * x_image.column + c * x_image.channel, far.x, far.y,
                is_transposed ? (tap * groups + group) * C + c : tap * C + c};
    };
    if (threadIdx.x < 2 * DEPTH) terms[threadIdx.x / DEPTH][threadIdx.x % DEPTH] = find_term(threadIdx.x);
    __syncthreads();

    // The next slice in registers. Adjacent threads load adjacent elements: positions, or channels in NHWC.
    Element x_held[X_EACH], w_held[W_EACH];
    const OutputPlace mine = places[threadIdx.x % BP];
    const int n_mine = threadIdx.x % BN, pitch = is_transposed ? N : groups * N;
    const Element* columns = w + (is_transposed ? 0 : group * N) + n_first + n_mine;
    const auto read_slice = [&](const Term(&of)[DEPTH]) {
        if (flags & X_LAST) {
            const Term term = of[threadIdx.x % DEPTH];
#pragma unroll
            for (int i = 0; i < X_EACH; ++i)
                x_held[i] = read(x, places[threadIdx.x / DEPTH + i * (THREADS / DEPTH)], term, in);
        } else {
#pragma unroll
            for (int i = 0; i < X_EACH; ++i) x_held[i] = read(x, mine, of[threadIdx.x / BP + i * (THREADS / BP)], in);
        }
#pragma unroll
        for (int i = 0; i < W_EACH; ++i) {
            const int row = of[threadIdx.x / BN + i * (THREADS / BN)].row;
            const bool is_there = row >= 0 && n_first + n_mine < N;
            w_held[i] = is_there ? columns[static_cast<long long>(row) * pitch] : 0;
        }
    };
    const auto write_slice = [&](int to) {
        if (flags & X_LAST) {
#pragma unroll
            for (int i = 0; i < X_EACH; ++i)
                xs[to][threadIdx.x % DEPTH][threadIdx.x / DEPTH + i * (THREADS / DEPTH)] = x_held[i];
        } else {
#pragma unroll
            for (int i = 0; i < X_EACH; ++i)
                xs[to][threadIdx.x / BP + i * (THREADS / BP)][threadIdx.x % BP] = x_held[i];
        }
#pragma unroll
        for (int i = 0; i < W_EACH; ++i) ws[to][threadIdx.x / BN + i * (THREADS / BN)][n_mine] = w_held[i];
    };

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int tp = (warp / (ACROSS / LANES_N) * LANES_P + lane / LANES_N) * 4;
    const int tn = (warp % (ACROSS / LANES_N) * LANES_N + lane % LANES_N) * 4;
    Element sums[TP][TN] = {}, totals[TP][TN] = {};
    read_slice(terms[0]);
    write_slice(0);
    __syncthreads();
    int now = 0;
    for (int k = 0; k < K; k += DEPTH, now ^= 1) {
        const bool is_more = k + DEPTH < K;
        if (is_more) read_slice(terms[now ^ 1]);
        // The entries of this slice were last read before the barrier.
        if (threadIdx.x < DEPTH) terms[now][threadIdx.x] = find_term(k + 2 * DEPTH + threadIdx.x);
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
            // A thread's positions and channels are groups of four, contiguous across threads: no bank conflicts.
            Element xv[TP], wv[TN];
#pragma unroll
            for (int i = 0; i < TP; ++i) xv[i] = xs[now][d][i / 4 * (BP / (TP / 4)) + tp + i % 4];
#pragma unroll
            for (int j = 0; j < TN; ++j) wv[j] = ws[now][d][j / 4 * (BN / (TN / 4)) + tn + j % 4];
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
            write_slice(now ^ 1);
            __syncthreads();
        }
    }

#pragma unroll
    for (int j = 0; j < TN; ++j) {
        const int n = n_first + j / 4 * (BN / (TN / 4)) + tn + j % 4;
        const Element shift = bias && n < N ? bias[group * N + n] : 0;
#pragma unroll
        for (int i = 0; i < TP; ++i) totals[i][j] += shift;
    }
    const Activation activation{code, __uint_as_float(a_bits), __uint_as_float(b_bits)};
#pragma unroll
    for (int i = 0; i < TP; ++i) finish_sums<Y>(totals[i], activation);
    // Vector stores of four aligned neighbours: channels, or positions of one channel.
    const bool by_channels = flags & Y_LAST && N % 4 == 0;
    const bool by_places = !(flags & Y_LAST) && phases.x * phases.y == 1 && sides.x * sides.y % 4 == 0;
#pragma unroll
    for (int i = 0; i < TP; i += 4) {
        const int p = i / 4 * (BP / (TP / 4)) + tp;
#pragma unroll
        for (int j = 0; j < TN; j += 4) {
            const int n = n_first + j / 4 * (BN / (TN / 4)) + tn;
            if (by_places) {
#pragma unroll
                for (int b = 0; b < 4; ++b) {
                    const Element four[] = {totals[i][j + b], totals[i + 1][j + b], totals[i + 2][j + b],
                                           totals[i + 3][j + b]};
                    if (made[p] >= 0 && n + b < N)
                        store_neighbours(y + made[p] + static_cast<long long>(n + b) * y_image.channel, four);
                }
                continue;
            }
#pragma unroll
            for (int a = 0; a < 4; ++a) {
                const Element(&sum)[TN] = totals[i + a];
                Y* to = y + made[p + a] + static_cast<long long>(n) * y_image.channel;
                if (made[p + a] < 0 || n >= N) continue;
                if (by_channels) {
                    const Element four[] = {sum[j], sum[j + 1], sum[j + 2], sum[j + 3]};
                    store_neighbours(to, four);
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
            int2 dilation, int2 every, u32 flags, u32 code, u32 a_bits, u32 b_bits) {
    using Element = acc_t<X>;
    __shared__ __align__(16) Element ws[PART][NARROW];
    const bool is_transposed = flags & TRANSPOSED;
    const int2 phases = is_transposed ? stride : int2{1, 1}, step = is_transposed ? int2{1, 1} : stride;
    const int2 sides = {(out.x + phases.x - 1) / phases.x, (out.y + phases.y - 1) / phases.y};  // of a phase
    const Image x_image(groups * C, in, flags & X_LAST), y_image(groups * N, out, flags & Y_LAST);
    const Block block(NARROW_THREADS * NARROW, NARROW, N, groups, phases);
    const Axis h(is_transposed, block.phase.x, taps.x, stride.x, before.x, dilation.x, every.x);
    const Axis v(is_transposed, block.phase.y, taps.y, stride.y, before.y, dilation.y, every.y);
    const int K = h.count * v.count * C, pitch = is_transposed ? N : groups * N;
    const Element* columns = w + (is_transposed ? 0 : block.group * N) + block.n;

    // Adjacent threads have adjacent positions; a thread's positions are NARROW_THREADS apart.
    OutputPlace places[NARROW];
    long long made[NARROW];  // offsets in y; < 0: none
#pragma unroll
    for (int i = 0; i < NARROW; ++i) {
        const long long place = block.first + threadIdx.x + i * NARROW_THREADS, row = place / (sides.x * sides.y);
        const int rest = static_cast<int>(place - row * (sides.x * sides.y));
        const int2 q = {rest / sides.y, rest % sides.y};
        const int2 to = {block.phase.x + q.x * phases.x, block.phase.y + q.y * phases.y};
        const bool is_there = row < B && to.x < out.x && to.y < out.y;
        places[i] = {row * x_image.size + static_cast<long long>(block.group * C) * x_image.channel,
                     is_there ? q.x * step.x + h.begin : NOWHERE, q.y * step.y + v.begin};
        made[i] = is_there ? row * y_image.size + static_cast<long long>(block.group * N + block.n) * y_image.channel +
                                 to.x * y_image.row + to.y * y_image.column
                           : -1;
    }

    Element sums[NARROW][NARROW] = {}, totals[NARROW][NARROW] = {};
    for (int first = 0; first < K; first += PART) {
        const int end = min(K, first + PART);
        if (first > 0) __syncthreads();
        for (int i = threadIdx.x; i < (end - first) * NARROW; i += NARROW_THREADS) {
            const int k = first + i / NARROW, n = i % NARROW, c = k % C, j = k / C;
            const int tap = (h.first + j / v.count * every.x) * taps.y + v.first + j % v.count * every.y;
            const int row = is_transposed ? (tap * groups + block.group) * C + c : tap * C + c;
            ws[i / NARROW][n] = block.n + n < N ? columns[static_cast<long long>(row) * pitch + n] : 0;
        }
        __syncthreads();
        for (int k = first; k < end;) {  // tap by tap
            const int j = k / C, stop = min(end, (j + 1) * C);
            const X* from[NARROW];
            bool is_inside[NARROW];
#pragma unroll
            for (int i = 0; i < NARROW; ++i) {
                const u32 at_h = places[i].h + j / v.count * h.move, at_w = places[i].w + j % v.count * v.move;
                is_inside[i] = (at_h < in.x) & (at_w < in.y);
                from[i] = x + (is_inside[i] ? places[i].at + at_h * x_image.row + at_w * x_image.column +
                                                  static_cast<long long>(k - j * C) * x_image.channel
                                            : 0);
            }
#pragma unroll 4
            for (; k < stop; ++k) {
                Element weights[NARROW];
#pragma unroll
                for (int n = 0; n < NARROW; ++n) weights[n] = ws[k - first][n];
#pragma unroll
                for (int i = 0; i < NARROW; ++i) {
                    const Element number = is_inside[i] ? load_acc(from[i]) : 0;
                    from[i] += x_image.channel;
#pragma unroll
                    for (int n = 0; n < NARROW; ++n) sums[i][n] = multiply_add(number, weights[n], sums[i][n]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < NARROW; ++i)
#pragma unroll
            for (int n = 0; n < NARROW; ++n) {
                totals[i][n] += sums[i][n];
                sums[i][n] = 0;
            }
    }
    const Activation activation{code, __uint_as_float(a_bits), __uint_as_float(b_bits)};
#pragma unroll
    for (int i = 0; i < NARROW; ++i) {
#pragma unroll
        for (int n = 0; n < NARROW; ++n)
            totals[i][n] += bias && block.n + n < N ? bias[block.group * N + block.n + n] : Element(0);
        finish_sums<Y>(totals[i], activation);
#pragma unroll
        for (int n = 0; n < NARROW; ++n)
            if (made[i] >= 0 && block.n + n < N)
                store_acc(y + made[i] + static_cast<long long>(n) * y_image.channel, totals[i][n]);
    }
}

// Three blocks per SM: four spill from sm_100 on.
template <class X, class Y>
__global__ void __launch_bounds__(DIRECT_THREADS, 3)
conv_direct(const X* __restrict__ x, const acc_t<X>* __restrict__ w, const acc_t<X>* __restrict__ bias, Y* y,
            long long B, int C, int N, int groups, int2 in, int2 out, int2 taps, int2 stride, int2 before,
            int2 dilation, int2 every, u32 flags, u32 code, u32 a_bits, u32 b_bits) {
    using Element = acc_t<X>;
    const bool is_transposed = flags & TRANSPOSED;
    const int2 phases = is_transposed ? stride : int2{1, 1}, step = is_transposed ? int2{1, 1} : stride;
    const Image x_image(groups * C, in, flags & X_LAST), y_image(groups * N, out, flags & Y_LAST);
    const long long index = static_cast<long long>(blockIdx.x) * DIRECT_THREADS + threadIdx.x;
    const long long row = index / y_image.size;
    if (row >= B) return;
    const int rest = static_cast<int>(index - row * y_image.size), channels = groups * N, pixels = out.x * out.y;
    const int channel = flags & Y_LAST ? rest % channels : rest / pixels;
    const int pixel = flags & Y_LAST ? rest / channels : rest % pixels;
    const int2 to = {pixel / out.y, pixel % out.y};
    const Axis h(is_transposed, to.x % phases.x, taps.x, stride.x, before.x, dilation.x, every.x);
    const Axis v(is_transposed, to.y % phases.y, taps.y, stride.y, before.y, dilation.y, every.y);
    const int2 from = {to.x / phases.x * step.x + h.begin, to.y / phases.y * step.y + v.begin};
    const int group = channel / N, pitch = is_transposed ? N : channels;
    const Element* column = w + (is_transposed ? static_cast<long long>(group * C) * N + channel % N : channel);
    const X* image = x + row * x_image.size + static_cast<long long>(group * C) * x_image.channel;

    Element sum = 0, total = 0;
    int part = 0;
    for (int a = 0; a < h.count; ++a)
        for (int b = 0; b < v.count; ++b) {
            const u32 at_h = from.x + a * h.move, at_w = from.y + b * v.move;
            if (at_h >= in.x || at_w >= in.y) continue;  // zero terms do not change the sum
            const int tap = (h.first + a * every.x) * taps.y + v.first + b * every.y;
            const Element* weights = column + static_cast<long long>(tap) * (is_transposed ? groups * C : C) * pitch;
            const X* numbers = image + at_h * x_image.row + at_w * x_image.column;
            for (int c = 0; c < C;) {
                const int k = (a * v.count + b) * C + c, end = min(C, c + PART - k % PART);
                if (k / PART != part) {
                    total += sum;
                    sum = 0;
                    part = k / PART;
                }
                for (; c < end; ++c)
                    sum = multiply_add(load_acc(numbers + static_cast<long long>(c) * x_image.channel),
                                       weights[static_cast<long long>(c) * pitch], sum);
            }
        }
    total += sum;
    Element made[4] = {total + (bias ? bias[channel] : 0)};  // finish_sums works on four; three are unused
    finish_sums<Y>(made, Activation{code, __uint_as_float(a_bits), __uint_as_float(b_bits)});
    store_acc(y + index, made[0]);
}
