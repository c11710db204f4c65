// train/phases.cuh: clocks per phase of the persistent training kernels; only with -DPHASE_CLOCKS, for a profile.
//
// Idea    Where phase A ends and B begins, thread 0 of a block adds its clock to A's sum and subtracts it from B's. The
//         results of these atomics are unused: no thread waits, and no register lives from phase to phase.
#pragma once

#include "common/dtype.cuh"

enum class Phase {
    OUTSIDE,
    LOAD_WEIGHTS,
    LOAD_ROWS,
    FORWARD,
    WAIT_FOR_ACTIVATIONS,
    OUTPUTS_AND_LOSS,
    WAIT_FOR_GRADIENTS,
    GRADIENTS,
    WAIT_FOR_OTHER_GROUP,
    WAIT_FOR_WEIGHTS,
    UPDATE,
    STORE_WEIGHTS,
    COUNT,
};

// args.phase_clocks (blocks, COUNT): sums modulo 2^32; that of OUTSIDE is minus all others together.
template <class Args>
__device__ __forceinline__ void change_phase(const Args& args, Phase ended, Phase begun) {
#ifdef PHASE_CLOCKS
    u32* const at = args.phase_clocks + (blockIdx.y * gridDim.x + blockIdx.x) * static_cast<u32>(Phase::COUNT);
    unsigned long long cycles;
    asm volatile("mov.u64 %0, %clock64;" : "=l"(cycles) :: "memory");
    const u32 now = static_cast<u32>(cycles);
    if (threadIdx.x == 0) atomicAdd(at + static_cast<u32>(ended), now), atomicAdd(at + static_cast<u32>(begun), 0 - now);
#endif
}
