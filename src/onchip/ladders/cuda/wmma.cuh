// wmma.cuh: the fragments of nvcuda::wmma, 16 x 16 x 16 in fp16 with fp32 accumulators, by mma.sync. NVRTC is given no
// CUDA headers here, and <mma.h> is one of them.
//
// As in WMMA, a warp holds a fragment, `at` may be in global or shared memory, and matrices are row-major; `stride` is
// that of their rows, in elements. Lane (g, q) = (lane / 4, lane % 4) holds pairs of columns 2q, 2q + 1 of rows g and
// g + 8 of A and C, and pairs of rows of columns g and g + 8 of B: mma.sync's layout (mma/tensor_core.cuh).
#pragma once

#include "mma/tensor_core.cuh"

constexpr int WMMA_SIZE = 16;

struct FragmentA {
    u32 pairs[4];
};
struct FragmentB {
    u32 pairs[4];  // two of columns 0 to 7, two of columns 8 to 15
};
struct Accumulators {
    float sums[2][4] = {};  // of columns 0 to 7, of columns 8 to 15
};

// Two neighbours of a row: one 4-byte load.
__device__ __forceinline__ void load_matrix(FragmentA& a, const f16* at, long long stride) {
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    const f16 *upper = at + g * stride + 2 * q, *lower = upper + 8 * stride;
    a.pairs[0] = *reinterpret_cast<const u32*>(upper);
    a.pairs[1] = *reinterpret_cast<const u32*>(lower);
    a.pairs[2] = *reinterpret_cast<const u32*>(upper + 8);
    a.pairs[3] = *reinterpret_cast<const u32*>(lower + 8);
}

// Two neighbours of a column: two 2-byte loads.
__device__ __forceinline__ void load_matrix(FragmentB& b, const f16* at, long long stride) {
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const f16* column = at + (2 * q + i % 2 * 8) * stride + i / 2 * 8 + g;
        b.pairs[i] = join<f16>(column[0], column[stride]);
    }
}

__device__ __forceinline__ void multiply_add(Accumulators& c, const FragmentA& a, const FragmentB& b) {
    mma<Fp16>(c.sums[0], a.pairs, b.pairs[0], b.pairs[1]);
    mma<Fp16>(c.sums[1], a.pairs, b.pairs[2], b.pairs[3]);
}

__device__ __forceinline__ void store_matrix(float* to, const Accumulators& c, int stride) {
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < 4; ++i) to[(g + i / 2 * 8) * stride + 8 * half + 2 * q + i % 2] = c.sums[half][i];
}

// Copy a padded (16, 16) tile to y (16, steps), 16 channels of a sentence, and add their biases. A warp calls this.
__device__ __forceinline__ void copy_unpadded(const float* padded, const float* bias, float* y, int steps) {
    for (int i = threadIdx.x % 32; i < WMMA_SIZE * steps; i += 32)
        y[i] = padded[i / steps * WMMA_SIZE + i % steps] + bias[i / steps];
}
