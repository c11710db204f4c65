"""Layers that only select: every element of y is an element of x, or a fill value.

    y[i, j, ...] = x[indices_0[i], indices_1[j], ...]

Each layer here returns the indices per axis of a row (`places`). The reference and each device have one implementation
for all of them.
"""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from onchip.errors import ShapeError
from onchip.network.layers.base import Arrays, Gradients, Layer, Types, Weights, WeightTypes, as_sizes, row_axis
from onchip.network.recipe import Array
from onchip.network.types import TensorType

MAX_INDICES = 1 << 16  # of a Gather: they are attributes, stored in plans and files
PadMode = Literal["constant", "reflect", "edge", "wrap"]


class Selection(Layer, abstract=True):
    needs_y: ClassVar[bool] = False

    @property
    def fill(self) -> float:
        """The value where y has no element of x."""
        return 0.0

    @abc.abstractmethod
    def sizes_of(self, row_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a row of y; ShapeError if x does not fit. Computes no indices: there may be many."""

    @abc.abstractmethod
    def source_indices(self, row_shape: tuple[int, ...]) -> tuple[Array | None, ...]:
        """Per axis of a row: the source index of each element of y (int64), -1: none; None: the identity."""

    def infer(self, inputs: Types, weights: WeightTypes) -> TensorType:
        (x,) = inputs
        if not x.row_size:
            raise ShapeError("nothing to select", got=str(x), expected="non-empty rows")
        if "float" not in x.dtype and (self.fill != int(self.fill) if math.isfinite(self.fill) else True):
            raise ShapeError("the fill value is not an int", got=f"{self.fill} in {x}", expected="an int")
        return TensorType((x.shape[0], *self.sizes_of(x.row_shape)), x.dtype)

    def row_flop(self, inputs: Types, weights: WeightTypes) -> int:
        return 0

    def forward(self, xs: Arrays, w: Weights) -> Array:
        (x,) = xs
        for axis, indices in enumerate(self.source_indices(x.shape[1:]), start=1):
            if indices is not None:
                x = np.take(x, indices, axis)
                np.moveaxis(x, axis, 0)[indices < 0] = self.fill
        return x

    def backward(self, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
        """Sums the gradients of an element that was selected several times."""
        (x,) = xs
        for axis, indices in enumerate(self.source_indices(x.shape[1:]), start=1):
            if indices is not None:
                moved = np.moveaxis(dy, axis, 0)
                dx = np.zeros((x.shape[axis], *moved.shape[1:]), dy.dtype)
                np.add.at(dx, indices[indices >= 0], moved[indices >= 0])
                dy = np.moveaxis(dx, 0, axis)
        return (dy,), {}


def need_axes(layer: Layer, row_shape: tuple[int, ...], count: int) -> None:
    if len(row_shape) != count:
        expected = f"rows of {count} axes, as in {layer}"
        raise ShapeError("bad input shape", got=str(list(row_shape)), expected=expected)


@dataclass(frozen=True, eq=False, repr=False)
class Slice(Selection):
    """y[i] = x[start + i * step] for i below size, along every axis of a row."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    steps: tuple[int, ...]

    def __post_init__(self) -> None:
        as_sizes(self, starts=0, sizes=0, steps=-(1 << 62))
        if not len(self.starts) == len(self.sizes) == len(self.steps):
            raise ShapeError("bad slice", got=str(self), expected="a start, a size and a step per axis of a row")

    def sizes_of(self, row_shape: tuple[int, ...]) -> tuple[int, ...]:
        need_axes(self, row_shape, len(self.sizes))
        for n, start, size, step in zip(row_shape, self.starts, self.sizes, self.steps, strict=True):
            last = start + (size - 1) * step
            if size and not (start < n and 0 <= last < n):
                raise ShapeError("a slice is out of range", got=f"{start} to {last} of {n}", expected="indices inside")
        return self.sizes

    def source_indices(self, row_shape: tuple[int, ...]) -> tuple[Array | None, ...]:
        return tuple(
            None if (start, size, step) == (0, n, 1) else start + step * np.arange(size)
            for n, start, size, step in zip(row_shape, self.starts, self.sizes, self.steps, strict=True)
        )


@dataclass(frozen=True, eq=False, repr=False)
class Gather(Selection):
    """y[i] = x[indices[i]] along an axis."""

    axis: int
    indices: tuple[int, ...]

    def __post_init__(self) -> None:
        as_sizes(self, indices=0)
        if not 1 <= len(self.indices) <= MAX_INDICES:
            expected = f"1 to {MAX_INDICES:,}"
            raise ShapeError("bad number of indices", got=f"{len(self.indices):,}", expected=expected)

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.indices[:8]))
        return f"Gather(axis={self.axis}, indices=({shown}{', ...' if len(self.indices) > 8 else ''}))"

    def sizes_of(self, row_shape: tuple[int, ...]) -> tuple[int, ...]:
        axis = row_axis(self.axis, TensorType(("B", *row_shape))) - 1
        if max(self.indices) >= row_shape[axis]:
            got, expected = f"index {max(self.indices)}", f"below {row_shape[axis]}"
            raise ShapeError("an index is out of range", got=got, expected=expected)
        return (*row_shape[:axis], len(self.indices), *row_shape[axis + 1 :])

    def source_indices(self, row_shape: tuple[int, ...]) -> tuple[Array | None, ...]:
        gathered = row_axis(self.axis, TensorType(("B", *row_shape))) - 1
        return tuple(np.array(self.indices) if axis == gathered else None for axis in range(len(row_shape)))


