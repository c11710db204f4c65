"""A training step as a network: forward, loss, one gradient rule per layer, and the optimiser's update.

`training_step` returns a network with state. Its inputs are those of the network, then:

    target  what the loss compares the output with: classes (B,), or (B, ...) like the output; of several outputs one
            each, "target.<output>"
    share   (B,): the share of each row in the loss, 1 / B for a mean

Its first output is the loss, one number; the next one, if requested, the number of correct predictions; of several
outputs instead the loss of each. The trainable
weights, and the optimiser's moments, are its state; with `ema`, also averages of these weights (averages_of). It is
planned and run like every other network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from onchip.errors import InputError
from onchip.network.graph import Network, Node, TrainedStep, check_no_step
from onchip.network.layers import (
    AbsoluteError,
    AdamStep,
    Add,
    BatchSum,
    BinaryCrossEntropy,
    Cast,
    ClipScale,
    Correct,
    CrossEntropy,
    Decayed,
    Descent,
    FirstMoment,
    GlobalNorm,
    HuberLoss,
    InputGrad,
    Layer,
    Mul,
    NesterovDescent,
    Reshape,
    RunningAverage,
    SecondMoment,
    SquaredError,
    StepLayer,
    Velocity,
)
from onchip.network.layers.cast import CastTo
from onchip.network.layers.optimiser import STEP_VALUES
from onchip.network.recipe import Array, Recipe, Weight, reach, value_of
from onchip.network.training import OutputLoss, TrainingStep
from onchip.network.types import BATCH, TensorType
from onchip.plan.gradient import (  # noqa: F401 - their rules
    broadcast,
    conv,
    elementwise,
    embedding,
    linear,
    norms,
    recurrent,
    reductions,
    shapes,
)
from onchip.plan.gradient.builder import StepBuilder
from onchip.plan.gradient.rules import Wanted, gradients_of
from onchip.plan.gradient.training_form import DRAW, add_forward, add_running_averages

TARGET, SHARE = "target", "share"
VALUES = "step.values"  # the weight with the optimiser's values of a step, in the order of STEP_VALUES
LOSS, CORRECT = "loss", "correct"
ADDED_AT_ONCE = 7  # gradients of a value with many readers


def training_step(
    net: Network,
    step: TrainingStep,
    *,
    decays: bool | Mapping[str, float] = False,
    trainable: Callable[[str], bool] = lambda weight: True,
    counts: bool = False,
) -> Network:
    """The network that computes one step of training.

    decays     weights decay by STEP_VALUES' weight_decay; or weights by name, each with its factor of that
    trainable  whether a weight, by name, is trained; a batch norm whose mean is not computes as at inference
    counts     the next outputs are the number of correct predictions before the update, for classes; of several outputs
               the loss of each. Kernels that run whole steps do not claim such a step: they count by themselves
    """
    build, added, gradients, followed = _gradients(net, step, trainable)
    outputs = (added.loss, *(add_counts(build, added) if counts else ()))
    state = {DRAW: ""} if DRAW in build.weights else {}
    state |= add_running_averages(build, followed) | add_updates(build, step, gradients, decays)
    nodes = needed_nodes(build.nodes, build.weights, {*outputs, *state.values()})
    used = dict.fromkeys(name for node in net.nodes for name in node.weights.values())
    is_whole = not (counts or step.outputs)
    of = TrainedStep(net, step, decays, tuple(name for name in used if not trainable(name))) if is_whole else None
    inputs = {**net.inputs, **added.inputs}
    return Network(inputs, nodes, outputs, build.weights, f"{net.name}, a step", state=state, trained=of)


def gradients_step(
    net: Network, step: TrainingStep, trainable: Callable[[str], bool], changing: Iterable[str]
) -> tuple[Network, dict[str, str]]:
    """A network of the same inputs that returns gradients of the loss; and the output for each trained weight.

    Gradients are neither clipped nor do they contain weight decay.

    changing  weights, by name, that are state: the caller may change them
    """
    build, added, gradients, _ = _gradients(net, step, trainable)
    outputs = tuple(dict.fromkeys(gradients.values()))
    state = dict.fromkeys(changing, "") | ({DRAW: ""} if DRAW in build.weights else {})
    nodes = needed_nodes(build.nodes, build.weights, set(outputs))
    inputs = {**net.inputs, **added.inputs}
    return Network(inputs, nodes, outputs, build.weights, f"{net.name}, gradients", state=state), gradients


def _gradients(
    net: Network, step: TrainingStep, trainable: Callable[[str], bool]
) -> tuple[StepBuilder, AddedLoss, dict[str, str], dict[str, str]]:
    """Nodes that compute the loss and gradients; the loss; gradients by weight; what running statistics follow."""
    check_no_step(net)
    trained = [name for name in weights_with_gradient(net) if trainable(name)]
    build = StepBuilder([], dict(net.weights), dict(net.inputs))
    followed = add_forward(build, net, trainable)
    forward, added = tuple(build.nodes), add_loss(build, net, step)
    d_outputs = {
        each.output: build.add(
            f"{each.output}.grad", InputGrad(each.layer, 0), (each.output, each.target, each.losses, each.share)
        )
        for each in added.of_outputs
    }
    return build, added, _backward(build, forward, d_outputs, trained), followed


@dataclass(frozen=True)
class AddedOutput:
    """The loss of an output, as `add_loss` appends it."""

    output: str
    layer: Layer
    target: str
    share: str  # of each row in the loss, times the loss's weight
    losses: str  # of every row
    loss: str  # of the batch, times its weight


@dataclass(frozen=True)
class AddedLoss:
    """What `add_loss` appends."""

    of_outputs: tuple[AddedOutput, ...]
    loss: str  # of the batch: the sum of theirs
    inputs: Mapping[str, TensorType]


def losses_of(net: Network, step: TrainingStep) -> tuple[OutputLoss, ...]:
    """The loss of each trained output."""
    if step.outputs:
        return step.outputs
    _ = net.output  # exactly one
    return (OutputLoss(net.outputs[0], step.loss),)


def target_names(net: Network, step: TrainingStep) -> dict[str, str]:
    """The input with the targets of each trained output, by output."""
    if not step.outputs:
        return {net.outputs[0]: TARGET}
    return {each.output: f"{TARGET}.{each.output}" for each in step.outputs}


def add_loss(build: StepBuilder, net: Network, step: TrainingStep) -> AddedLoss:
    """Append the loss of a batch, after the nodes of the network."""
    losses, targets = losses_of(net, step), target_names(net, step)
    layers = [_loss_layer(each.loss, step.label_smoothing) for each in losses]
    kinds = [net.types[each.output] for each in losses]
    inputs = {
        targets[each.output]: TensorType((BATCH,), "int64") if isinstance(layer, CrossEntropy) else kind
        for each, layer, kind in zip(losses, layers, kinds, strict=True)
    }
    inputs[SHARE] = TensorType((BATCH,), kinds[0].dtype)
    for name, kind in inputs.items():
        if name in build.types:
            raise InputError(f"a value of the network is called '{name}'", got=name, expected="another name")
        build.types[name] = kind
    added = list[AddedOutput]()
    for each, layer, kind in zip(losses, layers, kinds, strict=True):
        target, share = targets[each.output], _as_dtype(build, SHARE, kind.dtype)
        if each.weight != 1:
            weight = {"constant": build.number(each.weight, kind.dtype)}
            share = build.add(f"{SHARE}.{each.output}", Mul(), (share,), weight)
        of_rows = build.add("losses", layer, (each.output, target))
        shared = build.add("shared_losses", Mul(), (of_rows, share))
        name = f"{LOSS}.{each.output}" if step.outputs else LOSS
        added.append(AddedOutput(each.output, layer, target, share, of_rows, build.add(name, BatchSum(), (shared,))))
    dtype = kinds[0].dtype
    parts = [_as_dtype(build, each.loss, dtype) for each in added]
    return AddedLoss(tuple(added), _total(build, LOSS, parts), inputs)


def add_counts(build: StepBuilder, of: AddedLoss) -> tuple[str, ...]:
    """Append the number of correct predictions, if the loss is one of classes; of several outputs, the loss of each."""
    if len(of.of_outputs) > 1:
        return tuple(each.loss for each in of.of_outputs)
    (only,) = of.of_outputs
    if not isinstance(only.layer, CrossEntropy):
        return ()
    return (build.add(CORRECT, BatchSum(), (build.add("are_correct", Correct(), (only.output, only.target)),)),)


def weights_with_gradient(net: Network) -> list[str]:
    """The weights that have gradients, in the network's order."""
    uses = [(role in node.layer.constants, name) for node in net.nodes for role, name in node.weights.items()]
    constant = {name for is_constant, name in uses if is_constant}
    return [
        name
        for name in dict.fromkeys(name for _, name in uses)
        if name not in constant and not isinstance(net.weights[name], Recipe) and "float" in net.weight_type(name).dtype
    ]


