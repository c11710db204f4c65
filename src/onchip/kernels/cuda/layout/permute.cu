// layout/permute.cu: permutes the axes of an array, with an optional dtype conversion.
//
// Idea    permute_rows (the last axis stays last): threads copy words. permute_tiles (else): a block transposes tiles
//         of R x C through shared memory: lines of C contiguous in x become columns of R contiguous in y. Offsets of
//         lines and columns are computed once per tile; a thread has up to 8 loads in flight, of 16 B where aligned
//         (VX, VY); a line may span several axes. permute_small (short rows): a block copies several whole rows; a
//         table gives each element's source. permute_few (NCHW <-> NHWC of 2 to 4 channels): a thread transposes 16 B
//         of pixels of every channel in registers; shared memory only coalesces.
// Floor   Each element moves once in, once out: 2^28 floats are 2.15 GB / 4.8 TB/s = 447 us; 57 issue slots per float
//         on an H200. sm_90a: permute_tiles<.., 4, 4> takes about 27, permute_few<.., 3, true> 137 for 12 floats.
// Layout  y row-major. permute_rows: (?, n1, .., n5) from x at i0 s0 + .. + i4 s4 + i5. permute_tiles: (o, a, b) from
//         outer_x(o) + lines(a) + b to outer_y(o) + columns(b) + a. few: (outer, K, pixels) and (outer, pixels, K).
// Shared  tiles: R * (C | 1) <= 4,160 elements, R + C <= 1,056 offsets: 25 or (64-bit) 42 KB. small: 21 or 38 KB.
//         few: (K | 1) * 16 B per thread, 12 KB for 3 channels. Odd pitches avoid bank conflicts.
// Limits  Six merged axes; words of 1 to 16 B, or float32, float16, bfloat16 into each other; sm_80 up.
#include "common/fast_divide.cuh"

constexpr int THREADS = 256, TOGETHER = 4;
constexpr int A_THREAD = 16, TILE = THREADS * A_THREAD;  // elements per thread; per tile, at most
constexpr int AT_ONCE = 8;                               // loads in flight per thread
constexpr int SLOTS = TILE + 64, PLACES = 1056, SMALL = 2048;

// Strided index: the offset of element i of an array of up to four axes.
struct Axes {
    Divider n1, n2, n3;  // sizes of all axes but the first
    u32 is_one;          // only the first axis
    long long s0, s1, s2, s3;
};
template <class Index>
__device__ __forceinline__ long long place(Index i, const Axes& axes) {
    if (axes.is_one) return i * axes.s0;
    const u32 i3 = take_rest(i, axes.n3), i2 = take_rest(i, axes.n2), i1 = take_rest(i, axes.n1);
    return i * axes.s0 + i1 * axes.s1 + i2 * axes.s2 + i3 * axes.s3;
}

// V contiguous elements, one load or store.
template <class T, int V>
struct alignas(sizeof(T) * V) Neighbours {
    T v[V];
};
// An element in shared memory; narrow ones get a bank of their own.
template <class T>
struct alignas(sizeof(T) < 4 ? 4 : sizeof(T)) Slot {
    T v;
};

template <class In, class Out>
__device__ __forceinline__ Out moved(In v) {
    if constexpr (is_same<In, Out>) {
        return v;
    } else {
        Out made;
        store1(&made, to_float(v));
        return made;
    }
}

template <class In, class Out, class Index>
__global__ void __launch_bounds__(THREADS) permute_rows(
    const In* x, Out* y, long long count, Divider n1, Divider n2, Divider n3, Divider n4, Divider n5, long long s0,
    long long s1, long long s2, long long s3, long long s4) {
    const long long step = static_cast<long long>(gridDim.x) * THREADS * TOGETHER;
    for (long long begin = static_cast<long long>(blockIdx.x) * THREADS * TOGETHER + threadIdx.x; begin < count;
         begin += step) {
        Out words[TOGETHER];
#pragma unroll
        for (int k = 0; k < TOGETHER; ++k) {
            Index n = static_cast<Index>(begin + k * THREADS);
            if (begin + k * THREADS >= count) break;
            const u32 i5 = take_rest(n, n5), i4 = take_rest(n, n4), i3 = take_rest(n, n3), i2 = take_rest(n, n2);
            const u32 i1 = take_rest(n, n1);
            words[k] = moved<In, Out>(x[n * s0 + i1 * s1 + i2 * s2 + i3 * s3 + i4 * s4 + i5]);
        }
#pragma unroll
        for (int k = 0; k < TOGETHER; ++k) {
            if (begin + k * THREADS < count) y[begin + k * THREADS] = words[k];
        }
    }
}

