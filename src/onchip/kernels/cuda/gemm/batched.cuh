// gemm/batched.cuh: batch strides of gemm/batched.cu and gemm/batched_mma.cu, with broadcasting.
#pragma once

constexpr int MAX_AXES = 4;

struct Matrices {
    long long a, b;  // element offsets
};
// Batch axes. The index of a matrix of y is decoded by division, last axis first.
struct BatchAxes {
    long long size[MAX_AXES], a_stride[MAX_AXES], b_stride[MAX_AXES];  // elements; 0: broadcast; missing sizes: 1

    __device__ __forceinline__ Matrices matrices(long long i) const {
        Matrices at = {0, 0};
#pragma unroll
        for (int axis = MAX_AXES - 1; axis >= 0; --axis) {
            const long long index = i % size[axis];
            i /= size[axis];
            at.a += index * a_stride[axis];
            at.b += index * b_stride[axis];
        }
        return at;
    }
};
