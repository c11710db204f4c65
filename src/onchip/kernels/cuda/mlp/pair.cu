// mlp/pair.cu: y = g(f(x u^T + a) w^T + b): two layers whose weights exceed shared memory, in one launch.
//
// Idea    The hidden activations never leave the chip. A block has 128 rows of x, 64 per consumer warpgroup, and loops
//         over H in chunks of 64: a warpgroup computes 64 hidden columns by wgmma, applies f, and multiplies by
//         w with the registers as A operand. The two warpgroups ping-pong: one applies f, the other issues wgmma. A
//         producer warp loads tiles by TMA. Tried a cluster that splits H for few rows: slower.
// Order   Hidden: one sum over K in wgmma steps of 16; then add a, apply f, cast to P's type. y: one sum over H in
//         steps of 16; then add b, apply g. Independent of M.
// Floor   2 M H (K + N) flop; 4,096 rows of 256-1024-256 in fp16: 4.3 Gflop / 989 Tflop/s = 4.3 us. Saves writing
//         and reading 8 MB of hidden activations. Each block reads all weights from L2: 2 H (K + N) B per 128 rows.
// Layout  x (M, K), u (H, K), w (N, H), y (M, N) row-major; a (H) and b (N) float32 or nullptr.
// Shared  16 KB per 64 columns of x, STAGES * 32 KB of weights, 1 KB for alignment: 225 KB for K = 256 with 5 stages.
// Limits  x in P's type; K and H multiples of 8, N at most BN = 256; M < 2^31; sm_90a.
#include "mma/tma.cuh"
#include "common/epilogue.cuh"
#include "mma/wgmma.cuh"

constexpr int WARPGROUP = 128, WARPGROUPS = 2, ROWS = 64;  // threads, warpgroups, rows (or columns) per tile
constexpr int DEPTH = 64, LINE = 128;  // k per TMA tile: elements, bytes
constexpr int TMA_TILE = ROWS * LINE;  // bytes of 64 lines
constexpr int STAGE = 4 * TMA_TILE;    // u: 64 hidden columns x 256 k; w: 256 columns x 64 hidden

