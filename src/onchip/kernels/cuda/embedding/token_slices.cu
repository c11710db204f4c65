// embedding/token_slices.cu: embedding tables in the sliced layout of embedding/token_max.cu; table_peaks: per-channel
// scales of fp8 tables.
//
// Idea    A block copies 128 rows of one tap and one slice: 8 threads per row, 16 B each. Stores are contiguous, loads
//         are runs of 128 B or more. table_peaks: a thread owns a channel and every count-th row; reduction/reduce.cu
//         reduces the partial results.
// Floor   Each element is read and written once. Sentiment's 9 taps in 16 bits: 2 * 399 MB / 4.8 TB/s = 166 us.
// Layout  x (V, K, C); y (slices, K, V + 1, 128 B): row V and channels from C on are zero. Both 16 B aligned. In fp8
//         y = x * LARGEST / peak, NaN where x is not finite; peaks (C): LARGEST times a power of two, rounded up from
//         the largest finite magnitude.
// Limits  Run-time sizes; x and y float32, float16, bfloat16; y e4m3 from sm_89 on; sm_80 up.
#include "common/fp8.cuh"
#include "common/accumulator.cuh"

constexpr int THREADS = 256, LANES = 8, ROW_BYTES = 128, ROWS = 128;

__device__ __forceinline__ bool is_finite(float v) { return fabsf(v) < __uint_as_float(0x7f800000u); }

// chunks  of ROWS rows, to cover V + 1
template <class X, class T>
__global__ void __launch_bounds__(THREADS)
    token_slices(const X* x, const float* peaks, T* y, long long V, u32 K, u32 C, u32 chunks) {
    constexpr int WIDTH = 16 / sizeof(T);
    const u32 pair = blockIdx.x / chunks, slice = pair / K, k = pair - slice * K;  // slice-major, then tap
    const u32 lane = threadIdx.x % LANES, c = (slice * LANES + lane) * WIDTH;
    const long long first = static_cast<long long>(blockIdx.x - pair * chunks) * ROWS;
#pragma unroll
    for (u32 row = threadIdx.x / LANES; row < ROWS; row += THREADS / LANES) {
        const long long v = first + row;
        if (v > V) return;
        const X* from = x + (v * K + k) * C + c;
        float values[WIDTH];
        if (v < V && C % 4 == 0 && c + WIDTH <= C) {
#pragma unroll
            for (int i = 0; i < WIDTH; i += 4) {
                const float4 four = load4(from + i);
                values[i] = four.x, values[i + 1] = four.y, values[i + 2] = four.z, values[i + 3] = four.w;
            }
        } else {
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) values[i] = v < V && c + i < C ? to_float(from[i]) : 0.0f;
        }
        T* to = y + ((pair * (V + 1)) + v) * (ROW_BYTES / sizeof(T)) + lane * WIDTH;
        if constexpr (is_same<T, e4m3>) {
            union {
                uint4 word;
                unsigned short pairs[WIDTH / 2];
            };
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) {
                const float peak = c + i < C ? peaks[c + i] : 0.0f;
                values[i] = is_finite(values[i]) ? values[i] * (peak > LEAST ? LARGEST / peak : 0.0f)
                                                   : __uint_as_float(0x7fffffffu);
            }
#pragma unroll
            for (int i = 0; i < WIDTH / 2; ++i) pairs[i] = pack_e4m3(values[2 * i], values[2 * i + 1]);
            *reinterpret_cast<uint4*>(to) = word;
        } else {
            store_contiguous(to, values);
        }
    }
}

// Monotonic in `largest`, so the max over partial results may be taken afterwards.
__device__ __forceinline__ float next_peak(float largest) {
    const u32 bits = __float_as_uint(largest / LARGEST);
    const float peak = __uint_as_float((bits + 0x7fffffu) & 0x7f800000u) * LARGEST;  // rounds up to a power of two
    return largest > LEAST && is_finite(peak) ? peak : largest;
}

// x      (rows, C)
// parts  (count, C): the peak over every count-th row; `blocks` per part, one channel per thread
template <class X>
__global__ void __launch_bounds__(THREADS)
    table_peaks(const X* x, float* parts, long long rows, long long C, u32 count, u32 blocks) {
    const u32 part = blockIdx.x / blocks;
    const long long c = static_cast<long long>(blockIdx.x - part * blocks) * THREADS + threadIdx.x;
    if (c >= C) return;
    float largest = 0.0f;
#pragma unroll 8
    for (long long row = part; row < rows; row += count) {
        const float magnitude = fabsf(to_float(x[row * C + c]));
        if (is_finite(magnitude) && magnitude > largest) largest = magnitude;
    }
    parts[part * C + c] = next_peak(largest);
}
