"""Result files: benchmarks/results/<device>/<what>.json, written atomically, validated when read."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from onchip.errors import FormatError
from onchip.files import MAX_HEADER_BYTES, atomic_write, open_input, write_error
from onchip.measure.pace import Timing, show_ms
from onchip.measure.truth import Verdict
from onchip.plan.floor import floor_percent

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table

ACCURACY = "% test accuracy"  # the only unit that is a score, not a speed


@dataclass(frozen=True)
class Row:
    """One engine at one case. A wrong engine has an error and no time."""

    workload: str
    case: str
    engine: str  # "onchip", "torch eager", ..., "ladder:<rung>"
    precision: str
    median_ms: float | None
    p20_ms: float | None
    p80_ms: float | None
    rate: float | None
    unit: str
    floor_ms: float | None
    error: float | None  # the largest |a - b| / max(1, |a|, |b|) against float64
    checked: bool
    samples_ms: tuple[float, ...] = ()
    threads: int | None = None
    setting: str = ""  # how the engine was configured, if there was a choice; the data, if it matters
    scores: tuple[float, ...] = ()  # one per run, if the rate is their mean
    score_std: float | None = None  # sample standard deviation of the scores
    extra: dict[str, float | int | str] = dataclasses.field(default_factory=dict)  # other properties: registers, ...
    kernels: tuple[dict[str, float | int | str], ...] = ()  # of a rung on a GPU: properties of each

    @property
    def is_peer(self) -> bool:
        """Not a variant of onchip, not a rung, not a figure from the report."""
        return not self.engine.startswith(("onchip", "report", "ladder:"))


def make_row(
    workload: str,
    case: str,
    engine: str,
    timing: Timing | None,
    verdict: Verdict,
    *,
    work: float,
    unit: str = "rows/s",
    precision: str = "fp32",
    floor_ms: float | None = None,
    threads: int | None = None,
    setting: str = "",
    scores: Callable[[], Sequence[float]] | None = None,
    extra: Mapping[str, float | int | str] | None = None,
    kernels: Iterable[Mapping[str, float | int | str]] = (),
) -> Row:
    """A row from a measurement; the rate is work / time, or the mean of the scores."""
    row = Row(workload, case, engine, precision, None, None, None, None, unit, floor_ms, verdict.error,
              verdict.is_right, threads=threads, setting=setting, extra=dict(extra or {}),
              kernels=tuple(map(dict, kernels)))  # fmt: skip
    if timing is None:
        return row
    values = tuple(scores()) if scores is not None else ()
    return dataclasses.replace(
        row, median_ms=timing.median_ms, p20_ms=timing.p20_ms, p80_ms=timing.p80_ms, samples_ms=timing.samples_ms,
        rate=statistics.fmean(values) if values else work / (timing.median_ms / 1e3), scores=values,
        score_std=statistics.stdev(values) if len(values) > 1 else None,
    )  # fmt: skip


@dataclass(frozen=True)
class Results:
    machine: dict[str, Any]
    versions: dict[str, Any]
    commit: str
    command: str
    date: str
    rows: tuple[Row, ...]
    skipped: dict[str, str] = dataclasses.field(default_factory=dict)  # engine -> reason

    def to_dict(self) -> dict[str, Any]:
        document = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        document["rows"] = [dataclasses.asdict(row) for row in self.rows]
        return document


def result_path(folder: str | os.PathLike[str], device: str, what: str) -> Path:
    return Path(folder) / device / f"{what}.json"


def write_results(results: Results, path: str | os.PathLike[str]) -> None:
    """Write the file and create its folders; an infinite error becomes null, as JSON has no infinity."""
    make_folder(path)
    text = to_json(results.to_dict())
    with atomic_write(path) as file:
        file.write(text.encode())


def make_folder(path: str | os.PathLike[str]) -> None:
    """Create the parent folder of `path`."""
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_error(target, error) from None


def to_json(document: dict[str, Any]) -> str:
    """Indented, with lists of samples on one line: these files are read in reviews."""
    lines = json.dumps(_finite(document), indent=1, allow_nan=False, ensure_ascii=False).split("\n")
    out: list[str] = []
    open_list = False
    for line in lines:
        if open_list:
            out[-1] += line.strip() if out[-1].endswith("[") or line.strip().startswith("]") else " " + line.strip()
            open_list = not line.strip().startswith("]")
        else:
            out.append(line)
            open_list = line.endswith(('"samples_ms": [', '"scores": ['))
    return "\n".join(out) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_results(path: str | os.PathLike[str]) -> Results:
    with open_input(path) as file:
        raw = file.read(MAX_HEADER_BYTES)
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise _not_results(path, error) from None
    return parse_results(document, path)


def parse_results(document: Any, path: str | os.PathLike[str]) -> Results:
    """The results in a JSON document; `path` is for errors."""
    try:
        rows = tuple(_read_row(row) for row in document["rows"])
        texts = {name: str(document[name]) for name in ("commit", "command", "date")}
        return Results(machine=dict(document["machine"]), versions=dict(document["versions"]), rows=rows,
                       skipped=dict(document.get("skipped", {})), **texts)  # fmt: skip
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _not_results(path, error) from None


def _not_results(path: str | os.PathLike[str], error: Exception) -> FormatError:
    return FormatError(
        f"{path} is not a result file", got=f"{type(error).__name__}: {error}",
        expected="machine, versions, commit, command, date and rows", hint="write it with onchip bench",
    )  # fmt: skip


def _read_row(document: dict[str, Any]) -> Row:
    names = {field.name for field in dataclasses.fields(Row)}
    row = Row(**{key: value for key, value in document.items() if key in names})
    values = (row.median_ms, row.p20_ms, row.p80_ms, row.rate, row.floor_ms, row.error, row.score_std)
    if not all(value is None or isinstance(value, int | float) for value in values):
        raise TypeError(f"row {row.case}, {row.engine}: a value is not a number")
    return dataclasses.replace(row, samples_ms=tuple(row.samples_ms), scores=tuple(row.scores), extra=dict(row.extra),
                               kernels=tuple(map(dict, row.kernels)))  # fmt: skip


# -- display -----------------------------------------------------------------------------------------------


class Job(Protocol):
    """Identifies the job of a case or a row."""

    @property
    def workload(self) -> str: ...
    @property
    def case(self) -> str: ...
    @property
    def precision(self) -> str: ...


def job_title(job: Job) -> str:
    """ "decode, 12800 rows"; with the precision if it is not fp32."""
    return ", ".join([job.workload, case_title(job)])


def case_title(job: Job) -> str:
    return job.case if job.precision == "fp32" else f"{job.case}, {job.precision}"


def machine_title(machine: Mapping[str, Any]) -> str:
    """A CPU with its cores; a GPU by its name."""
    name, cores = machine.get("name"), machine.get("cores")
    return f"{name}, {cores} cores" if str(machine.get("device", "cpu")).startswith("cpu") else str(name)


def short_commit(commit: str) -> str:
    """Seven digits of a hash and its suffix; a version unchanged."""
    digits, plus, more = commit.partition("+")
    return commit if " " in commit else f"{digits[:7]}{plus}{more}"


def best_peer(rows: Sequence[Row], row: Row) -> Row | None:
    """The fastest (or most accurate) peer at the job of `row`, in its precision."""
    peers = [r for r in rows if r.is_peer and r.median_ms is not None
             and job_title(r) == job_title(row)]  # fmt: skip
    if row.unit == ACCURACY:
        return max(peers, key=lambda r: r.rate or 0.0, default=None)
    return min(peers, key=lambda r: r.median_ms or math.inf, default=None)


def show_speedup(rows: Sequence[Row], row: Row) -> str:
    peer = best_peer(rows, row)
    if row.median_ms is None or peer is None or peer.median_ms is None or row.unit == ACCURACY:
        return "-"
    return f"{peer.median_ms / row.median_ms:.2f}x"


def show_against_peer(rows: Sequence[Row], row: Row) -> str:
    """ "onchip 0.0256 ms, 0.87x torch graph 0.0222 ms": one line against the best peer at the same job."""
    peer = best_peer(rows, row)
    against = f", {show_speedup(rows, row)} {peer.engine} {show_ms(peer.median_ms)} ms" if peer else ""
    return f"{row.engine} {show_ms(row.median_ms)} ms{against}"


def show_floor(row: Row, launch_us: float) -> str:
    """Percent of the floor; "launch" if the floor is mostly launch overhead."""
    if row.floor_ms is None or row.median_ms is None:
        return "-"
    if row.floor_ms < 2 * launch_us / 1e3:
        return "launch"
    return f"{floor_percent(row.floor_ms, row.median_ms):.0f}%"


def show_rate(row: Row) -> str:
    """Without the unit, which is in the column heading: 6400000 rows/s -> "6.4 M"; a mean of scores with its spread."""
    if row.rate is None:
        return "-"
    if row.unit == ACCURACY:
        return f"{row.rate:.2f}" + ("" if row.score_std is None else f" ± {row.score_std:.2f}")
    for limit, sign in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if row.rate >= limit:
            return f"{row.rate / limit:.3g}{sign}"
    return f"{row.rate:.3g}"


def make_tables(results: Results) -> Group:
    """Rich tables, one per case, at most 80 columns wide."""
    from rich.console import Group
    from rich.text import Text

    head = f"{machine_title(results.machine)}, onchip {short_commit(results.commit)}"
    jobs = dict.fromkeys(map(job_title, results.rows))
    tables = [_case_table([r for r in results.rows if job_title(r) == job], results) for job in jobs]
    if any(row.is_peer for row in results.rows):
        tables.append(_summary_table(results.rows))
    skipped = [Text(f"skipped {engine}: {reason}") for engine, reason in results.skipped.items()]
    return Group(Text(head), *tables, *skipped)


def _summary_table(rows: Sequence[Row]) -> Table:
    """One line per onchip engine and case: its speedup over the best peer."""
    table = _table("against the best peer", "workload, case", "onchip ms", "peer ms", "x peer", "peer")
    for row in rows:
        if row.engine.startswith("onchip"):
            variant = row.engine.removeprefix("onchip")  # ", fp16 tables"
            peer = best_peer(rows, row)
            table.add_row(f"{job_title(row)}{variant}", show_ms(row.median_ms),
                          show_ms(peer.median_ms) if peer else "-", show_speedup(rows, row),
                          peer.engine if peer else "-")  # fmt: skip
    return table


def _table(title: str, first: str, *headings: str) -> Table:
    """A column of names, then right-aligned columns."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column(first, no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", overflow="fold")
    return table


def _case_table(rows: list[Row], results: Results) -> Table:
    unit = rows[0].unit
    table = _table(job_title(rows[0]), "engine", "median ms", "p20-p80", "x peer", unit, "of floor", "max error")
    launch_us = float(results.machine.get("launch_us", 0))
    for row in rows:
        spread = f"{show_ms(row.p20_ms)}-{show_ms(row.p80_ms)}" if row.checked else "wrong: no time"
        error = "-" if row.error is None else f"{row.error:.1e}"
        table.add_row(row.engine, show_ms(row.median_ms), spread, show_speedup(rows, row), show_rate(row),
                      show_floor(row, launch_us), error)  # fmt: skip
    return table


def show(output: RenderableType) -> None:
    """Print to stdout; into a pipe or a file at full width and without colours."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    console.print(output)
