// gradient/weight_grad_mma.cu: the gradient of a Linear's or a convolution's weight, and of its bias, by mma.sync.
//
// Idea    The implicit GEMM of gradient/weight_grad.cu. A block computes a BM x 128 tile of dw. A slice of 32 k is
//         loaded while the previous one is multiplied, and rounded to P when it is stored to shared memory. Linears
//         store slices with k as rows, for ldmatrix.trans; convolutions with m and n as rows. The blocks of the first n
//         also sum dy, before it is rounded: the gradient of the bias.
// Floor   x and dy once, 2 K M N flop at 60 % of the tensor cores. 3x3, 16 to 16 channels, 32x32, batch 512: 67 MB /
//         4.8 TB/s = 14 us; 2.4 Gflop / (0.6 * 989 Tflop/s) = 4 us. Each pixel is loaded 9 times, mostly from L1.
// Order   k in order within a split, STEP elements per mma; splits in order. Both depend on B and the sizes alone.
// Layout  As gradient/weight_grad.cu. Rows of Linears load as vectors where they are multiples of four elements.
// Shared  2 slices of BM + 128 rows: 30 KB for 64 x 128 in bf16, 54 KB in tf32.
// Limits  Any sizes, fewer than 2^30 elements per row of the batch; x and dy float32, float16 or bfloat16; sm_80 up.
#include "gradient/weight_grad.cuh"
#include "mma/cp_async.cuh"
#include "mma/tensor_core.cuh"

constexpr int BN = 128, DEPTH = 32, WARPS = 8, THREADS = 32 * WARPS;
constexpr int LINES = THREADS / 16;  // rows of m or n that a block loads at once, 16 threads of 2 k each
constexpr int OUTSIDE = -(1 << 30);  // a line far above all pixels

// Two or four adjacent elements, rounded to P.
template <class P>
__device__ __forceinline__ void store_rounded(char* to, const float (&v)[2]) {
    if constexpr (P::PER_WORD == 2) *reinterpret_cast<u32*>(to) = pack<typename P::Element>(v[0], v[1]);
    else *reinterpret_cast<uint2*>(to) = {P::word(v[0]), P::word(v[1])};
}
template <class P>
__device__ __forceinline__ void store_rounded(char* to, float4 v) {
    if constexpr (P::PER_WORD == 2)
        *reinterpret_cast<uint2*>(to) = {pack<typename P::Element>(v.x, v.y), pack<typename P::Element>(v.z, v.w)};
    else *reinterpret_cast<uint4*>(to) = {P::word(v.x), P::word(v.y), P::word(v.z), P::word(v.w)};
}

// A slice of ROWS rows of m or n in shared memory, and how a warp reads fragments of it. 16 rows of m: the four
// registers of A; 16 rows of n: the two registers of B of 8 rows, then of the next 8.
template <bool IS_ROWS, class P, int ROWS>
struct Slice {
    static constexpr int SIZE = 4 / P::PER_WORD;  // bytes of an element
    // +8 elements, +16 bytes: the 8 lines of an ldmatrix, or the 4 lines of scalar loads, touch 32 distinct banks
    static constexpr int PITCH = IS_ROWS ? (ROWS + 8) * SIZE : DEPTH * SIZE + 16;
    static constexpr int BYTES = PITCH * (IS_ROWS ? DEPTH : ROWS);

    static __device__ __forceinline__ void read_a(u32 (&a)[4], const char* slice, int row, int step) {
        const int lane = threadIdx.x % 32;
        if constexpr (!IS_ROWS)
            ldmatrix_x4(a, slice + (row + lane % 16) * PITCH + 32 * step + lane / 16 * 16);
        else if constexpr (SIZE == 2)
            ldmatrix_x4_trans(a, slice + (16 * step + lane / 16 * 8 + lane % 8) * PITCH +
                                     (row + lane / 8 % 2 * 8) * SIZE);
        else
#pragma unroll
            for (int i = 0; i < 4; ++i) a[i] = word(slice, 8 * step + i / 2 * 4, row + i % 2 * 8);
    }
    static __device__ __forceinline__ void read_b(u32 (&b)[4], const char* slice, int row, int step) {
        const int lane = threadIdx.x % 32;
        if constexpr (!IS_ROWS)
            ldmatrix_x4(b, slice + (row + lane / 16 * 8 + lane % 8) * PITCH + 32 * step + lane / 8 % 2 * 16);
        else if constexpr (SIZE == 2)
            ldmatrix_x4_trans(b, slice + (16 * step + lane % 16) * PITCH + (row + lane / 16 * 8) * SIZE);
        else
#pragma unroll
            for (int i = 0; i < 4; ++i) b[i] = word(slice, 8 * step + i % 2 * 4, row + i / 2 * 8);
    }

private:
    static __device__ __forceinline__ u32 word(const char* slice, int k, int row) {
        const int lane = threadIdx.x % 32;
        return *reinterpret_cast<const u32*>(slice + (k + lane % 4) * PITCH + (row + lane / 4) * SIZE);
    }
};

