"""Whole training steps, as mlp.py launches them.

A batch is split into blocks of BLOCK rows. The gradient of a block is a sum over its rows in order, that of the batch a
sum over its blocks in order: the bits do not depend on which thread computes a block or a weight tile.

All parameters are ints, so that functions are cached as machine code and compiled once:

model, block, scratch  address of descriptors_of(a Model, Block or Scratch)
data                   address of data_fields
values                 address of (steps, STEP_FLOATS) float32: the optimiser's values per step
losses_at              address of a float64 per step: the sum of the rows' losses
correct_at             address of an int64 per step: the number of correct predictions
times                  address of the times of phases.py; 0: none are recorded
"""

from __future__ import annotations

from onchip.kernels.cpu.compiler.jit import address, compiled, doubles_at, entry, floats_at, ints_at
from onchip.kernels.cpu.microkernels.tile import ROWS_WIDE
from onchip.kernels.cpu.threading.threads import run_tasks
from onchip.kernels.cpu.train.model import (
    Optimiser,
    batch_gradients,
    bias_gradients,
    block_at,
    block_of,
    data_at,
    optimiser_of,
    scratch_at,
    tasks_at,
)
from onchip.kernels.cpu.train.phases import (
    ADD_BLOCKS,
    BACKWARD,
    BLOCK_GRADIENTS,
    FORWARD,
    GRADIENTS,
    LOSS,
    NORM,
    ROWS_LOOP,
    STEP,
    UPDATE,
    WEIGHTS_LOOP,
    clock,
    lap,
    times_of_step,
)  # fmt: skip
from onchip.kernels.cpu.train.rows import backward, forward, output_gradients, rows_address
from onchip.kernels.cpu.train.weights import (
    TASK_FLOATS,
    add_block,
    clipped,
    gradient_of_task,
    square_task,
    update_task,
    weights_of_task,
)
from onchip.kernels.training import STEP_FLOATS

BLOCK = 1024  # rows of a batch whose gradients are one sum
WORKER_ROWS = 256  # rows per worker at a time, if each has its own block: they stay in L2 from forward to gradient
PART_ROWS = 64  # maximum rows per forward and backward pass


@compiled()
def _sum_up(block_ptr: int, count: int) -> tuple[float, int]:
    """The sum of losses, and the number of correct predictions, of a block's rows."""
    block, loss, correct_rows = block_at(block_ptr), 0.0, 0
    for r in range(count):
        loss += block.losses[r]
        correct_rows += block.correct[r]
    return loss, correct_rows


@compiled(inline=True)
def _optimiser_at(values: int, step: int, kind: int) -> Optimiser:
    return optimiser_of(kind, floats_at(values + step * STEP_FLOATS * 4, STEP_FLOATS))


@compiled()
def _update_by_batch(model: int, task: int, opt: Optimiser) -> None:
    """Update a weight tile by the batch's gradients in gw and gb."""
    gw, gb = batch_gradients(model)
    update_task(model, task, gw + weights_of_task(model, task)[0] * 4, gb, opt)


# -- clipped gradients: their norm needs all of them ----------------------------------------------------------


@compiled()
def _square_body(worker: int, task: int, model: int, times: int) -> None:
    began = clock(times)
    square_task(model, task)
    lap(times, worker, NORM, began)


@compiled()
def _update_body(worker: int, task: int, model: int, opt: Optimiser, times: int) -> None:
    began = clock(times)
    _update_by_batch(model, task, opt)
    lap(times, worker, UPDATE, began)


@compiled()
def _update_clipped(model: int, opt: Optimiser, threads: int, times: int) -> None:
    """Update all weights by the batch's gradient, clipped."""
    tasks, began = len(tasks_at(model)), clock(times)
    run_tasks(_square_body, (model, times), tasks, threads)
    run_tasks(_update_body, (model, clipped(model, opt), times), tasks, threads)
    lap(times, 0, WEIGHTS_LOOP, began)


@compiled()
def _pass(
    worker: int, model: int, block: int, data: int, begin: int, x: int, first: int, rows: int, loss_code: int,
    times: int,
) -> None:  # fmt: skip
    """The forward and backward pass of some of the block's rows."""
    began = clock(times)
    forward(model, block, data, begin, x, first, rows)
    began = lap(times, worker, FORWARD, began)
    output_gradients(model, block, data, begin, first, rows, loss_code)
    began = lap(times, worker, LOSS, began)
    backward(model, block, first, rows)
    lap(times, worker, BACKWARD, began)


