// elementwise/pointwise.cu: a chain of elementwise layers in one launch, interpreted: no compilation per network.
//
// Idea    The chain is a program over an accumulator: load, apply, combine with another value, keep for later, store.
//         A thread holds 64 B in registers and decodes each step once for all of them. Intermediate values never reach
//         global memory. Chains of the COMMON operations have their own kernel with fewer registers.
// Floor   Each input and output moves once: 2^28 float32 are 2.1 GB / 4.8 TB/s = 447 us. At 4.2 TB/s, 132 SMs at
//         1.7 GHz issue 55 instructions per element, 28 in 16 bits; a step decodes in about one, activations take up
//         to 23 (common/activation.cuh), in 16 bits up to 15 (common/fast_math.cuh).
// Memory  Lanes load 16 B, coalesced; 5 blocks keep 80 KB of float32 in flight per SM. 16-bit chains load 8 elements
//         and prefetch later blocks to L2, else half the bytes would be in flight. Small inputs: one vector per thread.
// Types   Accumulator: float, double for float64 layers, long long for ints; narrower types round after each layer.
// Layout  Values 16 B aligned and contiguous, `count` elements; broadcast operands are addressed by sizes and strides.
// Shared  THREADS * 64 B per kept value.
// Limits  MOST_OPERANDS values and weights, MOST_OUTPUTS outputs, MOST_STEPS steps, count < 2^31; sm_80 up.
#include "mma/tma.cuh"
#include "common/fast_math.cuh"
#include "common/fast_divide.cuh"
#include "common/function.cuh"
#include "common/status.cuh"

constexpr int THREADS = 256;
constexpr int MOST_OPERANDS = 12, MOST_OUTPUTS = 6, MOST_STEPS = 64, MOST_LEVELS = 6;
constexpr int COMMON = 2;  // binary operations of the common kernel
// Blocks per SM. The kernels with the longer functions need more registers.
template <class Number, int COMBINATIONS>
constexpr int BLOCKS = is_same<Number, float> && COMBINATIONS == COMMON ? 5
                       : is_same<Number, double> && COMBINATIONS > COMMON ? 2 : 3;
template <class Number, int N>
using Numbers = Number[N];  // per thread
// Offset of element i of a thread from its first; V are contiguous.
template <int V>
__device__ constexpr u32 behind(int i) { return V * THREADS * (i / V) + i % V; }

// In the order of elementwise/steps.py.
enum Type : unsigned char { FLOAT32, FLOAT16, BFLOAT16, UINT8, FLOAT64, INT64, INT32, INT16, INT8 };
enum Where : unsigned char { WHOLE, NEIGHBOURS, ALIKE, APART };  // access pattern of four elements
enum What : unsigned char { LOAD, TAKE, KEEP, GIVE, APPLY, COMBINE, COMBINE_KEPT };

struct Level {
    Divider by;
    u32 stride;
};
struct Operand {
    long long first;  // offset of this launch's first row
    Type type;
    Where where;
    unsigned char levels;
    u32 outer;  // stride of the remaining index
    Level level[MOST_LEVELS];
};
template <class Number>
struct Step {
    What what;
    unsigned char code;  // of an operation
    unsigned char index;  // of an operand, an output or a kept value
    Number p, q;  // parameters; of ints: whether the operand, or the accumulator, is a divisor to check for 0
};
template <class Number>
struct Run {
    const void* operand_at[MOST_OPERANDS];
    void* output_at[MOST_OUTPUTS];
    long long first;  // of the outputs
    u32 count, steps;
    Type outputs[8];
    Operand operands[MOST_OPERANDS];
    Step<Number> step[MOST_STEPS];
};
static_assert(sizeof(Operand) == 16 + 16 * MOST_LEVELS && sizeof(Step<float>) == 12 && sizeof(Step<double>) == 24,
              "the host packs other structs");

// -- conversions between storage and accumulator -------------------------------------------------------------------

template <class Number, class T>
__device__ __forceinline__ Number widened(T v) {
    if constexpr (is_same<T, f16> || is_same<T, bf16>) return to_float(v);
    else return static_cast<Number>(v);
}
// Rounds to nearest; ints keep the low bits. float64 converts to bfloat16 through float32, as NumPy does.
template <class T, class Number>
__device__ __forceinline__ T narrowed(Number v) {
    if constexpr (is_same<T, f16> && is_same<Number, double>) {
        f16 narrow;
        asm("cvt.rn.f16.f64 %0, %1;" : "=h"(narrow.bits) : "d"(v));
        return narrow;
    } else if constexpr (is_same<T, f16> || is_same<T, bf16>) {
        return T{static_cast<unsigned short>(pack<T>(static_cast<float>(v), 0.0f))};
    } else {
        return static_cast<T>(v);
    }
}

