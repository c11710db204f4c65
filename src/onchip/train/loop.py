"""fit: train a network; with callbacks, early stopping and checkpoints."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from onchip.errors import InputError
from onchip.kernels.training import SharedData
from onchip.network.graph import Network, check_network
from onchip.network.reading import show
from onchip.network.recipe import Array
from onchip.plan.plan_json import plan_to_json
from onchip.runtime.distributed.ranks import OneRank, Ranks, find_ranks
from onchip.train.checkpoint import Checkpoints
from onchip.train.losses import with_losses
from onchip.train.options import TrainOptions, canonical_names
from onchip.train.recording import (
    CALLBACKS,
    CHECKPOINT,
    EVALUATE,
    PLAN,
    RESULT,
    ROWS,
    TrainingRecorder,
    new_recorder,
    phase,
)
from onchip.train.rows import Rows
from onchip.train.spread import check_batches, plan_device
from onchip.train.together import ConcurrentRuns, start_runs
from onchip.train.training_data import TrainingData, with_validation
from onchip.train.training_run import (
    REPORT_SECONDS,
    Epoch,
    FitResult,
    PlannedRun,
    Progress,
    TrainingRun,
    plan_run,
)


def fit(
    net: Network,
    x: Any,
    y: Any,
    *,
    loss: Any = TrainOptions.loss,
    loss_weights: Any = TrainOptions.loss_weights,
    label_smoothing: float = TrainOptions.label_smoothing,
    class_weight: Any = TrainOptions.class_weight,
    optimiser: str = TrainOptions.optimiser,
    lr: float = TrainOptions.lr,
    momentum: float = TrainOptions.momentum,
    nesterov: bool = TrainOptions.nesterov,
    weight_decay: Any = TrainOptions.weight_decay,
    clip_norm: float = TrainOptions.clip_norm,
    ema: float = TrainOptions.ema,
    schedule: str = TrainOptions.schedule,
    warmup: float = TrainOptions.warmup,
    step_every: int = TrainOptions.step_every,
    step_factor: float = TrainOptions.step_factor,
    frozen: Any = TrainOptions.frozen,
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
                floats of the output's shape for "mse", "half_sse", "mae", "huber", and from 0 to 1 for
                "bce_with_logits", also of several labels per row
    x and y of a network with several inputs or outputs are dicts of arrays by name, or tuples in the network's order
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
    debug       check every step; raise an error that locates the first non-finite value. On a GPU also wait after each
                launch, as onchip.compile does with debug=True
    spread      under mpiexec: every rank makes this call and computes some row blocks of every batch, which must be
                large. Block gradients are summed in a fixed order: results are bit-identical to one process
    other       learning_rate and optimizer are accepted as aliases; any other name is an error with a suggestion

    The row order is train.order.epoch_order(n, seed, epoch). Same seed, same kind of machine: same bits.
    Dropouts drop by the seed, the number of the step and of the layer: the same elements on every device, and in a
    resumed run. Batch norms use the statistics of the batch, and move their running averages by a tenth per step.
    """
    arguments = locals()  # the parameters above, by name
    options = {field.name: arguments[field.name] for field in fields(TrainOptions)}
    check_network(net)
    if debug:
        from onchip.runtime.cuda.checked_launches import check_every_launch  # imports what only a GPU needs

        check_every_launch()
    _add_aliases(options, other)
    _check_state(state)
    for name, callback in (("on_progress", on_progress), ("on_epoch", on_epoch), ("stop", stop)):
        if callback is not None and not callable(callback):
            got, hint = type(callback).__name__, f"{name}=lambda epoch: ..."
            raise InputError(f"bad {name}", got=got, expected="a function", hint=hint)
    recorder = new_recorder()
    with phase(recorder, ROWS):
        data = TrainingData(x, y, sample_weight)
        if validation_data is not None:
            patience, options["patience"] = options["patience"], 0  # needs the share
            data = with_validation(data, validation_data, net, with_losses(net, TrainOptions(**options)))
            options |= {"validation": data.validation_share, "patience": patience}
        chosen = with_losses(net, TrainOptions(**options))
        _check_interval(checkpoint_every)
        data = data.checked(net, chosen)
    ranks = _find_ranks(spread, checkpoint is not None or debug)
    shared = SharedData(ranks=ranks if ranks.size > 1 else None)
    plan = partial(
        plan_run, net, data.x, data.y, chosen, shared, sample_weight=data.sample_weight, rows=data.rows, held=data.held
    )
    with phase(recorder, PLAN):
        planned = _plan_on(ranks, plan, device, threads)
    together = start_runs([planned], data.x, data.y, shared, recorder)
    (run,) = together.runs
    assert run is not None
    if state is not None:
        run.trainer.restore(run.trainer.weights(), dict(state))
    if stop is not None or (checkpoint is not None and checkpoint_every < REPORT_SECONDS):
        run.max_epochs, together.runs_ahead = 1, False  # train no epoch before the previous one is checked
    together.runs_ahead &= not debug  # one step at a time: the weights are checked after each
    checkpoints = None
    with phase(recorder if checkpoint is not None else None, CHECKPOINT):
        if checkpoint is not None:
            checkpoints = Checkpoints(_folder(checkpoint), net, chosen, data.arrays(), state or {})
        _begin(run, checkpoints, resume)
    _train(
        together,
        run,
        data.x if debug else None,
        _Callbacks(on_progress, on_epoch, stop),
        checkpoints,
        checkpoint_every,
        recorder,
    )
    ranks.leave()
    with phase(recorder, RESULT):
        return run.result()


