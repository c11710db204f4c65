// wide.cuh: numbers as general kernels compute with them: float64 in float64, all others in float32.
#pragma once
#include "number.cuh"

template <class T>
struct Wide {
    using type = float;
};
template <>
struct Wide<double> {
    using type = double;
};
template <class T>
using wide_t = typename Wide<T>::type;

template <class T>
__device__ __forceinline__ wide_t<T> load_wide(const T* at) {
    if constexpr (is_same<T, double>) return *at;
    else return to_float(*at);
}
template <class T>
__device__ __forceinline__ void store_wide(T* at, wide_t<T> v) {
    if constexpr (is_same<T, double>) *at = v;
    else store1(at, v);
}

// V neighbours: one, or four of at most 32 bits that are aligned.
template <class T, int V>
__device__ __forceinline__ void load_neighbours(const T* at, wide_t<T> (&v)[V]) {
    if constexpr (V == 1) {
        v[0] = load_wide(at);
    } else {
        const float4 four = load4(at);
        v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
    }
}
template <class T, int V>
__device__ __forceinline__ void store_neighbours(T* at, const wide_t<T> (&v)[V]) {
    if constexpr (V == 1) store_wide(at, v[0]);
    else store4(at, {v[0], v[1], v[2], v[3]});
}

// Whichever is larger; a NaN is larger than anything.
__device__ __forceinline__ double larger(double a, double b) { return b > a || b != b ? b : a; }
__device__ __forceinline__ float larger(float a, float b) {
    float most;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
    return most;
}
__device__ __forceinline__ float exp_of(float v) { return expf(v); }
__device__ __forceinline__ double exp_of(double v) { return exp(v); }
__device__ __forceinline__ float log_of(float v) { return logf(v); }
__device__ __forceinline__ double log_of(double v) { return log(v); }
