// mma/wgmma_tile.cuh: y = activation(x w^T + bias) in tiles, at Hopper's tensor cores: the main loop of gemm/sm90.cu and
// conv/sm90.cu, which differ in how boxes of rows are brought. sm_90a.
//
// Idea    A block stays on its multiprocessor and makes tile after tile of y. One warp has boxes of x and w of the same
//         128 bytes of k brought to shared memory, STAGES of them at a time; TEAMS times four warps multiply what is
//         there, 64 rows each, and give the room back. While they finish a tile, the boxes of the next are on their way.
//         Rows that are what the tensor cores multiply are read by them where they lie; the accelerator rounds float32
//         to tf32 on the way. Other rows of float32 go through registers, rounded there, or split: a float32 is the
//         sum of two tf32, and three products make one.
// Order   A sum runs over k, STEP terms an instruction; of float32, it is added to a total every PART terms, since the
//         tensor cores cut off what they do not keep. Then comes the bias. Neither the tile nor M decides anything.
// Floor   2 M N K flop. 8,192 cubed in fp16: 1.1 Tflop / 989 Tflop/s = 1.11 ms; in fp32: 3 * 1.1 / 494.5 = 6.67 ms.
//         A step of 64 rows and 256 columns takes 128 cycles and reads 10 KB of shared memory, of 16.
//         Where y has few columns, 64 of them read as many bytes of shared memory as 64 rows do, which takes twice the
//         products' time. There a team's tile is turned: 64 columns of y are what 64 rows are elsewhere, and 128 rows of y
//         its columns. What a lane then has of neighbouring rows is turned to neighbouring columns on the way out.
//         Few rows come in boxes of as many: zeros for those that are not there would cost time, and nobody looks at
//         what is made of the room that they leave as it was.
// Layout  x (M, K), y (M, N) row-major, w (PARTS, N, K): of fp32 the upper parts, then the lower ones; bias (N) or none.
// Shared  STAGES * (TEAMS * 64 * X_BYTES + PARTS * BN * 128) B, and 1 KB to begin at a multiple of it, and signals:
//         197 KB + 1 KB for 128 x 256 in four stages of fp16. A turned tile leaves by 128 B a row more.
// Limits  Rows of x and w are a multiple of 16 B long; M < 2^31; sm_90a.
#pragma once

#include "mma/tma.cuh"
#include "mma/cluster_reduce.cuh"
#include "common/epilogue.cuh"
#include "mma/wgmma.cuh"

constexpr int TEAM = 128, ROWS = 64;  // threads, and what they make of a tile
constexpr int LINE = 128;             // bytes of k in a box
constexpr int PART = 32;              // terms of a sum of float32

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
    static constexpr bool is_direct = is_same<X, typename P::Number> && !is_same<P, Fp32>;  // no register between
    static constexpr int PARTS = is_same<P, Fp32> ? 2 : 1;  // of w
    static constexpr int DEPTH = LINE / 4 * P::PER_WORD;  // numbers of k in a box of w
    static constexpr int X_BOXES = DEPTH * static_cast<int>(sizeof(X)) / LINE;
    static constexpr int STEPS = DEPTH / P::STEP;
};

// The lane's first row of the 8 that a fragment's rows g are: such that neighbouring lanes find theirs in other banks.
template <class P, class X>
__device__ __forceinline__ int row_of(int g) {
    return Operands<P, X>::X_BOXES == 2 ? g % 4 * 2 + g / 4 : g;
}

// A slice of rows of float32 as the tensor cores take it from registers.
template <class P>
struct Rows {
    static constexpr int STEPS = LINE / 32;
    u32 a[STEPS][4], low[is_same<P, Fp32> ? STEPS : 1][4];

