"""A training run of any network, on any device: its step is planned layer by layer (BoundStep) and runs over a data set
that stays on the device (plan/gradient/over_rows.py).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onchip.kernels.training import (
    AVERAGE,
    BETA1,
    BETA2,
    STATE_NAMES,
    Epochs,
    LaunchTime,
    SharedData,
    Trained,
    weights_of_batches,
)
from onchip.network.recipe import Array
from onchip.network.types import numpy_dtype
from onchip.plan.gradient.over_rows import (
    CORRECT_LOG,
    LOG,
    ORDER,
    POSITION,
    ROW_WEIGHTS,
    SCALES,
    begin_steps,
    data_name,
    is_log,
    part_logs,
)
from onchip.plan.gradient.step import SHARE, averages_of
from onchip.plan.gradient.training_form import DRAW
from onchip.plan.plan import Plan
from onchip.runtime.backend import Backend, BoundStep, NetworkRun

OWN = (ORDER, POSITION, SCALES)  # state that training and evaluation have each; and logs
# The optimiser's state in the names of a checkpoint, "<kind>:<weight>", and in those of the step, "<weight>.<name>".
_MOMENTS = {"velocity": "velocity", "mean": "first", "square": "second"}


class LayeredRuns:
    """One run: several runs are several of these."""

    def __init__(
        self, backend: Backend, plan: Plan, runs: Sequence[NetworkRun], x: Mapping[str, Array], y: Mapping[str, Array],
        shared: SharedData, evaluation: Plan | None,
    ) -> None:  # fmt: skip
        (run,), net, key = runs, plan.network, backend.requested
        self._run, self._batch, self.seconds = run, plan.job.batch, 0.0
        state = {
            data_name(name): shared.get((key, data_name(name)), functools.partial(backend.hold_array, array))
            for name, array in {**x, **y}.items()
        }
        if run.row_weights is not None:
            state[ROW_WEIGHTS] = backend.hold_array(run.row_weights.astype(net.weights[ROW_WEIGHTS].dtype))
        self._step = backend.bind_step(plan, state)
        averages = averages_of(net)
        self._evaluation = None if evaluation is None else _evaluating(backend, evaluation, self._step, averages)
        self._held: dict[tuple[int, int, float], Any] = {}  # batches by step, rows and share of a row
        self._epochs: Epochs | None = None  # in flight,
        self._counts: list[int] = []  # with the steps of each order
        self._is_timed, self._launch_times = False, tuple[LaunchTime, ...]()
        self._counts_correct = CORRECT_LOG in net.state
        self._part_logs = part_logs(len(net.outputs) - 1) if len(net.outputs) > 2 else ()
        self._weights = tuple(name for name in run.network.weights if name in net.state)  # running statistics, too
        self._moments = {
            f"{kind}:{name}": f"{name}.{_MOMENTS[kind]}"
            for kind in STATE_NAMES["momentum" if run.how.optimiser == "nesterov" else run.how.optimiser]
            for name in self._weights
            if f"{name}.{_MOMENTS[kind]}" in net.state
        } | {f"{AVERAGE}:{name}": at for name, at in averages.items()}
        self._set_draw(0)

    @property
    def is_asynchronous(self) -> bool:
        return self._step.is_asynchronous

    def gpu_bytes(self, run: int) -> int:
        return max(self._step.nbytes, 0)

    def make_ready(self) -> None:
        for B, _ in self._batches([self._run.rows]):
            self._hold(self._step, B, self._share_of(B))

    # -- steps -------------------------------------------------------------------------------------------------

    def begin(self, epochs: Sequence[Epochs | None]) -> None:
        (self._epochs,) = epochs
        if self._epochs is not None and self.is_asynchronous:
            self._begin(self._epochs)

    def end(self) -> list[Trained]:
        if self._epochs is None:
            return [[]]
        if not self.is_asynchronous:
            self._begin(self._epochs)
        counts, self._counts = self._counts, []
        self.seconds = self._step.wait()
        losses, correct = self._logs(self._step, sum(counts))
        ends = np.cumsum(counts)[:-1]
        return [list(zip(np.split(losses, ends), np.split(correct, ends), strict=True))]

    def _begin(self, epochs: Epochs) -> None:
        net, step, orders = self._step.plan.network, self._step, epochs.orders
        weights = [weights_of_batches(order, self._batch, self._run.row_weights) for order in orders]
        self._counts = [len(each) for each in weights]
        scales = None if self._run.row_weights is None else self._scales(np.concatenate(weights))
        step.write_state(begin_steps(net, np.concatenate(orders), self._values(epochs), scales))
        for B, count in self._batches([len(order) for order in orders]):
            step.begin(self._hold(step, B, self._share_of(B)), count)

    def _batches(self, orders: Sequence[int]) -> list[tuple[int, int]]:
        """Rows and number of consecutive steps of equal size."""
        sizes: list[tuple[int, int]] = []
        for rows in orders:
            whole, rest = divmod(rows, self._batch)
            sizes += [(self._batch, whole)] * (whole > 0) + [(rest, 1)] * (rest > 0)
        groups = itertools.groupby(sizes, key=lambda size: size[0])
        return [(B, sum(count for _, count in group)) for B, group in groups]

    def _share_of(self, B: int) -> float:
        return 1.0 if self._run.how.loss == "half_sse" else 1 / B

    def _scales(self, sums: Array) -> Array:
        """What multiplies the weights of the rows of each step, from their sums."""
        if self._run.how.loss == "half_sse":
            return np.ones(len(sums))
        return np.divide(1.0, sums, out=np.zeros(len(sums)), where=sums > 0)

    def _values(self, epochs: Epochs) -> Array:
        """The optimiser's values of every step."""
        lrs = epochs.lrs.reshape(-1)
        steps = np.arange(epochs.steps_done + 1, epochs.steps_done + 1 + len(lrs))
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
            return losses, parts.astype(np.float64) / [each.weight for each in self._run.how.outputs]
        if not self._counts_correct:
            return losses, np.zeros(count, np.int64)
        return losses, np.rint(np.nan_to_num(logs[CORRECT_LOG][:count])).astype(np.int64)

    def time_steps(self) -> None:
        self._is_timed = True

    def launch_times(self) -> tuple[LaunchTime, ...]:
        if self._is_timed:  # once
            self._is_timed, self._launch_times = False, self._time_launches()
        return self._launch_times

    def _time_launches(self) -> tuple[LaunchTime, ...]:
        """Of a step of a whole batch: the launches of each kernel, with the estimates of its groups."""
        B, plan = self._batch, self._step.plan
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

    def evaluate(self, run: int, order: Array) -> tuple[float, Any]:
        step = self._evaluation
        assert step is not None, "evaluates held-out rows"
        if not len(order):
            return 0.0, 0
        (total,) = weights_of_batches(order, len(order), self._run.row_weights)
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

    def weights(self, run: int) -> dict[str, Array]:
        return self._step.read_state(self._weights)

    def moments(self, run: int) -> dict[str, Array]:
        moments = self._step.read_state(self._moments.values())
        return {name: moments[at] for name, at in self._moments.items()}

    def write(self, run: int, weights: Mapping[str, Array], state: Mapping[str, Array]) -> None:
        written = {name: weights[name] for name in self._weights}
        self._step.write_state(written | {at: state[name] for name, at in self._moments.items()})
        self._set_draw(int(state["steps"][0]))

    def _set_draw(self, steps_done: int) -> None:
        """What is dropped depends on the seed and the number of the step."""
        if DRAW in self._step.state:
            self._step.write_state({DRAW: np.array([self._run.seed, steps_done])})


def _evaluating(backend: Backend, plan: Plan, step: BoundStep, averages: Mapping[str, str]) -> BoundStep:
    """What evaluates the held-out rows, with the data and the weights of the training steps, or their averages."""
    state = {**step.state, **{name: step.state[average] for name, average in averages.items()}}
    shared = {name: array for name, array in state.items() if name in plan.network.state}
    return backend.bind_step(plan, {name: shared[name] for name in shared if name not in OWN and not is_log(name)})
