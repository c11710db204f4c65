// scan/columns.cu: scan (prefix sum) along an axis that is not the last: one thread per column.
//
// Idea    Adjacent threads take adjacent columns, so a warp's accesses coalesce; eight steps are loaded before the
//         first is used. No synchronisation.
// Floor   Each element is read and written once: 2^28 floats are 2.15 GB / 4.8 TB/s = 447 us. A large GPU needs some
//         hundred thousand columns to be busy.
// Layout  x, y (outer, N, inner), row-major; y may alias x.
// Limits  Any shape; ints of 1 to 8 bytes, all floats; sm_80 up.
#include "scan/scan.cuh"

constexpr int THREADS = 256, STEPS = 8;

template <class Op, class S, bool EXCLUSIVE, bool REVERSE>
__device__ void scan(const S* x, S* y, long long outer, long long N, long long inner) {
    using T = computed_t<S>;
    using Total = typename Op::template Total<T>;
    const long long step = static_cast<long long>(gridDim.x) * THREADS;
    for (long long column = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x; column < outer * inner;
         column += step) {
        const long long first = column / inner * N * inner + column % inner;
        const long long from = REVERSE ? first + (N - 1) * inner : first, stride = REVERSE ? -inner : inner;
        Total total = Op::template identity<Total>();
        for (long long begin = 0; begin < N; begin += STEPS) {
            T v[STEPS];
#pragma unroll
            for (int k = 0; k < STEPS; ++k) {
                if (begin + k < N) v[k] = to_computed(x[from + (begin + k) * stride]);
            }
#pragma unroll
            for (int k = 0; k < STEPS; ++k) {
                if (begin + k >= N) break;
                const Total next = Op::combine(total, static_cast<Total>(v[k]));
                y[from + (begin + k) * stride] = to_stored<S>(static_cast<T>(EXCLUSIVE ? total : next));
                total = next;
            }
        }
    }
}

template <class Op, class S, bool EXCLUSIVE, bool REVERSE>
__global__ void __launch_bounds__(THREADS)
scan_columns(const S* x, S* y, long long outer, long long N, long long inner) {
    scan<Op, S, EXCLUSIVE, REVERSE>(x, y, outer, N, inner);
}
