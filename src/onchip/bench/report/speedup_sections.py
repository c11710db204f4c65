"""The sections of a report about the engine's cases: summary, speedups over peers, times without peers."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from functools import partial

from onchip.bench.report.axis import short_time
from onchip.bench.report.bars import Bar, bar_chart
from onchip.bench.report.legend import Entry
from onchip.bench.report.page import Section, chart_card, source_line
from onchip.bench.report.results import (
    ACCURACY,
    Results,
    Row,
    best_peer,
    case_title,
    show_floor,
    show_rate,
    show_speedup,
)
from onchip.bench.report.sources import SIZE, by_machine
from onchip.measure.pace import show_ms
from onchip.network.text import plural
from onchip.plan.floor import floor_percent
from onchip.svg import escaped

MOST_BARS = 24  # of a chart; of more cases it shows means
SIDES = (Entry("ours", "onchip is faster", "bar"), Entry("slower", "onchip is slower", "bar"))


def speedups(results: Results) -> list[tuple[Row, Row, float]]:
    """The rows of onchip with a time and a peer, the best peer, and the speedup over it."""
    found = []
    for row in results.rows:
        peer = best_peer(results.rows, row) if row.engine == "onchip" and row.unit != ACCURACY else None
        if peer is not None and row.median_ms and peer.median_ms:
            found.append((row, peer, peer.median_ms / row.median_ms))
    return found


def show_ratio(value: float) -> str:
    return f"{value:g}x"


# -- the summary -------------------------------------------------------------------------------------------


def summary_tiles(files: Sequence[Results]) -> str:
    """A tile per machine: the mean speedup over the best peer."""
    tiles = []
    for machine, some in by_machine(files).items():
        ratios = [ratio for results in some for _, _, ratio in speedups(results)]
        floors = [floor_percent(row.floor_ms, row.median_ms) for results in some for row in results.rows
                  if row.engine == "onchip" and row.floor_ms and row.median_ms]  # fmt: skip
        if ratios:
            wins = f"faster in {sum(ratio > 1 for ratio in ratios)} of {plural(len(ratios), 'case')}"
            near = f"; median {statistics.median(floors):.0f}% of floor" if floors else ""
            mean = statistics.geometric_mean(ratios)
            tiles.append(
                f'<li class="tile"><em>{escaped(machine)}</em><strong>{mean:.2f}x</strong>'
                f"<span>over the best peer, geometric mean</span><span>{wins}{near}</span></li>"
            )
    return f'<ul class="tiles">{"".join(tiles)}</ul>' if tiles else ""


# -- speedups over peers -----------------------------------------------------------------------------------


def speedup_section(files: Sequence[Results]) -> Section | None:
    groups = {}
    for machine, some in by_machine(files).items():
        jobs = [
            (results, workload, [each for each in found if each[0].workload == workload])
            for results in some
            for found in [speedups(results)]
            for workload in dict.fromkeys(row.workload for row, _, _ in found)
        ]
        jobs.sort(key=lambda job: len(job[2]))  # cards beside each other are about as high
        if jobs:
            whole = [_overview_card(jobs)] if len(jobs) > 1 else []
            groups[machine] = whole + [_speedup_card(*job) for job in jobs]
    about = (
        "Each bar is the speedup of onchip over the best peer at one case; circles are the other peers. Every result "
        "is checked against float64 before it is timed, and all engines run in the same process, in turn."
    )
    return Section("speedups", "Speedups over peers", about, groups) if groups else None


def _overview_card(jobs: Sequence[tuple[Results, str, Sequence[tuple[Row, Row, float]]]]) -> str:
    """The mean of each workload, and its cases as circles."""
    bars, cells = list[Bar](), list[list[str]]()
    for _, workload, found in jobs:
        ratios = [ratio for _, _, ratio in found]
        mean = statistics.geometric_mean(ratios)
        cases = tuple((ratio, f"{ratio:.2f}x {case_title(row)}") for row, _, ratio in found)
        count = plural(len(found), "case")
        bars.append(Bar(workload, mean, f"{mean:.2f}x", count, side(mean), marks=cases if len(cases) > 1 else ()))
        cells.append([workload, f"{mean:.2f}x", f"{min(ratios):.2f}x", f"{max(ratios):.2f}x", count])
    label = "Geometric mean of the speedups over the best peer: " + "; ".join(f"{b.label} {b.shown}" for b in bars)
    head = ["workload", "geometric mean", "least", "most", "cases"]
    draw = partial(_draw_bars, label, bars, base=1.0, mark="one case", kinds=_sides(bars))
    about = "Geometric mean over the best peers; circles are single cases."
    return chart_card("All workloads", about, draw, head, cells)


def side(ratio: float) -> str:
    return "ours" if round(ratio, 2) >= 1 else "slower"


def _sides(bars: Sequence[Bar]) -> list[Entry]:
    present = {bar.kind for bar in bars}
    return [entry for entry in SIDES if entry.kind in present]


def _speedup_card(results: Results, workload: str, found: Sequence[tuple[Row, Row, float]]) -> str:
    if len(found) > MOST_BARS:
        bars = _mean_bars(found)
        about, mark = "Geometric mean over batch sizes and precisions; circles are single cases.", "one case"
    else:
        bars, about, mark = [_bar(results, *each) for each in found], "", "other peers"
    label = f"Speedup over the best peer: {workload}. " + "; ".join(f"{bar.label}: {bar.shown}" for bar in bars)
    mark = mark if any(bar.marks for bar in bars) else ""
    draw = partial(_draw_bars, label, bars, base=1.0, mark=mark, kinds=_sides(bars))
    rows = [row for row in results.rows if row.workload == workload and row.checked]
    launch_us = float(results.machine.get("launch_us") or 0)
    head = ["case", "engine", "median ms", "p20-p80", "speedup", "rate", "of floor", "max error"]
    cells = [
        [case_title(row), row.engine, show_ms(row.median_ms), f"{show_ms(row.p20_ms)}-{show_ms(row.p80_ms)}",
         show_speedup(results.rows, row) if row.engine.startswith("onchip") else "",
         f"{show_rate(row)} {row.unit}", show_floor(row, launch_us), "" if row.error is None else f"{row.error:.1e}"]
        for row in rows
    ]  # fmt: skip
    return chart_card(workload, about, draw, head, cells, source_line(results))


def _bar(results: Results, row: Row, peer: Row, ratio: float) -> Bar:
    times = f"{case_title(row)}\nonchip {show_ms(row.median_ms)} ms\n{peer.engine} {show_ms(peer.median_ms)} ms"
    others = _other_peers(results, row, peer)
    return Bar(case_title(row), ratio, f"{ratio:.2f}x", peer.engine, side(ratio), times, others)


def _mean_bars(found: Sequence[tuple[Row, Row, float]]) -> list[Bar]:
    """One bar for the cases that differ by their size or precision alone."""
    same: dict[str, list[tuple[Row, float]]] = {}
    for row, _, ratio in found:
        name = SIZE.sub("", row.case).rstrip("s").strip()
        same.setdefault(re.sub(r",?\s*(row|image|sentence|number|pattern)$", "", name), []).append((row, ratio))
    bars = []
    for name, cases in same.items():
        mean = statistics.geometric_mean(ratio for _, ratio in cases)
        marks = tuple((ratio, f"{ratio:.2f}x {case_title(row)}") for row, ratio in cases)
        bars.append(Bar(name, mean, f"{mean:.2f}x", plural(len(cases), "case"), side(mean), marks=marks))
    return bars


def _draw_bars(label: str, bars: Sequence[Bar], width: float, *, base: float, mark: str, kinds: Sequence[Entry]) -> str:
    return bar_chart(label, bars, width, show_ratio, base=base, mark=mark, kinds=kinds)


def _other_peers(results: Results, row: Row, best: Row) -> tuple[tuple[float, str], ...]:
    others = [r for r in results.rows if r.is_peer and r is not best and r.median_ms
              and (r.workload, case_title(r)) == (row.workload, case_title(row))]  # fmt: skip
    return tuple(
        (r.median_ms / row.median_ms, f"{r.median_ms / row.median_ms:.2f}x {r.engine}, {show_ms(r.median_ms)} ms")
        for r in others
        if r.median_ms and row.median_ms
    )


# -- times without peers -------------------------------------------------------------------------------------


def times_section(files: Sequence[Results]) -> Section | None:
    """The times of onchip's engines at the cases without a peer, with their floors."""
    groups = {}
    for machine, some in by_machine(files).items():
        cards = []
        for results in some:
            peers = {(row.workload, case_title(row)) for row, _, _ in speedups(results)}
            rows = [row for row in results.rows if row.engine.startswith("onchip") and row.median_ms
                    and row.unit != ACCURACY and (row.workload, case_title(row)) not in peers]  # fmt: skip
            for workload in dict.fromkeys(row.workload for row in rows):
                cards.append(_times_card(results, workload, [row for row in rows if row.workload == workload]))
        if cards:
            groups[machine] = cards
    about = "Cases without a peer: times per run, and the floor, the least time that the hardware allows."
    return Section("times", "Times", about, groups) if groups else None


