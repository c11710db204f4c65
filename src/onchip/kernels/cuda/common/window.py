"""Sliding windows of pools and depthwise convolutions: the host side of common/window.cuh."""

from __future__ import annotations

import math
from ctypes import c_int32, c_int64
from dataclasses import astuple, dataclass
from pathlib import Path

from onchip.kernels.cuda.common.arguments import Struct
from onchip.kernels.cuda.common.c_struct import CStruct
from onchip.kernels.cuda.common.fast_divide import Divider, divider, index_of
from onchip.kernels.cuda.common.program import LaunchConfig, grid_1d
from onchip.kernels.window import ONE_ROW, Axis

SOURCE = Path(__file__).with_suffix(".cuh")
THREADS = 256
MAX_SIZE = 1 << 28  # axis size: int32 indices cover it and the overhang of a few windows


class AxisStruct(CStruct):
    source, c_name = SOURCE, "Axis"
    _fields_ = tuple((name, c_int32) for name in Axis.__dataclass_fields__)


class StridesStruct(CStruct):
    source, c_name = SOURCE, "Strides"
    _fields_ = (("image", c_int64), ("channel", c_int64), ("row", c_int64), ("column", c_int64))


class WindowsStruct(CStruct):
    source, c_name = SOURCE, "Windows"
    _fields_ = (
        ("channels", Divider), ("rows", Divider), ("columns", Divider), ("h", AxisStruct), ("w", AxisStruct),
        ("x", StridesStruct), ("y", StridesStruct), ("count", c_int64),
    )  # fmt: skip


LOOP_ROWS = (4, 2)  # output rows per thread of windows that are not unrolled: (NCHW, NHWC)
MAX_FILLED = 1.15  # NCHW: limit on computed outputs, including those past the end, per stored output


