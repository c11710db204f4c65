// cluster_sums.cuh: what the blocks of a cluster have of the same numbers, added up, part by part.
#pragma once

#include "boxes.cuh"

// Numbers i, two at a time, from `first` on in steps of `step`, of `count`: read(i, part) of all parts, a power of two of
// them and AT_ONCE at most, added up from the first to the last; then give(i, two). It takes long until a number of another
// block is there, so AT_ONCE of them are under way at a time.
template <int AT_ONCE, class Read, class Give>
__device__ __forceinline__ void add_up_parts(int first, int step, int count, u32 parts, Read read, Give give) {
    const int each = 31 - __clz(static_cast<int>(parts));
    for (int i = first; i < count; i += step * (AT_ONCE >> each)) {
        float2 found[AT_ONCE];
#pragma unroll
        for (int l = 0; l < AT_ONCE; ++l) {
            const int at = i + (l >> each) * step;
            found[l] = at < count ? read(at, l & (parts - 1)) : float2{0.0f, 0.0f};
        }
        float two[2];
#pragma unroll
        for (int l = 0; l < AT_ONCE; ++l) {
            const int at = i + (l >> each) * step;
            const u32 part = l & (parts - 1);
            two[0] = part ? two[0] + found[l].x : found[l].x;
            two[1] = part ? two[1] + found[l].y : found[l].y;
            if (part == parts - 1 && at < count) give(at, two);
        }
    }
}
