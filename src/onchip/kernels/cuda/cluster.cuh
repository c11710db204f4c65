// cluster.cuh: what the blocks of a cluster tell each other.
#pragma once

// All have come, and what they wrote to each other's shared memory is there.
__device__ __forceinline__ void wait_for_cluster() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
#endif
}
__device__ __forceinline__ unsigned cluster_rank() {
    unsigned rank = 0;
#if __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
    return rank;
}
// Where `at` is in the shared memory of another block.
__device__ __forceinline__ void store_to_block(float* at, unsigned rank, float v) {
#if __CUDA_ARCH__ >= 900
    unsigned there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there)
                 : "r"(static_cast<unsigned>(__cvta_generic_to_shared(at))), "r"(rank));
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(v) : "memory");
#endif
}
