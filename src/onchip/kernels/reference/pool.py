"""Pools over windows and over whole axes; NaN propagates."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import reduce

import numpy as np

from onchip.kernels.reference.base import Arrays, Gradients, Weights, backward_of, forward_of
from onchip.kernels.reference.windows import Slices, fold, pad, taps
from onchip.network.layers import (
    AvgPool1d,
    AvgPool2d,
    GlobalMax,
    GlobalMean,
    GlobalMin,
    GlobalNorm,
    GlobalSum,
    MaxPool1d,
    MaxPool2d,
    SequenceMax,
)
from onchip.network.layers.conv import geometry, window_counts
from onchip.network.recipe import Array
from onchip.network.types import TensorType

MaxPool = MaxPool1d | MaxPool2d
AvgPool = AvgPool1d | AvgPool2d
Pool = MaxPool | AvgPool


@forward_of(MaxPool1d, MaxPool2d)
def max_pool(layer: MaxPool, xs: Arrays, w: Weights) -> Array:
    counts, pads = _counts_and_pads(layer, xs[0])
    padded = pad(xs[0], pads, -np.inf)
    return reduce(np.maximum, (padded[tap] for tap in _taps(layer, counts)))  # np.maximum propagates NaN


@backward_of(MaxPool1d, MaxPool2d)
def max_pool_back(layer: MaxPool, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
    """The gradient goes to the first maximum."""
    counts, pads = _counts_and_pads(layer, xs[0])
    padded = pad(xs[0], pads, -np.inf)
    assigned, dcolumns = np.zeros(y.shape, bool), []
    for tap in _taps(layer, counts):
        is_first = (padded[tap] == y) & ~assigned
        dcolumns.append(dy * is_first)
        assigned |= is_first
    return (_fold(layer, np.stack(dcolumns, axis=2), xs[0], pads),), {}


@forward_of(AvgPool1d, AvgPool2d)
def avg_pool(layer: AvgPool, xs: Arrays, w: Weights) -> Array:
    counts, pads = _counts_and_pads(layer, xs[0])
    padded = pad(xs[0], pads, 0)
    # Tap by tap, not one sum over windows: the reduction order is then the same for every shape.
    return reduce(np.add, (padded[tap] for tap in _taps(layer, counts))) / _divisors(layer, xs[0])


@backward_of(AvgPool1d, AvgPool2d)
def avg_pool_back(layer: AvgPool, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
    counts, pads = _counts_and_pads(layer, xs[0])
    share = (dy / _divisors(layer, xs[0]))[:, :, None]
    dcolumns = np.broadcast_to(share, (*dy.shape[:2], math.prod(layer.kernel), *counts))
    return (_fold(layer, dcolumns, xs[0], pads),), {}


@forward_of(GlobalMax)
def global_max(layer: GlobalMax, xs: Arrays, w: Weights) -> Array:
    y: Array = xs[0].max(axis=layer.axes, keepdims=layer.keep)
    return y


@forward_of(GlobalMin)
def global_min(layer: GlobalMin, xs: Arrays, w: Weights) -> Array:
    y: Array = xs[0].min(axis=layer.axes, keepdims=layer.keep)
    return y


@backward_of(GlobalMax, GlobalMin)
def global_extreme_back(layer: GlobalMax | GlobalMin, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
    """The gradient goes to the first maximum or minimum."""
    (x,) = xs
    axes = _axes(layer, x)
    ends = tuple(range(x.ndim - len(axes), x.ndim))
    moved = np.moveaxis(x, axes, ends)
    flat = moved.reshape(*moved.shape[: ends[0]], -1)
    found = flat.argmax(axis=-1) if isinstance(layer, GlobalMax) else flat.argmin(axis=-1)
    first = np.arange(flat.shape[-1]) == found[..., None]
    dx = first * dy.reshape(*flat.shape[:-1], 1)
    return (np.moveaxis(dx.reshape(moved.shape), ends, axes),), {}


@forward_of(GlobalMean)
def global_mean(layer: GlobalMean, xs: Arrays, w: Weights) -> Array:
    y: Array = xs[0].mean(axis=layer.axes, keepdims=layer.keep)
    return y


@backward_of(GlobalMean)
def global_mean_back(layer: GlobalMean, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
    (x,) = xs
    count = math.prod(x.shape[axis] for axis in _axes(layer, x))
    return (np.broadcast_to(_keepdims(layer, x, dy) / count, x.shape),), {}


@forward_of(GlobalSum)
def global_sum(layer: GlobalSum, xs: Arrays, w: Weights) -> Array:
    y: Array = xs[0].sum(axis=layer.axes, keepdims=layer.keep)
    return y


@backward_of(GlobalSum)
def global_sum_back(layer: GlobalSum, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
    return (np.broadcast_to(_keepdims(layer, xs[0], dy), xs[0].shape),), {}


@forward_of(GlobalNorm)
def global_norm(layer: GlobalNorm, xs: Arrays, w: Weights) -> Array:
    y: Array = np.sqrt((xs[0] * xs[0]).sum(axis=layer.axes, keepdims=layer.keep))
    return y


@backward_of(GlobalNorm)
def global_norm_back(layer: GlobalNorm, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
    (x,) = xs
    return (x * (_keepdims(layer, x, dy) / _keepdims(layer, x, y)),), {}


@forward_of(SequenceMax)
def sequence_max(layer: SequenceMax, xs: Arrays, w: Weights) -> Array:
    x, inside = xs[0], _inside(layer, xs)
    y: Array = np.where(inside, x, -np.inf).max(axis=2)
    return np.where(inside[:, :, 0], y, 0)


@backward_of(SequenceMax)
def sequence_max_back(layer: SequenceMax, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
    """The gradient goes to the first maximum inside the sequence."""
    x, inside = xs[0], _inside(layer, xs)
    first = np.arange(x.shape[2]) == np.where(inside, x, -np.inf).argmax(axis=2)[..., None]
    return (first * inside * dy[..., None], None), {}


def _inside(layer: SequenceMax, xs: Arrays) -> Array:
    """Which windows of x are inside their sequence, (B, 1, P)."""
    x, lengths = xs
    ends = np.arange(x.shape[2]) * layer.stride + layer.window
    inside: Array = ends <= lengths[:, None, None]
    return inside


Global = GlobalMax | GlobalMin | GlobalMean | GlobalSum | GlobalNorm


def _keepdims(layer: Global, x: Array, y: Array) -> Array:
    """y, or its gradient, with size 1 on the reduced axes of x."""
    axes = _axes(layer, x)
    return y.reshape([1 if axis in axes else d for axis, d in enumerate(x.shape)])


def _axes(layer: Global, x: Array) -> tuple[int, ...]:
    return tuple(sorted(axis % x.ndim for axis in layer.axes))


def _counts_and_pads(layer: Pool, x: Array) -> tuple[list[int], tuple[int, ...]]:
    """Windows per axis, and the pads, extended if the last window passes the end (ceil)."""
    counts = window_counts(TensorType(x.shape), layer.kernel, *geometry(layer), layer.ceil)
    after = []
    for a, n in enumerate(x.shape[2:]):
        end = (counts[a] - 1) * layer.stride[a] + layer.dilation[a] * (layer.kernel[a] - 1) + 1
        after.append(max(layer.pads[layer.rank + a], end - layer.pads[a] - n))
    return counts, (*layer.pads[: layer.rank], *after)


def _taps(layer: Pool, counts: list[int]) -> Iterator[Slices]:
    return taps(layer.kernel, counts, layer.stride, layer.dilation)


def _fold(layer: Pool, columns: Array, x: Array, pads: tuple[int, ...]) -> Array:
    return fold(columns, layer.kernel, x.shape[2:], layer.stride, pads, layer.dilation)


def _divisors(layer: AvgPool, x: Array) -> Array:
    """The number of elements that each window averages, (1, 1, counts...); none past the input and its pads."""
    counts, pads = _counts_and_pads(layer, x)
    overhang = [extended - declared for extended, declared in zip(pads, layer.pads, strict=True)]
    inside = pad(pad(np.ones((1, 1, *x.shape[2:]), x.dtype), layer.pads, int(layer.count_pads)), overhang, 0)
    return reduce(np.add, (inside[tap] for tap in _taps(layer, counts)))
