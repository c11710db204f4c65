"""The legend of a chart: above its axes, in as many lines as it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onchip.svg import element, fitted, text, text_width

NARROW = 500.0  # pixels: a narrower chart is for a phone; labels of bars are above them
LINE = 19.0  # pixels, of a line of text
_SAMPLE = 24.0  # pixels: a sample of the line or bar, and the space after it


@dataclass(frozen=True)
class Entry:
    kind: str  # a class of svg.py
    name: str
    shape: str  # "bar", "line", "circle", or a number: the shape of a marker


def draw_legend(entries: Sequence[Entry], width: float) -> tuple[str, float]:
    """The legend and its height; nothing for no entries."""
    x, y, parts = 6.0, 0.0, list[str]()
    for entry in entries:
        name = fitted(entry.name, width - _SAMPLE - 12)
        size = _SAMPLE + text_width(name) + 12
        if x > 6 and x + size > width:
            x, y = 6.0, y + LINE
        parts += [_sample(entry, x, y + LINE / 2), text(x + _SAMPLE, y + LINE / 2 + 4.5, name)]
        x += size
    return "".join(parts), (y + LINE + 6 if entries else 0.0)


def _sample(entry: Entry, x: float, y: float) -> str:
    if entry.shape == "bar":
        return element("rect", x=x, y=y - 6, width=16, height=12, rx=2, class_=entry.kind)
    if entry.shape == "line":
        return element("path", d=f"M{x:.1f} {y:.1f}h16", class_=entry.kind)
    if entry.shape == "circle":
        return element("circle", cx=x + 8, cy=y, r=4, class_=entry.kind)
    line = element("path", d=f"M{x:.1f} {y:.1f}h16", class_=f"line-{entry.kind}")
    return line + marker(int(entry.shape), x + 8, y, entry.kind)


def marker(shape: int, x: float, y: float, kind: str, r: float = 4.0, inside: str = "") -> str:
    """One of six shapes, which differ without colours."""
    if shape % 6 == 0:
        return element("circle", inside, cx=x, cy=y, r=r, class_=kind)
    points = {
        1: ((-r, -r), (r, -r), (r, r), (-r, r)), 2: ((0, -1.3 * r), (1.2 * r, r), (-1.2 * r, r)),
        3: ((0, -1.4 * r), (1.4 * r, 0), (0, 1.4 * r), (-1.4 * r, 0)), 4: ((0, 1.3 * r), (1.2 * r, -r), (-1.2 * r, -r)),
        5: ((-r, -0.5 * r), (r, -0.5 * r), (r, 0.5 * r), (-r, 0.5 * r)),
    }[shape % 6]  # fmt: skip
    return element("polygon", inside, points=" ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in points), class_=kind)