def _loss_layer(loss: str, label_smoothing: float) -> Layer:
    layers: dict[str, Layer] = {
        "cross_entropy": CrossEntropy(label_smoothing),
        "half_sse": SquaredError(),
        "mse": SquaredError(is_mean=True),
        "bce_with_logits": BinaryCrossEntropy(),
        "mae": AbsoluteError(),
        "huber": HuberLoss(),
    }
    return layers[loss]


def needed_nodes(nodes: Sequence[Node], weights: Mapping[str, Weight], values: set[str]) -> tuple[Node, ...]:
    """The nodes that these values depend on."""
    wanted, found = set(values), list[Node]()
    for node in reversed(nodes):
        if node.name in wanted:
            found.append(node)
            wanted.update(node.inputs)
            wanted.update(value_of(each) for each in reach(node.weights.values(), weights).values())
    return tuple(reversed(found))


# -- gradients ---------------------------------------------------------------------------------------------------


def _backward(
    build: StepBuilder, nodes: Sequence[Node], d_outputs: Mapping[str, str], trained: Iterable[str]
) -> dict[str, str]:
    """Append the gradients of these nodes; returns that of each trained weight that the loss depends on.

    d_outputs  the gradient of each trained output, by output
    """
    wanted = set(trained)
    depends = _dependents(nodes, wanted)
    for node in needed_nodes(nodes, build.weights, set(d_outputs)):
        if node.name in depends and not node.layer.is_differentiable:
            raise InputError(
                f"layer '{node.name}' ({node.layer.kind}) has no gradient", got="a trainable weight before it",
                expected="layers with a gradient", hint="freeze the weights before it, or end the network there",
            )  # fmt: skip
    parts: dict[str, list[str]] = {output: [gradient] for output, gradient in d_outputs.items()}
    of_weights: dict[str, list[str]] = {}
    for node in reversed(nodes):
        if node.name not in parts or node.name not in depends:
            continue
        dy = _total(build, f"{node.name}.grad", parts[node.name])
        inputs = tuple(name in depends and "float" in build.types[name].dtype for name in node.inputs)
        roles = tuple(role for role, weight in node.weights.items() if weight in wanted)
        d_inputs, d_weights = gradients_of(build, node, dy, Wanted(inputs, roles))
        for name, gradient in zip(node.inputs, d_inputs, strict=True):
            if gradient is not None:
                parts.setdefault(name, []).append(_as_dtype(build, gradient, build.types[name].dtype))
        for role, gradient in d_weights.items():
            weight = node.weights[role]
            of_weights.setdefault(weight, []).append(_as_dtype(build, gradient, build.weight_type(weight).dtype))
    if not of_weights:
        got, hint = "no gradient reaches a trainable weight", "layers between them and the loss that have a derivative"
        raise InputError("nothing to train", got=got, expected="weights that the loss depends on", hint=hint)
    return {name: _total(build, f"{name}.grad", of_weights[name]) for name in trained if name in of_weights}


