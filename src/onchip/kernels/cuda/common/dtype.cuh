// common/dtype.cuh: element types, conversions, vector loads. No CUDA headers, so NVRTC needs no include paths.
#pragma once

using u32 = unsigned int;

struct f16 {
    unsigned short bits;
};
struct bf16 {
    unsigned short bits;
};

__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ float to_float(f16 v) {
    float widened;
    asm("cvt.f32.f16 %0, %1;" : "=f"(widened) : "h"(v.bits));
    return widened;
}
__device__ __forceinline__ float to_float(bf16 v) { return __uint_as_float(static_cast<u32>(v.bits) << 16); }

// Two values rounded to T in a 32-bit word, the first in the lower half.
template <class T>
__device__ __forceinline__ u32 pack(float first, float second);
template <>
__device__ __forceinline__ u32 pack<f16>(float first, float second) {
    u32 word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
    return word;
}
template <>
__device__ __forceinline__ u32 pack<bf16>(float first, float second) {
    u32 word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
    return word;
}

// pack with a fused ReLU, in one instruction; NaNs propagate.
template <class T>
__device__ __forceinline__ u32 pack_relu(float first, float second);
template <>
__device__ __forceinline__ u32 pack_relu<f16>(float first, float second) {
    u32 word;
    asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
    return word;
}
template <>
__device__ __forceinline__ u32 pack_relu<bf16>(float first, float second) {
    u32 word;
    asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
    return word;
}

template <class A, class B>
constexpr bool is_same = false;  // as in <type_traits>
template <class A>
constexpr bool is_same<A, A> = true;

// Two values packed as T in 32 bits: unchanged where Source is T, else converted.
template <class T, class Source>
__device__ __forceinline__ u32 join(Source first, Source second) {
    if constexpr (is_same<T, Source>) return first.bits | static_cast<u32>(second.bits) << 16;
    else return pack<T>(to_float(first), to_float(second));
}

__device__ constexpr int round_up(int n, int unit) { return (n + unit - 1) / unit * unit; }

// Elements per vector load or store of a row of D elements: a divisor of D, at most `limit` and 16 B.
template <class T, int D>
__device__ constexpr int vector_width(int limit) {
    int V = 16 / static_cast<int>(sizeof(T));
    while (V > limit || D % V != 0) V /= 2;
    return V;
}

template <int BYTES>
struct Vector;
template <>
struct Vector<2> {
    using type = unsigned short;
};
template <>
struct Vector<4> {
    using type = unsigned int;
};
template <>
struct Vector<8> {
    using type = uint2;
};
template <>
struct Vector<16> {
    using type = uint4;
};

// Vector store of V elements; `to` is aligned to their total size.
template <int V>
__device__ __forceinline__ void store_vector(float* to, const float (&v)[V]) {
    using Word = typename Vector<4 * V>::type;
    *reinterpret_cast<Word*>(to) = *reinterpret_cast<const Word*>(v);
}
template <class T, int V>
__device__ __forceinline__ void store_vector(T* to, const float (&v)[V]) {
    if constexpr (V == 1) {
        to->bits = static_cast<unsigned short>(pack<T>(v[0], 0.0f));
    } else {
        using Word = typename Vector<2 * V>::type;
        u32 pairs[V / 2];
#pragma unroll
        for (int i = 0; i < V / 2; ++i) pairs[i] = pack<T>(v[2 * i], v[2 * i + 1]);
        *reinterpret_cast<Word*>(to) = *reinterpret_cast<const Word*>(pairs);
    }
}

template <class T>
__device__ __forceinline__ float4 load4(const T* p) {
    const auto word = *reinterpret_cast<const typename Vector<4 * sizeof(T)>::type*>(p);
    const T* v = reinterpret_cast<const T*>(&word);
    return {to_float(v[0]), to_float(v[1]), to_float(v[2]), to_float(v[3])};
}
template <class T>
__device__ __forceinline__ float2 load2(const T* p) {
    const auto word = *reinterpret_cast<const typename Vector<2 * sizeof(T)>::type*>(p);
    const T* v = reinterpret_cast<const T*>(&word);
    return {to_float(v[0]), to_float(v[1])};
}
template <class T>
__device__ __forceinline__ void store4(T* p, float4 v) {
    const float values[4] = {v.x, v.y, v.z, v.w};
    store_vector(p, values);
}
template <class T>
__device__ __forceinline__ void store1(T* p, float v) {
    const float one[1] = {v};
    store_vector(p, one);
}

// Compute precisions. A fragment register holds PER_WORD elements; one mma instruction covers STEP elements of k.
struct Fp16 {
    using Element = f16;
    static constexpr int PER_WORD = 2, STEP = 16;
};
struct Bf16 {
    using Element = bf16;
    static constexpr int PER_WORD = 2, STEP = 16;
};
struct Tf32 {
    using Element = float;
    static constexpr int PER_WORD = 1, STEP = 8;
    static __device__ __forceinline__ u32 word(float v) {
        u32 rounded;
        asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(v));
        return rounded;
    }
};
// 3xTF32: a float32 is split into two tf32, and three tf32 mma replace one float32 mma.
struct Fp32 {
    using Element = float;
    static constexpr int PER_WORD = 1, STEP = 8;
    static __device__ __forceinline__ u32 word(float v) { return __float_as_uint(v); }
};
