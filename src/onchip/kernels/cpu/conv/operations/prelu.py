"""Slope, an operation of conv_fused: a PReLU, numbers below zero times the slope of their channel, in place."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onchip.kernels.cpu.compiler.jit import floats_at
from onchip.kernels.cpu.conv.lowering import Lowering, Value
from onchip.kernels.cpu.conv.operation import Activated, call_at, fields_of, own_rows, pixel_at, runs
from onchip.kernels.cpu.conv.operations.combine import Copy, constant_of
from onchip.kernels.cpu.conv.values import UnsupportedError
from onchip.network.graph import Node
from onchip.network.recipe import Recipe

_ZERO = np.float32(0)


@dataclass(frozen=True, eq=False, kw_only=True)
class Slope(Activated):
    """Of y: slopes of a row of pixels, with what lies between two of them, which nobody reads: a row is one loop."""

    w: Recipe
    next_row: int  # floats from the slopes of a row to those of the next; 0: all rows have the same


def lower_slope(to: Lowering, node: Node) -> None:
    if "constant" not in node.weights:
        raise UnsupportedError("a PReLU by a value")
    if to.joins(node):
        y = to.image(node.inputs[0])
    else:
        to.make(node, Copy, x=to.image(node.inputs[0]))
        y = to.values[node.name].view
    w, next_row = constant_of(to, node, y.step[1] * y.store.pixel)
    to.emit(Slope(y=y, w=w, next_row=next_row))
    to.values[node.name] = Value(y, None)


_slope = fields_of(Slope)


@runs(Slope)
def slope(row: int, call: int) -> None:
    op, at = _slope(row, call), call_at(call)
    y = op.y
    length = (y.W - 1) * y.pixel + y.C
    top, bottom = own_rows(y.H, at.part, at.parts)
    for i in range(at.images):
        for oy in range(top, bottom):
            line = floats_at(at.here + pixel_at(y, i, oy, 0) * 4, length)
            slopes = floats_at(op.w + oy * op.next_row * 4, length)
            for n in range(length):
                line[n] = line[n] * slopes[n] if line[n] < _ZERO else line[n]
