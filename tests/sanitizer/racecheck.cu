// Planted for racecheck: no barrier between what one warp writes to shared memory and what the other reads of it.
__global__ void planted(float* x) {
    __shared__ float kept[64];
    kept[threadIdx.x] = x[threadIdx.x];
    x[threadIdx.x] = kept[63 - threadIdx.x];
}
