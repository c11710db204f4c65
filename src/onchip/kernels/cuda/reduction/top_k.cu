// reduction/top_k.cu: the k largest or smallest numbers along an axis, or their places: (outer, N, inner) -> (outer, k, inner).
//
// Idea    Numbers and places together have one order, so the next one is the first of those behind the last one found:
//         k walks over a row, with nothing to keep but what was found last. A warp shares a row (inner = 1), each lane
//         every 32nd number; a thread has a column (inner > 1), neighbours beside neighbours.
// Floor   Every number is read once: 2^20 rows of 256 floats are 1.07 GB / 4.8 TB/s = 224 us. The k - 1 walks behind the
//         first find a short row in L1.
// Order   None: of equal numbers the place decides, the lowest. A NaN is larger than any number.
// Layout  x (outer, N, inner), y (outer, k, inner) of x's numbers or of int64, row-major.
// Shared  None.
// Limits  Any shape with 1 <= k <= N; float32, float16, bfloat16, float64; sm_80 up.
#include "common/accumulator.cuh"

constexpr int THREADS = 256;
constexpr long long NOWHERE = -1;

template <class W>
struct Found {
    W v;
    long long at;
};

template <bool IS_MIN, class W>
__device__ __forceinline__ bool comes_first(const Found<W>& a, const Found<W>& b) {
    const bool a_nan = a.v != a.v, b_nan = b.v != b.v;
    if (a_nan != b_nan) return IS_MIN ? b_nan : a_nan;
    if (!a_nan && a.v != b.v) return IS_MIN ? a.v < b.v : a.v > b.v;
    return a.at < b.at;
}
// Whichever comes first; one of them may be nowhere.
template <bool IS_MIN, class W>
__device__ __forceinline__ Found<W> first_of(const Found<W>& a, const Found<W>& b) {
    if (a.at == NOWHERE) return b;
    return b.at != NOWHERE && comes_first<IS_MIN>(b, a) ? b : a;
}
// The first of the numbers n, n + step, .. that come behind `last`.
template <bool IS_MIN, class T>
__device__ __forceinline__ Found<wide_t<T>> next_of(const T* from, long long n, long long N, int step, long long inner,
                                                    const Found<wide_t<T>>& last) {
    Found<wide_t<T>> best{0, NOWHERE};
#pragma unroll 4
    for (; n < N; n += step) {
        const Found<wide_t<T>> next{load_wide(from + n * inner), n};
        if (last.at == NOWHERE || comes_first<IS_MIN>(last, next)) best = first_of<IS_MIN>(best, next);
    }
    return best;
}
template <class T, class Y>
__device__ __forceinline__ Y given(const T* from, long long at, long long inner) {
    if constexpr (is_same<Y, long long>) return at;
    else return from[at * inner];
}

// Y  T for the numbers, long long for their places
template <class T, class Y, bool IS_MIN>
__global__ void __launch_bounds__(THREADS) top_rows(const T* x, Y* y, long long outer, long long N, long long k) {
    using W = wide_t<T>;
    const long long step = static_cast<long long>(gridDim.x) * (THREADS / 32);
    const int lane = threadIdx.x % 32;
    for (long long row = (static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x) / 32; row < outer; row += step) {
        const T* from = x + row * N;
        Found<W> last{0, NOWHERE};
        for (long long r = 0; r < k; ++r) {
            last = next_of<IS_MIN>(from, lane, N, 32, 1, last);
#pragma unroll
            for (int mask = 16; mask > 0; mask /= 2) {
                const Found<W> other{__shfl_xor_sync(~0u, last.v, mask), __shfl_xor_sync(~0u, last.at, mask)};
                last = first_of<IS_MIN>(last, other);
            }
            if (lane == 0) y[row * k + r] = given<T, Y>(from, last.at, 1);
        }
    }
}

template <class T, class Y, bool IS_MIN>
__global__ void __launch_bounds__(THREADS)
    top_columns(const T* x, Y* y, long long outer, long long N, long long inner, long long k) {
    using W = wide_t<T>;
    const long long step = static_cast<long long>(gridDim.x) * THREADS, columns = outer * inner;
    for (long long column = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x; column < columns; column += step) {
        const long long row = column / inner;
        const T* from = x + column + row * (N - 1) * inner;
        Y* to = y + column + row * (k - 1) * inner;
        Found<W> last{0, NOWHERE};
        for (long long r = 0; r < k; ++r) {
            last = next_of<IS_MIN>(from, 0, N, 1, inner, last);
            to[r * inner] = given<T, Y>(from, last.at, inner);
        }
    }
}
