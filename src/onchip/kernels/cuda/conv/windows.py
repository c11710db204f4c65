"""Host side of `Windows` in conv/sm90.cu: output phases and their im2col windows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from ctypes import c_int32, c_uint32
from dataclasses import dataclass
from pathlib import Path

from onchip.kernels.cuda.common.arguments import Struct
from onchip.kernels.cuda.common.c_struct import CStruct
from onchip.kernels.cuda.conv.direct import Geometry, Pair, by_axis
from onchip.plan.rewrites.phases import AxisPhase, axis_phase

SOURCE = Path(__file__).with_name("sm90.cu")
MAX_CORNER, MAX_REACH, MAX_STRIDE = 127, 255, 8  # limits of TMA im2col mode
MAX_PHASES = 8  # per axis, same as in the .cu file


class PhaseStruct(CStruct):
    source, c_name = SOURCE, "Phase"
    _fields_ = (("taps", c_uint32), ("taps_before", c_uint32), ("begin", c_uint32), ("positions", c_uint32))


class WindowsStruct(CStruct):
    source, c_name = SOURCE, "Windows"
    _fields_ = (
        ("chunks", c_uint32), ("channels", c_uint32), ("taps_w", c_uint32), ("positions", c_uint32),
        ("columns", c_uint32), ("lines_out", c_uint32), ("columns_out", c_uint32), ("phases_h", c_uint32),
        ("phases_w", c_uint32), ("stride_h", c_int32), ("stride_w", c_int32), ("before_h", c_int32),
        ("before_w", c_int32), ("dilation_h", c_int32), ("dilation_w", c_int32), ("down", PhaseStruct * MAX_PHASES),
        ("right", PhaseStruct * MAX_PHASES),
    )  # fmt: skip


@dataclass(frozen=True)
class Windows:
    """The windows of all phases of y, on one grid of base pixels in x. Pairs are (H, W)."""

    geometry: Geometry

    @property
    def spread(self) -> Pair:
        """Phases per axis: the stride of a transposed convolution; one per tap if x has a single pixel there."""
        g = self.geometry
        if not g.is_transposed:
            return (1, 1)
        first, second = (
            taps if side == 1 and taps <= MAX_PHASES else stride
            for taps, side, stride in zip(g.taps, g.sides_in, g.stride, strict=True)
        )
        return first, second

    @property
    def phases(self) -> tuple[tuple[AxisPhase, ...], tuple[AxisPhase, ...]]:
        """Phases along each axis; one for a regular convolution."""
        g = self.geometry
        axes = zip(self.spread, g.before, g.taps, g.sides_out, strict=True)
        if not g.is_transposed:
            down, right = (AxisPhase(0, taps, before, positions) for _, before, taps, positions in axes)
            return (down,), (right,)
        first, second = (tuple(axis_phase(p, *axis) for p in range(axis[0])) for axis in axes)
        return first, second

    @property
    def count(self) -> int:
        """Number of phases."""
        return math.prod(map(len, self.phases))

    @property
    def stride(self) -> Pair:
        return (1, 1) if self.geometry.is_transposed else self.geometry.stride

    @property
    def positions(self) -> Pair:
        """Positions of the largest phase."""
        down, right = (max(phase.outputs for phase in axis) for axis in self.phases)
        return down, right

    @property
    def before(self) -> Pair:
        """Padding before x: the maximum over phases."""
        down, right = (max(0, *(phase.before for phase in axis)) for axis in self.phases)
        return down, right

    @property
    def after(self) -> Pair:
        """Offset of the last base pixel from the last pixel of x."""
        sides = zip(self.positions, self.stride, self.before, self.geometry.sides_in, strict=True)
        down, right = ((positions - 1) * stride - before - (side - 1) for positions, stride, before, side in sides)
        return down, right

    def why_not(self) -> str:
        g = self.geometry
        if g.is_transposed and max(g.dilation) > 1:
            return "no transposed convolutions with dilation"
        if max(self.spread) > MAX_PHASES or not min(phase.taps for axis in self.phases for phase in axis):
            return f"at most {MAX_PHASES} phases per axis, each with a tap"
        extent = max(
            before - phase.before + (phase.taps - 1) * dilation
            for axis, before, dilation in zip(self.phases, self.before, g.dilation, strict=True)
            for phase in axis
        )
        corner = max(*self.before, *map(abs, self.after))
        if max(self.stride) > MAX_STRIDE or corner > MAX_CORNER or extent > MAX_REACH:
            return f"strides up to {MAX_STRIDE}, pads up to {MAX_CORNER}, windows that reach up to {MAX_REACH}"
        return ""

    def taps(self) -> list[int]:
        """Taps per phase."""
        down, right = self.phases
        return [h.taps * w.taps for h in down for w in right]

    def tap_order(self) -> tuple[int, ...]:
        """Flat tap indices of the weight, phase by phase, in the order in which pixels are visited."""
        down, right = ([self._taps_of(phase, s) for phase in a] for a, s in zip(self.phases, self.spread, strict=True))
        taps_w = self.geometry.taps[1]
        return tuple(i * taps_w + j for rows in down for columns in right for i in rows for j in columns)

    def _taps_of(self, phase: AxisPhase, step: int) -> list[int]:
        taps = list(range(phase.first, phase.first + phase.taps * step, step))
        return taps[::-1] if self.geometry.is_transposed else taps

    def along(self, axis: int) -> Iterator[tuple[AxisPhase, int, int]]:
        """The phases along an axis; the taps of the previous ones; the first pixel, relative to the base pixel."""
        taps_before = 0
        for phase in self.phases[axis]:
            yield phase, taps_before, self.before[axis] - phase.before
            taps_before += phase.taps

    def packed(self, chunks: int, channels: int) -> Struct:
        """chunks: slices of k per tap; channels: per tap of the weight"""
        g, (down, right) = self.geometry, self.phases
        phases_down, phases_right = (
            [
                PhaseStruct.of(taps=phase.taps, taps_before=taps_before, begin=begin, positions=phase.outputs)
                for phase, taps_before, begin in self.along(axis)
            ]
            for axis in (0, 1)
        )
        return WindowsStruct.of(
            chunks=chunks, channels=channels, taps_w=sum(phase.taps for phase in right),
            positions=math.prod(self.positions), columns=self.positions[1], lines_out=g.sides_out[0],
            columns_out=g.sides_out[1], phases_h=len(down), phases_w=len(right),
            **by_axis(stride=self.stride, before=self.before, dilation=g.dilation),
            down=phases_down, right=phases_right,
        )  # fmt: skip
