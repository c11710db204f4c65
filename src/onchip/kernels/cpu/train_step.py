"""The arithmetic of a training step: what mlp_train.py launches, in two parallel loops a block of rows."""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
from numba import types

from onchip.kernels.cpu.activation import LEAKY, RELU, SIGMOID, TANH, activate, expm1_exp
from onchip.kernels.cpu.dense import dense, next_panel, padded_width
from onchip.kernels.cpu.emit import LANES
from onchip.kernels.cpu.jit import address, compiled, linked, take_ticket
from onchip.kernels.cpu.tile import PANEL, ROWS_NARROW, ROWS_WIDE, TILE_FLOATS, VECS_WIDE, multiply_tile
from onchip.spec.recipe import Array

BLOCK = 256  # rows of a batch that go through together
PART_ROWS = 16  # rows that a thread takes through the network at a time
CROSS_ENTROPY, HALF_SSE, MSE = range(3)
SGD, MOMENTUM, ADAM = range(3)
BETA1, BETA2, EPS = 0.9, 0.999, 1e-8  # of Adam

# Columns of the table: one row a layer.
COL_K, COL_N, COL_W, COL_BIAS, COL_CODE, COL_WT, COL_ACT, COL_HAS_BIAS = range(8)
_ZERO, _ONE, _NO_FLOOR = np.float32(0), np.float32(1), np.float32(-np.inf)
_BETA1, _REST1, _BETA2, _REST2 = np.float32(BETA1), np.float32(1 - BETA1), np.float32(BETA2), np.float32(1 - BETA2)
_EPS = np.float32(EPS)


class Model(NamedTuple):
    """What a run trains: weights packed as in mlp_fused, and what goes with each of them."""

    table: Array  # a row a layer, the columns above
    tasks: Array  # the pieces of an update: layer, first column, first k, last k
    w: Array
    bias: Array
    wt: Array  # w transposed, of every layer but the first: the backward pass reads w by columns
    vw: Array  # velocities, or Adam's running mean of the gradients; empty for plain SGD
    vb: Array
    sw: Array  # Adam's running mean of their squares; empty for the others
    sb: Array
    gw: Array  # gradients; gw only where a batch has more than one block
    gb: Array


class Block(NamedTuple):
    """What a block of rows needs while it goes through."""

    x: Array  # (rows, D_in) gathered
    acts: Array  # every layer's output, a layer behind the other
    dzs: Array  # gradients by what goes into the activations, laid out like acts
    losses: Array  # a number a row
    hits: Array  # 1 for a row whose largest output is its class's
    zeros: Array  # a bias for products that have none
    tiles: Array  # a thread's gradient tile
    tickets: Array


class Data(NamedTuple):
    x: Array  # (n, D_in)
    classes: Array  # (n,) for cross-entropy
    targets: Array  # (n, D_out) for sums of squares
    order: Array  # which rows, batch by batch


class Rule(NamedTuple):
    """How weights follow from gradients: g = scale gradient + decay w, then as _update says for each kind."""

    kind: int
    lr: np.float32  # of Adam: lr / (1 - BETA1^step)
    momentum: np.float32
    decay: np.float32
    scale: np.float32
    root: np.float32  # of Adam: 1 / sqrt(1 - BETA2^step)


@compiled()
def _loss_row(z: Array, dz: Array, at: int, N: int, stride: int, code: int, data: Data, row: int) -> tuple[float, int]:
    """The loss of one row with output z[at : at + N], and whether it hits its class.

    The gradient goes to dz, 0 in the columns past N; of MSE without the factor that all rows share.
    """
    for n in range(at + N, at + stride):
        dz[n] = _ZERO
    loss, hit = 0.0, 0
    if code == CROSS_ENTROPY:
        highest, best = z[at], at
        for n in range(at + 1, at + N):
            if z[n] > highest:
                highest, best = z[n], n
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
        loss, hit = np.log(total) - np.float64(z[truth] - highest), int(best == truth)
    else:
        for n in range(N):
            difference = z[at + n] - data.targets[row, n]
            loss += np.float64(difference) * np.float64(difference)
            dz[at + n] = difference
        loss *= 0.5 if code == HALF_SSE else 1.0 / N
    return loss, hit


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
        elif code & 255 == LEAKY:
            slope = np.int32(code >> 8).view(np.float32)
            for n in range(N):
                grad[n] = grad[n] if out[n] > _ZERO else grad[n] * slope


@compiled()
def _where_rows_lie(block: Block, data: Data, begin: int, count: int) -> int:
    """The address of the block's rows: where x has them, if they follow each other there, else block.x."""
    first = data.order[begin]
    for r in range(1, count):
        if data.order[begin + r] != first + r:
            return address(block.x)
    at: int = address(data.x) + first * data.x.shape[1] * 4
    return at


