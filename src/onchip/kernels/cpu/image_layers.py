"""Pools, sums, products, activations of conv_fused: what it does to images beside convolving them (image_conv.py)."""

from __future__ import annotations

import numpy as np
from numba import types

from onchip.kernels.cpu import image_table as t
from onchip.kernels.cpu.activation import activate
from onchip.kernels.cpu.image_conv import outputs_reached
from onchip.kernels.cpu.jit import compiled, floats_at, ints_at, linked
from onchip.spec.recipe import Array

_NO_FLOOR, _ZERO = np.float32(-np.inf), np.float32(0)
_ALL = 1 << 40  # the length of an array whose end nobody asks for
_FEW = 16  # pixels whose sum is taken before it joins the total of a mean


@compiled()
def _join(to: Array, given: Array, is_first: bool, largest: bool) -> None:
    """to = given, or the larger of both (a NaN wins), or their sum."""
    if is_first:
        for c in range(len(to)):
            to[c] = given[c]
    elif largest:
        for c in range(len(to)):
            wins = (given[c] > to[c]) | (given[c] != given[c])  # no `or`: a branch would keep the loop out of vectors
            to[c] = given[c] if wins else to[c]
    else:
        for c in range(len(to)):
            to[c] += given[c]


@compiled()
def _pool_share(op: Array, oy: int, ox: int) -> np.float32:
    """How many numbers a mean is taken over: those inside, or, with OTHER set, those inside the padded input."""
    if op[t.OTHER]:
        tall = min(op[t.KH], (op[t.O_PIXEL] - oy * op[t.SY] + op[t.DY] - 1) // op[t.DY])
        return np.float32(tall * min(op[t.KW], (op[t.O_ROW] - ox * op[t.SX] + op[t.DX] - 1) // op[t.DX]))
    tall, wide = 0, 0
    for kh in range(op[t.KH]):
        tall += 0 <= oy * op[t.SY] - op[t.PY] + kh * op[t.DY] < op[t.H]
    for kw in range(op[t.KW]):
        wide += 0 <= ox * op[t.SX] - op[t.PX] + kw * op[t.DX] < op[t.W]
    return np.float32(tall * wide)


@linked(*(types.int64,) * 4)
def pool(row: int, here: int, images: int, partial: int) -> None:
    """MAX_POOL or AVG_POOL: the lines of a window first, a whole row of the image at a time, then its pixels.

    With OTHER set, a mean counts pads: of an input O_PIXEL high and O_ROW wide in all.
    partial  where W + WO pixels of the input fit; whole pixels, padding included, make long loops
    """
    op, a = ints_at(row, t.COLUMNS), floats_at(here, _ALL)
    largest, pixel = op[t.CODE] == t.MAX_POOL, op[t.X_PIXEL]
    joined = a[partial : partial + op[t.W] * pixel]
    made = a[partial + op[t.W] * pixel : partial + (op[t.W] + op[t.WO]) * pixel]
    for i in range(images):
        for oy in range(op[t.HO]):
            tall = 0
            for kh in range(op[t.KH]):
                iy = oy * op[t.SY] - op[t.PY] + kh * op[t.DY]
                if 0 <= iy < op[t.H]:
                    x = op[t.X] + i * op[t.X_IMAGE] + iy * op[t.X_ROW]
                    _join(joined, a[x : x + op[t.W] * pixel], tall == 0, largest)
                    tall += 1
            for j in range(op[t.WO] * pixel):
                made[j] = _NO_FLOOR if largest else _ZERO
            for kw in range(op[t.KW] if tall > 0 else 0):  # a dilated window may lie on pads alone
                left, right = outputs_reached(kw * op[t.DX], op[t.W], op[t.WO], op[t.SX], op[t.PX])
                for ox in range(left, right):
                    at = (ox * op[t.SX] - op[t.PX] + kw * op[t.DX]) * pixel
                    _join(made[ox * pixel : (ox + 1) * pixel], joined[at : at + pixel], False, largest)
            for ox in range(op[t.WO]):
                y = op[t.Y] + i * op[t.Y_IMAGE] + oy * op[t.Y_ROW] + ox * op[t.Y_PIXEL]
                out, given = a[y : y + op[t.C]], made[ox * pixel : ox * pixel + op[t.C]]
                if largest:
                    for c in range(op[t.C]):
                        out[c] = given[c]
                else:
                    share = _pool_share(op, oy, ox)
                    for c in range(op[t.C]):
                        out[c] = given[c] / share


@linked(*(types.int64,) * 4)
def global_pool(row: int, here: int, images: int, partial: int) -> None:
    """GLOBAL_MAX or GLOBAL_MEAN over all pixels; sums of a few pixels first, so that long ones keep their digits.

    partial  where C numbers fit in a
    """
    op, a = ints_at(row, t.COLUMNS), floats_at(here, _ALL)
    largest = op[t.CODE] == t.GLOBAL_MAX
    few = a[partial : partial + op[t.C]]
    for i in range(images):
        y = op[t.Y] + i * op[t.Y_IMAGE]
        out = a[y : y + op[t.C]]
        for q in range(op[t.H] * op[t.W]):
            x = op[t.X] + i * op[t.X_IMAGE] + (q // op[t.W]) * op[t.X_ROW] + (q % op[t.W]) * op[t.X_PIXEL]
            given = a[x : x + op[t.C]]
            if largest:
                for c in range(op[t.C]):
                    wins = (q == 0) | (given[c] > out[c]) | (given[c] != given[c])
                    out[c] = given[c] if wins else out[c]
            else:
                if q % _FEW == 0:
                    for c in range(op[t.C]):
                        out[c] = few[c] + out[c] if q > 0 else _ZERO
                        few[c] = _ZERO
                for c in range(op[t.C]):
                    few[c] += given[c]
        if not largest:
            share = np.float32(op[t.H] * op[t.W])
            for c in range(op[t.C]):
                out[c] = (out[c] + few[c]) / share


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
