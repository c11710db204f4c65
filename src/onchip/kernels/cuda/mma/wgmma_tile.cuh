// mma/wgmma_tile.cuh: persistent, warp-specialised GEMM y = activation(x w^T + bias): TMA, mbarriers, wgmma, split-K.
// The mainloop and epilogue of gemm/sm90.cu and conv/sm90.cu, which differ in how they load x. Host side: gemm/sm90.py.
//
// Idea    A persistent block computes tile after tile of y. A producer warp loads tiles of x and w, 128 bytes of k
//         each, by TMA into STAGES stages guarded by full and empty mbarriers. TEAMS consumer warpgroups multiply 64
//         rows each by wgmma. The loads of the next tile overlap the epilogue. wgmma reads x from shared memory where x
//         has the multiplied type (TMA rounds float32 to tf32); else x is rounded or split (3xTF32) in registers.
// Order   k in order, STEP elements per instruction; fp32 partial sums are added to a total every PART elements, since
//         the tensor cores truncate when they accumulate. Then the bias. Independent of the tile and of M.
// Floor   2 M N K flop. 8,192 cubed in fp16: 1.1 Tflop / 989 Tflop/s = 1.11 ms; in fp32: 3 * 1.1 / 494.5 = 6.67 ms.
//         m64n256 takes 128 cycles and reads 10 KB of shared memory, of the 16 KB that it delivers in that time.
// Layout  x (M, K), y (M, N) row-major, w (PARTS, N, K), for fp32 the upper tf32, then the lower; bias (N) or none.
// Shared  STAGES * (X_BOXES * BM + PARTS * BN) * 128 B, 1 KB of alignment, mbarriers: 197 KB + 1 KB for 128 x 256 in
//         four stages of fp16. A transposed tile adds 128 B per row.
// Limits  Rows of x and w are multiples of 16 B; M < 2^31; sm_90a.
#pragma once

#include "mma/tma.cuh"
#include "mma/cluster_reduce.cuh"
#include "common/epilogue.cuh"
#include "mma/wgmma.cuh"

constexpr int WARPGROUP = 128, ROWS = 64;  // a warpgroup: threads, and rows of its tile
constexpr int LINE = 128;             // bytes of k in a TMA tile
constexpr int PART = 32;              // elements of k per fp32 partial sum

template <class P>
struct MultipliedAs {
    using type = P;
};
template <>
struct MultipliedAs<Fp32> {
    using type = Tf32;
};

template <class P, class X>
struct Operands {
    static constexpr bool is_direct = is_same<X, typename P::Element> && !is_same<P, Fp32>;  // x stays in shared memory
    static constexpr int PARTS = is_same<P, Fp32> ? 2 : 1;  // of w: upper and lower tf32
    static constexpr int DEPTH = LINE / 4 * P::PER_WORD;  // elements of k per TMA tile of w
    static constexpr int X_BOXES = DEPTH * static_cast<int>(sizeof(X)) / LINE;
    static constexpr int STEPS = DEPTH / P::STEP;
};

// The row of x held as fragment row g. Permuted where a row takes two TMA tiles, to avoid bank conflicts.
template <class P, class X>
__device__ __forceinline__ int row_of(int g) {
    return Operands<P, X>::X_BOXES == 2 ? g % 4 * 2 + g / 4 : g;
}

// A slice of float32 rows as A fragments in registers, rounded or split (3xTF32).
template <class P>
struct Rows {
    static constexpr int STEPS = LINE / 32;
    u32 a[STEPS][4], low[is_same<P, Fp32> ? STEPS : 1][4];

    // Reads rows r and r + 8 from swizzled TMA tiles (mma/tma.cuh) of BM rows.
    template <int BM>
    __device__ __forceinline__ void read(const char* boxes, int r, int q) {
#pragma unroll
        for (int i = 0; i < 4 * STEPS; ++i) {
            const int step = i / 4, word = i % 4 / 2, row = r + i % 2 * 8;
            const int column = step * P::STEP + (P::PER_WORD == 2 ? 2 * q + word * 8 : q + word * 4);
            const char* line = boxes + column / 32 * (BM * LINE) + row * LINE;
            const char* at = line + (column % 32 * 4 ^ row % 8 * 16);
            if constexpr (P::PER_WORD == 2) {
                const float2 two = *reinterpret_cast<const float2*>(at);
                a[step][i % 4] = pack<typename P::Element>(two.x, two.y);
            } else {
                const float v = *reinterpret_cast<const float*>(at);
                a[step][i % 4] = Tf32::word(v);
                if constexpr (is_same<P, Fp32>) low[step][i % 4] = Tf32::word(v - __uint_as_float(a[step][i % 4]));
            }
        }
    }
};

