"""The gradients of a TokenConv: that of its bias is a sum."""

from __future__ import annotations

from onchip.network.graph import Node
from onchip.network.layers import TokenConv
from onchip.plan.gradient.builder import StepBuilder
from onchip.plan.gradient.rules import GradientNames, Wanted, batch_sum, rule_of, weight_grad


@rule_of(TokenConv)
def token_conv(build: StepBuilder, node: Node, dy: str, wanted: Wanted) -> GradientNames:
    d_weights = dict[str, str]()
    if "weight" in wanted.roles:
        d_weights["weight"] = weight_grad(build, node, dy, "weight")
    if "bias" in wanted.roles:
        d_weights["bias"] = batch_sum(build, f"{node.weights['bias']}.grad", dy, (2,))
    return (None,), d_weights
