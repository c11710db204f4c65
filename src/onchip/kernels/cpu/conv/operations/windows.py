"""Windows, an operation of conv_fused: a convolution with few channels over an input with a zero border.

Implicit GEMM: K runs over all lines of a window. Neighbouring windows overlap, SX pixels apart, so they are rows of the
register tile without a copy. Where outputs have few channels, a vector holds `side` neighbouring outputs. If W is no
multiple of `side`, another vector computes the last ones of each row, some of them again. Elements outside an output's
window are multiplied by zero there, and an infinity or NaN would become a NaN: rows of y with a NaN are recomputed.
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
    row_span,
    runs,
)
from onchip.kernels.cpu.conv.operations.combine import with_border
from onchip.kernels.cpu.conv.values import View
from onchip.kernels.cpu.conv.weights import packed_taps
from onchip.kernels.cpu.microkernels import tile
from onchip.kernels.cpu.microkernels.dense import multiply_panel, next_panel, padded_width
from onchip.kernels.pointwise import RELU
from onchip.network.graph import Node
from onchip.network.recipe import Recipe

CHUNK_K = 128  # elements per partial sum: shorter chains lose fewer digits
# A longer line: elements per partial sum and most partial sums. BLAS libraries reduce few outputs in many short chains;
# but each partial sum is added to the bias and rounded to its size.
LINE_CHUNK_K, LINE_CHUNKS = 32, 16
_NO_FLOOR, _ZERO = np.float32(-np.inf), np.float32(0)


@dataclass(frozen=True, eq=False, kw_only=True)
class Windows(Activated):
    order = f"window lines in partial sums of {CHUNK_K} elements, longer lines in at most {LINE_CHUNKS}, {tile.ORDER}"
    reads_pads = True
    x: View
    window: Window
    side: int
    w: Recipe
    b: Recipe
    padded: int = 0  # padded channels per pixel of y, if the pads must be zero

    def flop(self) -> int:
        (C, _, _), (N, HO, WO) = self.x.sizes, self.y.sizes
        return 2 * C * N * HO * WO * self.window.KH * self.window.KW


def lower_windows(to: Lowering, node: Node, x: View) -> None:
    x = with_border(to, x, pads_of(node))
    N, _, *kernel = to.net.weights[node.weights["weight"]].shape
    window, side = window_of(node, tuple(kernel)), to.side(node)
    columns = N if side == 1 else LANES // side
    w, b = packed_taps(node, window.KH, window.KW, x.store.pixel, side, columns, window.SX)
    to.make(node, Windows, x=x, window=window, side=side, w=w, b=b)


_windows = fields_of(Windows)


@compiled(inline=True)
def _line_chunk(K: int) -> int:
    """Elements per partial sum of a line of K elements."""
    return K if K <= CHUNK_K else max(LINE_CHUNK_K, -(-K // LINE_CHUNKS))


@linked(*(types.int64,) * 5)
def window_columns(row: int, call: int, ox: int, count: int, down: int) -> None:
    """`count` vectors of outputs from column ox on, in every row; with `down`, one vector in each of `count` rows."""
    op, args = _windows(row, call), call_at(call)
    x, y, k = op.x, op.y, op.window
    top, bottom = row_span(y.H, args.part, args.parts)
    x_pixel, x_row = k.SX * x.pixel, k.SY * x.row
    wide, K = padded_width(y.C), k.KW * x.pixel + (op.side - 1) * x_pixel
    x_line, chunk_lines, chunk = k.DY * x.row * 4, max(1, CHUNK_K // K), _line_chunk(K)
    x_step, y_step = (x_row * 4, y.row * 4) if down else (op.side * x_pixel * 4, op.side * y.pixel * 4)
    last = _ZERO if op.activation == RELU else _NO_FLOOR
    n = 0
    while n < wide:
        width = next_panel(wide - n)
        for h in range(0, k.KH, chunk_lines):
            for t in range(0, K, chunk):
                w = op.w + (n * k.KH * K + (h * K + t) * width) * 4
                lines, steps = min(chunk_lines, k.KH - h), min(chunk, K - t)
                floor = last if h + chunk_lines >= k.KH and t + chunk >= K else _NO_FLOOR
                for i in range(args.images):
                    for oy in range(top, top + 1 if down else bottom):
                        src = x.offset + i * x.image + oy * x_row + ox * x_pixel + t
                        src = args.base + (src - k.PY * x.row - k.PX * x.pixel) * 4 + h * x_line
                        dst = args.base + (y.offset + i * y.image + oy * y.row + ox * y.pixel + n) * 4
                        init, init_row = (op.b + n * 4, 0) if h == 0 and t == 0 else (dst, y_step)
                        multiply_panel(
                            src, x_step, count, w, width, init, init_row, dst, y_step, lines, x_line, steps, floor
                        )  # fmt: skip
        n += width


@compiled()
def _has_nan(where: int, count: int) -> bool:
    line, found = floats_at(where, count), False
    for j in range(count):
        found |= line[j] != line[j]
    return found


@linked(*(types.int64,) * 4)
def scalar_row(row: int, call: int, i: int, oy: int) -> None:
    """Recompute output row oy of image i from each output's window only, in scalar code.

    Same bits as window_columns where all elements are finite: adding a zero changes no sum."""
    op, args = _windows(row, call), call_at(call)
    a, x, y, k = floats_at(args.base, ALL), op.x, op.y, op.window
    lanes, run, line = op.side * y.pixel, k.KW * x.pixel, k.DY * x.row
    K = run + (op.side - 1) * k.SX * x.pixel  # elements of a line in the packed weights
    w, bias = floats_at(op.w, ALL), floats_at(op.b, y.C)
    chunk_lines, chunk = max(1, CHUNK_K // K), _line_chunk(K)
    floor = _ZERO if op.activation == RELU else _NO_FLOOR
    first = x.offset + i * x.image + (oy * k.SY - k.PY) * x.row - k.PX * x.pixel
    for ox in range(y.W):
        out = y.offset + i * y.image + oy * y.row + ox * y.pixel
        # Offset of its window in its vector's line; the last vector of a row may overlap the one before.
        lane = ox - (y.W - op.side) if y.W % op.side and ox >= y.W - op.side else ox % op.side
        before = lane * k.SX * x.pixel
        for n in range(y.C):
            total = bias[n]
            for h in range(0, k.KH, chunk_lines):
                for t in range(0, K, chunk):
                    partial = _ZERO
                    for lines in range(h, min(h + chunk_lines, k.KH)):
                        begin = first + lines * line + ox * k.SX * x.pixel
                        for j in range(max(0, t - before), min(run, t + chunk - before)):
                            partial = multiply_add(a[begin + j], w[(lines * K + j) * lanes + n], partial)
                    total += partial
            a[out + n] = floor if total < floor else total
        for n in range(y.C, y.pixel):
            a[out + n] = _ZERO  # pads


@runs(Windows)
def conv_windows(row: int, call: int) -> None:
    op, args = _windows(row, call), call_at(call)
    y = op.y
    top, bottom = row_span(y.H, args.part, args.parts)
    if top >= bottom:
        return
    window_columns(row, call, 0, y.W // op.side, False)
    if y.W % op.side:
        window_columns(row, call, y.W - op.side, bottom - top, True)
    if op.side > 1:
        for i in range(args.images):
            for oy in range(top, bottom):
                if _has_nan(args.base + (y.offset + i * y.image + oy * y.row) * 4, y.W * y.pixel):
                    scalar_row(row, call, i, oy)
    clear_pads(args.base, y, op.padded, args.images, top, bottom)
    if op.activation != RELU:  # fused into the gemm
        finish(args.base, y, args.images, top, bottom, op.activation)
