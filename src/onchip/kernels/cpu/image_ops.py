"""The operations of conv_fused on images that lie in cache, channels last: (image, row, pixel, channel).

An operation is a row of numbers (the columns below); every function gets its address. `here` is the address of the
thread's scratch; places count floats from there, X or Y to pixel (0, 0) of the first image. Strides are given for
pixels, rows and images, so a value may lie inside another one: a phase of a transposed convolution writes every second
pixel of every second row, a part of a concatenation its own channels.
"""

from __future__ import annotations

import numba
import numpy as np
from numba import types

from onchip.kernels.cpu.activation import IDENTITY, RELU, activate, normalise
from onchip.kernels.cpu.dense import CHUNK, dense, multiply_panel, next_panel, padded_width
from onchip.kernels.cpu.dot import ROWS as DOT_ROWS
from onchip.kernels.cpu.dot import dot_tile
from onchip.kernels.cpu.image_table import (
    ACT,
    ACTIVATE,
    ADD,
    AVG_POOL,
    BIAS,
    CODE,
    COLUMNS,
    COPY,
    DENSE,
    DOT,
    DX,
    DY,
    GLOBAL_MAX,
    GLOBAL_MEAN,
    GROUP,
    HO,
    KH,
    KW,
    LOAD,
    LOOK_UP,
    MAX_POOL,
    NORMALISE,
    O_IMAGE,
    O_PIXEL,
    O_ROW,
    OTHER,
    PAIRS_IN,
    PAIRS_OUT,
    PX,
    PY,
    SCALE,
    STORE,
    STORE_PIXELS,
    STORE_ROWS,
    SX,
    SY,
    TAPS,
    WEIGHT,
    WINDOWS,
    WO,
    X_IMAGE,
    X_PIXEL,
    X_ROW,
    Y_IMAGE,
    Y_PIXEL,
    Y_ROW,
    C,
    H,
    N,
    W,
    X,
    Y,
)  # fmt: skip
from onchip.kernels.cpu.jit import address, bytes_at, compiled, floats_at, ints_at, linked, take_ticket
from onchip.kernels.cpu.tile import PANEL
from onchip.spec.recipe import Array

_NO_FLOOR, _ZERO, _ONE = np.float32(-np.inf), np.float32(0), np.float32(1)
_ALL = 1 << 40  # the length of an array whose end nobody asks for
_L2_WEIGHT_BYTES = 1 << 20
_MANY_PIXELS = 256  # that use a chunk of weights before the next one
_SUM_TERMS = 256  # of a sum in registers: longer ones are added up in parts, which keeps their digits
_FEW = 16  # pixels whose sum is taken before it joins the total of a mean


