"""What a launch occupies of an SM."""

from __future__ import annotations

import math

from onchip.kernels.cuda.common.program import KernelLaunch
from onchip.runtime.cuda.launches import Function

# Maximum warps per SM (CUDA C++ programming guide, technical specifications).
_WARPS = {"sm_80": 64, "sm_86": 48, "sm_89": 48, "sm_90a": 64, "sm_100": 64, "sm_120": 48}


def occupancy(launch: KernelLaunch, function: Function, arch: str) -> float:
    """The share of an SM's warps that the kernel's registers and shared memory allow."""
    threads = math.prod(launch.config.block)
    return function.blocks_per_sm(threads, launch.config.shared_bytes) * -(-threads // 32) / _WARPS[arch]
