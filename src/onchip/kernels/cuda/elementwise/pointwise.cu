// elementwise/pointwise.cu: a chain of elementwise layers in one launch, interpreted: no compilation per network.
//
// Idea    The chain is a program over an accumulator: load, apply, combine with another value, save to a slot, store.
//         A thread holds 64 B of elements in registers and decodes each step once for all of them. Intermediate values
//         never reach global memory. Chains of the COMMON operations have their own kernel with fewer registers.
// Floor   Each input and output moves once: 2^28 float32 are 2.1 GB / 4.8 TB/s = 447 us. At 4.2 TB/s, 132 SMs at
//         1.7 GHz issue 55 instructions per element (16-bit: 28). A step takes about 1 to decode, activations up to 23.
// Memory  Lanes load 16 B, coalesced; 5 blocks keep 80 KB of float32 in flight per SM. 16-bit chains load 8 elements
//         and prefetch for later blocks to L2, to keep as many bytes in flight. Small inputs: one vector per thread.
// Types   Accumulator: float, double for float64 layers, long long for ints; narrower types round after each layer.
// Layout  Values 16 B aligned and contiguous, `count` elements; broadcast operands are addressed by sizes and strides.
// Shared  THREADS * 64 B per slot.
// Limits  MAX_OPERANDS values and weights, MAX_OUTPUTS outputs, MAX_STEPS steps, count < 2^31; sm_80 up.
#include "mma/tma.cuh"
#include "common/fast_math.cuh"
#include "common/fast_divide.cuh"
#include "common/dtype.cuh"
#include "common/elementwise.cuh"
#include "common/status.cuh"

constexpr int THREADS = 256;
constexpr int MAX_OPERANDS = 12, MAX_OUTPUTS = 6, MAX_STEPS = 64, MAX_LEVELS = 6;
constexpr int COMMON = 2;  // binary operations of the common kernel
// Blocks per SM. The kernels with the longer functions need more registers.
template <class Element, int COMBINATIONS>
constexpr int BLOCKS = is_same<Element, float> && COMBINATIONS == COMMON ? 5
                       : is_same<Element, double> && COMBINATIONS > COMMON ? 2 : 3;
template <class Element, int N>
using Values = Element[N];  // per thread
// Offset of element i of a thread from its first; V are contiguous.
template <int V>
__device__ constexpr u32 element_offset(int i) { return V * THREADS * (i / V) + i % V; }

// In the order of elementwise/steps.py.
enum Type : unsigned char { FLOAT32, FLOAT16, BFLOAT16, UINT8, FLOAT64, INT64, INT32, INT16, INT8 };
enum Access : unsigned char { CONTIGUOUS, VECTOR4, BROADCAST, STRIDED };  // access pattern of four elements
enum Opcode : unsigned char { LOAD, LOAD_SLOT, STORE_SLOT, STORE, APPLY, COMBINE, COMBINE_SLOT };

struct Level {
    Divider by;
    u32 stride;
};
struct Operand {
    long long first;  // offset of this launch's first row
    Type type;
    Access access;
    unsigned char levels;
    u32 outer;  // stride of the remaining index
    Level level[MAX_LEVELS];
};
template <class Element>
struct Step {
    Opcode opcode;
    unsigned char code;  // of an operation
    unsigned char index;  // of an operand, an output or a slot
    Element p, q;  // parameters; for ints: whether to check the operand (p) or the accumulator (q) for divisors of 0
};
template <class Element>
struct Run {
    const void* operand_at[MAX_OPERANDS];
    void* output_at[MAX_OUTPUTS];
    long long first;  // of the outputs
    u32 count, steps;
    Type outputs[8];
    Operand operands[MAX_OPERANDS];
    Step<Element> step[MAX_STEPS];
};
static_assert(sizeof(Operand) == 16 + 16 * MAX_LEVELS && sizeof(Step<float>) == 12 && sizeof(Step<double>) == 24,
              "struct sizes must match those packed by the host");

// -- conversions between storage and accumulator -------------------------------------------------------------------

