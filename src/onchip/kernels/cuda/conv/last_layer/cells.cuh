// conv/last_layer/cells.cuh: what conv/last_layer/mma.cu and conv/last_layer/sm90.cu share: numbers of cells on their way out.
#pragma once

#include "common/epilogue.cuh"

// What is computed in 16 bits is as exact as such numbers, however it is stored: a brief activation will do.
template <int BYTES>
struct StoredOf {
    using type = float;
};
template <>
struct StoredOf<2> {
    using type = f16;
};

template <class Y>
__device__ __forceinline__ void store_number(Y* y, float v) {
    if constexpr (is_same<Y, unsigned char>) *y = static_cast<unsigned char>(ToPixels::apply(v));
    else store1(y, v);
}
// Two neighbours, at an even number of y.
template <class Y>
__device__ __forceinline__ void store_pair(Y* y, float first, float second) {
    if constexpr (is_same<Y, unsigned char>) {
        const int both = static_cast<int>(ToPixels::apply(first)) | static_cast<int>(ToPixels::apply(second)) << 8;
        *reinterpret_cast<unsigned short*>(y) = static_cast<unsigned short>(both);
    } else {
        const float two[2] = {first, second};
        store_several(y, two);
    }
}
// What a lane has of 8 columns of a cell: two neighbouring ones, which lie `at` numbers from the cell's first; below 0:
// nowhere. HAS_PAIRS: the second lies behind the first, at an even number.
template <bool HAS_PAIRS, class Y>
__device__ __forceinline__ void store_two(Y* cell, const int (&at)[2], float first, float second) {
    if constexpr (HAS_PAIRS) {
        if (at[0] >= 0) store_pair(cell + at[0], first, second);
    } else {
        if (at[0] >= 0) store_number(cell + at[0], first);
        if (at[1] >= 0) store_number(cell + at[1], second);
    }
}
