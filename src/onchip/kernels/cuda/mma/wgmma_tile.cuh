// mma/wgmma_tile.cuh: persistent, warp-specialised GEMM y = activation(x w^T + bias): TMA, mbarriers, wgmma, split-K.
// The mainloop and epilogue of gemm/sm90.cu and conv/sm90.cu, which differ in how they load x. Host: mma/wgmma_tile.py.
//
// Idea    A persistent block computes tile after tile of y. A producer warp loads tiles of x and w, 128 bytes of k
//         each, by TMA into STAGES stages guarded by full and empty mbarriers. Consumer warpgroups multiply 64 rows
//         each by wgmma. The loads of the next tile overlap the epilogue. wgmma reads x from shared memory where x
//         has the operand type (TMA rounds float32 to tf32); else x is rounded or split (3xTF32) in registers.
// Order   k in order, STEP elements per instruction; fp32 partial sums are added to a total every PART elements, since
//         the tensor cores truncate when they accumulate. Then the bias. Independent of the tile and of M.
// Floor   2 M N K flop. 8,192 cubed in fp16: 1.1 Tflop / 989 Tflop/s = 1.11 ms; in fp32: 3 * 1.1 / 494.5 = 6.67 ms.
//         m64n256 takes 128 cycles and reads 10 KB of shared memory, which can deliver 16 KB in that time.
// Layout  x (M, K), y (M, N) row-major, w (SPLITS, N, K), for fp32 the upper tf32, then the lower; bias (N) or none.
// Shared  STAGES * (X_TILES * BM + SPLITS * BN) * 128 B, 1 KB of alignment, mbarriers: 197 KB + 1 KB for 128 x 256 in
//         four stages of fp16. A transposed tile adds 128 B per row.
// Limits  Rows of x and w are multiples of 16 B; M < 2^31; sm_90a.
#pragma once

#include "mma/tma.cuh"
#include "mma/cluster_reduce.cuh"
#include "common/epilogue.cuh"
#include "mma/wgmma.cuh"

constexpr int WARPGROUP = 128, ROWS = 64;  // a warpgroup: threads, and rows of its tile
constexpr int LINE = 128;  // bytes of k in a TMA tile
constexpr int PART = 32;   // elements of k per fp32 partial sum

template <class P>
struct MmaPrecision {
    using type = P;
};
template <>
struct MmaPrecision<Fp32> {
    using type = Tf32;
};

template <class P, class X>
struct Operands {
    static constexpr bool is_direct = is_same<X, typename P::Element> && !is_same<P, Fp32>;  // wgmma reads x from smem
    static constexpr int SPLITS = is_same<P, Fp32> ? 2 : 1;  // of w: upper and lower tf32
    static constexpr int DEPTH = LINE / 4 * P::PER_WORD;  // elements of k per TMA tile of w
    static constexpr int X_TILES = DEPTH * static_cast<int>(sizeof(X)) / LINE;
    static constexpr int STEPS = DEPTH / P::STEP;
};

// The row of x in fragment row g. Permuted where a row takes two TMA tiles, to avoid bank conflicts.
template <class P, class X>
__device__ __forceinline__ int row_of(int g) {
    return Operands<P, X>::X_TILES == 2 ? g % 4 * 2 + g / 4 : g;
}

// A slice of float32 rows as A fragments in registers, rounded or split (3xTF32).
template <class P>
struct Rows {
    static constexpr int STEPS = LINE / 32;
    u32 a[STEPS][4], low[is_same<P, Fp32> ? STEPS : 1][4];

    // Reads rows r and r + 8 from swizzled TMA tiles (mma/tma.cuh) of BM rows.
    template <int BM>
    __device__ __forceinline__ void read(const char* x_tiles, int r, int q) {
#pragma unroll
        for (int i = 0; i < 4 * STEPS; ++i) {
            const int step = i / 4, word = i % 4 / 2, row = r + i % 2 * 8;
            const int column = step * P::STEP + (P::PER_WORD == 2 ? 2 * q + word * 8 : q + word * 4);
            const char* line = x_tiles + column / 32 * (BM * LINE) + row * LINE;
            const char* at = line + (column % 32 * 4 ^ row % 8 * 16);
            if constexpr (P::PER_WORD == 2) {
                const float2 pair = *reinterpret_cast<const float2*>(at);
                a[step][i % 4] = pack<typename P::Element>(pair.x, pair.y);
            } else {
                const float v = *reinterpret_cast<const float*>(at);
                a[step][i % 4] = Tf32::word(v);
                if constexpr (is_same<P, Fp32>) low[step][i % 4] = Tf32::word(v - __uint_as_float(a[step][i % 4]));
            }
        }
    }
};