template <class Element, class T>
__device__ __forceinline__ Element widened(T v) {
    if constexpr (is_same<T, f16> || is_same<T, bf16>) return to_float(v);
    else return static_cast<Element>(v);
}
// Rounds to nearest; ints keep the low bits. float64 converts to bfloat16 through float32, as NumPy does.
template <class T, class Element>
__device__ __forceinline__ T narrowed(Element v) {
    if constexpr (is_same<T, f16> && is_same<Element, double>) {
        f16 result;
        asm("cvt.rn.f16.f64 %0, %1;" : "=h"(result.bits) : "d"(v));
        return result;
    } else if constexpr (is_same<T, f16> || is_same<T, bf16>) {
        return T{static_cast<unsigned short>(pack<T>(static_cast<float>(v), 0.0f))};
    } else {
        return static_cast<T>(v);
    }
}

// -- operations: those of layers and rounding ------------------------------------------------------------------------

template <class T>
struct Rounded {
    template <class Element>
    static __device__ __forceinline__ Element apply(Element v) { return widened<Element>(narrowed<T>(v)); }
};
// Through 64 bits: an out-of-range float wraps like an int.
template <class T>
struct Truncated {
    template <class Element>
    static __device__ __forceinline__ Element apply(Element v) {
        return static_cast<Element>(static_cast<T>(static_cast<long long>(v)));
    }
};
template <>
struct Truncated<bool> {
    template <class Element>
    static __device__ __forceinline__ Element apply(Element v) { return v != Element(0) ? Element(1) : Element(0); }
};

template <class Element>
__device__ __forceinline__ Element call(Element (*f)(Element), Element v, Element, Element) { return f(v); }
template <class Element>
__device__ __forceinline__ Element call(Element (*f)(Element, Element), Element v, Element p, Element) {
    return f(v, p);
}
template <class Element>
__device__ __forceinline__ Element call(Element (*f)(Element, Element, Element), Element v, Element p, Element q) {
    return f(v, p, q);
}

template <class Function, class Element, int N>
__device__ __forceinline__ bool apply_to(Values<Element, N>& v, Element p, Element q) {
#pragma unroll
    for (Element& each : v) each = call<Element>(&Function::apply, each, p, q);
    return true;
}
template <class Element>
__device__ __forceinline__ Element call(Element (*f)(Element, Element), Element a, Element b, Element, Element) {
    return f(a, b);
}
template <class Element>
__device__ __forceinline__ Element call(Element (*f)(Element, Element, Element), Element a, Element b, Element p,
                                        Element) {
    return f(a, b, p);
}
template <class Element>
__device__ __forceinline__ Element call(Element (*f)(Element, Element, Element, Element), Element a, Element b,
                                        Element p, Element q) {
    return f(a, b, p, q);
}
template <class Function, class Element, int N>
__device__ __forceinline__ bool combine(Values<Element, N>& v, const Values<Element, N>& other, Element p, Element q) {
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = call<Element>(&Function::apply, v[i], other[i], p, q);
    return true;
}
template <class Function, bool FAST>
struct Math {
    using type = Function;
};
template <class Function>
struct Math<Function, true> {
    using type = FastMath<Function>;
};
// An operation's code is its index among the template arguments.
template <class... Functions>
struct Unary {
    template <class Element, bool FAST, int N>
    static __device__ __forceinline__ void apply(int code, Values<Element, N>& v, Element p, Element q) {
        int n = 0;
        static_cast<void>(((code == n++ && apply_to<typename Math<Functions, FAST>::type, Element>(v, p, q)) || ...));
    }
};
template <class... Functions>
struct Binary {
    static constexpr int COUNT = sizeof...(Functions);
    template <class Element, int N>
    static __device__ __forceinline__ void apply(int code, Values<Element, N>& v, const Values<Element, N>& other,
                                                 Element p, Element q) {
        int n = 0;
        static_cast<void>(((code == n++ && combine<Functions, Element>(v, other, p, q)) || ...));
    }
};

