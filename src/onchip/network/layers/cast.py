"""Cast: the same numbers in another dtype; ToInts: whole ones, and whether they are there at all."""

from __future__ import annotations

import typing
from dataclasses import dataclass
from typing import Literal

from onchip.errors import ShapeError
from onchip.network.layers.base import Layer, Types, WeightTypes
from onchip.network.types import TensorType

CastTo = Literal["float64", "float32", "float16", "bfloat16"]
Whole = Literal["int64", "int32", "int16", "int8", "uint8", "bool"]


@dataclass(frozen=True, eq=False, repr=False)
class Cast(Layer):
    """x as floats of `dtype`, rounded to the nearest; too large a number is an infinity.

    It maps each number by itself, but is no Elementwise: those hand on the dtype that they get.
    """

    dtype: CastTo

    def __post_init__(self) -> None:
        if self.dtype not in typing.get_args(CastTo):
            raise ShapeError("no dtype to cast to", got=repr(self.dtype), expected=", ".join(typing.get_args(CastTo)))

    def infer(self, inputs: Types, weights: WeightTypes) -> TensorType:
        return TensorType(inputs[0].shape, self.dtype)

    def row_flop(self, inputs: Types, weights: WeightTypes) -> int:
        return 0


@dataclass(frozen=True, eq=False, repr=False)
class ToInts(Layer):
    """x as ints of `dtype`: of floats the whole part, of ints the lower bits; as bool, whether it is not 0.

    What a float becomes that no such int is near is not said: no two machines agree.
    """

    dtype: Whole

    def __post_init__(self) -> None:
        if self.dtype not in typing.get_args(Whole):
            raise ShapeError("no dtype of ints", got=repr(self.dtype), expected=", ".join(typing.get_args(Whole)))

    def infer(self, inputs: Types, weights: WeightTypes) -> TensorType:
        return TensorType(inputs[0].shape, self.dtype)

    def row_flop(self, inputs: Types, weights: WeightTypes) -> int:
        return 0
