// permute.cu: the axes of an array in another order, where that is more than an exchange of two (swap_axes.cu), or its
// numbers in another dtype as well: a weight that a kernel wants so.
//
// Idea    A thread writes four numbers that lie next to each other. It divides to find the place of the first one and
//         counts on for the others. Writes are lines of memory; reads are what the order makes of them, through L2.
// Floor   Every number is read once and written once: 2^28 floats are 2.15 GB / 4.8 TB/s = 447 us.
// Layout  y: `count` numbers, row-major, of sizes (?, n1, n2, n3, n4, n5), sizes of 1 in front; x: the number of y's
//         place (i0, ..., i5) lies at i0 s0 + ... + i5 s5.
// Limits  Up to six axes, once those that stay together are one; words of 1, 2, 4 or 8 bytes, or float32, float16 and
//         bfloat16 into each other; sm_80 up.
#include "number.cuh"

constexpr int THREADS = 256, TOGETHER = 4;

template <class In, class Out>
__global__ void __launch_bounds__(THREADS) permute(
    const In* x, Out* y, long long count, long long n1, long long n2, long long n3, long long n4, long long n5,
    long long s0, long long s1, long long s2, long long s3, long long s4, long long s5) {
    const long long step = static_cast<long long>(TOGETHER) * gridDim.x * THREADS;
    const long long begin = TOGETHER * (static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x);
    for (long long first = begin; first < count; first += step) {
        long long rest = first;
        long long i5 = rest % n5;
        rest /= n5;
        long long i4 = rest % n4;
        rest /= n4;
        long long i3 = rest % n3;
        rest /= n3;
        long long i2 = rest % n2;
        rest /= n2;
        long long i1 = rest % n1, i0 = rest / n1;
#pragma unroll
        for (int k = 0; k < TOGETHER; ++k) {
            if (first + k < count) {
                const In* from = x + i0 * s0 + i1 * s1 + i2 * s2 + i3 * s3 + i4 * s4 + i5 * s5;
                if constexpr (is_same<In, Out>) y[first + k] = *from;
                else store1(y + first + k, to_float(*from));
            }
            if (++i5 == n5) {
                i5 = 0;
                if (++i4 == n4) {
                    i4 = 0;
                    if (++i3 == n3) {
                        i3 = 0;
                        if (++i2 == n2) {
                            i2 = 0;
                            if (++i1 == n1) {
                                i1 = 0;
                                ++i0;
                            }
                        }
                    }
                }
            }
        }
    }
}
