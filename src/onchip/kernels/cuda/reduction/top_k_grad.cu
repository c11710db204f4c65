// reduction/top_k_grad.cu: dx of the k largest or smallest values along an axis, (outer, N, inner): dy at these, in
// their order, and 0 elsewhere.
//
// Idea    As reduction/top_k.cu: each pass over x finds the next element, in a warp per row (inner = 1) or a thread per
//         column. The thread that has set an element to 0 also stores its dy.
// Floor   x is read once, dx is written once: 2^20 rows of 256 floats are 2.15 GB / 4.2 TB/s = 511 us. The other k - 1
//         passes over a short row hit L1.
// Layout  x, dx (outer, N, inner), dy (outer, k, inner), row-major.
// Limits  Any shape with 1 <= k <= N; float32, float16, bfloat16, float64; sm_80 up.
#include "reduction/top_k.cuh"

constexpr int THREADS = 256;

template <class T, bool IS_MIN>
__global__ void __launch_bounds__(THREADS)
    top_grad_rows(const T* x, const T* dy, T* dx, long long outer, long long N, long long k) {
    const long long step = static_cast<long long>(gridDim.x) * (THREADS / 32);
    const int lane = threadIdx.x % 32;
    for (long long row = (static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x) / 32; row < outer; row += step) {
        T* to = dx + row * N;
        for (long long n = lane; n < N; n += 32) store_acc(to + n, 0);
        Candidate<acc_t<T>> last{0, NONE};
        for (long long r = 0; r < k; ++r) {
            last = next_in_warp<IS_MIN>(x + row * N, N, last);
            if (last.at % 32 == lane) to[last.at] = dy[row * k + r];
        }
    }
}

template <class T, bool IS_MIN>
__global__ void __launch_bounds__(THREADS)
    top_grad_columns(const T* x, const T* dy, T* dx, long long outer, long long N, long long inner, long long k) {
    const long long step = static_cast<long long>(gridDim.x) * THREADS, columns = outer * inner;
    for (long long column = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x; column < columns;
         column += step) {
        const long long row = column / inner, first = column + row * (N - 1) * inner;
        const T* from = dy + column + row * (k - 1) * inner;
        T* to = dx + first;
        for (long long n = 0; n < N; ++n) store_acc(to + n * inner, 0);
        Candidate<acc_t<T>> last{0, NONE};
        for (long long r = 0; r < k; ++r) {
            last = next_of<IS_MIN>(x + first, 0, N, 1, inner, last);
            to[last.at * inner] = from[r * inner];
        }
    }
}
