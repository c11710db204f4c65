// common/status.cuh: out-of-range ids. A kernel clamps them and goes on; the position of the first bad id is written to
// host memory, and the host reports it.
//
// The status is three words, all bits set while nothing is wrong. Each holds the position (40 bits) above 24 bits of
// the id. atomicMin keeps the smallest position in each word, and equal positions have equal ids, so the three words
// together hold the whole id in any order of writes.
#pragma once

using u64 = unsigned long long;

__device__ inline void report_bad_id(u64* status, u64 position, long long id) {
    for (int i = 0; i < 3; ++i) {
        const u64 word = position << 24 | (static_cast<u64>(id) >> 24 * i & 0xFFFFFF);
        // Read before the atomic: every id of a batch may be bad, and each atomic crosses PCIe.
        if (word < *static_cast<volatile u64*>(status + i)) atomicMin(status + i, word);
    }
}

// The row to look up for ids[position] in a table of V rows: the id, clamped.
template <class Id>
__device__ __forceinline__ long long checked_id(const Id* ids, long long position, long long V, u64* status) {
    const long long id = ids[position];
    if (0 <= id && id < V) return id;
    report_bad_id(status, static_cast<u64>(position), id);
    return id < 0 ? 0 : V - 1;
}
