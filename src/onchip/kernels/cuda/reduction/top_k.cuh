// reduction/top_k.cuh: the elements of a row in the order of a top k, one after another.
//
// (value, index) pairs are totally ordered: ties go to the lowest index, and NaN is larger than any value.
#pragma once
#include "common/accumulator.cuh"

constexpr long long NONE = -1;

template <class W>
struct Candidate {
    W v;
    long long at;
};

template <bool IS_MIN, class W>
__device__ __forceinline__ bool comes_first(const Candidate<W>& a, const Candidate<W>& b) {
    const bool a_nan = a.v != a.v, b_nan = b.v != b.v;
    if (a_nan != b_nan) return IS_MIN ? b_nan : a_nan;
    if (!a_nan && a.v != b.v) return IS_MIN ? a.v < b.v : a.v > b.v;
    return a.at < b.at;
}
// The first of two pairs; either may be NONE.
template <bool IS_MIN, class W>
__device__ __forceinline__ Candidate<W> first_of(const Candidate<W>& a, const Candidate<W>& b) {
    if (a.at == NONE) return b;
    return b.at != NONE && comes_first<IS_MIN>(b, a) ? b : a;
}
// The first pair after `last` among elements n, n + step, ..
template <bool IS_MIN, class T>
__device__ __forceinline__ Candidate<acc_t<T>> next_of(const T* from, long long n, long long N, int step,
                                                    long long inner, const Candidate<acc_t<T>>& last) {
    Candidate<acc_t<T>> best{0, NONE};
#pragma unroll 4
    for (; n < N; n += step) {
        const Candidate<acc_t<T>> next{load_acc(from + n * inner), n};
        if (last.at == NONE || comes_first<IS_MIN>(last, next)) best = first_of<IS_MIN>(best, next);
    }
    return best;
}
// The same of a row that a warp shares: each lane reads every 32nd element.
template <bool IS_MIN, class T>
__device__ __forceinline__ Candidate<acc_t<T>> next_in_warp(const T* row, long long N, Candidate<acc_t<T>> last) {
    using W = acc_t<T>;
    last = next_of<IS_MIN>(row, threadIdx.x % 32, N, 32, 1, last);
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) {
        const Candidate<W> other{__shfl_xor_sync(~0u, last.v, mask), __shfl_xor_sync(~0u, last.at, mask)};
        last = first_of<IS_MIN>(last, other);
    }
    return last;
}
