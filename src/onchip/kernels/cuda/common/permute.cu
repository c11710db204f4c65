// common/permute.cu: permutes the axes of an array, with an optional dtype conversion.
//
// Idea    permute_rows (the last axis stays last): threads copy words. permute_tiles (else): a block transposes tiles
//         of R x C through shared memory: lines of C contiguous in x become columns of R contiguous in y. Offsets of
//         lines and columns are computed once per tile; a thread has up to 8 loads in flight, of 16 B where aligned
//         (VX, VY); a line may span several axes. permute_small (short rows): a block copies several whole rows; a
//         table holds their source indices. permute_few (NCHW <-> NHWC of 2 to 4 channels): a thread transposes 16 B
//         of pixels of every channel in registers; shared memory only coalesces.
// Floor   Each element is read once and written once: 2^28 floats are 2.15 GB / 4.8 TB/s = 447 us, in which an H200
//         issues 57 instructions per float. permute_tiles<.., 4, 4> takes 27, permute_few<.., 3, true> 137 for 12.
// Layout  y row-major. permute_rows: (?, n1, .., n5) from x at i0 s0 + .. + i4 s4 + i5. permute_tiles: (o, a, b) from
//         outer_x(o) + lines(a) + b to outer_y(o) + columns(b) + a. few: (outer, K, pixels) and (outer, pixels, K).
// Shared  tiles: R * (C | 1) <= 4,160 elements, R + C <= 1,056 offsets: 25 or (64-bit) 42 KB. small: 21 or 38 KB.
//         few: (K | 1) * 16 B per thread, 12 KB for 3 channels. Odd pitches avoid bank conflicts.
// Limits  Six merged axes; words of 1 to 16 B, or float32, float16, bfloat16, float64 into each other; sm_80 up.
#include "common/fast_divide.cuh"

constexpr int THREADS = 256, UNROLL = 4;
constexpr int PER_THREAD = 16, TILE = THREADS * PER_THREAD;  // elements per thread; most elements per tile
constexpr int LOADS_IN_FLIGHT = 8;                           // per thread
constexpr int SLOTS = TILE + 64, MAX_OFFSETS = 1056, MAX_ROW = 2048;

// Strided index: the offset of element i of an array of up to four axes.
struct Axes {
    Divider n1, n2, n3;  // sizes of all axes but the first
    u32 is_single;       // there is only the first axis
    long long s0, s1, s2, s3;
};
template <class Index>
__device__ __forceinline__ long long offset_of(Index i, const Axes& axes) {
    if (axes.is_single) return i * axes.s0;
    const u32 i3 = pop_index(i, axes.n3), i2 = pop_index(i, axes.n2), i1 = pop_index(i, axes.n1);
    return i * axes.s0 + i1 * axes.s1 + i2 * axes.s2 + i3 * axes.s3;
}

// V contiguous elements, one load or store.
template <class T, int V>
struct alignas(sizeof(T) * V) Contiguous {
    T v[V];
};
// An element in shared memory; narrow types are padded to 4 bytes, a whole bank.
template <class T>
struct alignas(sizeof(T) < 4 ? 4 : sizeof(T)) Slot {
    T v;
};

template <class In, class Out>
__device__ __forceinline__ Out converted(In v) {
    if constexpr (is_same<In, Out>) {
        return v;
    } else if constexpr (is_same<Out, double>) {
        return to_float(v);
    } else {
        Out result;
        store1(&result, to_float(v));  // float64 is rounded to float32 first
        return result;
    }
}

template <class In, class Out, class Index>
__global__ void __launch_bounds__(THREADS) permute_rows(
    const In* x, Out* y, long long count, Divider n1, Divider n2, Divider n3, Divider n4, Divider n5, long long s0,
    long long s1, long long s2, long long s3, long long s4) {
    const long long step = static_cast<long long>(gridDim.x) * THREADS * UNROLL;
    for (long long begin = static_cast<long long>(blockIdx.x) * THREADS * UNROLL + threadIdx.x; begin < count;
         begin += step) {
        Out words[UNROLL];
#pragma unroll
        for (int k = 0; k < UNROLL; ++k) {
            Index n = static_cast<Index>(begin + k * THREADS);
            if (begin + k * THREADS >= count) break;
            const u32 i5 = pop_index(n, n5), i4 = pop_index(n, n4), i3 = pop_index(n, n3), i2 = pop_index(n, n2);
            const u32 i1 = pop_index(n, n1);
            words[k] = converted<In, Out>(x[n * s0 + i1 * s1 + i2 * s2 + i3 * s3 + i4 * s4 + i5]);
        }
#pragma unroll
        for (int k = 0; k < UNROLL; ++k) {
            if (begin + k * THREADS < count) y[begin + k * THREADS] = words[k];
        }
    }
}

