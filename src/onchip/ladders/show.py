"""Render a climb as tables, and list the ladders."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from onchip.ladders import LADDERS, find_ladder, ladder_devices
from onchip.ladders.frame import Climb, Ladder, Step, work_per_row
from onchip.measure.pace import show_ms
from onchip.plan.floor import floor_percent

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table


def make_table(climb: Climb) -> Group:
    """Two Rich tables, one line per rung: what was measured, and the idea of each rung."""
    from rich.console import Group
    from rich.text import Text

    with_report = any(step.report_ms is not None for step in climb.steps)
    facts = list(dict.fromkeys(name for step in climb.steps for name in step.facts))
    floors = ", ".join(f"{show_ms(ms)} ms ({precision})" for precision, ms in climb.floors.items())
    times_ms = ["time ms", "report ms"] if with_report else ["time ms"]
    title = f"{climb.ladder}: {climb.title}; {show_size(climb)}, floor {floors}"
    table = _table("rung", *times_ms, "x first", "x prev", "of floor", "max error", *facts)
    for i, step in enumerate(climb.steps):
        first, previous = climb.speedups(i)
        time = floor = "-"
        if step.timing is not None:
            time = show_ms(step.timing.median_ms) + ("*" if step.rows < climb.B else "")
            floor = of_floor(step.floor_ms, step.timing.median_ms)
        report = [show_ms(step.report_ms) + ("†" if step.report_on else "")] if with_report else []
        time = time if step.verdict.is_right else "wrong: no time"
        error = f"{step.verdict.error:.1e}"
        more = [show_fact(step.facts.get(name, "-")) for name in facts]
        table.add_row(step.rung + ("~" if step.nondeterministic else ""), time, *report, times(first), times(previous),
                      floor, error, *more)  # fmt: skip
    ideas = _ideas((step.rung, step.idea, step.why) for step in climb.steps)
    return Group(Text(title), table, *map(Text, notes(climb)), ideas)


def _table(first: str, *headings: str) -> Table:
    """A column of names, then right-aligned columns."""
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    table.add_column(first, no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", overflow="fold")
    return table


def _ideas(rungs: Iterable[tuple[str, str, str]]) -> Table:
    """The idea of each rung, and why it is faster than the previous one."""
    table = _table("rung")
    table.add_column("idea")
    table.add_column("why it is faster than the previous rung, or slower")
    for rung in rungs:
        table.add_row(*rung)
    return table


def notes(climb: Climb) -> list[str]:
    """What the marks in the table and the plot mean, and the rungs that cannot run."""
    machines = _rungs_by(climb, lambda step: step.report_on)
    reasons = _rungs_by(climb, lambda step: step.nondeterministic)
    marked = {
        "† in the report": [f"{rungs} on {machine}" for machine, rungs in machines.items()],
        "~ two runs may differ": [f"{rungs}: {reason}" for reason, rungs in reasons.items()],
    }
    scaled = [note] if (note := scaled_note(climb)) else []
    found = [f"{mark}: {'; '.join(each)}" for mark, each in marked.items() if each]
    return [*scaled, *found, *(f"skipped {k}: {v}" for k, v in climb.skipped.items())]


def _rungs_by(climb: Climb, key: Callable[[Step], str]) -> dict[str, str]:
    """The names of the rungs with the same text, unless it is empty."""
    found: dict[str, list[str]] = {}
    for step in climb.steps:
        if text := key(step):
            found.setdefault(text, []).append(step.rung)
    return {text: ", ".join(rungs) for text, rungs in found.items()}


def show_fact(value: int | str) -> str:
    return f"{value:,}" if isinstance(value, int) else value


def show_size(climb: Climb) -> str:
    return f"{climb.B:,} rows" + ("" if climb.threads is None else f", {climb.threads} threads")


# -- the list ----------------------------------------------------------------------------------------------


def describe_ladders(names: Sequence[str] = LADDERS) -> dict[str, list[dict[str, Any]]]:
    """These ladders on each of their devices, as far as they are known without a GPU."""
    return {name: [_describe(find_ladder(name, device)) for device in ladder_devices(name)] for name in names}


def _describe(ladder: Ladder[Any]) -> dict[str, Any]:
    net = ladder.network()
    rungs = [
        {
            "name": rung.name, "idea": rung.idea, "why": rung.why, "precision": rung.precision,
            "report_ms": {str(B): ms for B, ms in rung.report_ms.items()},
            "report_on": {str(B): machine for B, machine in rung.report_on.items()},
            "max_rows": rung.max_rows, "is_engine": rung.is_engine, "nondeterministic": rung.nondeterministic,
            **work_per_row(rung.cost(net, ladder.rows), ladder.rows),
        }
        for rung in (*ladder.pick(None), *(rung() for rung in ladder.over_ranks))
    ]  # fmt: skip
    return {"device": ladder.device, "title": ladder.title, "rows": ladder.rows, "row_counts": ladder.row_counts,
            "rungs": rungs}  # fmt: skip


def ladders_table() -> Group:
    """Every rung of every ladder, with its idea."""
    from rich.console import Group
    from rich.text import Text

    table = _table("ladder")
    table.add_column("rung", no_wrap=True)
    table.add_column("idea")
    for name, ladders in describe_ladders().items():
        for ladder in ladders:
            table.add_row(name, f"--device {ladder['device']}", f"{ladder['title']}; {_show_rows(ladder)}")
            for rung in ladder["rungs"]:
                table.add_row("", rung["name"], rung["idea"])
            table.add_section()
    return Group(table, Text("run one: onchip ladder decode"), Text("more on its rungs: onchip ladder decode --list"))


def ladder_tables(name: str) -> Group:
    """The rungs of one ladder, on each of its devices: the report's times, the work of a row, the ideas."""
    from rich.console import Group
    from rich.text import Text

    (ladders,) = describe_ladders([name]).values()
    shown: list[Text | Table] = []
    for ladder in ladders:
        shown.append(Text(f"{name} --device {ladder['device']}: {ladder['title']}; {_show_rows(ladder)}"))
        shown += [_rungs_table(ladder), *map(Text, _marks(ladder)), _rung_ideas(ladder)]
    return Group(*shown)


