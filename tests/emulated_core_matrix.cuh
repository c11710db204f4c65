// Instead of mma/core_matrix.cuh's instructions, on the host: every lane makes its own sums from where a descriptor says.
#pragma once

#include "common/dtype.cuh"

#undef SHARED_ALIGNMENT
#define SHARED_ALIGNMENT 128

template <int ROWS> constexpr int place_in_strips(int row, int column) {
    return column / 8 * 16 * ROWS + row * 16 + column % 8 * 2;
}

template <int ROWS, bool TURNED> struct Strips {
    static constexpr int STRIP = 16 * ROWS;
    static constexpr int NEXT_OUTER = TURNED ? STRIP : 128, NEXT_K = TURNED ? 128 : STRIP;
    static constexpr bool IS_TURNED = TURNED;
    u32 at;

    explicit Strips(u32 shared_address) : at(shared_address) {}
    Strips from(int step) const { return Strips(at + step * 2 * NEXT_K); }
    // The first place of 8 outer numbers, of 16 k's.
    long long word(int step) const { return static_cast<int>(at) + step * 2 * NEXT_K; }
    static float number(long long word, int outer, int k) {
        const long long at = word + outer / 8 * NEXT_OUTER + k / 8 * NEXT_K;
        unsigned short bits;
        memcpy(&bits, &shared_base + (at + (TURNED ? k % 8 * 16 + outer % 8 * 2 : outer % 8 * 16 + k % 8 * 2)), 2);
        return __uint_as_float(static_cast<u32>(bits) << 16);
    }
};
static void show_to_products() {}

template <int STEPS, int BY, class A, class B, int NT>
void begin_sums(float (*c)[4], const A& a, const B& b, int first, bool sums) {
    const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    for (int j = 0; j < NT; ++j)
        for (int i = 0; i < 4; ++i) {
            if (first < STEPS && !sums) c[j][i] = 0.0f;
            for (int step = first; step < STEPS; step += BY) {
                double sum = c[j][i];
                for (int k = 0; k < 16; ++k)
                    sum += static_cast<double>(A::number(a.word(step), row + i / 2 * 8, k)) *
                           B::number(b.word(step), 8 * j + 2 * q + i % 2, k);
                c[j][i] = static_cast<float>(sum);
            }
        }
}

template <class B, int NT> void add_words(float (*c)[4], const u32 (&a)[4], long long b, bool sums) {
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
                sum += static_cast<double>(of_a[i / 2][k]) * B::number(b, 8 * j + 2 * q + i % 2, k);
            c[j][i] = static_cast<float>(sum);
        }
}

static void begin_products() {}
static void end_products() {}
template <int n> void wait_for_products() {  // four warps multiply as one
    emulated::arrive(emulated::now->of_teams[threadIdx.x / 128], 128);
}