// by_x, by_y  C / VX vectors per line, R / VY per column
template <class In, class Out, class Index, int VX, int VY>
__global__ void __launch_bounds__(THREADS, sizeof(Out) == 8 ? 3 : 4) permute_tiles(
    const In* x, Out* y, long long tiles, long long Na, long long Nb, Divider across, Divider down, Parts by_x,
    Parts by_y, Axes lines, Axes columns, Axes outer_x, Axes outer_y) {
    __shared__ Slot<Out> slots[SLOTS];
    __shared__ long long places[PLACES];  // offsets of the lines in x, then of the columns in y
    const int R = by_y.size * VY, C = by_x.size * VX, pitch = C | 1, me = threadIdx.x;
    for (long long tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        Index o = static_cast<Index>(tile);
        const Index a = static_cast<Index>(take_rest(o, across)) * R, b = static_cast<Index>(take_rest(o, down)) * C;
        const int height = Na - a < R ? static_cast<int>(Na - a) : R, width = Nb - b < C ? static_cast<int>(Nb - b) : C;
        const long long in_x = place(o, outer_x) + b, in_y = place(o, outer_y) + a;
#pragma unroll 1
        for (int i = me; i < height + width; i += THREADS) {
            places[i] = i < height ? in_x + place(static_cast<Index>(a + i), lines)
                                   : in_y + place(static_cast<Index>(b + i - height), columns);
        }
        __syncthreads();
        constexpr int LOADS = A_THREAD / VX < AT_ONCE ? A_THREAD / VX : AT_ONCE;
#pragma unroll 1
        for (int first = me; first < R * static_cast<int>(by_x.size); first += LOADS * THREADS) {
            Neighbours<In, VX> held[LOADS];
#pragma unroll
            for (int k = 0; k < LOADS; ++k) {
                const int r = part_of(first + k * THREADS, by_x), c = (first + k * THREADS - r * by_x.size) * VX;
                const bool is_inside = r < height && c < width;
                const In* from = x + places[is_inside ? r : 0] + c;
                if (is_inside) held[k] = *reinterpret_cast<const Neighbours<In, VX>*>(from);
            }
#pragma unroll
            for (int k = 0; k < LOADS; ++k) {
                const int r = part_of(first + k * THREADS, by_x), c = (first + k * THREADS - r * by_x.size) * VX;
                Slot<Out>* to = slots + r * pitch + c;
#pragma unroll
                for (int j = 0; j < VX; ++j) {
                    if (r < height && c < width) to[j].v = moved<In, Out>(held[k].v[j]);
                }
            }
        }
        __syncthreads();
        constexpr int STORES = A_THREAD / VY < AT_ONCE ? A_THREAD / VY : AT_ONCE;
#pragma unroll 1
        for (int first = me; first < C * static_cast<int>(by_y.size); first += STORES * THREADS) {
#pragma unroll
            for (int k = 0; k < STORES; ++k) {
                const int c = part_of(first + k * THREADS, by_y), r = (first + k * THREADS - c * by_y.size) * VY;
                const bool is_inside = r < height && c < width;
                const Slot<Out>* from = slots + (is_inside ? r * pitch + c : 0);
                Neighbours<Out, VY> made;
#pragma unroll
                for (int j = 0; j < VY; ++j) made.v[j] = from[j * pitch].v;
                Out* to = y + places[is_inside ? height + c : 0] + r;
                if (is_inside) *reinterpret_cast<Neighbours<Out, VY>*>(to) = made;
            }
        }
        __syncthreads();
    }
}

__device__ __forceinline__ int padded(int i) { return i + i / 32; }  // avoids bank conflicts at strides of 2^n

