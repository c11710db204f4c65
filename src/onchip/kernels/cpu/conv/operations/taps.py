"""Taps, an operation of conv_fused: a convolution, or a transposed one, as one gemm per tap."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onchip.kernels.cpu.compiler.jit import compiled, linked
from onchip.kernels.cpu.compiler.late_numba import types
from onchip.kernels.cpu.conv.lowering import Lowering, window_of
from onchip.kernels.cpu.conv.operation import Activated, Window, call_at, clear_pads, fields_of, finish, row_span, runs
from onchip.kernels.cpu.conv.values import View
from onchip.kernels.cpu.conv.weights import packed_taps
from onchip.kernels.cpu.microkernels import tile
from onchip.kernels.cpu.microkernels.dense import CHUNK, multiply_panel, next_panel, padded_width
from onchip.kernels.cpu.microkernels.tile import padded
from onchip.network.graph import Node
from onchip.network.recipe import Recipe

_NO_FLOOR = np.float32(-np.inf)
_L2_WEIGHT_BYTES = 1 << 20
_MANY_PIXELS = 256  # per chunk of weights


@dataclass(frozen=True, eq=False, kw_only=True)
class Taps(Activated):
    order = f"taps in order, {tile.ORDER}"
    x: View
    window: Window
    w: Recipe
    b: Recipe
    padded: int = 0  # padded channels per pixel of y, if the pads must be zero
    is_transposed: bool = False

    def flop(self) -> int:
        (C, *sizes_in), (N, *sizes_out), k = self.x.sizes, self.y.sizes, self.window
        if self.is_transposed:
            sizes_in, sizes_out, N = sizes_out, sizes_in, padded(N)  # in whole vectors
        lines = _tap_pairs(k.KH, sizes_in[0], sizes_out[0], k.SY, k.PY, k.DY)
        return 2 * C * N * lines * _tap_pairs(k.KW, sizes_in[1], sizes_out[1], k.SX, k.PX, k.DX)

    def moves(self) -> int:
        if not self.is_transposed:
            return super().moves()
        # Each tap reads and writes its outputs in L1: half the cost of other moves.
        _, H, W = self.x.sizes
        return super().moves() + self.window.KH * self.window.KW * H * W * padded(self.y.sizes[0])


def lower_taps(to: Lowering, node: Node, x: View) -> None:
    N, C, *kernel = to.net.weights[node.weights["weight"]].shape
    window = window_of(node, tuple(kernel))
    w, b = packed_taps(node, window.KH, window.KW, C, 1, N, window.SX)
    to.make(node, Taps, x=x, window=window, w=w, b=b)


def _tap_pairs(taps: int, size_in: int, size_out: int, stride: int, before: int, dilation: int) -> int:
    """Number of (output, tap) pairs inside the input, along one axis; transposed: of (input, tap) inside the output."""
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
def taps_of_images(row: int, call: int, first: int, images: int) -> None:
    op, args = _taps(row, call), call_at(call)
    x, y, k = op.x, op.y, op.window
    C, K, wide = x.C, k.KH * k.KW * x.C, padded_width(y.C)
    x_pixel, x_row, x_image = x.pixel * 4, x.row * 4, x.image * 4
    y_pixel, y_row, y_image = y.pixel * 4, y.row * 4, y.image * 4
    x0, y0 = args.base + x.offset * 4 + first * x_image, args.base + y.offset * 4 + first * y_image
    first_row, last_row = row_span(y.H, args.part, args.parts)
    n = 0
    while n < wide:  # the bias first: a gemm with K = 0
        width = next_panel(wide - n)
        for i in range(images):
            for oy in range(first_row, last_row):
                dst = y0 + n * 4 + i * y_image + oy * y_row
                multiply_panel(x0, 0, y.W, op.w, width, op.b + n * 4, 0, dst, y_pixel, 1, 0, 0, _NO_FLOOR)
        n += width
    x_line, x_step, y_line, y_step = k.SY * x_row, k.SX * x_pixel, y_row, y_pixel
    if op.is_transposed:
        x_line, x_step, y_line, y_step = x_row, x_pixel, k.SY * y_row, k.SX * y_pixel
    for kh in range(k.KH):
        offset_y = kh * k.DY
        top, bottom = _outputs_reached(offset_y, x.H, y.H, k.SY, k.PY)
        top, bottom = max(top, first_row), min(bottom, last_row)
        if op.is_transposed:
            top, bottom = _outputs_reached(offset_y - first_row, last_row - first_row, x.H, k.SY, k.PY)
        for kw in range(k.KW):
            offset_x = kw * k.DX
            left, right = _outputs_reached(offset_x, x.W, y.W, k.SX, k.PX)
            if op.is_transposed:
                left, right = _outputs_reached(offset_x, y.W, x.W, k.SX, k.PX)
            if top >= bottom or left >= right:
                continue
            x_tap, y_tap = x0 + top * x_line + left * x_step, y0 + top * y_line + left * y_step
            if op.is_transposed:
                y_tap += (offset_y - k.PY) * y_row + (offset_x - k.PX) * y_pixel
            else:
                x_tap += (offset_y - k.PY) * x_row + (offset_x - k.PX) * x_pixel
            for c in range(0, C, CHUNK):
                steps = min(CHUNK, C - c)
                n = 0
                while n < wide:
                    width = next_panel(wide - n)
                    w = op.w + n * K * 4 + ((kh * k.KW + kw) * C + c) * width * 4
                    if right - left >= images:
                        for i in range(images):
                            for line in range(bottom - top):
                                src = x_tap + c * 4 + i * x_image + line * x_line
                                dst = y_tap + n * 4 + i * y_image + line * y_line
                                multiply_panel(
                                    src, x_step, right - left, w, width, dst, y_step, dst, y_step, 1, 0, steps,
                                    _NO_FLOOR,
                                )  # fmt: skip
                    else:
                        for line in range(bottom - top):
                            for pixel in range(right - left):
                                src = x_tap + c * 4 + line * x_line + pixel * x_step
                                dst = y_tap + n * 4 + line * y_line + pixel * y_step
                                multiply_panel(
                                    src, x_image, images, w, width, dst, y_image, dst, y_image, 1, 0, steps, _NO_FLOOR
                                )
                    n += width


@runs(Taps)
def conv_taps(row: int, call: int) -> None:
    """Each tap accumulates into the outputs it reaches; pads are not multiplied.

    A chunk of weights stays in L1 while many pixels use it: those of all images if the weights exceed L2, else of a few
    images that stay in L2. Gemm rows are the pixels of an image row, or the same pixel of all images if there are more
    of those: small images fill the register tile, too.
    """
    op, args = _taps(row, call), call_at(call)
    y, k = op.y, op.window
    top, bottom = row_span(y.H, args.part, args.parts)
    weight_bytes = k.KH * k.KW * op.x.C * padded_width(y.C) * 4
    images = args.images if weight_bytes > _L2_WEIGHT_BYTES else max(1, _MANY_PIXELS // (y.H * y.W))
    for first in range(0, args.images, images):
        taps_of_images(row, call, first, min(images, args.images - first))
    clear_pads(args.base, y, op.padded, args.images, top, bottom)
    finish(args.base, y, args.images, top, bottom, op.activation)