// -- operations: common/activation.cuh's, common/function.cuh's and rounding ---------------------------------------

template <class T>
struct Rounded {
    template <class Number>
    static __device__ __forceinline__ Number apply(Number v) { return widened<Number>(narrowed<T>(v)); }
};
// Through 64 bits: an out-of-range float wraps like an int.
template <class T>
struct Whole {
    template <class Number>
    static __device__ __forceinline__ Number apply(Number v) {
        return static_cast<Number>(static_cast<T>(static_cast<long long>(v)));
    }
};
template <>
struct Whole<bool> {
    template <class Number>
    static __device__ __forceinline__ Number apply(Number v) { return v != Number(0) ? Number(1) : Number(0); }
};

template <class Number>
__device__ __forceinline__ Number tell(Number (*f)(Number), Number v, Number, Number) { return f(v); }
template <class Number>
__device__ __forceinline__ Number tell(Number (*f)(Number, Number), Number v, Number p, Number) { return f(v, p); }
template <class Number>
__device__ __forceinline__ Number tell(Number (*f)(Number, Number, Number), Number v, Number p, Number q) {
    return f(v, p, q);
}

template <class Function, class Number, int N>
__device__ __forceinline__ bool apply_to(Numbers<Number, N>& v, Number p, Number q) {
#pragma unroll
    for (Number& each : v) each = tell<Number>(&Function::apply, each, p, q);
    return true;
}
template <class Function, class Number, int N>
__device__ __forceinline__ bool combine(Numbers<Number, N>& v, const Numbers<Number, N>& other) {
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = Function::apply(v[i], other[i]);
    return true;
}
template <class Function, bool IS_BRIEF>
struct Way {
    using type = Function;
};
template <class Function>
struct Way<Function, true> {
    using type = Brief<Function>;
};
// An operation's code is its index among the template arguments.
template <class... Functions>
struct Unary {
    template <class Number, bool IS_BRIEF, int N>
    static __device__ __forceinline__ void apply(int code, Numbers<Number, N>& v, Number p, Number q) {
        int n = 0;
        static_cast<void>(((code == n++ && apply_to<typename Way<Functions, IS_BRIEF>::type, Number>(v, p, q)) || ...));
    }
};
template <class... Functions>
struct Binary {
    static constexpr int COUNT = sizeof...(Functions);
    template <class Number, int N>
    static __device__ __forceinline__ void apply(int code, Numbers<Number, N>& v, const Numbers<Number, N>& other) {
        int n = 0;
        static_cast<void>(((code == n++ && combine<Functions, Number>(v, other)) || ...));
    }
};

// -- memory -------------------------------------------------------------------------------------------------------

// V contiguous elements, in words of up to 16 B.
template <class T, int V>
struct Several {
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

template <class T, int V, class Number, int N>
__device__ __forceinline__ void load_whole(Numbers<Number, N>& v, const void* from, const Operand& operand, u32 first,
                                           u32 count) {
    const T* x = static_cast<const T*>(from) + operand.first;
#pragma unroll
    for (int g = 0; g < N; g += V) {
        const u32 n = first + behind<V>(g);
        if (n + V <= count) {
            Several<T, V> several;
            several.load(x + n);
#pragma unroll
            for (int i = 0; i < V; ++i) v[g + i] = widened<Number>(several[i]);
        } else {
#pragma unroll
            for (int i = 0; i < V; ++i) v[g + i] = n + i < count ? widened<Number>(x[n + i]) : Number(0);
        }
    }
}

__device__ __forceinline__ u32 place_of(u32 n, const Operand& operand) {
    u32 place = 0;
#pragma unroll 1
    for (int l = 0; l < operand.levels; ++l) {
        const Level& level = operand.level[l];
        place += take_rest(n, level.by) * level.stride;
    }
    return place + n * operand.outer;
}

// Broadcast operands have the chain's dtypes: float64 in a double chain, float32 or narrower in a float chain.
template <class Number>
__device__ __forceinline__ Number load_one(const void* x, Type type, long long place) {
    if constexpr (is_same<Number, double>) {
        return static_cast<const double*>(x)[place];
    } else if constexpr (is_same<Number, float>) {
        switch (type) {
            case FLOAT16: return to_float(static_cast<const f16*>(x)[place]);
            case BFLOAT16: return to_float(static_cast<const bf16*>(x)[place]);
            default: return static_cast<const float*>(x)[place];
        }
    } else {
        switch (type) {
            case INT32: return static_cast<const int*>(x)[place];
            case INT16: return static_cast<const short*>(x)[place];
            case INT8: return static_cast<const signed char*>(x)[place];
            case UINT8: return static_cast<const unsigned char*>(x)[place];
            default: return static_cast<const long long*>(x)[place];
        }
    }
}

template <int V, class Number, int N>
__device__ __forceinline__ void load_stretched(Numbers<Number, N>& v, const void* x, const Operand& operand, u32 first,
                                               u32 count) {
    u32 place = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const u32 n = first + behind<V>(i);
        if (i % 4 == 0 || operand.where == APART) place = place_of(n, operand);
        else ++place;
        if (n >= count) v[i] = Number(0);
        else if (i % 4 > 0 && operand.where == ALIKE) v[i] = v[i / 4 * 4];
        else v[i] = load_one<Number>(x, operand.type, operand.first + place);
    }
}

