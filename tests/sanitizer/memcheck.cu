// Planted for memcheck: 64 threads, an array of 64 floats, and each writes one place too far.
__global__ void planted(float* x) {
    x[threadIdx.x + 1] = 1.0f;
}