// -- loads of slices ---------------------------------------------------------------------------------------------

// ROWS columns of a row-major (K, columns) matrix: vectors of 4 adjacent elements of one k.
template <class P, class T, int ROWS>
struct RowsLoader {
    using To = Slice<true, P, ROWS>;
    static constexpr int VECTORS = ROWS * DEPTH / 4, PER_THREAD = (VECTORS + THREADS - 1) / THREADS;
    static constexpr int QUADS = ROWS / 4, K_STEP = THREADS / QUADS, K_LINES = K_STEP < DEPTH ? K_STEP : DEPTH;
    const T* from;  // the thread's column
    long long columns;
    int left, line, quad;  // columns left from there on; the thread's first k of a slice
    bool is_whole;         // rows are multiples of 4 elements
    float4 v[PER_THREAD];

    __device__ __forceinline__ RowsLoader(const T* matrix, int columns, int first)
        : from(matrix + first + threadIdx.x % QUADS * 4), columns(columns),
          left(columns - first - static_cast<int>(threadIdx.x) % QUADS * 4), line(threadIdx.x / QUADS),
          quad(threadIdx.x % QUADS), is_whole(columns % 4 == 0) {}
    __device__ __forceinline__ void load(long long k, long long end) {
#pragma unroll
        for (int i = 0; i < PER_THREAD; ++i) {
            const long long row = k + line + i * K_STEP;
            const int count = line + i * K_STEP < DEPTH && row < end ? left : 0;
            const T* const at = from + row * columns;
            v[i] = {0.0f, 0.0f, 0.0f, 0.0f};
            if (is_whole) {
                if (count > 0) v[i] = load4(at);
            } else {
                if (count > 0) v[i].x = to_float(at[0]);
                if (count > 1) v[i].y = to_float(at[1]);
                if (count > 2) v[i].z = to_float(at[2]);
                if (count > 3) v[i].w = to_float(at[3]);
            }
        }
    }
    __device__ __forceinline__ void store(char* slice) const {
#pragma unroll
        for (int i = 0; i < PER_THREAD; ++i)
            if (PER_THREAD * THREADS == VECTORS || line < DEPTH)
                store_rounded<P>(slice + (line + i * K_STEP) * To::PITCH + quad * 4 * To::SIZE, v[i]);
    }
};

// The sums over k of the columns of a RowsLoader: per thread, then of the threads of a column in order.
template <class P, class T, int ROWS>
struct RowsSum {
    using Loader = RowsLoader<P, T, ROWS>;
    float4 total = {0.0f, 0.0f, 0.0f, 0.0f};

    __device__ __forceinline__ void add(const Loader& loader) {
#pragma unroll
        for (int i = 0; i < Loader::PER_THREAD; ++i) {
            total.x += loader.v[i].x, total.y += loader.v[i].y;
            total.z += loader.v[i].z, total.w += loader.v[i].w;
        }
    }
    // shared  K_LINES * ROWS floats that no thread uses
    template <class Y>
    __device__ __forceinline__ void store(float* shared, const Loader& loader, Y* to, int rows) const {
        if (loader.line < Loader::K_LINES)
            reinterpret_cast<float4*>(shared)[loader.line * Loader::QUADS + loader.quad] = total;
        __syncthreads();
        const int row = threadIdx.x;
        if (row >= ROWS || row >= rows) return;
        float sum = 0.0f;
#pragma unroll
        for (int line = 0; line < Loader::K_LINES; ++line) sum += shared[line * ROWS + row];
        store_as(to + row, sum);
    }
};

// The two adjacent k that a thread loads of a slice.
template <class Index>
struct Pair {
    bool is_inside[2];
    long long y_at[2], x_at[2];  // offsets of position and of (top, column)
    int top[2], column[2];

    __device__ __forceinline__ Pair(long long k, long long end, const Windows& windows) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const long long at = k + threadIdx.x % 16 * 2 + j;
            is_inside[j] = at < end;
            const Position<Index> position(is_inside[j] ? at : 0, windows);
            y_at[j] = position.row * windows.y_row + position.position;
            top[j] = is_inside[j] ? position.top : OUTSIDE, column[j] = position.column;
            x_at[j] = position.row * windows.x_row + static_cast<long long>(position.top) * windows.width + column[j];
        }
    }
};

