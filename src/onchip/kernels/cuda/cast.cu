// cast.cu: the same numbers in another dtype, where no kernel takes the Cast along with what stands beside it.
//
// Idea    A thread moves four numbers at a time, a warp's next to each other; blocks walk over the array.
// Floor   A number moves sizeof(In) + sizeof(Out) bytes: 2^28 from float32 to float16 are 1.6 GB / 4.8 TB/s = 336 us.
// Layout  x, y: `count` numbers, 16 B aligned.
// Limits  Any count; float32, float16, bfloat16; sm_80 up.
#include "number.cuh"

template <class In, class Out>
__global__ void __launch_bounds__(256) cast(const In* x, Out* y, long long count) {
    const long long step = 4LL * gridDim.x * blockDim.x;
    for (long long i = 4LL * (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x); i < count; i += step) {
        if (i + 4 <= count) {
            store4(y + i, load4(x + i));
        } else {
            for (long long j = i; j < count; ++j) store1(y + j, to_float(x[j]));
        }
    }
}
