"""Pools: the max or the mean of each window; and reductions over whole axes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from onchip.errors import ShapeError
from onchip.network.layers.base import Layer, Types, WeightTypes, as_sizes, need_float, row_axis
from onchip.network.layers.conv import geometry, window_counts
from onchip.network.layers.embedding import ID_DTYPES
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


@dataclass(frozen=True, eq=False, repr=False)
class _AvgPool(_Pool, abstract=True):
    """The mean of each window; padding zeros count if count_pads."""

    count_pads: bool = False


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


class GlobalMax(_Global):
    """The largest value along axes."""


class GlobalMean(_Global):
    """The mean along axes."""


class GlobalMin(_Global):
    """The smallest value along axes."""


class GlobalSum(_Global):
    """The sum along axes."""


class GlobalNorm(_Global):
    """The Euclidean norm along axes: the square root of the sum of squares."""

    def row_flop(self, inputs: Types, weights: WeightTypes) -> int:
        return 2 * inputs[0].row_size


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