@compiled()
def _forward(model: Model, block: Block, data: Data, begin: int, x: int, first: int, count: int) -> None:
    """Rows first..first+count of the block that starts at order[begin] through all layers; x: see _where_rows_lie."""
    table = model.table
    K0 = table[0, COL_K]
    if x == address(block.x):
        for r in range(first, first + count):
            row, to = data.x[data.order[begin + r]], block.x[r * K0 : (r + 1) * K0]
            for k in range(K0):
                to[k] = row[k]
    src, src_row = x + first * K0 * 4, K0 * 4
    for layer in range(len(table)):
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


@compiled()
def _judge(model: Model, block: Block, data: Data, begin: int, first: int, count: int, loss_code: int) -> None:
    """The losses, hits and output gradients of rows that went through _forward."""
    last = len(model.table) - 1
    N = model.table[last, COL_N]
    width = padded_width(N)
    for r in range(first, first + count):
        at = model.table[last, COL_ACT] + r * width
        row = data.order[begin + r]
        block.losses[r], block.hits[r] = _loss_row(block.acts, block.dzs, at, N, width, loss_code, data, row)


@compiled()
def _backward(model: Model, block: Block, first: int, count: int) -> None:
    """From the output gradients of some rows to every layer's dz."""
    table = model.table
    for layer in range(len(table) - 1, -1, -1):
        N = table[layer, COL_N]
        width = padded_width(N)
        at = table[layer, COL_ACT] + first * width
        if layer < len(table) - 1:
            above, K = padded_width(table[layer + 1, COL_N]), table[layer + 1, COL_N]
            src = address(block.dzs) + (table[layer + 1, COL_ACT] + first * above) * 4
            wt, dst = address(model.wt) + table[layer + 1, COL_WT] * 4, address(block.dzs) + at * 4
            dense(src, above * 4, count, wt, K, width, address(block.zeros), dst, width * 4, _NO_FLOOR)
        _through_activation(block.dzs, block.acts, at, count, N, width, table[layer, COL_CODE])


@linked(*(types.int64,) * 9, types.boolean)
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
def _weights_pass(
    model: Model, block: Block, x: int, task: int, rows: int, is_first: bool, is_last: bool, tile: int, rule: Rule
) -> None:
    """One piece of the weights: its gradient over the block's rows; in the batch's last block also the update."""
    table = model.table
    layer, n, k_first, k_last = model.tasks[task, 0], model.tasks[task, 1], model.tasks[task, 2], model.tasks[task, 3]
    K, N = table[layer, COL_K], table[layer, COL_N]
    N_padded = padded_width(N)
    width = next_panel(N_padded - n)
    step = ROWS_WIDE if width == PANEL else ROWS_NARROW
    dz, dz_row = address(block.dzs) + (table[layer, COL_ACT] + n) * 4, N_padded * 4
    a, a_row = x, K * 4
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
            _update(model.w, model.vw, model.sw, at, grads, g_at, count * width, rule)
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
            _update(model.bias, model.vb, model.sb, at, model.gb, at, width, rule)


@compiled()
def _update(w: Array, v: Array, s: Array, at: int, g: Array, g_at: int, size: int, rule: Rule) -> None:
    """Apply the rule to `size` numbers from w[at], v[at], s[at] and g[g_at] on.

    SGD       w -= lr g
    MOMENTUM  v = momentum v + g; w -= lr v
    ADAM      v = BETA1 v + (1 - BETA1) g; s = BETA2 s + (1 - BETA2) g^2; w -= lr v / (root sqrt(s) + EPS)
    """
    weights, grads = w[at : at + size], g[g_at : g_at + size]
    means, squares = v[at : at + size], s[at : at + size]
    lr, momentum, decay, scale, root = rule.lr, rule.momentum, rule.decay, rule.scale, rule.root
    if rule.kind == SGD:
        for i in range(size):
            weights[i] -= lr * (scale * grads[i] + decay * weights[i])
    elif rule.kind == MOMENTUM:
        for i in range(size):
            means[i] = momentum * means[i] + (scale * grads[i] + decay * weights[i])
            weights[i] -= lr * means[i]
    else:
        for i in range(size):
            gradient = scale * grads[i] + decay * weights[i]
            means[i] = _BETA1 * means[i] + _REST1 * gradient
            squares[i] = _BETA2 * squares[i] + _REST2 * (gradient * gradient)
            weights[i] -= lr * means[i] / (root * np.sqrt(squares[i]) + _EPS)


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


# -- whole steps -------------------------------------------------------------------------------------------


@compiled()
def _factors(step: int, size: int, N: int, loss_code: int, rule: Rule) -> tuple[np.float32, np.float32, np.float32]:
    """lr, scale and root of one step, the first being step 1, on a batch of `size` rows with N outputs each.

    The means of the losses are divided out here: once a weight, not once a row.
    """
    scale = _ONE
    if loss_code == CROSS_ENTROPY:
        scale = np.float32(1.0 / size)
    elif loss_code == MSE:
        scale = np.float32(2.0 / (size * N))
    lr, root = rule.lr, _ONE
    if rule.kind == ADAM:
        lr = np.float32(np.float64(lr) / (1.0 - BETA1**step))
        root = np.float32(1.0 / np.sqrt(1.0 - BETA2**step))
    return lr, scale, root


