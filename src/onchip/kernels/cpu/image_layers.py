"""Sums, products, activations of conv_fused: what it does to images beside convolving and pooling them."""

from __future__ import annotations

import numpy as np
from numba import types

from onchip.kernels.cpu import image_table as t
from onchip.kernels.cpu.activation import activate
from onchip.kernels.cpu.jit import floats_at, ints_at, linked

_ZERO = np.float32(0)
_ALL = 1 << 40  # the length of an array whose end nobody asks for


@linked(*(types.int64,) * 3)
def combine(row: int, here: int, images: int) -> None:
    """ADD, MUL: with another value; SCALE: by a factor and a shift a channel (at WEIGHT and BIAS); COPY."""
    op, a = ints_at(row, t.COLUMNS), floats_at(here, _ALL)
    code = op[t.CODE]
    for i in range(images):
        for oy in range(op[t.HO]):
            for ox in range(op[t.WO]):
                x = op[t.X] + i * op[t.X_IMAGE] + oy * op[t.X_ROW] + ox * op[t.X_PIXEL]
                y = op[t.Y] + i * op[t.Y_IMAGE] + oy * op[t.Y_ROW] + ox * op[t.Y_PIXEL]
                given, out = a[x : x + op[t.C]], a[y : y + op[t.C]]
                if code == t.COPY:
                    for c in range(op[t.C]):
                        out[c] = given[c]
                elif code == t.SCALE:
                    factor, shift = floats_at(op[t.WEIGHT], op[t.C]), floats_at(op[t.BIAS], op[t.C])
                    for c in range(op[t.C]):
                        out[c] = given[c] * factor[c] + shift[c]
                else:
                    z = op[t.OTHER] + i * op[t.O_IMAGE] + oy * op[t.O_ROW] + ox * op[t.O_PIXEL]
                    other = a[z : z + op[t.C]]
                    if code == t.ADD:
                        for c in range(op[t.C]):
                            out[c] = given[c] + other[c]
                    else:
                        for c in range(op[t.C]):
                            out[c] = given[c] * other[c]


@linked(*(types.int64,) * 3)
def clear_pads(row: int, here: int, images: int) -> None:
    """Zero what pads the channels of an operation's output: an infinity times a zero weight would be a NaN there."""
    op, a = ints_at(row, t.COLUMNS), floats_at(here, _ALL)
    if op[t.CODE] == t.DENSE:  # maybe some of its columns, which need not begin with a pixel
        for i in range(images):
            columns = a[op[t.Y] + i * op[t.Y_IMAGE] :]
            for c in range(op[t.KW]):
                if (op[t.PX] + c) % op[t.PADDED] >= op[t.SX]:
                    columns[c] = _ZERO
        return
    for i in range(images):
        for oy in range(op[t.HO]):
            for ox in range(op[t.WO]):
                y = op[t.Y] + i * op[t.Y_IMAGE] + oy * op[t.Y_ROW] + ox * op[t.Y_PIXEL]
                pads = a[y + op[t.N] : y + op[t.PADDED]]
                for c in range(len(pads)):
                    pads[c] = _ZERO


@linked(*(types.int64,) * 3)
def finish(row: int, here: int, images: int) -> None:
    """The activation of an operation's output, in place, a row of pixels at a time.

    Pixels follow each other, and what pads them is activated with them: long loops cost less than exact ones.
    """
    op = ints_at(row, t.COLUMNS)
    for i in range(images):
        for oy in range(op[t.HO]):
            y = here + (op[t.Y] + i * op[t.Y_IMAGE] + oy * op[t.Y_ROW]) * 4
            activate(y, 1, (op[t.WO] - 1) * op[t.Y_PIXEL] + op[t.N], 0, op[t.ACT])
