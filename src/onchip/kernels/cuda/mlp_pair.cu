// mlp_pair.cu: y = g(f(x u^T + a) w^T + b): two layers whose weights no multiprocessor has room for, in one launch.
//
// Idea    What lies between two layers is more than x and y together, and never leaves the chip. A block has 64 rows of x
//         and goes over the hidden numbers, 64 of them at a time: four warps make them by wgmma, apply f, and multiply
//         them as they have them in registers by the columns of w that they meet. Two teams of four warps take turns,
//         so one multiplies while the other is busy with f. One more warp has boxes of u and w brought ahead of them.
//         The blocks of a cluster share the hidden numbers of the same rows, so few rows keep many multiprocessors busy.
// Order   A hidden number is one sum over k, 16 terms an instruction, then a, f, and rounded to P's numbers. A number of y
//         is a sum of 2 * `blocks` sums, from the first to the last: team t of block r has chunks t, t + 2, ... of its
//         run of chunks, each added up 16 terms an instruction. Then comes b. M decides nothing.
// Floor   2 M H (K + N) flop; 4,096 rows of 256-1024-256 in fp16: 4.3 Gflop / 989 Tflop/s = 4.3 us, and 8 MB less to
//         write and 8 to read than layer by layer. Weights come from L2 for every 64 rows: 2 B H (K + N).
// Layout  x (M, K), u (H, K), w (N, H), y (M, N) row-major; a (H) and b (N) float32, or none.
// Shared  128 B * 64 a slice of 64 numbers of x's rows, STAGES * 32 KB of weights, and 1 KB to begin at a multiple of it:
//         225 KB for K = 256 with six stages. Sums leave by the same room: 8 * 64 * (BN + 8) B.
// Limits  x of P's numbers; K and H multiples of 8, N at most BN = 256; each block has two chunks of 64 hidden numbers or
//         more; M < 2^31; sm_90a.
#include "boxes.cuh"
#include "cluster_sums.cuh"
#include "product.cuh"
#include "wgmma.cuh"

constexpr int TEAM = 128, ROWS = 64;     // threads, and what they make of a tile
constexpr int DEPTH = 64, LINE = 128;    // numbers, and bytes, of k in a box
constexpr int BOX = ROWS * LINE;         // bytes of 64 lines
constexpr int STAGE = 4 * BOX;           // 64 hidden numbers by 256 of k, or 256 columns by 64 hidden numbers