// A block handles `chunk` elements, whole rows of row.size.
template <class In, class Out>
__global__ void __launch_bounds__(THREADS)
    permute_small(const In* x, Out* y, long long count, u32 chunk, Parts row, Axes inner) {
    __shared__ Slot<Out> slots[TILE + TILE / 32];
    __shared__ unsigned short from[SMALL];
    const int me = threadIdx.x;
    for (u32 j = me; j < row.size; j += THREADS) from[j] = static_cast<unsigned short>(place(j, inner));
    for (long long first = static_cast<long long>(blockIdx.x) * chunk; first < count;
         first += static_cast<long long>(gridDim.x) * chunk) {
        const int left = count - first < chunk ? static_cast<int>(count - first) : chunk;
#pragma unroll 1
        for (int i = me; i < left; i += AT_ONCE * THREADS) {
            In held[AT_ONCE];
#pragma unroll
            for (int k = 0; k < AT_ONCE; ++k) {
                if (i + k * THREADS < left) held[k] = x[first + i + k * THREADS];
            }
#pragma unroll
            for (int k = 0; k < AT_ONCE; ++k) {
                if (i + k * THREADS < left) slots[padded(i + k * THREADS)].v = moved<In, Out>(held[k]);
            }
        }
        __syncthreads();
#pragma unroll 4
        for (int i = me; i < left; i += THREADS) {
            const int begin = part_of(i, row) * row.size;
            y[first + i] = slots[padded(begin + from[i - begin])].v;
        }
        __syncthreads();
    }
}

// K       channels
// BEHIND  NCHW to NHWC; else NHWC to NCHW
// groups  16 B vectors of pixels, `across` per image
template <class T, class Index, int K, bool BEHIND>
__global__ void __launch_bounds__(THREADS, K == 4 ? 5 : 6)
    permute_few(const uint4* x, uint4* y, long long groups, Divider across) {
    constexpr int V = 16 / sizeof(T), PITCH = K | 1;
    __shared__ uint4 slots[THREADS * PITCH];
    const int lane = threadIdx.x % 32;
    uint4* of_warp = slots + (threadIdx.x - lane) * PITCH;
    for (long long first = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x - lane; first < groups;
         first += static_cast<long long>(gridDim.x) * THREADS) {
        const bool is_inside = first + lane < groups;
        const int pieces = groups - first < 32 ? static_cast<int>(groups - first) * K : 32 * K;  // in NHWC
        Index image = static_cast<Index>(first + lane);
        const u32 pixel = take_rest(image, across);
        const long long apart = static_cast<long long>(image) * K * across.size + pixel;  // in NCHW
        Neighbours<T, V> given[K], made[K];
        uint4 *in = reinterpret_cast<uint4*>(given), *out = reinterpret_cast<uint4*>(made);
        if constexpr (BEHIND) {
#pragma unroll
            for (int k = 0; k < K; ++k) {
                if (is_inside) in[k] = x[apart + k * across.size];
            }
#pragma unroll
            for (int n = 0; n < K * V; ++n) made[n / V].v[n % V] = given[n % K].v[n / K];
#pragma unroll
            for (int k = 0; k < K; ++k) of_warp[lane * PITCH + k] = out[k];
            __syncwarp();
#pragma unroll
            for (int k = 0; k < K; ++k) {
                const int piece = lane + 32 * k;
                if (piece < pieces) y[first * K + piece] = of_warp[piece / K * PITCH + piece % K];
            }
        } else {
#pragma unroll
            for (int k = 0; k < K; ++k) {
                if (lane + 32 * k < pieces) in[k] = x[first * K + lane + 32 * k];
            }
#pragma unroll
            for (int k = 0; k < K; ++k) {
                const int piece = lane + 32 * k;
                of_warp[piece / K * PITCH + piece % K] = in[k];
            }
            __syncwarp();
#pragma unroll
            for (int k = 0; k < K; ++k) in[k] = of_warp[lane * PITCH + k];
#pragma unroll
            for (int n = 0; n < K * V; ++n) made[n % K].v[n / K] = given[n / V].v[n % V];
#pragma unroll
            for (int k = 0; k < K; ++k) {
                if (is_inside) y[apart + k * across.size] = out[k];
            }
        }
        __syncwarp();
    }
}
