// For racecheck: no barrier between one warp's writes to shared memory and the other's reads.
__global__ void planted(float* x) {
    __shared__ float smem[64];
    smem[threadIdx.x] = x[threadIdx.x];
    x[threadIdx.x] = smem[63 - threadIdx.x];
}
