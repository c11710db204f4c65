"""fit: training of a network, epoch by epoch, in a call that can be watched, stopped and taken up again."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from onchip.errors import InputError
from onchip.kernels.training import SharedData
from onchip.plan.plan_json import plan_to_json
from onchip.runtime.engine import check_rows
from onchip.runtime.ranks import OneRank, Ranks, find_ranks
from onchip.spec.network import Network
from onchip.spec.recipe import Array
from onchip.train.checkpoint import Checkpoints
from onchip.train.debug import take_checked_step
from onchip.train.options import TrainOptions
from onchip.train.spread import check_batches, plan_device
from onchip.train.training_run import (
    REPORT_SECONDS,
    Epoch,
    FitResult,
    Progress,
    begin_runs,
    check_targets,
    plan_run,
)


def fit(
    net: Network,
    x: Array,
    y: Array,
    *,
    device: str = "auto",
    threads: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    on_epoch: Callable[[Epoch], None] | None = None,
    checkpoint: Path | str | None = None,
    checkpoint_every: float = 10.0,
    resume: bool = False,
    state: Mapping[str, Array] | None = None,
    debug: bool = False,
    spread: bool = False,
    **options: Any,
) -> FitResult:
    """Train the network on rows x and return it with its history; `net` itself does not change.

    x           (n, ...) of the network's input type
    y           (n,) integer classes for "cross_entropy" (the network's output is logits, the loss the batch's mean);
                (n, D_out) float32 for "half_sse" and "mse"
    options     lr, batch_size, epochs, optimiser, ...: see train.options.TrainOptions
    checkpoint  a folder: the run leaves checkpoints there, at most every `checkpoint_every` seconds and at its end
    resume      go on from the newest of them, if there is one
    on_epoch    hears of every epoch; when resumed, first of those that are done
    state       of an earlier FitResult: its optimiser goes on where it was
    debug       a step at a time; the first number that is not finite is an error that says where it appeared
    spread      under mpiexec: every rank makes this call, and does some blocks of rows of every batch, which must be
                large. The gradients of all blocks are added up in order: the bits are those of one process
    The order of the rows is train.order.epoch_order(n, seed, epoch). Same seed, same machine kind: same bits.
    """
    chosen = TrainOptions.of(options)
    if not (isinstance(checkpoint_every, int | float) and 0 <= checkpoint_every < math.inf):
        raise InputError(
            "bad time between checkpoints", got=str(checkpoint_every), expected="seconds, at least 0",
            hint="checkpoint_every=10",
        )  # fmt: skip
    x = check_rows(x, net.input)
    y = check_targets(net, len(x), y, chosen.loss)
    ranks: Ranks = find_ranks() if spread else OneRank()
    if ranks.size > 1 and (checkpoint is not None or debug):
        ranks.leave()
        got, hint = f"a checkpoint folder or debug, with {ranks.size} ranks", "one process"
        raise InputError("ranks that share batches leave no checkpoints", got=got, expected="neither", hint=hint)
    shared = SharedData(ranks=ranks if ranks.size > 1 else None)
    text = ""
    if ranks.size > 1:
        plan = plan_run(net, x, chosen, shared, device=device, threads=threads).plan if ranks.rank == 0 else None
        text = ranks.broadcast("" if plan is None else plan_to_json(plan))
        device, threads = plan_device(text, ranks, device, threads)
    planned = plan_run(net, x, chosen, shared, device=device, threads=threads, text=text)
    if ranks.size > 1:
        try:
            check_batches(planned.plan, len(planned.train), ranks)
        except InputError:
            ranks.leave()  # all ranks find the same
            raise
    _, (run,) = begin_runs([planned], x, y, shared)
    if state is not None:
        run.trainer.restore(run.trainer.weights(), dict(state))
    if checkpoint is not None and checkpoint_every < REPORT_SECONDS:
        run.most_epochs = 1
    kept = None if checkpoint is None else Checkpoints(Path(checkpoint), net, chosen, x, y, state or {})
    if kept is not None:
        if resume and (newest := kept.load(run)) is not None:
            run.take_up(newest)
        elif not resume and kept.paths():
            raise InputError(
                "there is a run in this folder already", got=str(kept.paths()[0]), expected="an empty folder",
                hint="--resume (resume=True) to go on from it, or another folder",
            )  # fmt: skip
    elif resume:
        raise InputError("nothing to resume from", got="no checkpoint folder", hint="--checkpoint FOLDER")
    if on_epoch is not None:
        for done in run.history:
            on_epoch(done)
    saved = time.perf_counter()
    while not run.is_done:
        if debug:
            take_checked_step(run)
        else:
            run.advance()
        if on_progress is not None:
            on_progress(run.progress())
        if run.is_epoch_done:
            run.end_epoch()
            if on_epoch is not None:
                on_epoch(run.history[-1])
        is_time = run.is_done or time.perf_counter() - saved >= checkpoint_every
        if kept is not None and is_time and run.is_settled:
            kept.save(run.checkpoint())
            saved = time.perf_counter()
    ranks.leave()
    return run.result()
