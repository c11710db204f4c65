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

// Whichever is larger; a NaN is larger than anything.
template <class W>
__device__ __forceinline__ W larger(W a, W b) {
    return b > a || b != b ? b : a;
}
__device__ __forceinline__ float exp_of(float v) { return expf(v); }
__device__ __forceinline__ double exp_of(double v) { return exp(v); }
