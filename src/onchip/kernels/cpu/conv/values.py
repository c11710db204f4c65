"""Where the values of conv_fused lie.

Values lie with their channels last and, where they are written in whole vectors, with channels padded to whole vectors.
"""

from __future__ import annotations

from dataclasses import dataclass

_LINE_FLOATS = 16  # of a cache line

Sizes = tuple[int, int, int]  # C, H, W of one image
Rim = tuple[int, int, int, int]  # top, left, bottom, right


class UnsupportedError(Exception):
    """A layer, or the way it is used, has no operation; the run ends before it."""

    at = 0  # its number in the run


@dataclass(eq=False)
class Store:
    """Memory for one value of one image, with a rim of zeros where a reader wants one."""

    C: int
    H: int
    W: int
    pixel: int  # floats from pixel to pixel
    rim: Rim = (0, 0, 0, 0)
    offset: int = 0  # where its first image begins, in floats
    is_of_tile: bool = True  # it has room for all images of a tile; else for a group, and the next one uses it again

    @property
    def sizes(self) -> Sizes:
        return self.C, self.H, self.W

    @property
    def row(self) -> int:
        return (self.W + self.rim[1] + self.rim[3]) * self.pixel

    @property
    def size(self) -> int:
        """Floats from image to image: an odd number of cache lines, so that the same pixel of several images does not
        meet itself in one set of the cache."""
        lines = -(-(self.H + self.rim[0] + self.rim[2]) * self.row // _LINE_FLOATS)
        return (lines | 1) * _LINE_FLOATS


@dataclass(frozen=True, eq=False)
class View:
    """Where a value lies: a store, or every s-th pixel of it, or some of its channels."""

    store: Store
    sizes: Sizes
    start: tuple[int, int] = (0, 0)  # row and pixel
    step: tuple[int, int] = (1, 1)
    channel: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether it has all channels of its store."""
        return self.sizes[0] == self.store.C

    def place(self) -> tuple[int, int, int, int, int]:
        """Offset of its first number, and the strides of pixels, rows and images, the latter in a group and before it
        in the tile, in floats."""
        s = self.store
        offset = s.offset + (s.rim[0] + self.start[0]) * s.row + (s.rim[1] + self.start[1]) * s.pixel + self.channel
        return offset, self.step[1] * s.pixel, self.step[0] * s.row, s.size, s.size if s.is_of_tile else 0
