"""The section of a report about what changed since older results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from onchip.bench.report.bars import Bar, bar_chart
from onchip.bench.report.compare import COVERAGE, SAME, Change, compare_results, peer_drift
from onchip.bench.report.legend import Entry
from onchip.bench.report.page import Section, chart_card, data_table
from onchip.bench.report.results import Results, case_title, job_title, machine_title, short_commit
from onchip.bench.report.speedup_sections import show_ratio, side
from onchip.bench.report.table import RUNG
from onchip.measure.pace import show_ms
from onchip.svg import escaped


def changes_section(before: Sequence[tuple[Path, Results]], after: Sequence[tuple[Path, Results]]) -> Section | None:
    """What became faster or slower by more than noise, per file that is in both."""
    old = {_file_key(path, results): results for path, results in before}
    cards = [
        _changes_card(path.stem, old[key], results)
        for path, results in after
        if (key := _file_key(path, results)) in old and results != old[key]
    ]
    about = f"Against the older results: cases whose bootstrap interval ({COVERAGE:.0%}) excludes no change."
    return Section("changes", "Changes", about, {"": cards or ["<p>No file has changed.</p>"]}) if before else None


def _file_key(path: Path, results: Results) -> tuple[str, str]:
    return machine_title(results.machine), path.name


def _changes_card(name: str, old: Results, new: Results) -> str:
    changes = compare_results(old, new)
    ours = [change for change in changes if not change.is_peer]
    shown = [change for change in ours if change.verdict != SAME]
    drift = peer_drift(changes)
    counts = Counter(change.verdict for change in shown)
    texts = [f"{count} {verdict}" for verdict, count in counts.items()]
    texts += [f"{len(ours) - len(shown)} within noise"] + ([] if drift is None else [f"peers {drift:.3f}x"])
    about = (
        f"{machine_title(new.machine)}: {', '.join(texts)}; {short_commit(old.commit)} to {short_commit(new.commit)}"
    )
    head = ["case", "engine", "old ms", "new ms", "speedup", f"{COVERAGE:.0%}", "verdict"]
    timed = [change for change in shown if change.speedup is not None]
    if timed:
        return chart_card(name, about, partial(_draw_changes, name, timed), head, list(map(_change_cells, shown)))
    table = data_table(name, head, list(map(_change_cells, shown)), is_open=True) if shown else ""
    return f'<article class="card"><h3>{escaped(name)}</h3><p class="about">{escaped(about)}</p>{table}</article>'


def _draw_changes(name: str, changes: Sequence[Change], width: float) -> str:
    bars = [
        Bar(case_title(change) + ("" if change.engine == "onchip" else f", {change.engine.removeprefix(RUNG)}"),
            change.speedup or 1.0, f"{change.speedup or 1.0:.3f}x", "",
            side(change.speedup or 1.0))
        for change in changes
    ]  # fmt: skip
    present = {bar.kind for bar in bars}
    kinds = [Entry("ours", "faster than before", "bar"), Entry("slower", "slower than before", "bar")]
    label = f"Old time over new time, {name}: " + "; ".join(f"{bar.label} {bar.shown}" for bar in bars)
    return bar_chart(label, bars, width, show_ratio, base=1.0, kinds=[kind for kind in kinds if kind.kind in present])


def _change_cells(change: Change) -> list[str]:
    speedup = "" if change.speedup is None else f"{change.speedup:.3f}x"
    interval = "" if change.low is None else f"{change.low:.3f}-{change.high:.3f}"
    return [
        job_title(change),
        change.engine,
        show_ms(change.old_ms),
        show_ms(change.new_ms),
        speedup,
        interval,
        change.verdict,
    ]
