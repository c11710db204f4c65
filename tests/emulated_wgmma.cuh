// Host version of mma/wgmma.cuh: every lane computes its sums at once; lanes exchange operands held in registers. Sums
// are truncated after every instruction, as tensor cores are believed to do.
#pragma once

#include "mma/tma.cuh"
#include "common/dtype.cuh"

template <class P>
float element_of(u32 word, int i) {
    if constexpr (P::PER_WORD == 1) return __uint_as_float(word & 0xffffe000);  // truncated, as tensor cores do
    else return to_float(typename P::Element{static_cast<unsigned short>(word >> 16 * i)});
}

template <class P, int N>
struct Wgmma {
    static u32 word_at(unsigned long long tile, int row, int word) {
        const int line_bytes = static_cast<int>(tile >> 32 & 0xff), pitch = static_cast<int>(tile >> 40);
        const u32 line = static_cast<u32>(tile) * 16 + pitch * (row / 8) + line_bytes * (row % 8);
        u32 result;
        memcpy(&result, swizzled(line + 4 * word, line_bytes), 4);
        return result;
    }
    static void multiply(float (*c)[4], const u32 (&upper)[8], const u32 (&lower)[8], unsigned long long tiles,
                         bool sums) {
        const int q = threadIdx.x % 4;
        for (int j = 0; j < N / 8; ++j)
            for (int i = 0; i < 4; ++i) {
                double sum = sums ? c[j][i] : 0.0;
                for (int word = 0; word < 8; ++word) {
                    const u32 a = i < 2 ? upper[word] : lower[word], b = word_at(tiles, 8 * j + 2 * q + i % 2, word);
                    for (int k = 0; k < P::PER_WORD; ++k)
                        sum += static_cast<double>(element_of<P>(a, k)) * element_of<P>(b, k);
                }
                const float rounded = static_cast<float>(sum);
                c[j][i] = fabs(rounded) > fabs(sum) ? nextafterf(rounded, 0.0f) : rounded;
            }
    }
    static void add(float (*c)[4], unsigned long long rows, unsigned long long tiles, bool sums) {
        const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
        u32 upper[8], lower[8];
        for (int word = 0; word < 8; ++word) {
            upper[word] = word_at(rows, row, word);
            lower[word] = word_at(rows, row + 8, word);
        }
        multiply(c, upper, lower, tiles, sums);
    }
    static void add(float (*c)[4], const u32 (&a)[4], unsigned long long tiles, bool sums) {
        u32 upper[8], lower[8];
        const int first = threadIdx.x % 32 / 4 * 4;
        for (int i = 0; i < 4; ++i)
            emulated::exchange(a[i], [&](auto of) {
                for (int lane = 0; lane < 4; ++lane) (i % 2 ? lower : upper)[i / 2 * 4 + lane] = of(first + lane);
                return 0;
            });
        multiply(c, upper, lower, tiles, sums);
    }
};

template <int LINE = 128>
unsigned long long swizzled_descriptor(u32 shared_address, u32 pitch = 8 * LINE) {
    return static_cast<unsigned long long>(pitch) << 40 | static_cast<unsigned long long>(LINE) << 32 |
           shared_address >> 4;
}
static unsigned long long advance(unsigned long long tile, u32 bytes) { return tile + (bytes >> 4); }
static void wgmma_fence() {}
static void wgmma_commit() {}
template <int n>
void wgmma_wait() {  // the warpgroup synchronises
    static emulated::Barrier warpgroup_barriers[emulated::MAX_THREADS / 128];
    emulated::arrive(warpgroup_barriers[threadIdx.x / 128], 128);
}

static u32 transposed(u32 two) {
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    return emulated::exchange(two, [&](auto of) {
        const auto element = [&](int row) { return of(4 * row + g / 2) >> g % 2 * 16 & 0xffff; };
        return element(2 * q) | element(2 * q + 1) << 16;
    });
}
static void store_transposed(void* to, const u32 (&two)[4]) {
    const int lane = threadIdx.x % 32, r = lane % 8;
    unsigned short row[8];
    for (int i = 0; i < 4; ++i)
        emulated::exchange(two[i], [&](auto of) {
            for (int k = 0; k < 8 && lane / 8 == i; ++k) row[k] = of(4 * k + r / 2) >> r % 2 * 16;
            return 0;
        });
    emulated::check_16(to);
    memcpy(to, row, 16);
}
