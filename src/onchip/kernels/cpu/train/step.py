"""Training steps, whole: what mlp_train.py launches.

A batch goes through in blocks of BLOCK rows. The gradient of a block is a sum over its rows in order, that of the batch
the sum over its blocks in order: whoever does which block, or which piece of the weights, the bits are the same.

All are called with ints, so that they are kept as machine code, and what they call is compiled once:

model, block, crew  the address of places_of(a Model, Block or Crew)
words               the address of data_words
rules               the address of (steps, STEP_FLOATS) float32: of each step, for this kind of optimiser
losses_at           the address of a float64 a step: the sum of the rows' losses
correct_at             the address of an int64 a step: how many rows hit their class
"""

from __future__ import annotations

from onchip.kernels.cpu.compiler.jit import address, compiled, doubles_at, entry, floats_at, ints_at
from onchip.kernels.cpu.microkernels.tile import ROWS_WIDE
from onchip.kernels.cpu.threading.threads import run_tasks
from onchip.kernels.cpu.train.model import (
    Rule,
    batch_gradients,
    bias_gradients,
    block_at,
    block_of,
    crew_at,
    data_at,
    rule_of,
    tasks_at,
)
from onchip.kernels.cpu.train.rows import backward, forward, output_gradients, where_rows_lie
from onchip.kernels.cpu.train.weights import (
    TASK_FLOATS,
    add_block,
    clipped,
    gradient_of_task,
    place_of_task,
    square_task,
    update_task,
)
from onchip.kernels.training import STEP_FLOATS

BLOCK = 1024  # rows of a batch whose gradients are one sum
CREW_ROWS = (
    256  # rows that a worker of a crew takes at a time: they stay in its L2 from the way forward to the gradient
)
PART_ROWS = 64  # rows that go forward and back at a time, at most


@compiled()
def _sum_up(block_places: int, count: int) -> tuple[float, int]:
    """The losses and the hits of a block's rows."""
    block, loss, correct = block_at(block_places), 0.0, 0
    for r in range(count):
        loss += block.losses[r]
        correct += block.correct[r]
    return loss, correct


@compiled(inline=True)
def _rule_at(rules: int, step: int, kind: int) -> Rule:
    return rule_of(kind, floats_at(rules + step * STEP_FLOATS * 4, STEP_FLOATS))


@compiled()
def _update_by_batch(model: int, task: int, rule: Rule) -> None:
    """Move a piece of the weights by the gradients of the batch, where these are in memory."""
    gw, gb = batch_gradients(model)
    update_task(model, task, gw + place_of_task(model, task)[0] * 4, gb, rule)


# -- gradients that are clipped: their norm is known when all of them are there -------------------------------


@compiled()
def _square_piece(worker: int, task: int, model: int) -> None:
    square_task(model, task)


@compiled()
def _update_piece(worker: int, task: int, model: int, rule: Rule) -> None:
    _update_by_batch(model, task, rule)


@compiled()
def _update_clipped(model: int, rule: Rule, threads: int) -> None:
    """Move all weights by the batch's gradient, clipped."""
    tasks = len(tasks_at(model))
    run_tasks(_square_piece, (model,), tasks, threads)
    run_tasks(_update_piece, (model, clipped(model, rule)), tasks, threads)


# -- threads that share the rows of a block, then the pieces of the weights -----------------------------------


