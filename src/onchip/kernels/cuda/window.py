"""Windows over images on a GPU, of pools and depthwise convolutions: the host's side of window.cuh."""

from __future__ import annotations

import math
import struct
from dataclasses import astuple, dataclass

from onchip.kernels.cuda.divide import divider, index_of
from onchip.kernels.cuda.program import LaunchConfig, Struct, in_line
from onchip.spec.layers import Layer
from onchip.spec.layers.conv import geometry

THREADS = 256
MOST = 1 << 30  # what ints count, with the reach of a window


@dataclass(frozen=True)
class Axis:
    size: int  # of x
    count: int  # of y
    taps: int
    stride: int
    before: int  # pads
    dilation: int
    end: int  # taps before it count in a mean over pads

    @property
    def is_plain(self) -> bool:
        """Its taps lie side by side."""
        return self.taps == 1 or self.dilation == 1


ONE_ROW = Axis(1, 1, 1, 1, 0, 1, 1)


@dataclass(frozen=True)
class Windows:
    """The windows of images with C channels of which N are made, alike in rows or with channels last."""

    C: int
    N: int
    h: Axis
    w: Axis
    is_last: bool
    unrolled: tuple[tuple[int, int, int], ...]  # windows that have a kernel of their own: KH, KW, the steps along h
    together: tuple[int, int]  # outputs a thread in those, one below the other, at most: in rows, with channels last

    @property
    def fits(self) -> bool:
        """Whether ints count an image and the places of its windows."""
        rows = self.C * self.h.size * self.w.size, self.N * self.h.count * self.w.count
        return max(rows) < 2 * MOST and max(*astuple(self.h), *astuple(self.w)) < MOST

    @property
    def cut(self) -> tuple[int, tuple[int, int, int]]:
        """Outputs a thread and the window that it is unrolled for; no such: (0, 0, 0). The same for any batch."""
        window = (self.h.taps, self.w.taps, self.h.stride)
        if window not in self.unrolled or not (self.h.is_plain and self.w.is_plain):
            return 1, (0, 0, 0)
        most = self.together[self.is_last]
        if self.h == ONE_ROW or self.h.count > 4:
            return most, window
        return (1 if self.h.count <= 2 else min(most, 4)), window

    @property
    def side_by_side(self) -> int:
        """Outputs a thread along w, in rows: two where it is unrolled for their steps."""
        is_unrolled = self.cut[1] != (0, 0, 0)
        return 2 if not self.is_last and is_unrolled and self.w.stride <= 2 and self.w.count > 1 else 1

    def arguments(self, B: int, channels: int) -> tuple[str, LaunchConfig, Struct]:
        """Template arguments (Index, IS_LAST, V, Q, KH, KW, SH, SW), the blocks, and a Windows of window.cuh.

        channels  neighbours that a thread takes, where they lie last
        """
        (Q, window), columns = self.cut, self.side_by_side
        V, SW = (channels, 0) if self.is_last else (columns, self.w.stride if columns > 1 else 0)
        h, images = self._lines(B), B if self._lines(B) is self.h else 1
        parts = math.ceil(h.count / Q)
        sizes = self.N // channels, parts, math.ceil(self.w.count / columns)
        count = images * math.prod(sizes)
        name = f"{index_of(count)}, {str(self.is_last).lower()}, {V}, {Q}, {', '.join(map(str, (*window, SW)))}"
        dividers = b"".join(divider(size).data for size in sizes)
        apart = [*self._apart(self.C, self.h.size, self.w.size, h), *self._apart(self.N, self.h.count, self.w.count, h)]
        data = dividers + struct.pack("<14i4x9q", *astuple(h), *astuple(self.w), *apart, count)
        return name, in_line(math.ceil(count / THREADS), THREADS), Struct((), data)

    def _lines(self, B: int) -> Axis:
        """Along h. Of images with one row: those of all rows of the batch, one below the other."""
        return Axis(B, B, 1, 1, 0, 1, B) if self.h == ONE_ROW and B < MOST else self.h

    def _apart(self, C: int, H: int, W: int, h: Axis) -> tuple[int, int, int, int]:
        """From image to image, channel to channel, row to row, column to column."""
        channel, row, column = (1, W * C, C) if self.is_last else (H * W, W, 1)
        return C * H * W, channel, row if h is self.h else C * W, column


def axes_of(layer: Layer, sizes: tuple[int, ...], counts: tuple[int, ...], taps: tuple[int, ...]) -> tuple[Axis, Axis]:
    """Along h and w; a signal is an image of one row."""
    stride, pads, dilation = geometry(layer)
    rank = len(sizes)
    found = [
        Axis(sizes[a], counts[a], taps[a], stride[a], pads[a], dilation[a], sizes[a] + pads[rank + a])
        for a in range(rank)
    ]
    return (ONE_ROW, found[0]) if rank == 1 else (found[0], found[1])
