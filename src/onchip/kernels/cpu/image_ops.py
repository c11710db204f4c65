"""Operations on images, one after the other: what conv_fused launches. A row of the table is an operation
(image_table.py); image_conv.py, image_pool.py, image_layers.py and image_rows.py carry it out.
"""

from __future__ import annotations

import numpy as np
from numba import types

from onchip.kernels.cpu import image_table as t
from onchip.kernels.cpu.activation import normalise
from onchip.kernels.cpu.dense import dense
from onchip.kernels.cpu.dot import dense_narrow
from onchip.kernels.cpu.image_conv import conv_dot, conv_taps, conv_windows, pairs_in, pairs_out
from onchip.kernels.cpu.image_layers import clear_pads, combine, finish
from onchip.kernels.cpu.image_pool import global_pool, pool
from onchip.kernels.cpu.image_rows import load, look_up, store, store_pixels
from onchip.kernels.cpu.jit import address, compiled, ints_at, linked
from onchip.kernels.cpu.threads import run_pieces
from onchip.kernels.cpu.tile import PANEL
from onchip.kernels.pointwise import IDENTITY, RELU
from onchip.spec.recipe import Array

_NO_FLOOR, _ZERO = np.float32(-np.inf), np.float32(0)


@linked(*(types.int64,) * 7)
def _run_op(row: int, here: int, images: int, first: int, x: int, y: int, shared: int) -> None:
    """One operation on images first, first + 1, ... of the batch."""
    op = ints_at(row, t.COLUMNS)
    code, act = op[t.CODE], op[t.ACT]
    is_done = False
    if code == t.TAPS:
        conv_taps(row, here, images)
    elif code == t.WINDOWS:
        conv_windows(row, here, images)
        is_done = act == RELU
    elif code in (t.DENSE, t.NARROW):
        x_at, y_at = here + op[t.X] * 4, here + op[t.Y] * 4
        K, N, floor = op[t.KH], op[t.KW], _ZERO if act == RELU else _NO_FLOOR
        x_row, y_row, w, bias = op[t.X_IMAGE] * 4, op[t.Y_IMAGE] * 4, op[t.WEIGHT], op[t.BIAS]
        if code == t.DENSE:
            dense(x_at, x_row, images, w, K, N, bias, y_at, y_row, floor)
        else:
            dense_narrow(x_at, x_row, images, w, K, N, bias, y_at, y_row, floor)
        is_done = act == RELU
    elif code == t.DOT:
        conv_dot(row, here, images)
    elif code == t.PAIRS_IN:
        pairs_in(row, here, images)
    elif code == t.PAIRS_OUT:
        pairs_out(row, here, images)
    elif code in (t.MAX_POOL, t.AVG_POOL):
        pool(row, here, images)
    elif code in (t.GLOBAL_MAX, t.GLOBAL_MEAN):
        global_pool(row, here, images, shared)
    elif code in (t.LOAD, t.LOAD_ROWS):
        load(row, here, images, x, first)
    elif code == t.LOOK_UP:
        look_up(row, here, images, x, first)
    elif code == t.NORMALISE:
        normalise(here + op[t.X] * 4, images, op[t.C], op[t.X_IMAGE], op[t.KH])
    elif code == t.STORE_PIXELS:
        store_pixels(row, here, images, y, first)
    elif code in (t.STORE, t.STORE_ROWS):
        store(row, here, images, y, first)
    elif code != t.ACTIVATE:
        combine(row, here, images)
    if op[t.PADDED] > (op[t.SX] if code == t.DENSE else op[t.N]):
        clear_pads(row, here, images)
    if act != IDENTITY and not is_done:
        finish(row, here, images)


@compiled(inline=True)
def _row(table: int, i: int) -> Array:
    return ints_at(table + i * t.COLUMNS * 8, t.COLUMNS)  # type: ignore[no-any-return]


@compiled()
def _copy(op: Array, to: Array) -> None:
    for column in range(t.COLUMNS):
        to[column] = op[column]


