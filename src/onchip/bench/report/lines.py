"""Line charts: rates over batch sizes, and training curves."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from onchip.bench.report.axis import Axis, even_axis, log_axis
from onchip.bench.report.legend import Entry, draw_legend, marker
from onchip.svg import element, escaped, picture, text, text_width

HEIGHT, _BOTTOM = 200.0, 44.0  # pixels: of the axes, and of ticks and label below them
Show = Callable[[float], str]
_MANY = 40  # points from which on they have no markers


@dataclass(frozen=True)
class Line:
    name: str
    kind: str  # "ours", "s0" to "s5"
    points: tuple[tuple[float, float], ...]
    shape: int = 0  # of its markers


def line_chart(
    label: str, lines: Sequence[Line], width: float, x_label: str, y_label: str, show_x: Show,
    show_y: Show, *, x_log: bool = True, y_log: bool = True, marked: tuple[float, str] | None = None,
) -> str:  # fmt: skip
    """Lines with markers, the first one on top. The legend is above, labels outside the axes.

    marked  a dashed vertical line, and its name in the legend
    """
    entries = [Entry(line.kind, line.name, str(line.shape)) for line in lines]
    legend, top = draw_legend([*entries, *([Entry("floor", marked[1], "line")] if marked else [])], width)
    top += 24  # the label of the y axis
    bottom = top + HEIGHT
    ys = [y for line in lines for _, y in line.points]
    xs = [x for line in lines for x, _ in line.points]
    y_axis = log_axis(ys, bottom, top, 1.15) if y_log else even_axis(ys, bottom, top)
    left = max(text_width(show_y(tick), 12) for tick in y_axis.ticks(34)) + 14
    right = width - 14
    x_axis = log_axis(xs, left + 8, right - 8) if x_log else _whole_axis(xs, left + 8, right - 8)
    x_ticks = _own_ticks(xs, x_axis, show_x)
    inside = [legend, text(6, top - 10, y_label, "dim", font_size=12)]
    inside.append(grid(x_axis, y_axis, left, right, show_x, show_y, x_ticks))
    if x_label:
        inside.append(text((left + right) / 2, bottom + 36, x_label, "dim", font_size=12, text_anchor="middle"))
    if marked:
        inside.append(element("path", class_="floor", d=f"M{x_axis.at(marked[0]):.1f} {top:.0f}V{bottom:.0f}"))
    inside += [_draw(line, x_axis, y_axis, show_x, show_y) for line in reversed(lines)]
    return picture(width, bottom + _BOTTOM, label, *inside)


def _whole_axis(xs: Sequence[float], start: float, end: float) -> Axis:
    """For epochs: from the first to the last."""
    low, high = min(xs), max(xs)
    return Axis(low, high if high > low else low + 1, start, end, False)


def grid(
    x_axis: Axis, y_axis: Axis, left: float, right: float, show_x: Show, show_y: Show, x_ticks: Sequence[float] = ()
) -> str:  # fmt: skip
    """Grid lines, ticks outside the axes. x_ticks: instead of round values."""
    parts, bottom, top = [], y_axis.start, y_axis.end
    for tick in y_axis.ticks(34):
        y = y_axis.at(tick)
        parts.append(element("path", class_="grid", d=f"M{left:.0f} {y:.1f}H{right:.0f}"))
        parts.append(text(left - 8, y + 4, show_y(tick), "dim num", text_anchor="end", font_size=12))
    for tick in x_ticks or x_axis.ticks(56):
        x = x_axis.at(tick)
        parts.append(element("path", class_="grid", d=f"M{x:.1f} {top:.0f}V{bottom:.0f}"))
        parts.append(text(x, bottom + 17, show_x(tick), "dim num", text_anchor="middle", font_size=12))
    parts.append(element("path", class_="axis", d=f"M{left:.0f} {bottom:.0f}H{right:.0f}"))
    return "".join(parts)


def _own_ticks(xs: Sequence[float], axis: Axis, show: Show) -> list[float]:
    """The points' own positions if their numbers fit side by side, else none; of epochs, round ones."""
    if not axis.is_log:
        return [tick for tick in axis.ticks(40) if tick == math.floor(tick)]
    known = sorted(set(xs))
    gaps = ((text_width(show(a), 12) + text_width(show(b), 12)) / 2 + 6 for a, b in itertools.pairwise(known))
    fits = all(axis.at(b) - axis.at(a) > gap for (a, b), gap in zip(itertools.pairwise(known), gaps, strict=True))
    return known if fits else []


def _draw(
    line: Line, x_axis: Axis, y_axis: Axis, show_x: Show, show_y: Show
) -> str:  # fmt: skip
    at = [(x_axis.at(x), y_axis.at(y)) for x, y in line.points]
    parts = [element("path", d="M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in at), class_=f"line-{line.kind}")]
    if len(at) <= _MANY:
        for (x, y), (px, py) in zip(line.points, at, strict=True):
            title = element("title", escaped(f"{line.name}: {show_y(y)} at {show_x(x)}"))
            parts.append(marker(line.shape, px, py, line.kind, 4.5 if line.kind == "ours" else 3.8, title))
    return "".join(parts)
