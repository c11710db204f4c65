"""The arithmetic of a training step: what mlp_train.py launches, in two parallel loops a block of rows."""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

from onchip.kernels.cpu.activation import RELU, SIGMOID, TANH, activate, expm1_exp
from onchip.kernels.cpu.dense import dense, next_panel, padded_width
from onchip.kernels.cpu.emit import LANES
from onchip.kernels.cpu.jit import address, compiled, take_ticket
from onchip.kernels.cpu.tile import PANEL, ROWS_NARROW, ROWS_WIDE, TILE_FLOATS, VECS_WIDE, multiply_tile
from onchip.spec.recipe import Array

BLOCK = 256  # rows of a batch that go through together
PART_ROWS = 16  # rows that a thread takes through the network at a time
CROSS_ENTROPY, HALF_SSE = 0, 1

# Columns of the table: one row a layer.
COL_K, COL_N, COL_W, COL_BIAS, COL_CODE, COL_WT, COL_ACT, COL_HAS_BIAS = range(8)
_ZERO, _ONE, _NO_FLOOR = np.float32(0), np.float32(1), np.float32(-np.inf)


class Model(NamedTuple):
    """What a run trains: weights packed as in mlp_fused, and what goes with each of them."""

    table: Array  # a row a layer, the columns above
    tasks: Array  # the pieces of an update: layer, first column, first k, last k
    w: Array
    bias: Array
    wt: Array  # w transposed, of every layer but the first: the backward pass reads w by columns
    vw: Array  # velocities
    vb: Array
    gw: Array  # gradients; gw only where a batch has more than one block
    gb: Array


class Block(NamedTuple):
    """What a block of rows needs while it goes through."""

    x: Array  # (rows, D_in) gathered
    acts: Array  # every layer's output, a layer behind the other
    dzs: Array  # gradients by what goes into the activations, laid out like acts
    losses: Array  # a number a row
    zeros: Array  # a bias for products that have none
    tiles: Array  # a thread's gradient tile
    tickets: Array


class Data(NamedTuple):
    x: Array  # (n, D_in)
    classes: Array  # (n,) for cross-entropy
    targets: Array  # (n, D_out) for half the sum of squares
    order: Array  # which rows, batch by batch


class Rule(NamedTuple):
    """v = momentum v + scale g; w -= lr v."""

    lr: np.float32
    momentum: np.float32
    scale: np.float32


@compiled()
def _loss_row(z: Array, dz: Array, at: int, N: int, stride: int, code: int, data: Data, row: int) -> float:
    """The loss of one row with output z[at : at + N]; its gradient goes to dz, 0 in the columns past N."""
    for n in range(at + N, at + stride):
        dz[n] = _ZERO
    loss = 0.0
    if code == CROSS_ENTROPY:
        highest = z[at]
        for n in range(at + 1, at + N):
            highest = max(highest, z[n])
        total = 0.0
        for n in range(at, at + N):
            _, e = expm1_exp(z[n] - highest)
            dz[n] = e
            total += np.float64(e)
        scale = np.float32(total)
        for n in range(at, at + N):
            dz[n] = dz[n] / scale
        truth = at + data.classes[row]
        dz[truth] -= _ONE
        loss = np.log(total) - np.float64(z[truth] - highest)
    else:
        for n in range(N):
            difference = z[at + n] - data.targets[row, n]
            loss += 0.5 * np.float64(difference) * np.float64(difference)
            dz[at + n] = difference
    return loss


@compiled()
def _through_activation(dz: Array, a: Array, begin: int, count: int, N: int, stride: int, code: int) -> None:
    """dz *= f'(.), written by the activation's own output a, for rows of N numbers from `begin` on."""
    for r in range(count):
        at = begin + r * stride
        grad, out = dz[at : at + N], a[at : at + N]
        if code == RELU:
            for n in range(N):
                grad[n] = grad[n] if out[n] > _ZERO else _ZERO
        elif code == SIGMOID:
            for n in range(N):
                grad[n] = grad[n] * out[n] * (_ONE - out[n])
        elif code == TANH:
            for n in range(N):
                grad[n] = grad[n] * (_ONE - out[n] * out[n])