// -- memory -------------------------------------------------------------------------------------------------------

// V contiguous elements, in vectors of up to 16 B.
template <class T, int V>
struct VectorOf {
    using Word = typename Vector<(sizeof(T) * V < 16 ? sizeof(T) * V : 16)>::type;
    static constexpr int WORDS = sizeof(T) * V / sizeof(Word);
    Word words[WORDS];

    __device__ __forceinline__ T& operator[](int i) { return reinterpret_cast<T*>(words)[i]; }
    __device__ __forceinline__ void load(const T* from) {
#pragma unroll
        for (int w = 0; w < WORDS; ++w) words[w] = reinterpret_cast<const Word*>(from)[w];
    }
    __device__ __forceinline__ void store(T* to) const {
#pragma unroll
        for (int w = 0; w < WORDS; ++w) reinterpret_cast<Word*>(to)[w] = words[w];
    }
};

template <class T, int V, class Element, int N>
__device__ __forceinline__ void load_dense(Values<Element, N>& v, const void* from, const Operand& operand, u32 first,
                                           u32 count) {
    const T* x = static_cast<const T*>(from) + operand.first;
#pragma unroll
    for (int g = 0; g < N; g += V) {
        const u32 n = first + element_offset<V>(g);
        if (n + V <= count) {
            VectorOf<T, V> vector;
            vector.load(x + n);
#pragma unroll
            for (int i = 0; i < V; ++i) v[g + i] = widened<Element>(vector[i]);
        } else {
#pragma unroll
            for (int i = 0; i < V; ++i) v[g + i] = n + i < count ? widened<Element>(x[n + i]) : Element(0);
        }
    }
}

__device__ __forceinline__ u32 offset_of(u32 n, const Operand& operand) {
    u32 offset = 0;
#pragma unroll 1
    for (int l = 0; l < operand.levels; ++l) {
        const Level& level = operand.level[l];
        offset += pop_index(n, level.by) * level.stride;
    }
    return offset + n * operand.outer;
}

// Broadcast operands: float64 in a double chain, float32 or narrower in a float chain, ints in an int chain.
template <class Element>
__device__ __forceinline__ Element load_one(const void* x, Type type, long long offset) {
    if constexpr (is_same<Element, double>) {
        return static_cast<const double*>(x)[offset];
    } else if constexpr (is_same<Element, float>) {
        switch (type) {
            case FLOAT16: return to_float(static_cast<const f16*>(x)[offset]);
            case BFLOAT16: return to_float(static_cast<const bf16*>(x)[offset]);
            default: return static_cast<const float*>(x)[offset];
        }
    } else {
        switch (type) {
            case INT32: return static_cast<const int*>(x)[offset];
            case INT16: return static_cast<const short*>(x)[offset];
            case INT8: return static_cast<const signed char*>(x)[offset];
            case UINT8: return static_cast<const unsigned char*>(x)[offset];
            default: return static_cast<const long long*>(x)[offset];
        }
    }
}

template <int V, class Element, int N>
__device__ __forceinline__ void load_broadcast(Values<Element, N>& v, const void* x, const Operand& operand, u32 first,
                                               u32 count) {
    u32 offset = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const u32 n = first + element_offset<V>(i);
        if (i % 4 == 0 || operand.access == STRIDED) offset = offset_of(n, operand);
        else ++offset;
        if (n >= count) v[i] = Element(0);
        else if (i % 4 > 0 && operand.access == BROADCAST) v[i] = v[i / 4 * 4];
        else v[i] = load_one<Element>(x, operand.type, operand.first + offset);
    }
}

