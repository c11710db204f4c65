// fill_shared.cu: writes one word all over the shared memory of the SMs, for tests of kernels that must not depend on what
// was there before.
__global__ void fill_shared(unsigned word, int words) {
    extern __shared__ unsigned room[];
    volatile unsigned* const to = room;  // volatile: nothing in here reads it
    for (int i = threadIdx.x; i < words; i += blockDim.x) to[i] = word;
}
