// launch_features.cu: a kernel per launch feature that no kernel of the package uses yet.
struct __align__(64) TensorMap {  // CUtensorMap of cuda.h
    unsigned char bytes[128];
};

// y[block] = cluster rank + 100 * cluster size, after a cluster barrier.
extern "C" __global__ void cluster_ranks(int* y) {
    unsigned rank, size;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" : : : "memory");
    if (threadIdx.x == 0) y[blockIdx.x] = static_cast<int>(rank + 100 * size);
}

// Grid barrier on a word that was zero: y[block] = number of arrivals. Blocks of one thread.
extern "C" __global__ void meet(unsigned* word, int* y) {
    atomicAdd(word, 1);
    while (*static_cast<volatile unsigned*>(word) < gridDim.x) __nanosleep(100);
    y[blockIdx.x] = static_cast<int>(*static_cast<volatile unsigned*>(word));
}

// y[index] = 1 if the other kernel sets its flag while this one runs, 0 if it does not within about a second.
extern "C" __global__ void wait_for_other(unsigned* own_flag, unsigned* other_flag, int* y, unsigned index) {
    atomicExch(own_flag, 1);
    int is_set = 0;
    for (int i = 0; i < 1000000 && !is_set; ++i) {
        is_set = *static_cast<volatile unsigned*>(other_flag) != 0;
        __nanosleep(1000);
    }
    y[index] = is_set;
}

// y[2] = y[0] + y[1]
extern "C" __global__ void add_two(int* y) { y[2] = y[0] + y[1]; }

// y = ++count
extern "C" __global__ void count_calls(int* count, int* y) { *y = ++*count; }

// y (8, 16) = the tile at (row, column) of the tensor map, by one TMA load. A block of 128 threads.
extern "C" __global__ void copy_box(const __grid_constant__ TensorMap map, float* y, unsigned row, unsigned column) {
    __shared__ __align__(128) float tile[128];
    __shared__ __align__(8) unsigned long long barrier;
    const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(tile));
    const unsigned done = static_cast<unsigned>(__cvta_generic_to_shared(&barrier));
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" : : "r"(done) : "memory");
        asm volatile("fence.proxy.async;" : : : "memory");
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                     :
                     : "r"(done), "r"(static_cast<unsigned>(sizeof tile))
                     : "memory");
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
            :
            : "r"(to), "l"(&map), "r"(column), "r"(row), "r"(done)
            : "memory");
    }
    unsigned is_complete = 0;
    while (!is_complete) {
        asm volatile(
            "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;\nselp.u32 %0, 1, 0, p;\n}"
            : "=r"(is_complete)
            : "r"(done)
            : "memory");
    }
    y[threadIdx.x] = tile[threadIdx.x];
}