@dataclass(frozen=True)
class _Callbacks:
    on_progress: Callable[[Progress], None] | None
    on_epoch: Callable[[Epoch], None] | None
    stop: Callable[[Epoch], bool] | None

    def report(self, progress: Progress) -> None:
        if self.on_progress is not None:
            self.on_progress(progress)

    def report_epoch(self, epoch: Epoch) -> None:
        if self.on_epoch is not None:
            self.on_epoch(epoch)

    def stops_after(self, epoch: Epoch) -> bool:
        return self.stop is not None and bool(self.stop(epoch))


def _train(
    together: ConcurrentRuns,
    run: TrainingRun,
    checked: Rows | None,
    callbacks: _Callbacks,
    checkpoints: Checkpoints | None,
    checkpoint_every: float,
    recorder: TrainingRecorder | None,
) -> None:
    """Train to the last epoch, or until a callback stops the run; write checkpoints.

    checked  the rows, for debug=True: every step is checked
    """
    with phase(recorder, CALLBACKS):
        for done in run.history:  # of a resumed run
            callbacks.report_epoch(done)
    saved, is_stopped, may_run_ahead = time.perf_counter(), False, together.runs_ahead
    while not (run.is_done or is_stopped):
        if checked is not None:
            from onchip.train.debug import take_checked_step  # imports the reference kernels, used only here

            take_checked_step(together, checked)
        else:
            together.advance()
        with phase(recorder, CALLBACKS):
            callbacks.report(run.progress())
        if run.is_epoch_done:
            with phase(recorder, EVALUATE):
                run.end_epoch()
            with phase(recorder, CALLBACKS):
                callbacks.report_epoch(run.history[-1])
                is_stopped = callbacks.stops_after(run.history[-1])
        if checkpoints is not None:
            is_time = run.is_done or is_stopped or time.perf_counter() - saved >= checkpoint_every
            together.runs_ahead = may_run_ahead and not is_time  # the GPU must be idle for a checkpoint
            if is_time and run.is_settled:
                with phase(recorder, CHECKPOINT):
                    checkpoints.save(run.checkpoint())
                saved = time.perf_counter()


def _begin(run: TrainingRun, checkpoints: Checkpoints | None, resume: bool) -> None:
    """Continue from the newest checkpoint, or check that the folder has none."""
    if checkpoints is None:
        if resume:
            raise InputError("nothing to resume from", got="no checkpoint folder", hint="--checkpoint FOLDER")
    elif resume:
        newest = checkpoints.load(run)
        if newest is not None:
            run.resume_from(newest)
    elif checkpoints.paths():
        raise InputError(
            "the folder has checkpoints of another run", got=str(checkpoints.paths()[0]), expected="no checkpoint",
            hint="--resume (resume=True) to continue it, or another folder",
        )  # fmt: skip


def _find_ranks(spread: bool, needs_one: bool) -> Ranks:
    """The ranks that share the batches.

    needs_one  the run writes checkpoints or checks every step: refuse more than one rank
    """
    ranks: Ranks = find_ranks() if spread else OneRank()
    if ranks.size > 1 and needs_one:
        ranks.leave()
        got, hint = f"a checkpoint folder or debug, with {ranks.size} ranks", "one process"
        raise InputError("ranks that share batches write no checkpoints", got=got, expected="neither", hint=hint)
    return ranks


def _plan_on(ranks: Ranks, plan: Callable[..., PlannedRun], device: str, threads: int | None) -> PlannedRun:
    """Plan the run; with several ranks, rank 0 plans for all.

    plan  plan_run without its device, threads and text
    """
    if ranks.size == 1:
        return plan(device=device, threads=threads)
    text = ranks.broadcast(plan_to_json(plan(device=device, threads=threads).plan) if ranks.rank == 0 else "")
    device, threads = plan_device(text, ranks, device, threads)
    planned = plan(device=device, threads=threads, text=text)
    try:
        check_batches(planned.plan, len(planned.train), ranks)
    except InputError:
        ranks.leave()  # all ranks raise the same error
        raise
    return planned


def _add_aliases(options: dict[str, Any], other: Mapping[str, Any]) -> None:
    """Set options by the names of other libraries, such as learning_rate."""
    defaults = fit.__kwdefaults__ or {}
    for name, value in canonical_names(other, defaults).items():
        if options[name] != defaults[name]:
            got, hint = f"{options[name]} and {value}", f"only {name}"
            raise InputError(f"two values of {name}", got=got, expected="one", hint=hint)
        options[name] = value


def _check_state(state: object) -> None:
    if state is not None and not isinstance(state, Mapping):
        raise InputError("bad state", got=type(state).__name__, expected="a dict of arrays", hint="state=result.state")


def _check_interval(seconds: float) -> None:
    if not (isinstance(seconds, int | float) and 0 <= seconds < math.inf):
        raise InputError(
            "bad time between checkpoints", got=str(seconds), expected="seconds, at least 0",
            hint="checkpoint_every=10",
        )  # fmt: skip


def _folder(folder: object) -> Path:
    if not isinstance(folder, str | os.PathLike) or str(folder) == "" or "\0" in str(folder):
        expected, hint = "the path of a folder", 'checkpoint="runs/1"'
        raise InputError("bad checkpoint folder", got=show(folder), expected=expected, hint=hint)
    return Path(folder)
