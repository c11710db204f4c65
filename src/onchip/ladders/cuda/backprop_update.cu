// backprop_update.cu: the update with eta and alpha in constant memory, and with the partial gradients of all streams.
//
// Idea    Every thread reads the same two values: the constant cache broadcasts them to a warp. The report copies them
//         with cudaMemcpyToSymbol; here they are initialised at compile time, by options -D.
//         Streams: each has its own gradients, of its patterns; this kernel adds them in order.
// Floor   46,000 weights: 0.2 MB each of g (per stream), v in and out, w in and out.
// Order   Fixed.
// Limits  fp32; sm_80 up.
#include "backprop.cuh"

__constant__ float eta = ETA, alpha = ALPHA;

// g (parts, count)
__global__ void __launch_bounds__(THREADS)
update_by_constants(float* w, float* v, const float* g, int parts, int count) {
    const int i = THREADS * blockIdx.x + threadIdx.x;
    if (i >= count) return;
    float sum = g[i];
    for (int part = 1; part < parts; ++part) sum += g[part * count + i];
    momentum_step(w[i], v[i], sum, eta, alpha);
}
