"""Convolutions and transposed convolutions over one or two axes; NCHW: (B, C, H, W)."""

from __future__ import annotations

import math
from dataclasses import dataclass
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
    need_bias,
    need_float,
)
from onchip.network.layers.windows import fold, unfold
from onchip.network.recipe import Array
from onchip.network.types import TensorType


class _Conv(Layer, abstract=True):
    rank: ClassVar[int]
    required: ClassVar[tuple[str, ...]] = ("weight",)
    optional: ClassVar[tuple[str, ...]] = ("bias",)
    needs_y: ClassVar[bool] = False

    def _check_attributes(self, **lengths: int) -> None:
        for name, length in lengths.items():
            if len(getattr(self, name)) != length:
                raise ShapeError(f"bad {name}", got=str(getattr(self, name)), expected=f"{length} ints")

    def _check_input(self, x: TensorType, weights: WeightTypes) -> None:
        weight = weights["weight"]
        need_float(x, weights)
        if len(weight.shape) != 2 + self.rank or 0 in weight.shape:
            expected = f"{2 + self.rank} axes, none of them 0"
            raise ShapeError("bad weight shape", got=str(weight), expected=expected)
        if len(x.shape) != 2 + self.rank:
            raise ShapeError("bad input shape", got=str(x), expected=f"(B, C and {self.rank} more axes)")


