"""Pools: the max or the mean of each window; and reductions over whole axes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from typing import ClassVar

import numpy as np

from onchip.errors import ShapeError
from onchip.network.layers.base import (
    Arrays,
    Gradients,
    Layer,
    Types,
    Weights,
    WeightTypes,
    as_sizes,
    need_float,
    row_axis,
)
from onchip.network.layers.conv import geometry, window_counts
from onchip.network.layers.embedding import ID_DTYPES
from onchip.network.layers.windows import Slices, fold, pad, taps
from onchip.network.recipe import Array
from onchip.network.types import TensorType


@dataclass(frozen=True, eq=False, repr=False)
class _Pool(Layer, abstract=True):
    """kernel, stride and pads as in a convolution; stride () means the kernel's size."""

    rank: ClassVar[int]
    kernel: tuple[int, ...]
    stride: tuple[int, ...] = ()
    pads: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    ceil: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "stride", self.stride or self.kernel)
        object.__setattr__(self, "pads", self.pads or (0,) * 2 * self.rank)
        object.__setattr__(self, "dilation", self.dilation or (1,) * self.rank)
        as_sizes(self, kernel=1, stride=1, pads=0, dilation=1)
        for name, length in (("kernel", 1), ("stride", 1), ("pads", 2), ("dilation", 1)):
            if len(getattr(self, name)) != length * self.rank:
                got, expected = str(getattr(self, name)), f"{length * self.rank} ints"
                raise ShapeError(f"bad {name}", got=got, expected=expected)
        if any(pad >= size for pad, size in zip(self.pads, self.kernel * 2, strict=True)):
            # A window could be all padding, whose max is -infinity.
            raise ShapeError("pads as large as the window", got=f"{self.pads}", expected=f"less than {self.kernel}")

    def infer(self, inputs: Types, weights: WeightTypes) -> TensorType:
        (x,) = inputs
        need_float(x)
        return TensorType((*x.shape[:2], *window_counts(x, self.kernel, *geometry(self), self.ceil)), x.dtype)

    def row_flop(self, inputs: Types, weights: WeightTypes) -> int:
        return self.infer(inputs, weights).row_size * math.prod(self.kernel)


