// recurrent/slices.cuh: sums over lanes that share K, of recurrent/register_resident.cu and gradient_resident.cu.
#pragma once

// Reduces COUNT sequences' gate sums over SLICES lanes. Each lane ends with the sums of one sequence, in v[.][0].
template <int COUNT, int MASK, int G, int NS>
__device__ __forceinline__ void reduce_slices(float (&v)[G][NS], int slice) {
    if constexpr (MASK > 0) {
        const bool is_upper = slice & MASK;
#pragma unroll
        for (int g = 0; g < G; ++g) {
            if constexpr (COUNT > 1) {
#pragma unroll
                for (int r = 0; r < COUNT / 2; ++r) {
                    const float local = is_upper ? v[g][r + COUNT / 2] : v[g][r];
                    const float sent = is_upper ? v[g][r] : v[g][r + COUNT / 2];
                    v[g][r] = local + __shfl_xor_sync(~0u, sent, MASK);
                }
            } else {
                v[g][0] += __shfl_xor_sync(~0u, v[g][0], MASK);
            }
        }
        reduce_slices<(COUNT > 1 ? COUNT / 2 : 1), MASK / 2>(v, slice);
    }
}
