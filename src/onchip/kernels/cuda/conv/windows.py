"""Host side of `Windows` in conv/sm90.cu: output phases and their im2col windows."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

from onchip.kernels.cuda.conv.direct import Geometry, Pair
from onchip.plan.rewrites.phases import AxisPhase, axis_phase

MAX_CORNER, MAX_REACH, MAX_STRIDE = 127, 255, 8  # limits of TMA im2col mode
MAX_PHASES = 8  # per axis, same as in the .cu file


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

    def packed(self, chunks: int, channels: int) -> bytes:
        """The struct. chunks: slices of k per tap; channels: per tap of the weight."""
        g, (down, right) = self.geometry, self.phases
        taps_w = sum(phase.taps for phase in right)
        positions = math.prod(self.positions), self.positions[1]
        head = (chunks, channels, taps_w, *positions, *g.sides_out, len(down), len(right))
        window = (*self.stride, *self.before, *g.dilation)
        axes = b"".join(_packed(axis, before) for axis, before in zip(self.phases, self.before, strict=True))
        return struct.pack("<9I6i", *head, *window) + axes


def _packed(axis: tuple[AxisPhase, ...], before: int) -> bytes:
    taps_before, data = 0, b""
    for phase in axis:
        data += struct.pack("<4I", phase.taps, taps_before, before - phase.before, phase.outputs)
        taps_before += phase.taps
    return data.ljust(MAX_PHASES * 16, b"\0")
