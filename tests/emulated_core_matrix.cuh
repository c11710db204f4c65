// Host version of mma/core_matrix.cuh: every lane computes its sums from the addresses in the descriptors.
#pragma once

#include "common/dtype.cuh"

#undef SHARED_ALIGNMENT
#define SHARED_ALIGNMENT 128

template <int ROWS> constexpr int core_matrix_offset(int row, int column) {
    return column / 8 * 16 * ROWS + row * 16 + column % 8 * 2;
}

template <int ROWS, bool TRANSPOSED> struct CoreMatrices {
    static constexpr int PANEL = 16 * ROWS;
    static constexpr int NEXT_OUTER = TRANSPOSED ? PANEL : 128, NEXT_K = TRANSPOSED ? 128 : PANEL;
    static constexpr bool IS_TRANSPOSED = TRANSPOSED;
    u32 at;

    explicit CoreMatrices(u32 shared_address) : at(shared_address) {}
    CoreMatrices from(int step) const { return CoreMatrices(at + step * 2 * NEXT_K); }
    // Address of the first of 8 outer elements x 16 k.
    long long descriptor(int step) const { return static_cast<int>(at) + step * 2 * NEXT_K; }
    static float element(long long word, int outer, int k) {
        const long long at = word + outer / 8 * NEXT_OUTER + k / 8 * NEXT_K;
        unsigned short bits;
        memcpy(&bits, &shared_base + (at + (TRANSPOSED ? k % 8 * 16 + outer % 8 * 2 : outer % 8 * 16 + k % 8 * 2)), 2);
        return __uint_as_float(static_cast<u32>(bits) << 16);
    }
};
static void fence_for_wgmma() {}

template <int STEPS, int BY, class A, class B, int NT>
void begin_gemm(float (*c)[4], const A& a, const B& b, int first, bool sums) {
    const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    for (int j = 0; j < NT; ++j)
        for (int i = 0; i < 4; ++i) {
            if (first < STEPS && !sums) c[j][i] = 0.0f;
            for (int step = first; step < STEPS; step += BY) {
                double sum = c[j][i];
                for (int k = 0; k < 16; ++k)
                    sum += static_cast<double>(A::element(a.descriptor(step), row + i / 2 * 8, k)) *
                           B::element(b.descriptor(step), 8 * j + 2 * q + i % 2, k);
                c[j][i] = static_cast<float>(sum);
            }
        }
}

template <class B, int NT> void add_fragments(float (*c)[4], const u32 (&a)[4], long long b, bool sums) {
    const int lane = threadIdx.x % 32, q = lane % 4;
    float of_a[2][16];  // rows g and g + 8
    for (int i = 0; i < 16; ++i) {
        const u32 word = __shfl_sync(~0u, a[i % 4], lane - q + i / 4);
        for (int j = 0; j < 2; ++j)
            of_a[i % 2][i % 4 / 2 * 8 + i / 4 * 2 + j] = __uint_as_float(word >> 16 * j << 16);
    }
    for (int j = 0; j < NT; ++j)
        for (int i = 0; i < 4; ++i) {
            double sum = sums ? c[j][i] : 0.0f;
            for (int k = 0; k < 16; ++k)
                sum += static_cast<double>(of_a[i / 2][k]) * B::element(b, 8 * j + 2 * q + i % 2, k);
            c[j][i] = static_cast<float>(sum);
        }
}

static void wgmma_fence() {}
static void wgmma_commit() {}
template <int n> void wgmma_wait() {  // the warpgroup synchronises
    emulated::arrive(emulated::current->warpgroup_barriers[threadIdx.x / 128], 128);
}