template <class P, int PER_THREAD>
__device__ __forceinline__ void store_pairs(char* slice, const float (&v)[PER_THREAD][2]) {
    using To = Slice<false, P, PER_THREAD * LINES>;
    char* const at = slice + threadIdx.x / 16 * To::PITCH + threadIdx.x % 16 * 2 * To::SIZE;
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) store_rounded<P>(at + i * LINES * To::PITCH, v[i]);
}

// ROWS channels of dy.
template <class P, class T, int ROWS>
struct ChannelsLoader {
    static constexpr int PER_THREAD = ROWS / LINES;
    const T* from;  // the thread's first channel
    long long step;
    int left;  // channels left from there on
    float v[PER_THREAD][2];

    __device__ __forceinline__ ChannelsLoader(const T* dy, int channels, int first, const Windows& windows)
        : from(dy + static_cast<long long>(first + threadIdx.x / 16) * windows.positions.size),
          step(static_cast<long long>(LINES) * windows.positions.size),
          left(channels - first - static_cast<int>(threadIdx.x / 16)) {}
    template <class Index>
    __device__ __forceinline__ void load(const Pair<Index>& k) {
#pragma unroll
        for (int i = 0; i < PER_THREAD; ++i)
#pragma unroll
            for (int j = 0; j < 2; ++j)
                v[i][j] = k.is_inside[j] && i * LINES < left ? to_float(from[i * step + k.y_at[j]]) : 0.0f;
    }
    __device__ __forceinline__ void store(char* slice) const { store_pairs<P>(slice, v); }
};

// The sums over k of the channels of a ChannelsLoader: per thread, then of the 16 threads of a channel.
template <class P, class T, int ROWS>
struct ChannelsSum {
    using Loader = ChannelsLoader<P, T, ROWS>;
    float totals[Loader::PER_THREAD] = {};

    __device__ __forceinline__ void add(const Loader& loader) {
#pragma unroll
        for (int i = 0; i < Loader::PER_THREAD; ++i) totals[i] += loader.v[i][0] + loader.v[i][1];
    }
    template <class Y>
    __device__ __forceinline__ void store(float*, const Loader& loader, Y* to, int) const {
#pragma unroll
        for (int i = 0; i < Loader::PER_THREAD; ++i) {
            float sum = totals[i];
#pragma unroll
            for (int other = 8; other > 0; other /= 2) sum += __shfl_xor_sync(0xffffffff, sum, other);
            if (threadIdx.x % 16 == 0 && i * LINES < loader.left) store_as(to + threadIdx.x / 16 + i * LINES, sum);
        }
    }
};

// 128 elements of the filters: the pixels that they read.
template <class P, class T>
struct PixelsLoader {
    static constexpr int PER_THREAD = BN / LINES;
    const T* x;
    const Windows& windows;
    int left;                                                 // elements left from the thread's first on
    int at[PER_THREAD], down[PER_THREAD], right[PER_THREAD];  // of the taps; at: the offset from (top, column)
    float v[PER_THREAD][2];

    __device__ __forceinline__ PixelsLoader(const T* x, int N, int first, const Windows& windows)
        : x(x), windows(windows), left(N - first - static_cast<int>(threadIdx.x / 16)) {
#pragma unroll
        for (int i = 0; i < PER_THREAD; ++i) {
            const Tap tap(first + threadIdx.x / 16 + i * LINES, windows);
            down[i] = tap.down, right[i] = tap.right;
            at[i] = (static_cast<int>(tap.channel) * windows.height + tap.down) * windows.width + tap.right;
        }
    }
    template <class Index>
    __device__ __forceinline__ void load(const Pair<Index>& k) {
        const T* const from[2] = {x + k.x_at[0], x + k.x_at[1]};
#pragma unroll
        for (int i = 0; i < PER_THREAD; ++i) {
            v[i][0] = v[i][1] = 0.0f;
            if (i * LINES >= left) continue;
#pragma unroll
            for (int j = 0; j < 2; ++j)
                if (is_pixel(k.top[j] + down[i], k.column[j] + right[i], windows)) v[i][j] = to_float(from[j][at[i]]);
        }
    }
    __device__ __forceinline__ void store(char* slice) const { store_pairs<P>(slice, v); }
};

template <bool IS_ROWS, class Index, class P, class T, int BM>
struct Operands;
template <class Index, class P, class T, int BM>
struct Operands<true, Index, P, T, BM> {
    RowsLoader<P, T, BM> dy;
    RowsLoader<P, T, BN> x;
    RowsSum<P, T, BM> sum;

