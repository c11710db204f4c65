"""Axes of charts: from values to pixels, and ticks that are readable in wide and in narrow ranges."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

SIGNS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
FEWEST, NARROW = 3, 10.0  # ticks: if fewer are round on a log axis of less than this factor, they are evenly spaced


@dataclass(frozen=True)
class Axis:
    """Values from low to high at pixels from start to end."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool

    def at(self, value: float) -> float:
        """The pixel of a value; values outside the range are at its ends."""
        value = min(max(value, self.low), self.high)
        share = (
            math.log(value / self.low) / math.log(self.high / self.low)
            if self.is_log
            else (value - self.low) / (self.high - self.low)
        )
        return self.start + (self.end - self.start) * share

    def ticks(self, spacing: float) -> list[float]:
        """Round values inside the range, on average at least `spacing` pixels apart."""
        most = max(3, int(abs(self.end - self.start) / spacing))
        return log_ticks(self.low, self.high, most) if self.is_log else even_ticks(self.low, self.high, most)


def log_axis(values: Iterable[float], start: float, end: float, margin: float = 1.0) -> Axis:
    """An axis for positive values; it ends at ticks if that costs little, and has the margin as a factor."""
    known = [value for value in values if value > 0 and math.isfinite(value)] or [1.0]
    low, high = min(known) / margin, max(known) * margin
    if high / low < 1.2:  # equal values
        low, high = low / 1.1, high * 1.1
    return Axis(low, high, start, end, True)


def even_axis(values: Iterable[float], start: float, end: float, floor: float | None = None) -> Axis:
    """A linear axis whose ends are ticks. floor: the axis begins there at the latest."""
    known = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(known), max(known)
    low = low if floor is None else min(low, floor)
    if high <= low:
        low, high = low - abs(low or 1) * 0.1, high + abs(high or 1) * 0.1
    step = _step(low, high, 6)
    return Axis(math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step, start, end, False)


def even_ticks(low: float, high: float, most: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten, at most `most`."""
    step = _step(low, high, most)
    first, last = math.ceil(low / step - 1e-6), math.floor(high / step + 1e-6)
    return [i * step for i in range(first, last + 1)]


def log_ticks(low: float, high: float, most: int) -> list[float]:
    """Powers of ten, or also their multiples by 2 and 5, or evenly spaced values where the range is narrow."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    found = list[float]()
    for factors in ((1, 2, 5), (1, 3), (1,)):
        found = _inside([factor * 10.0**k for k in range(first, last + 1) for factor in factors], low, high)
        if len(found) <= most:
            break
    if len(found) > most:
        every = math.ceil(len(found) / most)
        found = [tick for tick in found if round(math.log10(tick)) % every == 0]
    return found if len(found) >= FEWEST or high / low > NARROW else even_ticks(low, high, min(most, 5))


def _inside(ticks: Sequence[float], low: float, high: float) -> list[float]:
    return [tick for tick in ticks if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]


def _step(low: float, high: float, most: int) -> float:
    """The smallest step of 1, 2 or 5 times a power of ten that gives at most `most` ticks."""
    power = 10.0 ** (math.floor(math.log10((high - low) / most)) - 1)
    steps = (power * factor for factor in (1, 2, 5, 10, 20, 50, 100, 200, 500))
    return next(step for step in steps if math.floor(high / step + 1e-6) - math.ceil(low / step - 1e-6) + 1 <= most)


def short_number(value: float) -> str:
    """1200000 -> "1.2 M", 0.0005 -> "0.0005"."""
    for limit, sign in SIGNS:
        if abs(value) >= limit * (1 - 1e-9):
            return f"{value / limit:.4g} {sign}"
    return f"{value:.4g}" if value == 0 or abs(value) >= 1e-4 else f"{value:.0e}"


def short_rate(value: float, unit: str) -> str:
    """1.98e15, "flop" -> "1.98 Pflop/s"."""
    number, _, sign = short_number(float(f"{value:.3g}")).partition(" ")
    return f"{number} {sign}{unit}/s"


def short_time(ms: float) -> str:
    """A duration with the unit that fits it: ns, µs, ms or s."""
    for limit, unit in ((1e3, "s"), (1.0, "ms"), (1e-3, "µs")):
        if ms >= limit * (1 - 1e-9):
            return f"{ms / limit:.4g} {unit}"
    return f"{ms * 1e6:.4g} ns"
