"""Dot, an operation of conv_fused: a convolution with very few outputs over an input with a zero border.

Vector lanes run along K (microkernels/dot.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from onchip.kernels.cpu.compiler.emit import LANES
from onchip.kernels.cpu.compiler.jit import compiled
from onchip.kernels.cpu.conv.lowering import Lowering, Value, image_sizes, pads_of, window_of
from onchip.kernels.cpu.conv.operation import Activated, Window, call_at, fields_of, finish, row_span, runs
from onchip.kernels.cpu.conv.operations.combine import with_border
from onchip.kernels.cpu.conv.values import View
from onchip.kernels.cpu.conv.weights import bias_of_pixels, bias_recipe, weight_recipe
from onchip.kernels.cpu.memory import aligned_zeros
from onchip.kernels.cpu.microkernels.dot import ROWS, dot_tile
from onchip.network.graph import Node
from onchip.network.recipe import Array, Recipe, recipe_op
from onchip.plan.rewrites.phases import AxisPhase, axis_phase


@dataclass(frozen=True, eq=False, kw_only=True)
class Dot(Activated):
    order = f"windows in {LANES} lanes, reduced in pairs"
    exact = True
    reads_pads = True
    x: View
    window: Window
    w: Recipe
    b: Recipe

    def flop(self) -> int:
        (C, _, _), (N, HO, WO) = self.x.sizes, self.y.sizes
        return 2 * C * N * HO * WO * self.window.KH * self.window.KW


def lower_dot(to: Lowering, node: Node, x: View) -> None:
    x = with_border(to, x, pads_of(node))
    N, _, *kernel = to.net.weights[node.weights["weight"]].shape
    window, pixel = window_of(node, tuple(kernel)), x.store.pixel
    w = weight_recipe(taps_in_lanes, node, N * window.KH * window.KW * pixel, KH=window.KH, pixel=pixel)
    to.make(node, Dot, x=x, window=window, w=w, b=bias_recipe(bias_of_pixels, node, N, count=1, columns=N))


def lower_phases(to: Lowering, node: Node, x: View) -> bool:
    """A transposed convolution, each phase of its stride as a convolution without inserted zeros; False if it has a
    phase without taps or outputs, or one that begins or ends inside the input (plan/rewrites/phases.py)."""
    _, N, *kernel = to.net.weights[node.weights["weight"]].shape
    k, (_, HO, WO) = window_of(node, tuple(kernel)), image_sizes(to.net.types[node.name].row_shape)
    if (k.DY, k.DX) != (1, 1) or k.SY > k.KH or k.SX > k.KW:
        return False
    of_rows = [axis_phase(p, k.SY, k.PY, k.KH, HO) for p in range(k.SY)]
    of_columns = [axis_phase(p, k.SX, k.PX, k.KW, WO) for p in range(k.SX)]
    borders = [_border(axis, size) for axis, size in ((of_rows, x.sizes[1]), (of_columns, x.sizes[2]))]
    if any(border is None for border in borders):
        return False
    (top, bottom), (left, right) = (border for border in borders if border is not None)
    x = with_border(to, x, (top, left, bottom, right))
    out, pixel = to.output_view(node.name, (N, HO, WO), exact=True), x.store.pixel
    b = bias_recipe(bias_of_pixels, node, N, count=1, columns=N)
    for (py, rows), (px, columns) in itertools.product(enumerate(of_rows), enumerate(of_columns)):
        start = out.start[0] + py * out.step[0], out.start[1] + px * out.step[1]
        step = k.SY * out.step[0], k.SX * out.step[1]
        y = View(out.store, (N, rows.outputs, columns.outputs), start, step, out.channel)
        w = weight_recipe(
            phase_in_lanes, node, N * rows.taps * columns.taps * pixel, KH=k.KH, pixel=pixel,
            firsts=(rows.first, columns.first), stride=(k.SY, k.SX),
        )  # fmt: skip
        window = Window(rows.taps, columns.taps, PY=rows.before, PX=columns.before)
        to.emit(Dot(x=x, y=y, window=window, w=w, b=b))
    to.values[node.name] = Value(out, None)
    return True


def _border(phases: Sequence[AxisPhase], size: int) -> tuple[int, int] | None:
    """Zeros before and after an axis of x that the windows of all phases reach; None if one is not a convolution."""
    after = [one.outputs - size - one.before + one.taps - 1 for one in phases]
    if min(*(one.before for one in phases), *(one.outputs - 1 for one in phases), *after) < 0:
        return None
    return max(one.before for one in phases), max(after)


@recipe_op
def phase_in_lanes(W: Array, size: int, KH: int, pixel: int, firsts: tuple[int, int], stride: tuple[int, int]) -> Array:
    """Transposed (C, N, KH, KW) -> (N, taps, taps, pixel of x): every stride-th tap from the first on, reversed."""
    C, N, KW = W.shape[0], W.shape[1], W.shape[-1]
    taps = W.reshape(C, N, KH, KW)[:, :, firsts[0] :: stride[0], firsts[1] :: stride[1]][:, :, ::-1, ::-1]
    return taps_in_lanes(taps.swapaxes(0, 1), size, taps.shape[2], pixel)


@recipe_op
def taps_in_lanes(W: Array, size: int, KH: int, pixel: int) -> Array:
    """(N, C, KH, KW) -> (N, KH, KW, pixel of x)."""
    N, C, KW = W.shape[0], W.shape[1], W.shape[-1]
    flat = aligned_zeros(size)
    flat.reshape(N, KH, KW, pixel)[..., :C] = W.reshape(N, C, KH, KW).transpose(0, 2, 3, 1)
    return flat


_dot = fields_of(Dot)


@compiled()
def _tile(
    x: int, step: int, x_row: int, w: int, H: int, K: int, bias: int, y: int, y_pixel: int, rows: int, outs: int
) -> None:
    w_out = H * K * 4
    if rows == ROWS:
        if outs == 1:
            dot_tile(x, step, x_row, w, w_out, H, K, bias, y, y_pixel, ROWS, 1)
        elif outs == 2:
            dot_tile(x, step, x_row, w, w_out, H, K, bias, y, y_pixel, ROWS, 2)
        elif outs == 3:
            dot_tile(x, step, x_row, w, w_out, H, K, bias, y, y_pixel, ROWS, 3)
        else:
            dot_tile(x, step, x_row, w, w_out, H, K, bias, y, y_pixel, ROWS, 4)
    elif outs == 1:
        dot_tile(x, step, x_row, w, w_out, H, K, bias, y, y_pixel, 1, 1)
    elif outs == 2:
        dot_tile(x, step, x_row, w, w_out, H, K, bias, y, y_pixel, 1, 2)
    elif outs == 3:
        dot_tile(x, step, x_row, w, w_out, H, K, bias, y, y_pixel, 1, 3)
    else:
        dot_tile(x, step, x_row, w, w_out, H, K, bias, y, y_pixel, 1, 4)


@runs(Dot)
def conv_dot(row: int, call: int) -> None:
    op, args = _dot(row, call), call_at(call)
    x, y, k = op.x, op.y, op.window
    K, step = k.KW * x.pixel, k.SX * x.pixel * 4
    top, bottom = row_span(y.H, args.part, args.parts)
    for i in range(args.images):
        for oy in range(top, bottom):
            src = args.base + (x.offset + i * x.image + (oy * k.SY - k.PY) * x.row - k.PX * x.pixel) * 4
            dst = args.base + (y.offset + i * y.image + oy * y.row) * 4
            ox = 0
            while ox < y.W:
                rows = ROWS if ox + ROWS <= y.W else 1
                _tile(
                    src + ox * step, step, x.row * 4, op.w, k.KH, K, op.b, dst + ox * y.pixel * 4, y.pixel * 4,
                    rows, y.C,
                )  # fmt: skip
                ox += rows
    finish(args.base, y, args.images, top, bottom, op.activation)
