// train/large_batch/cluster.cu: all layers after the first of a training step for some hundred rows.
//
// Idea    Few rows are latency-bound, so a cluster of 8 blocks runs 16 rows through all layers in one launch. Each
//         block computes some units of every hidden layer and stores them to all blocks by DSMEM. Every block computes
//         outputs, loss and the last hidden layer's gradients, which saves an exchange, then the gradients of its units
//         of earlier layers. Warps split K. Weights are in shared memory before griddepcontrol.wait.
// Floor   784-320-160-10, 256 rows: 16 clusters, 128 blocks. Per block 65 KB of weights before the wait and 21 KB of
//         rows, 0.2 us at 48 B/clock; a cluster barrier, 0.2 us; a launch, 0.7 us: 1.1 us. On an H200 a block takes 8.5
//         us in fp32, 5.8 in bf16; run-time activations and unrolled loops (59 KB of code, not 24) took 9.0.
// Order   K steps of 16 over SPLIT_K warps, smallest products first, fp32 steps added with FADD; then warps in order.
// Layout  As train/large_batch/launches.cu.
// Shared  Activations of all layers, 16 rows; weight rows and columns of owned units; output weights; sums: 115,072 B.
// Limits  2 to 4 layers in all, at most 32 outputs. SPLITS is 3 (fp32), 2 (tf32, fp16) or 1 (bf16). sm_90 up.
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
template <int SPLITS, int K, int TILES, bool IS_TRANSPOSED>
struct ClusterGemm {
    static constexpr int STEPS = steps_of(K), SPLIT_K = STEPS >= 16 && TILES <= 2 ? 8 : STEPS >= 4 ? 4 : STEPS;
    static constexpr int WARPS_N = WARPS / SPLIT_K, NT = (TILES + WARPS_N - 1) / WARPS_N, PITCH = tile_pitch(TILES);
    static constexpr int FLOATS = SPLIT_K * ROWS * PITCH, FOURS = ROWS * 2 * TILES;
    static constexpr int ITEMS = (FOURS + THREADS - 1) / THREADS;  // float4s per thread

    // Stores the warps' split-K sums to `partials`. a (ROWS, a_pitch); b (columns, b_pitch) or, IS_TRANSPOSED,
    // (K, b_pitch), of which `valid` tiles exist.
    static __device__ __forceinline__ void compute(float* partials, const float* a, int a_pitch, const float* b,
                                                   int b_pitch, int valid = TILES) {
        const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
        const int first = warp / SPLIT_K * NT, k_split = warp % SPLIT_K;
        if (first >= TILES || warp >= SPLIT_K * WARPS_N) return;
        float sums[1][NT][4] = {};
#pragma unroll 1  // the code runs once: instruction fetches of an unrolled loop take longer
        for (int step = k_split; step < STEPS; step += SPLIT_K) {
            float v[8];  // rows g and g + 8
#pragma unroll
            for (int k = 0; k < 8; ++k) v[k] = a[(g + k / 2 % 2 * 8) * a_pitch + 16 * step + q + k / 4 * 8 + k % 2 * 4];
            u32 rows[1][SPLITS][4], columns[NT][SPLITS][2];
            split_floats(rows[0], v);
#pragma unroll
            for (int j = 0; j < NT; ++j) {
                const int column = (first + j < valid ? first + j : 0) * 8 + g, k = 16 * step + q;
                float w[4];
#pragma unroll
                for (int n = 0; n < 4; ++n)
                    w[n] = IS_TRANSPOSED ? b[(k + 4 * n) * b_pitch + column] : b[column * b_pitch + k + 4 * n];
                split_floats(columns[j], w);
            }
            if constexpr (SPLITS == 3) {  // tensor cores truncate: one K step per accumulator
                float step_sums[1][NT][4] = {};
                mma_splits(step_sums, rows, columns);
#pragma unroll
                for (int n = 0; n < 4 * NT; ++n) sums[0][n / 4][n % 4] += step_sums[0][n / 4][n % 4];
            } else {
                mma_splits(sums, rows, columns);
            }
        }
#pragma unroll
        for (int j = 0; j < NT; ++j) {
            if (first + j >= TILES) break;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float two[2] = {sums[0][j][2 * half], sums[0][j][2 * half + 1]};
                store_vector(partials + (k_split * ROWS + g + 8 * half) * PITCH + 8 * (first + j) + 2 * q, two);
            }
        }
    }
    // Calls use(index, row, column) for a thread's float4s.
    template <class Use>
    static __device__ __forceinline__ void for_each(const Use& use) {
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const int item = threadIdx.x + i * THREADS;
            if (item < FOURS) use(i, item / (2 * TILES), item % (2 * TILES) * 4);
        }
    }
    // Adds up the warps' sums and calls finish(index, row, column, four sums).
    template <class Finish>
    static __device__ __forceinline__ void finish(const float* partials, const Finish& finish) {
        __syncthreads();
        for_each([&](int i, int row, int column) {
            float4 sum = load4(partials + row * PITCH + column);
#pragma unroll
            for (int k_split = 1; k_split < SPLIT_K; ++k_split) {
                const float4 partial = load4(partials + (k_split * ROWS + row) * PITCH + column);
                sum = {sum.x + partial.x, sum.y + partial.y, sum.z + partial.z, sum.w + partial.w};
            }
            finish(i, row, column, sum);
        });
    }
};

