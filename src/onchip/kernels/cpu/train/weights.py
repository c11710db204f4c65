"""Tiles of the weights: their gradient over a block of rows, and the update."""

from __future__ import annotations

import numpy as np

from onchip.kernels.cpu.compiler.emit import LANES
from onchip.kernels.cpu.compiler.jit import address, compiled, floats_at, linked
from onchip.kernels.cpu.compiler.late_numba import types
from onchip.kernels.cpu.microkernels.dense import next_panel, padded_width
from onchip.kernels.cpu.microkernels.tile import PANEL, ROWS_NARROW, VECS_WIDE, multiply_tile
from onchip.kernels.cpu.train.model import (
    COL_ACT,
    COL_BIAS,
    COL_HAS_BIAS,
    COL_K,
    COL_N,
    COL_W,
    COL_WT,
    MOMENTUM,
    SGD,
    Optimiser,
    batch_gradients,
    block_at,
    fetch,
    model_at,
    table_at,
    tasks_at,
)  # fmt: skip
from onchip.kernels.training import BETA1, BETA2, CLIP_EPS, EPS
from onchip.network.recipe import Array

SUM_ROWS = 128  # rows per partial sum of a gradient: they stay in L1 while a whole weight tile is computed
TASK_K = 64  # rows of a weight tile
TASK_FLOATS = TASK_K * PANEL
_ROWS = 4  # of a tile of a panel; a divisor of TASK_K
_ZERO, _NO_FLOOR = np.float32(0), np.float32(-np.inf)
_BETA1, _REST1, _BETA2, _REST2 = np.float32(BETA1), np.float32(1 - BETA1), np.float32(BETA2), np.float32(1 - BETA2)
_EPS = np.float32(EPS)


@linked(*(types.int64,) * 9, types.boolean)
def _gradients(
    a: int, a_row: int, dz: int, dz_row: int, rows: int, count: int, width: int, zeros: int, out: int, is_first: bool
) -> None:
    """out[k, n] = (0 or out[k, n]) + sum over rows of a[row, k] dz[row, n], k < count, n < width."""
    out_row = width * 4
    step = _ROWS if width == PANEL else ROWS_NARROW
    for r in range(0, rows, SUM_ROWS):
        some = min(SUM_ROWS, rows - r)
        starts = is_first and r == 0
        a_at, dz_at = a + r * a_row, dz + r * dz_row
        ahead, fetched_rows = r + some, SUM_ROWS * step // TASK_K
        k = 0
        while k + step <= count:
            # Prefetch the next sum's rows: their stride is too large for the hardware prefetcher.
            for row in range(ahead, min(ahead + fetched_rows, rows)):
                fetch(a + row * a_row, count * 4)
                fetch(dz + row * dz_row, out_row)
            ahead += fetched_rows
            x, to = a_at + k * 4, out + k * out_row
            init, init_row = (zeros, 0) if starts else (to, out_row)
            if width == PANEL:
                multiply_tile(
                    x, 4, a_row, dz_at, dz_row, init, init_row, to, out_row, 1, 0, some, _NO_FLOOR, _ROWS, VECS_WIDE
                )
            elif width == 2 * LANES:
                multiply_tile(
                    x, 4, a_row, dz_at, dz_row, init, init_row, to, out_row, 1, 0, some, _NO_FLOOR, ROWS_NARROW, 2
                )
            else:
                multiply_tile(
                    x, 4, a_row, dz_at, dz_row, init, init_row, to, out_row, 1, 0, some, _NO_FLOOR, ROWS_NARROW, 1
                )
            k += step
        while k < count:
            x, to = a_at + k * 4, out + k * out_row
            init = zeros if starts else to
            if width == PANEL:
                multiply_tile(x, 4, a_row, dz_at, dz_row, init, 0, to, 0, 1, 0, some, _NO_FLOOR, 1, VECS_WIDE)
            elif width == 2 * LANES:
                multiply_tile(x, 4, a_row, dz_at, dz_row, init, 0, to, 0, 1, 0, some, _NO_FLOOR, 1, 2)
            else:
                multiply_tile(x, 4, a_row, dz_at, dz_row, init, 0, to, 0, 1, 0, some, _NO_FLOOR, 1, 1)
            k += 1


