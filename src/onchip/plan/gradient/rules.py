"""Gradient rules: the nodes that compute the gradients of a layer's inputs and weights.

A rule emits layers that exist where they serve: the gradient of a Linear's input is a Linear. Without a rule, the
gradients are an InputGrad per input and a WeightGrad per weight, by the layer's own `backward`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from onchip.network.graph import Node
from onchip.network.layers import InputGrad, Layer, WeightGrad
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
_RULES: dict[type[Layer], Rule] = {}


def rule_of(*layers: type[Layer]) -> Callable[[R], R]:
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
    read = (*node.inputs, node.name, dy)
    d_inputs = tuple(
        build.add(f"{value}.grad", InputGrad(node.layer, i), read, node.weights) if is_wanted else None
        for i, (value, is_wanted) in enumerate(zip(node.inputs, wanted.inputs, strict=True))
    )
    d_weights = {
        role: build.add(f"{node.weights[role]}.grad", WeightGrad(node.layer, role), read, node.weights)
        for role in wanted.roles
    }
    return d_inputs, d_weights
