// conv/last_layer/cells.cuh: output stores of conv/last_layer/mma.cu and conv/last_layer/sm90.cu.
#pragma once

#include "common/epilogue.cuh"

// 16-bit operands limit the accuracy whatever Y is, so a fast_math activation suffices.
template <int BYTES>
struct ActivationDtype {
    using type = float;
};
template <>
struct ActivationDtype<2> {
    using type = f16;
};

template <class Y>
__device__ __forceinline__ void store_element(Y* y, float v) {
    if constexpr (is_same<Y, unsigned char>) *y = static_cast<unsigned char>(ToPixels::apply(v));
    else store1(y, v);
}
// Two adjacent elements, at an even offset of y.
template <class Y>
__device__ __forceinline__ void store_pair(Y* y, float first, float second) {
    if constexpr (is_same<Y, unsigned char>) {
        const int both = static_cast<int>(ToPixels::apply(first)) | static_cast<int>(ToPixels::apply(second)) << 8;
        *reinterpret_cast<unsigned short*>(y) = static_cast<unsigned short>(both);
    } else {
        const float two[2] = {first, second};
        store_vector(y, two);
    }
}
// A lane's two adjacent columns of a cell, at offsets `at` from the cell's first element; < 0: padding column.
// HAS_PAIRS: the two are contiguous in y, at an even offset.
template <bool HAS_PAIRS, class Y>
__device__ __forceinline__ void store_two(Y* cell, const int (&at)[2], float first, float second) {
    if constexpr (HAS_PAIRS) {
        if (at[0] >= 0) store_pair(cell + at[0], first, second);
    } else {
        if (at[0] >= 0) store_element(cell + at[0], first);
        if (at[1] >= 0) store_element(cell + at[1], second);
    }
}
