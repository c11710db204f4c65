"""Activations: one number in, one number out; and softmax, one row in, one row out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from onchip.errors import ShapeError
from onchip.spec.layers.base import Elementwise, Layer, need_float
from onchip.spec.types import TensorType


@dataclass(frozen=True)
class ReLU(Elementwise):
    """max(x, 0); a NaN stays a NaN."""


@dataclass(frozen=True)
class Sigmoid(Elementwise):
    """1 / (1 + exp(-x))."""

    flop_each: ClassVar[int] = 20  # an exponential is a polynomial of degree 6 and a division


@dataclass(frozen=True)
class Tanh(Elementwise):
    flop_each: ClassVar[int] = 20


@dataclass(frozen=True)
class _OverAxis(Layer, abstract=True):
    axis: int = -1

    def infer(self, inputs: tuple[TensorType, ...], weights: Mapping[str, TensorType]) -> TensorType:
        (x,) = inputs
        need_float(x)
        rank = len(x.shape)
        if not -rank <= self.axis < rank:
            raise ShapeError("axis out of range", got=f"axis {self.axis}", expected=f"-{rank} to {rank - 1} for {x}")
        if x.shape[self.axis] == 0:
            raise ShapeError("nothing to sum over", got=str(x), expected=f"at least 1 along axis {self.axis}")
        if self.axis % rank == 0:
            raise ShapeError("axis 0 is the batch: rows must not depend on each other", got=f"axis {self.axis}")
        return x

    def row_flop(self, inputs: tuple[TensorType, ...], weights: Mapping[str, TensorType]) -> int:
        return 22 * inputs[0].row_size


@dataclass(frozen=True)
class Softmax(_OverAxis):
    """exp(x - max) / sum(exp(x - max)) over an axis."""


@dataclass(frozen=True)
class LogSoftmax(_OverAxis):
    """x - max - log(sum(exp(x - max))) over an axis."""
