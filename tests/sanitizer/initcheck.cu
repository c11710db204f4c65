// Planted for initcheck: x comes from the pool as it is, nobody has written to it, and it is read.
__global__ void planted(float* x) {
    x[threadIdx.x] = 2.0f * x[threadIdx.x] + 1.0f;
}
