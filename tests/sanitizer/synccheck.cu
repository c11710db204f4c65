// Planted for synccheck: a barrier of the block to which a quarter of its threads never come.
__global__ void planted(float* x) {
    if (threadIdx.x < 48) __syncthreads();
    x[threadIdx.x] = 1.0f;
}
