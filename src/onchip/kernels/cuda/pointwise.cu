// pointwise.cu: a run of pointwise layers in one launch. Sizes and the run itself are told when it is launched.
//
// Idea    The run is a little program over an accumulator: load a value, apply an operation, combine it with another
//         value, keep it for later, give it out. A thread has 16 numbers of it in registers and decodes each step once
//         for all of them. Values between the layers never reach memory, and a new network costs no compilation.
// Floor   Every value read and given moves once: 2^28 numbers of float32 through any chain are 2.1 GB / 4.8 TB/s =
//         447 us. At 4.2 TB/s, 132 multiprocessors at 1.7 GHz issue 55 instructions for each number, 28 in 16 bits;
//         decoding takes about one a step, an exponential some 15, erfc some 35.
// Flight  A thread's 16 numbers lie in four groups of four neighbours, a block's width apart: a warp's 16 bytes a lane
//         lie next to each other. 5 blocks of 256 threads have 80 KB of float32 under way on a multiprocessor.
// Places  A value that is stretched has sizes and strides: the number of a group is divided by each size in turn, by a
//         multiplication. Where four neighbours are neighbours there too, or one number, that is done once for four.
// Order   A number's operations are those of the run, in its order, wherever it stands. The arithmetic is float32.
// Layout  Values are 16 B aligned, `count` numbers; of those that are given, all lie one after the other.
// Shared  THREADS * 64 B for each value that is kept at the same time.
// Limits  MOST_OPERANDS values and weights, MOST_OUTPUTS values given, MOST_STEPS steps, count < 2^31; sm_80 up.
#include "activation.cuh"
#include "divide.cuh"

constexpr int THREADS = 256, GROUPS = 4, TILE = 4 * GROUPS * THREADS;
constexpr int MOST_OPERANDS = 12, MOST_OUTPUTS = 6, MOST_STEPS = 64, MOST_LEVELS = 6;

// In the order of pointwise.py.
enum Type : unsigned char { FLOAT32, FLOAT16, BFLOAT16, UINT8, FLOAT64, INT64, INT32, INT16, INT8 };
enum Where : unsigned char { WHOLE, NEIGHBOURS, ALIKE, APART };  // four numbers of an operand
enum What : unsigned char { LOAD, TAKE, KEEP, GIVE, APPLY, COMBINE, COMBINE_KEPT };

struct Level {
    Divider by;
    u32 stride;
};
struct Operand {
    long long first;  // where its first row of this launch begins
    Type type;
    Where where;
    unsigned char levels;
    u32 outer;  // stride of what is left behind the levels
    Level level[MOST_LEVELS];
};
struct Step {
    What what;
    unsigned char code;  // of an operation
    unsigned char index;  // of an operand, an output or a kept value
    float p, q;
};
struct Run {
    const void* operand_at[MOST_OPERANDS];
    void* output_at[MOST_OUTPUTS];
    long long first;  // of the outputs
    u32 count, steps;
    Type outputs[8];
    Operand operands[MOST_OPERANDS];
    Step step[MOST_STEPS];
};
static_assert(sizeof(Operand) == 16 + 16 * MOST_LEVELS && sizeof(Step) == 12, "the host packs other structs");
using Numbers = float[GROUPS][4];

// -- operations beside activation.cuh's ---------------------------------------------------------------------------

struct Add {
    static __device__ __forceinline__ float apply(float a, float b) { return a + b; }
};
struct Mul {
    static __device__ __forceinline__ float apply(float a, float b) { return a * b; }
};
// As a whole number; a byte when it is stored.
struct ToPixels {
    static __device__ __forceinline__ float apply(float v) {
        return truncf(fminf(fmaxf((v + 1.0f) / 2.0f * 255.0f, 0.0f), 255.0f));  // of a NaN fmaxf makes 0
    }
};
template <class T>
struct Rounded {
    static __device__ __forceinline__ float apply(float v) {
        return to_float(T{static_cast<unsigned short>(pack<T>(v, 0.0f))});
    }
};

