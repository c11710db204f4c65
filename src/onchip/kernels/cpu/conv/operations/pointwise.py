"""Pointwise, an operation of conv_fused: a 1x1 convolution, a gemm with pixels as rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onchip.kernels.cpu.conv.lowering import Lowering, window_of
from onchip.kernels.cpu.conv.operation import (
    Activated,
    call_at,
    clear_pads,
    fields_of,
    finish,
    pixel_at,
    row_span,
    runs,
)
from onchip.kernels.cpu.conv.values import View
from onchip.kernels.cpu.conv.weights import packed_taps
from onchip.kernels.cpu.microkernels import tile
from onchip.kernels.cpu.microkernels.dense import dense, padded_width
from onchip.kernels.pointwise import RELU
from onchip.network.graph import Node
from onchip.network.recipe import Recipe

_NO_FLOOR, _ZERO = np.float32(-np.inf), np.float32(0)


@dataclass(frozen=True, eq=False, kw_only=True)
class Pointwise(Activated):
    order = tile.ORDER
    x: View
    SY: int
    SX: int
    w: Recipe
    b: Recipe
    padded: int = 0  # channels per pixel of y with pads, if pads must be zero; else 0

    def flop(self) -> int:
        N, HO, WO = self.y.sizes
        return 2 * self.x.sizes[0] * N * HO * WO


def is_pointwise(to: Lowering, node: Node) -> bool:
    window = window_of(node, to.net.weights[node.weights["weight"]].shape[2:])
    return window.KH == window.KW == 1 and not any(node.layer.attributes()["pads"])


def lower_pointwise(to: Lowering, node: Node, x: View) -> None:
    N, C, *kernel = to.net.weights[node.weights["weight"]].shape
    window = window_of(node, tuple(kernel))
    w, b = packed_taps(node, 1, 1, C, 1, N, 1)
    to.make(node, Pointwise, x=x, SY=window.SY, SX=window.SX, w=w, b=b)


_pointwise = fields_of(Pointwise)


@runs(Pointwise)
def pointwise(row: int, call: int) -> None:
    """One gemm for all rows of pixels if they are contiguous, else one per row."""
    op, args = _pointwise(row, call), call_at(call)
    x, y = op.x, op.y
    top, bottom = row_span(y.H, args.part, args.parts)
    if top >= bottom:
        return
    floor = _ZERO if op.activation == RELU else _NO_FLOOR
    is_contiguous = op.SY == 1 and op.SX == 1 and x.row == x.W * x.pixel and y.row == y.W * y.pixel
    gemm_rows = bottom - top if is_contiguous else 1
    for i in range(args.images):
        for oy in range(top, bottom, gemm_rows):
            dense(
                args.base + pixel_at(x, i, oy * op.SY, 0) * 4, op.SX * x.pixel * 4, gemm_rows * y.W, op.w, x.C,
                padded_width(y.C), op.b, args.base + pixel_at(y, i, oy, 0) * 4, y.pixel * 4, floor,
            )  # fmt: skip
    clear_pads(args.base, y, op.padded, args.images, top, bottom)
    if op.activation != RELU:
        finish(args.base, y, args.images, top, bottom, op.activation)
