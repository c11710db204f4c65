// recurrent/gradient.cu: back through the steps of an LSTM, GRU or RNN in one launch: the gradients of all gates.
//
// Idea    A block goes back through the steps of ROWS sequences of one direction. What the states add to the gates is
//         known (a gemm over all steps), so a step is elementwise but for one product: the gradients of the gates by R,
//         which are those of the previous state. Its K elements are split over `parts` groups of threads; each loaded
//         weight serves ROWS FFMAs. As many rows of R as fit stay in shared memory, the others are read from L2. An
//         LSTM first computes its cells, step by step, without products.
// Floor   2 G H^2 flop per sequence, step and direction: 4,096 sequences of 64 steps, LSTM, H = 128: 34.4 Gflop /
//         67 Tflop/s = 513 us; reads and writes are 15 H values per step, 2.0 GB / 4.2 TB/s = 480 us. Few sequences: a
//         step waits for loads, for R (262 KB here) and for two barriers.
// Order   K in order within a part, in partial sums of CHUNK; then the parts in order. Depends on G and H alone.
// Layout  x (N, S, D, G, H), dy (N, S, D, H) or of one state (N, D, H); per direction sums (N, S, G, H) and before
//         (N, S, H); R (D, G H, H); y (N, S, D, G, H), for GruAfter z, r, n of h, n of x; or (N, D, H); cells (N, D, S,
//         H); gates as in network/layers/recurrent.py.
// Shared  (G + parts + 1, LSTM: + 2) H ROWS values, and the rows of R.
// Limits  Run-time sizes; float32, float16, bfloat16 accumulate in float32, float64 in float64; H up to 8,301 with
//         227 KB for an LSTM, half of that in float64; sm_80 up.
#include "recurrent/gradient.cuh"

constexpr int CHUNK = 64;

struct Sizes {
    long long N, S;
    u32 D, H, lanes, parts, kept;  // kept: rows of R in shared memory, per part and gate
    u32 is_reverse, of_last, index;  // of_last: 0: dy is of every step, 1: of the last h, 2: of the last c
};

// partials[part][u][row] = the sum over the part's share of `count` rows j of R[j][u] gates[j][row].
// kept  rows of each part in shared memory, at `resident`
template <class W, int ROWS>
__device__ __forceinline__ void multiply(W* partials, const W* gates, const W* R, const W* resident, int count,
                                         int kept, const Sizes& sizes) {
    const int H = sizes.H, share = (count + sizes.parts - 1) / sizes.parts;
    const int part = threadIdx.x / sizes.lanes, begin = min(part * share, count), end = min(begin + share, count);
    resident += static_cast<long long>(part) * kept * H;
    for (int u = threadIdx.x % sizes.lanes; u < H; u += sizes.lanes) {
        alignas(16) W total[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) total[r] = 0;
        for (int first = begin; first < end; first += CHUNK) {
            const int last = min(first + CHUNK, end), split = max(first, min(last, begin + kept));
            W sum[ROWS];
#pragma unroll
            for (int r = 0; r < ROWS; ++r) sum[r] = 0;
            const auto add = [&](W weight, int j) {
                alignas(16) W v[ROWS];
                load_vectors(v, gates + j * ROWS);
#pragma unroll
                for (int r = 0; r < ROWS; ++r) sum[r] = multiply_add(weight, v[r], sum[r]);
            };
#pragma unroll 4
            for (int j = first; j < split; ++j) add(resident[(j - begin) * H + u], j);
#pragma unroll 4
            for (int j = split; j < last; ++j) add(R[static_cast<long long>(j) * H + u], j);
#pragma unroll
            for (int r = 0; r < ROWS; ++r) total[r] += sum[r];
        }
        W* const to = partials + (part * H + u) * ROWS;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) to[r] = total[r];
    }
}

