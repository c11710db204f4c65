"""The gradients of elementwise layers of several operands, which broadcast: values, and perhaps a weight.

A rule computes the gradient of an operand in the shape of the output. `per_operand` then sums it over the axes along
which the operand was broadcast, and that of a weight over the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from onchip.network.graph import Node
from onchip.network.layers import (
    Add,
    Comparison,
    Div,
    Equal,
    Greater,
    GreaterOrEqual,
    Layer,
    Log,
    Mask,
    Max,
    Min,
    Mul,
    Pow,
    PReLU,
    Sub,
)
from onchip.plan.gradient.builder import StepBuilder
from onchip.plan.gradient.rules import GradientNames, Rule, Wanted, rule_of, sum_of_weight, unbroadcast


@dataclass(frozen=True)
class Operand:
    name: str  # of a value, or of a weight if it has a role
    role: str = ""
    is_wanted: bool = False  # whether its gradient is


Operands = tuple[Operand, ...]
# The gradient of each operand that is wanted, and maybe of others, in the shape of the output; None: no gradient.
OperandRule = Callable[[StepBuilder, Node, str, Operands], Sequence[str | None]]


def per_operand(rule: OperandRule) -> Rule:
    def of_node(build: StepBuilder, node: Node, dy: str, wanted: Wanted) -> GradientNames:
        operands = _operands(node, wanted)
        d_inputs: list[str | None] = []
        d_weights: dict[str, str] = {}
        for operand, gradient in zip(operands, rule(build, node, dy, operands), strict=True):
            if gradient is not None and operand.is_wanted:
                gradient = (sum_of_weight if operand.role else unbroadcast)(build, operand.name, gradient)
            if not operand.role:
                d_inputs.append(gradient if operand.is_wanted else None)
            elif gradient is not None and operand.is_wanted:
                d_weights[operand.role] = gradient
        return tuple(d_inputs), d_weights

    return of_node


def _operands(node: Node, wanted: Wanted) -> Operands:
    """In their order: the weight `first` before the values, others after them."""
    values = (Operand(name, "", is_wanted) for name, is_wanted in zip(node.inputs, wanted.inputs, strict=True))
    weights = [Operand(name, role, role in wanted.roles) for role, name in node.weights.items()]
    return (*weights, *values) if "first" in node.weights else (*values, *weights)


def _combined(build: StepBuilder, node: Node, layer: Layer, *operands: str | Operand) -> str:
    """The value of a layer of these operands, values by name; at most one is a weight."""
    named = [Operand(each) if isinstance(each, str) else each for each in operands]
    values, weights = [each.name for each in named if not each.role], dict[str, str]()
    for i, operand in enumerate(named):
        if operand.role:
            is_mask, is_first = isinstance(layer, Mask) and i == 1, i == 0 and not isinstance(layer, Add | Mul)
            weights["mask" if is_mask else "first" if is_first else "constant"] = operand.name
    return build.add(f"{node.name}.{layer.kind.lower()}", layer, values, weights)


def _number(build: StepBuilder, node: Node, number: float) -> Operand:
    return Operand(build.number(number, build.types[node.name].dtype), "constant")


@rule_of(Add)
@per_operand
def add(build: StepBuilder, node: Node, dy: str, operands: Operands) -> Sequence[str | None]:
    return [dy] * len(operands)


@rule_of(Sub)
@per_operand
def sub(build: StepBuilder, node: Node, dy: str, operands: Operands) -> Sequence[str | None]:
    return dy, _combined(build, node, Mul(), dy, _number(build, node, -1)) if operands[1].is_wanted else None


@rule_of(Mul)
@per_operand
def mul(build: StepBuilder, node: Node, dy: str, operands: Operands) -> Sequence[str | None]:
    return [
        _combined(build, node, Mul(), dy, *operands[:i], *operands[i + 1 :]) if operand.is_wanted else None
        for i, operand in enumerate(operands)
    ]


@rule_of(Div)
@per_operand
def div(build: StepBuilder, node: Node, dy: str, operands: Operands) -> Sequence[str | None]:
    _, b = operands
    da = _combined(build, node, Div(), dy, b)
    return da, _combined(build, node, Mul(), da, node.name, _number(build, node, -1)) if b.is_wanted else None


@rule_of(Mask)
@per_operand
def mask(build: StepBuilder, node: Node, dy: str, operands: Operands) -> Sequence[str | None]:
    return _combined(build, node, Mask(), dy, operands[1]), None


@rule_of(Comparison)
@per_operand
def comparison(build: StepBuilder, node: Node, dy: str, operands: Operands) -> Sequence[str | None]:
    return None, None


@rule_of(Max, Min)
@per_operand
def extreme(build: StepBuilder, node: Node, dy: str, operands: Operands) -> Sequence[str | None]:
    """The gradient goes to the first operand that equals the result."""
    found, rest = list[str](), dy
    for operand in operands[:-1]:
        is_equal = _combined(build, node, Equal(), operand, node.name)
        found.append(_combined(build, node, Mask(), rest, is_equal))
        rest = _combined(build, node, Sub(), rest, found[-1])
    return [*found, rest]


@rule_of(PReLU)
@per_operand
def prelu(build: StepBuilder, node: Node, dy: str, operands: Operands) -> Sequence[str | None]:
    a, b = operands
    is_above = _combined(build, node, GreaterOrEqual(), _as_value(build, node, a), _number(build, node, 0))
    above = _combined(build, node, Mask(), dy, is_above)
    below = _combined(build, node, Sub(), dy, above)
    da = _combined(build, node, Add(), above, _combined(build, node, Mul(), below, b)) if a.is_wanted else None
    return da, _combined(build, node, Mul(), below, a) if b.is_wanted else None


@rule_of(Pow)
@per_operand
def power(build: StepBuilder, node: Node, dy: str, operands: Operands) -> Sequence[str | None]:
    """b a^(b - 1) and y log a: 0 where a <= 0."""
    a, b = operands
    da = db = None
    if a.is_wanted:
        less = _combined(build, node, Sub(), _as_value(build, node, b), _number(build, node, 1))
        da = _combined(build, node, Mul(), dy, _combined(build, node, Pow(), a, less), b)
    if b.is_wanted:
        base = _as_value(build, node, a)
        is_positive = _combined(build, node, Greater(), base, _number(build, node, 0))
        logarithm = _combined(build, node, Mask(), _combined(build, node, Log(), base), is_positive)
        db = _combined(build, node, Mul(), dy, node.name, logarithm)
    return da, db


def _as_value(build: StepBuilder, node: Node, operand: Operand) -> Operand:
    """The operand, if it is a weight added to zeros of the batch: a device computes no functions of weights alone."""
    if not operand.role:
        return operand
    zeros = _combined(build, node, Greater(), node.inputs[0], _number(build, node, math.inf))
    return Operand(_combined(build, node, Add(), zeros, operand))
