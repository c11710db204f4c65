// product_wgmma.cu: y = activation(x w^T + bias), of any sizes, which are run-time values, at the tensor cores' rate.
//
// Idea    A block stays on its multiprocessor and makes tile after tile of y. One warp has boxes of x and w of the same
//         128 bytes of k brought to shared memory, STAGES of them at a time; TEAMS times four warps multiply what is
//         there, 64 rows each, and give the room back. While they finish a tile, the boxes of the next are on their way.
//         Rows that are what the tensor cores multiply are read by them where they lie. Others (float32) go through
//         registers, rounded there, or split: a float32 is the sum of two tf32, and three products make one.
// Order   A sum runs over k, STEP terms an instruction; of float32, it is added to a total every PART terms, since the
//         tensor cores cut off what they do not keep. Then comes the bias. Neither the tile nor M decides anything.
// Floor   2 M N K flop. 8,192 cubed in fp16: 1.1 Tflop / 989 Tflop/s = 1.11 ms; in fp32: 3 * 1.1 / 494.5 = 6.67 ms.
//         A step of 64 rows and 256 columns takes 128 cycles and reads 10 KB of shared memory, of 16.
// Layout  x (M, K), y (M, N) row-major, w (PARTS, N, K): of fp32 the upper parts, then the lower ones; bias (N) or none.
// Shared  STAGES * (TEAMS * 64 * X_BYTES + PARTS * BN * 128) B, and 1 KB to begin at a multiple of it, and signals:
//         197 KB + 1 KB for 128 x 256 in four stages of fp16.
// Limits  Rows of x and w are a multiple of 16 B long; M < 2^31; sm_90a.
#include "boxes.cuh"
#include "product.cuh"
#include "wgmma.cuh"

constexpr int TEAM = 128, ROWS = 64;  // threads, and what they make of a tile
constexpr int LINE = 128;             // bytes of k in a box
constexpr int PART = 128;             // terms of a sum of float32

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
    static constexpr bool is_direct = is_same<X, typename P::Number> && P::PER_WORD == 2;  // no register between
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

// A step's words of rows of float32 in mixed boxes (boxes.cuh), of which row `r` and the one 8 below are the lane's.
template <class P, int BM>
__device__ __forceinline__ void read_step(const char* boxes, int r, int q, int step, u32 (&a)[4], u32 (&low)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = r + i % 2 * 8, column = step * P::STEP + (P::PER_WORD == 2 ? 2 * q + i / 2 * 8 : q + i / 2 * 4);
        const char* line = boxes + column / 32 * (BM * LINE) + row * LINE;
        const char* at = line + (column % 32 * 4 ^ row % 8 * 16);
        if constexpr (P::PER_WORD == 2) {
            const float2 two = *reinterpret_cast<const float2*>(at);
            a[i] = pack<typename P::Number>(two.x, two.y);
        } else {
            const float v = *reinterpret_cast<const float*>(at);
            a[i] = Tf32::word(v);
            if constexpr (is_same<P, Fp32>) low[i] = Tf32::word(v - __uint_as_float(a[i]));
        }
    }
}

