"""Convolutions of conv_fused: choice of the operation, and the phases of transposed convolutions."""

from __future__ import annotations

from onchip.kernels.cpu.conv.lowering import Algo, Lowering
from onchip.kernels.cpu.conv.operations.depthwise import lower_depthwise
from onchip.kernels.cpu.conv.operations.dot import lower_dot
from onchip.kernels.cpu.conv.operations.groups import lower_groups
from onchip.kernels.cpu.conv.operations.pointwise import is_pointwise, lower_pointwise
from onchip.kernels.cpu.conv.operations.taps import lower_taps
from onchip.kernels.cpu.conv.operations.windows import lower_windows
from onchip.kernels.cpu.conv.operations.winograd import lower_winograd, uses_winograd
from onchip.kernels.cpu.conv.values import UnsupportedError
from onchip.network.graph import Node

_LOWERINGS = {
    Algo.TAPS: lower_taps, Algo.WINDOWS: lower_windows, Algo.DOT: lower_dot,
    Algo.DEPTHWISE: lower_depthwise, Algo.GROUPS: lower_groups,
}  # fmt: skip


def lower_convolution(to: Lowering, node: Node) -> None:
    x = to.image(node.inputs[0])
    algo = to.algo(node)
    if algo is Algo.TAPS and uses_winograd(to, node):
        lower_winograd(to, node, x)
    elif algo is Algo.TAPS and is_pointwise(to, node):
        lower_pointwise(to, node, x)
    else:
        _LOWERINGS[algo](to, node, x)


def lower_interleave(to: Lowering, node: Node) -> None:
    """A no-op: the phases were written with strides."""
    if len(set(node.inputs)) < len(node.inputs) or node.name not in to.values:
        raise UnsupportedError("phases that are not distinct convolutions")
    store = to.values[node.name].view.store
    for value in node.inputs:
        phase = to.values.get(value)
        if phase is None or phase.producer is None or phase.view.store is not store or len(to.readers(value)) != 1:
            raise UnsupportedError("phases that are not convolutions, or have other readers")
