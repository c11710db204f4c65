"""The framework of every benchmark: wrong engines are not timed; runs of competing engines are interleaved."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from onchip.bench.report.results import Row, job_title, make_row, show_against_peer
from onchip.errors import OnchipError
from onchip.measure.pace import Pace, Timing, interleave, summarise
from onchip.measure.profile import Profile, profile
from onchip.measure.truth import Verdict
from onchip.plan.floor import settle_floors

ONCHIP = "onchip"


class UnavailableError(OnchipError):
    """A peer that cannot run here, with the reason. It is skipped, and the reason is reported."""


@dataclass(frozen=True)
class Ready:
    """An engine that is ready to run."""

    run: Callable[[], object]  # the timed function; it may have its own clock (measure.OwnClock)
    check: Callable[[], Verdict]  # called once, before timing
    setting: str = ""  # how it was configured, if there was a choice
    scores: Callable[[], Sequence[float]] | None = None  # if set, their mean is the rate instead of work / time
    extra: Mapping[str, float | int | str] = field(default_factory=dict)  # other properties, e.g. GPU memory


@dataclass(frozen=True)
class Case:
    """One engine on one benchmark job. Cases with the same workload, case and precision compete."""

    workload: str
    case: str
    engine: str
    prepare: Callable[[], Ready]  # build, compile, load; not timed
    work: float  # units of work in the reported time: rows of a pass, 1 for a step
    unit: str = "rows/s"
    precision: str = "fp32"
    parts: float = 1  # reported time = run time / parts: steps per epoch, or 1/32 if the run did 1/32 of the job
    # Floor of the reported time, the same for all competitors; a callable if device rates may be remeasured.
    floor_ms: float | Callable[[], float] | None = None
    threads: int | None = None
    pace: Pace | None = None  # overrides the default; the same for all competitors
    is_quick: bool = True  # prepared in seconds; --quick leaves out others
    remark: Callable[[Sequence[Row]], str] | None = None  # text computed from all rows of the job; added to the setting


@dataclass(frozen=True)
class Outcome:
    rows: tuple[Row, ...]
    skipped: dict[str, str] = field(default_factory=dict)  # engine -> reason
    wrong: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        return 1 if self.wrong else 0


@dataclass(frozen=True)
class Reporter:
    """Progress output of a long run: `log` prints a lasting line, `progress` one that the next may overwrite."""

    log: Callable[[str], None] = lambda text: None
    progress: Callable[[str], None] = lambda text: None


def run_cases(
    cases: Sequence[Case],
    pace: Pace | None = None,
    reporter: Reporter | None = None,
    save: Callable[[Outcome], object] | None = None,
    measure_again: Callable[[], object] | None = None,
    on_profile: Callable[[str, Profile], object] | None = None,
    begins: Callable[[Sequence[Case]], bool] = lambda job: True,
) -> Outcome:
    """Check, then time, every case; one row per engine that could run. `pace` overrides the cases' own.

    save           called with the outcome so far, without floors, after every job, so that nothing is lost if a peer
                   crashes the process
    measure_again  remeasures the device's rates if a run beats its floor; None: the rates are not measured
    on_profile     called after a job was timed, with the title of each case of onchip and the profile of one more call
    begins         called with the cases of each job before it begins; False leaves it out
    """
    reporter = reporter or Reporter()
    rows: list[tuple[Case, Row]] = []
    skipped: dict[str, str] = {}
    wrong: list[str] = []
    for title, group in itertools.groupby(cases, key=job_title):
        job = list(group)
        if not begins(job):
            continue
        job_rows, job_wrong = _run_job(job, title, pace, skipped, reporter, on_profile)
        rows += job_rows
        wrong += job_wrong
        if save is not None:
            save(Outcome(tuple(row for _, row in rows), skipped, tuple(wrong)))
    return Outcome(tuple(_with_floors(rows, measure_again)), skipped, tuple(wrong))


def _with_floors(rows: Sequence[tuple[Case, Row]], measure_again: Callable[[], object] | None) -> list[Row]:
    """Called once at the end, so that all floors of a file are computed from the same rates."""
    keys = [(job_title(case), case.floor_ms) for case, _ in rows]
    fastest = dict[Any, float]()
    for key, (_, row) in zip(keys, rows, strict=True):
        if row.median_ms is not None:
            fastest[key] = min(row.median_ms, fastest.get(key, row.median_ms))

    def floors() -> dict[Any, float]:
        known = {key: key[1] for key in keys if key[1] is not None}
        return {key: floor() if callable(floor) else floor for key, floor in known.items()}

    settled = settle_floors(floors, fastest, measure_again)
    return [
        replace(row, floor_ms=settled[key].ms, extra={**row.extra, **settled[key].note}) if key in settled else row
        for key, (_, row) in zip(keys, rows, strict=True)
    ]


def _run_job(
    cases: list[Case], title: str, pace: Pace | None, skipped: dict[str, str], reporter: Reporter,
    on_profile: Callable[[str, Profile], object] | None,
) -> tuple[list[tuple[Case, Row]], list[str]]:  # fmt: skip
    """The job's rows, without floors, and the wrong engines. Engines are freed on return: the next job needs memory."""
    entries = _check(_prepare(cases, title, skipped, reporter), title, skipped, reporter)
    wrong = []
    for case, _, verdict in entries:
        if not verdict.is_right:
            message = f"{case.engine}: wrong result, error {verdict.error:.3g}, allowed {verdict.allowed:.3g}"
            wrong.append(f"{title}: {message}")
            reporter.log(wrong[-1])
    timings = _time([entry for entry in entries if entry.verdict.is_right], pace, title, skipped, reporter)
    finished = [entry for entry in entries if entry.case in timings or not entry.verdict.is_right]
    measured = [_row(entry, timings.get(entry.case)) for entry in finished]
    rows = [
        (entry.case, _with_remark(entry.case, row, measured, reporter))
        for entry, row in zip(finished, measured, strict=True)
    ]
    for row in measured:
        if row.engine.startswith(ONCHIP) and row.median_ms is not None:
            reporter.log(f"{title}: {show_against_peer(measured, row)}")
    for case, engine, _ in entries:
        if on_profile is not None and case.engine.startswith(ONCHIP) and case in timings:
            with profile() as found:
                engine.run()
            on_profile(f"{title}, {case.engine}", found)
    return rows, wrong