@compiled()
def _rows_pass(model: Model, block: Block, data: Data, begin: int, first: int, count: int, loss_code: int) -> None:
    """Rows first..first+count of the block that starts at order[begin]: gather, forward, loss, backward to every dz."""
    table = model.table
    L, K0 = len(table), table[0, COL_K]
    for r in range(first, first + count):
        row, to = data.x[data.order[begin + r]], block.x[r * K0 : (r + 1) * K0]
        for k in range(K0):
            to[k] = row[k]
    src, src_row = address(block.x) + first * K0 * 4, K0 * 4
    for layer in range(L):
        N, code = table[layer, COL_N], table[layer, COL_CODE]
        width = padded_width(N)
        at = table[layer, COL_ACT] + first * width
        dst = address(block.acts) + at * 4
        w, bias = address(model.w) + table[layer, COL_W] * 4, address(model.bias) + table[layer, COL_BIAS] * 4
        floor = _ZERO if code == RELU else _NO_FLOOR
        dense(src, src_row, count, w, table[layer, COL_K], width, bias, dst, width * 4, floor)
        if code > RELU:
            activate(dst, count, N, width, code)
        src, src_row = dst, width * 4
    for layer in range(L - 1, -1, -1):
        N = table[layer, COL_N]
        width = padded_width(N)
        at = table[layer, COL_ACT] + first * width
        if layer == L - 1:
            for r in range(count):
                row_number = data.order[begin + first + r]
                block.losses[first + r] = _loss_row(
                    block.acts, block.dzs, at + r * width, N, width, loss_code, data, row_number
                )
        else:
            above, K = padded_width(table[layer + 1, COL_N]), table[layer + 1, COL_N]
            src = address(block.dzs) + (table[layer + 1, COL_ACT] + first * above) * 4
            wt, dst = address(model.wt) + table[layer + 1, COL_WT] * 4, address(block.dzs) + at * 4
            dense(src, above * 4, count, wt, K, width, address(block.zeros), dst, width * 4, _NO_FLOOR)
        _through_activation(block.dzs, block.acts, at, count, N, width, table[layer, COL_CODE])


@compiled()
def _weights_pass(
    model: Model, block: Block, task: int, rows: int, is_first: bool, is_last: bool, tile: int, rule: Rule
) -> None:
    """One piece of the weights: its gradient over the block's rows; in the batch's last block also the update."""
    table = model.table
    layer, n, k_first, k_last = model.tasks[task, 0], model.tasks[task, 1], model.tasks[task, 2], model.tasks[task, 3]
    K, N = table[layer, COL_K], table[layer, COL_N]
    N_padded = padded_width(N)
    width = next_panel(N_padded - n)
    step = ROWS_WIDE if width == PANEL else ROWS_NARROW
    dz, dz_row = address(block.dzs) + (table[layer, COL_ACT] + n) * 4, N_padded * 4
    a, a_row = address(block.x), K * 4
    if layer > 0:
        a, a_row = address(block.acts) + table[layer - 1, COL_ACT] * 4, padded_width(K) * 4
    alone = is_first and is_last  # then the gradient is used up at once and needs no place of its own
    grads = block.tiles if alone else model.gw
    for k in range(k_first, k_last, step):
        count = min(step, k_last - k)
        at = table[layer, COL_W] + n * K + k * width
        g_at = tile if alone else at
        out = address(grads) + g_at * 4
        _gradient_tile(a + k * 4, a_row, dz, dz_row, rows, count, width, address(block.zeros), out, is_first)
        if is_last:
            _update(model.w, model.vw, at, grads, g_at, count * width, rule)
            if layer > 0:
                _transpose(model.w, at, model.wt, table[layer, COL_WT], K, N, k, n, count, width)
    if k_first == 0 and table[layer, COL_HAS_BIAS]:
        at = table[layer, COL_BIAS] + n
        sums = model.gb[at : at + width]
        if is_first:
            for j in range(width):
                sums[j] = _ZERO
        for r in range(rows):
            row = table[layer, COL_ACT] + r * N_padded + n
            grad_row = block.dzs[row : row + width]
            for j in range(width):
                sums[j] += grad_row[j]
        if is_last:
            _update(model.bias, model.vb, at, model.gb, at, width, rule)


