// reduction/sequence_max.cu: the largest over time of sequences of different lengths, by itself.
//
// Idea    A thread has one channel of one sequence and walks over the windows that lie within it.
// Floor   Those windows are read once: 16,384 sentences of 1,024 channels and 14 windows are 0.94 GB in float32,
//         196 us at 4.8 TB/s.
// Order   None: a maximum. A NaN within is the result.
// Layout  x (B, C, P) or, channels last, (B, P, C): the steps from channel to channel and from window to window are
//         given; lengths (B); y (B, C).
// Limits  Sizes are run-time values; float32, float16, bfloat16, float64; lengths int32 or int64; sm_80 up.
#include "common/reduce.cuh"

template <class T, class Length>
__global__ void __launch_bounds__(256)
    sequence_max(const T* x, const Length* lengths, T* y, long long B, long long C, long long P, long long channel_step,
                 long long window_step, long long window, long long stride) {
    const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
    for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < B * C; i += step) {
        const long long b = i / C, length = lengths[b];
        const long long inside = length < window ? 0 : (length - window) / stride + 1;
        const long long count = inside < P ? inside : P;
        const T* from = x + b * C * P + (i - b * C) * channel_step;
        wide_t<T> most = 0;  // of no window
        if (count) most = load_wide(from);
#pragma unroll 4
        for (long long p = 1; p < count; ++p) most = Largest::join(most, load_wide(from + p * window_step));
        store_wide(y + i, most);
    }
}
