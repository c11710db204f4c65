// embedding/token_max.cu: token convolutions and their max over time: ids in, features out, all branches in one launch.
//
// Idea    A token convolution sums looked-up rows (plan/rewrites/embedding.py); only its max over time is kept. Tables
//         are stored in slices of 128 B of channels. A block handles up to 16 sentences and one slice; concurrent
//         blocks share a slice, so it stays in L2. 8 threads, 16 B of a row each, sum two or four positions at once and
//         keep the max in registers. For few sentences up to 16 times 8 threads split the positions. Bias and
//         activation are monotonic and follow the max. Lengths limit the positions; without any, y is f(0).
// Floor   positions * taps rows of C per sentence from L2. Sentiment (K = 3, 5, 7, 9, 16 tokens, 1,024 channels): 244
//         rows of 2 KiB in fp16; 16,384 sentences: 8.2 GB / 9.3 TB/s (measured) = 0.88 ms; fp8: 4.1 GB, 0.44 ms.
// Order   Taps in order in float32, then the bias. fp8: in float16 (error below 1% of the fp8 rounding), scale, bias.
// Layout  ids (B, S); lengths (B) or null; tables (slices, K, V + 1, 128 B), row V zero for padding; biases (C) float32
//         or null; peaks (C) float32 (fp8): the value stored as LARGEST; y (B, D_out). All 16 B aligned.
// Shared  4 B per id of a block's sentences; 16 to 64 B per thread where several warps share a sentence.
// Limits  int32 or int64 ids and lengths; float32, float16, bfloat16; e4m3 tables of <= 128 taps from sm_89 on; ids of
//         one sentence fit in shared memory; 16 convolutions per launch; sm_80 up.
#include "common/fp8.cuh"
#include "common/epilogue.cuh"
#include "common/status.cuh"
#include "common/accumulator.cuh"

constexpr int TILE_BITS = 4, LANES = 8, THREADS = LANES << TILE_BITS;  // 2^TILE_BITS sentences
constexpr int ROW_BYTES = 128, MAX_BRANCHES = 16;

struct Branch {
    u32 K, C, P, stride, before, column, slices, window;  // window 0: ignore lengths
    Activation activation;
};
struct Branches {
    const char* tables[MAX_BRANCHES];
    const float* biases[MAX_BRANCHES];
    const float* peaks[MAX_BRANCHES];
    Branch branch[MAX_BRANCHES];
};

// A thread's 16 B of a row, as accumulators.
template <class T>
struct Sums {
    static constexpr int WIDTH = 16 / sizeof(T);
    float values[WIDTH];
    __device__ __forceinline__ Sums(float v = 0.0f) {
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) values[i] = v;
    }
    __device__ __forceinline__ void add(const uint4& words) {
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) values[i] += to_float(reinterpret_cast<const T*>(&words)[i]);
    }
    __device__ __forceinline__ void set(const uint4& words) {
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) values[i] = to_float(reinterpret_cast<const T*>(&words)[i]);
    }
    __device__ __forceinline__ void max_with(const Sums& other) {
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) values[i] = larger(values[i], other.values[i]);
    }
    // Max with the lane at distance `lanes`.
    __device__ __forceinline__ void max_over_lanes(int lanes) {
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) values[i] = larger(values[i], __shfl_xor_sync(~0u, values[i], lanes));
    }
    __device__ __forceinline__ float at(int i) const { return values[i]; }
};
template <>
struct Sums<e4m3> {
    static constexpr int WIDTH = 16;
    u32 pairs[WIDTH / 2];
    __device__ __forceinline__ Sums(float v = 0.0f) {
#pragma unroll
        for (int i = 0; i < WIDTH / 2; ++i) pairs[i] = pack<f16>(v, v);
    }
    __device__ __forceinline__ void add(const uint4& words) {
#pragma unroll
        for (int i = 0; i < WIDTH / 2; ++i)
            pairs[i] = add_halves(pairs[i], two_halves(reinterpret_cast<const unsigned short*>(&words)[i]));
    }
    __device__ __forceinline__ void set(const uint4& words) {
#pragma unroll
        for (int i = 0; i < WIDTH / 2; ++i) pairs[i] = two_halves(reinterpret_cast<const unsigned short*>(&words)[i]);
    }
    __device__ __forceinline__ void max_with(const Sums& other) {
#pragma unroll
        for (int i = 0; i < WIDTH / 2; ++i) pairs[i] = larger_halves(pairs[i], other.pairs[i]);
    }
    __device__ __forceinline__ void max_over_lanes(int lanes) {
#pragma unroll
        for (int i = 0; i < WIDTH / 2; ++i)
            pairs[i] = larger_halves(pairs[i], __shfl_xor_sync(~0u, pairs[i], lanes));
    }
    __device__ __forceinline__ float at(int i) const { return to_float(reinterpret_cast<const f16*>(pairs)[i]); }
};

