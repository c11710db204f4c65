"""Where the largest and the smallest numbers stand; the first few of them, in order."""

from __future__ import annotations

from dataclasses import dataclass

from onchip.errors import ShapeError
from onchip.network.layers.base import Layer, Types, WeightTypes, need_float, row_axis
from onchip.network.types import TensorType


@dataclass(frozen=True, eq=False, repr=False)
class _Argument(Layer, abstract=True):
    """Along an axis of a row, which vanishes, or stays with size 1 if `keep`; int64. The first of equals, or the last
    if `last`; a NaN stands before all numbers."""

    axis: int = -1
    keep: bool = False
    last: bool = False

    def infer(self, inputs: Types, weights: WeightTypes) -> TensorType:
        (x,) = inputs
        need_float(x)
        axis = row_axis(self.axis, x)
        if x.shape[axis] == 0:
            raise ShapeError("nothing to compare", got=str(x), expected=f"at least 1 along axis {self.axis}")
        return TensorType((*x.shape[:axis], *((1,) if self.keep else ()), *x.shape[axis + 1 :]), "int64")

    def row_flop(self, inputs: Types, weights: WeightTypes) -> int:
        return inputs[0].row_size


class ArgMax(_Argument):
    """The place of the largest number."""


class ArgMin(_Argument):
    """The place of the smallest number."""


@dataclass(frozen=True, eq=False, repr=False)
class _TopK(Layer, abstract=True):
    """The k largest numbers along an axis of a row, the largest first, or the k smallest; of equals the first one comes
    first, and a NaN is larger than any number."""

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
    """The numbers themselves."""


class ArgTopK(_TopK):
    """Their places; int64."""

    def infer(self, inputs: Types, weights: WeightTypes) -> TensorType:
        return TensorType(super().infer(inputs, weights).shape, "int64")
