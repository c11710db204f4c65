// train/large_batch/cluster.cu: all layers after the first of a training step for some hundred rows.
//
// Idea    Few rows are latency-bound, so a cluster of 8 blocks runs 16 rows through all layers in one launch. Each
//         block computes some units of every hidden layer and writes them to all blocks by DSMEM. Each block recomputes
//         outputs, loss and the last hidden layer's gradients, which saves an exchange, and the gradients of its own
//         units of earlier layers. Warps split K. Weights are in shared memory before griddepcontrol.wait.
// Floor   784-320-160-10, 256 rows: 16 clusters, 128 blocks. Per block 65 KB of weights before the wait and 21 KB of
//         rows, 0.2 us at 48 B/clock; a cluster barrier, 0.2 us; a launch, 0.7 us: 1.1 us. On an H200 a block takes 8.5
//         us in fp32, 5.8 in bf16; run-time activations and unrolled loops (59 KB of code, not 24) took 9.0.
// Order   K steps of 16 over DEEP warps, smallest term products first, fp32 steps added with FADD; then warps in order.
// Layout  As train/large_batch/launches.cu.
// Shared  Activations of all layers, 16 rows; weight rows and columns of own units; output weights; sums: 115,072 B.
// Limits  2 to 4 layers in all, at most 32 outputs. PARTS is 3 (fp32), 2 (tf32, fp16) or 1 (bf16). sm_90 up.
#include "mma/cluster.cuh"
#include "train/large_batch/bytes.cuh"
#include "train/large_batch/targets.cuh"

constexpr int ROWS = 16, CLUSTER = 8;

__device__ constexpr int larger(int a, int b) { return a > b ? a : b; }
__device__ constexpr int steps_of(int K) { return (K + 15) / 16; }
__device__ constexpr int tiles_of(int N) { return (N + 7) / 8; }
// Row pitch of W values along K, in floats: eight rows that are read together start in different banks.
__device__ constexpr int pitch_of(int W) { return 16 * steps_of(W) + 4; }
// Row pitch of column tiles, read four rows at a time: 8 banks apart.
__device__ constexpr int tile_pitch(int tiles) { return round_up(8 * tiles - 8, 16) + 8; }

// -- gemms -----------------------------------------------------------------------------------------------------------

// ROWS rows times 8 TILES columns, reduction K. Of 16 K elements a lane holds every fourth.
template <int PARTS, int K, int TILES, bool TURNED>
struct Product {
    static constexpr int STEPS = steps_of(K), DEEP = STEPS >= 16 && TILES <= 2 ? 8 : STEPS >= 4 ? 4 : STEPS;
    static constexpr int ACROSS = WARPS / DEEP, NT = (TILES + ACROSS - 1) / ACROSS, PITCH = tile_pitch(TILES);
    static constexpr int FLOATS = DEEP * ROWS * PITCH, FOURS = ROWS * 2 * TILES;
    static constexpr int ITEMS = (FOURS + THREADS - 1) / THREADS;  // fours per thread