template <int J>
__device__ __forceinline__ void accumulate(float (&to)[J][4], const float (&more)[J][4]) {
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

// Split-K epilogue: each block writes its partial sums of the tile to shared memory, then reduces its share of the tile
// over DSMEM, in rank order, and stores it.
template <int BN, class Out, class Act>
__device__ __forceinline__ void cluster_reduce(const float (&c)[BN / 8][4], float* partial, int row, int q, u32 rank,
                                               u32 split_k, const Out& out, const float* smem_bias, long long m,
                                               long long n, long long M, const Act& activation) {
    constexpr int STRIDE = BN + 8;  // +8: the same columns of eight rows are in different banks
#pragma unroll
    for (int i = 0; i < BN / 4; ++i) {
        float2* const to = reinterpret_cast<float2*>(partial + (row + i % 2 * 8) * STRIDE + i / 2 * 8 + 2 * q);
        *to = {c[i / 2][i % 2 * 2], c[i / 2][i % 2 * 2 + 1]};
    }
    cluster_sync();
    const int rows = static_cast<int>(M - m < ROWS ? M - m : ROWS);
    const auto read = [&](int i, u32 split) {
        return dsmem_load4(partial + i / (BN / 4) * STRIDE + i % (BN / 4) * 4, split);
    };
    const auto store = [&](int i, float (&four)[4]) {
        const int column = i % (BN / 4) * 4;
        const long long at = out.row(m + i / (BN / 4)), left = out.N - n - column;
        if (at < 0 || left <= 0) return;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            four[k] += smem_bias[column + k];
            if (out.residual != nullptr && k < left) four[k] += to_float(out.residual[at + n + column + k]);
        }
        finish(four, out.y + at + n + column, nullptr, left, out.N % 4 == 0, activation);
    };
    reduce_partial_sums<8>(rank * WARPGROUP + threadIdx.x, WARPGROUP * split_k, rows * (BN / 4), split_k, read, store);
    cluster_sync();  // no block overwrites or exits while others read its shared memory
}

// -- transposed tiles ------------------------------------------------------------------------------------------------
// For narrow y, wgmma operands are swapped: 64 columns of y are the rows of A, and 128 rows of y the columns of B. With
// N = 64, reading shared memory would take twice the time of the wgmma. The epilogue transposes the tile back.

// Staging buffer of a transposed tile: R rows of y, 64 columns (128 bytes) each, swizzled by 16-byte chunks.
template <int R, class Y>
struct StagingTile {
    static_assert(sizeof(Y) == 2, "only 16-bit results are transposed");
    char* smem;

    __device__ __forceinline__ uint4* chunk(int row, int i) const {
        return reinterpret_cast<uint4*>(smem + row * LINE + ((i ^ row % 8) * 16));
    }
    __device__ __forceinline__ u32 word(int row, int column) const {
        return *reinterpret_cast<const u32*>(reinterpret_cast<const char*>(chunk(row, column / 8)) + column % 8 * 2);
    }
    // Calls move(offset in y, chunk) for chunks from (m, n) on. Full 128-byte lines: L2 takes as long for a sector.
    template <class Out, class Move>
    __device__ __forceinline__ void each(const Out& out, long long m, long long n, Move move) const {
        const int i = threadIdx.x % 8;
#pragma unroll 4
        for (int row = threadIdx.x % WARPGROUP / 8; row < R; row += WARPGROUP / 8) {
            const long long at = out.row(m + row);
            if (at >= 0 && n + 8 * i < out.N) move(at + n + 8 * i, chunk(row, i));
        }
    }
    // Prefetches the residual by cp.async, during the mainloop.
    template <class Out>
    __device__ __forceinline__ void prefetch_residual(const Out& out, long long m, long long n) const {
        each(out, m, n, [&](long long at, uint4* to) {
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(shared_address(to)), "l"(out.residual + at)
                         : "memory");
        });
    }
};

