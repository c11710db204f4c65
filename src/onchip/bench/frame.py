"""The frame of every benchmark: a wrong engine has no time; competitors of one case take turns."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from onchip.bench.results import Row, job_title, make_row
from onchip.errors import OnchipError
from onchip.measure.pace import Pace, Timing, interleave, summarise
from onchip.measure.truth import Verdict

ONCHIP = "onchip"


class UnavailableError(OnchipError):
    """A peer that cannot run here, with the reason. It is skipped, and said."""


@dataclass(frozen=True)
class Ready:
    """An engine that is built."""

    run: Callable[[], object]  # what the clock sees; it may bring its own (measure.OwnClock)
    check: Callable[[], Verdict]  # asked once, before the clock starts
    setting: str = ""  # how it was set up, where there was a choice
    scores: Callable[[], Sequence[float]] | None = None  # their mean is the row's rate, where that is not work / time


@dataclass(frozen=True)
class Case:
    """One engine at one job. Those with the same workload, case and precision compete."""

    workload: str
    case: str
    engine: str
    prepare: Callable[[], Ready]  # build, compile, load; not timed
    work: float  # how much of the unit the reported time is worth: rows of a pass, 1 for a step
    unit: str = "rows/s"
    precision: str = "fp32"
    parts: float = 1  # the reported time is that of a run divided by this: steps of an epoch; 1/32 if it ran a 32nd
    floor_ms: float | None = None  # of the reported time
    threads: int | None = None
    pace: Pace | None = None  # where the job needs its own; the same for all competitors
    remark: Callable[[Sequence[Row]], str] | None = None  # what only all rows of the job tell; goes to the setting


@dataclass(frozen=True)
class Outcome:
    rows: tuple[Row, ...]
    skipped: dict[str, str] = field(default_factory=dict)  # engine -> why
    wrong: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        return 1 if self.wrong else 0


@dataclass(frozen=True)
class Reporter:
    """How a long run speaks: `say` what should stay to be read, `progress` what the next line may replace."""

    say: Callable[[str], None] = lambda text: None
    progress: Callable[[str], None] = lambda text: None


def run_cases(cases: Sequence[Case], pace: Pace | None = None, reporter: Reporter | None = None) -> Outcome:
    """Check, then time, every case; a row for each engine that could run. `pace` stands in for the cases' own."""
    reporter = reporter or Reporter()
    rows: list[Row] = []
    skipped: dict[str, str] = {}
    wrong: list[str] = []
    for title, group in itertools.groupby(cases, key=job_title):
        ready = _prepare(list(group), title, skipped, reporter)
        verdicts = []
        for case, engine in ready:
            reporter.progress(f"{title}: checking {case.engine}")
            verdicts.append(engine.check())
            if not verdicts[-1].is_right:
                error, allowed = verdicts[-1].error, verdicts[-1].allowed
                wrong.append(f"{title}: {case.engine} is wrong, error {error:.3g}, allowed {allowed:.3g}")
                reporter.say(wrong[-1])
        timings = _time(ready, [verdict.is_right for verdict in verdicts], pace, title, reporter)
        made = [
            _row(case, engine, verdict, timing)
            for (case, engine), verdict, timing in zip(ready, verdicts, timings, strict=True)
        ]
        rows += [_remarked(case, row, made, reporter) for (case, _), row in zip(ready, made, strict=True)]
    return Outcome(tuple(rows), skipped, tuple(wrong))


def _prepare(cases: list[Case], title: str, skipped: dict[str, str], reporter: Reporter) -> list[tuple[Case, Ready]]:
    ready = []
    for case in cases:
        reporter.progress(f"{title}: preparing {case.engine}")
        try:
            ready.append((case, case.prepare()))
        except UnavailableError as reason:
            known = skipped.get(case.engine, "")
            if reason.what not in known:
                reporter.say(f"skipped {case.engine}: {reason.what}")
                skipped[case.engine] = "; ".join(filter(None, [known, reason.what]))
    return ready


def _time(
    ready: list[tuple[Case, Ready]], right: list[bool], pace: Pace | None, title: str, reporter: Reporter
) -> list[Timing | None]:
    timed = [pair for pair, is_right in zip(ready, right, strict=True) if is_right]
    if not timed:
        return [None] * len(ready)
    pace = pace or timed[0][0].pace or Pace()

    def on_block(turn: int, i: int) -> None:
        reporter.progress(f"{title}: timing {timed[i][0].engine}, round {turn + 1} of {pace.rounds}")

    samples = iter(interleave([engine.run for _, engine in timed], pace, on_block))
    return [
        summarise(next(samples), 1 / case.parts) if is_right else None
        for (case, _), is_right in zip(ready, right, strict=True)
    ]


def _row(case: Case, engine: Ready, verdict: Verdict, timing: Timing | None) -> Row:
    return make_row(
        case.workload, case.case, case.engine, timing, verdict, work=case.work, unit=case.unit,
        precision=case.precision, floor_ms=case.floor_ms, threads=case.threads, setting=engine.setting,
        scores=engine.scores,
    )  # fmt: skip


def _remarked(case: Case, row: Row, rows: Sequence[Row], reporter: Reporter) -> Row:
    remark = case.remark(rows) if case.remark is not None else ""
    if not remark:
        return row
    reporter.say(f"{case.workload}, {case.case}, {case.engine}: {remark}")
    return replace(row, setting=", ".join(filter(None, [row.setting, remark])))