    // Stores the warps' split-K sums to `parts`. a (ROWS, a_pitch); b (columns, b_pitch) or, TURNED, (K, b_pitch),
    // `there` tiles of it.
    static __device__ __forceinline__ void sum_up(float* parts, const float* a, int a_pitch, const float* b, int b_pitch,
                                                  int there = TILES) {
        const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
        const int first = warp / DEEP * NT, deep = warp % DEEP;
        if (first >= TILES || warp >= DEEP * ACROSS) return;
        float sums[1][NT][4] = {};
#pragma unroll 1  // the code runs once: fetching an unrolled loop takes longer
        for (int step = deep; step < STEPS; step += DEEP) {
            float v[8];  // rows g and g + 8
#pragma unroll
            for (int k = 0; k < 8; ++k) v[k] = a[(g + k / 2 % 2 * 8) * a_pitch + 16 * step + q + k / 4 * 8 + k % 2 * 4];
            u32 rows[1][PARTS][4], columns[NT][PARTS][2];
            split_numbers(rows[0], v);
#pragma unroll
            for (int j = 0; j < NT; ++j) {
                const int column = (first + j < there ? first + j : 0) * 8 + g, k = 16 * step + q;
                float w[4];
#pragma unroll
                for (int n = 0; n < 4; ++n) w[n] = TURNED ? b[(k + 4 * n) * b_pitch + column] : b[column * b_pitch + k + 4 * n];
                split_numbers(columns[j], w);
            }
            if constexpr (PARTS == 3) {  // tensor cores truncate: one K step per accumulator
                float some[1][NT][4] = {};
                add_products(some, rows, columns);
#pragma unroll
                for (int n = 0; n < 4 * NT; ++n) sums[0][n / 4][n % 4] += some[0][n / 4][n % 4];
            } else {
                add_products(sums, rows, columns);
            }
        }
#pragma unroll
        for (int j = 0; j < NT; ++j) {
            if (first + j >= TILES) break;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float two[2] = {sums[0][j][2 * half], sums[0][j][2 * half + 1]};
                store_several(parts + (deep * ROWS + g + 8 * half) * PITCH + 8 * (first + j) + 2 * q, two);
            }
        }
    }
    // Calls use(index, row, column) for a thread's groups of four.
    template <class Use>
    static __device__ __forceinline__ void each(const Use& use) {
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const int item = threadIdx.x + i * THREADS;
            if (item < FOURS) use(i, item / (2 * TILES), item % (2 * TILES) * 4);
        }
    }
    // Adds up the warps' sums and calls finish(index, row, column, four sums).
    template <class Finish>
    static __device__ __forceinline__ void finish(const float* parts, const Finish& finish) {
        __syncthreads();
        each([&](int i, int row, int column) {
            float4 sum = load4(parts + row * PITCH + column);
#pragma unroll
            for (int deep = 1; deep < DEEP; ++deep) {
                const float4 more = load4(parts + (deep * ROWS + row) * PITCH + column);
                sum = {sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w};
            }
            finish(i, row, column, sum);
        });
    }
};

// -- shared memory ---------------------------------------------------------------------------------------------------

// W: the first layer, then all layers after it. Offsets in floats.
template <int P, class... W>
struct Room {
    static constexpr int PARTS = P, L = sizeof...(W) - 1;
    static __device__ constexpr int at(int l) {
        const int all[] = {W::N...};
        return all[l];
    }
    // Valid elements of four from n on; a compile-time 4 where possible removes the branch.
    static __device__ __forceinline__ int left(int l, int n) { return at(l) % 4 == 0 ? 4 : at(l) - n; }
    static __device__ constexpr u32 code(int l) {
        const u32 all[] = {W::CODE...};
        return all[l];
    }
    // Tiles of units per block; for the last layer all.
    static __device__ constexpr int own(int l) { return l == L ? tiles_of(at(L)) : (tiles_of(at(l)) + CLUSTER - 1) / CLUSTER; }
    static __device__ constexpr int pitch(int l) { return pitch_of(at(l) + (l < L ? 1 : 0)); }  // units and the bias 1
    static __device__ constexpr int back_pitch(int l) { return l == L ? pitch(l - 1) : tile_pitch(own(l - 1)); }
    // (ROWS, pitch(l)): activations of layer l, then its gradients.
    static __device__ constexpr int values(int l) {
        int sum = 0;
        for (int i = 0; i < l; ++i) sum += ROWS * pitch(i);
        return sum;
    }
    // (own units, pitch(l - 1)) of layer l's weights; for the last layer whole K steps, since both passes read it.
    static __device__ constexpr int weight_rows(int l) { return l == L ? 16 * steps_of(at(L)) : 8 * own(l); }
    static __device__ constexpr int weights(int l) {
        int sum = values(L + 1);
        for (int i = 1; i < l; ++i) sum += weight_rows(i) * pitch(i - 1);
        return sum;
    }
    // (units of l in K steps, own units of l - 1)
    static __device__ constexpr int back(int l) {
        int sum = weights(L + 1);
        for (int i = 1; i < l; ++i) sum += 16 * steps_of(at(i)) * tile_pitch(own(i - 1));
        return l == L ? weights(L) : sum;
    }
    static __device__ constexpr int parts() {
        int sum = weights(L + 1);
        for (int i = 1; i < L; ++i) sum += 16 * steps_of(at(i)) * tile_pitch(own(i - 1));
        return sum;
    }
    template <int l>
    using Forward = Product<PARTS, at(l - 1) + 1, own(l), false>;
    // Backward gemm from layer l to l - 1. All blocks compute all of the last hidden layer.
    static __device__ constexpr bool is_for_all(int l) { return l == L && l > 1; }
    template <int l>
    using Back = Product<PARTS, at(l), is_for_all(l) ? tiles_of(at(l - 1)) : own(l - 1), true>;
    template <int l = L>
    static __device__ constexpr int max_parts() {
        if constexpr (l == 0) {
            return 0;
        } else {
            return larger(larger(Forward<l>::FLOATS, Back<l>::FLOATS), max_parts<l - 1>());
        }
    }
    static __device__ constexpr int bytes() { return 4 * (parts() + max_parts<>()); }
};