@compiled()
def _rows_worker(model: Model, block: Block, data: Data, begin: int, x: int, count: int, loss_code: int) -> None:
    """Take some of the block's rows forward and back, as long as there are any."""
    while True:
        first = take_ticket(address(block.tickets)) * PART_ROWS
        if first >= count:
            break
        rows = min(PART_ROWS, count - first)
        _forward(model, block, data, begin, x, first, rows)
        _judge(model, block, data, begin, first, rows, loss_code)
        _backward(model, block, first, rows)


@compiled()
def _weights_worker(
    model: Model, block: Block, x: int, worker: int, rows: int, is_first: bool, is_last: bool, rule: Rule
) -> None:
    """Take some pieces of the weights, as long as there are any."""
    while True:
        task = take_ticket(address(block.tickets))
        if task >= len(model.tasks):
            break
        _weights_pass(model, block, x, task, rows, is_first, is_last, worker * TILE_FLOATS, rule)


@compiled()
def _add_up(block: Block, count: int, step: int, losses: Array, hits: Array) -> None:
    for r in range(count):
        losses[step] += block.losses[r]
        hits[step] += block.hits[r]


@compiled(parallel=True)
def run_steps(
    model: Model, block: Block, data: Data, batch: int, loss_code: int, choice: Rule, done: int, losses: Array,
    hits: Array, threads: int,
) -> None:  # fmt: skip
    """One step a batch of data.order, `done` steps having gone before; the last batch may be short.

    losses, hits get a number a step: the sum of the rows' losses, and how many rows hit their class.
    """
    N = model.table[-1, COL_N]
    for step in range(len(losses)):
        begin = step * batch
        size = min(batch, len(data.order) - begin)
        lr, scale, root = _factors(done + step + 1, size, N, loss_code, choice)
        rule = Rule(choice.kind, lr, choice.momentum, choice.decay, scale, root)
        for start in range(0, size, BLOCK):
            count = min(BLOCK, size - start)
            x = _where_rows_lie(block, data, begin + start, count)
            block.tickets[0] = 0
            for _ in numba.prange(threads):
                _rows_worker(model, block, data, begin + start, x, count, loss_code)
            block.tickets[0] = 0
            for worker in numba.prange(threads):
                _weights_worker(model, block, x, worker, count, start == 0, start + BLOCK >= size, rule)
            _add_up(block, count, step, losses, hits)


@compiled()
def run_steps_alone(
    model: Model, block: Block, data: Data, batch: int, loss_code: int, choice: Rule, done: int, losses: Array,
    hits: Array,
) -> None:  # fmt: skip
    """run_steps on the calling thread, with the same bits: many of them may run side by side."""
    N = model.table[-1, COL_N]
    for step in range(len(losses)):
        begin = step * batch
        size = min(batch, len(data.order) - begin)
        lr, scale, root = _factors(done + step + 1, size, N, loss_code, choice)
        rule = Rule(choice.kind, lr, choice.momentum, choice.decay, scale, root)
        for start in range(0, size, BLOCK):
            count = min(BLOCK, size - start)
            x = _where_rows_lie(block, data, begin + start, count)
            block.tickets[0] = 0
            _rows_worker(model, block, data, begin + start, x, count, loss_code)
            block.tickets[0] = 0
            _weights_worker(model, block, x, 0, count, start == 0, start + BLOCK >= size, rule)
            _add_up(block, count, step, losses, hits)


# -- losses alone ------------------------------------------------------------------------------------------


@compiled()
def _losses_worker(model: Model, block: Block, data: Data, begin: int, x: int, count: int, loss_code: int) -> None:
    while True:
        first = take_ticket(address(block.tickets)) * PART_ROWS
        if first >= count:
            break
        rows = min(PART_ROWS, count - first)
        _forward(model, block, data, begin, x, first, rows)
        _judge(model, block, data, begin, first, rows, loss_code)


@compiled(parallel=True)
def run_losses(
    model: Model, block: Block, data: Data, loss_code: int, losses: Array, hits: Array, threads: int
) -> None:
    """Sum of the losses and number of hits of all rows of data.order, to losses[0] and hits[0]; nothing changes."""
    for begin in range(0, len(data.order), BLOCK):
        count = min(BLOCK, len(data.order) - begin)
        x = _where_rows_lie(block, data, begin, count)
        block.tickets[0] = 0
        for _ in numba.prange(threads):
            _losses_worker(model, block, data, begin, x, count, loss_code)
        _add_up(block, count, 0, losses, hits)


@compiled()
def run_losses_alone(model: Model, block: Block, data: Data, loss_code: int, losses: Array, hits: Array) -> None:
    """run_losses on the calling thread, with the same bits."""
    for begin in range(0, len(data.order), BLOCK):
        count = min(BLOCK, len(data.order) - begin)
        x = _where_rows_lie(block, data, begin, count)
        block.tickets[0] = 0
        _losses_worker(model, block, data, begin, x, count, loss_code)
        _add_up(block, count, 0, losses, hits)
