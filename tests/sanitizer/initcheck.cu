// For initcheck: reads x, which is allocated and never written.
__global__ void planted(float* x) {
    x[threadIdx.x] = 2.0f * x[threadIdx.x] + 1.0f;
}