__device__ __forceinline__ float tell(float (*f)(float), float v, float, float) { return f(v); }
__device__ __forceinline__ float tell(float (*f)(float, float), float v, float p, float) { return f(v, p); }
__device__ __forceinline__ float tell(float (*f)(float, float, float), float v, float p, float q) { return f(v, p, q); }

template <class Function>
__device__ __forceinline__ bool apply_to(Numbers& v, float p, float q) {
#pragma unroll
    for (int i = 0; i < 4 * GROUPS; ++i) v[i / 4][i % 4] = tell(&Function::apply, v[i / 4][i % 4], p, q);
    return true;
}
template <class Function>
__device__ __forceinline__ bool combine(Numbers& v, const Numbers& other) {
#pragma unroll
    for (int i = 0; i < 4 * GROUPS; ++i) v[i / 4][i % 4] = Function::apply(v[i / 4][i % 4], other[i / 4][i % 4]);
    return true;
}
// An operation's code is its place among the template arguments.
template <class... Functions>
struct Unary {
    static __device__ __forceinline__ void apply(int code, Numbers& v, float p, float q) {
        int n = 0;
        static_cast<void>(((code == n++ && apply_to<Functions>(v, p, q)) || ...));
    }
};
template <class... Functions>
struct Binary {
    static __device__ __forceinline__ void apply(int code, Numbers& v, const Numbers& other) {
        int n = 0;
        static_cast<void>(((code == n++ && combine<Functions>(v, other)) || ...));
    }
};

// -- memory -------------------------------------------------------------------------------------------------------

template <class T>
__device__ __forceinline__ float widened(T v) {
    if constexpr (sizeof(T) == 2 && !is_same<T, short>) return to_float(v);
    else return static_cast<float>(v);
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

// `x` from number n on: four neighbours, or as many as are left.
template <class T>
__device__ __forceinline__ void load_group(float (&v)[4], const T* x, u32 n, u32 count) {
    if (sizeof(T) <= 4 && n + 4 <= count) {
        using Word = typename Vector<sizeof(T) <= 4 ? 4 * sizeof(T) : 16>::type;
        const Word word = *reinterpret_cast<const Word*>(x);
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = widened(reinterpret_cast<const T*>(&word)[i]);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = n + i < count ? widened(x[i]) : 0.0f;
    }
}

template <class T>
__device__ __forceinline__ void load_whole(Numbers& v, const void* from, const Operand& operand, u32 first, u32 count) {
    const T* x = static_cast<const T*>(from) + operand.first;
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
        const u32 n = first + 4 * THREADS * g;
        load_group(v[g], x + n, n, count);
    }
}

__device__ __forceinline__ float load_one(const void* x, Type type, long long place) {
    switch (type) {
        case FLOAT16: return widened(static_cast<const f16*>(x)[place]);
        case BFLOAT16: return widened(static_cast<const bf16*>(x)[place]);
        default: return static_cast<const float*>(x)[place];
    }
}

// What is stretched is computed with, so it is a float.
__device__ __forceinline__ void load_stretched(Numbers& v, const void* x, const Operand& operand, u32 first, u32 count) {
    u32 place = 0;
#pragma unroll
    for (int i = 0; i < 4 * GROUPS; ++i) {
        const u32 n = first + 4 * THREADS * (i / 4) + i % 4;
        if (i % 4 == 0 || operand.where == APART) place = place_of(n, operand);
        else ++place;
        if (n >= count) v[i / 4][i % 4] = 0.0f;
        else if (i % 4 > 0 && operand.where == ALIKE) v[i / 4][i % 4] = v[i / 4][0];
        else v[i / 4][i % 4] = load_one(x, operand.type, operand.first + place);
    }
}