// Copies (there, stride) floats to (ROWS, PITCH) with cp.async, COLUMNS per row, zero-filled past `left` and `there`. A
// power of two lanes per row avoids a division.
template <int ROWS, int COLUMNS, int PITCH>
__device__ __forceinline__ void copy_rows(float* to, const float* from, int stride, int there, int left) {
    constexpr int FOURS = COLUMNS / 4, LANES = FOURS > 16 ? 32 : FOURS > 8 ? 16 : FOURS > 4 ? 8 : 4;
#pragma unroll 1
    for (int row = threadIdx.x / LANES; row < ROWS; row += THREADS / LANES) {
#pragma unroll
        for (int i = 0; i < (FOURS + LANES - 1) / LANES; ++i) {
            const int column = 4 * (threadIdx.x % LANES + i * LANES);
            const bool is_there = row < there && column < left;
            if (column < COLUMNS) copy_async(to + row * PITCH + column, from + (is_there ? row * stride + column : 0), is_there);
        }
    }
}

// -- a step -----------------------------------------------------------------------------------------------------------

struct ClusterRows : TileRows<ROWS> {
    float* room;
    u32 rank;
};

// Starts loading the weights of layers l and up.
template <class R, int l>
__device__ __forceinline__ void bring_weights(const Step& step, const RowLayers& layers, float* room, u32 rank) {
    constexpr int L = R::L, K = R::at(l - 1) + 1, N = R::at(l);
    const RowLayer& layer = layers.of[l];
    const float* const w = step.mine(layers.memory[l].w);
    const int first = l == L ? 0 : rank * 8 * R::own(l);
    copy_rows<R::weight_rows(l), 16 * steps_of(K), R::pitch(l - 1)>(room + R::weights(l), w + first * layer.w_stride,
                                                                   layer.w_stride, N - first, layer.w_stride);
    if constexpr (l < L) {
        const int column = rank * 8 * R::own(l - 1);
        copy_rows<16 * steps_of(N), 8 * R::own(l - 1), R::back_pitch(l)>(room + R::back(l), w + column, layer.w_stride, N,
                                                                       layer.w_stride - column);
        bring_weights<R, l + 1>(step, layers, room, rank);
    }
}

