// mma/cluster.cuh: what the blocks of a cluster tell each other.
#pragma once

// In two: this thread has come, and what it wrote before is on its way, to memory too; then, that all have come, and what
// they wrote to each other's shared memory before is there.
__device__ __forceinline__ void arrive_at_cluster() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
}
__device__ __forceinline__ void await_cluster() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_cluster() {
    arrive_at_cluster();
    await_cluster();
}
__device__ __forceinline__ unsigned cluster_rank() {
    unsigned rank = 0;
#if __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
    return rank;
}
// Where `at` is in the shared memory of another block.
__device__ __forceinline__ unsigned place_in_block(float* at, unsigned rank) {
    unsigned there = 0;
#if __CUDA_ARCH__ >= 900
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there)
                 : "r"(static_cast<unsigned>(__cvta_generic_to_shared(at))), "r"(rank));
#endif
    return there;
}
__device__ __forceinline__ void store_to_block(float* at, unsigned rank, float v) {
#if __CUDA_ARCH__ >= 900
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(place_in_block(at, rank)), "f"(v) : "memory");
#endif
}
__device__ __forceinline__ void store_four_to_block(float* at, unsigned rank, float4 v) {
#if __CUDA_ARCH__ >= 900
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(place_in_block(at, rank)), "f"(v.x), "f"(v.y),
                 "f"(v.z), "f"(v.w) : "memory");
#endif
}
