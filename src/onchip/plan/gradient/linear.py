"""The gradients of a Linear: that of its input is a Linear."""

from __future__ import annotations

from onchip.network.graph import Node
from onchip.network.layers import Linear
from onchip.network.recipe import Recipe, transposed
from onchip.plan.gradient.builder import StepBuilder
from onchip.plan.gradient.rules import GradientNames, Wanted, batch_sum, rule_of, weight_grad


@rule_of(Linear)
def linear(build: StepBuilder, node: Node, dy: str, wanted: Wanted) -> GradientNames:
    (x,), weight, d_weights = node.inputs, node.weights["weight"], dict[str, str]()
    dx = None
    if wanted.inputs[0]:
        D_out, D_in = build.weights[weight].shape
        recipe = Recipe.of(transposed, (weight,), (D_in, D_out), build.weight_type(weight).dtype, axes=(1, 0))
        dx = build.add(f"{x}.grad", Linear(), (dy,), {"weight": build.add_weight(f"{weight}.transposed", recipe)})
    if "weight" in wanted.roles:
        d_weights["weight"] = weight_grad(build, node, dy, "weight")
    if "bias" in wanted.roles:
        over = range(1, len(build.types[dy].shape) - 1)
        d_weights["bias"] = batch_sum(build, f"{node.weights['bias']}.grad", dy, over)
    return (dx,), d_weights