template <class P, class Y, int BN, int STAGES, class F = Activation>
__global__ void __launch_bounds__(3 * TEAM, 1)
mlp_pair(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap u_map,
         const __grid_constant__ TensorMap w_map, const float* a, const float* b, Y* y, long long M, u32 K, u32 H, u32 N,
         u32 box_rows, u32 blocks, u32 f_code, u32 f_a, u32 f_b, u32 g_code, u32 g_a, u32 g_b) {
    using X = typename P::Number;
    extern __shared__ uint4 room[];
    __shared__ Signal rows_there, full[STAGES], empty[STAGES];
    char* const x_room = reinterpret_cast<char*>(room) + (-shared_address(room) & 1023);
    const int slices = static_cast<int>((K + DEPTH - 1) / DEPTH), pieces = (slices + 3) / 4;  // stages of u in a chunk
    char* const stages = x_room + slices * BOX;
    const int team = threadIdx.x / TEAM;
    let_next_begin();
    if (threadIdx.x == 0) {
        rows_there.init(1);
        for (int s = 0; s < STAGES; ++s) {
            full[s].init(1);
            empty[s].init(8);
        }
        show_signals();
    }
    __syncthreads();
    const u32 rank = blocks > 1 ? cluster_rank() : 0;
    const long long m = static_cast<long long>(blockIdx.x / blocks) * ROWS;
    const int chunks = static_cast<int>((H + ROWS - 1) / ROWS), each = (chunks + blocks - 1) / blocks;
    const int first = rank * each, count = min(each, chunks - first);

    if (team == 2) {
        keep_registers<40>();
        if (threadIdx.x % TEAM != 0) return;
        const int turns = count * (pieces + 1);
        const auto load = [&](int turn) {
            const int s = turn % STAGES, piece = turn % (pieces + 1), hidden = (first + turn / (pieces + 1)) * ROWS;
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
        // Weights do not wait for the kernel before.
        const int ahead = min(turns, STAGES);
        for (int turn = 0; turn < ahead; ++turn) load(turn);
        wait_for_kernel_before();
        rows_there.arrive_expecting(slices * box_rows * LINE);
        for (int i = 0; i < slices; ++i) load_box(x_room + i * BOX, x_map, rows_there, i * DEPTH, static_cast<int>(m));
        for (int turn = ahead; turn < turns; ++turn) {
            empty[turn % STAGES].wait(turn / STAGES % 2 ^ 1);
            load(turn);
        }
        return;
    }

    take_registers<232>();
    const int warp = threadIdx.x % TEAM / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    const F f = activation_of<F>(f_code, f_a, f_b);
    const auto give_back = [&](int turn) {
        if (threadIdx.x % 32 == 0) empty[turn % STAGES].arrive();
    };
    const auto stage_of = [&](int turn) { return shared_address(stages + turn % STAGES * STAGE); };
    float sums[BN / 8][4];
    rows_there.wait(0);
    for (int chunk = 0; chunk < count; ++chunk) {
        const int turn = chunk * (pieces + 1), hidden = (first + chunk) * ROWS + 2 * q;
        if (chunk % 2 != team) {  // who waits for a signal has seen all of its turns
            for (int piece = 0; piece <= pieces; ++piece) {
                full[(turn + piece) % STAGES].wait((turn + piece) / STAGES % 2);
                give_back(turn + piece);
            }
            continue;
        }
        float2 shifts[ROWS / 8];
#pragma unroll
        for (int j = 0; j < ROWS / 8; ++j) {
            const bool is_there = a != nullptr && hidden + 8 * j < H;  // H is even
            shifts[j] = is_there ? *reinterpret_cast<const float2*>(a + hidden + 8 * j) : float2{0.0f, 0.0f};
        }
        float made[ROWS / 8][4];
        for (int slice = 0; slice < slices; ++slice) {
            const int now = turn + slice / 4;
            if (slice % 4 == 0) full[now % STAGES].wait(now / STAGES % 2);
            const u32 x_at = shared_address(x_room + slice * BOX), u_at = stage_of(now) + slice % 4 * BOX;
            begin_products();
#pragma unroll
            for (int step = 0; step < DEPTH / 16; ++step)
                Wgmma<P, ROWS>::add(made, mixed_tile(x_at + 32 * step), mixed_tile(u_at + 32 * step), slice > 0 || step > 0);
            end_products();
            wait_for_products<1>();  // those of the slice before are done
            if (slice > 0 && slice % 4 == 0) give_back(now - 1);
        }
        wait_for_products<0>();
        give_back(turn + pieces - 1);
#pragma unroll
        for (int j = 0; j < ROWS / 8; ++j) {
            made[j][0] += shifts[j].x, made[j][1] += shifts[j].y, made[j][2] += shifts[j].x, made[j][3] += shifts[j].y;
        }
        activate_all<X>(made, f);
        u32 rows[ROWS / 16][4];  // as the tensor cores take them
#pragma unroll
        for (int i = 0; i < ROWS / 4; ++i) {
            const int j = i / 4 * 2 + i % 4 / 2, half = i % 2;
            rows[i / 4][i % 4] = pack<X>(made[j][2 * half], made[j][2 * half + 1]);
        }
        const int last = turn + pieces;
        full[last % STAGES].wait(last / STAGES % 2);
        const u32 w_at = stage_of(last);
        begin_products();
#pragma unroll
        for (int step = 0; step < ROWS / 16; ++step) Wgmma<P, BN>::add(sums, rows[step], mixed_tile(w_at + 32 * step), chunk != team || step > 0);
        end_products();
        wait_for_products<0>();  // the other team multiplies meanwhile, or the room would come back too late
        give_back(last);
    }

    // All leave their sums where rows and weights were, and each adds up some numbers of the tile.
    constexpr int STRIDE = BN + 8;  // eight rows' same columns lie in different banks
    float* const mine = reinterpret_cast<float*>(x_room);
    wait_for_cluster();
#pragma unroll
    for (int i = 0; i < BN / 4; ++i) {
        const int j = i / 2, half = i % 2, row = ROWS * team + 16 * warp + g + 8 * half;
        *reinterpret_cast<float2*>(mine + row * STRIDE + 8 * j + 2 * q) = {sums[j][2 * half], sums[j][2 * half + 1]};
    }
    wait_for_cluster();
    const Activation last = activation_of<Activation>(g_code, g_a, g_b);
    const int there = static_cast<int>(M - m < ROWS ? M - m : ROWS);
    const auto read = [&](int i, u32 part) {
        return read_of_block(mine + (part % 2 * ROWS + i / (BN / 2)) * STRIDE + i % (BN / 2) * 2, part / 2);
    };
    const auto give = [&](int i, float (&two)[2]) {
        const int column = i % (BN / 2) * 2;
        const long long left = static_cast<long long>(N) - column;
        if (left <= 0) return;
        finish(two, y + (m + i / (BN / 2)) * N + column, b == nullptr ? nullptr : b + column, left, N % 2 == 0, last);
    };
    add_up_parts<16>(rank * 2 * TEAM + threadIdx.x, 2 * TEAM * blocks, there * (BN / 2), 2 * blocks, read, give);
    wait_for_cluster();  // nobody still reads of a block that goes
}
