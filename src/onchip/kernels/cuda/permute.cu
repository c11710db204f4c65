// permute.cu: a weight with its axes in another order, and in another dtype if that is wanted.
//
// Idea    A thread makes the numbers of y in their order, so that a warp writes neighbours; what it reads lies anywhere,
//         and a sector of L2 that holds it serves the warps beside. Done once for a weight: simple before fast.
// Floor   A number moves sizeof(In) + sizeof(Out) bytes: 2^28 in float32 are 2.1 GB / 4.8 TB/s = 447 us.
// Layout  y (n0, n1, n2, n3) row-major; y[i0, i1, i2, i3] = x[i0 s0 + i1 s1 + i2 s2 + i3 s3].
// Limits  Any sizes; up to four axes that do not lie next to each other in both; sm_80 up.
#include "number.cuh"

template <class In, class Out>
__global__ void __launch_bounds__(256)
permute(const In* x, Out* y, long long count, long long n1, long long n2, long long n3, long long s0, long long s1,
        long long s2, long long s3) {
    const long long step = static_cast<long long>(gridDim.x) * 256;
    for (long long i = static_cast<long long>(blockIdx.x) * 256 + threadIdx.x; i < count; i += step) {
        const long long rows = i / n3, planes = rows / n2;
        store1(y + i, to_float(x[planes / n1 * s0 + planes % n1 * s1 + rows % n2 * s2 + i % n3 * s3]));
    }
}