// Sums N positions, `step` apart, and updates the maxima.
// TAPS  K if known at compile time, else 0
// rows  row of the first tap of the first position
template <class T, int N, int TAPS>
__device__ __forceinline__ void add_positions(const char* table, long long tap_bytes, const u32* rows, u32 step, u32 K,
                                              Sums<T>& maxima) {
    Sums<T> sums[N];
    uint4 words[N];
#pragma unroll
    for (int n = 0; n < N; ++n)
        words[n] = *reinterpret_cast<const uint4*>(table + static_cast<u64>(rows[n * step]) * ROW_BYTES);
    // set, not 0 + x: they differ only in the sign of -0, which adding the bias (or 0) after the max removes.
#pragma unroll
    for (int n = 0; n < N; ++n) sums[n].set(words[n]);
#pragma unroll 2
    for (u32 k = 1; k < (TAPS ? TAPS : K); ++k) {
        table += tap_bytes;
#pragma unroll
        for (int n = 0; n < N; ++n)
            words[n] = *reinterpret_cast<const uint4*>(table + static_cast<u64>(rows[n * step + k]) * ROW_BYTES);
#pragma unroll
        for (int n = 0; n < N; ++n) sums[n].add(words[n]);
    }
#pragma unroll
    for (int n = 0; n < N; ++n) maxima.max_with(sums[n]);
}

// All `left` positions. Few at a time: occupancy hides the latency.
template <class T, int TAPS>
__device__ __forceinline__ void sum_positions_of(const char* table, long long tap_bytes, const u32* rows, u32 step,
                                                 u32 K, u32 left, Sums<T>& maxima) {
    constexpr int N = sizeof(T) == 4 ? 4 : 2;
    for (; left >= N; left -= N, rows += N * step) add_positions<T, N, TAPS>(table, tap_bytes, rows, step, K, maxima);
    if (N > 2 && left & 2) add_positions<T, 2, TAPS>(table, tap_bytes, rows, step, K, maxima);
    if (left & 1) add_positions<T, 1, TAPS>(table, tap_bytes, rows + (left & 2) * step, step, K, maxima);
}

// How many of P windows fit in a sentence.
__device__ __forceinline__ u32 windows_within(long long length, const Branch& branch) {
    if (!branch.window) return branch.P;
    if (length < branch.window) return 0;
    const long long count = (length - branch.window) / branch.stride + 1;
    return count < branch.P ? static_cast<u32>(count) : branch.P;
}

