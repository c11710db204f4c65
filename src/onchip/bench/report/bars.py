"""Bar charts: speedups over peers, and the rungs of a ladder."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from onchip.bench.report.axis import Axis, log_axis
from onchip.bench.report.legend import LINE, NARROW, Entry, draw_legend
from onchip.svg import element, fitted, picture, span, text, text_width, titled

_BAR, _GAP, _AXIS = 16.0, 10.0, 24.0  # pixels: the height of a bar, between bars, of the row of ticks
BOLD = 1.12  # bold text is so much wider


@dataclass(frozen=True)
class Bar:
    label: str
    value: float
    shown: str  # right of the bar
    detail: str = ""  # after it, dimmer
    kind: str = "ours"  # a class of svg.py
    title: str = ""  # under the pointer
    marks: tuple[tuple[float, str], ...] = ()  # other values on the same line, each with its title


def bar_chart(
    label: str, bars: Sequence[Bar], width: float, show: Callable[[float], str], *, base: float | None = None,
    lines: Sequence[tuple[float, str]] = (), mark: str = "",
    title: str = "", kinds: Sequence[Entry] = (),
) -> str:  # fmt: skip
    """Horizontal bars on a log axis. Labels and values stand outside the axes: no line crosses them.

    label  describes the chart
    show   a tick as text
    base   where bars begin; None: at the left end
    lines  dashed vertical lines, each with its name in the legend
    mark   what marks are, for the legend; "" if there are none
    title  above the chart; "": the page has it
    """
    is_narrow = width < NARROW
    values = [*itertools.chain.from_iterable((bar.value, *(v for v, _ in bar.marks)) for bar in bars)]
    values += [value for value, _ in lines] + ([] if base is None else [base])
    labels, right = _columns(bars, width)
    axis = log_axis(values, labels + 6, right, 1.12)
    dashes = ["floor", *(f"floor-{i}" for i in range(1, len(lines)))]
    entries = [*kinds, *(Entry(dash, name, "line") for dash, (_, name) in zip(dashes, lines, strict=False))]
    entries += [Entry("mark", mark, "circle")] if mark else []
    legend, top = draw_legend(entries, width)
    heading = text(6, 16, fitted(title, width - 12), "ink strong") if title else ""
    if title:
        legend, top = element("g", legend, transform="translate(0 26)"), top + 26
    step = _BAR + _GAP + (LINE if is_narrow else 0)
    bottom = top + _AXIS + step * len(bars)
    # Vertical lines; where labels are above bars, only as long as a bar is high.
    spans = [(top + _AXIS, bottom)]
    if is_narrow:
        spans = [(top + _AXIS + step * i + LINE + 2, top + _AXIS + step * (i + 1) - 2) for i in range(len(bars))]
    ticks = axis.ticks(58)
    inside = [heading, legend, *(_tick(axis.at(tick), top + _AXIS - 8, show(tick), width) for tick in ticks)]
    inside += [_vertical(axis.at(tick), spans, "grid") for tick in ticks]
    inside += [_vertical(axis.at(base), spans, "base")] if base is not None else []
    for i, bar in enumerate(bars):
        inside.append(_draw_bar(bar, axis, top + _AXIS + step * i + _GAP / 2, width, base, is_narrow))
    inside += [_vertical(axis.at(value), spans, dash) for dash, (value, _) in zip(dashes, lines, strict=False)]
    return picture(width, bottom + 6, label, *inside)


def _columns(bars: Sequence[Bar], width: float) -> tuple[float, float]:
    """Where the axis begins and ends: labels are on its left and values on its right, in at most 2/3 of the width."""
    if width < NARROW:
        return 0.0, width - 8
    labels = max((text_width(bar.label) for bar in bars), default=0.0) + 12
    shown = max((text_width(_after(bar)) * BOLD for bar in bars), default=0.0) + 14
    labels = min(labels, 0.66 * width - min(shown, 0.27 * width))
    return labels, width - min(shown, 0.66 * width - labels)


def _tick(x: float, y: float, shown: str, width: float) -> str:
    """A tick's number, inside the picture."""
    half = text_width(shown, 12) / 2
    x = min(max(x, half), width - half)
    return text(x, y, shown, "dim num", text_anchor="middle", font_size=12)


def _vertical(x: float, spans: Sequence[tuple[float, float]], kind: str) -> str:
    return element("path", class_=kind, d="".join(f"M{x:.1f} {top:.0f}V{bottom:.0f}" for top, bottom in spans))


def _draw_bar(bar: Bar, axis: Axis, y: float, width: float, base: float | None, is_narrow: bool) -> str:
    begin, end = axis.at(axis.low if base is None else base), axis.at(bar.value)
    parts = []
    if is_narrow:
        room = width - text_width(bar.shown) * BOLD - 24
        parts.append(text(6, y + 12, fitted(bar.label, room)))
        parts.append(text(width - 8, y + 12, bar.shown, _shown_kind(bar), text_anchor="end"))
        y += LINE
    else:
        parts.append(text(axis.start - 12, y + 12.5, fitted(bar.label, axis.start - 14), text_anchor="end"))
        after = [span(bar.shown, _shown_kind(bar))]
        room = width - axis.end - 12 - text_width(bar.shown) * BOLD
        if bar.detail:
            after.append(span(fitted(f" {bar.detail}", room), "dim"))
        parts.append(element("text", *after, x=axis.end + 10, y=y + 12.5, class_="ink"))
    size = max(1.5, abs(end - begin))
    parts.append(
        titled("rect", bar.title or f"{bar.label}: {_after(bar)}", x=min(begin, end), y=y, width=size, height=_BAR,
               rx=2, class_=bar.kind)
    )  # fmt: skip
    for value, title in bar.marks:
        parts.append(titled("circle", title, cx=axis.at(value), cy=y + _BAR / 2, r=3.5, class_="mark"))
    return "".join(parts)


def _shown_kind(bar: Bar) -> str:
    return f"num strong on-{bar.kind}" if bar.kind in ("ours", "slower") else "ink num"


def _after(bar: Bar) -> str:
    return f"{bar.shown} {bar.detail}".rstrip()
