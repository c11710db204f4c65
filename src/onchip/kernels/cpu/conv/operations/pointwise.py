"""Pointwise, an operation of conv_fused: a convolution of one tap, which is a product of pixels and a matrix."""

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
    own_rows,
    pixel_at,
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
    padded: int = 0  # what a pixel of y is padded to, where those pads must be zero

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
    """The pixels of a row are rows of the product; where rows follow each other without a gap, all pixels are."""
    op, at = _pointwise(row, call), call_at(call)
    x, y = op.x, op.y
    top, bottom = own_rows(y.H, at.part, at.parts)
    if top >= bottom:
        return
    floor = _ZERO if op.activation == RELU else _NO_FLOOR
    has_no_gap = op.SY == 1 and op.SX == 1 and x.row == x.W * x.pixel and y.row == y.W * y.pixel
    lines = bottom - top if has_no_gap else 1
    for i in range(at.images):
        for oy in range(top, bottom, lines):
            dense(
                at.here + pixel_at(x, i, oy * op.SY, 0) * 4, op.SX * x.pixel * 4, lines * y.W, op.w, x.C,
                padded_width(y.C), op.b, at.here + pixel_at(y, i, oy, 0) * 4, y.pixel * 4, floor,
            )  # fmt: skip
    clear_pads(at.here, y, op.padded, at.images, top, bottom)
    if op.activation != RELU:
        finish(at.here, y, at.images, top, bottom, op.activation)
