"""What conv_last_layer (mma, sm90) share: a convolution to few channels, the layers around it, and their claim."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from onchip.kernels.cuda.conv.direct import geometry_of
from onchip.kernels.cuda.conv.fusion import ConvKernel, ConvLowering, ConvRun, find_conv, with_conversion
from onchip.network.graph import Network
from onchip.network.layers import Cast, Permute, ToPixels
from onchip.plan.kernel import Claim
from onchip.plan.layout import CHANNELS_LAST, has_channels

MAX_CHANNELS = 16  # of y: with more, a general kernel's tiles are full
MIN_CHANNELS = 16  # of x: with fewer, a step of k is partly padding


class LastLayerKernel(ConvKernel):
    """A convolution to few channels, with its activation, the Casts around it, ToPixels and Permute."""

    def applies(self, net: Network, start: int) -> bool:
        return next(find_last_layers(net, start), None) is not None

    def claim_last(self, net: Network, run: ConvRun, is_nhwc: bool, lowering: ConvLowering, **changes: Any) -> Claim:
        """is_nhwc: whether y is NHWC; after a fused Permute, its shape is NHWC already"""
        return self.claim_run(
            net, run, lowering, label=f"{self.name}<{run.label(net, hidden=(Cast, Permute))}>",
            writes={run.output_name: CHANNELS_LAST} if is_nhwc and "Permute" not in run.epilogue() else {}, **changes,
        )  # fmt: skip


def find_last_layers(net: Network, start: int) -> Iterator[tuple[ConvRun, bool]]:
    """Find a convolution to few channels, not on the network's input, with its activation, Casts and ToPixels.

    Yields it with y in NCHW, with y in NHWC, and with a following Permute to NHWC fused; and whether y is NHWC.
    """
    begun = find_conv(net, start)
    if begun is None:
        return
    run, geometry, value = with_conversion(net, start, begun), geometry_of(net, begun.conv), begun.input_name
    if geometry.groups > 1 or geometry.N > MAX_CHANNELS or geometry.C < MIN_CHANNELS:
        return
    if not run.are_floats(net) or value in net.inputs or not has_channels(net.types[value]):
        return
    yield run, False
    if not has_channels(net.types[run.output_name]):
        return
    yield run, True
    permuted = _with_permute(net, start, run)
    if permuted is not run and permuted.are_floats(net):
        yield permuted, True


def _with_permute(net: Network, start: int, run: ConvRun) -> ConvRun:
    """The run, extended by a Permute to NHWC and a Cast or ToPixels, if there is such a Permute."""
    found, last = run, run.nodes[-1].layer
    channels_last = (0, *range(2, len(net.types[run.output_name].shape)), 1)
    for node in net.nodes[start + len(run.nodes) : start + len(run.nodes) + 2]:
        is_permute = isinstance(node.layer, Permute) and node.layer.axes == channels_last and found is run
        is_conversion = isinstance(node.layer, Cast | ToPixels) and found is not run
        longer = found.extended(net, node)
        if longer is None or not (is_permute or (is_conversion and not isinstance(last, Cast | ToPixels))):
            break
        found = longer
    return found
