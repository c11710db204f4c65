// gradient/update.cu: the optimiser's update of all parameters in one launch.
//
// Idea    A block updates 1,024 elements of one parameter: it reads gradient, moments and weight once and writes the new
//         ones, mostly over the old: an element depends on no other.
// Floor   Adam moves 7 floats per element: a million parameters are 28 MB / 4.2 TB/s = 6.7 us.
// Layout  Every array of a parameter is contiguous; all have T but `values`, the optimiser's values of this step.
// Limits  MAX_PARAMETERS per launch; float32, float64; sm_80 up.
#include "common/accumulator.cuh"

constexpr int THREADS = 256, PER_THREAD = 4, MAX_PARAMETERS = 40;
enum Kind : u32 { DESCENT, MOMENTUM, ADAM, ADAMW, AVERAGE };

struct Parameter {
    const void* gradient;
    const void* weight;
    void* new_weight;
    const void* first;  // moment, or velocity
    void* new_first;
    const void* second;
    void* new_second;
    const void* scale;  // of the gradient; null: 1
    long long count;
    u32 first_block, kind, decays;  // decays: the gradient has weight_decay w added
    float rate;                     // of a running average
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

template <class T>
__device__ __forceinline__ void update_element(const Parameter& p, const StepValues& values, T scale, long long i) {
    // The rest is rounded once: 1 - 0.999f is 5e-5 larger than 0.001.
    constexpr T BETA1 = T(0.9), REST1 = T(1 - 0.9), BETA2 = T(0.999), REST2 = T(1 - 0.999), EPS = T(1e-8);
    const T lr = values.lr, decay = values.weight_decay;
    T g = scale * static_cast<const T*>(p.gradient)[i], w = static_cast<const T*>(p.weight)[i];
    if (p.decays) g = multiply_add(decay, w, g);
    if (p.kind == AVERAGE) {
        w = multiply_add(T(p.rate), g - w, w);
    } else if (p.kind == DESCENT) {
        w = w - lr * g;
    } else if (p.kind == MOMENTUM) {
        const T v = multiply_add(T(values.momentum), static_cast<const T*>(p.first)[i], g);
        static_cast<T*>(p.new_first)[i] = v;
        w = w - lr * v;
    } else {
        const T m = multiply_add(BETA1, static_cast<const T*>(p.first)[i], REST1 * g);
        const T s = multiply_add(BETA2, static_cast<const T*>(p.second)[i], REST2 * g * g);
        static_cast<T*>(p.new_first)[i] = m;
        static_cast<T*>(p.new_second)[i] = s;
        if (p.kind == ADAMW) w *= 1 - lr * decay;
        w = w - lr * (m / T(values.first_correction)) / (root(s / T(values.second_correction)) + EPS);
    }
    static_cast<T*>(p.new_weight)[i] = w;
}

template <class T>
__global__ void __launch_bounds__(THREADS)
    update(const __grid_constant__ Parameters all, int parameters, const StepValues* values) {
    int index = 0;
    while (index + 1 < parameters && blockIdx.x >= all.parameter[index + 1].first_block) ++index;
    const Parameter& p = all.parameter[index];
    const StepValues now = p.kind == AVERAGE ? StepValues{} : *values;
    const T scale = p.scale == nullptr ? T(1) : *static_cast<const T*>(p.scale);
    const long long first = static_cast<long long>(blockIdx.x - p.first_block) * THREADS * PER_THREAD;
#pragma unroll
    for (int j = 0; j < PER_THREAD; ++j) {
        const long long i = first + j * THREADS + threadIdx.x;
        if (i < p.count) update_element<T>(p, now, scale, i);
    }
}
