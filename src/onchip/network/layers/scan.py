"""CumSum: prefix sums along an axis of a row."""

from __future__ import annotations

from dataclasses import dataclass

from onchip.errors import ShapeError
from onchip.network.layers.base import Layer, Types, WeightTypes, row_axis
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
