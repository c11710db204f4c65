// mma/cluster.cuh: cluster barriers and distributed shared memory (DSMEM) stores; no-ops before sm_90.
#pragma once

// Split cluster barrier: arrive releases this thread's earlier writes; await returns once all threads of the cluster
// have arrived, and acquires their writes to DSMEM and global memory.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_sync() {
    cluster_arrive();
    cluster_wait();
}
__device__ __forceinline__ unsigned cluster_rank() {
    unsigned rank = 0;
#if __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
    return rank;
}
// The DSMEM address of `at` in the shared memory of block `rank`.
__device__ __forceinline__ unsigned dsmem_address(float* at, unsigned rank) {
    unsigned address = 0;
#if __CUDA_ARCH__ >= 900
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address)
                 : "r"(static_cast<unsigned>(__cvta_generic_to_shared(at))), "r"(rank));
#endif
    return address;
}
__device__ __forceinline__ void dsmem_store(float* at, unsigned rank, float v) {
#if __CUDA_ARCH__ >= 900
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(dsmem_address(at, rank)), "f"(v) : "memory");
#endif
}
__device__ __forceinline__ void dsmem_store4(float* at, unsigned rank, float4 v) {
#if __CUDA_ARCH__ >= 900
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(dsmem_address(at, rank)), "f"(v.x),
                 "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
#endif
}