template <int V, class Element, int N>
__device__ __forceinline__ void load(Values<Element, N>& v, const void* from, const Operand& operand, u32 first,
                                     u32 count) {
    if (operand.access != CONTIGUOUS) return load_broadcast<V, Element>(v, from, operand, first, count);
    switch (operand.type) {
        case UINT8: return load_dense<unsigned char, V, Element>(v, from, operand, first, count);
        case INT64: return load_dense<long long, V, Element>(v, from, operand, first, count);
        case INT32: return load_dense<int, V, Element>(v, from, operand, first, count);
        case INT16: return load_dense<short, V, Element>(v, from, operand, first, count);
        case INT8: return load_dense<signed char, V, Element>(v, from, operand, first, count);
        default: break;
    }
    if constexpr (!is_same<Element, long long>) {
        switch (operand.type) {
            case FLOAT32: return load_dense<float, V, Element>(v, from, operand, first, count);
            case FLOAT16: return load_dense<f16, V, Element>(v, from, operand, first, count);
            case BFLOAT16: return load_dense<bf16, V, Element>(v, from, operand, first, count);
            default: return load_dense<double, V, Element>(v, from, operand, first, count);
        }
    }
}

template <class T, int V, class Element, int N>
__device__ __forceinline__ void store_as(void* to, const Values<Element, N>& v, u32 first, const Run<Element>& run) {
#pragma unroll
    for (int g = 0; g < N; g += V) {
        const u32 n = first + element_offset<V>(g);
        T* y = static_cast<T*>(to) + run.first + n;
        if (n + V <= run.count) {
            VectorOf<T, V> vector;
            if constexpr ((is_same<T, f16> || is_same<T, bf16>) && is_same<Element, float>) {  // two per instruction
#pragma unroll
                for (int i = 0; i < V; i += 2)
                    reinterpret_cast<u32*>(vector.words)[i / 2] = pack<T>(v[g + i], v[g + i + 1]);
            } else {
#pragma unroll
                for (int i = 0; i < V; ++i) vector[i] = narrowed<T>(v[g + i]);
            }
            vector.store(y);
        } else {
#pragma unroll
            for (int i = 0; i < V; ++i)
                if (n + i < run.count) y[i] = narrowed<T>(v[g + i]);
        }
    }
}

// STORES_INTS  whether floats may be stored as ints: never in the common kernel, which has no registers to spare
template <int V, bool STORES_INTS, class Element, int N>
__device__ __forceinline__ void store(const Run<Element>& run, int index, const Values<Element, N>& v, u32 first) {
    void* to = run.output_at[index];
    if constexpr (STORES_INTS && !is_same<Element, long long>) {
        switch (run.outputs[index]) {
            case INT64: return store_as<long long, V, Element>(to, v, first, run);
            case INT32: return store_as<int, V, Element>(to, v, first, run);
            case INT16: return store_as<short, V, Element>(to, v, first, run);
            case INT8: return store_as<signed char, V, Element>(to, v, first, run);
            default: break;
        }
    }
    if constexpr (is_same<Element, long long>) {
        switch (run.outputs[index]) {
            case INT64: return store_as<long long, V, Element>(to, v, first, run);
            case INT32: return store_as<int, V, Element>(to, v, first, run);
            case INT16: return store_as<short, V, Element>(to, v, first, run);
            default: return store_as<unsigned char, V, Element>(to, v, first, run);  // int8 has the same bits
        }
    } else {
        switch (run.outputs[index]) {
            case FLOAT32: return store_as<float, V, Element>(to, v, first, run);
            case FLOAT16: return store_as<f16, V, Element>(to, v, first, run);
            case BFLOAT16: return store_as<bf16, V, Element>(to, v, first, run);
            case UINT8: return store_as<unsigned char, V, Element>(to, v, first, run);
            default: return store_as<double, V, Element>(to, v, first, run);
        }
    }
}

// -- the kernel ---------------------------------------------------------------------------------------------------

extern __shared__ uint4 slots[];

// Elements i to i + 3 of a slot.
template <class Element, int N>
__device__ __forceinline__ Element* slot_vector(int index, int i) {
    const int vector = (index * N + i) / 4 * THREADS + static_cast<int>(threadIdx.x);
    return reinterpret_cast<Element*>(slots) + 4 * vector;
}
template <class Element, int N>
__device__ __forceinline__ void load_slot(Values<Element, N>& v, int index) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
        VectorOf<Element, 4> vector;
        vector.load(slot_vector<Element, N>(index, i));
