// recipes/recipes.cu: tensor core operand layouts of weights, computed once when an engine is built; NumPy's bits.
//
// Idea    tf32_parts rounds to TF32, or splits into TF32 high and low. spread_taps transposes convolution weights to
//         channels-last and zero-pads the channels. One thread per element; both are bound by memory.
// Floor   Bytes in and out: 4,096 x 4,096 split: 201 MB / 4.8 TB/s = 42 us.
// Layout  w and y row-major, as the evaluators in gemm/sm90.py and conv/sm90.py.
// Limits  w float32, float16 or bfloat16; any sizes; sm_80 up.
#include "common/dtype.cuh"

// To 10 mantissa bits, ties away from zero; NaN and infinity unchanged (common/precision.py: round_tf32).
__device__ __forceinline__ float round_tf32(float v) {
    const u32 bits = __float_as_uint(v);
    return (bits & 0x7f800000) == 0x7f800000 ? v : __uint_as_float((bits + 0x1000) & 0xffffe000);
}

// y  (PARTS, count): the high part, then the residual of v * scale (bits of UNBIASED in gemm/sm90.py)
template <class T, int PARTS>
__global__ void __launch_bounds__(256) tf32_parts(const T* w, float* y, long long count, u32 scale) {
    const long long step = static_cast<long long>(gridDim.x) * 256;
    for (long long i = static_cast<long long>(blockIdx.x) * 256 + threadIdx.x; i < count; i += step) {
        const float v = to_float(w[i]), high = round_tf32(v);
        y[i] = high;
        // No FMA: the product is rounded. The difference is exact.
        if constexpr (PARTS == 2) y[count + i] = round_tf32(__fmul_rn(v, __uint_as_float(scale)) - high);
    }
}

// (N, C, taps) -> (N, taps, channels); channels from C on are zero.
template <class T>
__global__ void __launch_bounds__(256) spread_taps(const T* w, T* y, long long N, long long C, long long taps,
                                                  long long channels) {
    const long long step = static_cast<long long>(gridDim.x) * 256, count = N * taps * channels;
    for (long long i = static_cast<long long>(blockIdx.x) * 256 + threadIdx.x; i < count; i += step) {
        const long long c = i % channels, tap = i / channels % taps, n = i / channels / taps;
        y[i] = c < C ? w[(n * C + c) * taps + tap] : T{};
    }
}
