"""Convolutions of conv_fused, on images that lie in cache with their channels last.

Every function gets the address of its operation, a row of numbers (image_table.py). `here` is the address of the
thread's scratch; places count floats from there, X or Y to pixel (0, 0) of the first image. Strides are given for
pixels, rows and images, so a value may lie inside another one: a phase of a transposed convolution writes every second
pixel of every second row, a part of a concatenation its own channels.
"""

from __future__ import annotations

import numpy as np
from numba import types

from onchip.kernels.cpu import image_table as t
from onchip.kernels.cpu.dense import CHUNK, multiply_panel, next_panel, padded_width
from onchip.kernels.cpu.dot import ROWS as DOT_ROWS
from onchip.kernels.cpu.dot import dot_tile
from onchip.kernels.cpu.image_values import SUM_TERMS
from onchip.kernels.cpu.jit import compiled, floats_at, ints_at, linked, multiply_add
from onchip.kernels.pointwise import RELU
from onchip.spec.recipe import Array

_NO_FLOOR, _ZERO, _ONE = np.float32(-np.inf), np.float32(0), np.float32(1)
_ALL = 1 << 40  # the length of an array whose end nobody asks for
_L2_WEIGHT_BYTES = 1 << 20
_MANY_PIXELS = 256  # that use a chunk of weights before the next one