template <int J>
__device__ __forceinline__ void add_up(float (&to)[J][4], const float (&more)[J][4]) {
#pragma unroll
    for (int i = 0; i < 4 * J; ++i) to[i / 4][i % 4] += more[i / 4][i % 4];
}
template <int J>
__device__ __forceinline__ void clear(float (&sums)[J][4]) {
#pragma unroll
    for (int i = 0; i < 4 * J; ++i) sums[i / 4][i % 4] = 0.0f;
}
template <bool IS_FIRST, bool IS_SECOND, class A, class B, class C>
__device__ __forceinline__ auto& pick(A& first, B& second, C& third) {
    if constexpr (IS_FIRST) return first;
    else if constexpr (IS_SECOND) return second;
    else return third;
}

// Split-K epilogue of a cluster: every block holds a partial sum of the whole tile and writes it to shared memory. Each
// block then reduces a share of the tile over DSMEM, in rank order, and stores it.
template <int BN, class Out, class Act>
__device__ __forceinline__ void add_up_together(const float (&c)[BN / 8][4], float* mine, int row, int q, u32 rank,
                                                u32 parts, const Out& out, const float* shifts, long long m,
                                                long long n, long long M, const Act& activation) {
    constexpr int STRIDE = BN + 8;  // +8: the same columns of eight rows are in different banks
#pragma unroll
    for (int i = 0; i < BN / 4; ++i) {
        float2* const to = reinterpret_cast<float2*>(mine + (row + i % 2 * 8) * STRIDE + i / 2 * 8 + 2 * q);
        *to = {c[i / 2][i % 2 * 2], c[i / 2][i % 2 * 2 + 1]};
    }
    wait_for_cluster();
    const int rows = static_cast<int>(M - m < ROWS ? M - m : ROWS);
    const auto read = [&](int i, u32 part) {
        return read_of_block(mine + i / (BN / 4) * STRIDE + i % (BN / 4) * 4, part);
    };
    const auto give = [&](int i, float (&four)[4]) {
        const int column = i % (BN / 4) * 4;
        const long long at = out.row(m + i / (BN / 4)), left = out.N - n - column;
        if (at < 0 || left <= 0) return;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            four[k] += shifts[column + k];
            if (out.other != nullptr && k < left) four[k] += to_float(out.other[at + n + column + k]);
        }
        finish(four, out.y + at + n + column, nullptr, left, out.N % 4 == 0, activation);
    };
    add_up_parts<8>(rank * WARPGROUP + threadIdx.x, WARPGROUP * parts, rows * (BN / 4), parts, read, give);
    wait_for_cluster();  // no block overwrites or exits while others read its shared memory
}

// -- transposed tiles ------------------------------------------------------------------------------------------------
// For narrow y, wgmma operands are swapped: 64 columns of y take the 64 rows of A, and 128 rows of y the columns of B.
// With N = 64, A and B read equally many bytes of shared memory, which takes twice the time of the wgmma. The epilogue
// transposes the tile back.

// Staging buffer of a transposed tile in shared memory: R rows of y, 64 columns (128 bytes) each. 16-byte chunks are
// swizzled: the same chunk of eight rows, and the eight chunks of a row, are in different banks.
template <int R, class Y>
struct Outlet {
    static_assert(sizeof(Y) == 2, "numbers of 16 bits are turned");
    char* room;

