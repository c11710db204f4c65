"""Rows of the batch to images with channels last, and back: where conv_fused begins and ends."""

from __future__ import annotations

import numpy as np
from numba import types

from onchip.kernels.cpu import image_table as t
from onchip.kernels.cpu.jit import bytes_at, floats_at, ints_at, linked

_ZERO, _ONE = np.float32(0), np.float32(1)
_ALL = 1 << 40  # the length of an array whose end nobody asks for


@linked(*(types.int64,) * 5)
def load(row: int, here: int, images: int, x: int, first: int) -> None:
    """Rows of the batch, from x on, to images with channels last. LOAD: (C, H, W); LOAD_ROWS: (H, W, C)."""
    op, a = ints_at(row, t.COLUMNS), floats_at(here, _ALL)
    count = op[t.H] * op[t.W]
    for i in range(images):
        if op[t.CODE] == t.LOAD_ROWS:
            for iy in range(op[t.H]):
                line = floats_at(x + ((first + i) * count + iy * op[t.W]) * op[t.C] * 4, op[t.W] * op[t.C])
                target = a[op[t.Y] + i * op[t.Y_IMAGE] + iy * op[t.Y_ROW] :]
                for ix in range(op[t.W]):
                    for c in range(op[t.C]):
                        target[ix * op[t.Y_PIXEL] + c] = line[ix * op[t.C] + c]
            continue
        for c in range(op[t.C]):
            source = floats_at(x + ((first + i) * op[t.C] + c) * count * 4, count)
            for iy in range(op[t.H]):
                target = a[op[t.Y] + i * op[t.Y_IMAGE] + iy * op[t.Y_ROW] + c :]
                line = source[iy * op[t.W] : (iy + 1) * op[t.W]]
                for ix in range(op[t.W]):
                    target[ix * op[t.Y_PIXEL]] = line[ix]


@linked(*(types.int64,) * 5)
def look_up(row: int, here: int, images: int, ids: int, first: int) -> None:
    """Rows of a table by ids: an embedded sentence has its channels last already."""
    op, a = ints_at(row, t.COLUMNS), floats_at(here, _ALL)
    for i in range(images):
        sentence = ints_at(ids + (first + i) * op[t.W] * 8, op[t.W])
        for p in range(op[t.W]):
            at = op[t.Y] + i * op[t.Y_IMAGE] + p * op[t.Y_PIXEL]
            target = a[at : at + op[t.C]]
            source = floats_at(op[t.WEIGHT] + sentence[p] * op[t.C] * 4, op[t.C])
            for c in range(op[t.C]):
                target[c] = source[c]


@linked(*(types.int64,) * 5)
def store(row: int, here: int, images: int, y: int, first: int) -> None:
    """STORE: (C, H, W) rows of the batch; STORE_ROWS: (H, W, C)."""
    op, a = ints_at(row, t.COLUMNS), floats_at(here, _ALL)
    count = op[t.H] * op[t.W]
    for i in range(images):
        for iy in range(op[t.H]):
            source = a[op[t.X] + i * op[t.X_IMAGE] + iy * op[t.X_ROW] :]
            if op[t.CODE] == t.STORE_ROWS:
                target = floats_at(y + ((first + i) * count + iy * op[t.W]) * op[t.C] * 4, op[t.W] * op[t.C])
                for ix in range(op[t.W]):
                    for c in range(op[t.C]):
                        target[ix * op[t.C] + c] = source[ix * op[t.X_PIXEL] + c]
            else:
                for c in range(op[t.C]):
                    line = floats_at(y + (((first + i) * op[t.C] + c) * count + iy * op[t.W]) * 4, op[t.W])
                    for ix in range(op[t.W]):
                        line[ix] = source[ix * op[t.X_PIXEL] + c]


@linked(*(types.int64,) * 5)
def store_pixels(row: int, here: int, images: int, y: int, first: int) -> None:
    """(H, W, C) rows of bytes: uint8((x + 1) / 2 * 255); what is not between 0 and 255 is cut, a NaN is 0."""
    op, a = ints_at(row, t.COLUMNS), floats_at(here, _ALL)
    for i in range(images):
        for iy in range(op[t.H]):
            source = a[op[t.X] + i * op[t.X_IMAGE] + iy * op[t.X_ROW] :]
            size = op[t.W] * op[t.C]
            target = bytes_at(y + ((first + i) * op[t.H] + iy) * size, size)
            for ix in range(op[t.W]):
                for c in range(op[t.C]):
                    level = (source[ix * op[t.X_PIXEL] + c] + _ONE) / np.float32(2) * np.float32(255)
                    level = level if level > _ZERO else _ZERO
                    target[ix * op[t.C] + c] = np.uint8(level if level < np.float32(255) else np.float32(255))
