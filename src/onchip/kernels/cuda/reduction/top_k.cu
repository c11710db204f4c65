// reduction/top_k.cu: the k largest or smallest values along an axis, or their indices: (outer, N, inner) ->
// (outer, k, inner).
//
// Idea    (value, index) pairs are totally ordered, so each pass finds the first pair after the last one found:
//         k passes over a row and no state but the last pair. inner = 1: a warp per row, each lane every 32nd element.
//         inner > 1: a thread per column, coalesced.
// Floor   Each element is read once: 2^20 rows of 256 floats are 1.07 GB / 4.8 TB/s = 224 us. The other k - 1 passes
//         over a short row hit L1.
// Order   Irrelevant: ties go to the lowest index. NaN is larger than any value.
// Layout  x (outer, N, inner), y (outer, k, inner) of x's dtype or int64, row-major.
// Limits  Any shape with 1 <= k <= N; float32, float16, bfloat16, float64; sm_80 up.
#include "reduction/top_k.cuh"

constexpr int THREADS = 256;

template <class T, class Y>
__device__ __forceinline__ Y output_of(const T* from, long long at, long long inner) {
    if constexpr (is_same<Y, long long>) return at;
    else return from[at * inner];
}

// Y  T for values, long long for indices
template <class T, class Y, bool IS_MIN>
__global__ void __launch_bounds__(THREADS) top_rows(const T* x, Y* y, long long outer, long long N, long long k) {
    using W = acc_t<T>;
    const long long step = static_cast<long long>(gridDim.x) * (THREADS / 32);
    for (long long row = (static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x) / 32; row < outer; row += step) {
        const T* from = x + row * N;
        Candidate<W> last{0, NONE};
        for (long long r = 0; r < k; ++r) {
            last = next_in_warp<IS_MIN>(from, N, last);
            if (threadIdx.x % 32 == 0) y[row * k + r] = output_of<T, Y>(from, last.at, 1);
        }
    }
}

template <class T, class Y, bool IS_MIN>
__global__ void __launch_bounds__(THREADS)
    top_columns(const T* x, Y* y, long long outer, long long N, long long inner, long long k) {
    using W = acc_t<T>;
    const long long step = static_cast<long long>(gridDim.x) * THREADS, columns = outer * inner;
    for (long long column = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x; column < columns;
         column += step) {
        const long long row = column / inner;
        const T* from = x + column + row * (N - 1) * inner;
        Y* to = y + column + row * (k - 1) * inner;
        Candidate<W> last{0, NONE};
        for (long long r = 0; r < k; ++r) {
            last = next_of<IS_MIN>(from, 0, N, 1, inner, last);
            to[r * inner] = output_of<T, Y>(from, last.at, inner);
        }
    }
}
