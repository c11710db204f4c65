"""The gradients of matrix products: those of values are such products again."""

from __future__ import annotations

from onchip.network.graph import Node
from onchip.network.layers import Linear, MatMul, Permute, WeightGrad
from onchip.network.recipe import Recipe, transposed
from onchip.plan.gradient.builder import StepBuilder
from onchip.plan.gradient.rules import (
    GradientNames,
    Wanted,
    batch_sum,
    rule_of,
    sum_of_weight,
    unbroadcast,
    weight_grad,
)


@rule_of(Linear)
def linear(build: StepBuilder, node: Node, dy: str, wanted: Wanted) -> GradientNames:
    (x,), weight, d_weights = node.inputs, node.weights["weight"], dict[str, str]()
    if "weight" in wanted.roles:
        d_weights["weight"] = weight_grad(build, node, dy, "weight")
    if "bias" in wanted.roles:
        over = range(1, len(build.types[dy].shape) - 1)
        d_weights["bias"] = batch_sum(build, f"{node.weights['bias']}.grad", dy, over)
    dx = None
    if wanted.inputs[0]:
        D_out, D_in = build.weights[weight].shape
        recipe = Recipe.of(transposed, (weight,), (D_in, D_out), build.weight_type(weight).dtype, axes=(1, 0))
        dx = build.add(f"{x}.grad", Linear(), (dy,), {"weight": build.add_weight(f"{weight}.transposed", recipe)})
    return (dx,), d_weights


@rule_of(MatMul)
def matmul(build: StepBuilder, node: Node, dy: str, wanted: Wanted) -> GradientNames:
    if node.weights:
        return _by_constant(build, node, dy, wanted)
    a, b = node.inputs
    da = db = None
    if wanted.inputs[0]:
        da = unbroadcast(build, a, build.add(f"{a}.grad", MatMul(), (dy, _swapped(build, b))))
    if wanted.inputs[1]:
        db = unbroadcast(build, b, build.add(f"{b}.grad", MatMul(), (_swapped(build, a), dy)))
    return (da, db), {}


def _by_constant(build: StepBuilder, node: Node, dy: str, wanted: Wanted) -> GradientNames:
    """Of x C or C x: dx is a product with C transposed, and that of a matrix C, the gradient of a Linear's weight."""
    (x,), ((role, constant),) = node.inputs, node.weights.items()
    *leading, M, N = build.weights[constant].shape
    is_first, d_weights, dx = role == "first", dict[str, str](), None
    if role in wanted.roles and not leading:  # C is the weight of a Linear: from x^T to y^T, or from dy to x
        pair = (_swapped(build, x), _swapped(build, dy)) if is_first else (dy, x)
        d_weights[role] = build.add(f"{constant}.grad", WeightGrad(Linear()), pair, {"weight": constant})
    elif role in wanted.roles:
        pair = (dy, _swapped(build, x)) if is_first else (_swapped(build, x), dy)
        d_weights[role] = sum_of_weight(build, constant, build.add(f"{constant}.grad.rows", MatMul(), pair))
    if wanted.inputs[0] and not (leading or is_first):
        dx = build.add(f"{x}.grad", Linear(), (dy,), {"weight": constant})
    elif wanted.inputs[0]:
        kind, rank = build.weight_type(constant), len(leading)
        recipe = Recipe.of(transposed, (constant,), (*leading, N, M), kind.dtype, axes=(*range(rank), rank + 1, rank))
        by = {role: build.add_weight(f"{constant}.transposed", recipe)}
        dx = unbroadcast(build, x, build.add(f"{x}.grad", MatMul(), (dy,), by))
    return (dx,), d_weights


def _swapped(build: StepBuilder, value: str) -> str:
    """A value with its last two axes swapped."""
    *axes, row, column = range(len(build.types[value].shape))
    return build.add(f"{value}.swapped", Permute((*axes, column, row)), (value,))