// Epilogue of a warpgroup's transposed tile: R rows of y from m on; warp w has the 16 columns from n + 16 w on.
// smem_bias  the bias of the 64 columns, or zeros
template <int R, class Out, class Act>
__device__ __forceinline__ void finish_transposed(float (&c)[R / 8][4], const Out& out, char* smem,
                                                  const float* smem_bias, long long m, long long n, int warpgroup,
                                                  const Act& activation) {
    using Y = typename Out::Element;
    const StagingTile<R, Y> staging{smem};
    const int warp = threadIdx.x % WARPGROUP / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < R / 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) c[j][i] += smem_bias[16 * warp + g + i / 2 * 8];
    if (out.residual != nullptr) asm volatile("cp.async.wait_all;" ::: "memory");
    wait_for_warpgroup(warpgroup);  // the residual has landed; the stores of the previous tile have read the buffer
    if (out.residual != nullptr) {
#pragma unroll
        for (int j = 0; j < R / 8; ++j)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const u32 pair = transposed(staging.word(8 * j + g, 16 * warp + 8 * half + 2 * q));
                c[j][2 * half] += to_float(Y{static_cast<unsigned short>(pair)});
                c[j][2 * half + 1] += to_float(Y{static_cast<unsigned short>(pair >> 16)});
            }
        wait_for_warpgroup(warpgroup);
    }
    activate_all<Y>(c, activation);
#pragma unroll
    for (int j = 0; j < R / 8; j += 2) {
        u32 words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            words[i] = transposed(pack<Y>(c[j + i / 2][2 * (i % 2)], c[j + i / 2][2 * (i % 2) + 1]));
        transpose_words(words, q);
        *staging.chunk(8 * (j + q / 2) + g, 2 * warp + q % 2) = {words[0], words[1], words[2], words[3]};
    }
    wait_for_warpgroup(warpgroup);
    staging.each(out, m, n, [&](long long at, const uint4* from) { *reinterpret_cast<uint4*>(out.y + at) = *from; });
}

// Split-K: an output is the sum of split_k partial sums, each over a range of k. SEQUENTIAL: a block computes them one
// after another. CLUSTER: each block of a cluster computes one; the cluster reduces them in the same order (one tile).
enum Split { NONE, SEQUENTIAL, CLUSTER };

// Slices of k of a single GEMM. Other loaders have phases: GEMMs of the same M, each with its range of w. A slice of
// x is one TMA tile of 128 bytes per row, or up to TAPS tiles of 128 / TAPS bytes.
struct SinglePhase {
    int all_slices;

    static constexpr int TAPS = 1;
    __device__ __forceinline__ u32 phases() const { return 1; }
    __device__ __forceinline__ u32 phase_of(u32) const { return 0; }
    __device__ __forceinline__ int first_k(u32) const { return 0; }
    __device__ __forceinline__ int slices(u32) const { return all_slices; }
    __device__ __forceinline__ int taps(u32) const { return 1; }
};

// The kernel body: WARPGROUPS consumer warpgroups and one producer warpgroup, WARPGROUP * (WARPGROUPS + 1) threads.
// loader  slices and taps of a phase (SinglePhase), and TMA loads of x: begin_tile(m, phase, slice), then
//         load<DEPTH, X_TILES>(to, mbarrier, slice, x_tile) for each tile of this slice and the next ones, in order
// out     offsets of rows of y (RowsOut): begin_tile(phase), then row(m)
// x_tile_rows     rows per TMA tile of x: if M is small, only M rows are loaded; results of stale rows are not stored
// WARPGROUP_ROWS  rows of y per warpgroup: ROWS, or more for a transposed tile
template <class P, class X, int WARPGROUP_ROWS, int BN, int WARPGROUPS, int STAGES, Split SPLIT, class Loader,
          class Out, class Act>