    __device__ __forceinline__ uint4* piece(int row, int i) const {
        return reinterpret_cast<uint4*>(room + row * LINE + ((i ^ row % 8) * 16));
    }
    __device__ __forceinline__ u32 word(int row, int column) const {
        return *reinterpret_cast<const u32*>(reinterpret_cast<const char*>(piece(row, column / 8)) + column % 8 * 2);
    }
    // Calls move(offset in y, chunk) for the chunks inside y of rows from m on and columns from n on, over the threads
    // of a warpgroup. Full 128-byte lines: L2 takes as long for a sector. N is a multiple of 8.
    template <class Out, class Move>
    __device__ __forceinline__ void each(const Out& out, long long m, long long n, Move move) const {
        const int i = threadIdx.x % 8;
#pragma unroll 4
        for (int row = threadIdx.x % WARPGROUP / 8; row < R; row += WARPGROUP / 8) {
            const long long at = out.row(m + row);
            if (at >= 0 && n + 8 * i < out.N) move(at + n + 8 * i, piece(row, i));
        }
    }
    // Prefetches the residual by cp.async, during the mainloop.
    template <class Out>
    __device__ __forceinline__ void fetch(const Out& out, long long m, long long n) const {
        each(out, m, n, [&](long long at, uint4* to) {
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(shared_address(to)), "l"(out.other + at)
                         : "memory");
        });
    }
};

// Epilogue of a warpgroup's transposed tile: R rows of y from m on; warp w has the 16 columns from n + 16 w on. Adds
// bias and residual, applies the activation, transposes, stores.
// shifts  the bias of the 64 columns, or zeros
template <int R, class Out, class Act>
__device__ __forceinline__ void finish_turned(float (&c)[R / 8][4], const Out& out, char* room, const float* shifts,
                                              long long m, long long n, int warpgroup, const Act& activation) {
    using Y = typename Out::Element;
    const Outlet<R, Y> outlet{room};
    const int warp = threadIdx.x % WARPGROUP / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < R / 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) c[j][i] += shifts[16 * warp + g + i / 2 * 8];
    if (out.other != nullptr) asm volatile("cp.async.wait_all;" ::: "memory");
    wait_for_warpgroup(warpgroup);  // the residual has landed; the stores of the previous tile have read the buffer
    if (out.other != nullptr) {
#pragma unroll
        for (int j = 0; j < R / 8; ++j)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const u32 two = turned(outlet.word(8 * j + g, 16 * warp + 8 * half + 2 * q));
                c[j][2 * half] += to_float(Y{static_cast<unsigned short>(two)});
                c[j][2 * half + 1] += to_float(Y{static_cast<unsigned short>(two >> 16)});
            }
        wait_for_warpgroup(warpgroup);
    }
    activate_all<Y>(c, activation);
#pragma unroll
    for (int j = 0; j < R / 8; j += 2) {
        u32 words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            words[i] = turned(pack<Y>(c[j + i / 2][2 * (i % 2)], c[j + i / 2][2 * (i % 2) + 1]));
        collect_chunk(words, q);
        *outlet.piece(8 * (j + q / 2) + g, 2 * warp + q % 2) = {words[0], words[1], words[2], words[3]};
    }
    wait_for_warpgroup(warpgroup);
    outlet.each(out, m, n, [&](long long at, const uint4* from) { *reinterpret_cast<uint4*>(out.y + at) = *from; });
}

// Split-K: a sum is the sum of `parts` partial sums along k. ALONE: one block computes them in sequence. TOGETHER: each
// block of a cluster computes one, and the cluster reduces them in the same order; a cluster then has one tile.
enum Split { NONE, ALONE, TOGETHER };

// Slices of k of a plain GEMM, the same for all tiles. Other loaders have phases: GEMMs of the same M, each with its
// own part of w. A slice of x is one TMA tile of 128 bytes per row, or up to TAPS tiles of 128 / TAPS bytes.
struct OnePhase {
    int all_slices;

    static constexpr int TAPS = 1;
    __device__ __forceinline__ u32 phases() const { return 1; }
    __device__ __forceinline__ u32 phase_of(u32) const { return 0; }
    __device__ __forceinline__ int first_number(u32) const { return 0; }
    __device__ __forceinline__ int slices(u32) const { return all_slices; }
    __device__ __forceinline__ int taps(u32) const { return 1; }
};

// The kernel body: TEAMS consumer warpgroups and one producer warpgroup, TEAM * (TEAMS + 1) threads.
// loader     slices and taps of a phase (OnePhase), and TMA loads of x: begin_tile(m, phase, slice), then
//            load<DEPTH, X_BOXES>(to, signal, slice, box) for each tile of the slices from there on, in order
// out        offsets of rows of y (RowsOut): begin_tile(phase), then row(m)
// box_rows   rows per TMA tile of x: with few rows only those are loaded; results of stale rows are not stored
// WARPGROUP_ROWS  rows of y per warpgroup: ROWS, or more for a transposed tile
template <class P, class X, int WARPGROUP_ROWS, int BN, int WARPGROUPS, int STAGES, Split SPLIT, class Loader, class Out,
          class Act>
