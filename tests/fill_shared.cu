// fill_shared.cu: fills the shared memory of the SMs with one word, to test that kernels do not read stale contents.
__global__ void fill_shared(unsigned word, int words) {
    extern __shared__ unsigned smem[];
    volatile unsigned* const to = smem;  // volatile: the stores are never read
    for (int i = threadIdx.x; i < words; i += blockDim.x) to[i] = word;
}
