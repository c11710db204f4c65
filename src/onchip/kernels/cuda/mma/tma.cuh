// mma/tma.cuh: TMA loads and stores, mbarriers, programmatic dependent launch, DSMEM reads, setmaxnreg; sm_90 up.
//
// TMA       One thread issues the copy of a tile (box). Elements outside the array are loaded as zeros.
// Swizzle   Tile rows are 128 bytes; 16-byte chunk i of row r is stored at chunk i ^ r % 8. Tensor cores and threads
//           that read a 16-byte column then have no bank conflicts. A tile begins at a multiple of 1,024 bytes. Rows of
//           64 bytes are swizzled by r / 2 % 4, rows of 32 by r / 4 % 2.
// Mbarrier  A phase completes when the expected number of threads has arrived and the expected bytes have
//           landed. wait takes the parity of the phase.
#pragma once

#include "mma/cluster.cuh"
#include "common/dtype.cuh"

struct __align__(64) TensorMap {
    unsigned long long words[16];  // the TMA descriptor (CUtensorMap), encoded by the driver
};

__device__ __forceinline__ u32 shared_address(const void* at) {
    return static_cast<u32>(__cvta_generic_to_shared(at));
}

struct Mbarrier {
    unsigned long long state;

    __device__ __forceinline__ void init(u32 count) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(shared_address(&state)), "r"(count) : "memory");
    }
    __device__ __forceinline__ void arrive() {
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(shared_address(&state)) : "memory");
    }
    __device__ __forceinline__ void arrive_expect_tx(u32 bytes) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                     :
                     : "r"(shared_address(&state)), "r"(bytes)
                     : "memory");
    }
    __device__ __forceinline__ void wait(u32 parity) {
        u32 is_complete = 0;
        while (!is_complete) {
            asm volatile(
                "{.reg .pred done; mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;"
                " selp.u32 %0, 1, 0, done;}"
                : "=r"(is_complete)
                : "r"(shared_address(&state)), "r"(parity)
                : "memory");
        }
    }
};
// After the init of mbarriers, before __syncthreads: makes them visible to TMA.
__device__ __forceinline__ void fence_mbarriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// TMA load of a tile to shared memory, from element coordinates (x, y, ...); completes on the mbarrier.
__device__ __forceinline__ void tma_load(void* to, const TensorMap& map, Mbarrier& mbarrier, int x, int y) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
        :
        : "r"(shared_address(to)), "l"(&map), "r"(shared_address(&mbarrier.state)), "r"(x), "r"(y)
        : "memory");
}
__device__ __forceinline__ void tma_load(void* to, const TensorMap& map, Mbarrier& mbarrier, int x, int y, int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];"
        :
        : "r"(shared_address(to)), "l"(&map), "r"(shared_address(&mbarrier.state)), "r"(x), "r"(y), "r"(z)
        : "memory");
}
// NHWC images: channels from x on, pixels from (w, h) = (y, z) on, images from t on.
__device__ __forceinline__ void tma_load(void* to, const TensorMap& map, Mbarrier& mbarrier, int x, int y, int z,
                                         int t) {
    asm volatile(
       "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];"
        :
        : "r"(shared_address(to)), "l"(&map), "r"(shared_address(&mbarrier.state)), "r"(x), "r"(y), "r"(z), "r"(t)
        : "memory");
}
// im2col TMA load (implicit GEMM) from NHWC images: channels from c on, of pixels from (w, h) on in the order of the
// window's first tap over rows and images, each offset by the tap (right, down).
__device__ __forceinline__ void tma_load_im2col(void* to, const TensorMap& map, Mbarrier& mbarrier, int c, int w, int h,
                                                int image, u32 right, u32 down) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8};"
        :
        : "r"(shared_address(to)), "l"(&map), "r"(shared_address(&mbarrier.state)), "r"(c), "r"(w), "r"(h), "r"(image),
          "h"(static_cast<unsigned short>(right)), "h"(static_cast<unsigned short>(down))
        : "memory");
}

// TMA store of a swizzled tile to NHWC images; elements outside the array are dropped. The thread that issues it calls
// tma_store_wait<n>: all but its last n tiles may then be overwritten in shared memory.
__device__ __forceinline__ void tma_store(const TensorMap& map, const void* from, int c, int w, int h, int image) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
                 "cp.async.bulk.commit_group;"
                 :
                 : "l"(&map), "r"(shared_address(from)), "r"(c), "r"(w), "r"(h), "r"(image)
                 : "memory");
}
template <int n>
__device__ __forceinline__ void tma_store_wait() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(n) : "memory");
}
// After a thread's writes to shared memory, before a barrier: makes them visible to TMA (async proxy).
__device__ __forceinline__ void fence_for_tma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Named barrier over the 128 threads of a warpgroup.
__device__ __forceinline__ void wait_for_warpgroup(int warpgroup) {
    asm volatile("bar.sync %0, 128;" : : "r"(warpgroup + 1) : "memory");
}

// Programmatic dependent launch (LaunchConfig.overlaps): launch_dependent_grids lets the next kernel start;
// wait_on_dependent_grids returns when the previous kernel's writes are visible.
__device__ __forceinline__ void launch_dependent_grids() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_on_dependent_grids() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// DSMEM load: four floats at address `at` of the shared memory of block `rank` of the cluster.
__device__ __forceinline__ float4 dsmem_load4(const float* at, u32 rank) {
    u32 address;
    float4 v;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(at)), "r"(rank));
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

// setmaxnreg: the producer warpgroup releases registers (keep), consumer warpgroups acquire them (take).
template <int COUNT>
__device__ __forceinline__ void warpgroup_reg_dealloc() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(COUNT));
}
template <int COUNT>
__device__ __forceinline__ void warpgroup_reg_alloc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(COUNT));
}
