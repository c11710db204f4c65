// gemm/batched.cuh: where the matrices of stacks are, for gemm/batched.cu and gemm/batched_mma.cu.
#pragma once

constexpr int MOST_AXES = 4;

struct Matrices {
    long long a, b;  // from the first number on
};
// Matrix number i of y is divided by each size in turn, the last axis first.
struct Stack {
    long long size[MOST_AXES], a_stride[MOST_AXES], b_stride[MOST_AXES];  // strides in numbers; sizes that are not there: 1

    __device__ __forceinline__ Matrices matrices(long long i) const {
        Matrices at = {0, 0};
#pragma unroll
        for (int axis = MOST_AXES - 1; axis >= 0; --axis) {
            const long long along = i % size[axis];
            i /= size[axis];
            at.a += along * a_stride[axis];
            at.b += along * b_stride[axis];
        }
        return at;
    }
};
