"""CumSum: prefix sums along an axis of a row."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from onchip.errors import ShapeError
from onchip.network.layers.base import Arrays, Gradients, Layer, Types, Weights, WeightTypes, row_axis
from onchip.network.recipe import Array
from onchip.network.types import TensorType


@dataclass(frozen=True, eq=False, repr=False)
class CumSum(Layer):
    """y[i] = x[0] + ... + x[i] along the axis; without x[i] if exclusive, from the end if reverse."""

    axis: int = -1
    exclusive: bool = False
    reverse: bool = False

    def infer(self, inputs: Types, weights: WeightTypes) -> TensorType:
        (x,) = inputs
        row_axis(self.axis, x)
        if x.dtype == "bool":
            raise ShapeError("unsupported dtype", got=str(x), expected="a float or int dtype")
        return x

    def row_flop(self, inputs: Types, weights: WeightTypes) -> int:
        return inputs[0].row_size

    def forward(self, xs: Arrays, w: Weights) -> Array:
        x = np.moveaxis(xs[0], self.axis, -1)
        if self.reverse:
            x = x[..., ::-1]
        y: Array = np.cumsum(x, axis=-1, dtype=x.dtype)  # ints in their own dtype: they wrap
        if self.exclusive and y.shape[-1]:
            y = np.concatenate((np.zeros_like(y[..., :1]), y[..., :-1]), axis=-1)
        if self.reverse:
            y = y[..., ::-1]
        return np.moveaxis(y, -1, self.axis)

    def backward(self, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
        return (dataclasses.replace(self, reverse=not self.reverse).forward((dy,), w),), {}
