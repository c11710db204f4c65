// train/layer_parallel/fragments.cuh: activations received straight into wgmma A fragments.
//
// Layout  A thread receives 8 consecutive units of a row per load, so the K dimension is permuted: each group of 32
//         units is spread over four lanes, 8 units each, 4 of them per K step of 16. The two warpgroups alternate
//         groups.
#pragma once

#include "train/layer_parallel/exchange.cuh"

// Index of a unit in the permuted K (or N) dimension.
__device__ constexpr int position(int unit) {
    return (unit & ~31) | (unit >> 2 & 1) << 4 | (unit >> 1 & 1) << 3 | (unit >> 3 & 3) << 1 | (unit & 1);
}

// c = a b, or c += a b if `sums`, over 16 K elements: a in register fragments, the split terms of b side by side. The
// smallest term products fall below rounding, but skipping them mixes accumulator widths and serialises the wgmmas.
template <int PARTS, int NT, class B>
__device__ __forceinline__ void add_numbers(float (&c)[NT][4], const u32 (&a)[PARTS][4], unsigned long long b, bool sums) {
#pragma unroll
    for (int part = 0; part < PARTS; ++part) add_words<B, NT>(c, a[part], b, sums || part > 0);
}

// A fragments of TILES tiles of 8 units. A thread holds rows g and g + 8 of its warp's 16.
template <int PARTS, int BATCH, int TILES>
struct Given {
    using Tiles = TilePost<PARTS, BATCH>;
    // Groups per warpgroup, AT_ONCE of them per batch of wgmmas to limit registers. Groups past the last tile are 0.
    static constexpr int NEEDED = (TILES + 4 * TEAMS - 1) / (4 * TEAMS), TURNS = (NEEDED + 3) / 4;
    static constexpr int AT_ONCE = (NEEDED + TURNS - 1) / TURNS, GROUPS = TURNS * AT_ONCE, POSITIONS = 32 * TEAMS * GROUPS;
    static constexpr int A_ROW = Tiles::A_ROW, PIECES = GROUPS * 2 * A_ROW, LOOKED_AT = PIECES < 12 ? PIECES : 12;
    u32 words[GROUPS][2][A_ROW * 4];  // two bf16 units per word, term after term; or one float32

    static __device__ __forceinline__ int row(int h) { return sum_row(2 * h); }
    static __device__ __forceinline__ int group(int m, int team) { return team + m * TEAMS; }
    // Tile of a thread's chunk.
    static __device__ __forceinline__ int tile(int piece, int team) {
        return group(piece / (2 * A_ROW), team) * 4 + static_cast<int>(threadIdx.x) % 4;
    }
    static __device__ __forceinline__ bool is_there(int piece, int team) {
        return piece < PIECES && tile(piece, team) < TILES && row(piece / A_ROW % 2) < BATCH;
    }
    __device__ __forceinline__ bool receive(const Tiles& from, int team) {
        delay();
        bool are_there = true;
#pragma unroll
        for (int first = 0; first < PIECES; first += LOOKED_AT) {
            u32 seen[LOOKED_AT][4];
            // A thread's first chunk is row g of its tile. The others are 8 rows, split terms or groups further on.
            const auto offset = [=](int i) {
                const int piece = first + i;
                return (piece / (2 * A_ROW) * TEAMS * 4 * A_ROW + piece % A_ROW) * BATCH + piece / A_ROW % 2 * 8;
            };
            const auto is_one = [=](int i) { return is_there(first + i, team); };
            are_there &= from.post.look(seen, Tiles::piece(tile(0, team), row(0), 0), offset, is_one);
#pragma unroll
            for (int i = 0; i < LOOKED_AT * 4; ++i) {
                const int piece = first + i / 4;
                if (piece >= PIECES) break;
                words[piece / (2 * A_ROW)][piece / A_ROW % 2][piece % A_ROW * 4 + i % 4] = is_there(piece, team) ? seen[i / 4][i % 4] : 0;
            }
        }
        return are_there;
    }
    // Stores the activations as core-matrix panels in shared memory.
    __device__ __forceinline__ void put(char* to, int part_bytes, int team) const {
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece) {
            if (!is_there(piece, team)) continue;
            u32 four[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) four[i] = words[piece / (2 * A_ROW)][piece / A_ROW % 2][piece % A_ROW * 4 + i];
            const int at = place_in_strips<ROWS>(row(piece / A_ROW % 2), tile(piece, team) * 8);
            Tiles::put(to + at, part_bytes, piece % A_ROW, four);
        }
    }
    // Units 2 j and 2 j + 1 of the thread's 8 in group m.
    __device__ __forceinline__ float2 two(int m, int h, int j) const {
        if constexpr (Tiles::IN_PARTS) {
            float2 sum = {0.0f, 0.0f};
#pragma unroll
            for (int part = PARTS - 1; part >= 0; --part) {
                const u32 word = words[m][h][part * 4 + j];
                sum.x += __uint_as_float(word << 16), sum.y += __uint_as_float(word & 0xffff0000);
            }
            return sum;
        } else {
            return {__uint_as_float(words[m][h][2 * j]), __uint_as_float(words[m][h][2 * j + 1])};
        }
    }
    // c = activations times the split weights (POSITIONS, 8 NT / PARTS), over the warpgroup's share of K.
    template <int NT>
    __device__ __forceinline__ void multiply(float (&c)[NT][4], u32 weights_at, int team) const {
        using B = Strips<POSITIONS, true>;
        const B weights(weights_at);
#pragma unroll
        for (int first = 0; first < GROUPS; first += AT_ONCE) {
            u32 a[AT_ONCE * 2][PARTS][4];
#pragma unroll
            for (int i = 0; i < AT_ONCE * 8; ++i) {
                const int m = first + i / 8, j = i / 2 % 4, h = i % 2;
                u32 parts[PARTS];
                if constexpr (Tiles::IN_PARTS) {
#pragma unroll
                    for (int part = 0; part < PARTS; ++part) parts[part] = words[m][h][part * 4 + j];
                } else {
                    const float2 of = two(m, h, j);
                    split_two(parts, of.x, of.y);
                }
#pragma unroll
                for (int part = 0; part < PARTS; ++part) a[i / 4][part][j % 2 * 2 + h] = parts[part];
            }
            begin_products();
#pragma unroll
            for (int i = 0; i < AT_ONCE * 2; ++i)
                add_numbers<PARTS, NT, B>(c, a[i], weights.word(2 * group(first + i / 2, team) + i % 2), first > 0 || i > 0);
            end_products();
            wait_for_products<0>();
        }
    }
};
