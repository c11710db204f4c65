"""Training of any network: its step is planned layer by layer and runs over a data set that stays on the device.

The kernels that run whole steps of an MLP have trainers of their own (kernels/training.py has the protocols).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onchip.kernels.training import (
    BETA1,
    BETA2,
    STATE_NAMES,
    Epochs,
    LaunchTime,
    Trained,
    check_restored,
    weights_of_batches,
)
from onchip.network.recipe import Array
from onchip.network.training import TrainingStep
from onchip.network.types import numpy_dtype
from onchip.plan.gradient.over_rows import CORRECT_LOG, LOG, begin_steps, part_logs
from onchip.plan.gradient.step import SHARE
from onchip.plan.gradient.training_form import DRAW
from onchip.runtime.backend import BoundStep

# The optimiser's state in the names of a checkpoint, "<kind>:<weight>", and in those of the step, "<weight>.<name>".
AVERAGE = "average"
_MOMENTS = {"velocity": "velocity", "mean": "first", "square": "second"}


@dataclass(frozen=True, eq=False)
class BoundSteps:
    """A run's steps on a device, and what evaluates its held-out rows; both share weights and data."""

    step: BoundStep
    evaluation: BoundStep | None  # None: no rows are held out
    batch: int
    how: TrainingStep
    seed: int  # of dropouts
    weights: tuple[str, ...]  # the network's weights that a step changes, running statistics too
    averages: Mapping[str, str]  # the state with the average of a weight, by weight
    row_weights: Array | None

    def together(self, count: int) -> int:
        return 1