// W: the first layer, then all layers after it. Offsets in floats.
template <int P, class... W>
struct SharedLayout {
    static constexpr int SPLITS = P, L = sizeof...(W) - 1;
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
    // Tiles of units per block; all of the last layer.
    static __device__ constexpr int owned_tiles(int l) {
        return l == L ? tiles_of(at(L)) : (tiles_of(at(l)) + CLUSTER - 1) / CLUSTER; }
    static __device__ constexpr int pitch(int l) { return pitch_of(at(l) + (l < L ? 1 : 0)); }  // units and the bias 1
    static __device__ constexpr int back_pitch(int l) { return l == L ? pitch(l - 1) : tile_pitch(owned_tiles(l - 1)); }
    // (ROWS, pitch(l)): activations of layer l, then its gradients.
    static __device__ constexpr int values(int l) {
        int sum = 0;
        for (int i = 0; i < l; ++i) sum += ROWS * pitch(i);
        return sum;
    }
    // (owned units, pitch(l - 1)): weights of layer l; whole K steps of the last layer, since both passes read it.
    static __device__ constexpr int weight_rows(int l) { return l == L ? 16 * steps_of(at(L)) : 8 * owned_tiles(l); }
    static __device__ constexpr int weights(int l) {
        int sum = values(L + 1);
        for (int i = 1; i < l; ++i) sum += weight_rows(i) * pitch(i - 1);
        return sum;
    }
    // (units of l in K steps, owned units of l - 1)
    static __device__ constexpr int back_weights(int l) {
        int sum = weights(L + 1);
        for (int i = 1; i < l; ++i) sum += 16 * steps_of(at(i)) * tile_pitch(owned_tiles(i - 1));
        return l == L ? weights(L) : sum;
    }
    static __device__ constexpr int partials() {
        int sum = weights(L + 1);
        for (int i = 1; i < L; ++i) sum += 16 * steps_of(at(i)) * tile_pitch(owned_tiles(i - 1));
        return sum;
    }
    template <int l>
    using Forward = ClusterGemm<SPLITS, at(l - 1) + 1, owned_tiles(l), false>;
    // Backward gemm from layer l to l - 1; replicated in all blocks for the last hidden layer.
    static __device__ constexpr bool is_replicated(int l) { return l == L && l > 1; }
    template <int l>
    using Backward = ClusterGemm<SPLITS, at(l), is_replicated(l) ? tiles_of(at(l - 1)) : owned_tiles(l - 1), true>;
    template <int l = L>
    static __device__ constexpr int max_partials() {
        if constexpr (l == 0) {
            return 0;
        } else {
            return larger(larger(Forward<l>::FLOATS, Backward<l>::FLOATS), max_partials<l - 1>());
        }
    }
    static __device__ constexpr int bytes() { return 4 * (partials() + max_partials<>()); }
};

// Copies (valid, stride) floats to (ROWS, PITCH) with cp.async, COLUMNS per row, zero-filled past `left` and `valid`.
// A power of two lanes per row avoids a division.
template <int ROWS, int COLUMNS, int PITCH>
__device__ __forceinline__ void copy_rows(float* to, const float* from, int stride, int valid, int left) {
    constexpr int FOURS = COLUMNS / 4, LANES = FOURS > 16 ? 32 : FOURS > 8 ? 16 : FOURS > 4 ? 8 : 4;
#pragma unroll 1
    for (int row = threadIdx.x / LANES; row < ROWS; row += THREADS / LANES) {
#pragma unroll
        for (int i = 0; i < (FOURS + LANES - 1) / LANES; ++i) {
            const int column = 4 * (threadIdx.x % LANES + i * LANES);
            const bool is_valid = row < valid && column < left;
            if (column < COLUMNS)
                copy_async(to + row * PITCH + column, from + (is_valid ? row * stride + column : 0), is_valid);
        }
    }
}

