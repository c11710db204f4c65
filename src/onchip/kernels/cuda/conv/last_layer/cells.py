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
    first: int  # pixel at the first tap of the first cell
    taps: int  # taps of a cell's window
    dilation: int  # pixels from one tap to the next
    table: Table  # [position in the cell][tap of its window]: the weight's tap, or NO_TAP

    @property
    def cells(self) -> int:
        return math.ceil(self.side_out / self.cell)

    def pixels(self, cells: int) -> int:
        """Pixels of x that `cells` adjacent cells read."""
        return (cells - 1) * self.step + (self.taps - 1) * self.dilation + 1


@functools.lru_cache(maxsize=256)  # planning repeats the same arguments
def cell_axis(geometry: Geometry, axis: int, times: int) -> CellAxis:
    """Cells of `times` positions of y; transposed: of `times` pixels of x, with all their phases in y."""
    g = geometry
    sides = g.sides_in[axis], g.sides_out[axis]
    taps, stride, before, dilation = g.taps[axis], g.stride[axis], g.before[axis], g.dilation[axis]
    if g.is_transposed:  # position i reaches pixel p by tap t if i + before == p * stride + t * dilation
        cell, step, spacing = stride * times, times, 1
        reached = [i + before - t * dilation for i in range(cell) for t in range(taps)]
        pixels = [distance // stride for distance in reached if distance % stride == 0]
        first, last = min(pixels), max(pixels)
    else:  # position i reaches pixel i * stride - before + t * dilation
        cell, step, spacing = times, stride * times, dilation if times == 1 else 1
        first, last = -before, (times - 1) * stride - before + (taps - 1) * dilation
    window = range(first, last + 1, spacing)
    table = tuple(
        tuple(
            _tap(i + before - p * stride if g.is_transposed else p - i * stride + before, taps, dilation)
            for p in window
        )
        for i in range(cell)
    )
    return CellAxis(*sides, cell, step, first, len(window), spacing, table)


def _tap(distance: int, taps: int, dilation: int) -> int:
    tap, remainder = divmod(distance, dilation)
    return tap if remainder == 0 and 0 <= tap < taps else NO_TAP


def cell_weights(weight: Array, channels: int, columns: int, down: Table, right: Table, channel_axis: int) -> Array:
    """(N, C, taps...) or (C, N, taps...) -> (taps of a cell's window, channels, columns), zero-padded.

    columns      at least one per position of a cell and channel of y
    down, right  CellAxis.table of rows, of columns
    """
    c_major = np.moveaxis(weight, channel_axis, 0)  # (C, N, taps...)
    C, N = c_major.shape[:2]
    taps = c_major.reshape(C, N, -1, c_major.shape[-1])  # 1D is an image of one row
    cell_taps = np.zeros((len(down[0]), len(right[0]), channels, len(down), len(right), N), weight.dtype)
    for i, row_taps in enumerate(down):
        for a, h in enumerate(row_taps):
            for j, column_taps in enumerate(right):
                for b, w in enumerate(column_taps):
                    if NO_TAP not in (h, w):
                        cell_taps[a, b, :C, i, j] = taps[:, :, h, w]
    flat = cell_taps.reshape(len(down[0]) * len(right[0]), channels, -1)
    return np.pad(flat, ((0, 0), (0, 0), (0, columns - flat.shape[2])))