// Copies the rows of R that `multiply` reads from shared memory.
template <class W>
__device__ __forceinline__ void keep_rows(W* resident, const W* R, int count, int kept, const Sizes& sizes) {
    const int H = sizes.H, share = (count + sizes.parts - 1) / sizes.parts;
    for (int i = threadIdx.x; i < static_cast<int>(sizes.parts) * kept * H; i += blockDim.x) {
        const int u = i % H, j = i / H % kept, row = i / H / kept * share + j;
        if (row < count) resident[i] = R[static_cast<long long>(row) * H + u];
    }
}

// ROWS  sequences per block
template <class Cell, class T, int ROWS>
__global__ void __launch_bounds__(1024)
    recurrent_grad(const __grid_constant__ Arrays<T> arrays, const __grid_constant__ Sizes sizes) {
    using W = acc_t<T>;
    constexpr bool IS_LSTM = is_same<Cell, Lstm>, RESETS_FIRST = is_same<Cell, GruBefore>;
    constexpr int G = GATES<Cell>, OUT = OUT_GATES<Cell>;
    extern __shared__ uint4 smem[];
    const int H = sizes.H, pairs = H * ROWS;  // (row, unit), units adjacent; each belongs to one thread
    W* const gates = reinterpret_cast<W*>(smem);  // (G H, ROWS): gradients
    W* const partials = gates + G * pairs;
    W* const dh = partials + sizes.parts * pairs;
    W* const dc = dh + pairs;
    W* const resident = dc + IS_LSTM * pairs;
    const u32 d = blockIdx.x % sizes.D;
    const long long first = blockIdx.x / sizes.D * static_cast<long long>(ROWS), S = sizes.S;
    const bool is_reverse = sizes.is_reverse || d == 1;
    const W* const R = arrays.R + static_cast<long long>(d) * G * H * H;
    const T *const sums = arrays.sums[d], *const before = arrays.before[d];

    // Products of a GruBefore: n, then z and r.
    constexpr int LATE = RESETS_FIRST ? 1 : 0;
    const int kept = min(sizes.kept * (G - LATE), ((G - LATE) * H + sizes.parts - 1) / sizes.parts);
    const int kept_late = min(sizes.kept * LATE, (LATE * H + sizes.parts - 1) / sizes.parts);
    W* const resident_late = resident + static_cast<long long>(sizes.parts) * kept * H;
    if (kept > 0) keep_rows(resident, R, (G - LATE) * H, kept, sizes);
    if (kept_late > 0) keep_rows(resident_late, R + 2ll * H * H, H, kept_late, sizes);

    const auto sum_parts = [&](int r, int u) {
        W total = 0;
        for (u32 part = 0; part < sizes.parts; ++part) total += partials[(part * H + u) * ROWS + r];
        return total;
    };
    for (int p = threadIdx.x; p < pairs; p += blockDim.x) {
        const int r = p / H, u = p % H;
        const long long n = first + r, of_state = (n * sizes.D + d) * H + u;
        const bool is_inside = n < sizes.N;
        dh[p] = is_inside && sizes.of_last == 1 ? load_acc(arrays.dy + of_state) : W(0);
#pragma unroll
        for (int g = 0; g < G; ++g) gates[(g * H + u) * ROWS + r] = 0;
        if constexpr (IS_LSTM) {
            dc[p] = is_inside && sizes.of_last == 2 ? load_acc(arrays.dy + of_state) : W(0);
            W c = is_inside && arrays.first_c ? load_acc(arrays.first_c + of_state) : W(0);
#pragma unroll 4
            for (long long k = 0; k < S && is_inside; ++k) {
                const long long s = is_reverse ? S - 1 - k : k;
                const T* const x = arrays.x + ((n * S + s) * sizes.D + d) * G * H + u;
                const T* const sum = sums + (n * S + s) * G * H + u;
                W v[G], h[G];
#pragma unroll
                for (int g = 0; g < G; ++g) v[g] = load_acc(x + g * H), h[g] = load_acc(sum + g * H);
                const CellStep<W> step = cell_step(v, h);
                c = multiply_add(step.forget, c, step.added);
                arrays.cells[((n * sizes.D + d) * S + k) * H + u] = c;
            }
        }
    }

    for (long long k = S - 1; k >= 0; --k) {
        const long long s = is_reverse ? S - 1 - k : k;
        for (int p = threadIdx.x; p < pairs; p += blockDim.x) {
            const int r = p / H, u = p % H;
            const long long n = first + r, at = n * S + s, back = is_reverse ? 1 : -1;
            if (n >= sizes.N) continue;
            const T* const x = arrays.x + (at * sizes.D + d) * G * H + u;
            const T* const sum = sums + at * G * H + u;
            T* const y = arrays.y + (at * sizes.D + d) * OUT * H + u;
            W v[G], h[G], out[OUT];
#pragma unroll
            for (int g = 0; g < G; ++g) {
                v[g] = load_acc(x + g * H);
                h[g] = load_acc(sum + g * H);
            }
            W total = dh[p];
            if (sizes.of_last == 0) total += load_acc(arrays.dy + (at * sizes.D + d) * H + u);
            if (k > 0) {
#pragma unroll
                for (int g = 0; g < G; ++g) {
                    prefetch(x + back * static_cast<long long>(sizes.D) * G * H + g * H);
                    prefetch(sum + back * G * H + g * H);
                }
            }
            if (k < S - 1) total += sum_parts(r, u);
            W before_c = 0, before_h = 0, carried = 0;
            if constexpr (IS_LSTM) {
                before_c = k > 0             ? arrays.cells[((n * sizes.D + d) * S + k - 1) * H + u]
                           : arrays.first_c ? load_acc(arrays.first_c + (n * sizes.D + d) * H + u)
                                            : W(0);
                carried = dc[p];
            }
            if constexpr (IS_GRU<Cell>) before_h = load_acc(before + at * H + u);
            const W inner = is_same<Cell, GruAfter> && arrays.bias ? arrays.bias[d * H + u] : W(0);
            step_back<Cell>(derivatives_of<Cell>(v, h, inner, before_h, before_c), total, carried, out);
            if constexpr (IS_LSTM) dc[p] = carried;
            dh[p] = IS_LSTM ? W(0) : carried;
#pragma unroll
            for (int g = 0; g < G; ++g) gates[(g * H + u) * ROWS + r] = out[g];
            if (sizes.index == 0) {
#pragma unroll
                for (int g = 0; g < OUT; ++g)
                    if (!RESETS_FIRST || g != 1) store_acc(y + g * H, out[g]);
            }
        }
        __syncthreads();
        if constexpr (RESETS_FIRST) {
            multiply<W, ROWS>(partials, gates + 2 * pairs, R + 2ll * H * H, resident_late, H, kept_late, sizes);
            __syncthreads();
            for (int p = threadIdx.x; p < pairs; p += blockDim.x) {
                const int r = p / H, u = p % H;
                const long long n = first + r, at = n * S + s;
                if (n >= sizes.N) continue;
                W& gate = gates[(H + u) * ROWS + r];
                const W reset = gate, of_product = sum_parts(r, u);
                dh[p] = multiply_add(of_product, reset, dh[p]);
                gate = of_product * load_acc(before + at * H + u) * reset * (1 - reset);
                if (sizes.index == 0) store_acc(arrays.y + ((at * sizes.D + d) * OUT + 1) * H + u, gate);
            }
            __syncthreads();
        }
        multiply<W, ROWS>(partials, gates, R, resident, (G - LATE) * H, kept, sizes);
        __syncthreads();
    }
    if (sizes.index == 0) return;
    for (int p = threadIdx.x; p < pairs; p += blockDim.x) {
        const int r = p / H, u = p % H;
        const long long n = first + r;
        if (n >= sizes.N) continue;
        const W state = sizes.index == 1 ? dh[p] + sum_parts(r, u) : IS_LSTM ? dc[p] : W(0);
        store_acc(arrays.y + (n * sizes.D + d) * H + u, state);
    }
}
