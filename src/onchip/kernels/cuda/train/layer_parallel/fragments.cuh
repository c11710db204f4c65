// train/layer_parallel/fragments.cuh: activations received straight into wgmma A fragments.
//
// Layout  A thread receives 8 consecutive units of a row per load, so K is permuted: each group of 32 units is spread
//         over four lanes, 8 units each, 4 of them per K step of 16. The two warpgroups alternate groups.
#pragma once

#include "train/layer_parallel/exchange.cuh"

// Index of a unit in the permuted K (or N) dimension.
__device__ constexpr int permuted_k(int unit) {
    return (unit & ~31) | (unit >> 2 & 1) << 4 | (unit >> 1 & 1) << 3 | (unit >> 3 & 3) << 1 | (unit & 1);
}

// c = a b, or c += a b if `sums`, over 16 K elements: a in register fragments, the split terms of b next to each other.
// The smallest products are below rounding, but skipping them would mix accumulator widths and serialise the wgmmas.
template <int SPLITS, int NT, class B>
__device__ __forceinline__ void add_split_step(float (&c)[NT][4], const u32 (&a)[SPLITS][4], unsigned long long b,
                                               bool sums) {
#pragma unroll
    for (int term = 0; term < SPLITS; ++term) add_fragments<B, NT>(c, a[term], b, sums || term > 0);
}

// A fragments of TILES tiles of 8 units. A thread holds rows g and g + 8 of its warp's 16.
template <int SPLITS, int BATCH, int TILES>
struct ActivationFragments {
    using Tiles = TileChannel<SPLITS, BATCH>;
    // Groups per warpgroup, AT_ONCE of them per batch of wgmmas to limit registers. Groups past the last tile are 0.
    static constexpr int NEEDED = (TILES + 4 * WARPGROUPS - 1) / (4 * WARPGROUPS), BATCHES = (NEEDED + 3) / 4;
    static constexpr int AT_ONCE = (NEEDED + BATCHES - 1) / BATCHES, GROUPS = BATCHES * AT_ONCE,
        K_SIZE = 32 * WARPGROUPS * GROUPS;
    static constexpr int ROW_SLOTS = Tiles::ROW_SLOTS, SLOTS = GROUPS * 2 * ROW_SLOTS, POLLED = SLOTS < 12 ? SLOTS : 12;
    u32 fragments[GROUPS][2][ROW_SLOTS * 4];  // two bf16 units per word, term after term; or one float32

    static __device__ __forceinline__ int row(int h) { return acc_row(2 * h); }
    static __device__ __forceinline__ int group(int m, int warpgroup) { return warpgroup + m * WARPGROUPS; }
    // Tile of a thread's slot.
    static __device__ __forceinline__ int tile(int slot, int warpgroup) {
        return group(slot / (2 * ROW_SLOTS), warpgroup) * 4 + static_cast<int>(threadIdx.x) % 4;
    }
    static __device__ __forceinline__ bool is_valid(int slot, int warpgroup) {
        return slot < SLOTS && tile(slot, warpgroup) < TILES && row(slot / ROW_SLOTS % 2) < BATCH;
    }
    __device__ __forceinline__ bool receive(const Tiles& from, int warpgroup) {
        delay();
        bool arrived = true;
#pragma unroll
        for (int first = 0; first < SLOTS; first += POLLED) {
            u32 received[POLLED][4];
            // A thread's first slot is row g of its tile. The others are 8 rows, split terms or groups further on.
            const auto offset = [=](int i) {
                const int slot = first + i;
                return (slot / (2 * ROW_SLOTS) * WARPGROUPS * 4 * ROW_SLOTS + slot % ROW_SLOTS) * BATCH +
                    slot / ROW_SLOTS % 2 * 8;
            };
            const auto is_active = [=](int i) { return is_valid(first + i, warpgroup); };
            arrived &= from.chunks.poll(received, Tiles::slot(tile(0, warpgroup), row(0), 0), offset, is_active);
#pragma unroll
            for (int i = 0; i < POLLED * 4; ++i) {
                const int slot = first + i / 4;
                if (slot >= SLOTS) break;
                fragments[slot / (2 * ROW_SLOTS)][slot / ROW_SLOTS % 2][slot % ROW_SLOTS * 4 + i % 4] =
                    is_valid(slot, warpgroup) ? received[i / 4][i % 4] : 0;
            }
        }
        return arrived;
    }
    // Stores the activations as core-matrix panels in shared memory.
    __device__ __forceinline__ void store(char* to, int split_bytes, int warpgroup) const {
#pragma unroll
        for (int slot = 0; slot < SLOTS; ++slot) {
            if (!is_valid(slot, warpgroup)) continue;
            u32 four[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                four[i] = fragments[slot / (2 * ROW_SLOTS)][slot / ROW_SLOTS % 2][slot % ROW_SLOTS * 4 + i];
            const int at = core_matrix_offset<ROWS>(row(slot / ROW_SLOTS % 2), tile(slot, warpgroup) * 8);
            Tiles::store(to + at, split_bytes, slot % ROW_SLOTS, four);
        }
    }
    // Units 2 j and 2 j + 1 of the thread's 8 in group m.
    __device__ __forceinline__ float2 pair(int m, int h, int j) const {
        if constexpr (Tiles::SENDS_SPLITS) {
            float2 sum = {0.0f, 0.0f};
#pragma unroll
            for (int term = SPLITS - 1; term >= 0; --term) {
                const u32 word = fragments[m][h][term * 4 + j];
                sum.x += __uint_as_float(word << 16), sum.y += __uint_as_float(word & 0xffff0000);
            }
            return sum;
        } else {
            return {__uint_as_float(fragments[m][h][2 * j]), __uint_as_float(fragments[m][h][2 * j + 1])};
        }
    }
    // c = activations times the split weights (K_SIZE, 8 NT / SPLITS), over the warpgroup's share of K.
    template <int NT>
    __device__ __forceinline__ void multiply(float (&c)[NT][4], u32 weights_at, int warpgroup) const {
        using B = CoreMatrices<K_SIZE, true>;
        const B weights(weights_at);
#pragma unroll
        for (int first = 0; first < GROUPS; first += AT_ONCE) {
            u32 a[AT_ONCE * 2][SPLITS][4];
#pragma unroll
            for (int i = 0; i < AT_ONCE * 8; ++i) {
                const int m = first + i / 8, j = i / 2 % 4, h = i % 2;
                u32 splits[SPLITS];
                if constexpr (Tiles::SENDS_SPLITS) {
#pragma unroll
                    for (int term = 0; term < SPLITS; ++term) splits[term] = fragments[m][h][term * 4 + j];
                } else {
                    const float2 values = pair(m, h, j);
                    split_pair(splits, values.x, values.y);
                }
#pragma unroll
                for (int term = 0; term < SPLITS; ++term) a[i / 4][term][j % 2 * 2 + h] = splits[term];
            }
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < AT_ONCE * 2; ++i)
                add_split_step<SPLITS, NT, B>(c, a[i], weights.descriptor(2 * group(first + i / 2, warpgroup) + i % 2),
                                              first > 0 || i > 0);
            wgmma_commit();
            wgmma_wait<0>();
        }
    }
};