def _times_card(results: Results, workload: str, rows: Sequence[Row]) -> str:
    bars = [
        Bar(case_title(row) + row.engine.removeprefix("onchip"), row.median_ms or 0.0, short_time(row.median_ms or 0.0),
            _of_floor(row), marks=((row.floor_ms, f"floor {short_time(row.floor_ms)}"),) if row.floor_ms else ())
        for row in rows
    ]  # fmt: skip
    label = f"Times of onchip: {workload}. " + "; ".join(f"{bar.label}: {bar.shown}" for bar in bars)

    def draw(width: float) -> str:
        return bar_chart(label, bars, width, short_time, mark="floor" if any(bar.marks for bar in bars) else "")

    head = ["case", "median ms", "p20-p80", "rate", "of floor"]
    cells = [
        [bar.label, show_ms(row.median_ms), f"{show_ms(row.p20_ms)}-{show_ms(row.p80_ms)}",
         f"{show_rate(row)} {row.unit}", _of_floor(row)]
        for bar, row in zip(bars, rows, strict=True)
    ]  # fmt: skip
    return chart_card(workload, "", draw, head, cells, source_line(results))


def _of_floor(row: Row) -> str:
    return f"{floor_percent(row.floor_ms, row.median_ms):.0f}% of floor" if row.floor_ms and row.median_ms else ""
