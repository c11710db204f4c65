// Host version of mma/tensor_core.cuh: mma.sync; the lanes of a warp exchange their fragments. Sums are rounded after
// every term; real tensor cores round otherwise.
#pragma once

#include "common/dtype.cuh"

template <class P>
float element_of(u32 word, int i) {
    if constexpr (P::PER_WORD == 1) return __uint_as_float(word);
    else return to_float(typename P::Element{static_cast<unsigned short>(word >> 16 * i)});
}

template <class P>
void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    const auto both = [](u32 low, u32 high) { return low | static_cast<unsigned long long>(high) << 32; };
    // The 8 registers of a row and step, two from each of four lanes.
    const auto gather = [&](unsigned long long value, int group, u32 (&words)[8]) {
        emulated::exchange(value, [&](auto of) {
            for (int lane = 0; lane < 4; ++lane) {
                const unsigned long long theirs = of(4 * group + lane);
                words[lane] = static_cast<u32>(theirs);
                words[lane + 4] = static_cast<u32>(theirs >> 32);
            }
            return 0;
        });
    };
    u32 upper[8], lower[8], left[8], right[8];
    gather(both(a[0], a[2]), g, upper);
    gather(both(a[1], a[3]), g, lower);
    gather(both(b0, b1), 2 * q, left);
    gather(both(b0, b1), 2 * q + 1, right);
    for (int word = 0; word < 8; ++word)
        for (int i = 0; i < P::PER_WORD; ++i) {
            const float x[] = {element_of<P>(upper[word], i), element_of<P>(lower[word], i)};
            const float w[] = {element_of<P>(left[word], i), element_of<P>(right[word], i)};
            for (int at = 0; at < 4; ++at) c[at] += x[at / 2] * w[at % 2];
        }
}