#pragma unroll
        for (int j = 0; j < 4; ++j) v[i + j] = vector[j];
    }
}
template <class Element, int N>
__device__ __forceinline__ void store_slot(const Values<Element, N>& v, int index) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
        VectorOf<Element, 4> vector;
#pragma unroll
        for (int j = 0; j < 4; ++j) vector[j] = v[i + j];
        vector.store(slot_vector<Element, N>(index, i));
    }
}

// Prefetches to L2 the operands of a block that starts about when this one ends.
template <int N, class Element>
__device__ __forceinline__ void prefetch(const Run<Element>& run) {
#if __CUDA_ARCH__ >= 900
    constexpr u32 ELEMENTS = N * THREADS;
    constexpr u32 AHEAD = 768;  // blocks: more than are resident on 132 SMs; 6 MB of an operand in L2
    const int index = threadIdx.x;
    if (index >= MAX_OPERANDS || run.operand_at[index] == nullptr) return;
    const Operand& operand = run.operands[index];
    if (operand.access != CONTIGUOUS || (operand.type != FLOAT16 && operand.type != BFLOAT16)) return;
    const unsigned long long first = (static_cast<unsigned long long>(blockIdx.x) + AHEAD) * ELEMENTS;
    if (first + ELEMENTS > run.count) return;
    const f16* from = static_cast<const f16*>(run.operand_at[index]) + operand.first + first;
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(from), "n"(2 * ELEMENTS) : "memory");
#endif
}

// Reports division by 0 to the host; the quotient is 0 and the kernel continues.
template <int V, int N>
__device__ __forceinline__ void report_zero_divisors(const Values<long long, N>& divisors, u32 first,
                                                     const Run<long long>& run, u64* status) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const u32 n = first + element_offset<V>(i);
        if (divisors[i] == 0 && n < run.count) report_bad_id(status, run.first + n, 0);
    }
}

// V  contiguous elements of a thread: 4, or 8 if all layers are 16-bit and activations use fast math
// N  elements per thread: 64 B, or V if the grid then is a single wave
template <class Element, int V, int N, class Functions, class Combinations>
__global__ void __launch_bounds__(THREADS, (BLOCKS<Element, Combinations::COUNT>))
    pointwise(const __grid_constant__ Run<Element> run, u64* status) {
    if constexpr (N == V) {  // programmatic dependent launch (LaunchConfig.overlaps)
        launch_dependent_grids();
        wait_on_dependent_grids();
    }
    const u32 first = V * (blockIdx.x * (N / V) * THREADS + threadIdx.x);
    if constexpr (V == 8 && N > V) prefetch<N>(run);
    Values<Element, N> v, other;
    for (u32 s = 0; s < run.steps; ++s) {
        const Step<Element>& step = run.step[s];
        const int index = step.index;
        if (step.opcode == LOAD || step.opcode == COMBINE)
            load<V, Element>(other, run.operand_at[index], run.operands[index], first, run.count);
        else if (step.opcode == LOAD_SLOT || step.opcode == COMBINE_SLOT)
            load_slot<Element, N>(other, index);
        switch (step.opcode) {
            case LOAD:
            case LOAD_SLOT:
#pragma unroll
                for (int i = 0; i < N; ++i) v[i] = other[i];
                break;
            case STORE_SLOT: store_slot<Element, N>(v, index); break;
            case STORE: store<V, (Combinations::COUNT > 2), Element>(run, index, v, first); break;
            case APPLY: Functions::template apply<Element, V == 8>(step.code, v, step.p, step.q); break;
            case COMBINE:
            case COMBINE_SLOT:
                if constexpr (is_same<Element, long long>) {
                    if (step.p != 0) report_zero_divisors<V, N>(other, first, run, status);
                    if (step.q != 0) report_zero_divisors<V, N>(v, first, run, status);
                }
                Combinations::template apply<Element>(step.code, v, other, step.p, step.q);
                break;
        }
    }
}