template <int V, class Number, int N>
__device__ __forceinline__ void load(Numbers<Number, N>& v, const void* from, const Operand& operand, u32 first,
                                     u32 count) {
    if (operand.where != WHOLE) return load_stretched<V, Number>(v, from, operand, first, count);
    switch (operand.type) {
        case UINT8: return load_whole<unsigned char, V, Number>(v, from, operand, first, count);
        case INT64: return load_whole<long long, V, Number>(v, from, operand, first, count);
        case INT32: return load_whole<int, V, Number>(v, from, operand, first, count);
        case INT16: return load_whole<short, V, Number>(v, from, operand, first, count);
        case INT8: return load_whole<signed char, V, Number>(v, from, operand, first, count);
        default: break;
    }
    if constexpr (!is_same<Number, long long>) {
        switch (operand.type) {
            case FLOAT32: return load_whole<float, V, Number>(v, from, operand, first, count);
            case FLOAT16: return load_whole<f16, V, Number>(v, from, operand, first, count);
            case BFLOAT16: return load_whole<bf16, V, Number>(v, from, operand, first, count);
            default: return load_whole<double, V, Number>(v, from, operand, first, count);
        }
    }
}

template <class T, int V, class Number, int N>
__device__ __forceinline__ void store_as(void* to, const Numbers<Number, N>& v, u32 first, const Run<Number>& run) {
#pragma unroll
    for (int g = 0; g < N; g += V) {
        const u32 n = first + behind<V>(g);
        T* y = static_cast<T*>(to) + run.first + n;
        if (n + V <= run.count) {
            Several<T, V> several;
            if constexpr ((is_same<T, f16> || is_same<T, bf16>) && is_same<Number, float>) {  // two per instruction
#pragma unroll
                for (int i = 0; i < V; i += 2)
                    reinterpret_cast<u32*>(several.words)[i / 2] = pack<T>(v[g + i], v[g + i + 1]);
            } else {
#pragma unroll
                for (int i = 0; i < V; ++i) several[i] = narrowed<T>(v[g + i]);
            }
            several.store(y);
        } else {
#pragma unroll
            for (int i = 0; i < V; ++i)
                if (n + i < run.count) y[i] = narrowed<T>(v[g + i]);
        }
    }
}

// GIVES_INTS  whether floats may be stored as ints: never in the common kernel, which has no registers to spare
template <int V, bool GIVES_INTS, class Number, int N>
__device__ __forceinline__ void store(const Run<Number>& run, int index, const Numbers<Number, N>& v, u32 first) {
    void* to = run.output_at[index];
    if constexpr (GIVES_INTS && !is_same<Number, long long>) {
        switch (run.outputs[index]) {
            case INT64: return store_as<long long, V, Number>(to, v, first, run);
            case INT32: return store_as<int, V, Number>(to, v, first, run);
            case INT16: return store_as<short, V, Number>(to, v, first, run);
            case INT8: return store_as<signed char, V, Number>(to, v, first, run);
            default: break;
        }
    }
    if constexpr (is_same<Number, long long>) {
        switch (run.outputs[index]) {
            case INT64: return store_as<long long, V, Number>(to, v, first, run);
            case INT32: return store_as<int, V, Number>(to, v, first, run);
            case INT16: return store_as<short, V, Number>(to, v, first, run);
            default: return store_as<unsigned char, V, Number>(to, v, first, run);  // int8 has the same bits
        }
    } else {
        switch (run.outputs[index]) {
            case FLOAT32: return store_as<float, V, Number>(to, v, first, run);
            case FLOAT16: return store_as<f16, V, Number>(to, v, first, run);
            case BFLOAT16: return store_as<bf16, V, Number>(to, v, first, run);
            case UINT8: return store_as<unsigned char, V, Number>(to, v, first, run);
            default: return store_as<double, V, Number>(to, v, first, run);
        }
    }
}

