// mlp/pair.cu: y = g(f(x u^T + a) w^T + b): two layers whose weights exceed shared memory, in one launch.
//
// Idea    The hidden activations never leave the chip. A block has 128 rows of x, 64 per consumer warpgroup, and loops
//         over H in chunks of 64: a warpgroup computes 64 hidden columns by wgmma, applies f, and uses its registers as
//         A operand of the gemm with w. The two warpgroups ping-pong: while one applies f, the other issues wgmma.
//         A producer warp loads tiles of u and w by TMA. Tried a cluster that splits H for few rows: slower.
// Order   A hidden element is one sum over k, 16 per instruction, then a, f, and a cast to P's type. An element of y is
//         one sum over H, 16 per instruction, then b. Independent of M.
// Floor   2 M H (K + N) flop; 4,096 rows of 256-1024-256 in fp16: 4.3 Gflop / 989 Tflop/s = 4.3 us, and 8 MB less to
//         write and 8 to read than layer by layer. Each block reads all weights from L2: 2 H (K + N) B per 128 rows.
// Layout  x (M, K), u (H, K), w (N, H), y (M, N) row-major; a (H) and b (N) float32 or nullptr.
// Shared  16 KB per 64 columns of x, STAGES * 32 KB of weights, 1 KB for alignment: 225 KB for K = 256 with 5 stages.
// Limits  x in P's type; K and H multiples of 8, N at most BN = 256; M < 2^31; sm_90a.
#include "mma/tma.cuh"
#include "common/epilogue.cuh"
#include "mma/wgmma.cuh"

constexpr int WARPGROUP = 128, WARPGROUPS = 2, ROWS = 64;  // threads, consumer warpgroups, rows (or hidden columns) per tile
constexpr int DEPTH = 64, LINE = 128;            // elements, and bytes, of k per TMA tile
constexpr int BOX = ROWS * LINE;                 // bytes of 64 lines
constexpr int STAGE = 4 * BOX;                   // 64 hidden columns x 256 of k, or 256 columns x 64 hidden ones

