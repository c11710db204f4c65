"""Layers that compute nothing: identity, reshape and permute."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from onchip.errors import ShapeError
from onchip.network.layers.base import Arrays, Gradients, Layer, Types, Weights, WeightTypes
from onchip.network.recipe import Array
from onchip.network.types import TensorType


class Identity(Layer):
    """y = x."""

    def infer(self, inputs: Types, weights: WeightTypes) -> TensorType:
        return inputs[0]

    def row_flop(self, inputs: Types, weights: WeightTypes) -> int:
        return 0

    def forward(self, xs: Arrays, w: Weights) -> Array:
        return xs[0]

    def backward(self, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
        return (dy,), {}


@dataclass(frozen=True, eq=False, repr=False)
class Dropout(Identity):
    """y = x: nothing is dropped at inference, nor (so far) in training."""

    p: float = 0.5


@dataclass(frozen=True, eq=False, repr=False)
class Reshape(Layer):
    """Change the shape of each row; one -1 is inferred. Flatten is Reshape((-1,))."""

    row_shape: tuple[int, ...] = (-1,)

    def __post_init__(self) -> None:
        object.__setattr__(self, "row_shape", tuple(int(d) for d in self.row_shape))

    def infer(self, inputs: Types, weights: WeightTypes) -> TensorType:
        (x,) = inputs
        wanted = list(self.row_shape)
        if wanted.count(-1) > 1 or any(d < -1 for d in wanted):
            raise ShapeError("bad row shape", got=str(tuple(wanted)), expected="sizes and at most one -1")
        if -1 in wanted:
            known = math.prod(d for d in wanted if d != -1)
            if known == 0 or x.row_size % known:
                raise ShapeError(
                    "rows do not divide into this shape",
                    got=f"{x} -> {tuple(wanted)}",
                    expected="sizes that divide a row",
                )
            wanted[wanted.index(-1)] = x.row_size // known
        if math.prod(wanted) != x.row_size:
            raise ShapeError("row sizes differ", got=f"{x} -> {tuple(wanted)}", expected=f"{x.row_size} per row")
        return TensorType((x.shape[0], *wanted), x.dtype)

    def row_flop(self, inputs: Types, weights: WeightTypes) -> int:
        return 0

    def forward(self, xs: Arrays, w: Weights) -> Array:
        (x,) = xs
        known = math.prod(d for d in self.row_shape if d != -1)
        left = math.prod(x.shape[1:]) // known if -1 in self.row_shape else 0  # NumPy cannot infer it for 0 rows
        return x.reshape(x.shape[0], *(left if d == -1 else d for d in self.row_shape))

    def backward(self, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
        return (dy.reshape(xs[0].shape),), {}


@dataclass(frozen=True, eq=False, repr=False)
class Permute(Layer):
    """Axis i of y is axis axes[i] of x; axes include the batch, which stays first: (0, 2, 1)."""

    axes: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", tuple(int(axis) for axis in self.axes))

    def infer(self, inputs: Types, weights: WeightTypes) -> TensorType:
        (x,) = inputs
        if sorted(self.axes) != list(range(len(x.shape))):
            raise ShapeError("bad axes", got=str(self.axes), expected=f"0 to {len(x.shape) - 1}, each once, for {x}")
        if self.axes[0] != 0:
            raise ShapeError("axis 0, the batch, must stay first", got=str(self.axes), expected="axis 0 first")
        return TensorType(tuple(x.shape[axis] for axis in self.axes), x.dtype)

    def row_flop(self, inputs: Types, weights: WeightTypes) -> int:
        return 0

    def forward(self, xs: Arrays, w: Weights) -> Array:
        return xs[0].transpose(self.axes)

    def backward(self, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
        return (dy.transpose(np.argsort(self.axes)),), {}
