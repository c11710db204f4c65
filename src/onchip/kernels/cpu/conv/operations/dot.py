"""Dot, an operation of conv_fused: a convolution with very few outputs over an input with a zero border.

Vector lanes run along K (microkernels/dot.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from onchip.kernels.cpu.compiler.emit import LANES
from onchip.kernels.cpu.compiler.jit import compiled
from onchip.kernels.cpu.conv.lowering import Lowering, pads_of, window_of
from onchip.kernels.cpu.conv.operation import Activated, Window, call_at, fields_of, finish, row_span, runs
from onchip.kernels.cpu.conv.operations.combine import with_border
from onchip.kernels.cpu.conv.values import View
from onchip.kernels.cpu.conv.weights import bias_of_pixels, bias_recipe, weight_recipe
from onchip.kernels.cpu.memory import aligned_zeros
from onchip.kernels.cpu.microkernels.dot import ROWS, dot_tile
from onchip.network.graph import Node
from onchip.network.recipe import Array, Recipe, recipe_op


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
