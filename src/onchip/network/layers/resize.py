"""Rows resized along their axes: nearest neighbour, or linear interpolation."""

from __future__ import annotations

import math
import typing
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from onchip.errors import ShapeError
from onchip.network.layers.base import Arrays, Gradients, Layer, Types, Weights, WeightTypes, as_sizes, need_float
from onchip.network.layers.select import Selection, need_axes
from onchip.network.recipe import Array
from onchip.network.types import TensorType

Coordinates = Literal["half_pixel", "pytorch_half_pixel", "half_pixel_symmetric", "align_corners", "asymmetric"]
Rounding = Literal["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"]

MAX_RESIZED = 3  # span of axes that a LinearResize changes, from the first to the last


@dataclass(frozen=True, eq=False, repr=False)
class NearestResize(Selection):
    """Each element of y is the element of x nearest to its position.

    sizes        of a row of y
    scales       elements of y per element of x, per axis; usually y's sizes over x's, but not always
    coordinates  the map from positions in y to positions in x, by ONNX's names
    rounding     how a position becomes an index
    """

    sizes: tuple[int, ...]
    scales: tuple[float, ...]
    coordinates: Coordinates = "half_pixel"
    rounding: Rounding = "round_prefer_floor"

    def __post_init__(self) -> None:
        _check(self)

    def sizes_of(self, row_shape: tuple[int, ...]) -> tuple[int, ...]:
        need_axes(self, row_shape, len(self.sizes))
        return self.sizes

    def source_indices(self, row_shape: tuple[int, ...]) -> tuple[Array | None, ...]:
        found: list[Array | None] = []
        for n, size, scale in zip(row_shape, self.sizes, self.scales, strict=True):
            at = source_positions(n, size, scale, self.coordinates)
            if self.rounding in ("round_prefer_floor", "ceil"):
                near = np.ceil(at - 0.5 if self.rounding == "round_prefer_floor" else at)
            else:
                near = np.floor(at + 0.5 if self.rounding == "round_prefer_ceil" else at)
            indices = np.clip(near, 0, n - 1).astype(np.int64)
            found.append(None if size == n and (indices == np.arange(n)).all() else indices)
        return tuple(found)


@dataclass(frozen=True, eq=False, repr=False)
class Taps:
    """Along one axis, y[i] = x[low[i]] (1 - share[i]) + x[high[i]] share[i]."""

    low: Array  # int64
    high: Array
    share: Array  # float64


@dataclass(frozen=True, eq=False, repr=False)
class LinearResize(Layer):
    """Linear interpolation along every axis.

    sizes, scales, coordinates  as for NearestResize
    """

    sizes: tuple[int, ...]
    scales: tuple[float, ...]
    coordinates: Coordinates = "half_pixel"
    needs_y: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check(self)

    def taps(self, row_shape: tuple[int, ...]) -> tuple[Taps | None, ...]:
        """Per axis of a row; None: unchanged."""
        found: list[Taps | None] = []
        for n, size, scale in zip(row_shape, self.sizes, self.scales, strict=True):
            at = source_positions(n, size, scale, self.coordinates)
            low = np.floor(at)
            ends = [np.clip(low + k, 0, n - 1).astype(np.int64) for k in range(2)]
            found.append(None if size == n and (at == np.arange(n)).all() else Taps(ends[0], ends[1], at - low))
        return tuple(found)

    def infer(self, inputs: Types, weights: WeightTypes) -> TensorType:
        (x,) = inputs
        need_float(x)
        need_axes(self, x.row_shape, len(self.sizes))
        if not x.row_size:
            raise ShapeError("nothing to resize", got=str(x), expected="non-empty rows")
        changes = zip(x.row_shape, self.sizes, self.scales, strict=True)
        resized = [axis for axis, (n, size, scale) in enumerate(changes) if (n, scale) != (size, 1)] or [0]
        if resized[-1] - resized[0] >= MAX_RESIZED:
            expected = f"at most {MAX_RESIZED} adjacent axes"
            raise ShapeError("too many axes are resized", got=f"{x} to {self.sizes}", expected=expected)
        return TensorType((x.shape[0], *self.sizes), x.dtype)

    def row_flop(self, inputs: Types, weights: WeightTypes) -> int:
        """Counts one axis after another."""
        flop, sizes = 0, list(inputs[0].row_shape)
        for axis, size in enumerate(self.sizes):
            is_changed, sizes[axis] = sizes[axis] != size, size
            flop += 3 * math.prod(sizes) if is_changed else 0
        return flop

    def forward(self, xs: Arrays, w: Weights) -> Array:
        (x,) = xs
        for axis, taps in enumerate(self.taps(x.shape[1:]), start=1):
            if taps is not None:
                share = _broadcastable(taps.share, x, axis)
                x = np.take(x, taps.low, axis) * (1 - share) + np.take(x, taps.high, axis) * share
        return x

    def backward(self, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
        for axis, taps in enumerate(self.taps(xs[0].shape[1:]), start=1):
            if taps is not None:
                share, moved = _broadcastable(taps.share, dy, 0), np.moveaxis(dy, axis, 0)
                dx = np.zeros((xs[0].shape[axis], *moved.shape[1:]), dy.dtype)
                np.add.at(dx, taps.low, moved * (1 - share))
                np.add.at(dx, taps.high, moved * share)
                dy = np.moveaxis(dx, 0, axis)
        return (dy,), {}


def _check(layer: NearestResize | LinearResize) -> None:
    as_sizes(layer, sizes=1)
    scales = tuple(float(scale) for scale in layer.scales)
    object.__setattr__(layer, "scales", scales)
    is_known = layer.coordinates in typing.get_args(Coordinates)
    if len(layer.sizes) != len(scales) or not all(0 < scale < math.inf for scale in scales) or not is_known:
        expected = "a size and a scale above 0 per axis of a row, and known coordinates"
        raise ShapeError("bad resize", got=str(layer), expected=expected)


def source_positions(n: int, size: int, scale: float, coordinates: str) -> Array:
    """The positions of the `size` elements of y among the n of x, along one axis (float64)."""
    i = np.arange(size)
    if coordinates == "align_corners":
        return i * (n - 1) / max(1, size - 1)
    # From the sizes if they imply the scale: one multiply and one divide, exact if the result is whole.
    above, below = (n, size) if scale == size / n else (1, scale)
    if coordinates == "asymmetric":
        return i * above / below
    if coordinates == "pytorch_half_pixel" and size == 1:
        return np.zeros(1)
    middle: Array = (2 * i + 1) * above / (2 * below)
    offset = n / 2 * (1 - size / (scale * n)) if coordinates == "half_pixel_symmetric" else 0.0
    return offset + middle - 0.5


def _broadcastable(values: Array, x: Array, axis: int) -> Array:
    """Values of an axis in the dtype of x, shaped to broadcast along that axis."""
    return values.astype(x.dtype).reshape(-1, *(1,) * (x.ndim - 1 - axis))
