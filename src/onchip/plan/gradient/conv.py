"""The gradients of convolutions: those of their inputs are transposed convolutions, and the other way round."""

from __future__ import annotations

from onchip.network.graph import Node
from onchip.network.layers import (
    Conv1d,
    Conv2d,
    Convolution,
    ConvTranspose1d,
    ConvTranspose2d,
    Layer,
    Slice,
    TransposedConvolution,
)
from onchip.network.layers.conv import conv_groups, geometry
from onchip.network.types import TensorType
from onchip.plan.gradient.builder import StepBuilder
from onchip.plan.gradient.rules import GradientNames, Wanted, batch_sum, rule_of, weight_grad


@rule_of(Convolution, TransposedConvolution)
def convolution(build: StepBuilder, node: Node, dy: str, wanted: Wanted) -> GradientNames:
    (x,), d_weights = node.inputs, dict[str, str]()
    if "weight" in wanted.roles:
        d_weights["weight"] = weight_grad(build, node, dy, "weight")
    if "bias" in wanted.roles:
        over = range(2, len(build.types[dy].shape))
        d_weights["bias"] = batch_sum(build, f"{node.weights['bias']}.grad", dy, over)
    dx = None
    if wanted.inputs[0]:
        weight = {"weight": node.weights["weight"]}
        dx = build.add(f"{x}.grad", _adjoint(build, node), (dy,), weight)
        dx = _cropped(build, dx, build.types[x])
    return (dx,), d_weights


def _adjoint(build: StepBuilder, node: Node) -> Layer:
    """The layer that computes dx of dy, with the weight of the node: at least as long as x along each axis."""
    stride, pads, dilation = geometry(node.layer)
    groups, rank = conv_groups(node.layer), len(stride)
    if isinstance(node.layer, TransposedConvolution):
        return (Conv1d if rank == 1 else Conv2d)(stride, pads, dilation, groups)
    x, kernel = build.types[node.inputs[0]].row_shape[1:], build.weights[node.weights["weight"]].shape[2:]
    spans = (d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True))
    # Elements at the end that no window reached: fewer than the stride.
    unread = tuple(
        (n + before + after - span) % s
        for n, before, after, span, s in zip(x, pads[:rank], pads[rank:], spans, stride, strict=True)
    )
    return (ConvTranspose1d if rank == 1 else ConvTranspose2d)(stride, pads, unread, dilation, groups)


def _cropped(build: StepBuilder, dx: str, x: TensorType) -> str:
    """dx with the shape of x: an output padding as long as the stride gives one window too many, or more."""
    sizes = x.row_shape
    if build.types[dx].row_shape == sizes:
        return dx
    return build.add(dx, Slice((0,) * len(sizes), sizes, (1,) * len(sizes)), (dx,))
