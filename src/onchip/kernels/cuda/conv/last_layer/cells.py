"""How conv_last_layer and conv_last_layer_sm90 split y into cells: the host side of `Axis` in their .cu files."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

from onchip.kernels.cuda.conv.direct import Geometry
from onchip.network.recipe import Array

NO_TAP = -1
Table = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class CellAxis:
    """One axis of y in cells. A cell's window is the union of its positions' windows."""

    side_in: int
    side_out: int
    cell: int  # positions per cell
    step: int  # pixels of x from one cell to the next
    first: int  # the pixel at the first tap of the first cell
    taps: int  # taps of a cell's window
    apart: int  # distance between them, in pixels
    table: Table  # [position in the cell][tap of its window]: the weight's tap, or NO_TAP

    @property
    def cells(self) -> int:
        return math.ceil(self.side_out / self.cell)

    def pixels(self, cells: int) -> int:
        """Pixels of x under `cells` cells."""
        return (cells - 1) * self.step + (self.taps - 1) * self.apart + 1


@functools.lru_cache(maxsize=256)  # planners request the same ones repeatedly
def cell_axis(geometry: Geometry, axis: int, times: int) -> CellAxis:
    """Cells of `times` positions; transposed: of `times` pixels of x with all their phases."""
    g = geometry
    sides = g.sides_in[axis], g.sides_out[axis]
    taps, stride, before, dilation = g.taps[axis], g.stride[axis], g.before[axis], g.dilation[axis]
    if g.is_transposed:  # position i reaches pixel p by tap t if i + before == p * stride + t * dilation
        cell, step, apart = stride * times, times, 1
        reached = [i + before - t * dilation for i in range(cell) for t in range(taps)]
        pixels = [way // stride for way in reached if way % stride == 0]
        first, last = min(pixels), max(pixels)
    else:  # position i reaches pixel i * stride - before + t * dilation
        cell, step, apart = times, stride * times, dilation if times == 1 else 1
        first, last = -before, (times - 1) * stride - before + (taps - 1) * dilation
    window = range(first, last + 1, apart)
    table = tuple(
        tuple(
            _tap(i + before - p * stride if g.is_transposed else p - i * stride + before, taps, dilation)
            for p in window
        )
        for i in range(cell)
    )
    return CellAxis(*sides, cell, step, first, len(window), apart, table)


def _tap(way: int, taps: int, dilation: int) -> int:
    tap, rest = divmod(way, dilation)
    return tap if rest == 0 and 0 <= tap < taps else NO_TAP


def cell_weights(weight: Array, channels: int, columns: int, down: Table, right: Table, channel_axis: int) -> Array:
    """(N, C, taps...) or (C, N, taps...) -> (taps of a window, channels, columns), zero-padded.

    columns      one per position of a cell and channel of y
    down, right  CellAxis.table
    """
    turned = np.moveaxis(weight, channel_axis, 0)  # (C, N, taps...)
    C, N = turned.shape[:2]
    taps = turned.reshape(C, N, -1, turned.shape[-1])  # 1D is an image of one row
    full = np.zeros((len(down[0]), len(right[0]), channels, len(down), len(right), N), weight.dtype)
    for i, lines in enumerate(down):
        for a, h in enumerate(lines):
            for j, places in enumerate(right):
                for b, w in enumerate(places):
                    if NO_TAP not in (h, w):
                        full[a, b, :C, i, j] = taps[:, :, h, w]
    made = full.reshape(len(down[0]) * len(right[0]), channels, -1)
    return np.pad(made, ((0, 0), (0, 0), (0, columns - made.shape[2])))
