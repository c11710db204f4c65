"""The gradients of matrix products: those of values are such products again."""

from __future__ import annotations

from onchip.network.graph import Node
from onchip.network.layers import Linear, MatMul, Permute, WeightGrad
from onchip.network.recipe import Recipe, transposed
from onchip.plan.gradient.builder import StepBuilder
from onchip.plan.gradient.rules import GradientNames, Wanted, batch_sum, by_backward, rule_of, unbroadcast, weight_grad


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
    if "first" in node.weights:
        return by_backward(build, node, dy, wanted)
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
    """A constant matrix b (K, N) is the weight of a Linear from (..., N) to (..., K): da is that Linear of dy, and db
    the gradient of its weight where the gradient of its output is a."""
    (a,), b, d_weights = node.inputs, node.weights["constant"], dict[str, str]()
    kind, da = build.weight_type(b), None
    *leading, K, N = build.weights[b].shape
    if "constant" in wanted.roles and not leading:
        d_weights["constant"] = build.add(f"{b}.grad", WeightGrad(Linear()), (dy, a), {"weight": b})
    elif "constant" in wanted.roles:
        d_weights["constant"] = weight_grad(build, node, dy, "constant")
    if wanted.inputs[0] and not leading:
        da = build.add(f"{a}.grad", Linear(), (dy,), {"weight": b})
    elif wanted.inputs[0]:
        rank = len(leading)
        recipe = Recipe.of(transposed, (b,), (*leading, N, K), kind.dtype, axes=(*range(rank), rank + 1, rank))
        by = {"constant": build.add_weight(f"{b}.transposed", recipe)}
        da = unbroadcast(build, a, build.add(f"{a}.grad", MatMul(), (dy,), by))
    return (da,), d_weights


def _swapped(build: StepBuilder, value: str) -> str:
    """A value with its last two axes swapped."""
    *axes, row, column = range(len(build.types[value].shape))
    return build.add(f"{value}.swapped", Permute((*axes, column, row)), (value,))
