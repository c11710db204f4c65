// gradient/update.cu: the optimiser's update of all parameters in one launch.
//
// Idea    A block updates 1,024 elements of one parameter: it reads gradient, moments and weight once and writes the new
//         ones, mostly over the old: an element depends on no other.
// Floor   Adam moves 7 floats per element: a million parameters are 28 MB / 4.2 TB/s = 6.7 us.
// Layout  Every array is contiguous; a weight's moments and average have the accumulator type of its dtype, its
//         gradient and the scale any dtype. `values` are the optimiser's values of this step.
// Limits  MAX_PARAMETERS per launch; float32, float16, bfloat16, float64; sm_80 up.
#include "common/accumulator.cuh"

constexpr int THREADS = 256, PER_THREAD = 4, MAX_PARAMETERS = 36;
enum Kind : u32 { DESCENT, MOMENTUM, NESTEROV, ADAM, ADAMW, AVERAGE };
enum Dtype : u32 { FLOAT32, FLOAT16, BFLOAT16, FLOAT64 };

struct Parameter {
    const void* gradient;
    const void* weight;
    void* new_weight;
    const void* first;  // moment, or velocity
    void* new_first;
    const void* second;
    void* new_second;
    const void* average;  // of the weight; null: none
    void* new_average;
    const void* scale;  // of the gradient; null: 1
    long long count;
    double decay, rate, beta1;  // factor of weight_decay; rate of a running average; of Adam
    u32 first_block;
    unsigned char kind, dtype, gradient_dtype, unused;
};
struct Parameters {
    Parameter parameter[MAX_PARAMETERS];
};
struct StepValues {
    float lr, weight_decay, momentum, first_correction, second_correction;
};

template <class T>
__device__ __forceinline__ T root(T v) {
    if constexpr (is_same<T, double>) return sqrt(v);
    else return sqrtf(v);
}

// An element of an array of a dtype that is known at run time.
template <class A>
__device__ __forceinline__ A load_any(const void* from, u32 dtype, long long i) {
    switch (dtype) {
        case FLOAT32: return static_cast<A>(static_cast<const float*>(from)[i]);
        case FLOAT16: return load_acc(static_cast<const f16*>(from) + i);
        case BFLOAT16: return load_acc(static_cast<const bf16*>(from) + i);
        default: return static_cast<A>(static_cast<const double*>(from)[i]);
    }
}
template <class T, bool IS_ANY>
__device__ __forceinline__ acc_t<T> load_gradient(const Parameter& p, const void* from, long long i) {
    if constexpr (IS_ANY) return load_any<acc_t<T>>(from, p.gradient_dtype, i);
    else return load_acc(static_cast<const T*>(from) + i);
}

// T       of the weight
// IS_ANY  the gradient and its scale have another dtype
template <class T, bool IS_ANY>
__device__ __forceinline__ void update_element(const Parameter& p, const StepValues& values, acc_t<T> scale,
                                               long long i) {
    using A = acc_t<T>;
    // The rest is rounded once: 1 - 0.999f is 5e-5 larger than 0.001.
    constexpr A BETA2 = A(0.999), REST2 = A(1 - 0.999), EPS = A(1e-8);
    const auto load = [i](const void* from) { return static_cast<const A*>(from)[i]; };
    const auto store = [i](void* to, A v) { static_cast<A*>(to)[i] = v; };
    const A lr = values.lr, decay = A(p.decay) * A(values.weight_decay);
    A g = scale * load_gradient<T, IS_ANY>(p, p.gradient, i), w = load_acc(static_cast<const T*>(p.weight) + i);
    if (p.decay != 0 && p.kind != ADAMW) g = multiply_add(decay, w, g);
    if (p.kind == AVERAGE) {
        w = multiply_add(A(p.rate), g - w, w);
    } else if (p.kind == DESCENT) {
        w = w - lr * g;
    } else if (p.kind == MOMENTUM || p.kind == NESTEROV) {
        const A v = multiply_add(A(values.momentum), load(p.first), g);
        store(p.new_first, v);
        w = w - lr * (p.kind == NESTEROV ? multiply_add(A(values.momentum), v, g) : v);
    } else {
        const A m = multiply_add(A(p.beta1), load(p.first), A(1 - p.beta1) * g);
        const A s = multiply_add(BETA2, load(p.second), REST2 * g * g);
        store(p.new_first, m);
        store(p.new_second, s);
        if (p.kind == ADAMW) w *= 1 - lr * decay;
        w = w - lr * (m / A(values.first_correction)) / (root(s / A(values.second_correction)) + EPS);
    }
    store_acc(static_cast<T*>(p.new_weight) + i, w);
    if (p.average != nullptr) {
        const A average = load(p.average);
        store(p.new_average, multiply_add(A(p.rate), w - average, average));  // w before it is rounded to T
    }
}

template <class T, bool IS_ANY>
__device__ __forceinline__ void update_block(const Parameter& p, const StepValues& values) {
    const acc_t<T> scale = p.scale == nullptr ? acc_t<T>(1) : load_gradient<T, IS_ANY>(p, p.scale, 0);
    const long long first = static_cast<long long>(blockIdx.x - p.first_block) * THREADS * PER_THREAD;
#pragma unroll
    for (int j = 0; j < PER_THREAD; ++j) {
        const long long i = first + j * THREADS + threadIdx.x;
        if (i < p.count) update_element<T, IS_ANY>(p, values, scale, i);
    }
}
template <class T>
__device__ __forceinline__ void update_weight(const Parameter& p, const StepValues& values) {
    if (p.gradient_dtype == p.dtype) update_block<T, false>(p, values);
    else update_block<T, true>(p, values);
}

__global__ void __launch_bounds__(THREADS)
    update(const __grid_constant__ Parameters all, int parameters, const StepValues* values) {
    int index = 0;
    while (index + 1 < parameters && blockIdx.x >= all.parameter[index + 1].first_block) ++index;
    const Parameter& p = all.parameter[index];
    const StepValues now = p.kind == AVERAGE ? StepValues{} : *values;
    switch (p.dtype) {
        case FLOAT32: return update_weight<float>(p, now);
        case FLOAT16: return update_weight<f16>(p, now);
        case BFLOAT16: return update_weight<bf16>(p, now);
        default: return update_weight<double>(p, now);
    }
}
