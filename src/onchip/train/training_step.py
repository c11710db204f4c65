"""training_step: a step of training to call in a loop of one's own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from onchip.errors import InputError
from onchip.kernels.training import BETA1, BETA2
from onchip.network.graph import Network, check_network
from onchip.network.names import match_names
from onchip.network.recipe import Array
from onchip.network.training import TrainingStep
from onchip.network.types import numpy_dtype
from onchip.plan.gradient.over_rows import LOG, begin_steps, counted_steps
from onchip.plan.gradient.step import SHARE, gradients_step, losses_of, target_names
from onchip.plan.gradient.step import training_step as network_of_step
from onchip.plan.gradient.training_form import DRAW
from onchip.plan.kernel import Job
from onchip.plan.plan import Plan
from onchip.plan.planner import make_plan
from onchip.runtime.backend import Backend, BoundStep
from onchip.runtime.io.host_rows import check_rows
from onchip.runtime.placement import kernels_for, place
from onchip.runtime.step_inputs import host_array
from onchip.train.given_network import check_parameters
from onchip.train.losses import with_losses
from onchip.train.options import TrainOptions, canonical_names, patterns_of
from onchip.train.row_weights import check_sample_weight
from onchip.train.rows import as_rows, as_targets, by_name, check_finite
from onchip.train.step import averages_of_weights, check_outputs, decays_of, trained_form, weights_used
from onchip.train.targets import check_shares, check_target

LOSSES = "losses"  # in a checkpoint
STEPS = 1024  # between two looks at the log of losses
_OPTIONS = (
    "loss", "loss_weights", "label_smoothing", "optimiser", "lr", "momentum", "nesterov", "weight_decay", "clip_norm",
    "ema", "batch_size", "seed", "precision",
)  # fmt: skip


def training_step(
    net: Network,
    *,
    trainable: str | Sequence[str] = "*",
    state: TrainStep | None = None,
    device: str = "auto",
    threads: int | None = None,
    beta1: float = BETA1,
    **options: Any,
) -> TrainStep:
    """A function that trains: `loss = step(x, y)` updates the weights by one batch.

    trainable  patterns of the names of weights that are trained ("g.*"); the others stay as they are
    state      another step on the same device: weights of the same name are one array that both steps read and change.
               Make the step that trains a weight before those that only read it
    beta1      of adam and adamw: the decay of the first moment; generators and discriminators often train with 0.5
    options    loss, loss_weights, label_smoothing, optimiser, lr, momentum, nesterov, weight_decay, clip_norm, ema,
               seed, precision, and batch_size, for which the step is planned, as of onchip.fit; a batch can have any
               size
    """
    check_network(net)
    given = canonical_names(options, ("trainable", "state"))
    if other := next((name for name in given if name not in _OPTIONS), ""):
        expected = ", ".join(_OPTIONS)
        raise InputError("not an option of a single step", got=other, expected=expected, hint="onchip.fit")
    o = with_losses(net, TrainOptions(**given))
    how, trained = replace(o.step, beta1=beta1), trained_form(net)
    check_outputs(trained, how)
    used = weights_used(trained)
    check_parameters(trained)
    names = match_names(patterns_of(trainable, "trainable"), used, "trainable")
    decays, is_trained = decays_of(o.weight_decay, used), names.__contains__
    shared = _shared(trained, used, state)
    step = counted_steps(network_of_step(trained, how, decays=decays, trainable=is_trained), STEPS)
    averages = averages_of_weights(step)
    constants = state.constants if state else set[str]()
    if taken := next((name for name in step.state if name in constants), ""):
        raise InputError(
            f"another step that shares its weights holds '{taken}' as a constant", got=f"a step that trains '{taken}'",
            expected="the step that trains a weight before those that only read it",
            hint="this step first, then the other one with state=",
        )  # fmt: skip
    added = dict.fromkeys((name for name in shared if name not in step.state), "")
    step = Network(step.inputs, step.nodes, step.outputs, step.weights, step.name, state={**step.state, **added})
    constants.update(name for name in used if name not in step.state)
    job = Job(o.precision, o.batch_size)
    plan, backend, chosen = place(step, state.chosen if state else device, job, threads)
    bound = backend.bind_step(plan, shared)
    return TrainStep(trained, how, o, is_trained, plan, bound, backend, chosen.partition(" ")[0], constants, averages)


def _shared(net: Network, used: Sequence[str], other: TrainStep | None) -> dict[str, Any]:
    """The arrays of another step for weights of the same name; InputError if one has another type."""
    if other is None:
        return {}
    if not isinstance(other, TrainStep):
        got, hint = type(other).__name__, "state=step, of step = onchip.training_step(...)"
        raise InputError("bad state", got=got, expected="another step", hint=hint)
    names = [name for name in used if name in other.state]
    for name in names:
        ours, theirs = net.weight_type(name), other.plan.network.weight_type(name)
        if ours != theirs:
            raise InputError(f"the steps differ in weight '{name}'", got=str(ours), expected=str(theirs))
    return {name: other.state[name] for name in names}


class TrainStep:
    """A step of training on a device, of which every call is one update. See onchip.training_step."""

    def __init__(
        self, net: Network, how: TrainingStep, options: TrainOptions, is_trained: Callable[[str], bool], plan: Plan,
        bound: BoundStep, backend: Backend, chosen: str, constants: set[str], averages: Mapping[str, str],
    ) -> None:  # fmt: skip
        self.constants = constants  # weights that a step of those which share weights does not read as state
        self.plan, self.chosen, self.steps_done = plan, chosen, 0
        self._targets = target_names(net, how)
        self._losses_of = {self._targets[each.output]: each for each in losses_of(net, how)}  # by target
        self._net, self._how, self._options, self._is_trained = net, how, options, is_trained
        self._bound, self._backend, self._lr, self._averages = bound, backend, options.lr, averages
        self._changing = tuple(name for name in net.weights if plan.network.state.get(name))
        self._batches: dict[tuple[int, int], Any] = {}  # by step and rows
        self._losses = np.zeros(0)  # of the steps before those in the log
        self._restart()

    # -- one step ----------------------------------------------------------------------------------------------

    def __call__(self, *rows: Any, weights: Any = None) -> StepLoss:
        """Train on a batch; returns its loss before the update, which is read when it is used as a number.

        rows     x and y: B rows and their targets, of several inputs or outputs a dict by name or a tuple each; or
                 every input, then every target. NumPy arrays, torch tensors and others of the host, or on a GPU also
                 arrays of CuPy, JAX and others, which are read where they are. Arrays of the host are checked and
                 converted as in `fit`
        weights  (B,), at least 0: multiplies the loss of each row; the mean divides by their sum
        """
        if self.steps_done - len(self._losses) == STEPS:
            self._restart()
        batch = self._batch(self._bound, rows, weights)
        self._bound.begin(batch)
        self.steps_done += 1
        return StepLoss(self, self.steps_done - 1)

    def gradients(self, *rows: Any, weights: Any = None) -> dict[str, Array]:
        """The gradients of the loss by every trained weight, by name; nothing changes.

        rows, weights  as of a call
        """
        step, values = self._gradients
        if DRAW in step.state:
            step.write_state({DRAW: np.array([self._options.seed, self.steps_done])})
        batch = self._batch(step, rows, weights)
        step.begin(batch)
        step.wait()
        outputs = step.outputs(batch)
        return {name: outputs[value][0, ...] for name, value in values.items()}

    @functools.cached_property
    def _gradients(self) -> tuple[BoundStep, dict[str, str]]:
        """What computes gradients, with the weights of the steps; and its outputs by weight."""
        shared = {name: array for name, array in self._bound.state.items() if name in self._net.weights}
        network, values = gradients_step(self._net, self._how, self._is_trained, shared)
        plan = make_plan(network, self.plan.device, kernels_for(self.plan.device), self.plan.job)
        return self._backend.bind_step(plan, shared), values

    # -- options and weights -----------------------------------------------------------------------------------

    @property
    def lr(self) -> float:
        """The learning rate of the next steps."""
        return self._lr

    @lr.setter
    def lr(self, value: float) -> None:
        TrainOptions(lr=value)  # checks it
        self._lr = value
        self._restart()

    @property
    def weights(self) -> dict[str, Array]:
        """Copies of the weights that the steps change, by name; running statistics, too."""
        self._bound.wait()
        return self._bound.read_state(self._changing)

    @weights.setter
    def weights(self, arrays: Mapping[str, Array]) -> None:
        self._bound.wait()
        like = self._bound.read_state(self._changing)
        if not isinstance(arrays, Mapping):
            got, hint = type(arrays).__name__, "step.weights = result.network.weights"
            raise InputError("bad weights", got=got, expected="a dict of arrays by name", hint=hint)
        for name, array in arrays.items():
            if name not in like or np.shape(array) != like[name].shape:
                expected = f"{like[name].dtype}{list(like[name].shape)}" if name in like else ", ".join(like)
                raise InputError(f"cannot set weight '{name}'", got=str(np.shape(array)), expected=expected)
        self._bound.write_state({name: np.asarray(array, like[name].dtype) for name, array in arrays.items()})

    @property
    def network(self) -> Network:
        """The network with its weights of now, or with `ema` their averages."""
        return self._net.replace(weights={**self._net.weights, **self.weights, **self.averages})

    @property
    def averages(self) -> dict[str, Array]:
        """Copies of the moving averages of the trained weights, by weight; empty without `ema`."""
        self._bound.wait()
        arrays = self._bound.read_state(self._averages.values())
        return {name: arrays[at] for name, at in self._averages.items()}

    def checkpoint(self) -> dict[str, Array]:
        """Copies of what the next steps depend on: weights, moments, averages, and the losses until now."""
        losses, begun = self._all_losses(), self._begin_values(1)
        self._bound.wait()
        return {**self._bound.read_state(name for name in self._bound.state if name not in begun), LOSSES: losses}

    def resume(self, arrays: Mapping[str, Array]) -> None:
        """Continue from the arrays of a `checkpoint` of the same step: the next steps have the same bits."""
        like = self.checkpoint()
        for name, array in like.items():
            got = arrays.get(name)
            if got is None or (got.shape != array.shape and name != LOSSES) or got.dtype != array.dtype:
                expected = f"'{name}': {array.dtype}{list(array.shape)}"
                text = "no such array" if got is None else f"{got.dtype}{list(got.shape)}"
                raise InputError("the checkpoint is of another step", got=text, expected=expected)
        self._bound.wait()
        self._bound.write_state({name: arrays[name] for name in like if name != LOSSES})
        self._losses = np.array(arrays[LOSSES])
        self.steps_done = len(self._losses)
        self._restart()

    @property
    def losses(self) -> Array:
        """Of all steps until now, each before its update."""
        return self._all_losses().copy()

    @property
    def state(self) -> Mapping[str, Any]:
        """The arrays on the device, by name."""
        return self._bound.state

    # -- the device --------------------------------------------------------------------------------------------

    def _batch(self, step: BoundStep, rows: Sequence[Any], weights: Any) -> Any:
        """The rows, and the share of each in the loss, for a step."""
        given = self._by_name(rows)
        B = _row_count(given.values())
        given = {name: self._checked(name, x, B) for name, x in given.items()}
        batch = self._held(step, B)
        if weights is None:
            return step.with_rows(batch, given)
        shares = np.asarray(check_sample_weight(weights, B), np.float64)
        if not shares.any():
            raise InputError("all row weights are zero", got="only zeros", expected="a row of weight > 0")
        scale = 1.0 if self._how.loss == "half_sse" else 1 / shares.sum()
        dtype = numpy_dtype(step.plan.network.inputs[SHARE].dtype)
        weighted = step.hold(self._empty(step, B) | {SHARE: (shares * scale).astype(dtype)}, B)
        return step.with_rows(weighted, given)

    def _by_name(self, rows: Sequence[Any]) -> dict[str, Any]:
        """The arrays of a call, by the step's inputs."""
        inputs, targets = tuple(self._net.inputs), self._targets
        if len(rows) == 2:
            y = by_name(rows[1], tuple(targets), "trained output")
            return by_name(rows[0], inputs, "input") | {targets[output]: array for output, array in y.items()}
        names = (*inputs, *targets.values())
        if len(rows) != len(names):
            got, expected = f"{len(rows)} arrays", ", ".join(names)
            raise InputError("wrong number of arrays", got=got, expected=expected, hint="step(x, y)")
        return dict(zip(names, rows, strict=True))

    def _checked(self, name: str, x: Any, B: int) -> Any:
        """An array of the host as the step reads it; others unchanged."""
        if (array := host_array(x)) is None:
            return x
        kind, loss = self.plan.network.inputs[name], self._losses_of.get(name)
        is_fit = array.dtype == numpy_dtype(kind.dtype) and array.shape == (B, *kind.row_shape)
        if loss is not None and not is_fit:
            output = self._net.types[loss.output]
            array = check_target(output, B, as_targets(array, loss.loss, output.dtype), loss.loss)
        elif not is_fit:
            array = check_rows(as_rows(array, kind.dtype), kind)
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            check_finite(array, "rows" if loss is None else "targets")
        if loss is not None and loss.loss == "bce_with_logits":
            check_shares(array)
        return array

    def _held(self, step: BoundStep, B: int) -> Any:
        key = id(step), B
        if key not in self._batches:
            self._batches[key] = step.hold(self._empty(step, B), B)
        return self._batches[key]

    def _empty(self, step: BoundStep, B: int) -> dict[str, Array]:
        """Rows of zeros, each of an equal share."""
        arrays = {
            name: np.zeros((kind.rows(B), *kind.row_shape), numpy_dtype(kind.dtype))
            for name, kind in step.plan.network.inputs.items()
        }
        arrays[SHARE][...] = 1.0 if self._how.loss == "half_sse" else 1 / B
        return arrays

    def _restart(self) -> None:
        """Keep the losses in the log, and write the optimiser's values of the next steps."""
        self._losses = self._all_losses()
        self._bound.write_state(self._begin_values(STEPS))

    def _begin_values(self, count: int) -> dict[str, Array]:
        """The state with which so many steps begin, apart from what earlier steps have left."""
        o, t = self._options, np.arange(self.steps_done + 1, self.steps_done + 1 + count)
        same = np.ones(count)
        columns = self._lr * same, o.step_decay * same, o.momentum * same, 1 - self._how.beta1**t, 1 - BETA2**t
        table = np.stack(columns, axis=1).astype(np.float32)
        state = begin_steps(self._bound.plan.network, np.zeros(0, np.int64), table)
        if DRAW in self._bound.state:
            state[DRAW] = np.array([o.seed, self.steps_done])
        return state

    def _all_losses(self) -> Array:
        """Of all steps until now."""
        if self.steps_done == len(self._losses):
            return self._losses
        self._bound.wait()
        log = self._bound.read_state((LOG,))[LOG][: self.steps_done - len(self._losses)]
        return np.concatenate([self._losses, log.astype(np.float64)])

    def loss_of(self, step: int) -> float:
        """The loss of a step, counted from 0, before its update; waits for it."""
        return float(self._losses[step] if step < len(self._losses) else self._all_losses()[step])


class StepLoss:
    """The loss of a step: a number once it is read, for which the step must be done."""

    def __init__(self, of: TrainStep, step: int) -> None:
        self._of, self._step = of, step

    def __float__(self) -> float:
        return self._of.loss_of(self._step)

    def __format__(self, spec: str) -> str:
        return format(float(self), spec)

    def __repr__(self) -> str:
        return repr(float(self))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.asarray(float(self), dtype)


def _row_count(rows: Iterable[Any]) -> int:
    first = next(iter(rows))
    shape = getattr(first, "shape", None)
    if not shape or not shape[0]:
        got = str(list(shape) if shape is not None else type(first).__name__)
        raise InputError(
            "no rows to train on", got=got, expected="arrays of B rows, at least one", hint="np.asarray(x)"
        )
    return int(shape[0])
