"""The gradients of norms. That of a row norm's input is one node: its sums and its result are one pass over a row."""

from __future__ import annotations

import numpy as np

from onchip.network.graph import Node
from onchip.network.layers import BatchNorm1d, BatchNorm2d, BatchNormGrad, GroupNorm, Mul, RowNorm
from onchip.network.recipe import value_of
from onchip.network.types import numpy_dtype
from onchip.plan.gradient.builder import StepBuilder
from onchip.plan.gradient.rules import GradientNames, Wanted, batch_sum, input_grad, rule_of, weight_grad


@rule_of(RowNorm)
def row_norm(build: StepBuilder, node: Node, dy: str, wanted: Wanted) -> GradientNames:
    layer, rank, d_weights = node.layer, len(build.types[dy].shape), dict[str, str]()
    axes = range(2, rank) if isinstance(layer, GroupNorm) else range(1, layer.attributes()["axis"] % rank)
    for role in wanted.roles:
        name, of = f"{node.weights[role]}.grad", dy
        if role == "weight":
            normalised = build.add(f"{node.name}.normalised", layer, node.inputs)
            of = build.add(f"{name}.rows", Mul(), (dy, normalised))
        d_weights[role] = batch_sum(build, name, of, axes)
    return (input_grad(build, node, dy, 0) if wanted.inputs[0] else None,), d_weights


@rule_of(BatchNorm1d, BatchNorm2d)
def batch_norm(build: StepBuilder, node: Node, dy: str, wanted: Wanted) -> GradientNames:
    """dx by statistics of the batch is a BatchNormGrad; by constants, a batch norm of dy without mean and bias."""
    (x,), statistics = node.inputs, {role: node.weights[role] for role in ("mean", "var")}
    scale = {role: name for role, name in node.weights.items() if role == "weight"}
    is_of_batch = value_of(build.weights[statistics["mean"]]) != ""
    sums = {r: weight_grad(build, node, dy, r) for r in (("weight", "bias") if is_of_batch else wanted.roles)}
    dx = None
    if wanted.inputs[0] and is_of_batch:
        d_weights = {f"d_{role}": build.as_weight(value) for role, value in sums.items()}
        layer = BatchNormGrad(node.layer.attributes()["eps"])
        dx = build.add(f"{x}.grad", layer, (x, dy), scale | statistics | d_weights)
    elif wanted.inputs[0]:
        kind = build.weight_type(statistics["mean"])
        no_mean = build.add_weight(f"{node.name}.no_mean", np.zeros(kind.shape, numpy_dtype(kind.dtype)))
        dx = build.add(f"{x}.grad", node.layer, (dy,), scale | statistics | {"mean": no_mean})
    return (dx,), {role: sums[role] for role in wanted.roles}