class _MaxPool(_Pool, abstract=True):
    """The largest value of each window; padding counts as -infinity."""

    def forward(self, xs: Arrays, w: Weights) -> Array:
        counts, pads = _counts_and_pads(self, xs[0])
        padded = pad(xs[0], pads, -np.inf)
        return reduce(np.maximum, (padded[tap] for tap in _taps(self, counts)))  # np.maximum propagates NaN

    def backward(self, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
        """The gradient goes to the first maximum."""
        counts, pads = _counts_and_pads(self, xs[0])
        padded = pad(xs[0], pads, -np.inf)
        assigned, dcolumns = np.zeros(y.shape, bool), []
        for tap in _taps(self, counts):
            is_first = (padded[tap] == y) & ~assigned
            dcolumns.append(dy * is_first)
            assigned |= is_first
        return (_fold(self, np.stack(dcolumns, axis=2), xs[0], pads),), {}


@dataclass(frozen=True, eq=False, repr=False)
class _AvgPool(_Pool, abstract=True):
    """The mean of each window; padding zeros count if count_pads."""

    needs_y: ClassVar[bool] = False
    count_pads: bool = False

    def forward(self, xs: Arrays, w: Weights) -> Array:
        counts, pads = _counts_and_pads(self, xs[0])
        padded = pad(xs[0], pads, 0)
        # Tap by tap, not one sum over windows: the reduction order is then the same for every shape.
        return reduce(np.add, (padded[tap] for tap in _taps(self, counts))) / _divisors(self, xs[0])

    def backward(self, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
        counts, pads = _counts_and_pads(self, xs[0])
        share = (dy / _divisors(self, xs[0]))[:, :, None]
        dcolumns = np.broadcast_to(share, (*dy.shape[:2], math.prod(self.kernel), *counts))
        return (_fold(self, dcolumns, xs[0], pads),), {}


class MaxPool1d(_MaxPool):
    rank: ClassVar[int] = 1


class MaxPool2d(_MaxPool):
    rank: ClassVar[int] = 2


class AvgPool1d(_AvgPool):
    rank: ClassVar[int] = 1


class AvgPool2d(_AvgPool):
    rank: ClassVar[int] = 2


@dataclass(frozen=True, eq=False, repr=False)
class _Global(Layer, abstract=True):
    """Over whole axes of a row; they are removed, or have size 1 if `keep`."""

    axes: tuple[int, ...] = (-1,)
    keep: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", tuple(int(axis) for axis in self.axes))

    def infer(self, inputs: Types, weights: WeightTypes) -> TensorType:
        (x,) = inputs
        need_float(x)
        over = {row_axis(axis, x) for axis in self.axes}
        if len(over) < len(self.axes) or not over:
            raise ShapeError("bad axes", got=str(self.axes), expected="one or more, each once")
        if any(x.shape[axis] == 0 for axis in over):
            raise ShapeError("nothing to reduce", got=str(x), expected=f"at least 1 element along axes {self.axes}")
        sizes = ((1,) if axis in over else (d,) for axis, d in enumerate(x.shape) if self.keep or axis not in over)
        return TensorType(tuple(d for size in sizes for d in size), x.dtype)

    def row_flop(self, inputs: Types, weights: WeightTypes) -> int:
        return inputs[0].row_size


class _GlobalExtreme(_Global, abstract=True):
    needs_y: ClassVar[bool] = False

    def backward(self, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
        """The gradient goes to the first maximum or minimum."""
        (x,) = xs
        axes = _axes(self, x)
        ends = tuple(range(x.ndim - len(axes), x.ndim))
        moved = np.moveaxis(x, axes, ends)
        flat = moved.reshape(*moved.shape[: ends[0]], -1)
        found = flat.argmax(axis=-1) if isinstance(self, GlobalMax) else flat.argmin(axis=-1)
        first = np.arange(flat.shape[-1]) == found[..., None]
        dx = first * dy.reshape(*flat.shape[:-1], 1)
        return (np.moveaxis(dx.reshape(moved.shape), ends, axes),), {}


class GlobalMax(_GlobalExtreme):
    """The largest value along axes."""

    def forward(self, xs: Arrays, w: Weights) -> Array:
        y: Array = xs[0].max(axis=self.axes, keepdims=self.keep)
        return y


class GlobalMean(_Global):
    """The mean along axes."""

    def forward(self, xs: Arrays, w: Weights) -> Array:
        y: Array = xs[0].mean(axis=self.axes, keepdims=self.keep)
        return y

    def backward(self, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
        (x,) = xs
        count = math.prod(x.shape[axis] for axis in _axes(self, x))
        return (np.broadcast_to(_keepdims(self, x, dy) / count, x.shape),), {}


class GlobalMin(_GlobalExtreme):
    """The smallest value along axes."""

    def forward(self, xs: Arrays, w: Weights) -> Array:
        y: Array = xs[0].min(axis=self.axes, keepdims=self.keep)
        return y


class GlobalSum(_Global):
    """The sum along axes."""

    def forward(self, xs: Arrays, w: Weights) -> Array:
        y: Array = xs[0].sum(axis=self.axes, keepdims=self.keep)
        return y

    def backward(self, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
        return (np.broadcast_to(_keepdims(self, xs[0], dy), xs[0].shape),), {}


class GlobalNorm(_Global):
    """The Euclidean norm along axes: the square root of the sum of squares."""

    def row_flop(self, inputs: Types, weights: WeightTypes) -> int:
        return 2 * inputs[0].row_size

    def forward(self, xs: Arrays, w: Weights) -> Array:
        y: Array = np.sqrt((xs[0] * xs[0]).sum(axis=self.axes, keepdims=self.keep))
        return y

    def backward(self, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
        (x,) = xs
        return (x * (_keepdims(self, x, dy) / _keepdims(self, x, y)),), {}


@dataclass(frozen=True, eq=False, repr=False)
class SequenceMax(Layer):
    """Max-over-time pooling of variable-length sequences: x (B, C, P), lengths (B,) -> (B, C).

    y[c] = max of x[c, p] over all p with p * stride + window <= length, and 0 if there is none (the sequence is too
    short for the feature). After a Conv1d of K taps these are the windows inside the sequence if window = K minus the
    pads before, and stride its stride. A length past the end means all of x, one below 0 none of it.
    """

    window: int = 1
    stride: int = 1
    arity: ClassVar[int | None] = 2
    needs_y: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.window < 1 or self.stride < 1:
            raise ShapeError("bad window or stride", got=f"{self.window}, {self.stride}", expected="at least 1 each")

    def infer(self, inputs: Types, weights: WeightTypes) -> TensorType:
        x, lengths = inputs
        need_float(x)
        if len(x.shape) != 3 or x.shape[2] == 0:
            raise ShapeError("bad input shape", got=str(x), expected="(B, C, P), P at least 1")
        if lengths.row_shape or lengths.dtype not in ID_DTYPES:
            raise ShapeError("bad lengths", got=str(lengths), expected=f"(B,) of {' or '.join(ID_DTYPES)}")
        return TensorType(x.shape[:2], x.dtype)

    def row_flop(self, inputs: Types, weights: WeightTypes) -> int:
        return inputs[0].row_size

    def forward(self, xs: Arrays, w: Weights) -> Array:
        x, inside = xs[0], _inside(self, xs)
        y: Array = np.where(inside, x, -np.inf).max(axis=2)
        return np.where(inside[:, :, 0], y, 0)

    def backward(self, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
        """The gradient goes to the first maximum inside the sequence."""
        x, inside = xs[0], _inside(self, xs)
        first = np.arange(x.shape[2]) == np.where(inside, x, -np.inf).argmax(axis=2)[..., None]
        return (first * inside * dy[..., None], None), {}


def _inside(layer: SequenceMax, xs: Arrays) -> Array:
    """Which windows of x are inside their sequence, (B, 1, P)."""
    x, lengths = xs
    ends = np.arange(x.shape[2]) * layer.stride + layer.window
    inside: Array = ends <= lengths[:, None, None]
    return inside


Global = GlobalMax | GlobalMin | GlobalMean | GlobalSum | GlobalNorm


def _keepdims(layer: _Global, x: Array, y: Array) -> Array:
    """y, or its gradient, with size 1 on the reduced axes of x."""
    axes = _axes(layer, x)
    return y.reshape([1 if axis in axes else d for axis, d in enumerate(x.shape)])


def _axes(layer: _Global, x: Array) -> tuple[int, ...]:
    return tuple(sorted(axis % x.ndim for axis in layer.axes))


def _counts_and_pads(layer: _Pool, x: Array) -> tuple[list[int], tuple[int, ...]]:
    """Windows per axis, and the pads, extended if the last window passes the end (ceil)."""
    counts = window_counts(TensorType(x.shape), layer.kernel, *geometry(layer), layer.ceil)
    after = []
    for a, n in enumerate(x.shape[2:]):
        end = (counts[a] - 1) * layer.stride[a] + layer.dilation[a] * (layer.kernel[a] - 1) + 1
        after.append(max(layer.pads[layer.rank + a], end - layer.pads[a] - n))
    return counts, (*layer.pads[: layer.rank], *after)


def _taps(layer: _Pool, counts: list[int]) -> Iterator[Slices]:
    return taps(layer.kernel, counts, layer.stride, layer.dilation)


def _fold(layer: _Pool, columns: Array, x: Array, pads: tuple[int, ...]) -> Array:
    return fold(columns, layer.kernel, x.shape[2:], layer.stride, pads, layer.dilation)


def _divisors(layer: _AvgPool, x: Array) -> Array:
    """The number of elements that each window averages, (1, 1, counts...); none past the input and its pads."""
    counts, pads = _counts_and_pads(layer, x)
    overhang = [extended - declared for extended, declared in zip(pads, layer.pads, strict=True)]
    inside = pad(pad(np.ones((1, 1, *x.shape[2:]), x.dtype), layer.pads, int(layer.count_pads)), overhang, 0)
    return reduce(np.add, (inside[tap] for tap in _taps(layer, counts)))
