"""Convolutions of conv_fused: which operation does one; and the phases of a transposed one."""

from __future__ import annotations

from onchip.kernels.cpu.conv.lowering import Lowering, Way
from onchip.kernels.cpu.conv.operations.depthwise import lower_depthwise
from onchip.kernels.cpu.conv.operations.dot import lower_dot
from onchip.kernels.cpu.conv.operations.groups import lower_groups
from onchip.kernels.cpu.conv.operations.pointwise import is_pointwise, lower_pointwise
from onchip.kernels.cpu.conv.operations.taps import lower_taps
from onchip.kernels.cpu.conv.operations.windows import lower_windows
from onchip.kernels.cpu.conv.operations.winograd import goes_in_pairs, lower_pairs
from onchip.kernels.cpu.conv.values import UnsupportedError
from onchip.network.graph import Node

_LOWERINGS = {
    Way.TAPS: lower_taps, Way.WINDOWS: lower_windows, Way.DOT: lower_dot, Way.DEPTHWISE: lower_depthwise,
    Way.GROUPS: lower_groups,
}  # fmt: skip


def lower_convolution(to: Lowering, node: Node) -> None:
    x = to.image(node.inputs[0])
    way = to.way(node)
    if way is Way.TAPS and goes_in_pairs(to, node):
        lower_pairs(to, node, x)
    elif way is Way.TAPS and is_pointwise(to, node):
        lower_pointwise(to, node, x)
    else:
        _LOWERINGS[way](to, node, x)


def lower_interleave(to: Lowering, node: Node) -> None:
    """Its phases were written to their places."""
    if len(set(node.inputs)) < len(node.inputs) or node.name not in to.values:
        raise UnsupportedError("phases that are no convolutions, or one of them twice")
    store = to.values[node.name].view.store
    for value in node.inputs:
        made = to.values.get(value)
        if made is None or made.maker is None or made.view.store is not store or len(to.readers(value)) != 1:
            raise UnsupportedError("phases that are no convolutions, or that others read, too")
