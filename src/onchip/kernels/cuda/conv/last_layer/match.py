"""The layers that conv_last_layer (mma, sm90) fuses: a convolution to few channels and the layers around it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from onchip.kernels.chain import is_closed
from onchip.kernels.cuda.conv.direct import Geometry, geometry_of
from onchip.kernels.cuda.conv.warp_mma import activation_of, are_floats, convolution_of, find_nodes
from onchip.network.graph import Network, Node
from onchip.network.layers import Cast, Convolution, Elementwise, Permute, ToPixels, TransposedConvolution
from onchip.plan.kernel import Use
from onchip.plan.layout import CHANNELS_LAST, has_channels

MAX_CHANNELS = 16  # of y: with more, a general kernel's tiles are full
MIN_CHANNELS = 16  # of x: with fewer, a step of k is partly padding


@dataclass(frozen=True)
class LastLayers:
    """A convolution and the layers fused with it: Casts around it, its activation, ToPixels, Permute."""

    nodes: tuple[Node, ...]
    geometry: Geometry
    is_nhwc: bool = False  # whether y is NHWC

    @property
    def conv(self) -> Node:
        return convolution_of(self.nodes)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(node.name for node in self.nodes)

    @property
    def activation(self) -> Elementwise | None:
        return activation_of(self.nodes)

    @property
    def has_bias(self) -> bool:
        return "bias" in self.conv.weights

    def dtypes(self, net: Network) -> tuple[str, str]:
        return net.types[self.nodes[0].inputs[0]].dtype, net.types[self.nodes[-1].name].dtype

    @property
    def reads(self) -> Mapping[str, Use]:
        return {self.nodes[0].inputs[0]: Use(CHANNELS_LAST, is_read_often=True)}

    @property
    def writes(self) -> Mapping[str, str]:
        """y in NHWC; empty after a fused Permute, whose output shape is NHWC already."""
        has_permute = any(isinstance(node.layer, Permute) for node in self.nodes)
        return {self.nodes[-1].name: CHANNELS_LAST} if self.is_nhwc and not has_permute else {}


def find_last_layers(net: Network, start: int) -> Iterator[LastLayers]:
    """Find a convolution to few channels, not on the network's input, with its activation, Casts and ToPixels.

    Yields it with y in NCHW, with y in NHWC, and with a following Permute to NHWC fused.
    """
    nodes = find_nodes(net, start, (Convolution, TransposedConvolution))
    if not nodes:
        return
    value, geometry = nodes[0].inputs[0], geometry_of(net, convolution_of(nodes))
    if geometry.groups > 1 or geometry.N > MAX_CHANNELS or geometry.C < MIN_CHANNELS:
        return
    if not are_floats(net, nodes) or value in net.inputs or not has_channels(net.types[value]):
        return
    found = LastLayers(nodes, geometry)
    yield found
    if not has_channels(net.types[nodes[-1].name]):
        return
    yield replace(found, is_nhwc=True)
    permuted = _with_permute(net, start, nodes)
    if permuted and are_floats(net, permuted):
        yield LastLayers(permuted, geometry, is_nhwc=True)


def _with_permute(net: Network, start: int, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """The nodes, extended by a Permute to NHWC and a Cast or ToPixels; empty if there is no such Permute."""
    found = list(nodes)
    channels_last = (0, *range(2, len(net.types[nodes[-1].name].shape)), 1)
    for node in net.nodes[start + len(nodes) : start + len(nodes) + 2]:
        is_permute = isinstance(node.layer, Permute) and node.layer.axes == channels_last and len(found) == len(nodes)
        is_conversion = isinstance(node.layer, Cast | ToPixels) and isinstance(found[-1].layer, Permute)
        has_conversion = isinstance(nodes[-1].layer, Cast | ToPixels)
        if not (is_permute or (is_conversion and not has_conversion)):
            break
        if node.inputs != (found[-1].name,) or not is_closed(net, [*found, node]):
            break
        found.append(node)
    return tuple(found) if len(found) > len(nodes) else ()
