"""Gradient rules: the nodes that compute the gradients of a layer's inputs and weights.

A rule emits layers that exist where they serve: the gradient of a Linear's input is a Linear. Without a rule, the
gradients are an InputGrad per input and a WeightGrad per weight, by the layer's own `backward`. Those of weights come
first: the node after dx is then the one that reads it, and the two may fuse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from onchip.network.graph import Node
from onchip.network.layers import BatchSum, GlobalSum, InputGrad, Reshape, WeightGrad
from onchip.plan.gradient.builder import StepBuilder

# Per input of a layer (None: no gradient), and per weight by role: the values that are its gradients.
GradientNames = tuple[tuple[str | None, ...], dict[str, str]]


@dataclass(frozen=True)
class Wanted:
    """The gradients that a step needs of a layer."""

    inputs: tuple[bool, ...]
    roles: tuple[str, ...]


Rule = Callable[[StepBuilder, Node, str, Wanted], GradientNames]
R = TypeVar("R", bound=Rule)
_RULES: dict[type, Rule] = {}


def rule_of(*layers: type) -> Callable[[R], R]:
    """Register a function as the rule of these layers, and of those derived from them."""

    def register(rule: R) -> R:
        _RULES.update(dict.fromkeys(layers, rule))
        return rule

    return register


def gradients_of(build: StepBuilder, node: Node, dy: str, wanted: Wanted) -> GradientNames:
    """Append the nodes that compute the gradients of a node, from that of its output."""
    rule = next((_RULES[kind] for kind in type(node.layer).__mro__ if kind in _RULES), by_backward)
    return rule(build, node, dy, wanted)


def by_backward(build: StepBuilder, node: Node, dy: str, wanted: Wanted) -> GradientNames:
    """One node per gradient, by the layer's own `backward`."""
    d_weights = {role: weight_grad(build, node, dy, role) for role in wanted.roles}
    d_inputs = (input_grad(build, node, dy, i) if is_wanted else None for i, is_wanted in enumerate(wanted.inputs))
    return tuple(d_inputs), d_weights


def input_grad(build: StepBuilder, node: Node, dy: str, index: int) -> str:
    """The gradient of an input, by the layer's own `backward`."""
    layer = InputGrad(node.layer, index)
    return build.add(f"{node.inputs[index]}.grad", layer, _read_backward(node, dy), node.weights)


def weight_grad(build: StepBuilder, node: Node, dy: str, role: str) -> str:
    """The gradient of a weight, by the layer's own `backward`."""
    layer = WeightGrad(node.layer, role)
    return build.add(f"{node.weights[role]}.grad", layer, _read_backward(node, dy), node.weights)


def _read_backward(node: Node, dy: str) -> tuple[str, ...]:
    xs = node.inputs if node.layer.needs_x else ()
    return (*xs, node.name, dy) if node.layer.needs_y else (*xs, dy)


def unbroadcast(build: StepBuilder, value: str, gradient: str) -> str:
    """The gradient of a value that was broadcast, summed over the axes along which it was."""
    pairs = zip(build.types[value].row_shape, build.types[gradient].row_shape, strict=True)
    axes = tuple(axis for axis, (size, full) in enumerate(pairs, start=1) if size != full)
    return build.add(f"{value}.grad", GlobalSum(axes, keep=True), (gradient,)) if axes else gradient


def batch_sum(build: StepBuilder, name: str, value: str, axes: Sequence[int] = ()) -> str:
    """The sum of a value (B, ...) over the batch and these axes of its rows, which are removed: (1, ...)."""
    if axes:
        value = build.add(f"{name}.rows", GlobalSum(tuple(axes)), (value,))
    return build.add(name, BatchSum(), (value,))


def sum_of_weight(build: StepBuilder, weight: str, gradient: str) -> str:
    """The gradient of a constant operand: summed over the batch, and over the axes along which it was broadcast."""
    full, shape = build.types[gradient].row_shape, build.weights[weight].shape
    missing = len(full) - len(shape)
    axes = [axis for axis, n in enumerate(full) if axis < missing or (shape[axis - missing] == 1 and n != 1)]
    total = batch_sum(build, f"{weight}.grad", gradient, [axis + 1 for axis in axes])
    same = build.types[total].row_shape == shape
    return total if same else build.add(f"{weight}.grad", Reshape(shape), (total,))
