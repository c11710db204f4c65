"""A dense layer on a few rows: the register tile walked over rows, panels of columns and chunks of k."""

from __future__ import annotations

import numpy as np

from onchip.kernels.cpu.jit import compiled
from onchip.kernels.cpu.tile import LANES, PANEL, ROWS, multiply_tile

CHUNK = 256  # steps of k at a time: a panel's chunk (32 KiB with AVX-512) stays in L1 while rows pass over it
_ROWS, _PANEL, _LANES = ROWS, PANEL, LANES
_NO_FLOOR = np.float32(-np.inf)


@compiled()
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

    src, w, bias and dst are addresses, src_row and dst_row byte strides; w is packed (tile.pack).
    Sums run over k in order, CHUNK by CHUNK through dst, the same for every grouping of the rows.
    """
    whole = rows - rows % _ROWS
    for k in range(0, K, CHUNK):
        steps = min(CHUNK, K - k)
        below = floor if k + CHUNK >= K else _NO_FLOOR
        for n in range(0, N_padded, _PANEL):
            wide = n + _PANEL <= N_padded
            w_k = (_PANEL if wide else _LANES) * 4
            panel = w + n * K * 4 + k * w_k
            for r in range(0, whole, _ROWS):
                a = src + r * src_row + k * 4
                c = dst + r * dst_row + n * 4
                init, init_row = (bias + n * 4, 0) if k == 0 else (c, dst_row)
                if wide:
                    multiply_tile(a, src_row, 4, panel, _PANEL * 4, init, init_row, c, dst_row, steps, below, ROWS, 2)
                else:
                    multiply_tile(a, src_row, 4, panel, _LANES * 4, init, init_row, c, dst_row, steps, below, ROWS, 1)
            for r in range(whole, rows):
                a = src + r * src_row + k * 4
                c = dst + r * dst_row + n * 4
                init = bias + n * 4 if k == 0 else c
                if wide:
                    multiply_tile(a, 0, 4, panel, _PANEL * 4, init, 0, c, 0, steps, below, 1, 2)
                else:
                    multiply_tile(a, 0, 4, panel, _LANES * 4, init, 0, c, 0, steps, below, 1, 1)
