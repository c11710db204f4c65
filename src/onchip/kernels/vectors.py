"""SIMD properties of this CPU. Separate from its kernels, which take ten times as long to load: planning may need only
this.
"""

from __future__ import annotations

import platform

import llvmlite.binding as llvm


def _vector_shape() -> tuple[int, int, bool]:
    """Bytes per vector register, the number of registers, and whether there is fused multiply-add."""
    features: dict[str, bool] = dict(llvm.get_host_cpu_features())
    if platform.machine().lower() in ("aarch64", "arm64"):
        return 16, 32, True
    if features.get("avx512f"):
        return 64, 32, True
    if features.get("avx2") or features.get("avx"):
        return 32, 16, bool(features.get("fma"))
    return 16, 16, False


VECTOR_BYTES, VECTOR_REGISTERS, HAS_FMA = _vector_shape()
