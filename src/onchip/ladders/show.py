"""Render a climb as a table or a plot."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING, Any

from onchip.errors import OnchipError
from onchip.files import atomic_write
from onchip.ladders import LADDERS, find_ladder, ladder_devices
from onchip.ladders.frame import Climb, Ladder
from onchip.measure.pace import show_ms
from onchip.plan.floor import floor_percent

if TYPE_CHECKING:
    from rich.table import Table


def make_table(climb: Climb) -> Table:
    """A Rich table, one line per rung."""
    from rich.box import SIMPLE
    from rich.table import Table

    with_report = any(step.report_ms is not None for step in climb.steps)
    facts = list(dict.fromkeys(name for step in climb.steps for name in step.facts))
    floors = ", ".join(f"{show_ms(ms)} ms ({precision})" for precision, ms in climb.floors.items())
    title = f"{climb.ladder}: {climb.title}; {show_size(climb)}, floor {floors}"
    caption = "\n".join(filter(None, [scaled_note(climb), *(f"skipped {k}: {v}" for k, v in climb.skipped.items())]))
    table = Table(title=title, title_justify="left", caption=caption or None, caption_justify="left", box=SIMPLE,
                  padding=(0, 1, 0, 0))  # fmt: skip
    table.add_column("rung", no_wrap=True)
    times_ms = ["time ms", "report ms"] if with_report else ["time ms"]
    for heading in (*times_ms, "x first", "x prev", "of floor", "max error"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name in facts:
        table.add_column(name, justify="right")
    table.add_column("idea")
    for i, step in enumerate(climb.steps):
        first, previous = climb.speedups(i)
        time = floor = "-"
        if step.timing is not None:
            time = show_ms(step.timing.median_ms) + ("*" if step.rows < climb.B else "")
            floor = of_floor(step.floor_ms, step.timing.median_ms)
        report = [show_ms(step.report_ms)] if with_report else []
        time = time if step.verdict.is_right else "wrong: no time"
        error = f"{step.verdict.error:.1e}"
        more = [show_fact(step.facts.get(name, "-")) for name in facts]
        table.add_row(step.rung, time, *report, times(first), times(previous), floor, error, *more, step.idea)
    return table


def show_fact(value: int | str) -> str:
    return f"{value:,}" if isinstance(value, int) else value


def show_size(climb: Climb) -> str:
    return f"{climb.B:,} rows" + ("" if climb.threads is None else f", {climb.threads} threads")


def describe_ladders() -> dict[str, list[dict[str, Any]]]:
    """Every ladder on each of its devices: title, rows and the idea of each rung."""
    return {name: [_describe(find_ladder(name, device)) for device in ladder_devices(name)] for name in LADDERS}


def _describe(ladder: Ladder[Any]) -> dict[str, Any]:
    return {
        "device": ladder.device, "title": ladder.title, "rows": ladder.rows,
        "rungs": {rung.name: rung.idea for rung in ladder.rungs},
    }  # fmt: skip


def ladders_table() -> Table:
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table("ladder", "rung", "idea", caption="run one: onchip ladder decode", box=SIMPLE)
    table.caption_justify = "left"
    for name, ladders in describe_ladders().items():
        for ladder in ladders:
            table.add_row(name, f"{ladder['rows']:,} rows", ladder["title"])
            for rung, idea in ladder["rungs"].items():
                table.add_row("", rung, idea)
            table.add_section()
    return table


def times(ratio: float | None) -> str:
    """A speedup with three significant digits."""
    return "-" if ratio is None else f"{float(f'{ratio:.3g}'):,g}x"


def of_floor(floor_ms: float, ms: float) -> str:
    """Percent of the floor, with two significant digits."""
    return f"{float(f'{floor_percent(floor_ms, ms):.2g}'):g}%"


def scaled_note(climb: Climb) -> str | None:
    scaled = [f"{step.rung} on {step.rows}" for step in climb.steps if step.rows < climb.B]
    return f"* timed on fewer rows and scaled to {climb.B:,}: {', '.join(scaled)}" if scaled else None


def save_plot(climb: Climb, path: str | os.PathLike[str]) -> None:
    """A bar chart of the times on a log scale, the floors as lines; the suffix sets the format: .png, .svg, .pdf."""
    need_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    timed = [(step, step.timing) for step in climb.steps if step.timing is not None]
    figure = Figure(figsize=(8, 1.2 + 0.5 * len(timed)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    names = [step.rung + ("*" if step.rows < climb.B else "") for step, _ in timed]
    bars = axes.barh(names, [timing.median_ms for _, timing in timed])
    axes.bar_label(bars, [f"{show_ms(timing.median_ms)} ms" for _, timing in timed], padding=4)
    for style, (precision, ms) in zip(itertools.cycle(("--", ":")), climb.floors.items(), strict=False):
        axes.axvline(ms, linestyle=style, color="black", label=f"floor {show_ms(ms)} ms ({precision})")
    axes.set_xscale("log")
    axes.margins(x=0.3)
    axes.invert_yaxis()
    axes.set_xlabel("time, ms (log scale)" + (f"\n{note}" if (note := scaled_note(climb)) else ""))
    axes.set_title(f"{climb.ladder}: {show_size(climb)}")
    axes.legend(loc="lower right")
    kind = os.fspath(path).rpartition(".")[2].lower()
    with atomic_write(path) as file:
        figure.savefig(file, format=kind if kind in figure.canvas.get_supported_filetypes() else "png", dpi=150)


def need_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise OnchipError("a plot needs matplotlib", hint="pip install 'onchip[plot]'") from None
