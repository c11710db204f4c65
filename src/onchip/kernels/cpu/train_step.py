"""Training steps, whole: what mlp_train.py launches, in two parallel loops a block of rows."""

from __future__ import annotations

import numba
import numpy as np

from onchip.kernels.cpu.jit import address, compiled, take_ticket
from onchip.kernels.cpu.tile import ROWS_WIDE
from onchip.kernels.cpu.train_model import ADAM, COL_K, COL_N, CROSS_ENTROPY, MSE, Block, Data, Model, Rule
from onchip.kernels.cpu.train_rows import backward, forward, judge, where_rows_lie
from onchip.kernels.cpu.train_weights import BETA1, BETA2, TASK_FLOATS, weights_pass
from onchip.spec.recipe import Array

BLOCK = 1024  # rows of a batch that go through together, at most
PART_ROWS = 64  # rows that a thread takes through the network at a time, at most
_ONE = np.float32(1)


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
def _part_rows(count: int, threads: int) -> int:
    """Rows of a part: two parts a thread or more, in whole tiles. How rows are parted changes no bit."""
    return min(PART_ROWS, -(-count // (2 * threads * ROWS_WIDE)) * ROWS_WIDE)


@compiled()
def _rows_worker(
    model: Model, block: Block, data: Data, begin: int, x: int, count: int, part: int, loss_code: int
) -> None:
    """Take some of the block's rows forward and back, as long as there are any."""
    while True:
        first = take_ticket(address(block.tickets)) * part
        if first >= count:
            break
        rows = min(part, count - first)
        forward(model, block, data, begin, x, first, rows)
        judge(model, block, data, begin, first, rows, loss_code)
        backward(model, block, first, rows)


@compiled()
def _weights_worker(
    model: Model, block: Block, x: int, worker: int, rows: int, is_first: bool, is_last: bool, rule: Rule
) -> None:
    """Take some pieces of the weights, as long as there are any."""
    while True:
        task = take_ticket(address(block.tickets))
        if task >= len(model.tasks):
            break
        weights_pass(model, block, x, task, rows, is_first, is_last, worker * TASK_FLOATS, rule)


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
    D_in, N, most = model.table[0, COL_K], model.table[-1, COL_N], len(block.losses)
    for step in range(len(losses)):
        begin = step * batch
        size = min(batch, len(data.order) - begin)
        lr, scale, root = _factors(done + step + 1, size, N, loss_code, choice)
        rule = Rule(choice.kind, lr, choice.momentum, choice.decay, scale, root)
        for start in range(0, size, most):
            count = min(most, size - start)
            part = _part_rows(count, threads)
            x = where_rows_lie(block, data, D_in, begin + start, count)
            block.tickets[0] = 0
            for _ in numba.prange(threads):
                _rows_worker(model, block, data, begin + start, x, count, part, loss_code)
            block.tickets[0] = 0
            for worker in numba.prange(threads):
                _weights_worker(model, block, x, worker, count, start == 0, start + most >= size, rule)
            _add_up(block, count, step, losses, hits)


@compiled()
def run_steps_alone(
    model: Model, block: Block, data: Data, batch: int, loss_code: int, choice: Rule, done: int, losses: Array,
    hits: Array,
) -> None:  # fmt: skip
    """run_steps on the calling thread, with the same bits: many of them may run side by side."""
    D_in, N, most = model.table[0, COL_K], model.table[-1, COL_N], len(block.losses)
    for step in range(len(losses)):
        begin = step * batch
        size = min(batch, len(data.order) - begin)
        lr, scale, root = _factors(done + step + 1, size, N, loss_code, choice)
        rule = Rule(choice.kind, lr, choice.momentum, choice.decay, scale, root)
        for start in range(0, size, most):
            count = min(most, size - start)
            x = where_rows_lie(block, data, D_in, begin + start, count)
            block.tickets[0] = 0
            _rows_worker(model, block, data, begin + start, x, count, PART_ROWS, loss_code)
            block.tickets[0] = 0
            _weights_worker(model, block, x, 0, count, start == 0, start + most >= size, rule)
            _add_up(block, count, step, losses, hits)


# -- losses alone ------------------------------------------------------------------------------------------


@compiled()
def _losses_worker(
    model: Model, block: Block, data: Data, begin: int, x: int, count: int, part: int, loss_code: int
) -> None:
    while True:
        first = take_ticket(address(block.tickets)) * part
        if first >= count:
            break
        rows = min(part, count - first)
        forward(model, block, data, begin, x, first, rows)
        judge(model, block, data, begin, first, rows, loss_code)


@compiled(parallel=True)
def run_losses(
    model: Model, block: Block, data: Data, loss_code: int, losses: Array, hits: Array, threads: int
) -> None:
    """Sum of the losses and number of hits of all rows of data.order, to losses[0] and hits[0]; nothing changes."""
    most = len(block.losses)
    for begin in range(0, len(data.order), most):
        count = min(most, len(data.order) - begin)
        part = _part_rows(count, threads)
        x = where_rows_lie(block, data, model.table[0, COL_K], begin, count)
        block.tickets[0] = 0
        for _ in numba.prange(threads):
            _losses_worker(model, block, data, begin, x, count, part, loss_code)
        _add_up(block, count, 0, losses, hits)


@compiled()
def run_losses_alone(model: Model, block: Block, data: Data, loss_code: int, losses: Array, hits: Array) -> None:
    """run_losses on the calling thread, with the same bits."""
    most = len(block.losses)
    for begin in range(0, len(data.order), most):
        count = min(most, len(data.order) - begin)
        x = where_rows_lie(block, data, model.table[0, COL_K], begin, count)
        block.tickets[0] = 0
        _losses_worker(model, block, data, begin, x, count, PART_ROWS, loss_code)
        _add_up(block, count, 0, losses, hits)
