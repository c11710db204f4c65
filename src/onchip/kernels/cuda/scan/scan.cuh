// scan/scan.cuh: shared by all scans: operations, vector loads, and the warp scan.
//
// Elements stored as S are computed as T: types below 4 bytes as float or int, rounded or truncated once at the store;
// other types as they are.
//
// A Total carries the prefix from one tile of a row to the next. For float32 sums and products it is a double: a float
// would lose digits over a long row. y = float(prefix) op (scan within the tile): some twenty float32 roundings at most
// for any row length, as in pairwise summation.
#pragma once
#include "common/dtype.cuh"

template <class S> struct Computed { using Type = S; };
template <> struct Computed<f16> { using Type = float; };
template <> struct Computed<bf16> { using Type = float; };
template <> struct Computed<short> { using Type = int; };
template <> struct Computed<signed char> { using Type = int; };
template <> struct Computed<unsigned char> { using Type = int; };
template <class S> using computed_t = typename Computed<S>::Type;
template <class S> constexpr bool IS_HALF = is_same<S, f16> || is_same<S, bf16>;

template <class S> __device__ computed_t<S> to_computed(S v) {
    if constexpr (IS_HALF<S>) return to_float(v);
    else return v;
}
template <class S> __device__ S to_stored(computed_t<S> v) {
    if constexpr (IS_HALF<S>) return S{static_cast<unsigned short>(pack<S>(v, 0.0f))};
    else return static_cast<S>(v);
}

template <class T> struct WideTotal { using Type = T; };
template <> struct WideTotal<float> { using Type = double; };

// -- operations: combine(a, b), a before b; ints wrap, NaN propagates ----------------------------------------------

struct Sum {
    template <class T> using Total = typename WideTotal<T>::Type;
    template <class T> static __device__ T identity() { return T(0); }
    template <class T> static __device__ T combine(T a, T b) { return a + b; }
    static __device__ int combine(int a, int b) { return static_cast<int>(static_cast<unsigned>(a) + b); }
    static __device__ long long combine(long long a, long long b) {
        return static_cast<long long>(static_cast<unsigned long long>(a) + b);
    }
};

struct Product {
    template <class T> using Total = typename WideTotal<T>::Type;
    template <class T> static __device__ T identity() { return T(1); }
    template <class T> static __device__ T combine(T a, T b) { return a * b; }
    static __device__ int combine(int a, int b) { return static_cast<int>(static_cast<unsigned>(a) * b); }
    static __device__ long long combine(long long a, long long b) {
        return static_cast<long long>(static_cast<unsigned long long>(a) * b);
    }
};

template <class T> struct Lowest;
template <> struct Lowest<int> { static __device__ int value() { return -2147483647 - 1; } };
template <> struct Lowest<long long> { static __device__ long long value() { return -9223372036854775807LL - 1; } };
template <> struct Lowest<float> { static __device__ float value() { return __int_as_float(0xff800000); } };
template <> struct Lowest<double> {
    static __device__ double value() { return __longlong_as_double(0xfff0000000000000LL); }
};
template <class T> struct Highest { static __device__ T value() { return -Lowest<T>::value(); } };
template <> struct Highest<int> { static __device__ int value() { return 2147483647; } };
template <> struct Highest<long long> { static __device__ long long value() { return 9223372036854775807LL; } };

struct Max {
    template <class T> using Total = T;
    template <class T> static __device__ T identity() { return Lowest<T>::value(); }
    template <class T> static __device__ T combine(T a, T b) { return a < b || b != b ? b : a; }
};

struct Min {
    template <class T> using Total = T;
    template <class T> static __device__ T identity() { return Highest<T>::value(); }
    template <class T> static __device__ T combine(T a, T b) { return b < a || b != b ? b : a; }
};

// -- vectors: 16 bytes of T per lane -------------------------------------------------------------------------------

template <class T> constexpr int VECTOR = 16 / sizeof(T);
template <class S> constexpr int VECTOR_BYTES = VECTOR<computed_t<S>> * sizeof(S);  // as stored

template <class S> __device__ bool is_aligned(const S* x, const S* y) {
    return (reinterpret_cast<unsigned long long>(x) | reinterpret_cast<unsigned long long>(y)) % VECTOR_BYTES<S> == 0;
}

template <class S, class T> __device__ void load_streaming(T (&v)[VECTOR<T>], const S* from) {
    using Packed = typename Vector<VECTOR_BYTES<S>>::type;
    const Packed packed = __ldcs(reinterpret_cast<const Packed*>(from));
    S stored[VECTOR<T>];
    memcpy(stored, &packed, sizeof packed);
#pragma unroll
    for (int k = 0; k < VECTOR<T>; ++k) v[k] = to_computed(stored[k]);
}

template <class S, class T> __device__ void store_streaming(S* to, const T (&v)[VECTOR<T>]) {
    using Packed = typename Vector<VECTOR_BYTES<S>>::type;
    S stored[VECTOR<T>];
#pragma unroll
    for (int k = 0; k < VECTOR<T>; ++k) stored[k] = to_stored<S>(v[k]);
    Packed packed;
    memcpy(&packed, stored, sizeof packed);
    __stcs(reinterpret_cast<Packed*>(to), packed);
}

// -- reductions, as trees -------------------------------------------------------------------------------------------

template <class Op, class T, int V> __device__ T vector_reduce(const T (&v)[V]) {
    T partial[V];
#pragma unroll
    for (int k = 0; k < V; ++k) partial[k] = v[k];
#pragma unroll
    for (int half = V / 2; half > 0; half /= 2) {
#pragma unroll
        for (int k = 0; k < half; ++k) partial[k] = Op::combine(partial[k], partial[k + half]);
    }
    return partial[0];
}

// All lanes receive the result.
template <class Op, class T> __device__ T warp_reduce(T total) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        total = Op::combine(total, __shfl_xor_sync(0xffffffffu, total, step));
    }
    return total;
}

// -- scan of a chunk: a vector per lane; LANES adjacent lanes per row -----------------------------------------------

// Scans v in place with prefix `running`, then combines the chunk's total into `running`.
template <class Op, int LANES, bool EXCLUSIVE, class T>
__device__ void scan_chunk(T (&v)[VECTOR<T>], T& running) {
    constexpr int LAST = VECTOR<T> - 1;
#pragma unroll
    for (int k = 1; k <= LAST; ++k) v[k] = Op::combine(v[k - 1], v[k]);
    const int lane = threadIdx.x % LANES;
    T inclusive = v[LAST];
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) {
        const T before = __shfl_up_sync(0xffffffffu, inclusive, step, LANES);
        if (lane >= step) inclusive = Op::combine(before, inclusive);
    }
    const T total = __shfl_sync(0xffffffffu, inclusive, LANES - 1, LANES);
    const T before = __shfl_up_sync(0xffffffffu, inclusive, 1, LANES);
    const T prefix = lane == 0 ? running : Op::combine(running, before);
#pragma unroll
    for (int k = LAST; k >= 0; --k) {
        v[k] = !EXCLUSIVE ? Op::combine(prefix, v[k]) : k == 0 ? prefix : Op::combine(prefix, v[k - 1]);
    }
    running = Op::combine(running, total);
}