struct ClusterRows : TileRows<ROWS> {
    float* smem;
    u32 rank;
};

// Starts loading the weights of layers l and up.
template <class R, int l>
__device__ __forceinline__ void load_weights(const Step& step, const RowLayers& layers, float* smem, u32 rank) {
    constexpr int L = R::L, K = R::at(l - 1) + 1, N = R::at(l);
    const RowLayer& layer = layers.layer[l];
    const float* const w = step.local(layers.memory[l].w);
    const int first = l == L ? 0 : rank * 8 * R::owned_tiles(l);
    copy_rows<R::weight_rows(l), 16 * steps_of(K), R::pitch(l - 1)>(smem + R::weights(l), w + first * layer.w_stride,
                                                                   layer.w_stride, N - first, layer.w_stride);
    if constexpr (l < L) {
        const int column = rank * 8 * R::owned_tiles(l - 1);
        copy_rows<16 * steps_of(N), 8 * R::owned_tiles(l - 1), R::back_pitch(l)>(
            smem + R::back_weights(l), w + column, layer.w_stride, N, layer.w_stride - column);
        load_weights<R, l + 1>(step, layers, smem, rank);
    }
}

// Writes the bias 1 and zeros after the units of layers l and up.
template <class R, int l>
__device__ __forceinline__ void write_ones(const RowLayers& layers, float* smem) {
    if constexpr (l <= R::L) {
        constexpr int COUNT = R::pitch(l) - R::at(l);
        for (int i = threadIdx.x; i < ROWS * COUNT; i += THREADS)
            smem[R::values(l) + i / COUNT * R::pitch(l) + R::at(l) + i % COUNT] =
                l < R::L && i % COUNT == 0 && layers.layer[l + 1 < MAX_WIDTHS ? l + 1 : l].has_bias ? 1.0f : 0.0f;
        write_ones<R, l + 1>(layers, smem);
    }
}

// Stores four values of layer l to all blocks of the cluster by DSMEM.
template <class R, int l>
__device__ __forceinline__ void broadcast(float* smem, int row, int column, const float4& four) {
    float* const to = smem + R::values(l) + row * R::pitch(l) + column;
    if (R::left(l, column) >= 4) {
#pragma unroll
        for (u32 rank = 0; rank < CLUSTER; ++rank) dsmem_store4(to, rank, four);
    } else {
        const float v[4] = {four.x, four.y, four.z, four.w};
        for (u32 rank = 0; rank < CLUSTER; ++rank)
#pragma unroll
            for (int i = 0; i < 3; ++i)
                if (i < R::left(l, column)) dsmem_store(to + i, rank, v[i]);
    }
}

// Forward pass of layers l and up. Ends with the outputs in shared memory.
template <class R, int l>
__device__ __forceinline__ void forward(const Step& step, const RowLayers& layers, const ClusterRows& rows) {
    constexpr int L = R::L;
    using Forward = typename R::template Forward<l>;
    float *const smem = rows.smem, *const partials = smem + R::partials();
    const RowLayer& layer = layers.layer[l];
    Forward::compute(partials, smem + R::values(l - 1), R::pitch(l - 1), smem + R::weights(l), R::pitch(l - 1));
    if constexpr (l < L) {
        const int first = rows.rank * 8 * R::owned_tiles(l), valid = rows.count();
        float* const a = step.local(layers.memory[l].a) + static_cast<long long>(rows.first) * layer.stride;
        float4 results[Forward::ITEMS];
        Forward::finish(partials, [&](int i, int row, int column, const float4& sum) {
            results[i] = activated<R::code(l)>(sum, layer.slope);
            if (first + column < R::at(l)) broadcast<R, l>(smem, row, first + column, results[i]);
        });
        cluster_arrive();
        Forward::for_each([&](int i, int row, int column) {  // after arrive, which would wait for these stores
            const float four[4] = {results[i].x, results[i].y, results[i].z, results[i].w};
            const int n = first + column;
            if (row < valid && n < R::at(l))
                store_first(a + static_cast<long long>(row) * layer.stride + n, four, R::left(l, n));
        });
        cluster_wait();
        forward<R, l + 1>(step, layers, rows);
    } else {
        Forward::finish(partials, [&](int, int row, int column, const float4& sum) {
            const float4 results = activated<R::code(L)>(sum, layer.slope);
            const float four[4] = {results.x, results.y, results.z, results.w};
            store_first(smem + R::values(L) + row * R::pitch(L) + column, four, R::left(L, column));
        });
    }
}

