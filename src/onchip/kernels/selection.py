"""Selections and resizes along the axes of rows, and their gradients, as index tables: for kernels of every device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onchip.network.graph import Network, Node
from onchip.network.layers import LinearResize, Selection
from onchip.network.layers.resize import MAX_RESIZED, Taps
from onchip.network.recipe import Array
from onchip.network.types import TensorType
from onchip.plan.layout import CHANNELS_LAST, has_channels

AXES = MAX_RESIZED  # axes with tables


@dataclass(frozen=True)
class Tables:
    """A selection with rows of x as (outer, x_row), rows of y as (outer, n1, n2, n3, run)."""

    outer: int
    x_row: int  # elements, like all sizes here
    offsets: tuple[Array, ...]  # source offsets in elements of x, along n1, n2 and n3
    run: int


def tables_of(row_shape: Sequence[int], chosen: Sequence[Array | None]) -> Tables:
    """The tables for rows of this shape and a selection along every axis."""
    axes = list(zip(row_shape, chosen, strict=True))
    run, outer = 1, 1
    while axes and axes[-1][1] is None:
        run *= axes.pop()[0]
    while axes and axes[0][1] is None:
        outer *= axes.pop(0)[0]
    x_row = run
    offsets: list[Array] = []
    for n, indices in reversed(axes):
        at = np.arange(n) if indices is None else indices
        if not offsets:
            block = _block(n, at)
            run, at = run * block, at[::block]
        offsets.insert(0, np.where(at < 0, -1, at * x_row))
        x_row *= n
    while len(offsets) > AXES:
        first, second = offsets[0][:, None], offsets[1]
        offsets[:2] = [np.where((first < 0) | (second < 0), -1, first + second).reshape(-1)]
    return Tables(outer, x_row, (*[np.zeros(1, np.int64)] * (AXES - len(offsets)), *offsets), run)


def _block(n: int, at: Array) -> int:
    """The largest block size such that blocks of x, aligned to it, stay contiguous in y."""
    for block in (16, 8, 4, 2):
        if n % block == 0 and len(at) % block == 0 and len(at):
            blocks = at.reshape(-1, block)
            follows = blocks == blocks[:, :1] + np.arange(block)
            if np.all((blocks < 0).all(axis=1) | (follows.all(axis=1) & (blocks[:, 0] % block == 0))):
                return block
    return 1


def tables_for(layer: Selection, row_shape: tuple[int, ...], layout: str) -> Tables:
    chosen = layer.source_indices(row_shape)
    if layout == CHANNELS_LAST:
        row_shape, chosen = (*row_shape[1:], row_shape[0]), (*chosen[1:], chosen[0])
    return tables_of(row_shape, chosen)


def may_be_nhwc(net: Network, node: Node) -> bool:
    """Whether its values may be NHWC: none is a network input or output, which are NCHW."""
    (value,) = node.inputs
    inside = value not in net.inputs and bool(net.readers(node.name))
    return inside and has_channels(net.types[value]) and has_channels(net.types[node.name])


# -- linear resizes --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ResizeParts:
    """Rows of x as (outer, x_row), of y as (outer, n1, n2, n3, run)."""

    outer: int
    x_row: int
    sizes: tuple[int, int, int]
    run: int
    is_resized: tuple[bool, bool, bool]


def resize_parts(layer: LinearResize, x: TensorType, layout: str) -> ResizeParts | None:
    """None if, in NHWC, too many axes are between the first and the last resized one."""
    taps, row, sizes = _stored(layer, x.row_shape, layout)
    first, end = _resized(taps)
    if end - first > AXES:
        return None
    missing = AXES - (end - first)
    n1, n2, n3 = (1,) * missing + sizes[first:end]
    f1, f2, f3 = (False,) * missing + tuple(tap is not None for tap in taps[first:end])
    return ResizeParts(math.prod(row[:first]), math.prod(row[first:]), (n1, n2, n3), math.prod(row[end:]), (f1, f2, f3))


def axis_taps(layer: LinearResize, row_shape: tuple[int, ...], layout: str) -> list[tuple[Taps, int]]:
    """The taps of the three axes with tables, and the stride of each in x."""
    taps, row, _ = _stored(layer, row_shape, layout)
    first, end = _resized(taps)
    found = []
    for axis in range(first, end):
        same = np.arange(row[axis])
        found.append((taps[axis] or Taps(same, same, np.zeros(row[axis])), math.prod(row[axis + 1 :])))
    none = np.zeros(1, np.int64)
    return [(Taps(none, none, np.zeros(1)), 0)] * (AXES - len(found)) + found


def _resized(taps: Sequence[Taps | None]) -> tuple[int, int]:
    """The first resized axis, and one past the last."""
    found = [axis for axis, tap in enumerate(taps) if tap is not None] or [len(taps) - 1]
    return found[0], found[-1] + 1


def _stored(
    layer: LinearResize, row_shape: tuple[int, ...], layout: str
) -> tuple[tuple[Taps | None, ...], tuple[int, ...], tuple[int, ...]]:
    """Taps, sizes of x and sizes of y, per axis of a row as stored."""
    taps, sizes = layer.taps(row_shape), layer.sizes
    if layout == CHANNELS_LAST:
        return (*taps[1:], taps[0]), (*row_shape[1:], row_shape[0]), (*sizes[1:], sizes[0])
    return taps, row_shape, sizes


# -- gradients -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GradientSums:
    """The dx of a selection or a linear resize, its rows as (outer, n1, n2, n3, run), those of dy as (outer, dy_row).

    Element (i1, i2, i3) is a sum along each axis: of the terms from starts[i] to before starts[i + 1], dy at their
    offsets times their factors. Starts are n1 + 1, n2 + 1 and n3 + 1, one axis after another.
    """

    outer: int
    dy_row: int
    sizes: tuple[int, int, int]
    run: int
    starts: Array
    offsets: Array  # in elements of dy
    factors: Array  # float64


@dataclass(frozen=True)
class _Terms:
    """Along an axis of n elements of x and `size` of y: dx[to] += dy[source] * factor, in this order."""

    n: int
    size: int
    to: Array
    source: Array
    factor: Array

    @staticmethod
    def of(chosen: Array | Taps | None, n: int) -> _Terms:
        if isinstance(chosen, Taps):
            size = len(chosen.share)
            to, source = np.stack((chosen.low, chosen.high), 1).reshape(-1), np.repeat(np.arange(size), 2)
            return _Terms(n, size, to, source, np.stack((1 - chosen.share, chosen.share), 1).reshape(-1))
        indices = np.arange(n) if chosen is None else chosen
        source = np.flatnonzero(indices >= 0)
        return _Terms(n, len(indices), indices[source], source, np.ones(len(source)))

    def with_next(self, inner: _Terms) -> _Terms:
        """Of this axis and the next one as a single axis."""
        to, source = self.to[:, None] * inner.n + inner.to, self.source[:, None] * inner.size + inner.source
        factor = self.factor[:, None] * inner.factor
        return _Terms(self.n * inner.n, self.size * inner.size, *(each.reshape(-1) for each in (to, source, factor)))


def gradient_sums(layer: Selection | LinearResize, row_shape: tuple[int, ...], layout: str) -> GradientSums:
    chosen: Sequence[Array | Taps | None] = (
        layer.taps(row_shape) if isinstance(layer, LinearResize) else layer.source_indices(row_shape)
    )
    if layout == CHANNELS_LAST:
        row_shape, chosen = (*row_shape[1:], row_shape[0]), (*chosen[1:], chosen[0])
    axes, run, outer = list(zip(chosen, row_shape, strict=True)), 1, 1
    while axes and axes[-1][0] is None:
        run *= axes.pop()[1]
    while axes and axes[0][0] is None:
        outer *= axes.pop(0)[1]
    terms = [_Terms.of(*axis) for axis in axes]
    while len(terms) > AXES:
        terms[:2] = [terms[0].with_next(terms[1])]
    terms = [_Terms.of(None, 1)] * (AXES - len(terms)) + terms
    starts, offsets, factors, first = list[Array](), list[Array](), list[Array](), 0
    for axis, each in enumerate(terms):
        order = np.argsort(each.to, kind="stable")
        starts.append(first + np.concatenate(([0], np.cumsum(np.bincount(each.to, minlength=each.n)))))
        offsets.append(each.source[order] * run * math.prod(inner.size for inner in terms[axis + 1 :]))
        factors.append(each.factor[order])
        first += len(order)
    n1, n2, n3 = (each.n for each in terms)
    dy_row = run * math.prod(each.size for each in terms)
    return GradientSums(outer, dy_row, (n1, n2, n3), run, *map(np.concatenate, (starts, offsets, factors)))
