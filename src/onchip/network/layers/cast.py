"""Cast: to another float dtype; ToInts: to ints or bool."""

from __future__ import annotations

import typing
from dataclasses import dataclass
from typing import Literal

from onchip.errors import ShapeError
from onchip.network.layers.base import Layer, Types, WeightTypes
from onchip.network.types import TensorType

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

    def infer(self, inputs: Types, weights: WeightTypes) -> TensorType:
        return TensorType(inputs[0].shape, self.dtype)

    def row_flop(self, inputs: Types, weights: WeightTypes) -> int:
        return 0


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

    def infer(self, inputs: Types, weights: WeightTypes) -> TensorType:
        return TensorType(inputs[0].shape, self.dtype)

    def row_flop(self, inputs: Types, weights: WeightTypes) -> int:
        return 0
