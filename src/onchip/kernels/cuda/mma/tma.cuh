// mma/tma.cuh: boxes of an array on their way to shared memory, and signals that tell when they are there; sm_90 up.
//
// Boxes    The tensor memory accelerator moves them, started by one thread. What lies outside of the array is zero.
// Mixing   Rows of a box are 128 bytes; of row r, the 16 bytes that would be number i are number i ^ r % 8. So neither
//          the tensor cores, which take columns of 16 bytes, nor threads that do find them in the same banks. A box
//          begins at a multiple of 1,024 bytes. Rows of 64 bytes are mixed by r / 2 % 4, those of 32 by r / 4 % 2.
// Signals  (mbarrier) A signal turns when as many have arrived as it was made for and the bytes that it expects are
//          there. Who waits tells how often it has turned before, as a parity.
#pragma once

#include "mma/cluster.cuh"
#include "common/dtype.cuh"

struct __align__(64) TensorMap {
    unsigned long long words[16];  // as the driver encodes it
};

__device__ __forceinline__ u32 shared_address(const void* at) {
    return static_cast<u32>(__cvta_generic_to_shared(at));
}

struct Signal {
    unsigned long long state;

    __device__ __forceinline__ void init(u32 count) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(shared_address(&state)), "r"(count) : "memory");
    }
    __device__ __forceinline__ void arrive() {
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(shared_address(&state)) : "memory");
    }
    __device__ __forceinline__ void arrive_expecting(u32 bytes) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                     :
                     : "r"(shared_address(&state)), "r"(bytes)
                     : "memory");
    }
    __device__ __forceinline__ void wait(u32 parity) {
        u32 has_turned = 0;
        while (!has_turned) {
            asm volatile(
                "{.reg .pred turned; mbarrier.try_wait.parity.shared::cta.b64 turned, [%1], %2;"
                " selp.u32 %0, 1, 0, turned;}"
                : "=r"(has_turned)
                : "r"(shared_address(&state)), "r"(parity)
                : "memory");
        }
    }
};
// Behind the init of signals, before a barrier: the accelerator sees them then.
__device__ __forceinline__ void show_signals() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void load_box(void* to, const TensorMap& map, Signal& signal, int x, int y) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
        :
        : "r"(shared_address(to)), "l"(&map), "r"(shared_address(&signal.state)), "r"(x), "r"(y)
        : "memory");
}
__device__ __forceinline__ void load_box(void* to, const TensorMap& map, Signal& signal, int x, int y, int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];"
        :
        : "r"(shared_address(to)), "l"(&map), "r"(shared_address(&signal.state)), "r"(x), "r"(y), "r"(z)
        : "memory");
}
// Of images (B, H, W, C): channels from x on, pixels from (y, z) on, images from t on.
__device__ __forceinline__ void load_box(void* to, const TensorMap& map, Signal& signal, int x, int y, int z, int t) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];"
        :
        : "r"(shared_address(to)), "l"(&map), "r"(shared_address(&signal.state)), "r"(x), "r"(y), "r"(z), "r"(t)
        : "memory");
}
// Channels from c on of pixels of an image (B, H, W, C): from (w, h) on as the window's first tap goes over lines and
// images, each so far to the right and down.
__device__ __forceinline__ void load_pixels(void* to, const TensorMap& map, Signal& signal, int c, int w, int h, int image,
                                            u32 right, u32 down) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8};"
        :
        : "r"(shared_address(to)), "l"(&map), "r"(shared_address(&signal.state)), "r"(c), "r"(w), "r"(h), "r"(image),
          "h"(static_cast<unsigned short>(right)), "h"(static_cast<unsigned short>(down))
        : "memory");
}

// The way back: a box of images (B, H, W, C), mixed as above, to where it belongs; what would lie outside stays. The thread
// that stores it waits until all but the last n of its boxes may be overwritten.
__device__ __forceinline__ void store_box(const TensorMap& map, const void* from, int c, int w, int h, int image) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
                 "cp.async.bulk.commit_group;"
                 :
                 : "l"(&map), "r"(shared_address(from)), "r"(c), "r"(w), "r"(h), "r"(image)
                 : "memory");
}
template <int n>
__device__ __forceinline__ void wait_for_stores() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(n) : "memory");
}
// Behind what a thread wrote to shared memory, before a barrier: the accelerator sees it then.
__device__ __forceinline__ void show_box() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Of the 128 threads of a team, which no other team waits for.
__device__ __forceinline__ void wait_for_team(int team) {
    asm volatile("bar.sync %0, 128;" : : "r"(team + 1) : "memory");
}

// A kernel that may begin before the one before it ends (LaunchConfig.overlaps): the next one may begin; and what the
// one before made is there.
__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Four numbers that lie where `at` does, in the shared memory of another block.
__device__ __forceinline__ float4 read_of_block(const float* at, u32 rank) {
    u32 there;
    float4 v;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(at)), "r"(rank));
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(there)
                 : "memory");
    return v;
}

// A warp group's part of the multiprocessor's registers: less for those that only move boxes, more for the others.
template <int COUNT>
__device__ __forceinline__ void keep_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(COUNT));
}
template <int COUNT>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(COUNT));
}