// F  the first activation, compiled in: a call would stall the tensor cores
template <class P, class Y, int BN, int STAGES, class F>
__global__ void __launch_bounds__(WARPGROUP * (WARPGROUPS + 1), 1)
mlp_pair(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap u_map,
         const __grid_constant__ TensorMap w_map, const float* a, const float* b, Y* y, long long M, u32 K, u32 H,
         u32 N, u32 box_rows, u32 g_code, u32 g_a, u32 g_b) {
    using X = typename P::Element;
    extern __shared__ uint4 room[];
    __shared__ Signal rows_there, full[STAGES], empty[STAGES], your_turn[WARPGROUPS];
    __shared__ __align__(16) float shifts[BN];
    char* const x_room = reinterpret_cast<char*>(room) + (-shared_address(room) & 1023);
    const int slices = static_cast<int>((K + DEPTH - 1) / DEPTH), pieces = (slices + 3) / 4;  // stages of u per chunk
    char* const stages = x_room + slices * WARPGROUPS * BOX;
    const int warpgroup = threadIdx.x / WARPGROUP;
    let_next_begin();
    if (threadIdx.x == 0) {
        rows_there.init(1);
        for (int i = 0; i < WARPGROUPS; ++i) your_turn[i].init(4);
        for (int s = 0; s < STAGES; ++s) {
            full[s].init(1);
            empty[s].init(4 * WARPGROUPS);
        }
        show_signals();
    }
    for (int i = threadIdx.x; i < BN; i += WARPGROUP * (WARPGROUPS + 1)) shifts[i] = b != nullptr && i < N ? b[i] : 0.0f;
    __syncthreads();
    const long long m = static_cast<long long>(blockIdx.x) * (ROWS * WARPGROUPS);
    const int count = static_cast<int>((H + ROWS - 1) / ROWS);  // chunks of H

    if (warpgroup == WARPGROUPS) {
        keep_registers<40>();
        if (threadIdx.x % WARPGROUP != 0) return;
        const int turns = count * (pieces + 1);
        const auto load = [&](int turn) {
            const int s = turn % STAGES, piece = turn % (pieces + 1), hidden = turn / (pieces + 1) * ROWS;
            char* const to = stages + s * STAGE;
            if (piece == pieces) {
                full[s].arrive_expecting(BN * LINE);
                load_box(to, w_map, full[s], hidden, 0);
            } else {
                const int boxes = min(4, slices - 4 * piece);
                full[s].arrive_expecting(boxes * BOX);
                for (int i = 0; i < boxes; ++i) load_box(to + i * BOX, u_map, full[s], (4 * piece + i) * DEPTH, hidden);
            }
        };
        // Weights do not depend on the previous kernel: load them before griddepcontrol.wait.
        const int ahead = min(turns, STAGES);
        for (int turn = 0; turn < ahead; ++turn) load(turn);
        wait_for_kernel_before();
        rows_there.arrive_expecting(slices * box_rows * LINE);
        for (int i = 0; i < slices; ++i)
            load_box(x_room + i * WARPGROUPS * BOX, x_map, rows_there, i * DEPTH, static_cast<int>(m));
        for (int turn = ahead; turn < turns; ++turn) {
            empty[turn % STAGES].wait(turn / STAGES % 2 ^ 1);
            load(turn);
        }
        return;
    }

    take_registers<232>();
    const int warp = threadIdx.x % WARPGROUP / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    const u32 x_at = shared_address(x_room) + warpgroup * BOX;
    const auto stage_of = [&](int turn) {  // waits until its TMA tiles have landed
        full[turn % STAGES].wait(turn / STAGES % 2);
        return shared_address(stages + turn % STAGES * STAGE);
    };
    const auto give_back = [&](int turn) {
        if (threadIdx.x % 32 == 0) empty[turn % STAGES].arrive();
    };
    float sums[BN / 8][4], made[ROWS / 8][4];
    u32 rows[ROWS / 16][4];  // hidden activations as wgmma A fragments
    const auto multiply = [&](int chunk) {
        const u32 w_at = stage_of(chunk * (pieces + 1) + pieces);
        begin_products();
#pragma unroll
        for (int step = 0; step < ROWS / 16; ++step)
            Wgmma<P, BN>::add(sums, rows[step], mixed_tile(w_at + 32 * step), chunk > 0 || step > 0);
        end_products();
    };
    rows_there.wait(0);
    for (int chunk = 0; chunk < count; ++chunk) {
        const int turn = chunk * (pieces + 1), hidden = chunk * ROWS + 2 * q;
        float2 shift[ROWS / 8];  // loaded early to hide the latency
#pragma unroll
        for (int j = 0; j < ROWS / 8; ++j) {
            const bool is_there = a != nullptr && hidden + 8 * j < H;  // H is even
            shift[j] = is_there ? *reinterpret_cast<const float2*>(a + hidden + 8 * j) : float2{0.0f, 0.0f};
        }
        if (warpgroup + chunk > 0) your_turn[warpgroup].wait((warpgroup + chunk + 1) % 2);
        if (chunk > 0) multiply(chunk - 1);
        u32 u_at = 0;
        for (int slice = 0; slice < slices; ++slice) {
            u_at = slice % 4 == 0 ? stage_of(turn + slice / 4) : u_at + BOX;
            begin_products();
#pragma unroll
            for (int step = 0; step < DEPTH / 16; ++step)
                Wgmma<P, ROWS>::add(made, mixed_tile(x_at + slice * WARPGROUPS * BOX + 32 * step),
                                    mixed_tile(u_at + 32 * step), slice > 0 || step > 0);
            end_products();
        }
        if (threadIdx.x % 32 == 0) your_turn[1 - warpgroup].arrive();
        wait_for_products<0>();
        if (chunk > 0) give_back(turn - 1);
        for (int piece = 0; piece < pieces; ++piece) give_back(turn + piece);
#pragma unroll
        for (int j = 0; j < ROWS / 8; ++j) {
            float v[4] = {made[j][0] + shift[j].x, made[j][1] + shift[j].y, made[j][2] + shift[j].x,
                          made[j][3] + shift[j].y};
            Always<F>{}.template apply<X>(v);
            rows[j / 2][j % 2 * 2] = pack<X>(v[0], v[1]);
            rows[j / 2][j % 2 * 2 + 1] = pack<X>(v[2], v[3]);
        }
    }
    multiply(count - 1);
    wait_for_products<0>();

    const Activation last = activation_of<Activation>(g_code, g_a, g_b);
    finish_rows<BN>(sums, RowsOut<Y>{y, M, N}, shifts, m + ROWS * warpgroup + 16 * warp + g, 0, q, last);
}
