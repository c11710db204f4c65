"""Taps, an operation of conv_fused: a convolution tap by tap, for many channels or pixels that need no window; or a
transposed one, whose taps find pixels of y as those of the other find pixels of x.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onchip.kernels.cpu.compiler.jit import compiled, linked
from onchip.kernels.cpu.compiler.late_numba import types
from onchip.kernels.cpu.conv.lowering import Lowering, window_of
from onchip.kernels.cpu.conv.operation import Activated, Window, call_at, clear_pads, fields_of, finish, own_rows, runs
from onchip.kernels.cpu.conv.values import View
from onchip.kernels.cpu.conv.weights import packed_taps
from onchip.kernels.cpu.microkernels import tile
from onchip.kernels.cpu.microkernels.dense import CHUNK, multiply_panel, next_panel, padded_width
from onchip.kernels.cpu.microkernels.tile import padded
from onchip.network.graph import Node
from onchip.network.recipe import Recipe

_NO_FLOOR = np.float32(-np.inf)
_L2_WEIGHT_BYTES = 1 << 20
_MANY_PIXELS = 256  # that use a chunk of weights before the next one


@dataclass(frozen=True, eq=False, kw_only=True)
class Taps(Activated):
    order = f"taps in order, {tile.ORDER}"
    x: View
    window: Window
    w: Recipe
    b: Recipe
    padded: int = 0  # what a pixel of y is padded to, where those pads must be zero
    is_transposed: bool = False

    def flop(self) -> int:
        (C, *far), (N, *near), k = self.x.sizes, self.y.sizes, self.window
        if self.is_transposed:
            far, near, N = near, far, padded(N)  # of whole vectors, however few outputs there are
        lines = _inside(k.KH, far[0], near[0], k.SY, k.PY, k.DY)
        return 2 * C * N * lines * _inside(k.KW, far[1], near[1], k.SX, k.PX, k.DX)

    def moves(self) -> int:
        if not self.is_transposed:
            return super().moves()
        # Each tap reads and writes its part of y, in the first cache: at half of the price.
        _, H, W = self.x.sizes
        return super().moves() + self.window.KH * self.window.KW * H * W * padded(self.y.sizes[0])


def lower_taps(to: Lowering, node: Node, x: View) -> None:
    N, C, *kernel = to.net.weights[node.weights["weight"]].shape
    window = window_of(node, tuple(kernel))
    w, b = packed_taps(node, window.KH, window.KW, C, 1, N, window.SX)
    to.make(node, Taps, x=x, window=window, w=w, b=b)


def _inside(taps: int, size_in: int, size_out: int, stride: int, before: int, dilation: int) -> int:
    """Pairs of an output and a tap that fall inside the input, along an axis; transposed, the other way round."""
    pairs = 0
    for k in range(taps):
        first = max(0, -(-(before - k * dilation) // stride))
        last = min(size_out - 1, (size_in - 1 + before - k * dilation) // stride)
        pairs += max(0, last - first + 1)
    return pairs


_taps = fields_of(Taps)


@compiled()
def _outputs_reached(k: int, size_in: int, size_out: int, stride: int, before: int) -> tuple[int, int]:
    """First and last + 1 of the outputs whose tap at distance k falls inside the input."""
    low = -((k - before) // stride) if k < before else 0  # the smallest o with o * stride - before + k >= 0
    high = (size_in - 1 + before - k) // stride + 1
    return low, min(size_out, high)


@linked(*(types.int64,) * 4)
def some_images(row: int, call: int, first: int, images: int) -> None:
    op, at = _taps(row, call), call_at(call)
    x, y, k = op.x, op.y, op.window
    C, K, wide = x.C, k.KH * k.KW * x.C, padded_width(y.C)
    x_pixel, x_row, x_image = x.pixel * 4, x.row * 4, x.image * 4
    y_pixel, y_row, y_image = y.pixel * 4, y.row * 4, y.image * 4
    x0, y0 = at.here + x.at * 4 + first * x_image, at.here + y.at * 4 + first * y_image
    first_row, last_row = own_rows(y.H, at.part, at.parts)
    n = 0
    while n < wide:  # the bias first: a product of no terms
        width = next_panel(wide - n)
        for i in range(images):
            for oy in range(first_row, last_row):
                out = y0 + n * 4 + i * y_image + oy * y_row
                multiply_panel(x0, 0, y.W, op.w, width, op.b + n * 4, 0, out, y_pixel, 1, 0, 0, _NO_FLOOR)
        n += width
    x_line, x_step, y_line, y_step = k.SY * x_row, k.SX * x_pixel, y_row, y_pixel
    if op.is_transposed:
        x_line, x_step, y_line, y_step = x_row, x_pixel, k.SY * y_row, k.SX * y_pixel
    for kh in range(k.KH):
        down = kh * k.DY
        top, bottom = _outputs_reached(down, x.H, y.H, k.SY, k.PY)
        top, bottom = max(top, first_row), min(bottom, last_row)
        if op.is_transposed:
            top, bottom = _outputs_reached(down - first_row, last_row - first_row, x.H, k.SY, k.PY)
        for kw in range(k.KW):
            along = kw * k.DX
            left, right = _outputs_reached(along, x.W, y.W, k.SX, k.PX)
            if op.is_transposed:
                left, right = _outputs_reached(along, y.W, x.W, k.SX, k.PX)
            if top >= bottom or left >= right:
                continue
            x_tap, y_tap = x0 + top * x_line + left * x_step, y0 + top * y_line + left * y_step
            if op.is_transposed:
                y_tap += (down - k.PY) * y_row + (along - k.PX) * y_pixel
            else:
                x_tap += (down - k.PY) * x_row + (along - k.PX) * x_pixel
            for c in range(0, C, CHUNK):
                steps = min(CHUNK, C - c)
                n = 0
                while n < wide:
                    width = next_panel(wide - n)
                    w = op.w + n * K * 4 + ((kh * k.KW + kw) * C + c) * width * 4
                    if right - left >= images:
                        for i in range(images):
                            for line in range(bottom - top):
                                given = x_tap + c * 4 + i * x_image + line * x_line
                                out = y_tap + n * 4 + i * y_image + line * y_line
                                multiply_panel(
                                    given, x_step, right - left, w, width, out, y_step, out, y_step, 1, 0, steps,
                                    _NO_FLOOR,
                                )  # fmt: skip
                    else:
                        for line in range(bottom - top):
                            for pixel in range(right - left):
                                given = x_tap + c * 4 + line * x_line + pixel * x_step
                                out = y_tap + n * 4 + line * y_line + pixel * y_step
                                multiply_panel(
                                    given, x_image, images, w, width, out, y_image, out, y_image, 1, 0, steps, _NO_FLOOR
                                )
                    n += width


@runs(Taps)
def conv_taps(row: int, call: int) -> None:
    """Each tap adds its product to the outputs it reaches, so nothing outside is multiplied.

    A chunk of the weights stays in L1 while many pixels pass over it: those of all images where the weights are too
    many for L2, else of a few images that stay there. The rows of the tile run along an image's row, or along the
    images where those are more: small images keep the tile full, too.
    """
    op, at = _taps(row, call), call_at(call)
    y, k = op.y, op.window
    top, bottom = own_rows(y.H, at.part, at.parts)
    weight_bytes = k.KH * k.KW * op.x.C * padded_width(y.C) * 4
    some = at.images if weight_bytes > _L2_WEIGHT_BYTES else max(1, _MANY_PIXELS // (y.H * y.W))
    for first in range(0, at.images, some):
        some_images(row, call, first, min(some, at.images - first))
    clear_pads(at.here, y, op.padded, at.images, top, bottom)
    finish(at.here, y, at.images, top, bottom, op.activation)