template <class P, class X, class Y, int BN, int TEAMS, int STAGES>
__global__ void __launch_bounds__(TEAM * (TEAMS + 1), 1)
product_wgmma(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map, const float* bias,
              Y* y, long long M, long long N, long long K, u32 code, u32 a_bits, u32 b_bits) {
    using O = Operands<P, X>;
    using Multiplied = typename MultipliedAs<P>::type;
    constexpr int BM = ROWS * TEAMS, X_BYTES = O::X_BOXES * BM * LINE, W_BYTES = O::PARTS * BN * LINE;
    constexpr int STAGE_BYTES = X_BYTES + W_BYTES;
    extern __shared__ uint4 room[];
    __shared__ Signal full[STAGES], empty[STAGES];
    char* const stages = reinterpret_cast<char*>(room) + (-shared_address(room) & 1023);
    const int team = threadIdx.x / TEAM;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            full[s].init(1);
            empty[s].init(4 * TEAMS);
        }
        show_signals();
    }
    __syncthreads();
    const long long tiles = Place<BM, BN>::count(M, N);
    const int slices = static_cast<int>((K + O::DEPTH - 1) / O::DEPTH);

    if (team == TEAMS) {
        keep_registers<40>();
        if (threadIdx.x % TEAM != 0) return;
        u32 turn = 0;
        for (long long tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            const Place<BM, BN> place(M, N, tile);
            for (int slice = 0; slice < slices; ++slice, ++turn) {
                const u32 s = turn % STAGES;
                empty[s].wait(turn / STAGES % 2 ^ 1);
                full[s].arrive_expecting(STAGE_BYTES);
                char* to = stages + s * STAGE_BYTES;
                const int k = slice * O::DEPTH;
#pragma unroll
                for (int i = 0; i < O::X_BOXES; ++i)
                    load_box(to + i * BM * LINE, x_map, full[s], k + i * (LINE / 4), static_cast<int>(place.m));
#pragma unroll
                for (int i = 0; i < O::PARTS; ++i)
                    load_box(to + X_BYTES + i * BN * LINE, w_map, full[s], k, static_cast<int>(place.n), i);
            }
        }
        return;
    }

    take_registers<TEAMS == 2 ? 232 : 240>();
    const Activation activation{code, __uint_as_float(a_bits), __uint_as_float(b_bits)};
    const int warp = threadIdx.x % TEAM / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    const int row = ROWS * team + 16 * warp + row_of<P, X>(g);
    u32 turn = 0;
    for (long long tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        float sums[BN / 8][4];
        float totals[O::PARTS == 2 ? BN / 8 : 1][4] = {};
        for (int slice = 0; slice < slices; ++slice, ++turn) {
            const u32 s = turn % STAGES;
            const char* const boxes = stages + s * STAGE_BYTES;
            const u32 w_at = shared_address(boxes) + X_BYTES;
            full[s].wait(turn / STAGES % 2);
            if constexpr (O::is_direct) {
                const u32 x_at = shared_address(boxes) + team * (ROWS * LINE);
                begin_products();
#pragma unroll
                for (int step = 0; step < O::STEPS; ++step)
                    Wgmma<P, BN>::add(sums, mixed_tile(x_at + 32 * step), mixed_tile(w_at + 32 * step),
                                      slice > 0 || step > 0);
                end_products();
                // Those of the slice before are done: its room goes back.
                wait_for_products<1>();
                if (slice > 0 && threadIdx.x % 32 == 0) empty[(turn - 1) % STAGES].arrive();
            } else {
                u32 a[O::STEPS][4], low[O::STEPS][4];
#pragma unroll
                for (int step = 0; step < O::STEPS; ++step) read_step<P, BM>(boxes, row, q, step, a[step], low[step]);
                const bool begins = O::PARTS == 2 ? slice % (PART / O::DEPTH) == 0 : slice == 0;
                begin_products();
#pragma unroll
                for (int step = 0; step < O::STEPS; ++step) {
                    const unsigned long long upper = mixed_tile(w_at + 32 * step);
                    if constexpr (O::PARTS == 2) {
                        Wgmma<Multiplied, BN>::add(sums, low[step], upper, !begins || step > 0);
                        Wgmma<Multiplied, BN>::add(sums, a[step], mixed_tile(w_at + BN * LINE + 32 * step), true);
                    }
                    Wgmma<Multiplied, BN>::add(sums, a[step], upper, O::PARTS == 2 || !begins || step > 0);
                }
                end_products();
                wait_for_products<0>();
                if (threadIdx.x % 32 == 0) empty[s].arrive();
                if constexpr (O::PARTS == 2) {
                    if ((slice + 1) % (PART / O::DEPTH) == 0 || slice + 1 == slices) {
#pragma unroll
                        for (int j = 0; j < BN / 8; ++j)
#pragma unroll
                            for (int i = 0; i < 4; ++i) totals[j][i] += sums[j][i];
                    }
                }
            }
        }
        if constexpr (O::is_direct) {
            wait_for_products<0>();
            if (threadIdx.x % 32 == 0) empty[(turn - 1) % STAGES].arrive();
        }
        const Place<BM, BN> place(M, N, tile);
        if constexpr (O::PARTS == 2) finish_rows<BN>(totals, y, bias, place.m + row, place.n, q, M, N, activation);
        else finish_rows<BN>(sums, y, bias, place.m + row, place.n, q, M, N, activation);
    }
}
