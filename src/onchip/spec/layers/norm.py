"""Batch normalisation as inference sees it: a factor and a shift a channel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from onchip.errors import ShapeError
from onchip.spec.layers.base import Layer, Types, WeightTypes, need_float
from onchip.spec.types import TensorType


@dataclass(frozen=True)
class _BatchNorm(Layer, abstract=True):
    """(x - mean) / sqrt(var + eps) * weight + bias; each (C,), channels along axis 1."""

    ranks: ClassVar[tuple[int, ...]]  # axes that x may have, the batch among them
    required: ClassVar[tuple[str, ...]] = ("mean", "var")
    optional: ClassVar[tuple[str, ...]] = ("weight", "bias")
    eps: float = 1e-5

    def infer(self, inputs: Types, weights: WeightTypes) -> TensorType:
        (x,) = inputs
        need_float(x)
        if len(x.shape) not in self.ranks:
            expected = " or ".join(f"{rank} axes" for rank in self.ranks)
            raise ShapeError("input has another shape", got=str(x), expected=expected)
        for role, given in weights.items():
            if given.shape != (x.shape[1],):
                raise ShapeError(f"{role} and input do not fit", got=str(given), expected=f"[{x.shape[1]}]")
        return x

    def row_flop(self, inputs: Types, weights: WeightTypes) -> int:
        return 2 * inputs[0].row_size


@dataclass(frozen=True)
class BatchNorm1d(_BatchNorm):
    """Over (B, C) or (B, C, L)."""

    ranks: ClassVar[tuple[int, ...]] = (2, 3)


@dataclass(frozen=True)
class BatchNorm2d(_BatchNorm):
    """Over (B, C, H, W)."""

    ranks: ClassVar[tuple[int, ...]] = (4,)