@compiled()
def outputs_reached(k: int, size_in: int, size_out: int, stride: int, before: int) -> tuple[int, int]:
    """First and last + 1 of the outputs whose tap at distance k falls inside the input."""
    low = -((k - before) // stride) if k < before else 0  # the smallest o with o * stride - before + k >= 0
    high = (size_in - 1 + before - k) // stride + 1
    return low, min(size_out, high)


@linked(*(types.int64,) * 4)
def _conv_taps(row: int, here: int, first: int, images: int) -> None:
    op = ints_at(row, t.COLUMNS)
    C_in, K, wide = op[t.C], op[t.KH] * op[t.KW] * op[t.C], padded_width(op[t.N])
    x_pixel, x_row, x_image = op[t.X_PIXEL] * 4, op[t.X_ROW] * 4, op[t.X_IMAGE] * 4
    y_pixel, y_row, y_image = op[t.Y_PIXEL] * 4, op[t.Y_ROW] * 4, op[t.Y_IMAGE] * 4
    x0, y0 = here + op[t.X] * 4 + first * x_image, here + op[t.Y] * 4 + first * y_image
    n = 0
    while n < wide:  # the bias first: a product of no terms
        width = next_panel(wide - n)
        for i in range(images):
            for oy in range(op[t.HO]):
                y = y0 + n * 4 + i * y_image + oy * y_row
                multiply_panel(
                    x0, 0, op[t.WO], op[t.WEIGHT], width, op[t.BIAS] + n * 4, 0, y, y_pixel, 1, 0, 0, _NO_FLOOR
                )
        n += width
    for kh in range(op[t.KH]):
        top, bottom = outputs_reached(kh * op[t.DY], op[t.H], op[t.HO], op[t.SY], op[t.PY])
        for kw in range(op[t.KW]):
            left, right = outputs_reached(kw * op[t.DX], op[t.W], op[t.WO], op[t.SX], op[t.PX])
            if top >= bottom or left >= right:
                continue
            x_tap = (
                x0
                + (top * op[t.SY] - op[t.PY] + kh * op[t.DY]) * x_row
                + (left * op[t.SX] - op[t.PX] + kw * op[t.DX]) * x_pixel
            )
            y_tap = y0 + top * y_row + left * y_pixel
            along = right - left >= images
            for c in range(0, C_in, CHUNK):
                steps = min(CHUNK, C_in - c)
                n = 0
                while n < wide:
                    width = next_panel(wide - n)
                    w = op[t.WEIGHT] + n * K * 4 + ((kh * op[t.KW] + kw) * C_in + c) * width * 4
                    if along:
                        for i in range(images):
                            for oy in range(bottom - top):
                                x = x_tap + c * 4 + i * x_image + oy * op[t.SY] * x_row
                                y = y_tap + n * 4 + i * y_image + oy * y_row
                                multiply_panel(
                                    x,
                                    op[t.SX] * x_pixel,
                                    right - left,
                                    w,
                                    width,
                                    y,
                                    y_pixel,
                                    y,
                                    y_pixel,
                                    1,
                                    0,
                                    steps,
                                    _NO_FLOOR,
                                )
                    else:
                        for oy in range(bottom - top):
                            for ox in range(right - left):
                                x = x_tap + c * 4 + oy * op[t.SY] * x_row + ox * op[t.SX] * x_pixel
                                y = y_tap + n * 4 + oy * y_row + ox * y_pixel
                                multiply_panel(
                                    x, x_image, images, w, width, y, y_image, y, y_image, 1, 0, steps, _NO_FLOOR
                                )
                    n += width


@linked(*(types.int64,) * 3)
def conv_taps(row: int, here: int, images: int) -> None:
    """A convolution tap by tap: each adds its product to the outputs it reaches, so nothing outside is multiplied.

    A chunk of the weights stays in L1 while many pixels pass over it: those of all images where the weights are too
    many for L2, else of a few images that stay there. The rows of the tile run along an image's row, or along the
    images where those are more: small images keep the tile full, too.
    """
    op = ints_at(row, t.COLUMNS)
    weight_bytes = op[t.KH] * op[t.KW] * op[t.C] * padded_width(op[t.N]) * 4
    some = images if weight_bytes > _L2_WEIGHT_BYTES else max(1, _MANY_PIXELS // (op[t.HO] * op[t.WO]))
    for first in range(0, images, some):
        _conv_taps(row, here, first, min(some, images - first))


@linked(*(types.int64,) * 6)
def _conv_windows(row: int, here: int, images: int, ox: int, count: int, down: int) -> None:
    """`count` vectors of outputs, side by side from output ox on in every row; or, with down, one below the other."""
    op = ints_at(row, t.COLUMNS)
    x_pixel, x_row = op[t.SX] * op[t.X_PIXEL], op[t.SY] * op[t.X_ROW]
    wide, K = padded_width(op[t.N]), op[t.KW] * op[t.X_PIXEL] + (op[t.SIDE] - 1) * x_pixel
    x_line, some = op[t.DY] * op[t.X_ROW] * 4, max(1, SUM_TERMS // K)
    x_step, y_step = (
        (x_row * 4, op[t.Y_ROW] * 4) if down else (op[t.SIDE] * x_pixel * 4, op[t.SIDE] * op[t.Y_PIXEL] * 4)
    )
    last = _ZERO if op[t.ACT] == RELU else _NO_FLOOR
    n = 0
    while n < wide:
        width = next_panel(wide - n)
        for h in range(0, op[t.KH], some):
            w = op[t.WEIGHT] + (n * op[t.KH] + h * width) * K * 4
            lines, floor = min(some, op[t.KH] - h), last if h + some >= op[t.KH] else _NO_FLOOR
            for i in range(images):
                for oy in range(1 if down else op[t.HO]):
                    x = op[t.X] + i * op[t.X_IMAGE] + oy * x_row + ox * x_pixel
                    x = here + (x - op[t.PY] * op[t.X_ROW] - op[t.PX] * op[t.X_PIXEL]) * 4 + h * x_line
                    y = here + (op[t.Y] + i * op[t.Y_IMAGE] + oy * op[t.Y_ROW] + ox * op[t.Y_PIXEL] + n) * 4
                    init, init_row = (op[t.BIAS] + n * 4, 0) if h == 0 else (y, y_step)
                    multiply_panel(x, x_step, count, w, width, init, init_row, y, y_step, lines, x_line, K, floor)
        n += width


@compiled()
def _has_nan(where: int, count: int) -> bool:
    line, found = floats_at(where, count), False
    for j in range(count):
        found |= line[j] != line[j]
    return found


@linked(*(types.int64,) * 4)
def _windows_one_by_one(row: int, here: int, i: int, oy: int) -> None:
    """Row oy of the outputs of image i, each from the terms of its own window only, with the bits that
    _conv_windows gives where all numbers are finite: a term of zero changes no sum."""
    op, a = ints_at(row, t.COLUMNS), floats_at(here, _ALL)
    lanes, run, line = op[t.SIDE] * op[t.Y_PIXEL], op[t.KW] * op[t.X_PIXEL], op[t.DY] * op[t.X_ROW]
    K = run + (op[t.SIDE] - 1) * op[t.SX] * op[t.X_PIXEL]  # terms of a line in the packed weights
    w, bias, some = floats_at(op[t.WEIGHT], _ALL), floats_at(op[t.BIAS], op[t.N]), max(1, SUM_TERMS // K)
    floor = _ZERO if op[t.ACT] == RELU else _NO_FLOOR
    x0 = op[t.X] + i * op[t.X_IMAGE] + (oy * op[t.SY] - op[t.PY]) * op[t.X_ROW] - op[t.PX] * op[t.X_PIXEL]
    for ox in range(op[t.WO]):
        y = op[t.Y] + i * op[t.Y_IMAGE] + oy * op[t.Y_ROW] + ox * op[t.Y_PIXEL]
        for n in range(op[t.N]):
            total = bias[n]
            for h in range(0, op[t.KH], some):
                part = _ZERO
                for lines in range(h, min(h + some, op[t.KH])):
                    x = x0 + lines * line + ox * op[t.SX] * op[t.X_PIXEL]
                    for k in range(run):
                        part = multiply_add(a[x + k], w[(lines * K + k) * lanes + n], part)
                total += part
            a[y + n] = floor if total < floor else total
        for n in range(op[t.N], op[t.Y_PIXEL]):
            a[y + n] = _ZERO  # pads


@linked(*(types.int64,) * 3)
def conv_windows(row: int, here: int, images: int) -> None:
    """A convolution with few channels, over an input with a rim of zeros: the lines of a window in one sum.

    Neighbouring windows lie SX pixels apart and overlap, so they are rows of the tile without being copied. A vector
    holds SIDE neighbouring outputs where those have few channels; if their number is no multiple of that, the last
    ones of every row are made by a vector of their own, which makes some again. In such a vector what an output does
    not see meets a weight of zero, and an infinity or a NaN there would be a NaN here: rows with a NaN are made again.
    """
    op = ints_at(row, t.COLUMNS)
    _conv_windows(row, here, images, 0, op[t.WO] // op[t.SIDE], False)
    if op[t.WO] % op[t.SIDE]:
        _conv_windows(row, here, images, op[t.WO] - op[t.SIDE], op[t.HO], True)
    if op[t.SIDE] > 1:
        for i in range(images):
            for oy in range(op[t.HO]):
                if _has_nan(here + (op[t.Y] + i * op[t.Y_IMAGE] + oy * op[t.Y_ROW]) * 4, op[t.WO] * op[t.Y_PIXEL]):
                    _windows_one_by_one(row, here, i, oy)


@compiled()
def _dot(
    x: int, step: int, x_row: int, w: int, H_: int, run: int, bias: int, y: int, y_pixel: int, rows: int, outs: int
) -> None:
    w_out = H_ * run * 4
    if rows == DOT_ROWS:
        if outs == 1:
            dot_tile(x, step, x_row, w, w_out, H_, run, bias, y, y_pixel, DOT_ROWS, 1)
        elif outs == 2:
            dot_tile(x, step, x_row, w, w_out, H_, run, bias, y, y_pixel, DOT_ROWS, 2)
        elif outs == 3:
            dot_tile(x, step, x_row, w, w_out, H_, run, bias, y, y_pixel, DOT_ROWS, 3)
        else:
            dot_tile(x, step, x_row, w, w_out, H_, run, bias, y, y_pixel, DOT_ROWS, 4)
    elif outs == 1:
        dot_tile(x, step, x_row, w, w_out, H_, run, bias, y, y_pixel, 1, 1)
    elif outs == 2:
        dot_tile(x, step, x_row, w, w_out, H_, run, bias, y, y_pixel, 1, 2)
    elif outs == 3:
        dot_tile(x, step, x_row, w, w_out, H_, run, bias, y, y_pixel, 1, 3)
    else:
        dot_tile(x, step, x_row, w, w_out, H_, run, bias, y, y_pixel, 1, 4)


@linked(*(types.int64,) * 3)
def conv_dot(row: int, here: int, images: int) -> None:
    """A convolution with very few outputs over an input with a rim of zeros: sums in lanes."""
    op = ints_at(row, t.COLUMNS)
    run = op[t.KW] * op[t.X_PIXEL]
    step, x_row, y_pixel = op[t.SX] * op[t.X_PIXEL] * 4, op[t.X_ROW] * 4, op[t.Y_PIXEL] * 4
    for i in range(images):
        for oy in range(op[t.HO]):
            x = (
                here
                + (op[t.X] + i * op[t.X_IMAGE] + (oy * op[t.SY] - op[t.PY]) * op[t.X_ROW] - op[t.PX] * op[t.X_PIXEL])
                * 4
            )
            y = here + (op[t.Y] + i * op[t.Y_IMAGE] + oy * op[t.Y_ROW]) * 4
            ox = 0
            while ox < op[t.WO]:
                rows = DOT_ROWS if ox + DOT_ROWS <= op[t.WO] else 1
                _dot(
                    x + ox * step,
                    step,
                    x_row,
                    op[t.WEIGHT],
                    op[t.KH],
                    run,
                    op[t.BIAS],
                    y + ox * y_pixel,
                    y_pixel,
                    rows,
                    op[t.N],
                )
                ox += rows


@compiled()
def _add(to: Array, x: Array, has_x: bool, z: Array, has_z: bool, sign: np.float32) -> None:
    """to = x + sign z, where what is not there counts as 0."""
    if has_x and has_z:
        for c in range(len(to)):
            to[c] = x[c] + sign * z[c]
    elif has_x:
        for c in range(len(to)):
            to[c] = x[c]
    elif has_z:
        for c in range(len(to)):
            to[c] = sign * z[c]
    else:
        for c in range(len(to)):
            to[c] = _ZERO


@linked(*(types.int64,) * 3)
def pairs_in(row: int, here: int, images: int) -> None:
    """What the products for two neighbouring outputs multiply (_pairs in image_products.py): KW + 1 planes of C.

    d0, d1, ... are the pixels that the pair's windows begin with; what lies outside is 0.
    """
    op, a = ints_at(row, t.COLUMNS), floats_at(here, _ALL)
    taps = op[t.KW]
    plane = op[t.Y_PIXEL] // (taps + 1)
    for i in range(images):
        for iy in range(op[t.HO]):
            for j in range(op[t.WO]):
                ix = 2 * j - op[t.PX]
                x = op[t.X] + i * op[t.X_IMAGE] + iy * op[t.X_ROW] + ix * op[t.X_PIXEL]
                y = op[t.Y] + i * op[t.Y_IMAGE] + iy * op[t.Y_ROW] + j * op[t.Y_PIXEL]
                in0, in1, in2, in3 = (
                    0 <= ix < op[t.W],
                    0 <= ix + 1 < op[t.W],
                    0 <= ix + 2 < op[t.W],
                    0 <= ix + 3 < op[t.W],
                )
                d0, d1 = a[x : x + op[t.C]], a[x + op[t.X_PIXEL] : x + op[t.X_PIXEL] + op[t.C]]
                d2 = a[x + 2 * op[t.X_PIXEL] : x + 2 * op[t.X_PIXEL] + op[t.C]]
                t0, t1 = a[y : y + op[t.C]], a[y + plane : y + plane + op[t.C]]
                t2 = a[y + 2 * plane : y + 2 * plane + op[t.C]]
                if taps == 3:
                    d3 = a[x + 3 * op[t.X_PIXEL] : x + 3 * op[t.X_PIXEL] + op[t.C]]
                    _add(t0, d0, in0, d2, in2, -_ONE)
                    _add(t1, d1, in1, d2, in2, _ONE)
                    _add(t2, d2, in2, d1, in1, -_ONE)
                    _add(a[y + 3 * plane : y + 3 * plane + op[t.C]], d1, in1, d3, in3, -_ONE)
                else:
                    _add(t0, d0, in0, d1, in1, -_ONE)
                    _add(t1, d1, in1, d1, False, _ONE)
                    _add(t2, d1, in1, d2, in2, -_ONE)


@linked(*(types.int64,) * 3)
def pairs_out(row: int, here: int, images: int) -> None:
    """The two outputs of each pair from its KW + 1 products."""
    op, a = ints_at(row, t.COLUMNS), floats_at(here, _ALL)
    taps = op[t.KW]
    plane = op[t.X_PIXEL] // (taps + 1)
    for i in range(images):
        for oy in range(op[t.HO]):
            for ox in range(op[t.WO]):
                x = op[t.X] + i * op[t.X_IMAGE] + oy * op[t.X_ROW] + ox // 2 * op[t.X_PIXEL]
                y = op[t.Y] + i * op[t.Y_IMAGE] + oy * op[t.Y_ROW] + ox * op[t.Y_PIXEL]
                out = a[y : y + op[t.N]]
                m0, m1 = a[x : x + op[t.N]], a[x + plane : x + plane + op[t.N]]
                m2 = a[x + 2 * plane : x + 2 * plane + op[t.N]]
                m3 = a[x + taps * plane : x + taps * plane + op[t.N]]
                if taps == 3:
                    if ox % 2 == 0:
                        for n in range(op[t.N]):
                            out[n] = m0[n] + m1[n] + m2[n]
                    else:
                        for n in range(op[t.N]):
                            out[n] = m1[n] - m2[n] - m3[n]
                elif ox % 2 == 0:
                    for n in range(op[t.N]):
                        out[n] = m0[n] + m1[n]
                else:
                    for n in range(op[t.N]):
                        out[n] = m1[n] - m2[n]