class _Checked(NamedTuple):
    case: Case
    engine: Ready
    verdict: Verdict


@contextlib.contextmanager
def _skipping(case: Case, title: str, skipped: dict[str, str], reporter: Reporter) -> Iterator[None]:
    """Skip a peer that fails, with the reason. A failure of onchip is a bug and propagates."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, UnavailableError) and case.engine.startswith(ONCHIP):
            raise
        reason = error.what if isinstance(error, UnavailableError) else f"it failed at {title}: {first_line(error)}"
        known = skipped.get(case.engine, "")
        if reason not in known:
            reporter.log(f"skipped {case.engine}: {reason}")
            skipped[case.engine] = "; ".join(filter(None, [known, reason]))


def first_line(error: BaseException) -> str:
    """The first line of a framework's error message."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)[:200]


def _prepare(cases: list[Case], title: str, skipped: dict[str, str], reporter: Reporter) -> list[tuple[Case, Ready]]:
    ready = []
    for case in cases:
        reporter.progress(f"{title}: preparing {case.engine}")
        with _skipping(case, title, skipped, reporter):
            ready.append((case, case.prepare()))
    return ready


def _check(ready: list[tuple[Case, Ready]], title: str, skipped: dict[str, str], reporter: Reporter) -> list[_Checked]:
    entries = []
    for case, engine in ready:
        reporter.progress(f"{title}: checking {case.engine}")
        with _skipping(case, title, skipped, reporter):
            entries.append(_Checked(case, engine, engine.check()))
    return entries


def _time(
    entries: list[_Checked], pace: Pace | None, title: str, skipped: dict[str, str], reporter: Reporter
) -> dict[Case, Timing]:
    """The times of all engines that succeed; if one fails, the others are timed again."""
    if not entries:
        return {}
    chosen = pace or entries[0].case.pace or Pace()
    running = entries[0]

    def on_block(round_index: int, i: int) -> None:
        nonlocal running
        running = entries[i]
        reporter.progress(f"{title}: timing {running.case.engine}, round {round_index + 1} of {chosen.rounds}")

    try:
        samples = interleave([entry.engine.run for entry in entries], chosen, on_block)
    except Exception as error:
        with _skipping(running.case, title, skipped, reporter):
            raise error
        others = [entry for entry in entries if entry is not running]
        return _time(others, pace, title, skipped, reporter)
    return {case: summarise(times, 1 / case.parts) for (case, _, _), times in zip(entries, samples, strict=True)}


def _row(entry: _Checked, timing: Timing | None) -> Row:
    case, engine, verdict = entry
    return make_row(
        case.workload, case.case, case.engine, timing, verdict, work=case.work, unit=case.unit,
        precision=case.precision, threads=case.threads, setting=engine.setting, scores=engine.scores,
        extra=engine.extra,
    )  # fmt: skip


def _with_remark(case: Case, row: Row, rows: Sequence[Row], reporter: Reporter) -> Row:
    remark = case.remark(rows) if case.remark is not None else ""
    if not remark:
        return row
    reporter.log(f"{case.workload}, {case.case}, {case.engine}: {remark}")
    return replace(row, setting=", ".join(filter(None, [row.setting, remark])))
