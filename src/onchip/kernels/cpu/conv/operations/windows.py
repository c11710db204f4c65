"""Windows, an operation of conv_fused: a convolution with few channels, over an input with a rim of zeros.

The lines of a window are one sum. Neighbouring windows lie SX pixels apart and overlap, so they are rows of the tile
without being copied. A vector holds `side` neighbouring outputs where those have few channels; if their number is no
multiple of that, the last ones of every row are made by a vector of their own, which makes some again. In such a vector
what an output does not see meets a weight of zero, and an infinity or a NaN there would be a NaN here: rows with a NaN
are made again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onchip.kernels.cpu.compiler.emit import LANES
from onchip.kernels.cpu.compiler.jit import ALL, compiled, floats_at, linked, multiply_add
from onchip.kernels.cpu.compiler.late_numba import types
from onchip.kernels.cpu.conv.lowering import Lowering, pads_of, window_of
from onchip.kernels.cpu.conv.operation import (
    Activated,
    Window,
    call_at,
    clear_pads,
    fields_of,
    finish,
    own_rows,
    runs,
)
from onchip.kernels.cpu.conv.operations.combine import rimmed
from onchip.kernels.cpu.conv.values import View
from onchip.kernels.cpu.conv.weights import packed_taps
from onchip.kernels.cpu.microkernels import tile
from onchip.kernels.cpu.microkernels.dense import multiply_panel, next_panel, padded_width
from onchip.kernels.pointwise import RELU
from onchip.network.graph import Node
from onchip.network.recipe import Recipe

SUM_TERMS = 128  # of a sum in registers: longer ones are added up in parts, which keeps their digits
# Of a line that is longer, and the most parts of it: libraries sum one of few outputs in many short chains, but each
# part is added to the bias, and rounded as that is.
LINE_TERMS, LINE_PARTS = 32, 16
_NO_FLOOR, _ZERO = np.float32(-np.inf), np.float32(0)


@dataclass(frozen=True, eq=False, kw_only=True)
class Windows(Activated):
    order = (
        f"rows of windows, some {SUM_TERMS} terms at a time, longer rows in at most {LINE_PARTS} parts, {tile.ORDER}"
    )
    reads_pads = True
    x: View
    window: Window
    side: int
    w: Recipe
    b: Recipe
    padded: int = 0  # what a pixel of y is padded to, where those pads must be zero

    def flop(self) -> int:
        (C, _, _), (N, HO, WO) = self.x.sizes, self.y.sizes
        return 2 * C * N * HO * WO * self.window.KH * self.window.KW


def lower_windows(to: Lowering, node: Node, x: View) -> None:
    x = rimmed(to, x, pads_of(node))
    N, _, *kernel = to.net.weights[node.weights["weight"]].shape
    window, side = window_of(node, tuple(kernel)), to.side(node)
    columns = N if side == 1 else LANES // side
    w, b = packed_taps(node, window.KH, window.KW, x.store.pixel, side, columns, window.SX)
    to.make(node, Windows, x=x, window=window, side=side, w=w, b=b)


_windows = fields_of(Windows)


@compiled(inline=True)
def _line_terms(K: int) -> int:
    """Terms of a line of K that are added up in one part."""
    return K if K <= SUM_TERMS else max(LINE_TERMS, -(-K // LINE_PARTS))


@linked(*(types.int64,) * 5)
def some_windows(row: int, call: int, ox: int, count: int, down: int) -> None:
    """`count` vectors of outputs, side by side from output ox on in every row; or, with down, one below the other."""
    op, at = _windows(row, call), call_at(call)
    x, y, k = op.x, op.y, op.window
    top, bottom = own_rows(y.H, at.part, at.parts)
    x_pixel, x_row = k.SX * x.pixel, k.SY * x.row
    wide, K = padded_width(y.C), k.KW * x.pixel + (op.side - 1) * x_pixel
    x_line, some, terms = k.DY * x.row * 4, max(1, SUM_TERMS // K), _line_terms(K)
    x_step, y_step = (x_row * 4, y.row * 4) if down else (op.side * x_pixel * 4, op.side * y.pixel * 4)
    last = _ZERO if op.activation == RELU else _NO_FLOOR
    n = 0
    while n < wide:
        width = next_panel(wide - n)
        for h in range(0, k.KH, some):
            for t in range(0, K, terms):
                w = op.w + (n * k.KH * K + (h * K + t) * width) * 4
                lines, steps = min(some, k.KH - h), min(terms, K - t)
                floor = last if h + some >= k.KH and t + terms >= K else _NO_FLOOR
                for i in range(at.images):
                    for oy in range(top, top + 1 if down else bottom):
                        given = x.at + i * x.image + oy * x_row + ox * x_pixel + t
                        given = at.here + (given - k.PY * x.row - k.PX * x.pixel) * 4 + h * x_line
                        out = at.here + (y.at + i * y.image + oy * y.row + ox * y.pixel + n) * 4
                        init, init_row = (op.b + n * 4, 0) if h == 0 and t == 0 else (out, y_step)
                        multiply_panel(
                            given, x_step, count, w, width, init, init_row, out, y_step, lines, x_line, steps, floor
                        )  # fmt: skip
        n += width


@compiled()
def _has_nan(where: int, count: int) -> bool:
    line, found = floats_at(where, count), False
    for j in range(count):
        found |= line[j] != line[j]
    return found


@linked(*(types.int64,) * 4)
def one_by_one(row: int, call: int, i: int, oy: int) -> None:
    """Row oy of the outputs of image i, each from the terms of its own window only, with the bits that
    some_windows gives where all numbers are finite: a term of zero changes no sum."""
    op, at = _windows(row, call), call_at(call)
    a, x, y, k = floats_at(at.here, ALL), op.x, op.y, op.window
    lanes, run, line = op.side * y.pixel, k.KW * x.pixel, k.DY * x.row
    K = run + (op.side - 1) * k.SX * x.pixel  # terms of a line in the packed weights
    w, bias = floats_at(op.w, ALL), floats_at(op.b, y.C)
    some, terms = max(1, SUM_TERMS // K), _line_terms(K)
    floor = _ZERO if op.activation == RELU else _NO_FLOOR
    first = x.at + i * x.image + (oy * k.SY - k.PY) * x.row - k.PX * x.pixel
    for ox in range(y.W):
        out = y.at + i * y.image + oy * y.row + ox * y.pixel
        # Terms of its vector's line before its own: the last vector of a row may begin among another one's outputs.
        lane = ox - (y.W - op.side) if y.W % op.side and ox >= y.W - op.side else ox % op.side
        before = lane * k.SX * x.pixel
        for n in range(y.C):
            total = bias[n]
            for h in range(0, k.KH, some):
                for t in range(0, K, terms):
                    part = _ZERO
                    for lines in range(h, min(h + some, k.KH)):
                        begin = first + lines * line + ox * k.SX * x.pixel
                        for j in range(max(0, t - before), min(run, t + terms - before)):
                            part = multiply_add(a[begin + j], w[(lines * K + j) * lanes + n], part)
                    total += part
            a[out + n] = floor if total < floor else total
        for n in range(y.C, y.pixel):
            a[out + n] = _ZERO  # pads


@runs(Windows)
def conv_windows(row: int, call: int) -> None:
    op, at = _windows(row, call), call_at(call)
    y = op.y
    top, bottom = own_rows(y.H, at.part, at.parts)
    if top >= bottom:
        return
    some_windows(row, call, 0, y.W // op.side, False)
    if y.W % op.side:
        some_windows(row, call, y.W - op.side, bottom - top, True)
    if op.side > 1:
        for i in range(at.images):
            for oy in range(top, bottom):
                if _has_nan(at.here + (y.at + i * y.image + oy * y.row) * 4, y.W * y.pixel):
                    one_by_one(row, call, i, oy)
    clear_pads(at.here, y, op.padded, at.images, top, bottom)
    if op.activation != RELU:  # which the products did
        finish(at.here, y, at.images, top, bottom, op.activation)