@linked(*(types.int64,) * 7, types.boolean)
def gradient_of_task(model: int, block_ptr: int, x: int, task: int, rows: int, out: int, gb: int, first: bool) -> None:
    """The gradient of one weight tile over a block's rows, to the address `out`, and of its biases to gb's.

    first  overwrite; else add
    """
    table, tasks, block = table_at(model), tasks_at(model), block_at(block_ptr)
    layer, n, k, k_last = tasks[task, 0], tasks[task, 1], tasks[task, 2], tasks[task, 3]
    K, N_padded = table[layer, COL_K], padded_width(table[layer, COL_N])
    width = next_panel(N_padded - n)
    dz, dz_row = address(block.dzs) + (table[layer, COL_ACT] + n) * 4, N_padded * 4
    a, a_row = x, K * 4
    if layer > 0:
        a, a_row = address(block.acts) + table[layer - 1, COL_ACT] * 4, padded_width(K) * 4
    _gradients(a + k * 4, a_row, dz, dz_row, rows, k_last - k, width, address(block.zeros), out, first)
    if k == 0 and table[layer, COL_HAS_BIAS]:
        sums = floats_at(gb + (table[layer, COL_BIAS] + n) * 4, width)
        if first:
            for j in range(width):
                sums[j] = _ZERO
        for r in range(rows):
            row = table[layer, COL_ACT] + r * N_padded + n
            grad_row = block.dzs[row : row + width]
            for j in range(width):
                sums[j] += grad_row[j]


@compiled()
def weights_of_task(model: int, task: int) -> tuple[int, int]:
    """The tile's offset in w, and its size."""
    table, tasks = table_at(model), tasks_at(model)
    layer, n, k, k_last = tasks[task, 0], tasks[task, 1], tasks[task, 2], tasks[task, 3]
    width = next_panel(padded_width(table[layer, COL_N]) - n)
    return table[layer, COL_W] + n * table[layer, COL_K] + k * width, (k_last - k) * width


@compiled()
def biases_of_task(model: int, task: int) -> tuple[int, int]:
    """The same for its biases; size 0 if the tile is not the first of its columns."""
    table, tasks = table_at(model), tasks_at(model)
    layer, n = tasks[task, 0], tasks[task, 1]
    has_bias = tasks[task, 2] == 0 and table[layer, COL_HAS_BIAS] != 0
    return table[layer, COL_BIAS] + n, next_panel(padded_width(table[layer, COL_N]) - n) if has_bias else 0


@linked(*(types.int64,) * 4, types.boolean)
def add_block(model: int, task: int, grads: int, gb: int, first: bool) -> None:
    """Add a block's gradients of a tile, at `grads`, and of its biases, in gb, to the batch's."""
    batch_gw, batch_gb = batch_gradients(model)
    at, size = weights_of_task(model, task)
    _add(floats_at(batch_gw + at * 4, size), floats_at(grads, size), first)
    begin, count = biases_of_task(model, task)
    _add(floats_at(batch_gb + begin * 4, count), floats_at(gb + begin * 4, count), first)


@compiled()
def _add(total: Array, part: Array, first: bool) -> None:
    if first:
        for i in range(len(total)):
            total[i] = part[i]
    else:
        for i in range(len(total)):
            total[i] += part[i]


@linked(types.int64, types.int64)
def square_task(model_ptr: int, task: int) -> None:
    """Store the sum of a tile's squared batch gradients, including its biases, in model.squares."""
    model = model_at(model_ptr)
    at, size = weights_of_task(model_ptr, task)
    total = _sum_squares(model.gw[at : at + size])
    begin, count = biases_of_task(model_ptr, task)
    if count > 0:
        total += _sum_squares(model.gb[begin : begin + count])
    model.squares[task] = total


@compiled()
def _sum_squares(g: Array) -> float:
    """In four independent sums. The size of g is a multiple of LANES; padding is zeros."""
    a, b, c, d = 0.0, 0.0, 0.0, 0.0
    for i in range(0, len(g), 4):
        a += np.float64(g[i]) * np.float64(g[i])
        b += np.float64(g[i + 1]) * np.float64(g[i + 1])
        c += np.float64(g[i + 2]) * np.float64(g[i + 2])
        d += np.float64(g[i + 3]) * np.float64(g[i + 3])
    return (a + b) + (c + d)


