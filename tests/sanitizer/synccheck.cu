// For synccheck: a quarter of the threads never reach the block barrier.
__global__ void planted(float* x) {
    if (threadIdx.x < 48) __syncthreads();
    x[threadIdx.x] = 1.0f;
}
