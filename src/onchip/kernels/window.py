"""The sliding windows of pools and depthwise convolutions along the axes of an image, for all devices."""

from __future__ import annotations

from dataclasses import dataclass

from onchip.network.layers import AvgPool1d, AvgPool2d, Layer, MaxPool1d, MaxPool2d
from onchip.network.layers.conv import geometry

POOLS = (MaxPool1d, MaxPool2d, AvgPool1d, AvgPool2d)


@dataclass(frozen=True)
class Axis:
    size: int  # input elements
    count: int  # outputs
    taps: int
    stride: int
    before: int  # padding before the first element
    dilation: int
    end: int  # taps before this index count in an average that includes padding


ONE_ROW = Axis(1, 1, 1, 1, 0, 1, 1)


def axes_of(layer: Layer, sizes: tuple[int, ...], counts: tuple[int, ...], taps: tuple[int, ...]) -> tuple[Axis, Axis]:
    """The axes h and w; 1-D inputs are images of one row."""
    stride, pads, dilation = geometry(layer)
    rank = len(sizes)
    axes = [
        Axis(
            sizes[a], counts[a], taps[a], stride[a], pads[a], dilation[a] if taps[a] > 1 else 1,
            sizes[a] + pads[rank + a],
        )
        for a in range(rank)
    ]  # fmt: skip
    return (ONE_ROW, axes[0]) if rank == 1 else (axes[0], axes[1])
