// gradient/extreme_grad.cu: dx of a max or min along an axis, (outer, N, inner): dy at the first extreme, 0 elsewhere.
//
// Idea    extreme_grad_rows (inner = 1): LANES threads find the extreme of a row, then write the row of dx.
//         extreme_grad_columns: a thread per column. The max of a sequence stops at its length.
// Floor   x is read once, dx is written once: 2^28 elements are 2.15 GB / 4.2 TB/s = 511 us.
// Layout  x, dx (outer, N, inner), dy (outer, inner), row-major; lengths of int32 or int64, or null.
// Shared  One candidate per warp, where a block shares a row.
// Limits  Any shape with 1 <= N < 2^31; float32, float16, bfloat16, float64; sm_80 up.
#include "common/accumulator.cuh"

constexpr int THREADS = 256;

// The lengths of sequences: a window begins at every `stride` elements, and those inside its sequence count.
struct Lengths {
    const void* lengths;
    u32 are_wide, each;  // int64; consecutive rows per length
    long long window, stride;

    __device__ __forceinline__ int count(long long row, int N) const {
        if (lengths == nullptr) return N;
        row /= each;
        const long long length =
            are_wide ? static_cast<const long long*>(lengths)[row] : static_cast<const int*>(lengths)[row];
        const long long inside = length < window ? 0 : (length - window) / stride + 1;
        return inside < N ? static_cast<int>(inside) : N;
    }
};

template <class A>
struct Candidate {
    A value;
    int index;  // -1: none
};
// Whether `a` is the extreme rather than b: NaNs first, then by value, then the first.
template <bool IS_MIN, class A>
__device__ __forceinline__ bool precedes(Candidate<A> a, Candidate<A> b) {
    if (a.index < 0 || b.index < 0) return b.index < 0;
    const bool a_is_nan = a.value != a.value, b_is_nan = b.value != b.value;
    if (a_is_nan != b_is_nan) return a_is_nan;
    if (!a_is_nan && a.value != b.value) return IS_MIN ? a.value < b.value : a.value > b.value;
    return a.index < b.index;
}
template <bool IS_MIN, int LANES, class A>
__device__ __forceinline__ Candidate<A> extreme_of(Candidate<A> best) {
#pragma unroll
    for (int mask = (LANES < 32 ? LANES : 32) / 2; mask > 0; mask /= 2) {
        const Candidate<A> other{__shfl_xor_sync(~0u, best.value, mask), __shfl_xor_sync(~0u, best.index, mask)};
        if (precedes<IS_MIN>(other, best)) best = other;
    }
    if constexpr (LANES > 32) {
        __shared__ Candidate<A> of_warp[LANES / 32];
        __syncthreads();  // all reads of the previous row are done
        if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = best;
        __syncthreads();
        best = of_warp[0];
#pragma unroll
        for (int warp = 1; warp < LANES / 32; ++warp)
            if (precedes<IS_MIN>(of_warp[warp], best)) best = of_warp[warp];
    }
    return best;
}

// V      elements per load; divides N
// LANES  threads per row: within a warp, or a block
template <bool IS_MIN, class T, int V, int LANES>
__global__ void __launch_bounds__(THREADS)
    extreme_grad_rows(const T* x, const T* dy, T* dx, long long outer, int N, Lengths lengths) {
    using A = acc_t<T>;
    constexpr int ROWS = THREADS / LANES;
    const int lane = threadIdx.x % LANES;
    // All threads of a warp run the same number of iterations, for the shuffles.
    for (long long first = static_cast<long long>(blockIdx.x) * ROWS; first < outer;
         first += static_cast<long long>(gridDim.x) * ROWS) {
        const bool is_inside = first + threadIdx.x / LANES < outer;
        const long long row = is_inside ? first + threadIdx.x / LANES : first;
        const int count = lengths.count(row, N);
        Candidate<A> best{0, -1};
#pragma unroll 4
        for (int n = lane * V; n < N; n += LANES * V) {
            A v[V];
            load_contiguous(x + row * N + n, v);
#pragma unroll
            for (int j = 0; j < V; ++j)
                if (n + j < count && precedes<IS_MIN, A>({v[j], n + j}, best)) best = {v[j], n + j};
        }
        best = extreme_of<IS_MIN, LANES>(best);
        const A d = load_acc(dy + row);
        for (int n = lane * V; is_inside && n < N; n += LANES * V) {
            A v[V];
#pragma unroll
            for (int j = 0; j < V; ++j) v[j] = n + j == best.index ? d : 0;
            store_contiguous(dx + row * N + n, v);
        }
    }
}

template <bool IS_MIN, class T>
__global__ void __launch_bounds__(THREADS)
    extreme_grad_columns(const T* x, const T* dy, T* dx, long long outer, int N, long long inner,
                         Lengths lengths) {
    using A = acc_t<T>;
    for (long long column = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x; column < outer * inner;
         column += static_cast<long long>(gridDim.x) * THREADS) {
        const long long row = column / inner, first = column + row * (N - 1) * inner;
        const int count = lengths.count(row, N);
        Candidate<A> best{0, -1};
#pragma unroll 4
        for (int n = 0; n < count; ++n) {
            const A v = load_acc(x + first + n * inner);
            if (precedes<IS_MIN, A>({v, n}, best)) best = {v, n};
        }
        const A d = load_acc(dy + column);
#pragma unroll 4
        for (int n = 0; n < N; ++n) store_acc(dx + first + n * inner, n == best.index ? d : A(0));
    }
}