@dataclass(frozen=True, eq=False, repr=False)
class Pad(Selection):
    """Elements added before and after each axis of a row; negative pads crop.

    pads  before every axis, then after every axis
    mode  constant: `value`; reflect: mirrored at the last element, which is not repeated; edge: the last element
          repeated; wrap: from the other end
    """

    pads: tuple[int, ...]
    mode: PadMode = "constant"
    value: float = 0.0

    def __post_init__(self) -> None:
        as_sizes(self, pads=-(1 << 62))
        if len(self.pads) % 2 or self.mode not in ("constant", "reflect", "edge", "wrap"):
            raise ShapeError("bad pads", got=str(self), expected="two ints per axis, and a known mode")

    @property
    def fill(self) -> float:
        return self.value

    def sizes_of(self, row_shape: tuple[int, ...]) -> tuple[int, ...]:
        rank = len(self.pads) // 2
        need_axes(self, row_shape, rank)
        sizes = tuple(self.pads[axis] + n + self.pads[rank + axis] for axis, n in enumerate(row_shape))
        if min(sizes, default=0) < 0:
            raise ShapeError(
                "the pads crop more than an axis has",
                got=f"pads {self.pads} of {list(row_shape)}",
                expected="sizes of 0 or more",
            )
        return sizes

    def source_indices(self, row_shape: tuple[int, ...]) -> tuple[Array | None, ...]:
        found: list[Array | None] = []
        for n, size, before in zip(row_shape, self.sizes_of(row_shape), self.pads, strict=False):
            at = np.arange(size) - before
            if self.mode == "reflect":
                at = np.abs((at + n - 1) % max(1, 2 * n - 2) - (n - 1))
            elif self.mode == "edge":
                at = np.clip(at, 0, n - 1)
            elif self.mode == "wrap":
                at = at % n
            found.append(np.where((at < 0) | (at >= n), -1, at) if size != n or before else None)
        return tuple(found)


@dataclass(frozen=True, eq=False, repr=False)
class Tile(Selection):
    """A row repeated along every axis."""

    repeats: tuple[int, ...]

    def __post_init__(self) -> None:
        as_sizes(self, repeats=0)

    def sizes_of(self, row_shape: tuple[int, ...]) -> tuple[int, ...]:
        need_axes(self, row_shape, len(self.repeats))
        return tuple(n * times for n, times in zip(row_shape, self.repeats, strict=True))

    def source_indices(self, row_shape: tuple[int, ...]) -> tuple[Array | None, ...]:
        pairs = zip(row_shape, self.repeats, strict=True)
        return tuple(None if times == 1 else np.arange(n * times) % n for n, times in pairs)
