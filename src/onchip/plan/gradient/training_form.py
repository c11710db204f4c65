"""What a network computes in training where that is not what it computes at inference: batch norms and dropouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from onchip.errors import ShapeError
from onchip.network.graph import Network, Node
from onchip.network.layers import (
    BatchMean,
    BatchNorm1d,
    BatchNorm2d,
    BatchVariance,
    Dropout,
    DropoutMask,
    Mul,
    RunningAverage,
)
from onchip.network.types import numpy_dtype
from onchip.plan.gradient.builder import StepBuilder

DRAW = "step.draw"  # the weight with the seed and the number of the step, for dropouts


def add_forward(build: StepBuilder, net: Network, trainable: Callable[[str], bool]) -> dict[str, str]:
    """Append the nodes of a network in training; returns the running statistics, each with the value that it follows.

    trainable  whether a weight, by name, is trained. A batch norm whose mean is not stays as at inference.
    """
    followed: dict[str, str] = {}
    for node in net.nodes:
        if isinstance(node.layer, BatchNorm1d | BatchNorm2d) and trainable(node.weights["mean"]):
            statistics = _add_batch_norm(build, node)
            followed |= {node.weights[role]: value for role, value in statistics.items()}
        elif isinstance(node.layer, Dropout) and node.layer.p > 0:
            _add_dropout(build, node)
        else:
            build.add_node(node)
    return followed


def add_running_averages(build: StepBuilder, followed: Mapping[str, str]) -> dict[str, str]:
    """Append the updates of running statistics; returns the state, each with its new value."""
    return {
        name: build.add(f"{name}.new", RunningAverage(), (value,), {"average": name})
        for name, value in followed.items()
    }


def _add_batch_norm(build: StepBuilder, node: Node) -> dict[str, str]:
    """By the mean and variance of the batch; returns the values that the running ones follow, by role."""
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
    return {"mean": mean, "var": unbiased}


def _add_dropout(build: StepBuilder, node: Node) -> None:
    assert isinstance(node.layer, Dropout)
    if "float" not in (kind := build.types[node.inputs[0]]).dtype:
        raise ShapeError(f"layer '{node.name}' (Dropout) drops floats", got=str(kind), expected="a float dtype")
    if DRAW not in build.weights:
        build.weights[DRAW] = np.zeros(2, np.int64)
    number = sum(isinstance(each.layer, DropoutMask) for each in build.nodes)
    mask = build.add(f"{node.name}.mask", DropoutMask(node.layer.p, number), node.inputs, {"draw": DRAW})
    build.add_node(Node(node.name, Mul(), (*node.inputs, mask)))