    __device__ __forceinline__ Operands(const T* dy, const T* x, int M, int N, int m, int n, const Windows&)
        : dy(dy, M, m), x(x, N, n) {}
    __device__ __forceinline__ void load(long long k, long long end) { dy.load(k, end), x.load(k, end); }
};
template <class Index, class P, class T, int BM>
struct Operands<false, Index, P, T, BM> {
    ChannelsLoader<P, T, BM> dy;
    PixelsLoader<P, T> x;
    ChannelsSum<P, T, BM> sum;

    __device__ __forceinline__ Operands(const T* dy, const T* x, int M, int N, int m, int n, const Windows& windows)
        : dy(dy, M, m, windows), x(x, N, n, windows) {}
    __device__ __forceinline__ void load(long long k, long long end) {
        const Pair<Index> pair(k, end, x.windows);
        dy.load(pair), x.load(pair);
    }
};

// -- a tile ------------------------------------------------------------------------------------------------------

// Blocks per SM, limited by registers.
template <int BM>
constexpr int BLOCKS = BM == 128 ? 1 : 2;

// grid, Index, bias  as weight_grad
template <bool IS_ROWS, class Index, class P, class T, class Y, int BM>
__global__ void __launch_bounds__(THREADS, BLOCKS<BM>)
    weight_grad_mma(const T* dy, const T* x, Y* dw, Y* bias, int M, int N, u32 tiles_n, u32 groups, long long K,
                    long long split_k, long long split_stride, const __grid_constant__ Windows windows) {
    using DySlice = Slice<IS_ROWS, P, BM>;
    using XSlice = Slice<IS_ROWS, P, BN>;
    constexpr int STAGE = DySlice::BYTES + XSlice::BYTES, WARPS_M = BM == 16 ? 1 : 2, WARPS_N = WARPS / WARPS_M;
    constexpr int MT = BM / WARPS_M / 16, NT = BN / WARPS_N / 8, STEPS = DEPTH / P::STEP;
    extern __shared__ uint4 shared[];
    char* const smem = reinterpret_cast<char*>(shared);
    const int first_m = static_cast<int>(blockIdx.x / tiles_n) * BM;
    const int first_n = static_cast<int>(blockIdx.x % tiles_n) * BN;
    const int group = blockIdx.y % groups, split = blockIdx.y / groups;
    const int channels = N / static_cast<int>(windows.taps.size);
    Operands<IS_ROWS, Index, P, T, BM> operands(
        dy + static_cast<long long>(group) * M * windows.positions.size,
        x + static_cast<long long>(group) * channels * windows.height * windows.width, M, N, first_m, first_n, windows);
    const long long begin = static_cast<long long>(split) * split_k, end = begin + split_k < K ? begin + split_k : K;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int warp_m = warp / WARPS_N * 16 * MT, warp_n = warp % WARPS_N * 8 * NT;
    const bool sums_dy = bias != nullptr && first_n == 0, has_columns = first_n + warp_n < N;
    float acc[MT][NT][4] = {};
    operands.load(begin, end);
    int stage = 0;
    for (long long k = begin; k < end; k += DEPTH, stage ^= 1) {
        char *const dy_slice = smem + stage * STAGE, *const x_slice = dy_slice + DySlice::BYTES;
        operands.dy.store(dy_slice), operands.x.store(x_slice);
        if (sums_dy) operands.sum.add(operands.dy);
        __syncthreads();  // the other stage is free: all have multiplied it before they arrive here
        if (k + DEPTH < end) operands.load(k + DEPTH, end);
        if (!has_columns) continue;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            u32 a[MT][4], b[NT / 2][4];
#pragma unroll
            for (int i = 0; i < MT; ++i) DySlice::read_a(a[i], dy_slice, warp_m + 16 * i, step);
#pragma unroll
            for (int j = 0; j < NT / 2; ++j) XSlice::read_b(b[j], x_slice, warp_n + 16 * j, step);
#pragma unroll
            for (int i = 0; i < MT; ++i)
#pragma unroll
                for (int j = 0; j < NT; ++j) mma<P>(acc[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
        }
    }
    dw += split * split_stride + static_cast<long long>(group) * M * N;
#pragma unroll
    for (int i = 0; i < MT * NT * 4; ++i) {
        const int m = first_m + warp_m + i / (4 * NT) * 16 + i % 4 / 2 * 8 + lane / 4;
        const int n = first_n + warp_n + i / 4 % NT * 8 + lane % 4 * 2 + i % 2;
        if (m < M && n < N) store_as(dw + static_cast<long long>(m) * N + n, acc[i / (4 * NT)][i / 4 % NT][i % 4]);
    }
    if (!sums_dy) return;
    __syncthreads();  // all have read the slices
    operands.sum.store(reinterpret_cast<float*>(shared), operands.dy,
                       bias + split * split_stride + static_cast<long long>(group) * M + first_m, M - first_m);
}