    // From mixed boxes (mma/tma.cuh) of BM rows, of which row r and the one 8 below are the lane's.
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
                a[step][i % 4] = pack<typename P::Number>(two.x, two.y);
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

// The tile of a cluster whose blocks have a part of every sum each: all leave theirs in shared memory, and each adds up
// some numbers of the tile, part by part.
template <int BN, class Out, class Act>
__device__ __forceinline__ void add_up_together(const float (&c)[BN / 8][4], float* mine, int row, int q, u32 rank,
                                                u32 parts, const Out& out, const float* shifts, long long m,
                                                long long n, long long M, const Act& activation) {
    constexpr int STRIDE = BN + 8;  // eight rows' same columns lie in different banks
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
    add_up_parts<8>(rank * TEAM + threadIdx.x, TEAM * parts, rows * (BN / 4), parts, read, give);
    wait_for_cluster();  // nobody still reads what is written next, or goes
}

// A turned tile's way out: R rows of y, 64 columns of each, 128 bytes a row in shared memory. Pieces of 16 bytes are mixed
// so that eight rows' same piece, and a row's eight pieces, lie in different banks.
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
    // Calls move(row, piece) for rows from m on and pieces of columns from n on, where there are any, of a team's threads:
    // whole lines at a time, since L2 takes as long for a sector. N is a multiple of 8.
    template <class Out, class Move>
    __device__ __forceinline__ void each(const Out& out, long long m, long long n, Move move) const {
        const int i = threadIdx.x % 8;
#pragma unroll 4
        for (int row = threadIdx.x % TEAM / 8; row < R; row += TEAM / 8) {
            const long long at = out.row(m + row);
            if (at >= 0 && n + 8 * i < out.N) move(at + n + 8 * i, piece(row, i));
        }
    }
    // What is added to y, while the products are made.
    template <class Out>
    __device__ __forceinline__ void fetch(const Out& out, long long m, long long n) const {
        each(out, m, n, [&](long long at, uint4* to) {
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(shared_address(to)), "l"(out.other + at)
                         : "memory");
        });
    }
};

// A turned tile of a team: what a lane of warp w has of two of 16 columns of y from n + 16 w on, and of R rows from m on.
// shifts  the bias of the 64 columns, or zeros
template <int R, class Out, class Act>
__device__ __forceinline__ void finish_turned(float (&c)[R / 8][4], const Out& out, char* room, const float* shifts,
                                              long long m, long long n, int team, const Act& activation) {
    using Y = typename Out::Number;
    const Outlet<R, Y> outlet{room};
    const int warp = threadIdx.x % TEAM / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < R / 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) c[j][i] += shifts[16 * warp + g + i / 2 * 8];
    if (out.other != nullptr) asm volatile("cp.async.wait_all;" ::: "memory");
    wait_for_team(team);  // all of it is there; or nobody moves the last tile out any more
    if (out.other != nullptr) {
#pragma unroll
        for (int j = 0; j < R / 8; ++j)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const u32 two = turned(outlet.word(8 * j + g, 16 * warp + 8 * half + 2 * q));
                c[j][2 * half] += to_float(Y{static_cast<unsigned short>(two)});
                c[j][2 * half + 1] += to_float(Y{static_cast<unsigned short>(two >> 16)});
            }
        wait_for_team(team);
    }
    activate_all<Y>(c, activation);
#pragma unroll
    for (int j = 0; j < R / 8; j += 2) {
        u32 words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = turned(pack<Y>(c[j + i / 2][2 * (i % 2)], c[j + i / 2][2 * (i % 2) + 1]));
        collect_piece(words, q);
        *outlet.piece(8 * (j + q / 2) + g, 2 * warp + q % 2) = {words[0], words[1], words[2], words[3]};
    }
    wait_for_team(team);
    outlet.each(out, m, n, [&](long long at, const uint4* from) { *reinterpret_cast<uint4*>(out.y + at) = *from; });
}

// SPLIT  a sum is one of `parts` sums, and ... ALONE: a block makes them one after the other; TOGETHER: the blocks of a
//        cluster make one each, and all of them add up the tile, in the same order
enum Split { NONE, ALONE, TOGETHER };

// The slices of k where all tiles have the same ones. Others have phases: products of as many rows, each of its own
// numbers of w. A slice of x is one box of 128 bytes a row, or up to TAPS boxes of 128 / TAPS bytes.
struct OnePhase {
    int all_slices;

    static constexpr int TAPS = 1;
    __device__ __forceinline__ u32 phases() const { return 1; }
    __device__ __forceinline__ u32 phase_of(u32) const { return 0; }
    __device__ __forceinline__ int first_number(u32) const { return 0; }
    __device__ __forceinline__ int slices(u32) const { return all_slices; }
    __device__ __forceinline__ int taps(u32) const { return 1; }
};

