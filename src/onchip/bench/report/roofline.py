"""The roofline of a device: what each kernel reaches, below what its bytes and flop allow."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from onchip.bench.report.axis import Axis, log_axis, short_number, short_rate
from onchip.bench.report.legend import NARROW, Entry, draw_legend
from onchip.bench.report.lines import grid
from onchip.svg import element, picture, text, text_width, titled

_HEIGHT = 300.0  # pixels, of the axes
_R, _LABEL = 5.0, 11.0  # pixels: radius of a point, size of its number


@dataclass(frozen=True)
class Roofs:
    """Peak rates of a device."""

    flops: dict[str, float]  # flop/s, by precision
    bandwidth: float  # bytes/s
    cache_bandwidth: float


@dataclass(frozen=True)
class Point:
    number: int  # in the table beside the chart
    name: str
    nbytes: float
    flop: float
    seconds: float
    kind: str = "ours"


def roofline(label: str, roofs: Roofs, points: Sequence[Point], width: float) -> str:
    """Flop/s over flop per byte, on log axes, with the number of each kernel beside its point."""
    shown = [point for point in points if point.flop and point.nbytes and point.seconds]
    legend, top = draw_legend(
        [Entry("ours", "kernels, by their number in the table", "circle"),
         Entry("roof", f"memory, {short_rate(roofs.bandwidth, 'B')}", "line"),
         Entry("floor", f"cache, {short_rate(roofs.cache_bandwidth, 'B')}", "line")], width,
    )  # fmt: skip
    top += 24
    bottom = top + _HEIGHT
    peak = max(roofs.flops.values())
    ridge = peak / roofs.bandwidth
    rates = [point.flop / point.seconds for point in shown]
    y_axis = log_axis([*rates, *roofs.flops.values()], bottom, top, 1.6)
    left = max(text_width(short_number(tick), 12) for tick in y_axis.ticks(34)) + 14
    is_narrow = width < NARROW
    names = {name: name if is_narrow else f"{name} {short_rate(rate, 'flop')}" for name, rate in roofs.flops.items()}
    right = width - max(text_width(name, 12) for name in names.values()) - 10
    x_axis = log_axis([*(point.flop / point.nbytes for point in shown), ridge], left + 10, right - 2, 2.0)
    inside = [legend, text(6, top - 10, "flop/s", "dim", font_size=12)]
    inside.append(grid(x_axis, y_axis, left, right, short_number, short_number))
    inside.append(text((left + right) / 2, bottom + 36, "flop per byte", "dim", font_size=12, text_anchor="middle"))
    inside.append(_roof(x_axis, y_axis, roofs.cache_bandwidth, peak, "floor"))
    for rate in roofs.flops.values():
        inside.append(_roof(x_axis, y_axis, roofs.bandwidth, rate, "roof"))
    at = _spread([y_axis.at(rate) for rate in roofs.flops.values()], 14)
    inside += [text(right + 6, y + 4, name, "dim", font_size=12) for y, name in zip(at, names.values(), strict=True)]
    inside += _points(shown, x_axis, y_axis, width)
    return picture(width, bottom + 44, label, *inside)


def _roof(x_axis: Axis, y_axis: Axis, bandwidth: float, peak: float, kind: str) -> str:
    """Along the bandwidth up to the peak, then level."""
    begin = max(x_axis.low, y_axis.low / bandwidth)
    ridge = min(max(peak / bandwidth, begin), x_axis.high)
    corners = [(x, min(peak, bandwidth * x)) for x in (begin, ridge, x_axis.high)]
    return element("path", class_=kind, d="M" + "L".join(f"{x_axis.at(x):.1f} {y_axis.at(y):.1f}" for x, y in corners))


def _spread(at: Sequence[float], apart: float) -> list[float]:
    """The positions, moved down until they are `apart`."""
    moved = dict[int, float]()
    last = -math.inf
    for i in sorted(range(len(at)), key=lambda i: at[i]):
        last = moved[i] = max(at[i], last + apart)
    return [moved[i] for i in range(len(at))]


def _points(points: Sequence[Point], x_axis: Axis, y_axis: Axis, width: float) -> list[str]:
    """Points where they are; each number beside its point, if there is space: the title has it, too."""
    at = [(x_axis.at(p.flop / p.nbytes), y_axis.at(p.flop / p.seconds)) for p in points]
    taken, dots, numbers = [(x, y, _R, _R) for x, y in at], [], []
    for point, (x, y) in zip(points, at, strict=True):
        w, h = text_width(str(point.number), _LABEL) / 2 + 1, _LABEL / 2
        for dx, dy in _places():
            cx, cy = x + dx, y + dy
            is_inside = x_axis.start < cx - w and cx + w < width and y_axis.end < cy - h and cy + h < y_axis.start
            if is_inside and not any(abs(cx - tx) < w + tw and abs(cy - ty) < h + th for tx, ty, tw, th in taken):
                taken.append((cx, cy, w, h))
                number = str(point.number)
                numbers.append(text(cx, cy + 4, number, "ink halo num", font_size=_LABEL, text_anchor="middle"))
                break
        rates = f"{short_rate(point.flop / point.seconds, 'flop')}, {short_rate(point.nbytes / point.seconds, 'B')}"
        dots.append(titled("circle", f"{point.number} {point.name}: {rates}", cx=x, cy=y, r=_R, class_=point.kind))
    return numbers + dots


def _places() -> Iterator[tuple[float, float]]:
    """Offsets around a point, the nearest first."""
    for r in (13.0, 18.0):
        for turn in (0, 1, -1, 2, -2, 3, -3, 4):
            yield r * math.cos(turn * math.pi / 4), -r * math.sin(turn * math.pi / 4)