__device__ __forceinline__ void multiply_tiles(Loader loader, const TensorMap& w_map, const float* bias, Out out,
                                               long long M, u32 x_tile_rows, u32 split_k, const Act activation) {
    using O = Operands<P, X>;
    using Precision = typename MmaPrecision<P>::type;
    constexpr bool IS_TRANSPOSED = WARPGROUP_ROWS > ROWS;
    constexpr int COLUMNS = IS_TRANSPOSED ? WARPGROUP_ROWS : BN;  // N of the wgmma
    static_assert(!IS_TRANSPOSED || (O::is_direct && BN == ROWS && SPLIT == NONE),
                  "transposed tiles need x in shared memory, BN = 64 and no split-K");
    constexpr int TAPS = Loader::TAPS, X_LINE = LINE / TAPS, STEPS_PER_TAP = O::STEPS / TAPS;
    static_assert(TAPS == 1 || (O::is_direct && sizeof(X) == 2), "several taps per slice need 16-bit x in smem");
    constexpr int BM = WARPGROUP_ROWS * WARPGROUPS, X_BYTES = O::X_TILES * BM * LINE, W_BYTES = O::SPLITS * BN * LINE;
    constexpr int STAGE_BYTES = X_BYTES + W_BYTES, SLICES_PER_SUM = PART / O::DEPTH;
    extern __shared__ uint4 smem[];
    __shared__ Mbarrier full[STAGES], empty[STAGES];
    __shared__ __align__(16) float smem_bias[2][WARPGROUPS][BN];  // bias, double-buffered
    char* const stages = reinterpret_cast<char*>(smem) + (-shared_address(smem) & 1023);
    const int warpgroup = threadIdx.x / WARPGROUP;
    launch_dependent_grids();
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            full[s].init(1);
            empty[s].init(4 * WARPGROUPS);
        }
        fence_mbarriers();
    }
    __syncthreads();
    // The tiles of this block and its slices of k.
    const long long N = out.N;
    const u32 rank = SPLIT == CLUSTER ? cluster_rank() : 0, phases = loader.phases();
    const u32 tiles = phases * TileOrigin<BM, BN>::count(M, N),
              step_tiles = SPLIT == CLUSTER ? gridDim.x / split_k : gridDim.x;
    const auto slices_per_split = [&](u32 phase) {
        return SPLIT == NONE ? loader.slices(phase) : static_cast<int>((loader.slices(phase) + split_k - 1) / split_k);
    };
    const auto slices_of = [&](u32 phase) {
        const int all = loader.slices(phase), count = slices_per_split(phase);
        return SPLIT == CLUSTER ? min(count, all - static_cast<int>(rank) * count) : all;
    };
    const u32 first_tile = SPLIT == CLUSTER ? blockIdx.x / split_k : blockIdx.x;
    const auto origin_of = [&](u32 tile) { return TileOrigin<BM, BN>(M, N, phases == 1 ? tile : tile / phases); };
    const auto taps_of = [](int all_taps, int slice) { return TAPS == 1 ? 1 : min(TAPS, all_taps - slice * TAPS); };

    // Producer warpgroup: one thread issues all TMA loads.
    if (warpgroup == WARPGROUPS) {
        if constexpr (SPLIT != CLUSTER) warpgroup_reg_dealloc<40>();
        if (threadIdx.x % WARPGROUP != 0) return;
        const auto load_w = [&](u32 iteration, int taps, int k, long long n) {
            const u32 s = iteration % STAGES;
            full[s].arrive_expect_tx(O::X_TILES * taps * x_tile_rows * X_LINE + W_BYTES);
#pragma unroll
            for (int i = 0; i < O::SPLITS; ++i)
                tma_load(stages + s * STAGE_BYTES + X_BYTES + i * BN * LINE, w_map, full[s], k,
                         static_cast<int>(n), i);
        };
        // Loads of w do not wait for the previous kernel (programmatic dependent launch).
        const u32 first_phase = loader.phase_of(first_tile);
        const int prefetched = first_tile < tiles ? min(slices_of(first_phase), STAGES) : 0;
        const long long first_n = origin_of(first_tile).n;
        for (int i = 0; i < prefetched; ++i) {
            const int slice = rank * slices_per_split(first_phase) + i;
            load_w(i, taps_of(loader.taps(first_phase), slice),
                   loader.first_k(first_phase) + slice * O::DEPTH, first_n);
        }
        wait_on_dependent_grids();
        u32 iteration = 0;
        for (u32 tile = first_tile; tile < tiles; tile += step_tiles) {
            const u32 phase = loader.phase_of(tile);
            const int begin = rank * slices_per_split(phase), end = begin + slices_of(phase);
            const int all_taps = loader.taps(phase), first_k = loader.first_k(phase);
            const TileOrigin<BM, BN> origin = origin_of(tile);
            loader.begin_tile(origin.m, phase, begin);
            for (int slice = begin; slice < end; ++slice, ++iteration) {
                const u32 s = iteration % STAGES;
                const int taps = taps_of(all_taps, slice);
                if (iteration >= prefetched) {
                    empty[s].wait(iteration / STAGES % 2 ^ 1);
                    load_w(iteration, taps, first_k + slice * O::DEPTH, origin.n);
                }
#pragma unroll
                for (int i = 0; i < O::X_TILES * TAPS; ++i)
                    if (TAPS == 1 || i < taps)
                        loader.template load<O::DEPTH, O::X_TILES>(stages + s * STAGE_BYTES + i * BM * X_LINE, full[s],
                                                                   slice, i);
            }
        }
        return;
    }

    // Consumer warpgroups.
    if constexpr (SPLIT != CLUSTER) warpgroup_reg_alloc<WARPGROUPS == 2 ? 232 : 240>();
    const int warp = threadIdx.x % WARPGROUP / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    const int row = WARPGROUP_ROWS * warpgroup + 16 * warp + row_of<P, X>(g);
    if (out.residual != nullptr) wait_on_dependent_grids();  // the previous kernel may write the residual
    char* const staging = stages + STAGES * STAGE_BYTES + warpgroup * (WARPGROUP_ROWS * LINE);  // of a transposed tile
    u32 iteration = 0;
    int side = 0;
    long long column = -1;
    for (u32 tile = first_tile; tile < tiles; tile += step_tiles) {
        const u32 phase = loader.phase_of(tile);
        const int slices = slices_of(phase), split_slices = slices_per_split(phase), all_taps = loader.taps(phase);
        const TileOrigin<BM, BN> origin = origin_of(tile);
        out.begin_tile(phase);
        // A new column needs a new bias. __any_sync makes the branch uniform: else the compiler serialises the wgmma.
        const bool is_new_column = __any_sync(~0u, origin.n != column);
        if (is_new_column) {
            side ^= 1, column = origin.n;
            for (int i = threadIdx.x % WARPGROUP; i < BN; i += WARPGROUP)
                smem_bias[side][warpgroup][i] = bias != nullptr && column + i < N ? bias[column + i] : 0.0f;
        }
        if constexpr (IS_TRANSPOSED) {
            if (out.residual != nullptr) {
                wait_for_warpgroup(warpgroup);  // the stores of the previous tile have read the buffer
                StagingTile<WARPGROUP_ROWS, typename Out::Element>{staging}.prefetch_residual(
                    out, origin.m + WARPGROUP_ROWS * warpgroup, origin.n);
            }
        }
        float sums[COLUMNS / 8][4];
        float totals[O::SPLITS == 2 ? BN / 8 : 1][4] = {}, split_sums[SPLIT == SEQUENTIAL ? BN / 8 : 1][4] = {};
        int slices_done = 0;  // in this range of k
        // Whether the next wgmma accumulates; else it overwrites.
        const auto adds = [&] { return O::SPLITS == 2 ? slices_done % SLICES_PER_SUM != 0 : slices_done != 0; };
        // After the wgmma of a slice: adds finished partial sums to their totals.
        const auto finish_slice = [&](int slice) {
            ++slices_done, ++iteration;
            const bool ends = slice + 1 == slices || (SPLIT == SEQUENTIAL && slices_done == split_slices);
            if constexpr (O::SPLITS == 2) {
                if (slices_done % SLICES_PER_SUM == 0 || ends) accumulate(totals, sums);
            }
            if constexpr (SPLIT == SEQUENTIAL) {
                if (!ends) return;
                if constexpr (O::is_direct) wgmma_wait<0>();
                if constexpr (O::SPLITS == 2) accumulate(split_sums, totals), clear(totals);
                else accumulate(split_sums, sums);
                slices_done = 0;
            }
        };
        if constexpr (O::is_direct) {
            for (int slice = 0; slice < slices; ++slice) {
                const u32 s = iteration % STAGES, stage_at = shared_address(stages + s * STAGE_BYTES),
                          w_at = stage_at + X_BYTES;
                const int taps = taps_of(all_taps, rank * split_slices + slice);
                full[s].wait(iteration / STAGES % 2);
                const auto add_step = [&](int step) {
                    const u32 x_at = stage_at + step / STEPS_PER_TAP * (BM * X_LINE) +
                                     warpgroup * (WARPGROUP_ROWS * X_LINE);
                    const unsigned long long x = swizzled_descriptor<X_LINE>(x_at + step % STEPS_PER_TAP * 32);
                    const unsigned long long w = swizzled_descriptor(w_at + 32 * step);
                    Wgmma<P, COLUMNS>::add(sums, IS_TRANSPOSED ? w : x, IS_TRANSPOSED ? x : w, adds() || step > 0);
                };
                if (TAPS == 1 || taps == TAPS) {
                    wgmma_fence();
#pragma unroll
                    for (int step = 0; step < O::STEPS; ++step) add_step(step);
                    wgmma_commit();
                } else {  // further steps would read stale data; one group per step, else the compiler adds fences
#pragma unroll
                    for (int step = 0; step < O::STEPS - STEPS_PER_TAP; ++step) {
                        if (step > 0 && step / STEPS_PER_TAP == taps) break;
                        wgmma_fence();
                        add_step(step);
                        wgmma_commit();
                    }
                }
                // The wgmma of the previous slice are done: release its stage.
                wgmma_wait<1>();
                if (slice > 0 && threadIdx.x % 32 == 0) empty[(iteration - 1) % STAGES].arrive();
                finish_slice(slice);
            }
        } else {
            const auto read_rows = [&](Rows<P>& to, u32 of) {
                full[of % STAGES].wait(of / STAGES % 2);
                to.template read<BM>(stages + of % STAGES * STAGE_BYTES, row, q);
            };
            const auto multiply = [&](int slice, const Rows<P>& rows, Rows<P>& next) {
                const u32 w_at = shared_address(stages + iteration % STAGES * STAGE_BYTES) + X_BYTES;
                wgmma_fence();
#pragma unroll
                for (int step = 0; step < O::STEPS; ++step) {
                    const unsigned long long upper = swizzled_descriptor(w_at + 32 * step);
                    if constexpr (O::SPLITS == 2) {
                        const unsigned long long lower = swizzled_descriptor(w_at + BN * LINE + 32 * step);
                        Wgmma<Precision, BN>::add(sums, rows.low[step], upper, adds() || step > 0);
                        Wgmma<Precision, BN>::add(sums, rows.a[step], lower, true);
                    }
                    Wgmma<Precision, BN>::add(sums, rows.a[step], upper, O::SPLITS == 2 || adds() || step > 0);
                }
                wgmma_commit();
                if (slice + 1 < slices) read_rows(next, iteration + 1);  // overlaps the wgmma
                wgmma_wait<0>();
                if (threadIdx.x % 32 == 0) empty[iteration % STAGES].arrive();
                finish_slice(slice);
            };
            Rows<P> even, odd;
            read_rows(even, iteration);
            for (int slice = 0; slice < slices; slice += 2) {
                multiply(slice, even, odd);
                if (slice + 1 < slices) multiply(slice + 1, odd, even);
            }
        }
        if constexpr (O::is_direct) {
            wgmma_wait<0>();
            if (threadIdx.x % 32 == 0) empty[(iteration - 1) % STAGES].arrive();
        }
        if (is_new_column) wait_for_warpgroup(warpgroup);  // the bias has been written
        auto& tile_sums = pick<SPLIT == SEQUENTIAL, O::SPLITS == 2>(split_sums, totals, sums);
        if constexpr (SPLIT == CLUSTER) {
            static_assert(WARPGROUPS == 1, "cluster split-K has one warpgroup per block");
            float* const partial = reinterpret_cast<float*>(stages + STAGES * STAGE_BYTES);
            cluster_reduce<BN>(tile_sums, partial, row, q, rank, split_k, out, smem_bias[side][0], origin.m, origin.n,
                               M, activation);
            return;  // a cluster has one tile
        } else if constexpr (IS_TRANSPOSED) {
            finish_transposed<WARPGROUP_ROWS>(tile_sums, out, staging, smem_bias[side][warpgroup],
                                              origin.m + WARPGROUP_ROWS * warpgroup, origin.n, warpgroup, activation);
        } else {
            finish_rows<BN>(tile_sums, out, smem_bias[side][warpgroup], origin.m + row, origin.n, q, activation);
        }
    }
}
