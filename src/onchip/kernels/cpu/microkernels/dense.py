"""A dense layer on a few rows: loops over rows, column panels and K chunks around the GEMM microkernel."""

from __future__ import annotations

import numpy as np

from onchip.kernels.cpu.compiler.emit import LANES
from onchip.kernels.cpu.compiler.jit import compiled, linked
from onchip.kernels.cpu.compiler.late_numba import types
from onchip.kernels.cpu.microkernels.tile import (
    LINE_PANELS,
    MAX_ROWS,
    PANEL,
    VECS_WIDE,
    multiply_line,
    multiply_rows,
    padded,
    panel_width,
)

CHUNK = 128  # k steps per cache block: a panel's chunk (32 KiB with AVX-512) stays in L1 while all rows use it
_MAX_WIDE, _MAX_PAIR, _MAX_SINGLE = MAX_ROWS[VECS_WIDE], MAX_ROWS[2], MAX_ROWS[1]
_BLOCK_FLOATS = 64 << 10  # floats of dst per column block: 256 KiB
_NO_FLOOR = np.float32(-np.inf)

padded_width = compiled(inline=True)(padded)
next_panel = compiled(inline=True)(panel_width)


@linked(*(types.int64,) * 12, types.float32)
def multiply_panel(
    a: int, a_row: int, rows: int, w: int, width: int, init: int, init_row: int, out: int, out_row: int, H: int,
    a_h: int, K: int, floor: np.float32,
) -> None:  # fmt: skip
    """One column panel for all rows, in register tiles of nearly equal height: small tiles do not hide FMA latency."""
    if rows <= 0:
        return
    if width == PANEL:
        tiles = (rows + _MAX_WIDE - 1) // _MAX_WIDE
    elif width == 2 * LANES:
        tiles = (rows + _MAX_PAIR - 1) // _MAX_PAIR
    else:
        tiles = (rows + _MAX_SINGLE - 1) // _MAX_SINGLE
    few = rows // tiles  # one division for all tiles: a division takes as long as a small tile
    larger = rows - few * tiles  # tiles with one more row
    r = 0
    for tile in range(tiles):
        count = few + 1 if tile < larger else few
        x, start, y = a + r * a_row, init + r * init_row, out + r * out_row
        if width == PANEL:
            multiply_rows(x, a_row, w, start, init_row, y, out_row, H, a_h, K, floor, count, VECS_WIDE)
        elif width == 2 * LANES:
            multiply_rows(x, a_row, w, start, init_row, y, out_row, H, a_h, K, floor, count, 2)
        else:
            multiply_rows(x, a_row, w, start, init_row, y, out_row, H, a_h, K, floor, count, 1)
        r += count


@linked(*(types.int64,) * 9, types.float32)
def dense(
    src: int,
    src_row: int,
    rows: int,
    w: int,
    K: int,
    N_padded: int,
    bias: int,
    dst: int,
    dst_row: int,
    floor: np.float32,
) -> None:
    """dst[r, n] = max(floor, bias[n] + sum_k src[r, k] w[k, n]) for r < rows, n < N_padded.

    src, w, bias and dst are addresses, src_row and dst_row byte strides; w is packed in panels (tile.pack).
    K is blocked by CHUNK, with partial sums in dst; the reduction order is the same for any tiling of the rows.
    Columns are blocked so that a block of dst stays in L2.
    """
    block = max(1, _BLOCK_FLOATS // (max(rows, 1) * PANEL)) * PANEL
    for first in range(0, N_padded, block):
        last = min(first + block, N_padded)
        for k in range(0, K, CHUNK):
            steps = min(CHUNK, K - k)
            chunk_floor = floor if k + CHUNK >= K else _NO_FLOOR
            n = first
            while rows == 1 and n + LINE_PANELS * PANEL <= last:
                init = bias + n * 4 if k == 0 else dst + n * 4
                multiply_line(
                    src + k * 4, w + n * K * 4 + k * PANEL * 4, K * PANEL * 4, init, dst + n * 4, steps, chunk_floor
                )
                n += LINE_PANELS * PANEL
            while n < last:
                width = next_panel(N_padded - n)
                init = bias + n * 4 if k == 0 else dst + n * 4
                init_row = 0 if k == 0 else dst_row
                x, panel, y = src + k * 4, w + n * K * 4 + k * width * 4, dst + n * 4
                multiply_panel(x, src_row, rows, panel, width, init, init_row, y, dst_row, 1, 0, steps, chunk_floor)
                n += width
