"""Plans the training of networks that no kernel trains as a whole: their steps layer by layer, over rows that stay on
the device."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

from onchip.kernels.training import SharedData, epochs_at_once
from onchip.network.graph import Network
from onchip.network.recipe import Array
from onchip.network.training import TrainingStep
from onchip.plan.gradient.evaluation import evaluation_step
from onchip.plan.gradient.over_rows import ORDER, POSITION, ROW_WEIGHTS, SCALES, data_name, is_log, over_rows
from onchip.plan.gradient.step import target_names
from onchip.plan.kernel import Job, Kernel, Refusal
from onchip.plan.plan import Plan
from onchip.plan.plan_json import array_weights, plan_from_json
from onchip.plan.planner import make_plan
from onchip.runtime.backend import Backend, BoundStep
from onchip.runtime.placement import find_device, kernels_for, place, training_kernels_for
from onchip.train.options import TrainOptions
from onchip.train.rows import Rows, by_name, count_rows
from onchip.train.step import averages_of_weights, step_of, trained_form
from onchip.train.step_trainer import BoundSteps

OWN = (ORDER, POSITION, SCALES)  # state that training and evaluation have each; and logs
EVALUATED_BATCHES = 4  # the held-out rows at a time, in batches: no gradients are kept


@dataclass(frozen=True, eq=False)
class LayeredRun:
    """A run whose step is to be planned by layers."""

    net: Network
    how: TrainingStep
    options: TrainOptions
    train: Array  # row indices to train on
    held: Array  # row indices to validate on
    row_weights: Array | None

    def plan(self, rows: int, device: str, threads: int | None, text: str = "") -> tuple[Plan, Backend, str]:
        """The plan, the backend to bind it and the device's name.

        rows  of the data set
        text  the plan as JSON, to use instead of planning here
        """
        step, job = self._step(rows), Job(self.options.precision, self._batch)
        if text:
            here, backend, chosen = find_device(device, threads)
            return plan_from_json(text, array_weights(step), kernels_for(here)), backend, chosen
        plan, backend, chosen = place(step, device, job, threads)
        return replace(plan, refusals=(*self._refusals(plan), *plan.refusals)), backend, chosen

    def bind(self, plan: Plan, backend: Backend, x: Rows, y: Rows, shared: SharedData) -> BoundSteps:
        """The run on the device, with the rows."""
        net, weighted = plan.network, self.row_weights
        if shared.runs > 1 and plan.device.kind == "cpu":
            backend = find_device("cpu", 1)[1]  # one thread each
        names = target_names(self.net, self.how)
        rows, targets = by_name(x, tuple(self.net.inputs), "input"), by_name(y, tuple(names), "output")
        arrays = {data_name(name): array for name, array in rows.items()}
        arrays |= {data_name(names[output]): array for output, array in targets.items()}
        key = backend.requested
        state = {
            name: shared.get((key, name), functools.partial(backend.hold_array, array))
            for name, array in arrays.items()
        }
        if weighted is not None:
            state[ROW_WEIGHTS] = backend.hold_array(weighted.astype(net.weights[ROW_WEIGHTS].dtype))
        bound, averages = backend.bind_step(plan, state), averages_of_weights(net)
        averaged = {name: bound.state[average] for name, average in averages.items()}
        evaluation = self._evaluation(plan, backend, {**bound.state, **averaged}, count_rows(x))
        weights = tuple(name for name in trained_form(self.net).weights if name in net.state)
        return BoundSteps(bound, evaluation, self._batch, self.how, self.options.seed, weights, averages, weighted)

    @property
    def _batch(self) -> int:
        return min(self.options.batch_size, len(self.train))

    def _training_step(self, counts: bool = False) -> Network:
        o = self.options
        return step_of(self.net, self.how, o.weight_decay, o.frozen, counts=counts)

    def _step(self, rows: int) -> Network:
        """The step over the rows of the data set, for as many epochs as are queued at once."""
        count, epochs = len(self.train), epochs_at_once(len(self.train), self._batch)
        epochs, steps = min(epochs, self.options.epochs), -(-count // self._batch)
        step, is_weighted = self._training_step(counts=True), self.row_weights is not None
        averages_of_weights(step)
        return over_rows(step, rows, steps * epochs, count * epochs, is_weighted=is_weighted)

    def _evaluation(self, of: Plan, backend: Backend, state: Mapping[str, object], rows: int) -> BoundStep | None:
        """What evaluates the held-out rows, with the data and the weights of the training steps, or their averages."""
        if not len(self.held):
            return None
        net, size = trained_form(self.net), min(len(self.held), EVALUATED_BATCHES * self._batch)
        whole = over_rows(
            evaluation_step(net, self.how, of.network.state, counts=True), rows, -(-len(self.held) // size),
            len(self.held), is_weighted=self.row_weights is not None,
        )  # fmt: skip
        plan = make_plan(whole, of.device, kernels_for(of.device), Job(of.job.precision, size))
        shared = {
            name: array for name, array in state.items() if name in whole.state and not (name in OWN or is_log(name))
        }
        return backend.bind_step(plan, shared)

    def _refusals(self, plan: Plan) -> list[Refusal]:
        """Why no kernel runs whole steps of this network."""
        step = self._training_step()
        kernels: list[Kernel] = list(training_kernels_for(plan.device))
        answers = [answer for kernel in kernels for answer in kernel.claims(step, 0, plan.device, plan.job)]
        first = plan.network.nodes[0].name
        return [replace(answer, node=first) for answer in answers if isinstance(answer, Refusal)]


def is_layered(text: str) -> bool:
    """Whether a plan as JSON is of a step that no kernel runs as a whole."""
    return json.loads(text)["trained"] is None