__device__ __forceinline__ void load(Numbers& v, const void* from, const Operand& operand, u32 first, u32 count) {
    if (operand.where != WHOLE) return load_stretched(v, from, operand, first, count);
    switch (operand.type) {
        case FLOAT32: return load_whole<float>(v, from, operand, first, count);
        case FLOAT16: return load_whole<f16>(v, from, operand, first, count);
        case BFLOAT16: return load_whole<bf16>(v, from, operand, first, count);
        case UINT8: return load_whole<unsigned char>(v, from, operand, first, count);
        case FLOAT64: return load_whole<double>(v, from, operand, first, count);
        case INT64: return load_whole<long long>(v, from, operand, first, count);
        case INT32: return load_whole<int>(v, from, operand, first, count);
        case INT16: return load_whole<short>(v, from, operand, first, count);
        case INT8: return load_whole<signed char>(v, from, operand, first, count);
    }
}

__device__ __forceinline__ void store_one(double* to, float v) { *to = v; }
__device__ __forceinline__ void store_one(unsigned char* to, float v) { *to = static_cast<unsigned char>(v); }
template <class T>
__device__ __forceinline__ void store_one(T* to, float v) { store1(to, v); }

__device__ __forceinline__ void store_group(double* to, const float (&v)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = v[i];
}
__device__ __forceinline__ void store_group(unsigned char* to, const float (&v)[4]) {
    u32 word = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) word |= static_cast<u32>(v[i]) << 8 * i;
    *reinterpret_cast<u32*>(to) = word;
}
template <class T>
__device__ __forceinline__ void store_group(T* to, const float (&v)[4]) { store_several(to, v); }

template <class T>
__device__ __forceinline__ void store_as(void* to, const Numbers& v, u32 first, u32 count) {
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
        const u32 n = first + 4 * THREADS * g;
        T* y = static_cast<T*>(to) + n;
        if (n + 4 <= count) {
            store_group(y, v[g]);
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (n + i < count) store_one(y + i, v[g][i]);
        }
    }
}

__device__ __forceinline__ void store(const Run& run, int index, const Numbers& v, u32 first) {
    char* to = static_cast<char*>(run.output_at[index]);
    switch (run.outputs[index]) {
        case FLOAT32: return store_as<float>(to + 4 * run.first, v, first, run.count);
        case FLOAT16: return store_as<f16>(to + 2 * run.first, v, first, run.count);
        case BFLOAT16: return store_as<bf16>(to + 2 * run.first, v, first, run.count);
        case UINT8: return store_as<unsigned char>(to + run.first, v, first, run.count);
        case FLOAT64: return store_as<double>(to + 8 * run.first, v, first, run.count);
        default: return;
    }
}

// -- the kernel ---------------------------------------------------------------------------------------------------

extern __shared__ float4 kept[];

__device__ __forceinline__ float4& kept_group(int index, int g) {
    return kept[(index * GROUPS + g) * THREADS + threadIdx.x];
}
__device__ __forceinline__ void take(Numbers& v, int index) {
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
        const float4 group = kept_group(index, g);
        v[g][0] = group.x, v[g][1] = group.y, v[g][2] = group.z, v[g][3] = group.w;
    }
}

template <class Functions, class Combinations>
__global__ void __launch_bounds__(THREADS, 5) pointwise(const __grid_constant__ Run run) {
    const u32 first = blockIdx.x * TILE + 4 * threadIdx.x;
    Numbers v, other;
    for (u32 s = 0; s < run.steps; ++s) {
        const Step& step = run.step[s];
        const int index = step.index;
        if (step.what == LOAD || step.what == COMBINE)
            load(other, run.operand_at[index], run.operands[index], first, run.count);
        else if (step.what == TAKE || step.what == COMBINE_KEPT)
            take(other, index);
        switch (step.what) {
            case LOAD:
            case TAKE:
#pragma unroll
                for (int i = 0; i < 4 * GROUPS; ++i) v[i / 4][i % 4] = other[i / 4][i % 4];
                break;
            case KEEP:
#pragma unroll
                for (int g = 0; g < GROUPS; ++g) kept_group(index, g) = {v[g][0], v[g][1], v[g][2], v[g][3]};
                break;
            case GIVE: store(run, index, v, first); break;
            case APPLY: Functions::apply(step.code, v, step.p, step.q); break;
            case COMBINE:
            case COMBINE_KEPT: Combinations::apply(step.code, v, other); break;
        }
    }
}
