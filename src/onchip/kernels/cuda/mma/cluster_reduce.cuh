// mma/cluster_reduce.cuh: reduction of partial sums over the blocks of a cluster (split-K), in rank order.
#pragma once

#include "mma/tma.cuh"

// For vector i (four floats) from `first` on in steps of `step`, below `count`: sums read(i, part) over the parts in
// order, then calls give(i, four). `parts` is a power of two <= AT_ONCE, the reads in flight to hide DSMEM latency.
template <int AT_ONCE, class Read, class Give>
__device__ __forceinline__ void add_up_parts(int first, int step, int count, u32 parts, Read read, Give give) {
    const int each = 31 - __clz(static_cast<int>(parts));
    for (int i = first; i < count; i += step * (AT_ONCE >> each)) {
        float4 found[AT_ONCE];
#pragma unroll
        for (int l = 0; l < AT_ONCE; ++l) {
            const int at = i + (l >> each) * step;
            found[l] = at < count ? read(at, l & (parts - 1)) : float4{0.0f, 0.0f, 0.0f, 0.0f};
        }
        float four[4];
#pragma unroll
        for (int l = 0; l < AT_ONCE; ++l) {
            const int at = i + (l >> each) * step;
            const u32 part = l & (parts - 1);
            const float more[4] = {found[l].x, found[l].y, found[l].z, found[l].w};
#pragma unroll
            for (int k = 0; k < 4; ++k) four[k] = part ? four[k] + more[k] : more[k];
            if (part == parts - 1 && at < count) give(at, four);
        }
    }
}
