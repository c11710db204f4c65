"""Cast: to another float dtype; ToInts: to ints or bool."""

from __future__ import annotations

import typing
from dataclasses import dataclass
from typing import Literal

import numpy as np

from onchip.errors import ShapeError
from onchip.network.layers.base import Arrays, Gradients, Layer, Types, Weights, WeightTypes
from onchip.network.recipe import Array
from onchip.network.types import TensorType, numpy_dtype

CastTo = Literal["float64", "float32", "float16", "bfloat16"]
IntDtype = Literal["int64", "int32", "int16", "int8", "uint8", "bool"]


@dataclass(frozen=True, eq=False, repr=False)
class Cast(Layer):
    """x as floats of `dtype`, rounded to nearest; overflow becomes infinity.

    It is elementwise, but not an Elementwise, which keeps the dtype of its input.
    """

    dtype: CastTo

    def __post_init__(self) -> None:
        if self.dtype not in typing.get_args(CastTo):
            raise ShapeError("bad dtype to cast to", got=repr(self.dtype), expected=", ".join(typing.get_args(CastTo)))

    @property
    def variant(self) -> str:
        return self.dtype

    def infer(self, inputs: Types, weights: WeightTypes) -> TensorType:
        return TensorType(inputs[0].shape, self.dtype)

    def row_flop(self, inputs: Types, weights: WeightTypes) -> int:
        return 0

    def forward(self, xs: Arrays, w: Weights) -> Array:
        (x,) = xs
        if x.dtype != np.float32:
            return x.astype(np.float64, copy=False)  # float64, or ints and bools: exact up to 2^53
        return x.astype(numpy_dtype(self.dtype)).astype(np.float32)

    def backward(self, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
        """A straight-through gradient, as if rounding were the identity. Ints and bools have none."""
        return (dy if xs[0].dtype.kind == "f" else None,), {}


@dataclass(frozen=True, eq=False, repr=False)
class ToInts(Layer):
    """x as ints of `dtype`: floats are truncated, ints keep their lower bits; as bool, x != 0.

    The result for a float out of range is unspecified: machines differ.
    """

    dtype: IntDtype

    def __post_init__(self) -> None:
        if self.dtype not in typing.get_args(IntDtype):
            raise ShapeError(
                "unsupported int dtype", got=repr(self.dtype), expected=", ".join(typing.get_args(IntDtype))
            )

    @property
    def variant(self) -> str:
        return self.dtype

    def infer(self, inputs: Types, weights: WeightTypes) -> TensorType:
        return TensorType(inputs[0].shape, self.dtype)

    def row_flop(self, inputs: Types, weights: WeightTypes) -> int:
        return 0

    def forward(self, xs: Arrays, w: Weights) -> Array:
        return xs[0].astype(numpy_dtype(self.dtype))
