"""Layers that move no number: a row keeps its values in their order."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from onchip.errors import ShapeError
from onchip.spec.layers.base import Layer
from onchip.spec.types import TensorType


@dataclass(frozen=True)
class Reshape(Layer):
    """Give each row another shape; one -1 stands for whatever is left. Flatten is Reshape((-1,))."""

    row_shape: tuple[int, ...] = (-1,)

    def __post_init__(self) -> None:
        object.__setattr__(self, "row_shape", tuple(int(d) for d in self.row_shape))

    def infer(self, inputs: tuple[TensorType, ...], weights: Mapping[str, TensorType]) -> TensorType:
        (x,) = inputs
        if not x.is_batched:
            raise ShapeError("needs a batch in front", got=str(x))
        wanted = list(self.row_shape)
        if wanted.count(-1) > 1 or any(d < -1 for d in wanted):
            raise ShapeError("bad row shape", got=str(tuple(wanted)), expected="sizes and at most one -1")
        if -1 in wanted:
            known = math.prod(d for d in wanted if d != -1)
            if known == 0 or x.row_size % known:
                raise ShapeError("rows do not divide into that shape", got=f"{x} -> {tuple(wanted)}")
            wanted[wanted.index(-1)] = x.row_size // known
        if math.prod(wanted) != x.row_size:
            raise ShapeError("row sizes differ", got=f"{x} -> {tuple(wanted)}", expected=f"{x.row_size} values a row")
        return TensorType((x.shape[0], *wanted), x.dtype)

    def row_flop(self, inputs: tuple[TensorType, ...], weights: Mapping[str, TensorType]) -> int:
        return 0
