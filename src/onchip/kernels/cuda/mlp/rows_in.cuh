// mlp/rows_in.cuh: loads rows of x by cp.async through shared memory into the fragments of mma/tensor_core.cuh.
#pragma once

#include "common/dtype.cuh"

// Four lanes share a row: they load groups of 4 * V columns, lane q the q-th V of them. V is as wide as the alignment
// of rows allows, narrower at the end. Element e of a lane belongs to the group that contains column 4 * e. This is the
// k order of the first layer; its weights are packed in the same order.
template <class In, int D>
__device__ constexpr int group_width(int from) {
    int V = vector_width<In, D>(16);
    while (V > 1 && 4 * V > D - from) V /= 2;
    return V;
}

// k steps of the first layer: each of four lanes holds a quarter of the row.
template <class P>
__device__ constexpr int first_steps(int D) { return round_up((D + 3) / 4, 2 * P::PER_WORD) / (2 * P::PER_WORD); }

// A lane's elements of `row` from column `from` on; zeros past the end of the row.
template <class In, int D, int from, int e, int E>
__device__ __forceinline__ void load_elements(const In* row, int q, In (&values)[E]) {
    if constexpr (e < E && from < D) {
        constexpr int V = group_width<In, D>(from);
        using Word = typename Vector<V * sizeof(In)>::type;
        Word word{};
        if (from + 4 * V <= D || from + q * V < D) word = *reinterpret_cast<const Word*>(row + from + q * V);
#pragma unroll
        for (int i = 0; i < V; ++i) values[e + i] = reinterpret_cast<const In*>(&word)[i];
        load_elements<In, D, from + 4 * V, e + V>(row, q, values);
    } else {
#pragma unroll
        for (int i = e; i < E; ++i) values[i] = In{};
    }
}

template <class P, class In>
__device__ __forceinline__ u32 operand_word(const In* v) {
    if constexpr (P::PER_WORD == 1) return P::word(to_float(v[0]));
    else return join<typename P::Element>(v[0], v[1]);
}

template <class P, class In, int D, int from, int KS>
__device__ __forceinline__ void load_fragment(const In* upper, const In* lower, int q, u32 (&a)[KS][4]) {
    constexpr int E = 2 * P::PER_WORD * KS;
    In v[E];
    load_elements<In, D, from, 0>(upper, q, v);
#pragma unroll
    for (int w = 0; w < 2 * KS; ++w) a[w / 2][2 * (w % 2)] = operand_word<P>(v + w * P::PER_WORD);
    load_elements<In, D, from, 0>(lower, q, v);
#pragma unroll
    for (int w = 0; w < 2 * KS; ++w) a[w / 2][2 * (w % 2) + 1] = operand_word<P>(v + w * P::PER_WORD);
}

// Maps fragment row g < 8 to a row of the tile. Eight lanes (two rows) read 16 B each per phase: to avoid bank
// conflicts, these rows should be 64 B apart modulo 128. Any permutation works as long as y uses the same one.
template <int ROW_BYTES>
__device__ __forceinline__ int row_of(int g) {
    constexpr int APART = 2 * ROW_BYTES % 128 == 64 ? 2 : 4 * ROW_BYTES % 128 == 64 ? 4 : 1;
    const int pair = g / 2;
    return pair / APART * 2 * APART + pair % APART + g % 2 * APART;
}

__device__ __forceinline__ u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

// cp.async of a warp's rows from global to shared memory. Rows past the end are zero-filled. A tile entirely past the
// end leaves the slot unchanged, and its results are never stored.
template <int ROWS, class In, int D>
__device__ __forceinline__ void prefetch_rows(u32 slot, const In* x, long long row, long long B, int lane) {
    constexpr int BYTES = ROWS * D * static_cast<int>(sizeof(In));
    static_assert(BYTES % 16 == 0, "a tile must be a multiple of 16 B");
    const char* from = reinterpret_cast<const char*>(x + row * D) + 16 * lane;
    slot += 16 * lane;
    if (row >= B) return;
    if (row + ROWS <= B) {
#pragma unroll
        for (int at = 0; at < BYTES; at += 512)
            if (at + 512 <= BYTES || at + 16 * lane < BYTES)
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(slot + at), "l"(from + at) : "memory");
    } else {
        const long long left = (B - row) * D * static_cast<long long>(sizeof(In)) - 16 * lane;
#pragma unroll
        for (int at = 0; at < BYTES; at += 512) {
            const int nbytes = left - at >= 16 ? 16 : left - at > 0 ? static_cast<int>(left - at) : 0;
            const char* source = nbytes > 0 ? from + at : reinterpret_cast<const char*>(x);
            if (at + 512 <= BYTES || at + 16 * lane < BYTES)
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(slot + at), "l"(source), "r"(nbytes)
                             : "memory");
        }
    }
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" :: "n"(LEFT) : "memory");
}
