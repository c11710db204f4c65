// weave.cu: one of several values put where it belongs in their union: side by side (Concat), or every so many pixels
// (Interleave). A launch a value.
//
// Idea    A thread moves four words that lie next to each other in x. It divides to find the place of the first one and
//         counts on for the others. A word is as large as what stays together in both allows.
// Floor   Every number is read once and written once: 2^28 floats are 2.15 GB / 4.8 TB/s = 447 us.
// Layout  x (outer, h, w, inner), y (outer, H, W, inner), row-major: x's (o, i, j, c) goes to
//         (o, at_h + i * step_h, at_w + j * step_w, c).
// Limits  Words of 1, 2, 4, 8 or 16 bytes, aligned; sm_80 up.

constexpr int THREADS = 256, TOGETHER = 4;

template <class T>
__global__ void __launch_bounds__(THREADS) weave(
    const T* x, T* y, long long count, long long h, long long w, long long inner, long long H, long long W,
    long long step_h, long long step_w, long long at_h, long long at_w) {
    const long long step = static_cast<long long>(TOGETHER) * gridDim.x * THREADS;
    const long long begin = TOGETHER * (static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x);
    for (long long first = begin; first < count; first += step) {
        long long rest = first;
        long long c = rest % inner;
        rest /= inner;
        long long j = rest % w;
        rest /= w;
        long long i = rest % h, outer = rest / h;
#pragma unroll
        for (int k = 0; k < TOGETHER; ++k) {
            if (first + k < count)
                y[((outer * H + at_h + i * step_h) * W + at_w + j * step_w) * inner + c] = x[first + k];
            if (++c == inner) {
                c = 0;
                if (++j == w) {
                    j = 0;
                    if (++i == h) {
                        i = 0;
                        ++outer;
                    }
                }
            }
        }
    }
}