// F  the first activation, compiled in: a call would stall the tensor cores
template <class P, class Y, int BN, int STAGES, class F>
__global__ void __launch_bounds__(WARPGROUP * (WARPGROUPS + 1), 1)
mlp_pair(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap u_map,
         const __grid_constant__ TensorMap w_map, const float* a, const float* b, Y* y, long long M, u32 K, u32 H,
         u32 N, u32 x_tile_rows, u32 g_code, u32 g_a, u32 g_b) {
    using X = typename P::Element;
    extern __shared__ uint4 smem[];
    __shared__ Mbarrier x_ready, full[STAGES], empty[STAGES], turn[WARPGROUPS];
    __shared__ __align__(16) float smem_b[BN];
    char* const x_smem = reinterpret_cast<char*>(smem) + (-shared_address(smem) & 1023);
    const int slices = static_cast<int>((K + DEPTH - 1) / DEPTH), u_slots = (slices + 3) / 4;  // stages of u per chunk
    char* const stages = x_smem + slices * WARPGROUPS * TMA_TILE;
    const int warpgroup = threadIdx.x / WARPGROUP;
    launch_dependent_grids();
    if (threadIdx.x == 0) {
        x_ready.init(1);
        for (int i = 0; i < WARPGROUPS; ++i) turn[i].init(4);
        for (int s = 0; s < STAGES; ++s) {
            full[s].init(1);
            empty[s].init(4 * WARPGROUPS);
        }
        fence_mbarriers();
    }
    for (int i = threadIdx.x; i < BN; i += WARPGROUP * (WARPGROUPS + 1))
        smem_b[i] = b != nullptr && i < N ? b[i] : 0.0f;
    __syncthreads();
    const long long m = static_cast<long long>(blockIdx.x) * (ROWS * WARPGROUPS);
    const int count = static_cast<int>((H + ROWS - 1) / ROWS);  // chunks of H

    if (warpgroup == WARPGROUPS) {
        warpgroup_reg_dealloc<40>();
        if (threadIdx.x % WARPGROUP != 0) return;
        const int uses = count * (u_slots + 1);
        const auto load = [&](int use) {
            const int s = use % STAGES, slot = use % (u_slots + 1), hidden = use / (u_slots + 1) * ROWS;
            char* const to = stages + s * STAGE;
            if (slot == u_slots) {
                full[s].arrive_expect_tx(BN * LINE);
                tma_load(to, w_map, full[s], hidden, 0);
            } else {
                const int tiles = min(4, slices - 4 * slot);
                full[s].arrive_expect_tx(tiles * TMA_TILE);
                for (int i = 0; i < tiles; ++i)
                    tma_load(to + i * TMA_TILE, u_map, full[s], (4 * slot + i) * DEPTH, hidden);
            }
        };
        // Weights do not depend on the previous kernel: load them before griddepcontrol.wait.
        const int prefetched = min(uses, STAGES);
        for (int use = 0; use < prefetched; ++use) load(use);
        wait_on_dependent_grids();
        x_ready.arrive_expect_tx(slices * x_tile_rows * LINE);
        for (int i = 0; i < slices; ++i)
            tma_load(x_smem + i * WARPGROUPS * TMA_TILE, x_map, x_ready, i * DEPTH, static_cast<int>(m));
        for (int use = prefetched; use < uses; ++use) {
            empty[use % STAGES].wait(use / STAGES % 2 ^ 1);
            load(use);
        }
        return;
    }

    warpgroup_reg_alloc<232>();
    const int warp = threadIdx.x % WARPGROUP / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    const u32 x_at = shared_address(x_smem) + warpgroup * TMA_TILE;
    const auto stage_of = [&](int use) {  // waits until its TMA tiles have landed
        full[use % STAGES].wait(use / STAGES % 2);
        return shared_address(stages + use % STAGES * STAGE);
    };
    const auto release_stage = [&](int use) {
        if (threadIdx.x % 32 == 0) empty[use % STAGES].arrive();
    };
    float sums[BN / 8][4], sums_h[ROWS / 8][4];
    u32 rows[ROWS / 16][4];  // hidden activations as wgmma A fragments
    const auto multiply = [&](int chunk) {
        const u32 w_at = stage_of(chunk * (u_slots + 1) + u_slots);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < ROWS / 16; ++step)
            Wgmma<P, BN>::add(sums, rows[step], swizzled_descriptor(w_at + 32 * step), chunk > 0 || step > 0);
        wgmma_commit();
    };
    x_ready.wait(0);
    for (int chunk = 0; chunk < count; ++chunk) {
        const int use = chunk * (u_slots + 1), hidden = chunk * ROWS + 2 * q;
        float2 shift[ROWS / 8];  // loaded early to hide the latency
#pragma unroll
        for (int j = 0; j < ROWS / 8; ++j) {
            const bool is_valid = a != nullptr && hidden + 8 * j < H;  // H is even
            shift[j] = is_valid ? *reinterpret_cast<const float2*>(a + hidden + 8 * j) : float2{0.0f, 0.0f};
        }
        if (warpgroup + chunk > 0) turn[warpgroup].wait((warpgroup + chunk + 1) % 2);
        if (chunk > 0) multiply(chunk - 1);
        u32 u_at = 0;
        for (int slice = 0; slice < slices; ++slice) {
            u_at = slice % 4 == 0 ? stage_of(use + slice / 4) : u_at + TMA_TILE;
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < DEPTH / 16; ++step)
                Wgmma<P, ROWS>::add(sums_h, swizzled_descriptor(x_at + slice * WARPGROUPS * TMA_TILE + 32 * step),
                                    swizzled_descriptor(u_at + 32 * step), slice > 0 || step > 0);
            wgmma_commit();
        }
        if (threadIdx.x % 32 == 0) turn[1 - warpgroup].arrive();
        wgmma_wait<0>();
        if (chunk > 0) release_stage(use - 1);
        for (int slot = 0; slot < u_slots; ++slot) release_stage(use + slot);
#pragma unroll
        for (int j = 0; j < ROWS / 8; ++j) {
            float v[4] = {sums_h[j][0] + shift[j].x, sums_h[j][1] + shift[j].y, sums_h[j][2] + shift[j].x,
                          sums_h[j][3] + shift[j].y};
            Always<F>{}.template apply<X>(v);
            rows[j / 2][j % 2 * 2] = pack<X>(v[0], v[1]);
            rows[j / 2][j % 2 * 2 + 1] = pack<X>(v[2], v[3]);
        }
    }
    multiply(count - 1);
    wgmma_wait<0>();

    const Activation last = activation_of<Activation>(g_code, g_a, g_b);
    finish_rows<BN>(sums, RowsOut<Y>{y, M, N}, smem_b, m + ROWS * warpgroup + 16 * warp + g, 0, q, last);
}
