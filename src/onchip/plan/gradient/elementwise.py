"""The gradients of elementwise layers: of one element, of several with broadcasting, and Casts."""

from __future__ import annotations

import typing

from onchip.network.graph import Node
from onchip.network.layers import (
    ELU,
    Add,
    Cast,
    Ceil,
    Cos,
    Div,
    Elementwise,
    ElementwiseGrad,
    Exp,
    Floor,
    GreaterOrEqual,
    LeakyReLU,
    Log,
    Mask,
    Mul,
    ReLU,
    Round,
    Sign,
    Sin,
    Sub,
)
from onchip.network.layers.cast import CastTo
from onchip.plan.gradient.builder import StepBuilder
from onchip.plan.gradient.rules import GradientNames, Wanted, by_backward, rule_of


@rule_of(Elementwise)
def elementwise(build: StepBuilder, node: Node, dy: str, wanted: Wanted) -> GradientNames:
    (x,), layer = node.inputs, node.layer
    assert isinstance(layer, Elementwise)
    if not layer.grad_of:
        return by_backward(build, node, dy, wanted)
    # Of a slope <= 0, y does not tell the sign of x.
    read = x if layer.grad_of == "x" or (isinstance(layer, LeakyReLU) and layer.slope <= 0) else node.name
    return (build.add(f"{x}.grad", ElementwiseGrad(layer), (read, dy)),), {}


@rule_of(ELU)
def elu(build: StepBuilder, node: Node, dy: str, wanted: Wanted) -> GradientNames:
    """dy where x >= 0, else dy (y + alpha). Of alpha <= 0, y does not tell the sign of x."""
    (x,), layer, dtype = node.inputs, node.layer, build.types[node.name].dtype
    assert isinstance(layer, ELU)
    if layer.alpha > 0:
        return elementwise(build, node, dy, wanted)
    is_above = build.add(f"{node.name}.above", GreaterOrEqual(), (x,), {"constant": build.number(0, dtype)})
    above = build.add(f"{x}.grad.above", Mask(), (dy, is_above))
    below = build.add(f"{x}.grad.below", Sub(), (dy, above))
    slope = build.add(f"{node.name}.slope", Add(), (node.name,), {"constant": build.number(layer.alpha, dtype)})
    return (build.add(f"{x}.grad", Add(), (above, build.add(f"{x}.grad.scaled", Mul(), (below, slope)))),), {}


@rule_of(ReLU)
def relu(build: StepBuilder, node: Node, dy: str, wanted: Wanted) -> GradientNames:
    return (build.add(f"{node.inputs[0]}.grad", Mask(), (dy, node.name)),), {}


@rule_of(Exp)
def exp(build: StepBuilder, node: Node, dy: str, wanted: Wanted) -> GradientNames:
    return (build.add(f"{node.inputs[0]}.grad", Mul(), (dy, node.name)),), {}


@rule_of(Log)
def log(build: StepBuilder, node: Node, dy: str, wanted: Wanted) -> GradientNames:
    return (build.add(f"{node.inputs[0]}.grad", Div(), (dy, node.inputs[0])),), {}


@rule_of(Sin)
def sin(build: StepBuilder, node: Node, dy: str, wanted: Wanted) -> GradientNames:
    (x,) = node.inputs
    return (build.add(f"{x}.grad", Mul(), (dy, build.add(f"{node.name}.cos", Cos(), (x,)))),), {}


@rule_of(Cos)
def cos(build: StepBuilder, node: Node, dy: str, wanted: Wanted) -> GradientNames:
    (x,) = node.inputs
    weights = {"constant": build.number(-1, build.types[x].dtype)}
    return (build.add(f"{x}.grad", Mul(), (dy, build.add(f"{node.name}.sin", Sin(), (x,))), weights),), {}


@rule_of(Ceil, Floor, Round, Sign)
def of_steps(build: StepBuilder, node: Node, dy: str, wanted: Wanted) -> GradientNames:
    """None: the derivative is 0 wherever there is one."""
    return (None,), {}


@rule_of(Cast)
def cast(build: StepBuilder, node: Node, dy: str, wanted: Wanted) -> GradientNames:
    """As if rounding were the identity."""
    (x,) = node.inputs
    dtype = build.types[x].dtype
    if dtype not in typing.get_args(CastTo):
        return by_backward(build, node, dy, wanted)
    return (build.add(f"{x}.grad", Cast(typing.cast(CastTo, dtype)), (dy,)),), {}
