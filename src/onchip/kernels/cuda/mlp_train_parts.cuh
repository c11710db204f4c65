// mlp_train_parts.cuh: floats as sums of numbers of bf16.
//
// Parts   A float is the sum of PARTS numbers of bf16: three hold all of its 24 bits, two 16 of them. They have the range
//         of a float, so no scale goes with them.
#pragma once

#include "mlp_train_finish.cuh"

// The upper halves of two floats: of bytes, all that is not zero.
__device__ __forceinline__ u32 upper_halves(float first, float second) {
    return __byte_perm(__float_as_uint(first), __float_as_uint(second), 0x7632u);
}

// 8 floats as PARTS pieces of bf16: all but the last are cut, so what is left is exact; the last is rounded.
template <int PARTS>
__device__ __forceinline__ void split_eight(uint4 (&parts)[PARTS], float (&v)[8]) {
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        u32 words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            words[i] = part == PARTS - 1 ? pack<bf16>(v[2 * i], v[2 * i + 1]) : upper_halves(v[2 * i], v[2 * i + 1]);
        parts[part] = {words[0], words[1], words[2], words[3]};
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] -= __uint_as_float(__float_as_uint(v[i]) & 0xffff0000u);
    }
}