__device__ __forceinline__ void multiply_tiles(Loader loader, const TensorMap& w_map, const float* bias, Out out,
                                               long long M, u32 box_rows, u32 parts, const Act activation) {
    using O = Operands<P, X>;
    using Multiplied = typename MultipliedAs<P>::type;
    constexpr bool IS_TURNED = WARPGROUP_ROWS > ROWS;
    constexpr int COLUMNS = IS_TURNED ? WARPGROUP_ROWS : BN;  // N of the wgmma
    static_assert(!IS_TURNED || (O::is_direct && BN == ROWS && SPLIT == NONE),
                  "who turns tiles reads rows where they lie");
    constexpr int TAPS = Loader::TAPS, X_LINE = LINE / TAPS, STEPS_PER_TAP = O::STEPS / TAPS;
    static_assert(TAPS == 1 || (O::is_direct && sizeof(X) == 2), "tensor cores read several boxes where they lie");
    constexpr int BM = WARPGROUP_ROWS * WARPGROUPS, X_BYTES = O::X_BOXES * BM * LINE, W_BYTES = O::PARTS * BN * LINE;
    constexpr int STAGE_BYTES = X_BYTES + W_BYTES, SLICES_PER_PART = PART / O::DEPTH;
    extern __shared__ uint4 room[];
    __shared__ Signal full[STAGES], empty[STAGES];
    __shared__ __align__(16) float shifts[2][WARPGROUPS][BN];  // bias, double-buffered
    char* const stages = reinterpret_cast<char*>(room) + (-shared_address(room) & 1023);
    const int warpgroup = threadIdx.x / WARPGROUP;
    let_next_begin();
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            full[s].init(1);
            empty[s].init(4 * WARPGROUPS);
        }
        show_signals();
    }
    __syncthreads();
    // The tiles of this block and its slices of k.
    const long long N = out.N;
    const u32 rank = SPLIT == TOGETHER ? cluster_rank() : 0, phases = loader.phases();
    const u32 tiles = phases * Place<BM, BN>::count(M, N),
              step_tiles = SPLIT == TOGETHER ? gridDim.x / parts : gridDim.x;
    const auto slices_per_part = [&](u32 phase) {
        return SPLIT == NONE ? loader.slices(phase) : static_cast<int>((loader.slices(phase) + parts - 1) / parts);
    };
    const auto slices_of = [&](u32 phase) {
        const int all = loader.slices(phase), part = slices_per_part(phase);
        return SPLIT == TOGETHER ? min(part, all - static_cast<int>(rank) * part) : all;
    };
    const u32 first_tile = SPLIT == TOGETHER ? blockIdx.x / parts : blockIdx.x;
    const auto place_of = [&](u32 tile) { return Place<BM, BN>(M, N, phases == 1 ? tile : tile / phases); };
    const auto taps_of = [](int all_taps, int slice) { return TAPS == 1 ? 1 : min(TAPS, all_taps - slice * TAPS); };

    // Producer warpgroup: one thread issues all TMA loads.
    if (warpgroup == WARPGROUPS) {
        if constexpr (SPLIT != TOGETHER) keep_registers<40>();
        if (threadIdx.x % WARPGROUP != 0) return;
        const auto load_w = [&](u32 turn, int taps, int number, long long n) {
            const u32 s = turn % STAGES;
            full[s].arrive_expecting(O::X_BOXES * taps * box_rows * X_LINE + W_BYTES);
#pragma unroll
            for (int i = 0; i < O::PARTS; ++i)
                load_box(stages + s * STAGE_BYTES + X_BYTES + i * BN * LINE, w_map, full[s], number,
                         static_cast<int>(n), i);
        };
        // Loads of w do not wait for the previous kernel (programmatic dependent launch).
        const u32 first_phase = loader.phase_of(first_tile);
        const int ahead = first_tile < tiles ? min(slices_of(first_phase), STAGES) : 0;
        const long long first_n = place_of(first_tile).n;
        for (int i = 0; i < ahead; ++i) {
            const int slice = rank * slices_per_part(first_phase) + i;
            load_w(i, taps_of(loader.taps(first_phase), slice),
                   loader.first_number(first_phase) + slice * O::DEPTH, first_n);
        }
        wait_for_kernel_before();
        u32 turn = 0;
        for (u32 tile = first_tile; tile < tiles; tile += step_tiles) {
            const u32 phase = loader.phase_of(tile);
            const int begin = rank * slices_per_part(phase), end = begin + slices_of(phase);
            const int all_taps = loader.taps(phase), first_number = loader.first_number(phase);
            const Place<BM, BN> place = place_of(tile);
            loader.begin_tile(place.m, phase, begin);
            for (int slice = begin; slice < end; ++slice, ++turn) {
                const u32 s = turn % STAGES;
                const int taps = taps_of(all_taps, slice);
                if (turn >= ahead) {
                    empty[s].wait(turn / STAGES % 2 ^ 1);
                    load_w(turn, taps, first_number + slice * O::DEPTH, place.n);
                }
#pragma unroll
                for (int i = 0; i < O::X_BOXES * TAPS; ++i)
                    if (TAPS == 1 || i < taps)
                        loader.template load<O::DEPTH, O::X_BOXES>(stages + s * STAGE_BYTES + i * BM * X_LINE, full[s],
                                                                   slice, i);
            }
        }
        return;
    }

    // Consumer warpgroups.
    if constexpr (SPLIT != TOGETHER) take_registers<WARPGROUPS == 2 ? 232 : 240>();
    const int warp = threadIdx.x % WARPGROUP / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    const int row = WARPGROUP_ROWS * warpgroup + 16 * warp + row_of<P, X>(g);
    if (out.other != nullptr) wait_for_kernel_before();  // it may write the residual
    char* const outlet = stages + STAGES * STAGE_BYTES + warpgroup * (WARPGROUP_ROWS * LINE);  // of a transposed tile
    u32 turn = 0;
    int now = 0;
    long long column = -1;
    for (u32 tile = first_tile; tile < tiles; tile += step_tiles) {
        const u32 phase = loader.phase_of(tile);
        const int slices = slices_of(phase), part_slices = slices_per_part(phase), all_taps = loader.taps(phase);
        const Place<BM, BN> place = place_of(tile);
        out.begin_tile(phase);
        // Another column, another bias. __any_sync makes the branch uniform: else the compiler serialises the wgmma.
        const bool is_beside = __any_sync(~0u, place.n != column);
        if (is_beside) {
            now ^= 1, column = place.n;
            for (int i = threadIdx.x % WARPGROUP; i < BN; i += WARPGROUP)
                shifts[now][warpgroup][i] = bias != nullptr && column + i < N ? bias[column + i] : 0.0f;
        }
        if constexpr (IS_TURNED) {
            if (out.other != nullptr) {
                wait_for_warpgroup(warpgroup);  // the stores of the previous tile have read the buffer
                Outlet<WARPGROUP_ROWS, typename Out::Element>{outlet}.fetch(out, place.m + WARPGROUP_ROWS * warpgroup, place.n);
            }
        }
        float sums[COLUMNS / 8][4];
        float totals[O::PARTS == 2 ? BN / 8 : 1][4] = {}, whole[SPLIT == ALONE ? BN / 8 : 1][4] = {};
        int in_part = 0;  // slices done of the current part of k
        // Whether the next wgmma accumulates; else it overwrites.
        const auto adds = [&] { return O::PARTS == 2 ? in_part % SLICES_PER_PART != 0 : in_part != 0; };
        // After the wgmma of a slice: moves finished partial sums to their totals.
        const auto end_slice = [&](int slice) {
            ++in_part, ++turn;
            const bool ends = slice + 1 == slices || (SPLIT == ALONE && in_part == part_slices);
            if constexpr (O::PARTS == 2) {
                if (in_part % SLICES_PER_PART == 0 || ends) add_up(totals, sums);
            }
            if constexpr (SPLIT == ALONE) {
                if (!ends) return;
                if constexpr (O::is_direct) wait_for_products<0>();
                if constexpr (O::PARTS == 2) add_up(whole, totals), clear(totals);
                else add_up(whole, sums);
                in_part = 0;
            }
        };
        if constexpr (O::is_direct) {
            for (int slice = 0; slice < slices; ++slice) {
                const u32 s = turn % STAGES, stage_at = shared_address(stages + s * STAGE_BYTES),
                          w_at = stage_at + X_BYTES;
                const int taps = taps_of(all_taps, rank * part_slices + slice);
                full[s].wait(turn / STAGES % 2);
                const auto add_step = [&](int step) {
                    const u32 box_at = stage_at + step / STEPS_PER_TAP * (BM * X_LINE) + warpgroup * (WARPGROUP_ROWS * X_LINE);
                    const unsigned long long x = mixed_tile<X_LINE>(box_at + step % STEPS_PER_TAP * 32);
                    const unsigned long long w = mixed_tile(w_at + 32 * step);
                    Wgmma<P, COLUMNS>::add(sums, IS_TURNED ? w : x, IS_TURNED ? x : w, adds() || step > 0);
                };
                if (TAPS == 1 || taps == TAPS) {
                    begin_products();
#pragma unroll
                    for (int step = 0; step < O::STEPS; ++step) add_step(step);
                    end_products();
                } else {  // further steps would read stale data; one group per step, else the compiler adds fences
#pragma unroll
                    for (int step = 0; step < O::STEPS - STEPS_PER_TAP; ++step) {
                        if (step > 0 && step / STEPS_PER_TAP == taps) break;
                        begin_products();
                        add_step(step);
                        end_products();
                    }
                }
                // The wgmma of the previous slice are done: release its stage.
                wait_for_products<1>();
                if (slice > 0 && threadIdx.x % 32 == 0) empty[(turn - 1) % STAGES].arrive();
                end_slice(slice);
            }
        } else {
            const auto read_rows = [&](Rows<P>& to, u32 of) {
                full[of % STAGES].wait(of / STAGES % 2);
                to.template read<BM>(stages + of % STAGES * STAGE_BYTES, row, q);
            };
            const auto multiply = [&](int slice, const Rows<P>& rows, Rows<P>& next) {
                const u32 w_at = shared_address(stages + turn % STAGES * STAGE_BYTES) + X_BYTES;
                begin_products();
#pragma unroll
                for (int step = 0; step < O::STEPS; ++step) {
                    const unsigned long long upper = mixed_tile(w_at + 32 * step);
                    if constexpr (O::PARTS == 2) {
                        const unsigned long long lower = mixed_tile(w_at + BN * LINE + 32 * step);
                        Wgmma<Multiplied, BN>::add(sums, rows.low[step], upper, adds() || step > 0);
                        Wgmma<Multiplied, BN>::add(sums, rows.a[step], lower, true);
                    }
                    Wgmma<Multiplied, BN>::add(sums, rows.a[step], upper, O::PARTS == 2 || adds() || step > 0);
                }
                end_products();
                if (slice + 1 < slices) read_rows(next, turn + 1);  // overlaps the wgmma
                wait_for_products<0>();
                if (threadIdx.x % 32 == 0) empty[turn % STAGES].arrive();
                end_slice(slice);
            };
            Rows<P> even, odd;
            read_rows(even, turn);
            for (int slice = 0; slice < slices; slice += 2) {
                multiply(slice, even, odd);
                if (slice + 1 < slices) multiply(slice + 1, odd, even);
            }
        }
        if constexpr (O::is_direct) {
            wait_for_products<0>();
            if (threadIdx.x % 32 == 0) empty[(turn - 1) % STAGES].arrive();
        }
        if (is_beside) wait_for_warpgroup(warpgroup);  // for the bias
        auto& made = pick<SPLIT == ALONE, O::PARTS == 2>(whole, totals, sums);
        if constexpr (SPLIT == TOGETHER) {
            static_assert(WARPGROUPS == 1, "a team a block");
            float* const mine = reinterpret_cast<float*>(stages + STAGES * STAGE_BYTES);
            add_up_together<BN>(made, mine, row, q, rank, parts, out, shifts[now][0], place.m, place.n, M, activation);
            return;  // a cluster has one tile
        } else if constexpr (IS_TURNED) {
            finish_turned<WARPGROUP_ROWS>(made, out, outlet, shifts[now][warpgroup], place.m + WARPGROUP_ROWS * warpgroup, place.n, warpgroup,
                                     activation);
        } else {
            finish_rows<BN>(made, out, shifts[now][warpgroup], place.m + row, place.n, q, activation);
        }
    }
}