// by_x, by_y  C / VX vectors per line, R / VY per column
template <class In, class Out, class Index, int VX, int VY>
__global__ void __launch_bounds__(THREADS, sizeof(Out) == 8 ? 3 : 4) permute_tiles(
    const In* x, Out* y, long long tiles, long long Na, long long Nb, Divider right, Divider down,
    SmallDivider by_x, SmallDivider by_y, Axes lines, Axes columns, Axes outer_x, Axes outer_y) {
    __shared__ Slot<Out> slots[SLOTS];
    __shared__ long long offsets[MAX_OFFSETS];  // offsets of the lines in x, then of the columns in y
    const int R = by_y.size * VY, C = by_x.size * VX, pitch = C | 1, thread = threadIdx.x;
    for (long long tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        Index o = static_cast<Index>(tile);
        const Index a = static_cast<Index>(pop_index(o, right)) * R, b = static_cast<Index>(pop_index(o, down)) * C;
        const int height = Na - a < R ? static_cast<int>(Na - a) : R, width = Nb - b < C ? static_cast<int>(Nb - b) : C;
        const long long in_x = offset_of(o, outer_x) + b, in_y = offset_of(o, outer_y) + a;
#pragma unroll 1
        for (int i = thread; i < height + width; i += THREADS) {
            offsets[i] = i < height ? in_x + offset_of(static_cast<Index>(a + i), lines)
                                   : in_y + offset_of(static_cast<Index>(b + i - height), columns);
        }
        __syncthreads();
        constexpr int LOADS = PER_THREAD / VX < LOADS_IN_FLIGHT ? PER_THREAD / VX : LOADS_IN_FLIGHT;
#pragma unroll 1
        for (int first = thread; first < R * static_cast<int>(by_x.size); first += LOADS * THREADS) {
            Contiguous<In, VX> loaded[LOADS];
#pragma unroll
            for (int k = 0; k < LOADS; ++k) {
                const int r = quotient(first + k * THREADS, by_x), c = (first + k * THREADS - r * by_x.size) * VX;
                const bool is_inside = r < height && c < width;
                const In* from = x + offsets[is_inside ? r : 0] + c;
                if (is_inside) loaded[k] = *reinterpret_cast<const Contiguous<In, VX>*>(from);
            }
#pragma unroll
            for (int k = 0; k < LOADS; ++k) {
                const int r = quotient(first + k * THREADS, by_x), c = (first + k * THREADS - r * by_x.size) * VX;
                Slot<Out>* to = slots + r * pitch + c;
#pragma unroll
                for (int j = 0; j < VX; ++j) {
                    if (r < height && c < width) to[j].v = converted<In, Out>(loaded[k].v[j]);
                }
            }
        }
        __syncthreads();
        constexpr int STORES = PER_THREAD / VY < LOADS_IN_FLIGHT ? PER_THREAD / VY : LOADS_IN_FLIGHT;
#pragma unroll 1
        for (int first = thread; first < C * static_cast<int>(by_y.size); first += STORES * THREADS) {
#pragma unroll
            for (int k = 0; k < STORES; ++k) {
                const int c = quotient(first + k * THREADS, by_y), r = (first + k * THREADS - c * by_y.size) * VY;
                const bool is_inside = r < height && c < width;
                const Slot<Out>* from = slots + (is_inside ? r * pitch + c : 0);
                Contiguous<Out, VY> result;
#pragma unroll
                for (int j = 0; j < VY; ++j) result.v[j] = from[j * pitch].v;
                Out* to = y + offsets[is_inside ? height + c : 0] + r;
                if (is_inside) *reinterpret_cast<Contiguous<Out, VY>*>(to) = result;
            }
        }
        __syncthreads();
    }
}

__device__ __forceinline__ int padded(int i) { return i + i / 32; }  // avoids bank conflicts at strides of 2^n

