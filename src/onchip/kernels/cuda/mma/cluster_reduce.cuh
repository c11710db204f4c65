// mma/cluster_reduce.cuh: reduction of partial sums over the blocks of a cluster (split-K), in rank order.
#pragma once

#include "mma/tma.cuh"

// For vector i (four floats) from `first` on in steps of `step`, below `count`: sums read(i, part) over the parts in
// order, then calls store(i, four). `parts` is a power of two <= IN_FLIGHT, the reads in flight to hide DSMEM latency.
template <int IN_FLIGHT, class Read, class Store>
__device__ __forceinline__ void reduce_partial_sums(int first, int step, int count, u32 parts, Read read, Store store) {
    const int each = 31 - __clz(static_cast<int>(parts));
    for (int i = first; i < count; i += step * (IN_FLIGHT >> each)) {
        float4 partial[IN_FLIGHT];
#pragma unroll
        for (int l = 0; l < IN_FLIGHT; ++l) {
            const int at = i + (l >> each) * step;
            partial[l] = at < count ? read(at, l & (parts - 1)) : float4{0.0f, 0.0f, 0.0f, 0.0f};
        }
        float four[4];
#pragma unroll
        for (int l = 0; l < IN_FLIGHT; ++l) {
            const int at = i + (l >> each) * step;
            const u32 part = l & (parts - 1);
            const float addend[4] = {partial[l].x, partial[l].y, partial[l].z, partial[l].w};
#pragma unroll
            for (int k = 0; k < 4; ++k) four[k] = part ? four[k] + addend[k] : addend[k];
            if (part == parts - 1 && at < count) store(at, four);
        }
    }
}