# -- threads share the rows of a block, then the weight tiles -------------------------------------------------


@compiled()
def _part_rows(count: int, threads: int) -> int:
    """Rows per task: at least two tasks per thread, in whole tiles. The results do not depend on it."""
    return min(PART_ROWS, -(-count // (2 * threads * ROWS_WIDE)) * ROWS_WIDE)


@compiled()
def _rows_body(
    worker: int, index: int, model: int, block: int, data: int, begin: int, x: int, count: int, part: int,
    loss_code: int, times: int,
) -> None:  # fmt: skip
    """The forward and backward pass of `part` of the block's rows."""
    first = index * part
    _pass(worker, model, block, data, begin, x, first, min(part, count - first), loss_code, times)


@compiled()
def _weights_body(
    worker: int, task: int, model: int, block: int, x: int, tiles: int, rows: int, is_first: bool, is_last: bool,
    opt: Optimiser, times: int,
) -> None:  # fmt: skip
    """The gradient of a weight tile; after the batch's last block, update the tile.

    tiles  address of a gradient tile per worker; a batch of one block needs no other memory
    """
    tile, gb, began = tiles + worker * TASK_FLOATS * 4, bias_gradients(block), clock(times)
    gradient_of_task(model, block, x, task, rows, tile, gb, True)
    began = lap(times, worker, GRADIENTS, began)
    if is_first and is_last:
        update_task(model, task, tile, gb, opt)
        lap(times, worker, UPDATE, began)
        return
    add_block(model, task, tile, gb, is_first)
    began = lap(times, worker, ADD_BLOCKS, began)
    if is_last:
        _update_by_batch(model, task, opt)
        lap(times, worker, UPDATE, began)


@entry
def run_steps(
    model: int, block: int, data: int, batch: int, loss_code: int, kind: int, values: int, steps: int, losses_at: int,
    correct_at: int, times: int, tiles: int, threads: int,
) -> int:  # fmt: skip
    """One step per batch of data.order; the last batch may be short.

    tiles  address of (threads, TASK_FLOATS): a gradient tile per thread
    """
    losses, correct = doubles_at(losses_at, steps), ints_at(correct_at, steps)
    tasks, all_rows = len(tasks_at(model)), len(data_at(data).order)
    for step in range(steps):
        begin = step * batch
        size = min(batch, all_rows - begin)
        opt = _optimiser_at(values, step, kind)
        at = times_of_step(times)
        step_began = clock(at)
        for start in range(0, size, BLOCK):
            count = min(BLOCK, size - start)
            part = _part_rows(count, threads)
            x = rows_address(model, block, data, begin + start, count)
            rows, began = (model, block, data, begin + start, x, count, part, loss_code, at), clock(at)
            run_tasks(_rows_body, rows, (count + part - 1) // part, threads)
            began = lap(at, 0, ROWS_LOOP, began)
            updates = start + BLOCK >= size and opt.clip == 0
            weights = (model, block, x, tiles, count, start == 0, updates, opt, at)
            run_tasks(_weights_body, weights, tasks, threads)
            lap(at, 0, WEIGHTS_LOOP, began)
            loss, correct_rows = _sum_up(block, count)
            losses[step] += loss
            correct[step] += correct_rows
        if opt.clip > 0:
            _update_clipped(model, opt, threads, at)
        lap(at, 0, STEP, step_began)
    return 0


# -- large batches: one worker per block -------------------------------------------------------------------


@compiled()
def _forward_backward(
    worker: int, model: int, block: int, data: int, begin: int, rows: int, loss_code: int, times: int
) -> int:
    """The forward and backward pass of rows from order[begin] on, on one thread; returns their address."""
    x = rows_address(model, block, data, begin, rows)
    for first in range(0, rows, PART_ROWS):
        _pass(worker, model, block, data, begin, x, first, min(PART_ROWS, rows - first), loss_code, times)
    return x


@compiled()
def _block_body(
    worker: int, index: int, model: int, scratch_ptr: int, data: int, begin: int, size: int, loss_code: int, times: int
) -> None:
    """Gradients, loss and correct predictions of block `index`, WORKER_ROWS rows at a time.

    The blocks begin at order[begin]; the last ends with the batch.
    """
    scratch, first = scratch_at(scratch_ptr), begin + index * BLOCK
    count, block = min(BLOCK, size - index * BLOCK), block_of(scratch, worker)
    gw, gb = address(scratch.gw[index]), address(scratch.gb[index])
    scratch.loss[index], scratch.correct[index] = 0.0, 0
    for start in range(0, count, WORKER_ROWS):
        rows = min(WORKER_ROWS, count - start)
        x = _forward_backward(worker, model, block, data, first + start, rows, loss_code, times)
        began = clock(times)
        for task in range(len(tasks_at(model))):
            out = gw + weights_of_task(model, task)[0] * 4
            gradient_of_task(model, block, x, task, rows, out, gb, start == 0)
        lap(times, worker, BLOCK_GRADIENTS, began)
        done = block_at(block)
        for r in range(rows):  # one sum over the block, as in _sum_up
            scratch.loss[index] += done.losses[r]
            scratch.correct[index] += done.correct[r]


@compiled()
def _reduce_body(
    worker: int, task: int, model: int, scratch_ptr: int, blocks: int, is_first: bool, is_last: bool, opt: Optimiser,
    times: int,
) -> None:  # fmt: skip
    """Add some blocks' gradients of a weight tile; after the batch's last block, update the tile."""
    scratch, at, began = scratch_at(scratch_ptr), weights_of_task(model, task)[0] * 4, clock(times)
    if is_first and is_last and blocks == 1:
        update_task(model, task, address(scratch.gw) + at, address(scratch.gb), opt)
        lap(times, worker, UPDATE, began)
        return
    for index in range(blocks):
        gw, gb = address(scratch.gw[index]), address(scratch.gb[index])
        add_block(model, task, gw + at, gb, is_first and index == 0)
    began = lap(times, worker, ADD_BLOCKS, began)
    if is_last:
        _update_by_batch(model, task, opt)
        lap(times, worker, UPDATE, began)


@entry
def run_large_steps(
    model: int, scratch_ptr: int, data: int, batch: int, loss_code: int, kind: int, values: int, steps: int,
    losses_at: int, correct_at: int, times: int, threads: int,
) -> int:  # fmt: skip
    """run_steps for batches of many blocks, with the same bits: one barrier per group of blocks."""
    losses, correct = doubles_at(losses_at, steps), ints_at(correct_at, steps)
    scratch, tasks, all_rows = scratch_at(scratch_ptr), len(tasks_at(model)), len(data_at(data).order)
    group_rows = len(scratch.gw) * BLOCK
    for step in range(steps):
        begin = step * batch
        size = min(batch, all_rows - begin)
        opt = _optimiser_at(values, step, kind)
        at = times_of_step(times)
        step_began = clock(at)
        for start in range(0, size, group_rows):
            blocks = (min(group_rows, size - start) + BLOCK - 1) // BLOCK
            rows, began = (model, scratch_ptr, data, begin + start, size - start, loss_code, at), clock(at)
            run_tasks(_block_body, rows, blocks, threads)
            began = lap(at, 0, ROWS_LOOP, began)
            is_last = start + group_rows >= size and opt.clip == 0
            run_tasks(_reduce_body, (model, scratch_ptr, blocks, start == 0, is_last, opt, at), tasks, threads)
            lap(at, 0, WEIGHTS_LOOP, began)
            for index in range(blocks):
                losses[step] += scratch.loss[index]
                correct[step] += scratch.correct[index]
        if opt.clip > 0:
            _update_clipped(model, opt, threads, at)
        lap(at, 0, STEP, step_began)
    return 0


# -- ranks share a batch: each computes some of its blocks -----------------------------------------------------


@compiled()
def _rank_block_body(
    worker: int, index: int, model: int, scratch: int, data: int, begin: int, size: int, loss_code: int, first: int
) -> None:
    _block_body(worker, first + index, model, scratch, data, begin, size, loss_code, 0)


@entry
def run_rank_blocks(
    model: int, scratch: int, data: int, begin: int, size: int, loss_code: int, first: int, count: int, threads: int
) -> int:
    """The gradients of `count` of the blocks that begin at order[begin], from block `first` on; no update."""
    run_tasks(_rank_block_body, (model, scratch, data, begin, size, loss_code, first), count, threads)
    return 0


@entry
def finish_blocks(
    model: int, scratch: int, blocks: int, is_first: int, is_last: int, kind: int, values: int, step: int, threads: int
) -> int:
    """Add the gradients of blocks from all ranks; after the batch's last block, update the weights."""
    opt = _optimiser_at(values, step, kind)
    weights = (model, scratch, blocks, is_first != 0, is_last != 0 and opt.clip == 0, opt, 0)
    run_tasks(_reduce_body, weights, len(tasks_at(model)), threads)
    if is_last != 0 and opt.clip > 0:
        _update_clipped(model, opt, threads, 0)
    return 0


@entry
def run_steps_single(
    model: int, scratch_ptr: int, data: int, batch: int, loss_code: int, kind: int, values: int, steps: int,
    losses_at: int, correct_at: int, times: int,
) -> int:  # fmt: skip
    """run_large_steps on the calling thread, with the same bits: several runs may train concurrently."""
    losses, correct = doubles_at(losses_at, steps), ints_at(correct_at, steps)
    scratch, tasks, all_rows = scratch_at(scratch_ptr), len(tasks_at(model)), len(data_at(data).order)
    group_rows, block, tile = len(scratch.gw) * BLOCK, block_of(scratch, 0), address(scratch.gw)
    for step in range(steps):
        begin = step * batch
        size = min(batch, all_rows - begin)
        opt = _optimiser_at(values, step, kind)
        at = times_of_step(times)
        step_began = clock(at)
        began = step_began
        if size <= WORKER_ROWS and opt.clip == 0:  # each gradient tile is used at once
            x = _forward_backward(0, model, block, data, begin, size, loss_code, at)
            began, gb = lap(at, 0, ROWS_LOOP, began), bias_gradients(block)
            for task in range(tasks):
                tile_began = clock(at)
                gradient_of_task(model, block, x, task, size, tile, gb, True)
                tile_began = lap(at, 0, GRADIENTS, tile_began)
                update_task(model, task, tile, gb, opt)
                lap(at, 0, UPDATE, tile_began)
            lap(at, 0, WEIGHTS_LOOP, began)
            losses[step], correct[step] = _sum_up(block, size)
            lap(at, 0, STEP, step_began)
            continue
        for start in range(0, size, group_rows):
            blocks = (min(group_rows, size - start) + BLOCK - 1) // BLOCK
            for index in range(blocks):
                _block_body(0, index, model, scratch_ptr, data, begin + start, size - start, loss_code, at)
            began = lap(at, 0, ROWS_LOOP, began)
            is_last = start + group_rows >= size and opt.clip == 0
            for task in range(tasks):
                _reduce_body(0, task, model, scratch_ptr, blocks, start == 0, is_last, opt, at)
            began = lap(at, 0, WEIGHTS_LOOP, began)
            for index in range(blocks):
                losses[step] += scratch.loss[index]
                correct[step] += scratch.correct[index]
        if opt.clip > 0:
            for task in range(tasks):
                _square_body(0, task, model, at)
            opt = clipped(model, opt)
            for task in range(tasks):
                _update_body(0, task, model, opt, at)
            lap(at, 0, WEIGHTS_LOOP, began)
        lap(at, 0, STEP, step_began)
    return 0


# -- evaluation --------------------------------------------------------------------------------------------


@compiled()
def _losses_body(worker: int, index: int, model: int, scratch_ptr: int, data: int, begin: int, loss_code: int) -> None:
    """Loss and correct predictions of one of the blocks that begin at order[begin]."""
    scratch, start = scratch_at(scratch_ptr), begin + index * BLOCK
    block, end = block_of(scratch, worker), min(start + BLOCK, len(data_at(data).order))
    scratch.loss[index], scratch.correct[index] = 0.0, 0
    for at in range(start, end, PART_ROWS):
        rows = min(PART_ROWS, end - at)
        forward(model, block, data, at, rows_address(model, block, data, at, rows), 0, rows)
        output_gradients(model, block, data, at, 0, rows, loss_code)
        done = block_at(block)
        for r in range(rows):
            scratch.loss[index] += done.losses[r]
            scratch.correct[index] += done.correct[r]


@entry
def run_losses(
    model: int, scratch_ptr: int, data: int, loss_code: int, losses_at: int, correct_at: int, threads: int
) -> int:
    """The summed loss and correct predictions of all rows of data.order, to losses[0] and correct[0]."""
    scratch, losses, correct = scratch_at(scratch_ptr), doubles_at(losses_at, 1), ints_at(correct_at, 1)
    group_rows, all_rows = len(scratch.loss) * BLOCK, len(data_at(data).order)
    for begin in range(0, all_rows, group_rows):
        blocks = (min(group_rows, all_rows - begin) + BLOCK - 1) // BLOCK
        run_tasks(_losses_body, (model, scratch_ptr, data, begin, loss_code), blocks, threads)
        for index in range(blocks):
            losses[0] += scratch.loss[index]
            correct[0] += scratch.correct[index]
    return 0