// The body of a kernel of TEAM * (TEAMS + 1) threads.
// loader  says which slices and taps a phase has (OnePhase), and brings boxes of M rows each: begin_tile(m, phase, slice),
//         then load<DEPTH, X_BOXES>(to, signal, slice, box) for each box of the slices from there on, in their order
// TEAM_ROWS  of y: ROWS; or more, and what a team makes is turned
// out     where rows of y are (RowsOut): begin_tile(phase), then row(m)
template <class P, class X, int TEAM_ROWS, int BN, int TEAMS, int STAGES, Split SPLIT, class Loader, class Out, class Act>
__device__ __forceinline__ void multiply_tiles(Loader loader, const TensorMap& w_map, const float* bias, Out out,
                                               long long M, u32 box_rows, u32 parts, const Act activation) {
    using O = Operands<P, X>;
    using Multiplied = typename MultipliedAs<P>::type;
    constexpr bool IS_TURNED = TEAM_ROWS > ROWS;
    constexpr int COLUMNS = IS_TURNED ? TEAM_ROWS : BN;  // of what a team multiplies
    static_assert(!IS_TURNED || (O::is_direct && BN == ROWS && SPLIT == NONE), "who turns tiles reads rows where they lie");
    constexpr int TAPS = Loader::TAPS, X_LINE = LINE / TAPS, STEPS_A_TAP = O::STEPS / TAPS;
    static_assert(TAPS == 1 || (O::is_direct && sizeof(X) == 2), "tensor cores read several boxes where they lie");
    constexpr int BM = TEAM_ROWS * TEAMS, X_BYTES = O::X_BOXES * BM * LINE, W_BYTES = O::PARTS * BN * LINE;
    constexpr int STAGE_BYTES = X_BYTES + W_BYTES, SLICES_A_PART = PART / O::DEPTH;
    extern __shared__ uint4 room[];
    __shared__ Signal full[STAGES], empty[STAGES];
    __shared__ __align__(16) float shifts[2][TEAMS][BN];  // the bias of a tile, and of the next with another
    char* const stages = reinterpret_cast<char*>(room) + (-shared_address(room) & 1023);
    const int team = threadIdx.x / TEAM;
    let_next_begin();
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            full[s].init(1);
            empty[s].init(4 * TEAMS);
        }
        show_signals();
    }
    __syncthreads();
    // The tiles, and the slices of k that this block multiplies.
    const long long N = out.N;
    const u32 rank = SPLIT == TOGETHER ? cluster_rank() : 0, phases = loader.phases();
    const u32 tiles = phases * Place<BM, BN>::count(M, N), step_tiles = SPLIT == TOGETHER ? gridDim.x / parts : gridDim.x;
    const auto slices_a_part = [&](u32 phase) {
        return SPLIT == NONE ? loader.slices(phase) : static_cast<int>((loader.slices(phase) + parts - 1) / parts);
    };
    const auto slices_of = [&](u32 phase) {
        const int all = loader.slices(phase), part = slices_a_part(phase);
        return SPLIT == TOGETHER ? min(part, all - static_cast<int>(rank) * part) : all;
    };
    const u32 first_tile = SPLIT == TOGETHER ? blockIdx.x / parts : blockIdx.x;
    const auto place_of = [&](u32 tile) { return Place<BM, BN>(M, N, phases == 1 ? tile : tile / phases); };
    const auto taps_of = [](int all_taps, int slice) { return TAPS == 1 ? 1 : min(TAPS, all_taps - slice * TAPS); };

    if (team == TEAMS) {
        if constexpr (SPLIT != TOGETHER) keep_registers<40>();
        if (threadIdx.x % TEAM != 0) return;
        const auto load_w = [&](u32 turn, int taps, int number, long long n) {
            const u32 s = turn % STAGES;
            full[s].arrive_expecting(O::X_BOXES * taps * box_rows * X_LINE + W_BYTES);
#pragma unroll
            for (int i = 0; i < O::PARTS; ++i)
                load_box(stages + s * STAGE_BYTES + X_BYTES + i * BN * LINE, w_map, full[s], number, static_cast<int>(n), i);
        };
        // Weights do not wait for the kernel before.
        const u32 first_phase = loader.phase_of(first_tile);
        const int ahead = first_tile < tiles ? min(slices_of(first_phase), STAGES) : 0;
        const long long first_n = place_of(first_tile).n;
        for (int i = 0; i < ahead; ++i) {
            const int slice = rank * slices_a_part(first_phase) + i;
            load_w(i, taps_of(loader.taps(first_phase), slice), loader.first_number(first_phase) + slice * O::DEPTH, first_n);
        }
        wait_for_kernel_before();
        u32 turn = 0;
        for (u32 tile = first_tile; tile < tiles; tile += step_tiles) {
            const u32 phase = loader.phase_of(tile);
            const int begin = rank * slices_a_part(phase), end = begin + slices_of(phase);
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
                        loader.template load<O::DEPTH, O::X_BOXES>(stages + s * STAGE_BYTES + i * BM * X_LINE, full[s], slice, i);
            }
        }
        return;
    }

    if constexpr (SPLIT != TOGETHER) take_registers<TEAMS == 2 ? 232 : 240>();
    const int warp = threadIdx.x % TEAM / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    const int row = TEAM_ROWS * team + 16 * warp + row_of<P, X>(g);
    if (out.other != nullptr) wait_for_kernel_before();  // who may have made it
    char* const outlet = stages + STAGES * STAGE_BYTES + team * (TEAM_ROWS * LINE);  // of a turned tile
    u32 turn = 0;
    int now = 0;
    long long column = -1;
    for (u32 tile = first_tile; tile < tiles; tile += step_tiles) {
        const u32 phase = loader.phase_of(tile);
        const int slices = slices_of(phase), part_slices = slices_a_part(phase), all_taps = loader.taps(phase);
        const Place<BM, BN> place = place_of(tile);
        out.begin_tile(phase);
        // The last tile: it has another bias. All know it, the compiler too: else products would wait for each other.
        const bool is_beside = __any_sync(~0u, place.n != column);
        if (is_beside) {
            now ^= 1, column = place.n;
            for (int i = threadIdx.x % TEAM; i < BN; i += TEAM)
                shifts[now][team][i] = bias != nullptr && column + i < N ? bias[column + i] : 0.0f;
        }
        if constexpr (IS_TURNED) {
            if (out.other != nullptr) {
                wait_for_team(team);  // nobody moves the last tile out any more
                Outlet<TEAM_ROWS, typename Out::Number>{outlet}.fetch(out, place.m + TEAM_ROWS * team, place.n);
            }
        }
        float sums[COLUMNS / 8][4];
        float totals[O::PARTS == 2 ? BN / 8 : 1][4] = {}, whole[SPLIT == ALONE ? BN / 8 : 1][4] = {};
        int in_part = 0;  // slices of the part that are done
        const auto adds = [&] { return O::PARTS == 2 ? in_part % SLICES_A_PART != 0 : in_part != 0; };  // to earlier sums
        // Behind the products of a slice: the sums go where they should.
        const auto end_slice = [&](int slice) {
            ++in_part, ++turn;
            const bool ends = slice + 1 == slices || (SPLIT == ALONE && in_part == part_slices);
            if constexpr (O::PARTS == 2) {
                if (in_part % SLICES_A_PART == 0 || ends) add_up(totals, sums);
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
                const u32 s = turn % STAGES, stage_at = shared_address(stages + s * STAGE_BYTES), w_at = stage_at + X_BYTES;
                const int taps = taps_of(all_taps, rank * part_slices + slice);
                full[s].wait(turn / STAGES % 2);
                const auto add_step = [&](int step) {
                    const u32 box_at = stage_at + step / STEPS_A_TAP * (BM * X_LINE) + team * (TEAM_ROWS * X_LINE);
                    const unsigned long long x = mixed_tile<X_LINE>(box_at + step % STEPS_A_TAP * 32);
                    const unsigned long long w = mixed_tile(w_at + 32 * step);
                    Wgmma<P, COLUMNS>::add(sums, IS_TURNED ? w : x, IS_TURNED ? x : w, adds() || step > 0);
                };
                if (TAPS == 1 || taps == TAPS) {
                    begin_products();
#pragma unroll
                    for (int step = 0; step < O::STEPS; ++step) add_step(step);
                    end_products();
                } else {  // other steps would multiply what another slice left; each is a group, or the compiler adds fences
#pragma unroll
                    for (int step = 0; step < O::STEPS - STEPS_A_TAP; ++step) {
                        if (step > 0 && step / STEPS_A_TAP == taps) break;
                        begin_products();
                        add_step(step);
                        end_products();
                    }
                }
                // Those of the slice before are done: its room goes back.
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
                if (slice + 1 < slices) read_rows(next, turn + 1);  // while the tensor cores are at it
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
        if (is_beside) wait_for_team(team);  // for the bias
        auto& made = pick<SPLIT == ALONE, O::PARTS == 2>(whole, totals, sums);
        if constexpr (SPLIT == TOGETHER) {
            static_assert(TEAMS == 1, "a team a block");
            float* const mine = reinterpret_cast<float*>(stages + STAGES * STAGE_BYTES);
            add_up_together<BN>(made, mine, row, q, rank, parts, out, shifts[now][0], place.m, place.n, M, activation);
            return;  // a cluster has one tile
        } else if constexpr (IS_TURNED) {
            finish_turned<TEAM_ROWS>(made, out, outlet, shifts[now][team], place.m + TEAM_ROWS * team, place.n, team,
                                     activation);
        } else {
            finish_rows<BN>(made, out, shifts[now][team], place.m + row, place.n, q, activation);
        }
    }
}