// A block permutes `chunk` elements at a time: whole rows of row.size elements.
template <class In, class Out>
__global__ void __launch_bounds__(THREADS)
    permute_small(const In* x, Out* y, long long count, u32 chunk, SmallDivider row, Axes inner) {
    __shared__ Slot<Out> slots[TILE + TILE / 32];
    __shared__ unsigned short from[MAX_ROW];
    const int thread = threadIdx.x;
    for (u32 j = thread; j < row.size; j += THREADS) from[j] = static_cast<unsigned short>(offset_of(j, inner));
    for (long long first = static_cast<long long>(blockIdx.x) * chunk; first < count;
         first += static_cast<long long>(gridDim.x) * chunk) {
        const int left = count - first < chunk ? static_cast<int>(count - first) : chunk;
#pragma unroll 1
        for (int i = thread; i < left; i += LOADS_IN_FLIGHT * THREADS) {
            In loaded[LOADS_IN_FLIGHT];
#pragma unroll
            for (int k = 0; k < LOADS_IN_FLIGHT; ++k) {
                if (i + k * THREADS < left) loaded[k] = x[first + i + k * THREADS];
            }
#pragma unroll
            for (int k = 0; k < LOADS_IN_FLIGHT; ++k) {
                if (i + k * THREADS < left) slots[padded(i + k * THREADS)].v = converted<In, Out>(loaded[k]);
            }
        }
        __syncthreads();
#pragma unroll 4
        for (int i = thread; i < left; i += THREADS) {
            const int begin = quotient(i, row) * row.size;
            y[first + i] = slots[padded(begin + from[i - begin])].v;
        }
        __syncthreads();
    }
}

// K       channels
// TO_NHWC NCHW to NHWC; else NHWC to NCHW
// groups  16 B vectors of pixels of one channel; `pixels` of them per image
template <class T, class Index, int K, bool TO_NHWC>
__global__ void __launch_bounds__(THREADS, K == 4 ? 5 : 6)
    permute_few(const uint4* x, uint4* y, long long groups, Divider pixels) {
    constexpr int V = 16 / sizeof(T), PITCH = K | 1;
    __shared__ uint4 slots[THREADS * PITCH];
    const int lane = threadIdx.x % 32;
    uint4* warp_slots = slots + (threadIdx.x - lane) * PITCH;
    for (long long first = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x - lane; first < groups;
         first += static_cast<long long>(gridDim.x) * THREADS) {
        const bool is_inside = first + lane < groups;
        const int vectors = groups - first < 32 ? static_cast<int>(groups - first) * K : 32 * K;  // of a warp
        Index image = static_cast<Index>(first + lane);
        const u32 pixel = pop_index(image, pixels);
        const long long nchw_offset = static_cast<long long>(image) * K * pixels.size + pixel;  // channel 0
        Contiguous<T, V> source[K], result[K];
        uint4 *in = reinterpret_cast<uint4*>(source), *out = reinterpret_cast<uint4*>(result);
        if constexpr (TO_NHWC) {
#pragma unroll
            for (int k = 0; k < K; ++k) {
                if (is_inside) in[k] = x[nchw_offset + k * pixels.size];
            }
#pragma unroll
            for (int n = 0; n < K * V; ++n) result[n / V].v[n % V] = source[n % K].v[n / K];
#pragma unroll
            for (int k = 0; k < K; ++k) warp_slots[lane * PITCH + k] = out[k];
            __syncwarp();
#pragma unroll
            for (int k = 0; k < K; ++k) {
                const int vector = lane + 32 * k;
                if (vector < vectors) y[first * K + vector] = warp_slots[vector / K * PITCH + vector % K];
            }
        } else {
#pragma unroll
            for (int k = 0; k < K; ++k) {
                if (lane + 32 * k < vectors) in[k] = x[first * K + lane + 32 * k];
            }
#pragma unroll
            for (int k = 0; k < K; ++k) {
                const int vector = lane + 32 * k;
                warp_slots[vector / K * PITCH + vector % K] = in[k];
            }
            __syncwarp();
#pragma unroll
            for (int k = 0; k < K; ++k) in[k] = warp_slots[lane * PITCH + k];
#pragma unroll
            for (int n = 0; n < K * V; ++n) result[n % K].v[n / K] = source[n / V].v[n % V];
#pragma unroll
            for (int k = 0; k < K; ++k) {
                if (is_inside) y[nchw_offset + k * pixels.size] = out[k];
            }
        }
        __syncwarp();
    }
}
