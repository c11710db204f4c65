// common/status.cuh: ids that are in no table. A kernel looks up another row in their place and goes on; where the first bad one
// stands is written to the host's memory, and told there.
//
// Three words, all bits set while nothing is wrong: each the place, 40 bits, and under it 24 bits of the id. A smaller
// word takes the place of a larger one, and the same place has the same id: so each word by itself ends with the
// smallest place, and all three together with the whole id, whoever writes first.
#pragma once

using u64 = unsigned long long;

__device__ inline void report_bad_id(u64* status, u64 place, long long id) {
    for (int i = 0; i < 3; ++i) {
        const u64 word = place << 24 | (static_cast<u64>(id) >> 24 * i & 0xFFFFFF);
        // Looked at first: all ids of a batch may be bad, and each atomic goes over the bus.
        if (word < *static_cast<volatile u64*>(status + i)) atomicMin(status + i, word);
    }
}

// The row of a table of V rows that is looked up for ids[place].
template <class Id>
__device__ __forceinline__ long long checked_id(const Id* ids, long long place, long long V, u64* status) {
    const long long id = ids[place];
    if (0 <= id && id < V) return id;
    report_bad_id(status, static_cast<u64>(place), id);
    return id < 0 ? 0 : V - 1;
}
