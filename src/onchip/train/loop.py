"""fit: train a network; with callbacks, early stopping and checkpoints."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from onchip.errors import InputError
from onchip.kernels.training import SharedData
from onchip.network.graph import Network, check_network
from onchip.network.names import known_name
from onchip.network.reading import show
from onchip.network.recipe import Array
from onchip.plan.kernel import LOSSES
from onchip.plan.plan_json import plan_to_json
from onchip.runtime.distributed.ranks import OneRank, Ranks, find_ranks
from onchip.runtime.io.host_rows import check_rows
from onchip.train.checkpoint import Checkpoints
from onchip.train.options import TrainOptions, canonical_names
from onchip.train.row_weights import check_sample_weight
from onchip.train.rows import as_rows, as_targets
from onchip.train.spread import check_batches, plan_device
from onchip.train.together import start_runs
from onchip.train.training_run import (
    REPORT_SECONDS,
    Epoch,
    FitResult,
    Progress,
    check_targets,
    plan_run,
)


def fit(
    net: Network,
    x: Array,
    y: Array,
    *,
    loss: str = TrainOptions.loss,
    label_smoothing: float = TrainOptions.label_smoothing,
    class_weight: Any = TrainOptions.class_weight,
    optimiser: str = TrainOptions.optimiser,
    lr: float = TrainOptions.lr,
    momentum: float = TrainOptions.momentum,
    weight_decay: float = TrainOptions.weight_decay,
    clip_norm: float = TrainOptions.clip_norm,
    schedule: str = TrainOptions.schedule,
    step_every: int = TrainOptions.step_every,
    step_factor: float = TrainOptions.step_factor,
    batch_size: int = TrainOptions.batch_size,
    epochs: int = TrainOptions.epochs,
    validation: float = TrainOptions.validation,
    patience: int = TrainOptions.patience,
    shuffle: bool = TrainOptions.shuffle,
    seed: int = TrainOptions.seed,
    precision: str = TrainOptions.precision,
    sample_weight: Any = None,
    validation_data: tuple[Any, Any] | None = None,
    device: str = "auto",
    threads: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    on_epoch: Callable[[Epoch], None] | None = None,
    stop: Callable[[Epoch], bool] | None = None,
    checkpoint: Path | str | None = None,
    checkpoint_every: float = 10.0,
    resume: bool = False,
    state: Mapping[str, Array] | None = None,
    debug: bool = False,
    spread: bool = False,
    **other: Any,
) -> FitResult:
    """Train the network on rows x and return it with its history; `net` itself does not change.

    x           (n, ...) of the network's input type; torch tensors, data frames and other float types are converted
    y           (n,) integer classes for "cross_entropy" (the network returns logits; the loss is the batch mean);
                (n, D_out) float32 for "half_sse" and "mse"
    loss .. precision  see train.options.TrainOptions
    sample_weight      (n,), at least 0: multiplies a row's loss and gradient. As in torch and scikit-learn, means over
                a batch, an epoch or the validation rows divide by the sum of the weights, class weights included
    validation_data    rows and targets to validate on, instead of a share of x; their sample weights are 1
    on_progress called with a Progress after every chunk of steps, about every 0.1 s
    on_epoch    called after every epoch; a resumed run first calls it for the epochs already done
    stop        called after every epoch: True ends the run, which keeps its current weights
    checkpoint  a folder for checkpoints, written at most every `checkpoint_every` seconds and at the end of the run
    resume      continue from the newest checkpoint, if there is one
    state       `state` of an earlier FitResult: the optimiser continues from it
    debug       check every step; raise an error that locates the first non-finite value
    spread      under mpiexec: every rank makes this call and computes some row blocks of every batch, which must be
                large. Block gradients are summed in a fixed order: results are bit-identical to one process
    other       learning_rate and optimizer are accepted as aliases; any other name is an error with a suggestion

    The row order is train.order.epoch_order(n, seed, epoch). Same seed, same kind of machine: same bits.
    Dropout layers are ignored during training; the run logs that.
    """
    check_network(net)
    options: dict[str, Any] = {
        "loss": loss, "label_smoothing": label_smoothing, "class_weight": class_weight, "optimiser": optimiser,
        "lr": lr, "momentum": momentum, "weight_decay": weight_decay, "clip_norm": clip_norm, "schedule": schedule,
        "step_every": step_every, "step_factor": step_factor, "batch_size": batch_size, "epochs": epochs,
        "validation": validation, "patience": patience, "shuffle": shuffle, "seed": seed, "precision": precision,
    }  # fmt: skip
    defaults = fit.__kwdefaults__ or {}
    for name, value in canonical_names(other, defaults).items():
        if options[name] != defaults[name]:
            got, hint = f"{options[name]} and {value}", f"only {name}"
            raise InputError(f"two values of {name}", got=got, expected="one", hint=hint)
        options[name] = value
    options["loss"] = known_name(options["loss"], LOSSES, "loss", f"loss='{LOSSES[0]}'")
    if state is not None and not isinstance(state, Mapping):
        raise InputError("bad state", got=type(state).__name__, expected="a dict of arrays", hint="state=result.state")
    rows, held = None, None
    if validation_data is not None:
        x, y, sample_weight, rows, held = _with_validation(x, y, sample_weight, validation_data, net, options)
    chosen = TrainOptions(**options)
    if not (isinstance(checkpoint_every, int | float) and 0 <= checkpoint_every < math.inf):
        raise InputError(
            "bad time between checkpoints", got=str(checkpoint_every), expected="seconds, at least 0",
            hint="checkpoint_every=10",
        )  # fmt: skip
    x = check_rows(as_rows(x, net.input.dtype), net.input)
    y = check_targets(net, len(x), as_targets(y, chosen.loss), chosen.loss)
    sample_weight = check_sample_weight(sample_weight, len(x))
    ranks: Ranks = find_ranks() if spread else OneRank()
    if ranks.size > 1 and (checkpoint is not None or debug):
        ranks.leave()
        got, hint = f"a checkpoint folder or debug, with {ranks.size} ranks", "one process"
        raise InputError("ranks that share batches write no checkpoints", got=got, expected="neither", hint=hint)
    shared = SharedData(ranks=ranks if ranks.size > 1 else None)
    planning = partial(plan_run, net, x, y, chosen, shared, sample_weight=sample_weight, rows=rows, held=held)
    text = ""
    if ranks.size > 1:
        plan = planning(device=device, threads=threads).plan if ranks.rank == 0 else None
        text = ranks.broadcast("" if plan is None else plan_to_json(plan))
        device, threads = plan_device(text, ranks, device, threads)
    planned = planning(device=device, threads=threads, text=text)
    if ranks.size > 1:
        try:
            check_batches(planned.plan, len(planned.train), ranks)
        except InputError:
            ranks.leave()  # all ranks raise the same error
            raise
    together = start_runs([planned], x, y, shared)
    (run,) = together.runs
    assert run is not None
    if state is not None:
        run.trainer.restore(run.trainer.weights(), dict(state))
    if stop is not None or (checkpoint is not None and checkpoint_every < REPORT_SECONDS):
        run.max_epochs, together.runs_ahead = 1, False  # train no epoch before the previous one is checked
    together.runs_ahead &= not debug  # one step at a time: the weights are checked after each
    checkpoints = None
    if checkpoint is not None:
        data = {"x": x, "y": y} | ({} if sample_weight is None else {"sample_weight": sample_weight})
        checkpoints = Checkpoints(_folder(checkpoint), net, chosen, data, state or {})
    if checkpoints is not None:
        if resume and (newest := checkpoints.load(run)) is not None:
            run.resume_from(newest)
        elif not resume and checkpoints.paths():
            raise InputError(
                "the folder has checkpoints of another run", got=str(checkpoints.paths()[0]), expected="no checkpoint",
                hint="--resume (resume=True) to continue it, or another folder",
            )  # fmt: skip
    elif resume:
        raise InputError("nothing to resume from", got="no checkpoint folder", hint="--checkpoint FOLDER")
    if on_epoch is not None:
        for done in run.history:
            on_epoch(done)
    saved, is_stopped, may_run_ahead = time.perf_counter(), False, together.runs_ahead
    while not (run.is_done or is_stopped):
        if debug:
            from onchip.train.debug import take_checked_step  # imports the reference kernels, used only here

            take_checked_step(together)
        else:
            together.advance()
        if on_progress is not None:
            on_progress(run.progress())
        if run.is_epoch_done:
            run.end_epoch()
            if on_epoch is not None:
                on_epoch(run.history[-1])
            is_stopped = stop is not None and bool(stop(run.history[-1]))
        is_time = run.is_done or is_stopped or time.perf_counter() - saved >= checkpoint_every
        if checkpoints is not None:
            together.runs_ahead = may_run_ahead and not is_time  # the GPU must be idle for a checkpoint
            if is_time and run.is_settled:
                checkpoints.save(run.checkpoint())
                saved = time.perf_counter()
    ranks.leave()
    return run.result()


def _folder(folder: object) -> Path:
    if not isinstance(folder, str | os.PathLike) or str(folder) == "" or "\0" in str(folder):
        expected, hint = "the path of a folder", 'checkpoint="runs/1"'
        raise InputError("bad checkpoint folder", got=show(folder), expected=expected, hint=hint)
    return Path(folder)


def _with_validation(
    x: Any, y: Any, sample_weight: Any, validation_data: tuple[Any, Any], net: Network, options: dict[str, Any]
) -> tuple[Array, Array, Array | None, Array, Array]:
    """Concatenate rows, targets and weights; return them with the indices to train on and to validate on."""
    if not isinstance(validation_data, tuple | list) or len(validation_data) != 2:
        is_pair = isinstance(validation_data, tuple | list)
        got = f"{len(validation_data)} values" if is_pair else type(validation_data).__name__
        expected, hint = "two arrays, rows and their targets", "validation_data=(x_held, y_held)"
        raise InputError("bad validation_data", got=got, expected=expected, hint=hint)
    if options["validation"]:
        got, hint = f"validation={options['validation']} and validation_data", "omit one of them"
        raise InputError("two sources of validation rows", got=got, expected="one of them", hint=hint)
    parts = [check_rows(as_rows(rows, net.input.dtype), net.input) for rows in (x, validation_data[0])]
    if not len(parts[1]):
        raise InputError("nothing to validate on", got="0 rows", expected="at least one", hint="validation=0.1")
    targets = [as_targets(each, options["loss"]) for each in (y, validation_data[1])]
    targets = [check_targets(net, len(s), each, options["loss"]) for s, each in zip(parts, targets, strict=True)]
    count, held = map(len, parts)
    options["validation"] = held / (count + held)
    weights = check_sample_weight(sample_weight, count)
    if weights is not None:
        weights = np.concatenate([weights, np.ones(held, np.float32)])
    x, y = np.concatenate(parts), np.concatenate(targets)
    return x, y, weights, np.arange(count), np.arange(count, count + held)
