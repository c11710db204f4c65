// gradient/step_counters.cu: what a step over a data set leaves for the next one: counters, and its loss in the log.
//
// Idea    One block: a few numbers change, mostly in place. Logs before counters, as the number of the step is one.
// Floor   An empty launch.
// Layout  position: the number of the step, and its first row. A state and its new value may be the same memory.
// Limits  MAX_LOGS of any dtype, MAX_STATES of at most MAX_COUNTERS int64; sm_80 up.
#include "common/dtype.cuh"

constexpr int THREADS = 256, MAX_LOGS = 32, MAX_STATES = 8, MAX_COUNTERS = 4;

struct NumberLog {
    const void* value;
    const void* log;
    void* new_log;
    long long steps;
    u32 number_bytes, unused;
};
struct CounterState {
    const long long* counters;
    long long* new_counters;
    long long per_step[MAX_COUNTERS], per_row[MAX_COUNTERS];
    u32 count, unused;
};
struct StepEnd {
    NumberLog log[MAX_LOGS];
    CounterState state[MAX_STATES];
};

__global__ void __launch_bounds__(THREADS)
    step_counters(const __grid_constant__ StepEnd end, int logs, int states, const long long* position, long long B) {
    const long long step = logs > 0 ? position[0] : 0;
    for (int i = 0; i < logs; ++i) {
        const NumberLog& of = end.log[i];
        const unsigned char* log = static_cast<const unsigned char*>(of.log);
        unsigned char* new_log = static_cast<unsigned char*>(of.new_log);
        if (new_log != log) {
            const long long nbytes = of.steps * of.number_bytes;
            for (long long j = threadIdx.x; j < nbytes; j += THREADS) new_log[j] = log[j];
            __syncthreads();  // the loss replaces one of the copied numbers
        }
        if (0 <= step && step < of.steps && threadIdx.x < of.number_bytes)
            new_log[step * of.number_bytes + threadIdx.x] = static_cast<const unsigned char*>(of.value)[threadIdx.x];
    }
    __syncthreads();  // every thread has read the position
    const u32 of = threadIdx.x / MAX_COUNTERS, i = threadIdx.x % MAX_COUNTERS;
    if (of >= states) return;
    const CounterState& state = end.state[of];
    if (i < state.count) state.new_counters[i] = state.counters[i] + state.per_step[i] + B * state.per_row[i];
}