// length_bytes  per length: 4, 8, or 0 without lengths
// count         convolutions
// share_bits    2^share_bits * 8 threads share a sentence
// pitch         row indices per sentence in shared memory
//
// Tried, sentiment on an H200 in 16 bits, ms with uniform / Zipf ids: four positions, eight loads, four blocks per SM
// 1.16 / 1.02; five blocks 1.04 / 0.90; this 0.97 / 0.75.
template <class Id, class T, class Y>
__global__ void __launch_bounds__(THREADS, 6)
    token_max(const Id* ids, const void* lengths, Y* y, u64* status, const __grid_constant__ Branches branches,
              long long B, long long S, long long V, long long D_out, u32 length_bytes, u32 count, u32 share_bits,
              u32 pitch) {
    constexpr int WIDTH = Sums<T>::WIDTH;  // channels per thread
    extern __shared__ u32 shared[];
    const u32 tile_bits = TILE_BITS - share_bits, sentences = 1u << tile_bits;
    const u32 tiles = static_cast<u32>(B + sentences - 1 >> tile_bits);
    u32 slice = blockIdx.x / tiles, index = 0;
    const long long first = static_cast<long long>(blockIdx.x - slice * tiles) * sentences;
    while (index + 1 < count && slice >= branches.branch[index].slices) slice -= branches.branch[index++].slices;
    const Branch& branch = branches.branch[index];

    const u32 lane = threadIdx.x % LANES, group = threadIdx.x / LANES;
    const u32 sentence = group >> share_bits, part = group & ((1u << share_bits) - 1);
    const long long b = first + sentence;

    // The table row of each position of the sentence, padding included.
    const u32 span = (branch.P - 1) * branch.stride + branch.K;
    for (u32 slot = part * LANES + lane; slot < span; slot += LANES << share_bits) {
        const long long at = static_cast<long long>(slot) - branch.before;
        const bool is_padding = b >= B || at < 0 || at >= S;
        shared[sentence * pitch + slot] = static_cast<u32>(is_padding ? V : checked_id(ids, b * S + at, V, status));
    }
    if (LANES << share_bits > 32) __syncthreads();
    else __syncwarp();

    const u32 c = (slice * LANES + lane) * WIDTH;
    const bool is_valid = b < B && c < branch.C;
    u32 P = branch.P;
    if (length_bytes && b < B)
        P = windows_within(
            length_bytes == 4 ? static_cast<const int*>(lengths)[b] : static_cast<const long long*>(lengths)[b], branch
        );
    Sums<T> maxima(__uint_as_float(0xff800000u));  // -infinity
    if (is_valid) {
        const long long tap_bytes = (V + 1) * ROW_BYTES;
        const char* table = branches.tables[index] + slice * branch.K * tap_bytes + lane * 16;
        const u32 step = branch.stride << share_bits;
        const u32* rows = shared + sentence * pitch + part * branch.stride;
        u32 left = part < P ? (P - 1 - part >> share_bits) + 1 : 0;
        switch (branch.K) {  // a known K lets all loads be in flight at once
            case 2: sum_positions_of<T, 2>(table, tap_bytes, rows, step, branch.K, left, maxima); break;
            case 3: sum_positions_of<T, 3>(table, tap_bytes, rows, step, branch.K, left, maxima); break;
            case 4: sum_positions_of<T, 4>(table, tap_bytes, rows, step, branch.K, left, maxima); break;
            case 5: sum_positions_of<T, 5>(table, tap_bytes, rows, step, branch.K, left, maxima); break;
            case 7: sum_positions_of<T, 7>(table, tap_bytes, rows, step, branch.K, left, maxima); break;
            case 9: sum_positions_of<T, 9>(table, tap_bytes, rows, step, branch.K, left, maxima); break;
            default: sum_positions_of<T, 0>(table, tap_bytes, rows, step, branch.K, left, maxima);
        }
    }
    float* smem_maxima = reinterpret_cast<float*>(shared + sentences * pitch);
    // Reduce within the warp, then across warps.
    if (share_bits > 0) maxima.max_over_lanes(LANES);
    if (share_bits > 1) maxima.max_over_lanes(2 * LANES);
    if (share_bits > 2) {
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) smem_maxima[threadIdx.x + i * THREADS] = maxima.at(i);
        __syncthreads();
    }
    if (part) return;
    if (!is_valid) return;
    const float* bias = branches.biases[index];
    const long long left = branch.C - c;
    float result[WIDTH];
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
        result[i] = maxima.at(i);
#pragma unroll
        for (u32 other = 1; other < THREADS / 32; ++other)
            if (share_bits > 2 && 4 * other < 1u << share_bits)
                result[i] = larger(result[i], smem_maxima[threadIdx.x + other * 32 + i * THREADS]);
        const float bias_value = bias != nullptr && i < left ? bias[c + i] : 0.0f;
        if constexpr (is_same<T, e4m3>)
            result[i] = fmaf(result[i], i < left ? branches.peaks[index][c + i] * (1.0f / LARGEST) : 0.0f, bias_value);
        else result[i] += bias_value;
        if (!P) result[i] = 0.0f;
    }
    const bool is_aligned = D_out % WIDTH == 0 && branch.column % WIDTH == 0;
    Y* to = y + b * D_out + branch.column + c;
    if (is_aligned && left >= WIDTH && branch.activation.code <= 1) {
        constexpr int VECTOR = 16 / sizeof(Y) < WIDTH ? 16 / sizeof(Y) : WIDTH;
#pragma unroll
        for (int i = 0; i < WIDTH; i += VECTOR) {
            float vector[VECTOR];
#pragma unroll
            for (int j = 0; j < VECTOR; ++j)
                vector[j] = branch.activation.code ? ReLU::apply(result[i + j]) : result[i + j];
            store_contiguous(to + i, vector);
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < WIDTH; ++i)
        if (i < left) finish_one(result[i], to + i, branch.activation);
}
