// gradient/dropout.cu: the factors of a dropout from a counter, and their product with x.
//
// Idea    A thread computes one block of Philox4x32-10: four words, for four adjacent elements. Key and counter depend on
//         seed, step, dropout and element alone, so the bits are those of every other device.
// Floor   The mask is written once: 2^28 floats are 1.07 GB / 4.2 TB/s = 256 us; with the product, x is read and y
//         written, too. A block has about 100 integer instructions, a third of what an H200 issues in that time.
// Layout  mask, x and y contiguous, `count` elements, 16 B aligned.
// Limits  float32, float16, bfloat16, float64; sm_80 up.
#include "common/accumulator.cuh"

constexpr int THREADS = 256;

template <class A>
struct Dropout {
    const long long* draw;  // seed and step
    long long count;
    u32 number, dropped;  // which dropout it is; words below this are dropped
    A kept;               // the factor of the others, rounded to the element type
};

__device__ __forceinline__ void philox(u32 (&word)[4], u32 key, u32 second_key) {
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const u32 a = 0xD2511F53u * word[0], a_high = __umulhi(0xD2511F53u, word[0]);
        const u32 b = 0xCD9E8D57u * word[2], b_high = __umulhi(0xCD9E8D57u, word[2]);
        word[0] = b_high ^ word[1] ^ key;
        word[1] = b;
        word[2] = a_high ^ word[3] ^ second_key;
        word[3] = a;
        key += 0x9E3779B9u;
        second_key += 0xBB67AE85u;
    }
}

// mask and y may be null, x only with y.
template <class T>
__global__ void __launch_bounds__(THREADS) dropout(const T* x, T* mask, T* y, Dropout<acc_t<T>> of) {
    const long long block = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x, first = 4 * block;
    if (first >= of.count) return;
    const long long seed = of.draw[0], step = of.draw[1];
    u32 word[4] = {static_cast<u32>(block), static_cast<u32>(block >> 32), static_cast<u32>(step), of.number};
    philox(word, static_cast<u32>(seed), static_cast<u32>(seed >> 32));
    acc_t<T> factor[4], v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) factor[i] = word[i] < of.dropped ? 0 : of.kept;
    if (first + 4 <= of.count) {
        if (mask != nullptr) store_contiguous(mask + first, factor);
        if (y == nullptr) return;
        load_contiguous(x + first, v);
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] *= factor[i];
        store_contiguous(y + first, v);
    } else {
        for (int i = 0; first + i < of.count; ++i) {
            if (mask != nullptr) store_acc(mask + first + i, factor[i]);
            if (y != nullptr) store_acc(y + first + i, load_acc(x + first + i) * factor[i]);
        }
    }
}