@compiled()
def _part_rows(count: int, threads: int) -> int:
    """Rows of a part: two parts a thread or more, in whole tiles. How rows are parted changes no bit."""
    return min(PART_ROWS, -(-count // (2 * threads * ROWS_WIDE)) * ROWS_WIDE)


@compiled()
def _rows_piece(
    worker: int, piece: int, model: int, block: int, words: int, begin: int, x: int, count: int, part: int,
    loss_code: int,
) -> None:  # fmt: skip
    """Take `part` of the block's rows forward and back."""
    first = piece * part
    rows = min(part, count - first)
    forward(model, block, words, begin, x, first, rows)
    output_gradients(model, block, words, begin, first, rows, loss_code)
    backward(model, block, first, rows)


@compiled()
def _weights_piece(
    worker: int, task: int, model: int, block: int, x: int, tiles: int, rows: int, is_first: bool, is_last: bool,
    rule: Rule,
) -> None:  # fmt: skip
    """The gradients of a piece of the weights; of the batch's last block, update it.

    tiles  the address of a row a worker, for the gradients of a piece; those of a batch of one block need no other
    """
    tile, gb = tiles + worker * TASK_FLOATS * 4, bias_gradients(block)
    gradient_of_task(model, block, x, task, rows, tile, gb, True)
    if is_first and is_last:
        update_task(model, task, tile, gb, rule)
        return
    add_block(model, task, tile, gb, is_first)
    if is_last:
        _update_by_batch(model, task, rule)


@entry
def run_steps(
    model: int, block: int, words: int, batch: int, loss_code: int, kind: int, rules: int, steps: int, losses_at: int,
    correct_at: int, tiles: int, threads: int,
) -> int:  # fmt: skip
    """One step a batch of data.order; the last batch may be short.

    tiles  the address of (threads, TASK_FLOATS): a thread's piece of gradients
    """
    losses, correct = doubles_at(losses_at, steps), ints_at(correct_at, steps)
    tasks, all_rows = len(tasks_at(model)), len(data_at(words).order)
    for step in range(steps):
        begin = step * batch
        size = min(batch, all_rows - begin)
        rule = _rule_at(rules, step, kind)
        for start in range(0, size, BLOCK):
            count = min(BLOCK, size - start)
            part = _part_rows(count, threads)
            x = where_rows_lie(model, block, words, begin + start, count)
            rows = (model, block, words, begin + start, x, count, part, loss_code)
            run_tasks(_rows_piece, rows, (count + part - 1) // part, threads)
            updates = start + BLOCK >= size and rule.clip == 0
            weights = (model, block, x, tiles, count, start == 0, updates, rule)
            run_tasks(_weights_piece, weights, tasks, threads)
            loss, hit = _sum_up(block, count)
            losses[step] += loss
            correct[step] += hit
        if rule.clip > 0:
            _update_clipped(model, rule, threads)
    return 0


# -- a crew: every worker has blocks of its own ------------------------------------------------------------


@compiled()
def _there_and_back(model: int, block: int, words: int, begin: int, rows: int, loss_code: int) -> int:
    """Rows from order[begin] on, forward and back on one thread; where they lie."""
    x = where_rows_lie(model, block, words, begin, rows)
    for first in range(0, rows, PART_ROWS):
        some = min(PART_ROWS, rows - first)
        forward(model, block, words, begin, x, first, some)
        output_gradients(model, block, words, begin, first, some, loss_code)
        backward(model, block, first, some)
    return x


@compiled()
def _block_piece(
    worker: int, number: int, model: int, crew_places: int, words: int, begin: int, size: int, loss_code: int
) -> None:
    """Everything of one block but the update, CREW_ROWS rows at a time: gradients, loss and hits to its number.

    The blocks begin at order[begin]; the last ends with the batch.
    """
    crew, first = crew_at(crew_places), begin + number * BLOCK
    count, block = min(BLOCK, size - number * BLOCK), block_of(crew, worker)
    gw, gb = address(crew.gw[number]), address(crew.gb[number])
    crew.loss[number], crew.hit[number] = 0.0, 0
    for start in range(0, count, CREW_ROWS):
        rows = min(CREW_ROWS, count - start)
        x = _there_and_back(model, block, words, first + start, rows, loss_code)
        for task in range(len(tasks_at(model))):
            out = gw + place_of_task(model, task)[0] * 4
            gradient_of_task(model, block, x, task, rows, out, gb, start == 0)
        done = block_at(block)
        for r in range(rows):  # one sum over the block, as in _sum_up
            crew.loss[number] += done.losses[r]
            crew.hit[number] += done.correct[r]


@compiled()
def _reduce_piece(
    worker: int, task: int, model: int, crew_places: int, blocks: int, is_first: bool, is_last: bool, rule: Rule
) -> None:
    """Add up the gradients of some blocks by a piece of the weights; those of the last ones are the batch's."""
    crew, at = crew_at(crew_places), place_of_task(model, task)[0] * 4
    if is_first and is_last and blocks == 1:
        update_task(model, task, address(crew.gw) + at, address(crew.gb), rule)
        return
    for number in range(blocks):
        gw, gb = address(crew.gw[number]), address(crew.gb[number])
        add_block(model, task, gw + at, gb, is_first and number == 0)
    if is_last:
        _update_by_batch(model, task, rule)


@entry
def run_large_steps(
    model: int, crew_places: int, words: int, batch: int, loss_code: int, kind: int, rules: int, steps: int,
    losses_at: int, correct_at: int, threads: int,
) -> int:  # fmt: skip
    """run_steps for batches of many blocks, with the same bits: threads wait for each other once for many of them."""
    losses, correct = doubles_at(losses_at, steps), ints_at(correct_at, steps)
    crew, tasks, all_rows = crew_at(crew_places), len(tasks_at(model)), len(data_at(words).order)
    some = len(crew.gw) * BLOCK
    for step in range(steps):
        begin = step * batch
        size = min(batch, all_rows - begin)
        rule = _rule_at(rules, step, kind)
        for start in range(0, size, some):
            blocks = (min(some, size - start) + BLOCK - 1) // BLOCK
            rows = (model, crew_places, words, begin + start, size - start, loss_code)
            run_tasks(_block_piece, rows, blocks, threads)
            weights = (model, crew_places, blocks, start == 0, start + some >= size and rule.clip == 0, rule)
            run_tasks(_reduce_piece, weights, tasks, threads)
            for number in range(blocks):
                losses[step] += crew.loss[number]
                correct[step] += crew.hit[number]
        if rule.clip > 0:
            _update_clipped(model, rule, threads)
    return 0


# -- ranks that share a batch: each has some of its blocks -----------------------------------------------------


@compiled()
def _own_block_piece(
    worker: int, piece: int, model: int, crew: int, words: int, begin: int, size: int, loss_code: int, first: int
) -> None:
    _block_piece(worker, first + piece, model, crew, words, begin, size, loss_code)


@entry
def run_own_blocks(
    model: int, crew: int, words: int, begin: int, size: int, loss_code: int, first: int, count: int, threads: int
) -> int:
    """`count` of the blocks that begin at order[begin], from number `first` on: everything but the update."""
    run_tasks(_own_block_piece, (model, crew, words, begin, size, loss_code, first), count, threads)
    return 0


@entry
def finish_blocks(
    model: int, crew: int, blocks: int, is_first: int, is_last: int, kind: int, rules: int, step: int, threads: int
) -> int:
    """Add up the gradients of blocks, whoever made them, and with the last ones of a batch update the weights."""
    rule = _rule_at(rules, step, kind)
    weights = (model, crew, blocks, is_first != 0, is_last != 0 and rule.clip == 0, rule)
    run_tasks(_reduce_piece, weights, len(tasks_at(model)), threads)
    if is_last != 0 and rule.clip > 0:
        _update_clipped(model, rule, threads)
    return 0


@entry
def run_steps_alone(
    model: int, crew_places: int, words: int, batch: int, loss_code: int, kind: int, rules: int, steps: int,
    losses_at: int, correct_at: int,
) -> int:  # fmt: skip
    """The same on the calling thread, with the same bits: many of them may run side by side."""
    losses, correct = doubles_at(losses_at, steps), ints_at(correct_at, steps)
    crew, tasks, all_rows = crew_at(crew_places), len(tasks_at(model)), len(data_at(words).order)
    some, block, tile = len(crew.gw) * BLOCK, block_of(crew, 0), address(crew.gw)
    for step in range(steps):
        begin = step * batch
        size = min(batch, all_rows - begin)
        rule = _rule_at(rules, step, kind)
        if size <= CREW_ROWS and rule.clip == 0:  # every piece of the gradients is used up at once
            x, gb = _there_and_back(model, block, words, begin, size, loss_code), bias_gradients(block)
            for task in range(tasks):
                gradient_of_task(model, block, x, task, size, tile, gb, True)
                update_task(model, task, tile, gb, rule)
            losses[step], correct[step] = _sum_up(block, size)
            continue
        for start in range(0, size, some):
            blocks = (min(some, size - start) + BLOCK - 1) // BLOCK
            for number in range(blocks):
                _block_piece(0, number, model, crew_places, words, begin + start, size - start, loss_code)
            is_last = start + some >= size and rule.clip == 0
            for task in range(tasks):
                _reduce_piece(0, task, model, crew_places, blocks, start == 0, is_last, rule)
            for number in range(blocks):
                losses[step] += crew.loss[number]
                correct[step] += crew.hit[number]
        if rule.clip > 0:
            for task in range(tasks):
                square_task(model, task)
            rule = clipped(model, rule)
            for task in range(tasks):
                _update_by_batch(model, task, rule)
    return 0


# -- losses alone ------------------------------------------------------------------------------------------


@compiled()
def _losses_piece(
    worker: int, number: int, model: int, crew_places: int, words: int, begin: int, loss_code: int
) -> None:
    """The losses and hits of one of the blocks that begin at order[begin]."""
    crew, start = crew_at(crew_places), begin + number * BLOCK
    block, end = block_of(crew, worker), min(start + BLOCK, len(data_at(words).order))
    crew.loss[number], crew.hit[number] = 0.0, 0
    for at in range(start, end, PART_ROWS):
        rows = min(PART_ROWS, end - at)
        forward(model, block, words, at, where_rows_lie(model, block, words, at, rows), 0, rows)
        output_gradients(model, block, words, at, 0, rows, loss_code)
        done = block_at(block)
        for r in range(rows):
            crew.loss[number] += done.losses[r]
            crew.hit[number] += done.correct[r]


@entry
def run_losses(
    model: int, crew_places: int, words: int, loss_code: int, losses_at: int, correct_at: int, threads: int
) -> int:
    """Sum of the losses and number of hits of all rows of data.order, to losses[0] and hits[0]; nothing changes."""
    crew, losses, correct = crew_at(crew_places), doubles_at(losses_at, 1), ints_at(correct_at, 1)
    some, all_rows = len(crew.loss) * BLOCK, len(data_at(words).order)
    for begin in range(0, all_rows, some):
        blocks = (min(some, all_rows - begin) + BLOCK - 1) // BLOCK
        run_tasks(_losses_piece, (model, crew_places, words, begin, loss_code), blocks, threads)
        for number in range(blocks):
            losses[0] += crew.loss[number]
            correct[0] += crew.hit[number]
    return 0
