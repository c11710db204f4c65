"""The sections of a report about ladders and batch sizes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

from onchip.bench.report.axis import short_number, short_time
from onchip.bench.report.bars import Bar, bar_chart
from onchip.bench.report.legend import Entry
from onchip.bench.report.lines import Line, line_chart
from onchip.bench.report.page import Section, chart_card, source_line
from onchip.bench.report.results import ACCURACY, Results, Row, machine_title, show_floor
from onchip.bench.report.sources import SIZE, by_machine, size_of
from onchip.bench.report.table import RUNG
from onchip.ladders.show import times
from onchip.measure.pace import show_ms
from onchip.svg import MARKERS

FEWESTSIZES = 3  # of a chart over batch sizes
MOST_CARDS = 8  # of a workload among others; more have a group of their own


def is_ladder(results: Results) -> bool:
    return bool(results.rows) and all(row.engine.startswith(RUNG) for row in results.rows)


# -- ladders -----------------------------------------------------------------------------------------------


def ladder_section(files: Sequence[Results]) -> Section | None:
    ordered = sorted(files, key=lambda results: -len(results.rows))
    groups = {machine: list(map(_ladder_card, some)) for machine, some in by_machine(ordered).items()}
    about = "One idea per rung, from the first version to the engine: each is a kernel that runs, checked and timed."
    return Section("ladders", "Ladders", about, groups) if groups else None


def largest_ladders(files: Sequence[Results]) -> list[Results]:
    """The ladders; where the same rungs ran over several sizes, those of the largest."""
    largest: dict[tuple[str, ...], Results] = {}
    for results in filter(is_ladder, files):
        key = (machine_title(results.machine), *(row.engine for row in results.rows))
        if key not in largest or size_of(results.rows[0].case) > size_of(largest[key].rows[0].case):
            largest[key] = results
    return list(largest.values())


def _ladder_card(results: Results) -> str:
    rows = [row for row in results.rows if row.median_ms]
    first = results.rows[0]
    title = f"{first.workload}: {first.case}" + (f", {first.extra['ranks']} ranks" if "ranks" in first.extra else "")
    head = ["rung", "ms", "x first", "of floor", "max error", "precision", "note"]
    cells = [
        [rung_name(row), show_ms(row.median_ms),
         times(rows[0].median_ms / row.median_ms) if row.median_ms and rows[0].median_ms else "-",
         show_floor(row, 0.0), "" if row.error is None else f"{row.error:.1e}", row.precision, row.setting]
        for row in results.rows
    ]  # fmt: skip
    return chart_card(title, "", partial(draw_ladder, results), head, cells, source_line(results))


def rung_name(row: Row) -> str:
    return row.engine.removeprefix(RUNG)


def draw_ladder(results: Results, width: float, title: str = "") -> str:
    """The times of the rungs; those of the engine are onchip's blue."""
    rows = [row for row in results.rows if row.median_ms is not None]
    first = rows[0].median_ms or 1.0
    bars = [
        Bar(rung_name(row), ms, short_time(ms), times(first / ms) if i else "",
            "ours" if rung_name(row).startswith("onchip") else "other",
            "\n".join(filter(None, [f"{rung_name(row)}: {show_ms(ms)} ms", row.setting])))
        for i, (row, ms) in enumerate((row, row.median_ms or 0.0) for row in rows)
    ]  # fmt: skip
    floors = {row.precision: row.floor_ms for row in rows if row.floor_ms}
    lines = [(ms, f"floor, {precision}: {short_time(ms)}") for precision, ms in floors.items()]
    kinds = [Entry("other", "rung", "bar"), Entry("ours", "the engine", "bar")]
    present = {bar.kind for bar in bars}
    label = f"Ladder {rows[0].workload}: " + "; ".join(f"{bar.label} {bar.shown}" for bar in bars)
    return bar_chart(
        label, bars, width, short_time, lines=lines, title=title, kinds=[k for k in kinds if k.kind in present]
    )


# -- batch sizes -------------------------------------------------------------------------------------------


def scaling_section(files: Sequence[Results]) -> Section | None:
    """The rate over the batch size, where cases differ by it alone; also of ladders that ran over several sizes."""
    groups = dict[str, list[str]]()
    for machine, some in by_machine(files).items():
        found: dict[tuple[str, ...], list[tuple[Results, Row]]] = {}
        for results in some:
            for row in results.rows:
                if row.rate and row.unit != ACCURACY and SIZE.search(row.case):
                    found.setdefault(_withoutsize_of(row), []).append((results, row))
        cards_of: dict[str, list[str]] = {}
        for key, rows in found.items():
            if len({size_of(row.case) for _, row in rows}) >= FEWESTSIZES:
                cards_of.setdefault(key[0], []).append(_scaling_card(key, rows))
        for workload, cards in cards_of.items():
            group = machine if len(cards) <= MOST_CARDS else f"{machine}: {workload}"
            groups.setdefault(group, []).extend(cards)
    about = (
        "Rates on log axes: while the line rises, a larger batch takes hardly more time; where it is level, the device "
        "is full."
    )
    return Section("scaling", "Scaling with batch", about, groups, is_small=True) if groups else None


def _withoutsize_of(row: Row) -> tuple[str, ...]:
    """What rows that differ in their size have in common: the workload, the case, the precision, the ladder's ranks."""
    size = SIZE.search(row.case)
    assert size is not None
    case = row.case[: size.start()] + "N" + re.sub(r"^ (\w+?)s?\b", r" \1s", row.case[size.end() :])
    if row.engine.startswith(RUNG):  # rungs have several precisions
        return row.workload, case, "", RUNG, str(row.extra.get("ranks", ""))
    return row.workload, case, row.precision


def _scaling_card(key: tuple[str, ...], rows: Sequence[tuple[Results, Row]]) -> str:
    workload, case, precision, *ladder = key
    lines, unit = _lines_of([row for _, row in rows]), rows[0][1].unit
    name = f"{case}, {precision}" if precision not in ("", "fp32") else case
    title = f"{workload}: {'rungs of the ladder' if ladder else name}"
    label = f"{unit} over the batch size, {title}: " + "; ".join(
        f"{line.name} {short_number(line.points[0][1])} to {short_number(line.points[-1][1])}" for line in lines
    )
    x_label = "rows per call" if ladder else case

    def draw(width: float) -> str:
        return line_chart(label, lines, width, x_label, unit, short_number, short_number)

    sizes = sorted({x for line in lines for x, _ in line.points})
    known = {(line.name, x): y for line in lines for x, y in line.points}
    head = [unit, *(f"{size:,.0f}" for size in sizes)]
    cells = [[line.name, *(short_number(known[line.name, x]) if (line.name, x) in known else "-" for x in sizes)]
             for line in lines]  # fmt: skip
    sources = list(dict.fromkeys(source_line(results) for results, _ in rows))
    return chart_card(title, "", draw, head, cells, sources[0] if len(sources) == 1 else "")


def _lines_of(rows: Sequence[Row]) -> list[Line]:
    """onchip's first; series beyond the markers' number share colours, and have other shapes."""
    points: dict[str, dict[float, float]] = {}
    for row in rows:
        points.setdefault(row.engine.removeprefix(RUNG), {})[size_of(row.case)] = row.rate or 0.0
    names = sorted(points, key=lambda name: not name.startswith("onchip"))
    lines = []
    for i, name in enumerate(names):
        kind = "ours" if i == 0 and name.startswith("onchip") else f"s{(i - 1) % MARKERS}"
        lines.append(Line(name, kind, tuple(sorted(points[name].items())), i + i // MARKERS))
    return lines
