// For memcheck: 64 threads write one element past the end of 64 floats.
__global__ void planted(float* x) {
    x[threadIdx.x + 1] = 1.0f;
}