class StepTrainer:
    """One run: its weights, its optimiser state and the number of its steps."""

    def __init__(self, bound: BoundSteps) -> None:
        self.steps_done = 0
        self._bound, self._step = bound, bound.step
        self._held: dict[tuple[int, int, float], Any] = {}  # batches by step, rows and share of a row
        self._counts: list[int] = []  # the steps of each order in flight
        net = self._step.plan.network
        self._counts_correct = CORRECT_LOG in net.state
        self._part_logs = part_logs(len(net.outputs) - 1) if len(net.outputs) > 2 else ()
        self._moments = {
            f"{kind}:{name}": f"{name}.{_MOMENTS[kind]}"
            for kind in STATE_NAMES["momentum" if bound.how.optimiser == "nesterov" else bound.how.optimiser]
            for name in bound.weights
            if f"{name}.{_MOMENTS[kind]}" in net.state
        } | {f"{AVERAGE}:{name}": at for name, at in bound.averages.items()}
        self._set_draw()

    @property
    def gpu_bytes(self) -> int:
        return max(self._step.nbytes, 0)

    def make_ready(self, orders: Sequence[int]) -> None:
        """Compile the kernels for orders of so many rows."""
        for rows in orders:
            for B, _ in self._batches([rows]):
                self._hold(self._step, B, self._share_of(B))

    # -- steps -------------------------------------------------------------------------------------------------

    def begin(self, epochs: Epochs) -> None:
        net, step, orders = self._step.plan.network, self._step, epochs.orders
        weights = [weights_of_batches(order, self._bound.batch, self._bound.row_weights) for order in orders]
        self._counts = [len(each) for each in weights]
        scales = None if self._bound.row_weights is None else self._scales(np.concatenate(weights))
        step.write_state(begin_steps(net, np.concatenate(orders), self._values(epochs), scales))
        for B, count in self._batches([len(order) for order in orders]):
            step.begin(self._hold(step, B, self._share_of(B)), count)

    def end(self) -> tuple[Trained, float]:
        """The results of the steps that were begun, and how many seconds they took."""
        counts, self._counts = self._counts, []
        seconds = self._step.wait()
        losses, correct = self._logs(self._step, sum(counts))
        self.steps_done += sum(counts)
        ends = np.cumsum(counts)[:-1]
        return list(zip(np.split(losses, ends), np.split(correct, ends), strict=True)), seconds

    def _batches(self, orders: Sequence[int]) -> list[tuple[int, int]]:
        """Rows and number of consecutive steps of equal size."""
        sizes: list[tuple[int, int]] = []
        for rows in orders:
            whole, rest = divmod(rows, self._bound.batch)
            sizes += [(self._bound.batch, whole)] * (whole > 0) + [(rest, 1)] * (rest > 0)
        groups = itertools.groupby(sizes, key=lambda size: size[0])
        return [(B, sum(count for _, count in group)) for B, group in groups]

    def _share_of(self, B: int) -> float:
        return 1.0 if self._bound.how.loss == "half_sse" else 1 / B

    def _scales(self, sums: Array) -> Array:
        """What multiplies the weights of the rows of each step, from their sums."""
        if self._bound.how.loss == "half_sse":
            return np.ones(len(sums))
        return np.divide(1.0, sums, out=np.zeros(len(sums)), where=sums > 0)

    def _values(self, epochs: Epochs) -> Array:
        """The optimiser's values of every step."""
        lrs = epochs.lrs.reshape(-1)
        steps = np.arange(self.steps_done + 1, self.steps_done + 1 + len(lrs))
        same = np.ones(len(lrs))
        columns = lrs, epochs.decay * same, epochs.momentum * same, 1 - BETA1**steps, 1 - BETA2**steps
        return np.stack(columns, axis=1).astype(np.float32)

    def _hold(self, step: BoundStep, B: int, share: float) -> Any:
        key = id(step), B, share
        if key not in self._held:
            dtype = numpy_dtype(step.plan.network.inputs[SHARE].dtype)
            self._held[key] = step.hold({SHARE: np.full(B, share, dtype)}, B)
        return self._held[key]

    def _logs(self, step: BoundStep, count: int) -> tuple[Array, Array]:
        """Losses, and correct predictions; of several outputs the losses of each."""
        logs = step.read_state((LOG, CORRECT_LOG) if self._counts_correct else (LOG, *self._part_logs))
        losses = logs[LOG][:count].astype(np.float64)
        if self._part_logs:  # with their weights
            parts = np.stack([logs[name][:count] for name in self._part_logs], axis=1)
            return losses, parts.astype(np.float64) / [each.weight for each in self._bound.how.outputs]
        if not self._counts_correct:
            return losses, np.zeros(count, np.int64)
        return losses, np.rint(np.nan_to_num(logs[CORRECT_LOG][:count])).astype(np.int64)

    def launch_times(self) -> tuple[LaunchTime, ...]:
        """Of a step of a whole batch: the launches of each kernel, with the estimates of its groups."""
        B, plan = self._bound.batch, self._step.plan
        found: dict[str, list[tuple[int, float]]] = {}
        for group, us in self._step.time_groups(self._hold(self._step, B, self._share_of(B))):
            found.setdefault(plan.groups[group].claim.kernel or "view", []).append((group, us))
        return tuple(
            LaunchTime(
                kernel, len(launches), sum(us for _, us in launches),
                sum(plan.groups[group].claim.cost.estimate_us(plan.device, plan.job.precision, B)
                    for group in {group for group, _ in launches}),
            )
            for kernel, launches in found.items()
        )  # fmt: skip

    # -- evaluation --------------------------------------------------------------------------------------------

    def evaluate(self, order: Array) -> tuple[float, Any]:
        step, bound = self._bound.evaluation, self._bound
        assert step is not None, "evaluates held-out rows"
        if not len(order):
            return 0.0, 0
        (total,) = weights_of_batches(order, len(order), bound.row_weights)
        share = float(self._scales(np.array([total]))[0])
        size = step.plan.job.batch
        steps = -(-len(order) // size)
        step.write_state(begin_steps(step.plan.network, order, scales=np.full(steps, share)))
        whole, rest = divmod(len(order), size)
        for B, count in ((size, whole), (rest, 1)):
            if B and count:
                step.begin(self._hold(step, B, share), count)
        step.wait()
        losses, correct = self._logs(step, steps)
        return float(losses.sum()), correct.sum(axis=0)

    # -- weights and state by name -----------------------------------------------------------------------------

    def weights(self) -> dict[str, Array]:
        return self._step.read_state(self._bound.weights)

    def state(self) -> dict[str, Array]:
        moments = self._step.read_state(self._moments.values())
        return {"steps": np.array([self.steps_done])} | {name: moments[at] for name, at in self._moments.items()}

    def check(self, weights: Mapping[str, Array], state: Mapping[str, Array]) -> None:
        check_restored(weights, state, self.weights(), self.state())

    def restore(self, weights: Mapping[str, Array], state: Mapping[str, Array]) -> None:
        self.check(weights, state)
        written = {name: weights[name] for name in self._bound.weights}
        self._step.write_state(written | {at: state[name] for name, at in self._moments.items()})
        self.steps_done = int(state["steps"][0])
        self._set_draw()

    def _set_draw(self) -> None:
        """What is dropped depends on the seed and the number of the step."""
        if DRAW in self._step.state:
            self._step.write_state({DRAW: np.array([self._bound.seed, self.steps_done])})


class StepRuns:
    """One run, in the interface of networks that train together."""

    def __init__(self, bound: BoundSteps, orders: Sequence[int]) -> None:
        """orders  row counts of the orders to train on"""
        self._trainer, self.seconds = StepTrainer(bound), 0.0
        self.trainers, self.is_asynchronous = (self._trainer,), bound.step.is_asynchronous
        self._orders = orders
        self._epochs: Epochs | None = None
        self._is_timed, self._launch_times = False, tuple[LaunchTime, ...]()

    def make_ready(self) -> None:
        self._trainer.make_ready(self._orders)

    def begin(self, runs: Sequence[Epochs | None]) -> None:
        (self._epochs,) = runs
        if self._epochs is not None and self.is_asynchronous:
            self._trainer.begin(self._epochs)

    def end(self) -> list[Trained]:
        if self._epochs is None:
            return [[]]
        if not self.is_asynchronous:
            self._trainer.begin(self._epochs)
        trained, self.seconds = self._trainer.end()
        return [trained]

    def time_steps(self) -> None:
        self._is_timed = True

    def launch_times(self) -> tuple[LaunchTime, ...]:
        if self._is_timed:  # once
            self._is_timed, self._launch_times = False, self._trainer.launch_times()
        return self._launch_times