// -- the kernel ---------------------------------------------------------------------------------------------------

extern __shared__ uint4 kept[];

// Elements i to i + 3 of a kept value.
template <class Number, int N>
__device__ __forceinline__ Number* kept_four(int index, int i) {
    const int four = (index * N + i) / 4 * THREADS + static_cast<int>(threadIdx.x);
    return reinterpret_cast<Number*>(kept) + 4 * four;
}
template <class Number, int N>
__device__ __forceinline__ void take(Numbers<Number, N>& v, int index) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
        Several<Number, 4> four;
        four.load(kept_four<Number, N>(index, i));
#pragma unroll
        for (int j = 0; j < 4; ++j) v[i + j] = four[j];
    }
}
template <class Number, int N>
__device__ __forceinline__ void keep(const Numbers<Number, N>& v, int index) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
        Several<Number, 4> four;
#pragma unroll
        for (int j = 0; j < 4; ++j) four[j] = v[i + j];
        four.store(kept_four<Number, N>(index, i));
    }
}

// Prefetches to L2 the operands of a block that starts about when this one ends.
template <int N, class Number>
__device__ __forceinline__ void fetch_ahead(const Run<Number>& run) {
#if __CUDA_ARCH__ >= 900
    constexpr u32 NUMBERS = N * THREADS;
    constexpr u32 AHEAD = 768;  // blocks: more than 132 SMs hold; 6 MB of an operand in L2
    const int index = threadIdx.x;
    if (index >= MOST_OPERANDS || run.operand_at[index] == nullptr) return;
    const Operand& operand = run.operands[index];
    if (operand.where != WHOLE || (operand.type != FLOAT16 && operand.type != BFLOAT16)) return;
    const unsigned long long first = (static_cast<unsigned long long>(blockIdx.x) + AHEAD) * NUMBERS;
    if (first + NUMBERS > run.count) return;
    const f16* from = static_cast<const f16*>(run.operand_at[index]) + operand.first + first;
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(from), "n"(2 * NUMBERS) : "memory");
#endif
}

// Reports division by 0 to the host; the quotient is 0 and the kernel continues.
template <int V, int N>
__device__ __forceinline__ void report_zeros(const Numbers<long long, N>& divisors, u32 first,
                                             const Run<long long>& run, u64* status) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const u32 n = first + behind<V>(i);
        if (divisors[i] == 0 && n < run.count) report_bad_id(status, run.first + n, 0);
    }
}

// V  contiguous elements of a thread: 4, or 8 if all layers are 16-bit and activations use fast math
// N  elements per thread: 64 B, or V if that fills all SMs
template <class Number, int V, int N, class Functions, class Combinations>
__global__ void __launch_bounds__(THREADS, (BLOCKS<Number, Combinations::COUNT>))
    pointwise(const __grid_constant__ Run<Number> run, u64* status) {
    if constexpr (N == V) {  // programmatic dependent launch (LaunchConfig.overlaps)
        let_next_begin();
        wait_for_kernel_before();
    }
    const u32 first = V * (blockIdx.x * (N / V) * THREADS + threadIdx.x);
    if constexpr (V == 8 && N > V) fetch_ahead<N>(run);
    Numbers<Number, N> v, other;
    for (u32 s = 0; s < run.steps; ++s) {
        const Step<Number>& step = run.step[s];
        const int index = step.index;
        if (step.what == LOAD || step.what == COMBINE)
            load<V, Number>(other, run.operand_at[index], run.operands[index], first, run.count);
        else if (step.what == TAKE || step.what == COMBINE_KEPT)
            take<Number, N>(other, index);
        switch (step.what) {
            case LOAD:
            case TAKE:
#pragma unroll
                for (int i = 0; i < N; ++i) v[i] = other[i];
                break;
            case KEEP: keep<Number, N>(v, index); break;
            case GIVE: store<V, (Combinations::COUNT > 2), Number>(run, index, v, first); break;
            case APPLY: Functions::template apply<Number, V == 8>(step.code, v, step.p, step.q); break;
            case COMBINE:
            case COMBINE_KEPT:
                if constexpr (is_same<Number, long long>) {
                    if (step.p != 0) report_zeros<V, N>(other, first, run, status);
                    if (step.q != 0) report_zeros<V, N>(v, first, run, status);
                }
                Combinations::template apply<Number>(step.code, v, other);
                break;
        }
    }
}
