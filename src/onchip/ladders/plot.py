"""Draw a climb: one bar per rung, the floors as lines, the report's times as marks."""

from __future__ import annotations

import itertools
import os
import textwrap
from typing import TYPE_CHECKING

from onchip.errors import OnchipError
from onchip.files import atomic_write
from onchip.ladders.frame import Climb, Step
from onchip.ladders.show import notes, show_size
from onchip.measure.pace import show_ms

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NOTE_WIDTH = 110  # characters
# Okabe and Ito's colours, which colour-blind readers can tell apart.
_RUNG, _ENGINE, _REPORT = "#56b4e9", "#e69f00", "#000000"


def save_plot(climb: Climb, path: str | os.PathLike[str]) -> None:
    """Write the chart; the suffix sets the format: .png, .svg, .pdf."""
    need_matplotlib()
    figure = draw_plot(climb)
    kind = os.fspath(path).rpartition(".")[2].lower()
    with atomic_write(path) as file:
        figure.savefig(file, format=kind if kind in figure.canvas.get_supported_filetypes() else "png", dpi=150)


def draw_plot(climb: Climb) -> Figure:
    """Bars on a log scale. Values stand to the right of the axes and the legend below: no line crosses them."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    steps = [step for step in climb.steps if step.timing is not None]
    remarks = [line for note in notes(climb) for line in textwrap.wrap(note, _NOTE_WIDTH)]
    figure = Figure(figsize=(9, 2.2 + 0.36 * len(steps) + 0.2 * len(remarks)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    rows = range(len(steps))
    medians = [step.timing.median_ms for step in steps if step.timing is not None]
    axes.barh(rows, medians, color=[_ENGINE if step.is_engine else _RUNG for step in steps])
    axes.set_yticks(rows, [_name(step, climb) for step in steps])
    for style, (precision, ms) in zip(itertools.cycle(("--", ":", "-.")), climb.floors.items(), strict=False):
        axes.axvline(ms, linestyle=style, color="black", label=f"floor {show_ms(ms)} ms ({precision})")
    _mark_report(axes, steps)
    axes.set_xscale("log")
    axes.margins(x=0.05, y=0.02)
    axes.invert_yaxis()
    axes.set_xlabel("\n".join(["time, ms (log scale)", *remarks]))
    axes.set_title(f"{climb.ladder}: {show_size(climb)}")
    values = axes.secondary_yaxis("right")
    values.set_yticks(rows, [f"{show_ms(ms)} ms" for ms in medians])
    values.tick_params(length=0)
    colours = {"rung": _RUNG, "engine": _ENGINE}
    present = {"engine" if step.is_engine else "rung" for step in steps}
    patches = [Patch(color=colour, label=name) for name, colour in colours.items() if name in present]
    lines, _ = axes.get_legend_handles_labels()
    figure.legend(handles=[*patches, *lines], loc="outside lower center", ncols=3)
    return figure


def _name(step: Step, climb: Climb) -> str:
    return step.rung + "*" * (step.rows < climb.B) + "~" * bool(step.nondeterministic)


def _mark_report(axes: Axes, steps: list[Step]) -> None:
    """The report's times: a diamond for its single device, an open circle for another machine."""
    marked = [(step.report_ms, i, step.report_on) for i, step in enumerate(steps) if step.report_ms is not None]
    for machine in dict.fromkeys(machine for *_, machine in marked):
        ms, rows = [ms for ms, _, on in marked if on == machine], [i for _, i, on in marked if on == machine]
        marker, face, label = ("o", "none", f"report, {machine} †") if machine else ("D", _REPORT, "report")
        axes.scatter(ms, rows, s=22, marker=marker, facecolors=face, edgecolors=_REPORT, zorder=3, label=label)


def need_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise OnchipError("a plot needs matplotlib", hint="pip install 'onchip[plot]'") from None
