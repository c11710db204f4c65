"""What a network computes in training where that is not what it computes at inference: batch norms and dropouts, and
all states of recurrent layers, for their gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from onchip.errors import ShapeError
from onchip.network.graph import Network, Node
from onchip.network.layers import (
    BatchMean,
    BatchNorm1d,
    BatchNorm2d,
    BatchNormGrad,
    BatchVariance,
    Concat,
    Dropout,
    DropoutMask,
    Mul,
    Recurrent,
    Reshape,
    RunningAverage,
    Slice,
)
from onchip.network.recipe import value_of
from onchip.network.types import numpy_dtype
from onchip.plan.gradient.builder import StepBuilder
from onchip.plan.gradient.recurrent import is_reverse
from onchip.plan.gradient.rules import GradientNames, Wanted, by_backward, rule_of, weight_grad

DRAW = "step.draw"  # the weight with the seed and the number of the step, for dropouts


def add_forward(build: StepBuilder, net: Network, trainable: Callable[[str], bool]) -> dict[str, str]:
    """Append the nodes of a network in training; returns the state that they change, each with its new value.

    trainable  whether a weight, by name, is trained. A batch norm whose mean is not stays as at inference.
    """
    state: dict[str, str] = {}
    for node in net.nodes:
        if isinstance(node.layer, BatchNorm1d | BatchNorm2d) and trainable(node.weights["mean"]):
            _add_batch_norm(build, node, state)
        elif isinstance(node.layer, Dropout) and node.layer.p > 0:
            state.setdefault(DRAW, "")
            _add_dropout(build, node)
        elif isinstance(node.layer, Recurrent) and node.layer.output == "last":
            _add_last_state(build, node, node.layer)
        else:
            build.add_node(node)
    return state


def _add_batch_norm(build: StepBuilder, node: Node, state: dict[str, str]) -> None:
    """By the mean and variance of the batch; the running ones become state."""
    (x,), C = node.inputs, int(build.types[node.inputs[0]].shape[1])
    mean = build.add(f"{node.name}.mean", BatchMean(), (x,))
    at_mean = {"mean": build.as_weight(mean)}
    var = build.add(f"{node.name}.var", BatchVariance(), (x,), at_mean)
    unbiased = build.add(f"{node.name}.unbiased_var", BatchVariance(is_unbiased=True), (x,), at_mean)
    weights = dict(node.weights)
    dtype = numpy_dtype(build.types[x].dtype)
    for role, constant in (("weight", np.ones(C, dtype)), ("bias", np.zeros(C, dtype))):
        if role not in weights:
            weights[role] = build.add_weight(f"{node.name}.{role}", constant)
    build.add_node(Node(node.name, node.layer, node.inputs, weights | at_mean | {"var": build.as_weight(var)}))
    for role, value in (("mean", mean), ("var", unbiased)):
        name = node.weights[role]
        state[name] = build.add(f"{name}.new", RunningAverage(), (value,), {"average": name})


def _add_dropout(build: StepBuilder, node: Node) -> None:
    assert isinstance(node.layer, Dropout)
    if "float" not in (kind := build.types[node.inputs[0]]).dtype:
        raise ShapeError(f"layer '{node.name}' (Dropout) drops floats", got=str(kind), expected="a float dtype")
    if DRAW not in build.weights:
        build.weights[DRAW] = np.zeros(2, np.int64)
    number = sum(isinstance(each.layer, DropoutMask) for each in build.nodes)
    mask = build.add(f"{node.name}.mask", DropoutMask(node.layer.p, number), node.inputs, {"draw": DRAW})
    build.add_node(Node(node.name, Mul(), (*node.inputs, mask)))


def _add_last_state(build: StepBuilder, node: Node, layer: Recurrent) -> None:
    """As the last step of all states."""
    states = build.add(f"{node.name}.states", replace(layer, output="sequence"), node.inputs, node.weights)
    *leading, S, width = build.types[states].row_shape
    H, none = width // layer.directions, [0] * len(leading)
    last = list[str]()
    for d in range(layer.directions):
        starts = *none, 0 if is_reverse(layer, d) else S - 1, d * H
        step = Slice(starts, (*leading, 1, H), (1,) * (len(leading) + 2))
        last.append(build.add(f"{node.name}.last", step, (states,)))
    whole = last[0] if len(last) == 1 else build.add(f"{node.name}.last", Concat(-1), last)
    build.add_node(Node(node.name, Reshape((*leading, width)), (whole,)))


@rule_of(BatchNorm1d, BatchNorm2d)
def batch_norm(build: StepBuilder, node: Node, dy: str, wanted: Wanted) -> GradientNames:
    if not value_of(build.weights[node.weights["mean"]]):
        return by_backward(build, node, dy, wanted)
    (x,), eps = node.inputs, node.layer.attributes()["eps"]
    sums = {role: weight_grad(build, node, dy, role) for role in ("weight", "bias")}
    weights = {role: node.weights[role] for role in ("weight", "mean", "var")}
    weights |= {f"d_{role}": build.as_weight(value) for role, value in sums.items()}
    dx = build.add(f"{x}.grad", BatchNormGrad(eps), (x, dy), weights) if wanted.inputs[0] else None
    return (dx,), {role: sums[role] for role in wanted.roles}