@linked(*(types.int64,) * 9)
def _run_tile(table: int, cut: int, L: int, here: int, images: int, first: int, x: int, y: int, shared: int) -> None:
    """A tile of images through all operations: a group of images through those with one GROUP, then the next group."""
    op = ints_at(cut, t.COLUMNS)
    start = 0
    while start < L:
        group, stop = _row(table, start)[t.GROUP], start + 1
        while stop < L and _row(table, stop)[t.GROUP] == group:
            stop += 1
        for skipped in range(0, images, group):
            for i in range(start, stop):
                _copy(_row(table, i), op)
                op[t.X] += skipped * op[t.X_IMAGE]
                op[t.Y] += skipped * op[t.Y_IMAGE]
                op[t.OTHER] += skipped * op[t.O_IMAGE]
                _run_op(cut, here, min(group, images - skipped), first + skipped, x, y, shared)
        start = stop


@compiled()
def run_tile(table: int, scratch: int, cuts: int, L: int, own: int, shared: int, B: int, x: int, y: int) -> None:
    """B images that are one tile, by the thread that calls: with nobody to share with, waking others is a loss."""
    _run_tile(table, cuts, L, scratch, B, 0, x, y, shared)


@compiled()
def _tile(
    worker: int, piece: int, table: int, scratch: int, cuts: int, L: int, own: int, shared: int, tile: int, B: int,
    x: int, y: int,
) -> None:  # fmt: skip
    first, here, cut = piece * tile, scratch + worker * own * 4, cuts + worker * t.COLUMNS * 8
    _run_tile(table, cut, L, here, min(tile, B - first), first, x, y, shared)


@compiled()
def run_images(
    table: int, scratch: int, cuts: int, L: int, own: int, shared: int, tile: int, B: int, x: int, y: int, threads: int
) -> None:
    """B images, `tile` at a time. Everything else but sizes is an address.

    table    L operations
    scratch  `own` floats a thread; from `shared` on they serve all images of a tile
    cuts     an operation a thread, for those that are done in part
    """
    arguments = (table, scratch, cuts, L, own, shared, tile, B, x, y)
    run_pieces(_tile, arguments, (B + tile - 1) // tile, threads)


@compiled()
def _cut(op: Array, part: int, parts: int) -> bool:
    """Leave of an operation what one of several threads does: some rows of its output, or some of DENSE's columns.

    False if that is nothing. A row r of the output is row 0 of an output that begins there, with r * stride fewer pads.
    """
    code = op[t.CODE]
    if code in (
        t.LOAD, t.LOAD_ROWS, t.LOOK_UP, t.GLOBAL_MAX, t.GLOBAL_MEAN, t.NARROW, t.NORMALISE, t.STORE, t.STORE_ROWS,
        t.STORE_PIXELS,
    ):  # fmt: skip
        return part == 0
    if code == t.DENSE:
        # Whole panels: those are packed one behind the other.
        share = (op[t.KW] + parts * PANEL - 1) // (parts * PANEL) * PANEL
        first = part * share
        op[t.KW] = min(share, op[t.KW] - first)
        op[t.WEIGHT] += first * op[t.KH] * 4
        op[t.BIAS] += first * 4
        op[t.Y] += first
        op[t.PX] = first
        op[t.HO], op[t.WO], op[t.N] = 1, 1, op[t.KW]
        return bool(op[t.KW] > 0)
    share = (op[t.HO] + parts - 1) // parts
    first = part * share
    op[t.HO] = min(share, op[t.HO] - first)
    op[t.Y] += first * op[t.Y_ROW]
    if code in (t.TAPS, t.WINDOWS, t.DOT, t.MAX_POOL, t.AVG_POOL):
        op[t.PY] -= first * op[t.SY]
        op[t.O_PIXEL] -= first * op[t.SY]  # an AVG_POOL's height with its pads
    else:
        op[t.X] += first * op[t.X_ROW]
        op[t.OTHER] += first * op[t.O_ROW]
    return bool(op[t.HO] > 0)


@compiled()
def _part(
    worker: int, part: int, row: int, scratch: int, cuts: int, own: int, shared: int, B: int, x: int, y: int, parts: int
) -> None:
    op = _row(cuts, worker)
    _copy(ints_at(row, t.COLUMNS), op)
    if _cut(op, part, parts):
        _run_op(address(op), scratch, B, 0, x, y, worker * own + shared)


@compiled()
def run_few_images(
    table: int, scratch: int, cuts: int, L: int, own: int, shared: int, B: int, x: int, y: int, threads: int
) -> None:
    """The same for fewer images than threads: the threads share every operation."""
    for i in range(L):
        row = table + i * t.COLUMNS * 8
        run_pieces(_part, (row, scratch, cuts, own, shared, B, x, y, threads), threads, threads)
