"""Indices of the largest and smallest values; the top k, in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from onchip.errors import ShapeError
from onchip.network.layers.base import Arrays, Gradients, Layer, Types, Weights, WeightTypes, need_float, row_axis
from onchip.network.recipe import Array
from onchip.network.types import TensorType


@dataclass(frozen=True, eq=False, repr=False)
class _Argument(Layer, abstract=True):
    """Over an axis of a row, which is removed, or has size 1 if `keep`; int64.

    Among equal values the first index, or the last if `last`; NaN comes before every number.
    """

    axis: int = -1
    keep: bool = False
    last: bool = False

    def infer(self, inputs: Types, weights: WeightTypes) -> TensorType:
        (x,) = inputs
        need_float(x)
        axis = row_axis(self.axis, x)
        if x.shape[axis] == 0:
            raise ShapeError("nothing to compare", got=str(x), expected=f"at least 1 element along axis {self.axis}")
        return TensorType((*x.shape[:axis], *((1,) if self.keep else ()), *x.shape[axis + 1 :]), "int64")

    def row_flop(self, inputs: Types, weights: WeightTypes) -> int:
        return inputs[0].row_size

    def forward(self, xs: Arrays, w: Weights) -> Array:
        (x,) = xs
        find = np.argmax if isinstance(self, ArgMax) else np.argmin  # NaN wins over every number
        if not self.last:
            return np.asarray(find(x, axis=self.axis, keepdims=self.keep), np.int64)
        indices = x.shape[self.axis] - 1 - find(np.flip(x, self.axis), axis=self.axis, keepdims=self.keep)
        return np.asarray(indices, np.int64)


class ArgMax(_Argument):
    """The index of the largest value."""


class ArgMin(_Argument):
    """The index of the smallest value."""


@dataclass(frozen=True, eq=False, repr=False)
class _TopK(Layer, abstract=True):
    """The k largest values along an axis of a row, in descending order, or the k smallest, ascending.

    Among equal values the lower index comes first, and NaN is larger than any number.
    """

    k: int
    axis: int = -1
    largest: bool = True

    def infer(self, inputs: Types, weights: WeightTypes) -> TensorType:
        (x,) = inputs
        need_float(x)
        axis = row_axis(self.axis, x)
        if not 0 < self.k <= int(x.shape[axis]):
            raise ShapeError("bad k", got=f"{self.k} of {x}", expected=f"1 to {x.shape[axis]}, the size of axis {axis}")
        return TensorType((*x.shape[:axis], self.k, *x.shape[axis + 1 :]), x.dtype)

    def row_flop(self, inputs: Types, weights: WeightTypes) -> int:
        return inputs[0].row_size


class TopK(_TopK):
    """The values themselves."""

    needs_y: ClassVar[bool] = False

    def forward(self, xs: Arrays, w: Weights) -> Array:
        return np.take_along_axis(xs[0], _indices(self, xs[0]), self.axis)

    def backward(self, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
        dx = np.zeros_like(xs[0])
        np.put_along_axis(dx, _indices(self, xs[0]), dy, self.axis)
        return (dx,), {}


class ArgTopK(_TopK):
    """Their indices; int64."""

    def infer(self, inputs: Types, weights: WeightTypes) -> TensorType:
        return TensorType(super().infer(inputs, weights).shape, "int64")

    def forward(self, xs: Arrays, w: Weights) -> Array:
        return _indices(self, xs[0])


def _indices(layer: _TopK, x: Array) -> Array:
    """NumPy sorts NaNs last, whatever their sign."""
    if layer.largest:  # flipped twice, so that a stable sort puts the first of equal values first
        n = x.shape[layer.axis]
        indices = n - 1 - np.flip(np.argsort(np.flip(x, layer.axis), layer.axis, kind="stable"), layer.axis)
    else:
        indices = np.argsort(x, layer.axis, kind="stable")
    return np.asarray(np.take(indices, np.arange(layer.k), layer.axis), np.int64)
