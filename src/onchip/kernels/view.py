"""view: layers that only reinterpret memory. On every device, nothing is launched.

A Reshape, an Identity; and a Permute between NCHW and NHWC, if the plan stores the value in the matching layout.
"""

from __future__ import annotations

from collections.abc import Iterator

from onchip.network.graph import Network, Node
from onchip.network.layers import Identity, Permute, Reshape
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Cost, Job, Refusal, Use
from onchip.plan.layout import CHANNELS_LAST, has_channels

_FREE = Cost(0, 0, launches=0)


class ViewKernel:
    name = "view"

    def __init__(self, device_kind: str, precisions: tuple[str, ...]) -> None:
        """precisions  of the device's other kernels: a view computes nothing"""
        self.device_kind, self.precisions = device_kind, precisions

    def claims(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        node = net.nodes[start]
        if not isinstance(node.layer, Reshape | Identity | Permute):
            return
        for reads, writes in _ways(net, node):
            yield Claim(
                self.name, f"{self.name}<{node.layer.kind}>", (node.name,), _FREE, "the same memory, reinterpreted",
                reads=dict.fromkeys(node.inputs, Use(CHANNELS_LAST)) if reads else {},
                writes={node.name: CHANNELS_LAST} if writes else {}, is_view=True,
            )  # fmt: skip


def _ways(net: Network, node: Node) -> Iterator[tuple[bool, bool]]:
    """The layouts of x and y in which they are the same memory; True for NHWC."""
    x, y = net.types[node.inputs[0]], net.types[node.name]
    may_be_nhwc = has_channels(x), has_channels(y) and bool(net.readers(node.name))
    if isinstance(node.layer, Permute):
        rank = len(x.shape)
        if may_be_nhwc[0] and node.layer.axes == (0, *range(2, rank), 1):
            yield True, False
        if may_be_nhwc[1] and node.layer.axes == (0, rank - 1, *range(1, rank - 1)):
            yield False, True
        return
    yield False, False
    if all(may_be_nhwc) and x.row_shape[0] == y.row_shape[0]:  # pixels reshaped, channels unchanged
        yield True, True
