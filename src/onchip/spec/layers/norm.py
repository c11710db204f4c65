"""Batch normalisation as inference sees it: a factor and a shift a channel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from onchip.errors import InputError, ShapeError
from onchip.spec.layers.base import Layer, Types, WeightTypes, need_float
from onchip.spec.recipe import Array
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
        need_float(x, weights)
        if len(x.shape) not in self.ranks:
            expected = " or ".join(f"{rank} axes" for rank in self.ranks)
            raise ShapeError("input has another shape", got=str(x), expected=expected)
        for role, given in weights.items():
            if given.shape != (x.shape[1],):
                raise ShapeError(f"{role} and input do not fit", got=str(given), expected=f"[{x.shape[1]}]")
        return x

    def row_flop(self, inputs: Types, weights: WeightTypes) -> int:
        return 2 * inputs[0].row_size

    def check_weights(self, arrays: Mapping[str, Array]) -> None:
        if "var" in arrays:
            _checked(arrays["var"], self.eps)


@dataclass(frozen=True)
class BatchNorm1d(_BatchNorm):
    """Over (B, C) or (B, C, L)."""

    ranks: ClassVar[tuple[int, ...]] = (2, 3)


@dataclass(frozen=True)
class BatchNorm2d(_BatchNorm):
    """Over (B, C, H, W)."""

    ranks: ClassVar[tuple[int, ...]] = (4,)


def factor_and_shift(weights: Mapping[str, Array], eps: float) -> tuple[Array, Array]:
    """s = weight / sqrt(var + eps) and t = bias - mean s of every channel, in float64: a batch norm is x s + t."""
    wide = {role: array.astype(np.float64) for role, array in weights.items()}
    s = wide.get("weight", 1.0) / np.sqrt(_checked(wide["var"], eps))
    return s, wide.get("bias", 0.0) - wide["mean"] * s


def _checked(var: Array, eps: float) -> Array:
    """var + eps, which has a root that one can divide by. A NaN passes through, as everywhere."""
    under_root: Array = var.astype(np.float64) + eps
    if (bad := np.flatnonzero(under_root <= 0)).size:
        raise InputError(
            "a variance is no variance", got=f"{float(var[bad[0]]):.6g} in channel {bad[0]}, and eps {eps:g}",
            expected="var + eps above 0", hint="the running variance of the trained layer",
        )  # fmt: skip
    return under_root