// Writes the bias 1 and zeros after the units of layers l and up.
template <class R, int l>
__device__ __forceinline__ void put_ones(const RowLayers& layers, float* room) {
    if constexpr (l <= R::L) {
        constexpr int COUNT = R::pitch(l) - R::at(l);
        for (int i = threadIdx.x; i < ROWS * COUNT; i += THREADS)
            room[R::values(l) + i / COUNT * R::pitch(l) + R::at(l) + i % COUNT] =
                l < R::L && i % COUNT == 0 && layers.of[l + 1 < MAX_WIDTHS ? l + 1 : l].has_bias ? 1.0f : 0.0f;
        put_ones<R, l + 1>(layers, room);
    }
}

// Stores four values of layer l to all blocks of the cluster by DSMEM.
template <class R, int l>
__device__ __forceinline__ void tell_cluster(float* room, int row, int column, const float4& four) {
    float* const to = room + R::values(l) + row * R::pitch(l) + column;
    if (R::left(l, column) >= 4) {
#pragma unroll
        for (u32 rank = 0; rank < CLUSTER; ++rank) store_four_to_block(to, rank, four);
    } else {
        const float v[4] = {four.x, four.y, four.z, four.w};
        for (u32 rank = 0; rank < CLUSTER; ++rank)
#pragma unroll
            for (int i = 0; i < 3; ++i)
                if (i < R::left(l, column)) store_to_block(to + i, rank, v[i]);
    }
}

// Forward pass of layers l and up. Ends with the outputs in shared memory.
template <class R, int l>
__device__ __forceinline__ void go_forward(const Step& step, const RowLayers& layers, const ClusterRows& rows) {
    constexpr int L = R::L;
    using Forward = typename R::template Forward<l>;
    float *const room = rows.room, *const parts = room + R::parts();
    const RowLayer& layer = layers.of[l];
    Forward::sum_up(parts, room + R::values(l - 1), R::pitch(l - 1), room + R::weights(l), R::pitch(l - 1));
    if constexpr (l < L) {
        const int first = rows.rank * 8 * R::own(l), there = rows.there();
        float* const a = step.mine(layers.memory[l].a) + static_cast<long long>(rows.first) * layer.stride;
        float4 made[Forward::ITEMS];
        Forward::finish(parts, [&](int i, int row, int column, const float4& sum) {
            made[i] = activated<R::code(l)>(sum, layer.slope);
            if (first + column < R::at(l)) tell_cluster<R, l>(room, row, first + column, made[i]);
        });
        arrive_at_cluster();
        Forward::each([&](int i, int row, int column) {  // after the arrive, which would wait for these stores
            const float four[4] = {made[i].x, made[i].y, made[i].z, made[i].w};
            const int n = first + column;
            if (row < there && n < R::at(l)) store_first(a + static_cast<long long>(row) * layer.stride + n, four, R::left(l, n));
        });
        await_cluster();
        go_forward<R, l + 1>(step, layers, rows);
    } else {
        Forward::finish(parts, [&](int, int row, int column, const float4& sum) {
            const float4 made = activated<R::code(L)>(sum, layer.slope);
            const float four[4] = {made.x, made.y, made.z, made.w};
            store_first(room + R::values(L) + row * R::pitch(L) + column, four, R::left(L, column));
        });
    }
}