@dataclass(frozen=True)
class Windows:
    """The windows over images of C channels that produce N channels; x and y are both NCHW or both NHWC."""

    C: int
    N: int
    h: Axis
    w: Axis
    is_nhwc: bool
    element_bytes: int
    unrolled: tuple[tuple[int, int, int], ...]  # windows with an unrolled kernel: (KH, KW, SH)
    max_rows: tuple[int, int]  # most output rows per thread of unrolled kernels: (NCHW, NHWC)
    units: int  # SMs

    def why_not(self) -> str:
        """Why int32 indices do not cover an image or the positions of its windows; "" if they do."""
        images = self.C * self.h.size * self.w.size, self.N * self.h.count * self.w.count
        if max(images) < 1 << 31 and max(*astuple(self.h), *astuple(self.w)) < MAX_SIZE:
            return ""
        return f"supports images of fewer than 2^31 elements, and fewer than {MAX_SIZE:,} along an axis"

    @property
    def window(self) -> tuple[int, int, int]:
        """The window that the kernel is unrolled for; (0, 0, 0) where it is not unrolled."""
        window = (self.h.taps, self.w.taps, self.h.stride)
        is_undilated = self.h.dilation == self.w.dilation == 1
        return window if window in self.unrolled and is_undilated else (0, 0, 0)

    @property
    def is_unrolled(self) -> bool:
        return self.window != (0, 0, 0)

    def columns(self, channels: int) -> int:
        """Output columns per thread.

        channels  per thread, in NHWC
        """
        if not self.is_unrolled:
            most = min(4, 16 // channels) if self.slides else 2 if channels == 1 else 1
        elif self.w.stride > 2:
            most = 1
        elif self.is_nhwc:
            most = 2 if self.element_bytes == 2 and 1 < channels <= 4 else 1
        else:  # 16-bit elements: eight, if they divide the row
            most = 2 if self.element_bytes > 2 else 4 if self.w.count % 8 else 8
            if self.w.stride >= self.w.taps:  # windows do not overlap: fewer columns, stored in one vector
                most = math.gcd(most, self.w.count)
        return 1 << min(most, self.w.count).bit_length() - 1

    def rows(self, columns: int) -> int:
        """Output rows per thread for a large batch; 1 where adjacent output rows share no row of x."""
        most = min((self.max_rows if self.is_unrolled else LOOP_ROWS)[self.is_nhwc], 32 // columns)
        if self.is_unrolled and self.h == ONE_ROW:
            return most
        if self.h.count <= 2 or self.h.stride >= self.h.taps or (not self.is_unrolled and self.h.dilation > 1):
            return 1
        most = min(most, 8 if self.h.count > 4 else 4)
        column_overhang = math.ceil(self.w.count / columns) * columns / self.w.count
        may_waste = self.is_nhwc or not self.is_unrolled
        limit = MAX_FILLED * self.h.count
        while not may_waste and most > 2 and math.ceil(self.h.count / most) * most * column_overhang > limit:
            most //= 2
        return most

    def rows_at(self, B: int, channels: int) -> int:
        """Output rows per thread at batch B: 1 where there are few threads. Results are bit-identical either way."""
        Q = self.rows(self.columns(channels))
        return 1 if 2 * self._threads(B, channels, Q) < self.units * THREADS else Q

    def _sizes(self, B: int, channels: int, Q: int) -> tuple[int, int, int]:
        """Threads per image, along each axis of y."""
        down, right = math.ceil(self._h_axis(B).count / Q), math.ceil(self.w.count / self.columns(channels))
        return self.N // channels, down, right

    def _threads(self, B: int, channels: int, Q: int) -> int:
        return (B if self._h_axis(B) is self.h else 1) * math.prod(self._sizes(B, channels, Q))

    @property
    def slides(self) -> bool:
        """Whether adjacent outputs along w read adjacent inputs at each tap."""
        return self.w.stride == self.w.dilation == 1

    def arguments(self, B: int, channels: int) -> tuple[str, LaunchConfig, Struct]:
        """Template arguments (Index, IS_NHWC, V, U, Q, P, LEAD, KH, KW, SH, SW), launch config, Windows of window.cuh.

        channels  per thread, in NHWC
        """
        U, h = self.columns(channels), self._h_axis(B)
        Q, P = self.rows_at(B, channels), self._load_columns(U)
        lead = -self.w.before % P
        SW = (self.w.stride if U > 1 else 0) if self.is_unrolled else int(self.slides)
        window = self.window if self.is_unrolled else (0, self._taps_per_iteration(channels), 0)
        template = (str(self.is_nhwc).lower(), channels, U, Q, P, lead, *window, SW)
        count = self._threads(B, channels, Q)
        by_channels, by_rows, by_columns = map(divider, self._sizes(B, channels, Q))
        windows = WindowsStruct.of(
            channels=by_channels, rows=by_rows, columns=by_columns, h=AxisStruct.of(**vars(h)),
            w=AxisStruct.of(**vars(self.w)), x=self._strides(self.C, self.h.size, self.w.size, h),
            y=self._strides(self.N, self.h.count, self.w.count, h), count=count,
        )  # fmt: skip
        name = f"{index_of(count)}, {', '.join(map(str, template))}"
        return name, grid_1d(math.ceil(count / THREADS), THREADS), windows

    def _taps_per_iteration(self, channels: int) -> int:
        """Taps per iteration of the loop over a row: few with many channels; 7 where it divides the row."""
        return 2 if channels > 1 else 7 if self.w.taps % 7 == 0 else 4

    def _load_columns(self, U: int) -> int:
        """Columns per vector load: a divisor of the width of x and of the stride from thread to thread."""
        if self.is_nhwc or not self.is_unrolled:
            return 1
        return math.gcd(self.w.size, U * self.w.stride, 16 // self.element_bytes)

    def _h_axis(self, B: int) -> Axis:
        """The axis h; for images of one row, the batch."""
        return Axis(B, B, 1, 1, 0, 1, B) if self.h == ONE_ROW and B < MAX_SIZE else self.h

    def _strides(self, C: int, H: int, W: int, h: Axis) -> Struct:
        channel, row, column = (1, W * C, C) if self.is_nhwc else (H * W, W, 1)
        return StridesStruct.of(image=C * H * W, channel=channel, row=row if h is self.h else C * W, column=column)