def _show_rows(ladder: Mapping[str, Any]) -> str:
    """ "12,800 or 2,097,152 rows (default 2,097,152)": the report's, and the default."""
    default = f" (default {ladder['rows']:,})" if len(ladder["row_counts"]) > 1 else ""
    return " or ".join(f"{B:,}" for B in ladder["row_counts"]) + f" rows{default}"


def _rungs_table(ladder: Mapping[str, Any]) -> Table:
    timed = [B for B in ladder["row_counts"] if any(str(B) in rung["report_ms"] for rung in ladder["rungs"])]
    work = ("bytes per row", "flop per row")
    table = _table("rung", "precision", *(f"report ms, {B:,} rows" for B in timed), *work)
    for rung in ladder["rungs"]:
        report = [show_ms(rung["report_ms"].get(str(B))) + "†" * (str(B) in rung["report_on"]) for B in timed]
        known = [show_fact(rung.get(key, "")) for key in work]
        table.add_row(rung["name"] + "~" * bool(rung["nondeterministic"]), rung["precision"], *report, *known)
    return table


def _marks(ladder: Mapping[str, Any]) -> list[str]:
    """What the marks in the table mean."""
    machines: dict[str, list[str]] = {}
    for rung in ladder["rungs"]:
        for machine in dict.fromkeys(rung["report_on"].values()):
            rows = ", ".join(f"{int(B):,}" for B, on in rung["report_on"].items() if on == machine)
            machines.setdefault(machine, []).append(f"{rung['name']} ({rows} rows)")
    reasons = {rung["name"]: rung["nondeterministic"] for rung in ladder["rungs"] if rung["nondeterministic"]}
    return [*(f"† in the report on {machine}: {'; '.join(rungs)}" for machine, rungs in machines.items()),
            *(f"~ two runs may differ: {name}: {reason}" for name, reason in reasons.items())]  # fmt: skip


def _rung_ideas(ladder: Mapping[str, Any]) -> Table:
    return _ideas((rung["name"], rung["idea"], rung["why"]) for rung in ladder["rungs"])


# -- values ------------------------------------------------------------------------------------------------


def times(ratio: float | None) -> str:
    """A speedup with three significant digits."""
    return "-" if ratio is None else f"{float(f'{ratio:.3g}'):,g}x"


def of_floor(floor_ms: float, ms: float) -> str:
    """Percent of the floor, with two significant digits."""
    return f"{float(f'{floor_percent(floor_ms, ms):.2g}'):g}%"


def scaled_note(climb: Climb) -> str | None:
    scaled = [f"{step.rung} on {step.rows}" for step in climb.steps if step.rows < climb.B]
    return f"* timed on fewer rows and scaled to {climb.B:,}: {', '.join(scaled)}" if scaled else None