// Backward pass from layer l to the first.
template <class R, int l>
__device__ __forceinline__ void go_back(const Step& step, const RowLayers& layers, const ClusterRows& rows) {
    using Back = typename R::template Back<l>;
    constexpr bool IS_FOR_ALL = R::is_for_all(l);
    constexpr int OWN = 8 * R::own(l - 1), D = R::at(l - 1);
    float *const room = rows.room, *const parts = room + R::parts(), *const values = room + R::values(l - 1);
    const RowLayer& before = layers.of[l - 1];
    const int own = rows.rank * OWN, first = IS_FOR_ALL ? 0 : own, there = rows.there();
    const int column = l == R::L && first < D ? first : 0;
    Back::sum_up(parts, room + R::values(l), R::pitch(l), room + R::back(l) + column, R::back_pitch(l),
                 l == R::L ? tiles_of(D) - column / 8 : R::own(l - 1));
    float* const dz = step.mine(layers.memory[l - 1].dz) + static_cast<long long>(rows.first) * before.stride;
    float4 made[Back::ITEMS];
    Back::finish(parts, [&](int i, int row, int column, const float4& sum) {
        const int n = first + column;
        if (n >= D) return;
        float* const at = values + row * R::pitch(l - 1) + n;
        made[i] = through<R::code(l - 1)>(before.slope, sum, load4(at));
        const float four[4] = {made[i].x, made[i].y, made[i].z, made[i].w};
        if (l > 1 && IS_FOR_ALL) store_first(at, four, R::left(l - 1, n));
        if (l > 1 && !IS_FOR_ALL) tell_cluster<R, l - 1>(room, row, n, made[i]);
    });
    if (l > 1 && !IS_FOR_ALL) arrive_at_cluster();
    Back::each([&](int i, int row, int column) {
        const float four[4] = {made[i].x, made[i].y, made[i].z, made[i].w};
        const int n = first + column;
        if (row < there && n < D && n >= own && n < own + OWN)
            store_first(dz + static_cast<long long>(row) * before.stride + n, four, R::left(l - 1, n));
    });
    if constexpr (l > 1) {
        if (IS_FOR_ALL) __syncthreads();
        else await_cluster();
        go_back<R, l - 1>(step, layers, rows);
    }
}

// W: the first layer, already computed, then all layers after it. Writes dz of all layers and the hidden activations.
template <int PARTS, u32 LOSS, class... W>
__global__ void __launch_bounds__(THREADS, 2)
train_cluster(const __grid_constant__ Step step, const __grid_constant__ RowLayers layers) {
    using R = Room<PARTS, W...>;
    using Rows = Targets<ROWS, THREADS, LOSS, R::at(R::L), R::code(R::L)>;
    constexpr int L = R::L;
    extern __shared__ float4 whole[];
    float* const room = reinterpret_cast<float*>(whole);
    const u32 rank = cluster_rank();
    arrive_at_cluster();
    touch_arguments(step), touch_arguments(layers);
    bring_weights<R, 1>(step, layers, room, rank);
    close_stage();
    const int size = step.size(), clusters = gridDim.x / CLUSTER, tiles = (size + ROWS - 1) / ROWS;
    const int first_tile = blockIdx.x / CLUSTER;
    const RowLayer& given = layers.of[0];
    float* const outputs = room + R::values(L);
    put_ones<R, 1>(layers, room);
    await_cluster();  // all blocks have started, so DSMEM is valid
    if (first_tile >= tiles) {
        await_stages<0>();
        wait_for_step_before();
        return;
    }
#pragma unroll 1
    for (int tile = first_tile; tile < tiles; tile += clusters) {
        const ClusterRows rows = {{tile * ROWS, size}, room, rank};
        Rows targets;
        targets.find(step, layers, rows);
        if (tile == first_tile) wait_for_step_before();
        else wait_for_cluster();  // the next rows overwrite what was read
        copy_rows<ROWS, 16 * steps_of(R::at(0) + 1), R::pitch(0)>(
            room + R::values(0), step.mine(layers.memory[0].a) + static_cast<long long>(rows.first) * given.stride, given.stride,
            rows.there(), given.stride);
        close_stage();
        await_stages<0>();
        __syncthreads();
        go_forward<R, 1>(step, layers, rows);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < Rows::TURNS; ++i)
            targets.to_gradient(i, layers, layers.of[L].slope, outputs + Rows::row(i) * R::pitch(L));
        __syncthreads();
        go_back<R, L>(step, layers, rows);
        if (rank == 0) targets.store(step, layers, rows, layers.memory[L].dz, layers.of[L].stride, outputs, R::pitch(L));
    }
}
