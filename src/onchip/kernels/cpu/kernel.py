"""The base class of CPU kernels."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

from onchip.kernels.layer_kernel import LayerKernel


class CpuKernel(LayerKernel):
    """A kernel that computes in float32 by default; a subclass adds the `bind` of InferenceKernel or TrainingKernel."""

    device_kind: ClassVar[str] = "cpu"
    precisions: ClassVar[tuple[str, ...]] = ("fp32",)
    dtypes: ClassVar[Collection[str]] = ("float32",)