@compiled()
def _outputs_reached(k: int, size_in: int, size_out: int, stride: int, before: int) -> tuple[int, int]:
    """First and last + 1 of the outputs whose tap at distance k falls inside the input."""
    low = -((k - before) // stride) if k < before else 0  # the smallest o with o * stride - before + k >= 0
    high = (size_in - 1 + before - k) // stride + 1
    return low, min(size_out, high)


@linked(*(types.int64,) * 4)
def _conv_taps(row: int, here: int, first: int, images: int) -> None:
    op = ints_at(row, COLUMNS)
    C_in, K, wide = op[C], op[KH] * op[KW] * op[C], padded_width(op[N])
    x_pixel, x_row, x_image = op[X_PIXEL] * 4, op[X_ROW] * 4, op[X_IMAGE] * 4
    y_pixel, y_row, y_image = op[Y_PIXEL] * 4, op[Y_ROW] * 4, op[Y_IMAGE] * 4
    x0, y0 = here + op[X] * 4 + first * x_image, here + op[Y] * 4 + first * y_image
    n = 0
    while n < wide:  # the bias first: a product of no terms
        width = next_panel(wide - n)
        for i in range(images):
            for oy in range(op[HO]):
                y = y0 + n * 4 + i * y_image + oy * y_row
                multiply_panel(x0, 0, op[WO], op[WEIGHT], width, op[BIAS] + n * 4, 0, y, y_pixel, 1, 0, 0, _NO_FLOOR)
        n += width
    for kh in range(op[KH]):
        top, bottom = _outputs_reached(kh * op[DY], op[H], op[HO], op[SY], op[PY])
        for kw in range(op[KW]):
            left, right = _outputs_reached(kw * op[DX], op[W], op[WO], op[SX], op[PX])
            if top >= bottom or left >= right:
                continue
            x_tap = (
                x0 + (top * op[SY] - op[PY] + kh * op[DY]) * x_row + (left * op[SX] - op[PX] + kw * op[DX]) * x_pixel
            )
            y_tap = y0 + top * y_row + left * y_pixel
            along = right - left >= images
            for c in range(0, C_in, CHUNK):
                steps = min(CHUNK, C_in - c)
                n = 0
                while n < wide:
                    width = next_panel(wide - n)
                    w = op[WEIGHT] + n * K * 4 + ((kh * op[KW] + kw) * C_in + c) * width * 4
                    if along:
                        for i in range(images):
                            for oy in range(bottom - top):
                                x = x_tap + c * 4 + i * x_image + oy * op[SY] * x_row
                                y = y_tap + n * 4 + i * y_image + oy * y_row
                                multiply_panel(
                                    x,
                                    op[SX] * x_pixel,
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
                                x = x_tap + c * 4 + oy * op[SY] * x_row + ox * op[SX] * x_pixel
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
    op = ints_at(row, COLUMNS)
    weight_bytes = op[KH] * op[KW] * op[C] * padded_width(op[N]) * 4
    some = images if weight_bytes > _L2_WEIGHT_BYTES else max(1, _MANY_PIXELS // (op[HO] * op[WO]))
    for first in range(0, images, some):
        _conv_taps(row, here, first, min(some, images - first))


@linked(*(types.int64,) * 3)
def conv_windows(row: int, here: int, images: int) -> None:
    """A convolution with few channels, over an input with a rim of zeros: the lines of a window in one sum.

    Neighbouring windows lie SX pixels apart and overlap, so they are rows of the tile without being copied.
    """
    op = ints_at(row, COLUMNS)
    wide, K = padded_width(op[N]), op[KW] * op[X_PIXEL]
    x_line, x_step, y_pixel = op[DY] * op[X_ROW] * 4, op[SX] * op[X_PIXEL] * 4, op[Y_PIXEL] * 4
    some = max(1, _SUM_TERMS // K)
    last = _ZERO if op[ACT] == RELU else _NO_FLOOR
    n = 0
    while n < wide:
        width = next_panel(wide - n)
        for h in range(0, op[KH], some):
            w = op[WEIGHT] + (n * op[KH] + h * width) * K * 4
            lines, floor = min(some, op[KH] - h), last if h + some >= op[KH] else _NO_FLOOR
            for i in range(images):
                for oy in range(op[HO]):
                    top = oy * op[SY] - op[PY]
                    x = here + (op[X] + i * op[X_IMAGE] + top * op[X_ROW] - op[PX] * op[X_PIXEL]) * 4 + h * x_line
                    y = here + (op[Y] + i * op[Y_IMAGE] + oy * op[Y_ROW] + n) * 4
                    init, init_row = (op[BIAS] + n * 4, 0) if h == 0 else (y, y_pixel)
                    multiply_panel(x, x_step, op[WO], w, width, init, init_row, y, y_pixel, lines, x_line, K, floor)
        n += width


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
    op = ints_at(row, COLUMNS)
    run = op[KW] * op[X_PIXEL]
    step, x_row, y_pixel = op[SX] * op[X_PIXEL] * 4, op[X_ROW] * 4, op[Y_PIXEL] * 4
    for i in range(images):
        for oy in range(op[HO]):
            x = here + (op[X] + i * op[X_IMAGE] + (oy * op[SY] - op[PY]) * op[X_ROW] - op[PX] * op[X_PIXEL]) * 4
            y = here + (op[Y] + i * op[Y_IMAGE] + oy * op[Y_ROW]) * 4
            ox = 0
            while ox < op[WO]:
                rows = DOT_ROWS if ox + DOT_ROWS <= op[WO] else 1
                _dot(
                    x + ox * step,
                    step,
                    x_row,
                    op[WEIGHT],
                    op[KH],
                    run,
                    op[BIAS],
                    y + ox * y_pixel,
                    y_pixel,
                    rows,
                    op[N],
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
    """What the products for two neighbouring outputs multiply (image_program.pairs): KW + 1 planes of C a pair.

    d0, d1, ... are the pixels that the pair's windows begin with; what lies outside is 0.
    """
    op, a = ints_at(row, COLUMNS), floats_at(here, _ALL)
    taps = op[KW]
    plane = op[Y_PIXEL] // (taps + 1)
    for i in range(images):
        for iy in range(op[HO]):
            for j in range(op[WO]):
                ix = 2 * j - op[PX]
                x = op[X] + i * op[X_IMAGE] + iy * op[X_ROW] + ix * op[X_PIXEL]
                y = op[Y] + i * op[Y_IMAGE] + iy * op[Y_ROW] + j * op[Y_PIXEL]
                in0, in1, in2, in3 = 0 <= ix < op[W], 0 <= ix + 1 < op[W], 0 <= ix + 2 < op[W], 0 <= ix + 3 < op[W]
                d0, d1 = a[x : x + op[C]], a[x + op[X_PIXEL] : x + op[X_PIXEL] + op[C]]
                d2 = a[x + 2 * op[X_PIXEL] : x + 2 * op[X_PIXEL] + op[C]]
                t0, t1 = a[y : y + op[C]], a[y + plane : y + plane + op[C]]
                t2 = a[y + 2 * plane : y + 2 * plane + op[C]]
                if taps == 3:
                    d3 = a[x + 3 * op[X_PIXEL] : x + 3 * op[X_PIXEL] + op[C]]
                    _add(t0, d0, in0, d2, in2, -_ONE)
                    _add(t1, d1, in1, d2, in2, _ONE)
                    _add(t2, d2, in2, d1, in1, -_ONE)
                    _add(a[y + 3 * plane : y + 3 * plane + op[C]], d1, in1, d3, in3, -_ONE)
                else:
                    _add(t0, d0, in0, d1, in1, -_ONE)
                    _add(t1, d1, in1, d1, False, _ONE)
                    _add(t2, d1, in1, d2, in2, -_ONE)


@linked(*(types.int64,) * 3)
def pairs_out(row: int, here: int, images: int) -> None:
    """The two outputs of each pair from its KW + 1 products."""
    op, a = ints_at(row, COLUMNS), floats_at(here, _ALL)
    taps = op[KW]
    plane = op[X_PIXEL] // (taps + 1)
    for i in range(images):
        for oy in range(op[HO]):
            for ox in range(op[WO]):
                x = op[X] + i * op[X_IMAGE] + oy * op[X_ROW] + ox // 2 * op[X_PIXEL]
                y = op[Y] + i * op[Y_IMAGE] + oy * op[Y_ROW] + ox * op[Y_PIXEL]
                out = a[y : y + op[N]]
                m0, m1 = a[x : x + op[N]], a[x + plane : x + plane + op[N]]
                m2 = a[x + 2 * plane : x + 2 * plane + op[N]]
                m3 = a[x + taps * plane : x + taps * plane + op[N]]
                if taps == 3:
                    if ox % 2 == 0:
                        for n in range(op[N]):
                            out[n] = m0[n] + m1[n] + m2[n]
                    else:
                        for n in range(op[N]):
                            out[n] = m1[n] - m2[n] - m3[n]
                elif ox % 2 == 0:
                    for n in range(op[N]):
                        out[n] = m0[n] + m1[n]
                else:
                    for n in range(op[N]):
                        out[n] = m1[n] - m2[n]


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
    if op[OTHER]:
        tall = min(op[KH], (op[O_PIXEL] - oy * op[SY] + op[DY] - 1) // op[DY])
        return np.float32(tall * min(op[KW], (op[O_ROW] - ox * op[SX] + op[DX] - 1) // op[DX]))
    tall, wide = 0, 0
    for kh in range(op[KH]):
        tall += 0 <= oy * op[SY] - op[PY] + kh * op[DY] < op[H]
    for kw in range(op[KW]):
        wide += 0 <= ox * op[SX] - op[PX] + kw * op[DX] < op[W]
    return np.float32(tall * wide)


@linked(*(types.int64,) * 4)
def pool(row: int, here: int, images: int, partial: int) -> None:
    """MAX_POOL or AVG_POOL: the lines of a window first, a whole row of the image at a time, then its pixels.

    With OTHER set, a mean counts pads: of an input O_PIXEL high and O_ROW wide in all.
    partial  where W + WO pixels of the input fit; whole pixels, padding included, make long loops
    """
    op, a = ints_at(row, COLUMNS), floats_at(here, _ALL)
    largest, pixel = op[CODE] == MAX_POOL, op[X_PIXEL]
    joined = a[partial : partial + op[W] * pixel]
    made = a[partial + op[W] * pixel : partial + (op[W] + op[WO]) * pixel]
    for i in range(images):
        for oy in range(op[HO]):
            tall = 0
            for kh in range(op[KH]):
                iy = oy * op[SY] - op[PY] + kh * op[DY]
                if 0 <= iy < op[H]:
                    x = op[X] + i * op[X_IMAGE] + iy * op[X_ROW]
                    _join(joined, a[x : x + op[W] * pixel], tall == 0, largest)
                    tall += 1
            for j in range(op[WO] * pixel):
                made[j] = _NO_FLOOR if largest else _ZERO
            for kw in range(op[KW] if tall > 0 else 0):  # a dilated window may lie on pads alone
                left, right = _outputs_reached(kw * op[DX], op[W], op[WO], op[SX], op[PX])
                for ox in range(left, right):
                    at = (ox * op[SX] - op[PX] + kw * op[DX]) * pixel
                    _join(made[ox * pixel : (ox + 1) * pixel], joined[at : at + pixel], False, largest)
            for ox in range(op[WO]):
                y = op[Y] + i * op[Y_IMAGE] + oy * op[Y_ROW] + ox * op[Y_PIXEL]
                out, given = a[y : y + op[C]], made[ox * pixel : ox * pixel + op[C]]
                if largest:
                    for c in range(op[C]):
                        out[c] = given[c]
                else:
                    share = _pool_share(op, oy, ox)
                    for c in range(op[C]):
                        out[c] = given[c] / share


@linked(*(types.int64,) * 4)
def global_pool(row: int, here: int, images: int, partial: int) -> None:
    """GLOBAL_MAX or GLOBAL_MEAN over all pixels; sums of a few pixels first, so that long ones keep their digits.

    partial  where C numbers fit in a
    """
    op, a = ints_at(row, COLUMNS), floats_at(here, _ALL)
    largest = op[CODE] == GLOBAL_MAX
    few = a[partial : partial + op[C]]
    for i in range(images):
        y = op[Y] + i * op[Y_IMAGE]
        out = a[y : y + op[C]]
        for q in range(op[H] * op[W]):
            x = op[X] + i * op[X_IMAGE] + (q // op[W]) * op[X_ROW] + (q % op[W]) * op[X_PIXEL]
            given = a[x : x + op[C]]
            if largest:
                for c in range(op[C]):
                    wins = (q == 0) | (given[c] > out[c]) | (given[c] != given[c])
                    out[c] = given[c] if wins else out[c]
            else:
                if q % _FEW == 0:
                    for c in range(op[C]):
                        out[c] = few[c] + out[c] if q > 0 else _ZERO
                        few[c] = _ZERO
                for c in range(op[C]):
                    few[c] += given[c]
        if not largest:
            share = np.float32(op[H] * op[W])
            for c in range(op[C]):
                out[c] = (out[c] + few[c]) / share


@linked(*(types.int64,) * 3)
def combine(row: int, here: int, images: int) -> None:
    """ADD, MUL: with another value; SCALE: by a factor and a shift a channel (at WEIGHT and BIAS); COPY."""
    op, a = ints_at(row, COLUMNS), floats_at(here, _ALL)
    code = op[CODE]
    for i in range(images):
        for oy in range(op[HO]):
            for ox in range(op[WO]):
                x = op[X] + i * op[X_IMAGE] + oy * op[X_ROW] + ox * op[X_PIXEL]
                y = op[Y] + i * op[Y_IMAGE] + oy * op[Y_ROW] + ox * op[Y_PIXEL]
                given, out = a[x : x + op[C]], a[y : y + op[C]]
                if code == COPY:
                    for c in range(op[C]):
                        out[c] = given[c]
                elif code == SCALE:
                    factor, shift = floats_at(op[WEIGHT], op[C]), floats_at(op[BIAS], op[C])
                    for c in range(op[C]):
                        out[c] = given[c] * factor[c] + shift[c]
                else:
                    z = op[OTHER] + i * op[O_IMAGE] + oy * op[O_ROW] + ox * op[O_PIXEL]
                    other = a[z : z + op[C]]
                    if code == ADD:
                        for c in range(op[C]):
                            out[c] = given[c] + other[c]
                    else:
                        for c in range(op[C]):
                            out[c] = given[c] * other[c]


@linked(*(types.int64,) * 3)
def finish(row: int, here: int, images: int) -> None:
    """The activation of an operation's output, in place, a row of pixels at a time.

    Where pixels follow each other, what pads them is activated with them: long loops cost less than exact ones.
    """
    op = ints_at(row, COLUMNS)
    dense_pixels = op[Y_PIXEL] < 2 * op[N] + 16
    for i in range(images):
        for oy in range(op[HO]):
            y = here + (op[Y] + i * op[Y_IMAGE] + oy * op[Y_ROW]) * 4
            if dense_pixels:
                activate(y, 1, (op[WO] - 1) * op[Y_PIXEL] + op[N], 0, op[ACT])
            else:
                activate(y, op[WO], op[N], op[Y_PIXEL], op[ACT])


@linked(*(types.int64,) * 5)
def load(row: int, here: int, images: int, x: int, first: int) -> None:
    """Rows (C, H, W) of the batch, from x on, to images with channels last."""
    op, a = ints_at(row, COLUMNS), floats_at(here, _ALL)
    count = op[H] * op[W]
    for i in range(images):
        for c in range(op[C]):
            source = floats_at(x + ((first + i) * op[C] + c) * count * 4, count)
            for iy in range(op[H]):
                target = a[op[Y] + i * op[Y_IMAGE] + iy * op[Y_ROW] + c :]
                line = source[iy * op[W] : (iy + 1) * op[W]]
                for ix in range(op[W]):
                    target[ix * op[Y_PIXEL]] = line[ix]


@linked(*(types.int64,) * 5)
def look_up(row: int, here: int, images: int, ids: int, first: int) -> None:
    """Rows of a table by ids: an embedded sentence has its channels last already."""
    op, a = ints_at(row, COLUMNS), floats_at(here, _ALL)
    for i in range(images):
        sentence = ints_at(ids + (first + i) * op[W] * 8, op[W])
        for p in range(op[W]):
            at = op[Y] + i * op[Y_IMAGE] + p * op[Y_PIXEL]
            target = a[at : at + op[C]]
            source = floats_at(op[WEIGHT] + sentence[p] * op[C] * 4, op[C])
            for c in range(op[C]):
                target[c] = source[c]


@linked(*(types.int64,) * 5)
def store(row: int, here: int, images: int, y: int, first: int) -> None:
    """STORE: (C, H, W) rows of the batch; STORE_ROWS: (H, W, C)."""
    op, a = ints_at(row, COLUMNS), floats_at(here, _ALL)
    count = op[H] * op[W]
    for i in range(images):
        for iy in range(op[H]):
            source = a[op[X] + i * op[X_IMAGE] + iy * op[X_ROW] :]
            if op[CODE] == STORE_ROWS:
                target = floats_at(y + ((first + i) * count + iy * op[W]) * op[C] * 4, op[W] * op[C])
                for ix in range(op[W]):
                    for c in range(op[C]):
                        target[ix * op[C] + c] = source[ix * op[X_PIXEL] + c]
            else:
                for c in range(op[C]):
                    line = floats_at(y + (((first + i) * op[C] + c) * count + iy * op[W]) * 4, op[W])
                    for ix in range(op[W]):
                        line[ix] = source[ix * op[X_PIXEL] + c]


@linked(*(types.int64,) * 5)
def store_pixels(row: int, here: int, images: int, y: int, first: int) -> None:
    """(H, W, C) rows of bytes: uint8((x + 1) / 2 * 255); what is not between 0 and 255 is cut, a NaN is 0."""
    op, a = ints_at(row, COLUMNS), floats_at(here, _ALL)
    for i in range(images):
        for iy in range(op[H]):
            source = a[op[X] + i * op[X_IMAGE] + iy * op[X_ROW] :]
            size = op[W] * op[C]
            target = bytes_at(y + ((first + i) * op[H] + iy) * size, size)
            for ix in range(op[W]):
                for c in range(op[C]):
                    level = (source[ix * op[X_PIXEL] + c] + _ONE) / np.float32(2) * np.float32(255)
                    level = level if level > _ZERO else _ZERO
                    target[ix * op[C] + c] = np.uint8(level if level < np.float32(255) else np.float32(255))


@linked(*(types.int64,) * 8)
def _run_op(row: int, here: int, images: int, first: int, x: int, ids: int, y: int, shared: int) -> None:
    """One operation on images first, first + 1, ... of the batch."""
    op = ints_at(row, COLUMNS)
    code, act = op[CODE], op[ACT]
    is_done = False
    if code == TAPS:
        conv_taps(row, here, images)
    elif code == WINDOWS:
        conv_windows(row, here, images)
        is_done = act == RELU
    elif code == DENSE:
        floor = _ZERO if act == RELU else _NO_FLOOR
        dense(
            here + op[X] * 4, op[X_IMAGE] * 4, images, op[WEIGHT], op[KH], op[KW], op[BIAS],
            here + op[Y] * 4, op[Y_IMAGE] * 4, floor,
        )  # fmt: skip
        is_done = act == RELU
    elif code == DOT:
        conv_dot(row, here, images)
    elif code == PAIRS_IN:
        pairs_in(row, here, images)
    elif code == PAIRS_OUT:
        pairs_out(row, here, images)
    elif code in (MAX_POOL, AVG_POOL):
        pool(row, here, images, shared)
    elif code in (GLOBAL_MAX, GLOBAL_MEAN):
        global_pool(row, here, images, shared)
    elif code == LOAD:
        load(row, here, images, x, first)
    elif code == LOOK_UP:
        look_up(row, here, images, ids, first)
    elif code == NORMALISE:
        normalise(here + op[X] * 4, images, op[C], op[X_IMAGE], op[KH])
    elif code == STORE_PIXELS:
        store_pixels(row, here, images, y, first)
    elif code in (STORE, STORE_ROWS):
        store(row, here, images, y, first)
    elif code != ACTIVATE:
        combine(row, here, images)
    if act != IDENTITY and not is_done:
        finish(row, here, images)


@compiled()
def _run_tile(
    table: Array, cut: Array, here: int, images: int, first: int, x: int, ids: int, y: int, shared: int
) -> None:
    """A tile of images through all operations: a group of images through those with one GROUP, then the next group."""
    start = 0
    while start < len(table):
        group, stop = table[start, GROUP], start + 1
        while stop < len(table) and table[stop, GROUP] == group:
            stop += 1
        for skipped in range(0, images, group):
            for i in range(start, stop):
                for column in range(COLUMNS):
                    cut[column] = table[i, column]
                cut[X] += skipped * cut[X_IMAGE]
                cut[Y] += skipped * cut[Y_IMAGE]
                cut[OTHER] += skipped * cut[O_IMAGE]
                _run_op(address(cut), here, min(group, images - skipped), first + skipped, x, ids, y, shared)
        start = stop


@compiled(parallel=True)
def run_images(
    table: Array, scratch: Array, own: int, shared: int, tile: int, B: int, x: int, ids: int, y: int,
    threads: int, tickets: Array, cuts: Array,
) -> None:  # fmt: skip
    """B images, `tile` at a time. own: floats of scratch a thread; from `shared` on they serve all images of a tile.

    cuts  a row a thread, for operations that are done in part
    """
    tickets[0] = 0
    for worker in numba.prange(threads):
        here = address(scratch) + worker * own * 4
        while True:
            first = take_ticket(address(tickets)) * tile
            if first >= B:
                break
            _run_tile(table, cuts[worker], here, min(tile, B - first), first, x, ids, y, shared)


@compiled()
def _cut(op: Array, part: int, parts: int) -> bool:
    """Leave of an operation what one of several threads does: some rows of its output, or some of DENSE's columns.

    False if that is nothing. A row r of the output is row 0 of an output that begins there, with r * stride fewer pads.
    """
    code = op[CODE]
    if code in (LOAD, LOOK_UP, GLOBAL_MAX, GLOBAL_MEAN, NORMALISE, STORE, STORE_ROWS, STORE_PIXELS):
        return part == 0
    if code == DENSE:
        share = (op[KW] // PANEL + parts) // parts * PANEL  # whole panels: those are packed one behind the other
        first = part * share
        op[KW] = min(share, op[KW] - first)
        op[WEIGHT] += first * op[KH] * 4
        op[BIAS] += first * 4
        op[Y] += first
        op[HO], op[WO], op[N] = 1, 1, op[KW]
        return bool(op[KW] > 0)
    share = (op[HO] + parts - 1) // parts
    first = part * share
    op[HO] = min(share, op[HO] - first)
    op[Y] += first * op[Y_ROW]
    if code in (TAPS, WINDOWS, DOT, MAX_POOL, AVG_POOL):
        op[PY] -= first * op[SY]
        op[O_PIXEL] -= first * op[SY]  # an AVG_POOL's height with its pads
    else:
        op[X] += first * op[X_ROW]
        op[OTHER] += first * op[O_ROW]
    return bool(op[HO] > 0)


@compiled(parallel=True)
def run_few_images(
    table: Array, scratch: Array, own: int, shared: int, B: int, x: int, ids: int, y: int,
    threads: int, cuts: Array,
) -> None:  # fmt: skip
    """The same for fewer images than threads: the threads share every operation. cuts: a row a thread."""
    here = address(scratch)
    for i in range(len(table)):
        for worker in numba.prange(threads):
            cuts[worker] = table[i]
            if _cut(cuts[worker], worker, threads):
                _run_op(address(cuts[worker]), here, B, 0, x, ids, y, worker * own + shared)
