"""Slope, an operation of conv_fused: a PReLU in place; negative elements are multiplied by a slope."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onchip.kernels.cpu.compiler.jit import floats_at
from onchip.kernels.cpu.conv.lowering import Lowering, Value
from onchip.kernels.cpu.conv.operation import Activated, call_at, fields_of, pixel_at, row_span, runs
from onchip.kernels.cpu.conv.operations.combine import Copy, constant_of
from onchip.kernels.cpu.conv.values import UnsupportedError
from onchip.network.graph import Node
from onchip.network.recipe import Recipe

_ZERO = np.float32(0)


@dataclass(frozen=True, eq=False, kw_only=True)
class Slope(Activated):
    """w holds the slopes of a row of pixels at the pixel stride of y: a row is one loop."""

    w: Recipe
    row_stride: int  # row stride of w in floats; 0: the same slopes for all rows


def lower_prelu(to: Lowering, node: Node) -> None:
    if "constant" not in node.weights:
        raise UnsupportedError("a PReLU whose slopes are not a weight")
    if to.is_in_place(node):
        y = to.image(node.inputs[0])
    else:
        to.make(node, Copy, x=to.image(node.inputs[0]))
        y = to.values[node.name].view
    w, row_stride = constant_of(to, node, y.step[1] * y.store.pixel)
    to.emit(Slope(y=y, w=w, row_stride=row_stride))
    to.values[node.name] = Value(y, None)


_slope = fields_of(Slope)


@runs(Slope)
def slope(row: int, call: int) -> None:
    op, args = _slope(row, call), call_at(call)
    y = op.y
    length = (y.W - 1) * y.pixel + y.C
    top, bottom = row_span(y.H, args.part, args.parts)
    for i in range(args.images):
        for oy in range(top, bottom):
            line = floats_at(args.base + pixel_at(y, i, oy, 0) * 4, length)
            slopes = floats_at(op.w + oy * op.row_stride * 4, length)
            for n in range(length):
                line[n] = line[n] * slopes[n] if line[n] < _ZERO else line[n]
