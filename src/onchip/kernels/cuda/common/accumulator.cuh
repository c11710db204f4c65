// common/accumulator.cuh: accumulator types of general kernels: float64 for float64, float32 for all other dtypes.
#pragma once
#include "common/dtype.cuh"

template <class T>
struct AccumulatorType {
    using type = float;
};
template <>
struct AccumulatorType<double> {
    using type = double;
};
template <class T>
using acc_t = typename AccumulatorType<T>::type;

template <class T>
__device__ __forceinline__ acc_t<T> load_acc(const T* at) {
    if constexpr (is_same<T, acc_t<T>>) return *at;
    else return to_float(*at);
}
template <class T>
__device__ __forceinline__ void store_acc(T* at, acc_t<T> v) {
    if constexpr (is_same<T, double>) *at = v;
    else store1(at, v);
}

// Vector load of V elements, aligned to their total size; more than 16 bytes in several words.
template <class T, int V>
__device__ __forceinline__ void load_contiguous(const T* at, acc_t<T> (&v)[V]) {
    constexpr int BYTES = V * sizeof(T), N = BYTES > 16 ? 16 / sizeof(T) : V;
    using Word = typename Vector<N * sizeof(T)>::type;
#pragma unroll
    for (int first = 0; first < V; first += N) {
        const Word word = *reinterpret_cast<const Word*>(at + first);
#pragma unroll
        for (int i = 0; i < N; ++i) v[first + i] = load_acc(reinterpret_cast<const T*>(&word) + i);
    }
}
// Predicated vector load: no memory access unless is_valid; `empty` otherwise.
template <class T, int V>
__device__ __forceinline__ void load_or(acc_t<T> (&v)[V], const T* at, bool is_valid, T empty) {
    using Word = typename Vector<sizeof(T) * V>::type;
    union {
        Word word;
        T elements[V];
    };
#pragma unroll
    for (int i = 0; i < V; ++i) elements[i] = empty;
    if (is_valid) word = *reinterpret_cast<const Word*>(at);
#pragma unroll
    for (int i = 0; i < V; ++i) v[i] = load_acc(elements + i);
}
template <class T, int V>
__device__ __forceinline__ void store_contiguous(T* at, const acc_t<T> (&v)[V]) {
    if constexpr (is_same<T, acc_t<T>>) {
        constexpr int BYTES = V * sizeof(T);
        using Word = typename Vector<BYTES % 16 ? BYTES : 16>::type;
#pragma unroll
        for (int i = 0; i < V; i += sizeof(Word) / sizeof(T))
            *reinterpret_cast<Word*>(at + i) = *reinterpret_cast<const Word*>(v + i);
    } else {
        store_vector(at, v);
    }
}

// max that propagates NaNs.
__device__ __forceinline__ float larger(float a, float b) {
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}
__device__ __forceinline__ double larger(double a, double b) { return b > a || b != b ? b : a; }
__device__ __forceinline__ float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
__device__ __forceinline__ double multiply_add(double a, double b, double c) { return fma(a, b, c); }
