// scan_single_pass.cu: one pass over memory: a tile asks the tiles before it what they come to (decoupled look-back).
//
// Idea    Blocks take tiles of 4096 numbers in the order in which they start: a ticket, drawn from a counter, so
//         whoever waits for a tile waits for a block that is running. A block scans its tile in registers and says its
//         total at once, in a word of global memory. Then its first warp looks back, 32 tiles at a time: it adds up
//         totals until it meets a tile that knows the sum of everything up to its end, says the same of its own, and
//         only then the sums are written. A word is 8 B, a number and what it means, written and read as one: no fence.
//         Whether a tile before has its total or its whole sum ready is a matter of time, so the order of the
//         additions is too: the last bits of y differ from run to run.
// Floor   x in, y out: 8*N B, and 8 B a tile cleared, written twice and read (0.1 %). N = 2^24, at 4.8 TB/s: 134 MB,
//         28.0 us; N additions, and as many again for lanes, warps and tiles. A tile is held in registers while its
//         warp looks back: that wait must hide behind the loads of the multiprocessor's other blocks. And a launch to
//         clear the words.
// Layout  x, y (N,) float32, 16 B aligned; words (1 + ceil(N / 4096),): the counter, then one a tile, zero at first.
// Shared  (8 + 1)*4 + 4 = 40 B
// Limits  Any N up to 2^43 (numbers past the end are zeros and not written); fp32; sm_80 up.
#include "scan_tile.cuh"

using u64 = unsigned long long;
enum Meaning : unsigned { NOTHING = 0, TOTAL = 1, WHOLE_SUM = 2 };  // of a tile; of all tiles up to its end

__device__ __forceinline__ u64 word_of(Meaning meaning, float number) {
    return static_cast<u64>(meaning) << 32 | __float_as_uint(number);
}
__device__ __forceinline__ unsigned meaning_of(u64 word) { return static_cast<unsigned>(word >> 32); }
__device__ __forceinline__ float number_of(u64 word) { return __uint_as_float(static_cast<unsigned>(word)); }

// volatile: one access of 8 B, in L2, each time it stands here.
__device__ __forceinline__ void say(u64* words, long long tile, Meaning meaning, float number) {
    *static_cast<volatile u64*>(words + tile) = word_of(meaning, number);
}

// The sum of all tiles before this one, in every lane of the warp.
__device__ __forceinline__ float look_back(const u64* words, long long tile) {
    const int lane = threadIdx.x % LANES;
    float sum = 0.0f;
    for (long long last = tile - 1;; last -= LANES) {
        const long long mine = last - lane;  // lane 0 has the nearest tile
        u64 word;
        do {
            word = mine >= 0 ? *static_cast<const volatile u64*>(words + mine) : word_of(WHOLE_SUM, 0.0f);
        } while (__any_sync(~0u, meaning_of(word) == NOTHING));
        const unsigned whole = __ballot_sync(~0u, meaning_of(word) == WHOLE_SUM);
        const int nearest = whole ? __ffs(whole) - 1 : LANES - 1;
        float part = lane <= nearest ? number_of(word) : 0.0f;
#pragma unroll
        for (int mask = LANES / 2; mask > 0; mask /= 2) part += __shfl_xor_sync(~0u, part, mask);
        sum += part;
        if (whole) return sum;
    }
}

__global__ void __launch_bounds__(THREADS) clear_words(u64* words, long long count) {
    const long long i = 1LL * THREADS * blockIdx.x + threadIdx.x;
    if (i < count) words[i] = 0;
}

__global__ void __launch_bounds__(THREADS)
single_pass(const float* __restrict__ x, u64* words, float* __restrict__ y, long long N) {
    __shared__ float warps[WARPS], before_tile;
    __shared__ unsigned ticket;
    if (threadIdx.x == 0) ticket = atomicAdd(reinterpret_cast<unsigned*>(words), 1u);
    __syncthreads();
    const long long number = ticket, first = TILE * number;
    u64* said = words + 1;

    Quad tile[LINES];
    load_tile(x, tile, first, N);
    const float total = scan_tile(tile, warps);
    if (threadIdx.x / LANES == 0) {
        if (threadIdx.x == 0) say(said, number, number == 0 ? WHOLE_SUM : TOTAL, total);
        const float before = number == 0 ? 0.0f : look_back(said, number);
        if (threadIdx.x == 0) {
            if (number > 0) say(said, number, WHOLE_SUM, before + total);
            before_tile = before;
        }
    }
    __syncthreads();
    store_tile(y, tile, before_tile, first, N);
}
