"""A training run: planned, trained in chunks of an epoch, evaluated, resumed."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from onchip.errors import InputError, KernelError, PlanError
from onchip.kernels.training import (
    AVERAGE,
    Epochs,
    SharedData,
    Trained,
    bytes_of,
    epochs_at_once,
    weights_of_batches,
)
from onchip.network.graph import Network
from onchip.network.recipe import Array
from onchip.network.text import escaped, html_table, plural
from onchip.network.training import TrainingStep
from onchip.plan.kernel import Job
from onchip.plan.plan import Plan
from onchip.plan.plan_json import array_weights, plan_from_json
from onchip.runtime.backend import Backend, NetworkRun
from onchip.runtime.placement import find_device, may_use_gpu, place, training_kernels_for
from onchip.runtime.process_memory import peak_process_bytes
from onchip.train.layered import LayeredRun, is_layered
from onchip.train.options import TrainOptions
from onchip.train.order import epoch_order, epoch_orders, hold_out
from onchip.train.row_weights import weights_of_rows
from onchip.train.rows import Rows, count_rows
from onchip.train.schedule import lrs_of
from onchip.train.step import step_of, trained_form
from onchip.train.trainer import Trainer

_EPOCHS_SHOWN = 10  # in a notebook
REPORT_SECONDS = 0.1  # interval of progress reports, and the latency of Ctrl-C


@dataclass(frozen=True)
class Progress:
    """Position of a run: after `step` of `steps` in `epoch` (from 1) of `epochs`."""

    epoch: int
    epochs: int
    step: int
    steps: int
    loss: float  # mean of the epoch so far
    accuracy: float | None  # of the epoch so far, each row evaluated before its update; for classes only
    samples_per_s: float


@dataclass(frozen=True)
class Epoch:
    """Results of one epoch."""

    epoch: int  # from 1
    loss: float  # weighted mean over the rows, each before its batch's update; for "half_sse", mean over the batches
    accuracy: float | None  # for classes only
    validation_loss: float | None
    validation_accuracy: float | None
    lr: float  # of its last step
    seconds: float  # training time; by the GPU's clock if one trained it
    samples_per_s: float
    output_losses: dict[str, float] | None = None  # of each output, if several have a loss; before its weight
    validation_output_losses: dict[str, float] | None = None


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """State of a run after `step` steps of `epoch`, which counts from 0."""

    epoch: int
    step: int
    epoch_correct: int  # of the epoch so far, as are the next two
    epoch_rows: int
    epoch_seconds: float
    seconds: float  # trained so far
    history: tuple[dict[str, Any], ...]  # of the finished epochs
    best_epoch: int  # 0: none yet
    losses: Array  # float64, of every step so far
    output_losses: Array  # float64, (steps, outputs): the loss of each; without columns if only one has a loss
    weights: dict[str, Array]
    state: dict[str, Array]  # optimiser state
    best_weights: dict[str, Array]  # empty without early stopping


@dataclass(frozen=True, eq=False)
class FitResult:
    """The result of training: `network`, `losses` (one per step), `history` (an Epoch each), `chosen` (the device)."""

    network: Network
    losses: Array  # float64, one per step: the batch's loss before the update
    history: tuple[Epoch, ...]
    best_epoch: int  # the epoch whose weights the network has: the last, or with `patience` the best
    seconds: float
    plan: Plan
    chosen: str
    state: dict[str, Array]  # optimiser state: fit(..., state=) continues from it
    gpu_bytes: int  # GPU memory used by the run; 0 on the CPU
    process_bytes: int  # the most memory that this process has had so far, with libraries and data
    gpu_busy: float | None  # the share of the training's time in which the GPU ran steps; None on the CPU

    @property
    def epoch_losses(self) -> tuple[float, ...]:
        """The mean loss of every epoch."""
        return tuple(epoch.loss for epoch in self.history)

    def __repr__(self) -> str:
        last, count = self.history[-1], len(self.history)
        parts = [plural(count, "epoch"), f"loss {last.loss:.4g}"]
        parts += [f"accuracy {last.accuracy:.4f}"] if last.accuracy is not None else []
        parts += [f"best epoch {self.best_epoch}"] if self.best_epoch != count else []
        return f"FitResult({', '.join(parts)}, {self.seconds:.3g} s on {self.chosen})"

    def _repr_html_(self) -> str:
        """The last epochs as a table."""
        head = ["epoch", "loss", "accuracy", "validation loss", "validation accuracy"]
        rows = []
        for e in self.history[-_EPOCHS_SHOWN:]:
            scores = (e.loss, e.accuracy, e.validation_loss, e.validation_accuracy)
            rows.append([f"{e.epoch:,}", *("" if score is None else f"{score:.4g}" for score in scores)])
        return f"<p>{escaped(repr(self))}</p>{html_table(head, rows)}"


@dataclass(frozen=True, eq=False)
class PlannedRun:
    """A run that has not started: its plan and its rows."""

    net: Network
    options: TrainOptions
    how: TrainingStep
    plan: Plan
    backend: Backend
    chosen: str
    train: Array  # row indices to train on
    held: Array  # row indices to validate on
    row_weights: Array | None  # (n,) float32, for all rows of x; None: all are 1
    evaluation: Plan | None = None  # of a step by layers: what evaluates the rows to validate on

    def runs_at_once(self, count: int) -> int:
        """How many of `count` runs like this one share launches."""
        return self.backend.runs_at_once(self.plan, count)

    @property
    def network_run(self) -> NetworkRun:
        whole = self.plan.whole_step
        network = whole.network if whole else trained_form(self.net)
        counts = len(self.train), len(self.held)
        return NetworkRun(network, self.how, *counts, self.row_weights, self.options.seed)

    def is_like(self, other: PlannedRun) -> bool:
        """Whether the two can be trained in the same launches."""
        ours, theirs = self.plan, other.plan
        if ours.whole_step is None or theirs.whole_step is None:
            return False
        is_same = (ours.job, ours.device, self.chosen) == (theirs.job, theirs.device, other.chosen)
        is_same &= ours.whole_step.how == theirs.whole_step.how
        return is_same and [g.claim.facts for g in ours.groups] == [g.claim.facts for g in theirs.groups]


def plan_run(
    net: Network, x: Rows, y: Rows, options: TrainOptions, shared: SharedData, *, device: str, threads: int | None,
    sample_weight: Array | None = None, rows: Array | None = None, held: Array | None = None, text: str = "",
) -> PlannedRun:  # fmt: skip
    """Plan a run; x, y and sample_weight are checked already.

    shared  data shared with other runs on x
    rows    indices of x to train on; None: all
    held    indices of x to validate on; None: a share of `rows`
    text    a plan as JSON, to use instead of planning here
    """
    all_rows = np.arange(count_rows(x)) if rows is None else rows
    row_weights = sample_weight
    if options.class_weight is not None:
        assert isinstance(y, np.ndarray), "classes of the only output"
        row_weights = weights_of_rows(options.class_weight, y, sample_weight, all_rows, net.output.row_size)
    if held is None:
        train, chosen_rows = hold_out(len(all_rows), options.validation, options.seed)
        all_rows, held = all_rows[train], all_rows[chosen_rows]
    if not len(all_rows):
        raise InputError(
            "no rows left to train on", got=f"{len(held)} validation rows, validation={options.validation}",
            expected="at least one training row", hint="a smaller validation share",
        )  # fmt: skip
    for some, what in ((all_rows, "a training row of weight > 0"), (held, "a validation row of weight > 0")):
        if row_weights is not None and len(some) and not row_weights[some].any():
            raise InputError("all row weights are zero", got="only zeros", expected=what)
    batch = min(options.batch_size, len(all_rows))
    scale = 0.0
    if isinstance(x, np.ndarray) and may_use_gpu(device, threads):
        found = shared.get("bytes", functools.partial(bytes_of, x.reshape(len(x), -1)))
        scale = found[1] if found else 0.0
    how = replace(options.step, is_weighted=row_weights is not None, byte_scale=scale)
    of_layers = LayeredRun(net, how, options, all_rows, held, row_weights is not None)
    if not (text and is_layered(text)):
        step = step_of(net, how, options.weight_decay, options.frozen)
        job = Job(options.precision, batch)
        try:
            plan, backend, chosen = _plan_whole(step, device, job, threads, text)
            return PlannedRun(net, options, how, plan, backend, chosen, all_rows, held, row_weights)
        except PlanError:
            if text:
                raise
    plan, backend, chosen = of_layers.plan(count_rows(x), device, threads, text)
    evaluation = of_layers.evaluation(plan, count_rows(x))
    return PlannedRun(net, options, how, plan, backend, chosen, all_rows, held, row_weights, evaluation)


def _plan_whole(step: Network, device: str, job: Job, threads: int | None, text: str) -> tuple[Plan, Backend, str]:
    """The plan of a kernel that runs whole steps; PlanError if there is none."""
    if not text:
        return place(step, device, job, threads, kernels_for=training_kernels_for)
    here, backend, chosen = find_device(device, threads)
    return plan_from_json(text, array_weights(step), training_kernels_for(here)), backend, chosen


class TrainingRun:
    """A training run in progress, trained in chunks of an epoch."""

    def __init__(self, planned: PlannedRun, trainer: Trainer) -> None:
        self.net, self.plan, self.chosen, self.options = planned.net, planned.plan, planned.chosen, planned.options
        self.trainer, self.train, self.held, self.row_weights = (
            trainer,
            planned.train,
            planned.held,
            planned.row_weights,
        )
        self.batch = min(self.options.batch_size, len(self.train))
        self.steps = -(-len(self.train) // self.batch)  # per epoch
        self.epoch = self.step = self.correct = 0  # epochs done; steps and correct predictions of the current epoch
        self.losses, self.output_losses = list[Array](), list[Array]()
        self._epoch_begins = 0  # index into losses
        self.max_epochs = 1 if len(self.held) else epochs_at_once(len(self.train), self.batch)  # per chunk
        self._trained: deque[tuple[Array, Array, float]] = deque()  # not processed yet: losses, correct, seconds
        self._loss_sum = 0.0  # sum of the losses of the epoch so far
        self.history: list[Epoch] = []
        self.best_epoch, self.best_weights = 0, dict[str, Array]()
        self.seconds, self.epoch_seconds, self.epoch_rows = 0.0, 0.0, 0
        self._chunk_steps = min(self.steps, 16)
        self._ahead = 0  # steps sent to the trainer and not processed yet
        self._has_all_rows = np.array_equal(self.train, np.arange(len(self.train)))  # train is 0, 1, 2, ...
        self._orders: dict[int, Array] = {}  # by epoch; computed while the device trains the previous ones
        self._began, self._seconds_before = time.perf_counter(), 0.0  # what `seconds` was when this process began

    @property
    def is_epoch_done(self) -> bool:
        return self.step == self.steps

    @property
    def is_done(self) -> bool:
        patience = self.options.patience
        stopped = bool(patience) and self.epoch - self.best_epoch >= patience
        return self.epoch == self.options.epochs or stopped

    @property
    def is_settled(self) -> bool:
        """Whether the trainer is at this run's step, not ahead of it."""
        return not self._ahead

    @property
    def has_trained(self) -> bool:
        """Whether trained steps wait to be processed."""
        return bool(self._trained)

    def _orders_of(self, epochs: range) -> list[Array]:
        """Row orders of these epochs, cached; drops those of earlier epochs, computes none past the last epoch."""
        if not self.options.shuffle:
            return [self.train] * len(epochs)
        epochs = range(epochs.start, min(epochs.stop, self.options.epochs))
        cached = {epoch: order for epoch, order in self._orders.items() if epoch >= epochs.start}
        missing = [epoch for epoch in epochs if epoch not in cached]
        orders = epoch_orders(len(self.train), self.options.seed, missing)
        if not self._has_all_rows:
            orders = [self.train[order] for order in orders]
        self._orders = cached | dict(zip(missing, orders, strict=True))
        return [self._orders[epoch] for epoch in epochs]

    def next_rows(self) -> Array:
        """The row indices of the next step."""
        (order,) = self._orders_of(range(self.epoch, self.epoch + 1))
        return order[self.step * self.batch : (self.step + 1) * self.batch]

    def next_chunk(self, steps: int | None = None) -> Epochs | None:
        """The next chunk for the trainer: steps of one epoch, by default for about REPORT_SECONDS, or several short
        epochs. None: the trainer has received all steps.
        """
        epoch, step = self._trainer_at()
        o, left = self.options, self.options.epochs - epoch
        if not left:
            return None
        count = min(steps or self._chunk_steps, self.steps - step)
        epochs = 1 if steps or step else max(1, min(self._chunk_steps // self.steps, self.max_epochs, left))
        self._ahead += epochs * count
        epoch_numbers, rows = range(epoch, epoch + epochs), slice(step * self.batch, (step + count) * self.batch)
        orders = [order[rows] for order in self._orders_of(epoch_numbers)]
        lrs = [lrs_of(o, epoch_number, self.steps)[step : step + count] for epoch_number in epoch_numbers]
        return Epochs(orders, np.stack(lrs), o.momentum, o.step_decay, self.trainer.steps_done)

    def _trainer_at(self) -> tuple[int, int]:
        """The epoch and step, from 0, of the next rows to send to the trainer."""
        return divmod(self.epoch * self.steps + self.step + self._ahead, self.steps)

    def first_epoch(self, chunk: Epochs) -> int:
        """The epoch, from 0, of the first order of the chunk that was sent last."""
        return (self.epoch * self.steps + self.step + self._ahead - 1) // self.steps - len(chunk.orders) + 1

    def make_next_orders(self, count: int) -> None:
        """Compute the next `count` row orders while the device works, if the trainer is at an epoch's start."""
        epoch, step = self._trainer_at()
        if step == 0:
            self._orders_of(range(epoch, epoch + count))

    def keep(self, trained: Trained, took: float) -> None:
        """Queue the results of a chunk that took so many seconds."""
        self.trainer.steps_done += sum(len(losses) for losses, _ in trained)
        self._trained.extend((losses, correct, took / len(trained)) for losses, correct in trained)
        self._choose_chunk_steps(sum(len(losses) for losses, _ in trained), took)

    def take_trained(self) -> Array:
        """Process the next queued steps and return their losses."""
        losses, counted, took = self._trained.popleft()
        self.epoch_rows += min(len(losses) * self.batch, len(self.train) - self.step * self.batch)
        self.step += len(losses)
        self._ahead -= len(losses)
        self.losses.append(losses)
        if self.options.several:
            self.output_losses.append(counted)
        else:
            self.correct += int(counted.sum())
        self._loss_sum += float(losses.sum())
        self.epoch_seconds += took
        self.seconds += took
        return losses

    def _choose_chunk_steps(self, count: int, took: float) -> None:
        """Set the steps of the next chunk from the time of the last one."""
        self._chunk_steps = max(1, round(count * min(4.0, REPORT_SECONDS / max(took, 1e-6))))

    def end_epoch(self) -> None:
        """Evaluate the epoch and prepare for the next."""
        begin = time.perf_counter()
        losses = np.concatenate(self.losses[self._epoch_begins :])[-self.steps :]
        loss = self.epoch_loss(losses, self.epoch)
        if not np.isfinite(loss):
            raise self._diverged(f"loss {loss}", "a finite loss")
        progress, several = self.progress(), self.options.several
        held_loss, held_accuracy, held_losses = None, None, None
        if len(self.held):
            held_loss, counted = self.trainer.evaluate(self.held)
            if not np.isfinite(held_loss):
                raise self._diverged(f"validation loss {held_loss}", "a finite loss")
            held_accuracy = int(counted) / len(self.held) if self._has_classes else None
            held_losses = dict(zip(several, counted.tolist(), strict=True)) if several else None
            self.seconds += time.perf_counter() - begin
        if self.epoch + 1 == self.options.epochs:  # no later loss would reveal a non-finite last update
            for name, w in self.trainer.weights().items():
                if not np.isfinite(w).all():
                    raise self._diverged(f"weight '{name}' is not finite", "finite weights")
        self.history.append(
            Epoch(progress.epoch, loss, progress.accuracy, held_loss, held_accuracy, self.last_lr(self.epoch),
                  self.epoch_seconds, progress.samples_per_s, self._output_losses(), held_losses)
        )  # fmt: skip
        self.epoch, self.step, self.correct, self._loss_sum = self.epoch + 1, 0, 0, 0.0
        self.epoch_seconds, self.epoch_rows = 0.0, 0
        if self.options.patience and held_loss is not None and held_loss < self._best_loss():
            self.best_epoch, self.best_weights = self.epoch, self._result_weights()
        self._epoch_begins = len(self.losses)

    def _output_losses(self) -> dict[str, float] | None:
        """The mean loss of each output in the epoch, if several have one."""
        if not self.options.several:
            return None
        steps = np.concatenate(self.output_losses)[-self.steps :]
        return {name: self.epoch_loss(steps[:, i], self.epoch) for i, name in enumerate(self.options.several)}

    def last_lr(self, epoch: int) -> float:
        """The learning rate of the last step of an epoch, counted from 0."""
        return float(lrs_of(self.options, epoch, self.steps)[-1])

    def epoch_loss(self, losses: Array, epoch: int) -> float:
        """The mean loss of an epoch, counted from 0, from the losses of its steps."""
        if self.options.loss == "half_sse":
            return float(losses.mean())
        order = self.train  # only batch sizes matter, unless rows have weights
        if self.row_weights is not None and self.options.shuffle:
            order = order[epoch_order(len(order), self.options.seed, epoch)]
        weights = weights_of_batches(order, self.batch, self.row_weights)
        return float(losses @ weights / weights.sum())

    def _diverged(self, got: str, expected: str) -> KernelError:
        hint = "a smaller --lr (lr=); --debug (debug=True) locates the first NaN"
        return KernelError("training diverged", got=f"{got} in epoch {self.epoch + 1}", expected=expected, hint=hint)

    def _best_loss(self) -> float:
        best = self.history[self.best_epoch - 1].validation_loss if self.best_epoch else None
        return np.inf if best is None else best

    @property
    def _has_classes(self) -> bool:
        return self.options.has_classes

    def progress(self) -> Progress:
        rows = min(self.step * self.batch, len(self.train))
        accuracy = self.correct / max(rows, 1) if self._has_classes else None
        rate = self.epoch_rows / max(self.epoch_seconds, 1e-9)
        mean = self._loss_sum / max(self.step, 1)
        return Progress(self.epoch + 1, self.options.epochs, self.step, self.steps, mean, accuracy, rate)

    def checkpoint(self) -> Checkpoint:
        history = tuple(dataclasses.asdict(epoch) for epoch in self.history)
        losses = np.concatenate(self.losses) if self.losses else np.zeros(0)
        output_losses = np.zeros((len(losses), len(self.options.several)))
        if self.options.several and len(losses):
            output_losses = np.concatenate(self.output_losses)
        return Checkpoint(
            self.epoch, self.step, self.correct, self.epoch_rows, self.epoch_seconds, self.seconds, history,
            self.best_epoch, losses, output_losses, self.trainer.weights(), self.trainer.state(), self.best_weights,
        )  # fmt: skip

    def resume_from(self, at: Checkpoint) -> None:
        """Resume from a checkpoint of the same job."""
        self.trainer.restore(at.weights, at.state)
        self.epoch, self.step, self.correct, self.seconds = at.epoch, at.step, at.epoch_correct, at.seconds
        self._seconds_before = at.seconds
        self.epoch_rows, self.epoch_seconds = at.epoch_rows, at.epoch_seconds
        self.losses, self.output_losses = [at.losses], [at.output_losses]
        self._loss_sum = float(at.losses[len(at.losses) - at.step :].sum())
        self.history = [Epoch(**epoch) for epoch in at.history]
        self.best_epoch, self.best_weights = at.best_epoch, at.best_weights

    def _result_weights(self) -> dict[str, Array]:
        """The weights of now, or with `ema` their averages."""
        weights, state = self.trainer.weights(), self.trainer.state() if self.options.ema else {}
        return {name: state.get(f"{AVERAGE}:{name}", weight) for name, weight in weights.items()}

    def result(self) -> FitResult:
        weights = self.best_weights if self.options.patience else self._result_weights()
        trained = self.net.replace(weights={**self.net.weights, **weights})
        best = self.best_epoch if self.options.patience else self.epoch
        losses, gpu_busy = np.concatenate(self.losses), None
        if self.plan.device.kind == "cuda":
            gpu_busy = min(1.0, (self.seconds - self._seconds_before) / (time.perf_counter() - self._began))
        return FitResult(
            trained, losses, tuple(self.history), best, self.seconds, self.plan, self.chosen, self.trainer.state(),
            self.trainer.gpu_bytes, peak_process_bytes(), gpu_busy,
        )  # fmt: skip