def _dependents(nodes: Sequence[Node], weights: set[str]) -> set[str]:
    """The values that depend on a trained weight; statistics and masks of training forms are part of their rules."""
    found = set[str]()
    for node in nodes:
        is_trained = not weights.isdisjoint(node.weights.values()) or not found.isdisjoint(node.inputs)
        if is_trained and not isinstance(node.layer, StepLayer):
            found.add(node.name)
    return found


def _as_dtype(build: StepBuilder, value: str, dtype: str) -> str:
    is_cast = build.types[value].dtype != dtype
    return build.add(f"{value}.{dtype}", Cast(cast(CastTo, dtype)), (value,)) if is_cast else value


def _total(build: StepBuilder, name: str, parts: list[str]) -> str:
    """The sum of these values, a few at a time: a kernel reads at most so many."""
    total, *others = parts
    for first in range(0, len(others), ADDED_AT_ONCE):
        total = build.add(name, Add(), (total, *others[first : first + ADDED_AT_ONCE]))
    return total


# -- the optimiser -----------------------------------------------------------------------------------------------


def add_updates(
    build: StepBuilder, step: TrainingStep, gradients: Mapping[str, str], decays: bool | Mapping[str, float]
) -> dict[str, str]:
    """Append the update of every weight; returns the state, each with its new value."""
    factors = decays if isinstance(decays, Mapping) else dict.fromkeys(gradients, float(decays))
    values = build.add_weight(VALUES, np.zeros(len(STEP_VALUES), np.float32))
    state = {values: ""}
    if step.clip_norm:
        gradients = _clipped(build, gradients, step.clip_norm)
    moments: dict[str, tuple[str, ...]] = {}  # new ones by weight
    for name, gradient in gradients.items():
        of_weight, g, factor = {"weight": name, "values": values}, gradient, factors.get(name, 0.0)
        if factor and step.optimiser != "adamw":
            g = build.add(f"{name}.decayed", Decayed(factor), (g,), of_weight)
        if step.optimiser in ("momentum", "nesterov"):
            velocity = _zeros(build, f"{name}.velocity", name)
            state[velocity] = build.add(f"{velocity}.new", Velocity(), (g,), {"velocity": velocity, "values": values})
            moments[name] = (state[velocity],) if step.optimiser == "momentum" else (g, state[velocity])
        elif step.optimiser in ("adam", "adamw"):
            first, second = _zeros(build, f"{name}.first", name), _zeros(build, f"{name}.second", name)
            state[first] = build.add(f"{first}.new", FirstMoment(step.beta1), (g,), {"moment": first})
            state[second] = build.add(f"{second}.new", SecondMoment(), (g,), {"moment": second})
            moments[name] = (state[first], state[second])
        else:
            moments[name] = (g,)
    for name, of_name in moments.items():
        layer: Layer = NesterovDescent() if step.optimiser == "nesterov" else Descent()
        if step.optimiser in ("adam", "adamw"):
            factor = factors.get(name, 0.0) if step.optimiser == "adamw" else 0.0
            layer = AdamStep(is_decoupled=True, decay_factor=factor) if factor else AdamStep()
        state[name] = build.add(f"{name}.new", layer, of_name, {"weight": name, "values": values})
    for name in gradients if step.ema else ():
        average = build.add_weight(f"{name}.average", _wide(build, name).copy())
        layer = RunningAverage(1 - step.ema)
        state[average] = build.add(f"{average}.new", layer, (state[name],), {"average": average})
    return state