// Backward pass from layer l to the first.
template <class R, int l>
__device__ __forceinline__ void backward(const Step& step, const RowLayers& layers, const ClusterRows& rows) {
    using Backward = typename R::template Backward<l>;
    constexpr bool IS_REPLICATED = R::is_replicated(l);
    constexpr int OWNED = 8 * R::owned_tiles(l - 1), D = R::at(l - 1);
    float *const smem = rows.smem, *const partials = smem + R::partials(), *const values = smem + R::values(l - 1);
    const RowLayer& prev = layers.layer[l - 1];
    const int first_owned = rows.rank * OWNED, first = IS_REPLICATED ? 0 : first_owned, valid = rows.count();
    const int column = l == R::L && first < D ? first : 0;
    Backward::compute(partials, smem + R::values(l), R::pitch(l), smem + R::back_weights(l) + column, R::back_pitch(l),
                      l == R::L ? tiles_of(D) - column / 8 : R::owned_tiles(l - 1));
    float* const dz = step.local(layers.memory[l - 1].dz) + static_cast<long long>(rows.first) * prev.stride;
    float4 results[Backward::ITEMS];
    Backward::finish(partials, [&](int i, int row, int column, const float4& sum) {
        const int n = first + column;
        if (n >= D) return;
        float* const at = values + row * R::pitch(l - 1) + n;
        results[i] = act_grad<R::code(l - 1)>(prev.slope, sum, load4(at));
        const float four[4] = {results[i].x, results[i].y, results[i].z, results[i].w};
        if (l > 1 && IS_REPLICATED) store_first(at, four, R::left(l - 1, n));
        if (l > 1 && !IS_REPLICATED) broadcast<R, l - 1>(smem, row, n, results[i]);
    });
    if (l > 1 && !IS_REPLICATED) cluster_arrive();
    Backward::for_each([&](int i, int row, int column) {
        const float four[4] = {results[i].x, results[i].y, results[i].z, results[i].w};
        const int n = first + column;
        if (row < valid && n < D && n >= first_owned && n < first_owned + OWNED)
            store_first(dz + static_cast<long long>(row) * prev.stride + n, four, R::left(l - 1, n));
    });
    if constexpr (l > 1) {
        if (IS_REPLICATED) __syncthreads();
        else cluster_wait();
        backward<R, l - 1>(step, layers, rows);
    }
}

// W: the first layer, computed before, and all others. Writes dz of all layers and the hidden activations.
template <int SPLITS, u32 LOSS, class... W>
__global__ void __launch_bounds__(THREADS, 2)
train_cluster(const __grid_constant__ Step step, const __grid_constant__ RowLayers layers) {
    using R = SharedLayout<SPLITS, W...>;
    using RowTargets = Targets<ROWS, THREADS, LOSS, R::at(R::L), R::code(R::L)>;
    constexpr int L = R::L;
    extern __shared__ float4 smem_base[];
    float* const smem = reinterpret_cast<float*>(smem_base);
    const u32 rank = cluster_rank();
    cluster_arrive();
    touch_arguments(step), touch_arguments(layers);
    load_weights<R, 1>(step, layers, smem, rank);
    commit_stage();
    const int size = step.size(), clusters = gridDim.x / CLUSTER, tiles = (size + ROWS - 1) / ROWS;
    const int first_tile = blockIdx.x / CLUSTER;
    const RowLayer& input = layers.layer[0];
    float* const outputs = smem + R::values(L);
    write_ones<R, 1>(layers, smem);
    cluster_wait();  // all blocks have started, so DSMEM is valid
    if (first_tile >= tiles) {
        wait_for_stages<0>();
        wait_for_previous_kernel();
        return;
    }
#pragma unroll 1
    for (int tile = first_tile; tile < tiles; tile += clusters) {
        const ClusterRows rows = {{tile * ROWS, size}, smem, rank};
        RowTargets targets;
        targets.load(step, layers, rows);
        if (tile == first_tile) wait_for_previous_kernel();
        else cluster_sync();  // before the next rows overwrite shared memory
        copy_rows<ROWS, 16 * steps_of(R::at(0) + 1), R::pitch(0)>(
            smem + R::values(0), step.local(layers.memory[0].a) + static_cast<long long>(rows.first) * input.stride,
            input.stride, rows.count(), input.stride);
        commit_stage();
        wait_for_stages<0>();
        __syncthreads();
        forward<R, 1>(step, layers, rows);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < RowTargets::ROUNDS; ++i)
            targets.to_gradient(i, layers, layers.layer[L].slope, outputs + RowTargets::row(i) * R::pitch(L));
        __syncthreads();
        backward<R, L>(step, layers, rows);
        if (rank == 0)
            targets.store(step, layers, rows, layers.memory[L].dz, layers.layer[L].stride, outputs, R::pitch(L));
    }
}