@compiled()
def _gradient_tile(
    a: int, a_row: int, dz: int, dz_row: int, rows: int, count: int, width: int, zeros: int, out: int, is_first: bool
) -> None:
    """out[k, n] = (0 or out[k, n]) + sum over rows of a[row, k] dz[row, n], k < count, n < width."""
    out_row = width * 4
    if count == (ROWS_WIDE if width == PANEL else ROWS_NARROW):
        init, init_row = (zeros, 0) if is_first else (out, out_row)
        if width == PANEL:
            multiply_tile(
                a, 4, a_row, dz, dz_row, init, init_row, out, out_row, 1, 0, rows, _NO_FLOOR, ROWS_WIDE, VECS_WIDE
            )
        elif width == 2 * LANES:
            multiply_tile(a, 4, a_row, dz, dz_row, init, init_row, out, out_row, 1, 0, rows, _NO_FLOOR, ROWS_NARROW, 2)
        else:
            multiply_tile(a, 4, a_row, dz, dz_row, init, init_row, out, out_row, 1, 0, rows, _NO_FLOOR, ROWS_NARROW, 1)
        return
    for k in range(count):
        to = out + k * out_row
        init = zeros if is_first else to
        if width == PANEL:
            multiply_tile(a + k * 4, 4, a_row, dz, dz_row, init, 0, to, 0, 1, 0, rows, _NO_FLOOR, 1, VECS_WIDE)
        elif width == 2 * LANES:
            multiply_tile(a + k * 4, 4, a_row, dz, dz_row, init, 0, to, 0, 1, 0, rows, _NO_FLOOR, 1, 2)
        else:
            multiply_tile(a + k * 4, 4, a_row, dz, dz_row, init, 0, to, 0, 1, 0, rows, _NO_FLOOR, 1, 1)


@compiled()
def _update(w: Array, v: Array, at: int, g: Array, g_at: int, size: int, rule: Rule) -> None:
    """Apply the rule to `size` numbers from w[at], v[at] and g[g_at] on."""
    weights, velocity, grads = w[at : at + size], v[at : at + size], g[g_at : g_at + size]
    lr, momentum, scale = rule.lr, rule.momentum, rule.scale
    if momentum == _ZERO:
        for i in range(size):
            weights[i] -= lr * (scale * grads[i])
    else:
        for i in range(size):
            velocity[i] = momentum * velocity[i] + scale * grads[i]
            weights[i] -= lr * velocity[i]


@compiled()
def _transpose(
    w: Array, w_at: int, wt: Array, wt_at: int, K: int, N: int, k: int, n: int, count: int, width: int
) -> None:
    """Keep the transposed copy of w[k:k+count, n:n+width] in step."""
    start, across = 0, next_panel(padded_width(K))
    while start + across <= k:  # the panel of wt that column k falls into
        start += across
        across = next_panel(padded_width(K) - start)
    for j in range(min(width, N - n)):
        at = wt_at + start * N + (n + j) * across + (k - start)
        for r in range(count):
            wt[at + r] = w[w_at + r * width + j]


@compiled(parallel=True)
def run_steps(
    model: Model, block: Block, data: Data, batch: int, loss_code: int, lr: np.float32, momentum: np.float32,
    losses: Array, threads: int,
) -> None:  # fmt: skip
    """One step a batch of data.order; the last batch may be short. losses gets a number a step."""
    mean = loss_code == CROSS_ENTROPY
    for step in range(len(losses)):
        begin = step * batch
        size = min(batch, len(data.order) - begin)
        rule = Rule(lr, momentum, np.float32(1.0 / size) if mean else _ONE)
        total = 0.0
        for start in range(0, size, BLOCK):
            count = min(BLOCK, size - start)
            is_first, is_last = start == 0, start + BLOCK >= size
            block.tickets[0] = 0
            for _ in numba.prange(threads):
                while True:
                    first = take_ticket(address(block.tickets)) * PART_ROWS
                    if first >= count:
                        break
                    rows = min(PART_ROWS, count - first)
                    _rows_pass(model, block, data, begin + start, first, rows, loss_code)
            block.tickets[0] = 0
            for worker in numba.prange(threads):
                while True:
                    task = take_ticket(address(block.tickets))
                    if task >= len(model.tasks):
                        break
                    _weights_pass(model, block, task, count, is_first, is_last, worker * TILE_FLOATS, rule)
            for r in range(count):
                total += block.losses[r]
        losses[step] = total / size if mean else total