def averages_of(step: Network) -> dict[str, str]:
    """The state with the average of each trained weight, by weight; empty without `ema`."""
    weights = {value: name for name, value in step.state.items()}
    return {
        weights[node.inputs[0]]: node.weights["average"]
        for node in step.nodes
        if isinstance(node.layer, RunningAverage) and node.inputs[0] in weights
    }


def _zeros(build: StepBuilder, name: str, weight: str) -> str:
    """A moment of a weight."""
    return build.add_weight(name, np.zeros_like(_wide(build, weight)))


def _wide(build: StepBuilder, weight: str) -> Array:
    """A weight of at least 32 bits: in float16, squares of small gradients and small steps of an average are 0."""
    array = build.weights[weight]
    assert not isinstance(array, Recipe)
    return array if array.dtype.itemsize >= 4 else array.astype(np.float32)


def _clipped(build: StepBuilder, gradients: Mapping[str, str], clip_norm: float) -> dict[str, str]:
    has_double = any(build.types[gradient].dtype == "float64" for gradient in gradients.values())
    dtype = "float64" if has_double else "float32"
    wide = {name: _as_dtype(build, gradient, dtype) for name, gradient in gradients.items()}
    rows = {name: build.add(f"{gradient}.row", Reshape(), (gradient,)) for name, gradient in wide.items()}
    sizes = [build.add(f"{name}.norm", GlobalNorm((1,)), (row,)) for name, row in rows.items()]
    scale = build.as_weight(build.add("clip_scale", ClipScale(clip_norm), sizes))
    return {
        name: build.add(f"{gradient}.clipped", Mul(), (gradient,), {"constant": scale})
        for name, gradient in wide.items()
    }
