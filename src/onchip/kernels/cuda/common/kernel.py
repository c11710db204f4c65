"""The base class of CUDA kernels."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

from onchip.kernels.cuda.common.dtypes import FLOATS
from onchip.kernels.cuda.common.precision import PRECISIONS
from onchip.kernels.cuda.common.program import EVERY_CHIP, Instance, Lowering
from onchip.kernels.layer_kernel import LayerKernel


class CudaKernel(LayerKernel):
    """By default a general kernel: any float dtype, computed in float32 or float64, on every chip."""

    device_kind: ClassVar[str] = "cuda"
    precisions: ClassVar[tuple[str, ...]] = tuple(PRECISIONS)
    dtypes: ClassVar[Collection[str]] = tuple(FLOATS)
    architectures: ClassVar[tuple[str, ...]] = EVERY_CHIP


def instance(name: str, lowering: Lowering, B: int = 1000, launch: int = 0) -> Instance:
    """One launch of a lowering for B rows, to compile."""
    return Instance(name, lambda device: lowering.at(B).launches[launch])
