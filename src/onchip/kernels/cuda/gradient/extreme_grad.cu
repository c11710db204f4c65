// gradient/extreme_grad.cu: the gradient of a max, a min, the k largest or smallest values, or a max over sequences.
//
// Idea    A thread per element of x. An element that is none of the k results gets 0. If it is, its place among equal
//         results is the number of equal elements before it, which only then are read: mostly from L1.
// Floor   x is read and dx written once: 2^28 floats are 2.15 GB / 4.2 TB/s = 511 us. Each element is compared with up
//         to k results, from L1.
// Layout  x, dx (outer, N, inner); y, dy (outer, k, inner), best first. Of a SequenceMax outer is (B, channels), and
//         lengths (B): element n counts if n * stride + window <= length.
// Limits  Any sizes; N < 2^31; float32, float16, bfloat16, float64; int32 or int64 lengths; sm_80 up.
#include "common/accumulator.cuh"
#include "common/fast_divide.cuh"

constexpr int THREADS = 256;

struct Extremes {
    Divider inner, N, channels;
    long long count;
    u32 k, window, stride;
};

// NaNs are equal: a NaN that is the result gets the gradient.
template <class W>
__device__ __forceinline__ bool are_equal(W a, W b) {
    return a == b || (a != a && b != b);
}

// lengths  or null
template <class T, class Id, class Index>
__global__ void __launch_bounds__(THREADS)
    extreme_grad(const T* x, const T* y, const T* dy, T* dx, const Id* lengths, const Extremes extremes) {
    using W = acc_t<T>;
    const long long step = static_cast<long long>(gridDim.x) * THREADS, inner = extremes.inner.size;
    for (long long at = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x; at < extremes.count; at += step) {
        Index outer = static_cast<Index>(at);
        const u32 column = pop_index(outer, extremes.inner), n = pop_index(outer, extremes.N), k = extremes.k;
        const long long results = static_cast<long long>(outer) * k * inner + column;
        W gradient = 0;
        bool is_inside = true;
        if (lengths != nullptr) {
            const long long end = static_cast<long long>(n) * extremes.stride + extremes.window;
            is_inside = end <= lengths[quotient(outer, extremes.channels)];
        }
        if (is_inside) {
            const W v = load_acc(x + at);
            u32 place = 0;
            while (place < k && !are_equal(v, load_acc(y + results + place * inner))) ++place;
            if (place < k) {
                const T* const first = x + at - n * inner;
                for (u32 m = 0; m < n && place < k; ++m) place += are_equal(v, load_acc(first + m * inner));
                if (place < k && are_equal(v, load_acc(y + results + place * inner)))
                    gradient = load_acc(dy + results + place * inner);
            }
        }
        store_acc(dx + at, gradient);
    }
}