@compiled()
def clipped(model_ptr: int, opt: Optimiser) -> Optimiser:
    """The optimiser with the batch's clipped scale, after square_task of every tile."""
    model, total = model_at(model_ptr), 0.0
    for task in range(len(model.tasks)):
        total += model.squares[task]
    norm = np.float64(opt.scale) * np.sqrt(total)
    share = np.float64(opt.clip) / (norm + CLIP_EPS)
    scale = opt.scale if share >= 1 else np.float32(np.float64(opt.scale) * share)
    return Optimiser(opt.kind, opt.lr, scale, opt.root, opt.keep, opt.decay, opt.clip)


@compiled(inline=True)
def update_task(model: int, task: int, grads: int, gb: int, opt: Optimiser) -> None:
    """Update one weight tile and its biases by the gradients of the batch.

    grads  address of the tile's gradients; gb: of all biases'
    """
    _update_task(model, task, grads, gb, opt.kind, opt.lr, opt.scale, opt.root, opt.keep, opt.decay)


@linked(*(types.int64,) * 5, *(types.float32,) * 5)
def _update_task(
    model_ptr: int, task: int, grads: int, gb: int, kind: int, lr: np.float32, scale: np.float32,
    root: np.float32, keep: np.float32, decay: np.float32,
) -> None:  # fmt: skip
    model, opt = model_at(model_ptr), Optimiser(kind, lr, scale, root, keep, decay, _ZERO)
    layer, n, k, k_last = model.tasks[task, 0], model.tasks[task, 1], model.tasks[task, 2], model.tasks[task, 3]
    K, N = model.table[layer, COL_K], model.table[layer, COL_N]
    at, size = weights_of_task(model_ptr, task)
    width = next_panel(padded_width(N) - n)
    _update(model.w, model.vw, model.sw, at, floats_at(grads, size), size, opt)
    if layer > 0:
        _transpose(model.w, at, model.wt, model.table[layer, COL_WT], K, N, k, n, k_last - k, width)
    begin, count = biases_of_task(model_ptr, task)
    if count > 0:
        _update(model.bias, model.vb, model.sb, begin, floats_at(gb + begin * 4, count), count, opt)


@compiled()
def _update(w: Array, v: Array, s: Array, at: int, grads: Array, size: int, opt: Optimiser) -> None:
    """Update `size` elements from w[at], v[at], s[at] and grads[0] on.

    SGD       w -= lr g
    MOMENTUM  v = keep v + g; w -= lr v
    ADAM      v = BETA1 v + (1 - BETA1) g; s = BETA2 s + (1 - BETA2) g^2; w = keep w - lr v / (root sqrt(s) + EPS)
    """
    weights, means, squares = w[at : at + size], v[at : at + size], s[at : at + size]
    lr, keep, decay, scale, root = opt.lr, opt.keep, opt.decay, opt.scale, opt.root
    if opt.kind == SGD:
        for i in range(size):
            weights[i] -= lr * (scale * grads[i] + decay * weights[i])
    elif opt.kind == MOMENTUM:
        for i in range(size):
            means[i] = keep * means[i] + (scale * grads[i] + decay * weights[i])
            weights[i] -= lr * means[i]
    else:
        for i in range(size):
            gradient = scale * grads[i] + decay * weights[i]
            means[i] = _BETA1 * means[i] + _REST1 * gradient
            squares[i] = _BETA2 * squares[i] + _REST2 * (gradient * gradient)
            weights[i] = keep * weights[i] - lr * means[i] / (root * np.sqrt(squares[i]) + _EPS)


@compiled()
def _transpose(
    w: Array, w_at: int, wt: Array, wt_at: int, K: int, N: int, k: int, n: int, count: int, width: int
) -> None:
    """Update the transposed copy of w[k:k+count, n:n+width]."""
    panel, panel_width = 0, next_panel(padded_width(K))
    done = 0
    while done < count:
        while panel + panel_width <= k + done:  # the panel of wt that holds this column
            panel += panel_width
            panel_width = next_panel(padded_width(K) - panel)
        some = min(count - done, panel + panel_width - k - done)
        for j in range(min(width, N - n)):
            at = wt_at + panel * N + (n + j) * panel_width + (k + done - panel)
            for r in range(some):
                wt[at + r] = w[w_at + (done + r) * width + j]
        done += some
