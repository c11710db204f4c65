"""Buffers and views of conv_fused's values: NHWC, with channels padded to whole vectors where these are written."""

from __future__ import annotations

from dataclasses import dataclass

_LINE_FLOATS = 16  # per cache line

Sizes = tuple[int, int, int]  # C, H, W of one image
Border = tuple[int, int, int, int]  # top, left, bottom, right


class UnsupportedError(Exception):
    """No operation supports a layer, or its use; the subgraph ends before it."""

    index = 0  # of the layer in the subgraph


@dataclass(eq=False)
class Store:
    """Buffer for one value of one image, with a zero border where a reader needs one."""

    C: int
    H: int
    W: int
    pixel: int  # pixel stride in floats
    border: Border = (0, 0, 0, 0)
    offset: int = 0  # of its first image, in floats
    is_per_tile: bool = True  # holds all images of a tile; else one group, and every group reuses it

    @property
    def sizes(self) -> Sizes:
        return self.C, self.H, self.W

    @property
    def row(self) -> int:
        return (self.W + self.border[1] + self.border[3]) * self.pixel

    @property
    def size(self) -> int:
        """Image stride in floats: an odd number of cache lines, so that the same pixel of several images falls into
        different cache sets."""
        lines = -(-(self.H + self.border[0] + self.border[2]) * self.row // _LINE_FLOATS)
        return (lines | 1) * _LINE_FLOATS


@dataclass(frozen=True, eq=False)
class View:
    """A strided view of a store: every s-th pixel, a range of channels."""

    store: Store
    sizes: Sizes
    start: tuple[int, int] = (0, 0)  # row, column
    step: tuple[int, int] = (1, 1)
    channel: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether it covers all channels of its store."""
        return self.sizes[0] == self.store.C

    def layout(self) -> tuple[int, int, int, int, int]:
        """In floats: offset of the first element; strides of pixels, rows, images of a group, and images of the tile
        before the group."""
        s = self.store
        offset = (
            s.offset + (s.border[0] + self.start[0]) * s.row + (s.border[1] + self.start[1]) * s.pixel + self.channel
        )
        return offset, self.step[1] * s.pixel, self.step[0] * s.row, s.size, s.size if s.is_per_tile else 0