class Convolution(_Conv, abstract=True):
    """y[o, p] = bias[o] + sum over c, k of weight[o, c, k] * x[c, p * stride - before + k * dilation].

    weight (C_out, C_in / groups, kernel...), bias (C_out); zero padding.
    pads: before each axis, then after each.
    """

    def infer(self, inputs: Types, weights: WeightTypes) -> TensorType:
        (x,), weight = inputs, weights["weight"]
        self._check_input(x, weights)
        C_out, C_group = int(weight.shape[0]), int(weight.shape[1])
        groups = conv_groups(self)
        if x.shape[1] != C_group * groups or C_out % groups:
            expected = f"{C_group * groups} channels in, a multiple of {groups} out"
            raise ShapeError("channels do not fit", got=f"{x}, weight {weight}", expected=expected)
        need_bias(weights, C_out)
        sizes = window_counts(x, tuple(map(int, weight.shape[2:])), *geometry(self))
        return TensorType((x.shape[0], C_out, *sizes), x.dtype)

    def row_flop(self, inputs: Types, weights: WeightTypes) -> int:
        y = self.infer(inputs, weights)
        terms = math.prod(int(d) for d in weights["weight"].shape[1:])
        return y.row_size * (2 * terms + ("bias" in weights))

    def forward(self, xs: Arrays, w: Weights) -> Array:
        (x,), weight = xs, w["weight"]
        counts = window_counts(TensorType(x.shape), weight.shape[2:], *geometry(self))
        columns = unfold(x, weight.shape[2:], counts, *geometry(self))
        y = _matrices(weight, self) @ _by_group(columns, self, counts)  # (B, G, C_out / G, P)
        return _with_bias(y.reshape(len(x), len(weight), *counts), w)

    def backward(self, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
        (x,), weight, counts = xs, w["weight"], dy.shape[2:]
        kernel = weight.shape[2:]
        columns = _by_group(unfold(x, kernel, counts, *geometry(self)), self, counts)
        dy_grouped = _by_group(dy, self, counts)
        dweight = _all_rows(dy_grouped) @ _all_rows(columns).swapaxes(1, 2)
        dcolumns = _matrices(weight, self).swapaxes(1, 2) @ dy_grouped
        dcolumns = dcolumns.reshape(*x.shape[:2], math.prod(kernel), *counts)
        dx = fold(dcolumns, kernel, x.shape[2:], *geometry(self))
        return (dx,), {"weight": dweight.reshape(weight.shape)} | _bias_gradient(w, dy)


class TransposedConvolution(_Conv, abstract=True):
    """y[o, p * stride - before + k * dilation] += weight[c, o, k] * x[c, p], then + bias[o].

    weight (C_in, C_out / groups, kernel...), bias (C_out); pads crop that many elements off each side of y, and
    output_padding extends its end.
    """

    def infer(self, inputs: Types, weights: WeightTypes) -> TensorType:
        (x,), weight = inputs, weights["weight"]
        self._check_input(x, weights)
        C_in, C_group = int(weight.shape[0]), int(weight.shape[1])
        groups = conv_groups(self)
        if x.shape[1] != C_in or C_in % groups:
            raise ShapeError("channels do not fit", got=f"{x}, weight {weight}", expected=f"{C_in} in {groups} groups")
        need_bias(weights, C_group * groups)
        stride, pads, dilation = geometry(self)
        extra: tuple[int, ...] = self.attributes()["output_padding"]
        sizes = []
        for axis in range(self.rank):
            span = (int(x.shape[2 + axis]) - 1) * stride[axis] + dilation[axis] * (int(weight.shape[2 + axis]) - 1) + 1
            sizes.append(span - pads[axis] - pads[self.rank + axis] + extra[axis])
            if extra[axis] >= max(stride[axis], dilation[axis]):
                expected = f"less than stride {stride[axis]} or dilation {dilation[axis]}"
                raise ShapeError("bad output_padding", got=str(extra), expected=expected)
        if min(sizes) < 1 or 0 in x.shape[1:]:
            raise ShapeError(
                "the output is empty",
                got=f"{x}, weight {weight}, pads {pads}",
                expected="a larger input or smaller pads",
            )
        return TensorType((x.shape[0], C_group * groups, *sizes), x.dtype)

    def row_flop(self, inputs: Types, weights: WeightTypes) -> int:
        terms = math.prod(int(d) for d in weights["weight"].shape[1:])
        bias = self.infer(inputs, weights).row_size if "bias" in weights else 0
        return 2 * inputs[0].row_size * terms + bias

    def forward(self, xs: Arrays, w: Weights) -> Array:
        (x,), weight = xs, w["weight"]
        kernel, sizes = weight.shape[2:], x.shape[2:]
        stride, pads, dilation = geometry(self)
        extra = self.attributes()["output_padding"]
        y_sizes = [
            (sizes[a] - 1) * stride[a] + dilation[a] * (kernel[a] - 1) + 1 - pads[a] - pads[self.rank + a] + extra[a]
            for a in range(self.rank)
        ]
        columns = _matrices(weight, self).swapaxes(1, 2) @ _by_group(x, self, sizes)  # (B, G, C_out / G * T, P)
        C_out = weight.shape[1] * conv_groups(self)
        columns = columns.reshape(len(x), C_out, math.prod(kernel), *sizes)
        return _with_bias(fold(columns, kernel, y_sizes, stride, pads, dilation), w)

    def backward(self, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
        (x,), weight = xs, w["weight"]
        sizes = x.shape[2:]
        dcolumns = _by_group(unfold(dy, weight.shape[2:], sizes, *geometry(self)), self, sizes)
        dx = _matrices(weight, self) @ dcolumns
        dweight = _all_rows(_by_group(x, self, sizes)) @ _all_rows(dcolumns).swapaxes(1, 2)
        return (dx.reshape(x.shape),), {"weight": dweight.reshape(weight.shape)} | _bias_gradient(w, dy)


@dataclass(frozen=True, eq=False, repr=False)
class Conv1d(Convolution):
    stride: tuple[int, ...] = (1,)
    pads: tuple[int, ...] = (0, 0)
    dilation: tuple[int, ...] = (1,)
    groups: int = 1
    rank: ClassVar[int] = 1

    def __post_init__(self) -> None:
        as_sizes(self, stride=1, pads=0, dilation=1)
        self._check_attributes(stride=1, pads=2, dilation=1)


@dataclass(frozen=True, eq=False, repr=False)
class Conv2d(Convolution):
    stride: tuple[int, ...] = (1, 1)
    pads: tuple[int, ...] = (0, 0, 0, 0)  # top, left, bottom, right
    dilation: tuple[int, ...] = (1, 1)
    groups: int = 1
    rank: ClassVar[int] = 2

    def __post_init__(self) -> None:
        as_sizes(self, stride=1, pads=0, dilation=1)
        self._check_attributes(stride=2, pads=4, dilation=2)


@dataclass(frozen=True, eq=False, repr=False)
class ConvTranspose1d(TransposedConvolution):
    stride: tuple[int, ...] = (1,)
    pads: tuple[int, ...] = (0, 0)
    output_padding: tuple[int, ...] = (0,)
    dilation: tuple[int, ...] = (1,)
    groups: int = 1
    rank: ClassVar[int] = 1

    def __post_init__(self) -> None:
        as_sizes(self, stride=1, pads=0, dilation=1, output_padding=0)
        self._check_attributes(stride=1, pads=2, dilation=1, output_padding=1)


@dataclass(frozen=True, eq=False, repr=False)
class ConvTranspose2d(TransposedConvolution):
    stride: tuple[int, ...] = (1, 1)
    pads: tuple[int, ...] = (0, 0, 0, 0)
    output_padding: tuple[int, ...] = (0, 0)
    dilation: tuple[int, ...] = (1, 1)
    groups: int = 1
    rank: ClassVar[int] = 2

    def __post_init__(self) -> None:
        as_sizes(self, stride=1, pads=0, dilation=1, output_padding=0)
        self._check_attributes(stride=2, pads=4, dilation=2, output_padding=2)


def geometry(layer: Layer) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """stride, pads and dilation of a convolution or pool, per axis (two pads per axis: all before, then all after)."""
    attributes = layer.attributes()
    stride: tuple[int, ...] = attributes["stride"]
    return stride, attributes["pads"], attributes.get("dilation", (1,) * len(stride))


def conv_groups(layer: Layer) -> int:
    groups: int = layer.attributes()["groups"]
    if groups < 1:
        raise ShapeError("bad groups", got=str(groups), expected="at least 1")
    return groups


def window_counts(
    x: TensorType,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    pads: tuple[int, ...],
    dilation: tuple[int, ...],
    ceil: bool = False,
) -> list[int]:
    """The number of windows along each axis after the channels."""
    rank = len(kernel)
    if len(x.shape) != 2 + rank:
        raise ShapeError("bad input shape", got=str(x), expected=f"(B, C and {rank} more axes)")
    counts = []
    for axis in range(rank):
        size = int(x.shape[2 + axis]) + pads[axis] + pads[rank + axis]
        span = dilation[axis] * (kernel[axis] - 1) + 1
        if size < span:
            got = f"{x}, pads {pads}"
            raise ShapeError("the window exceeds the input", got=got, expected=f"{span} or more along axis {2 + axis}")
        count = (size - span) // stride[axis] + 1
        # Rounded up, a window may extend past the end, but it must begin inside the input or the padding before it.
        if ceil and (size - span) % stride[axis] and count * stride[axis] < int(x.shape[2 + axis]) + pads[axis]:
            count += 1
        counts.append(count)
    return counts


def _matrices(weight: Array, layer: Layer) -> Array:
    """(N, M, kernel...) -> (G, N / G, M * T)."""
    groups = conv_groups(layer)
    return weight.reshape(groups, len(weight) // groups, math.prod(weight.shape[1:]))


def _by_group(values: Array, layer: Layer, counts: tuple[int, ...] | list[int]) -> Array:
    """(B, C, [T,] counts...) -> (B, G, C / G [* T], P)."""
    groups = conv_groups(layer)
    rest = math.prod(values.shape[1 : values.ndim - len(counts)])
    return values.reshape(len(values), groups, rest // groups, math.prod(counts))


def _all_rows(grouped: Array) -> Array:
    """(B, G, N, P) -> (G, N, B * P): weight gradients sum over both."""
    B, groups, N, P = grouped.shape
    return np.moveaxis(grouped, 0, 2).reshape(groups, N, B * P)


def _with_bias(y: Array, w: Weights) -> Array:
    return y + w["bias"].reshape(-1, *(1,) * (y.ndim - 2)) if "bias" in w else y


def _bias_gradient(w: Weights, dy: Array) -> dict[str, Array]:
    return {"bias": dy.sum(axis=(0, *range(2, dy.ndim)))} if "bias" in w else {}
