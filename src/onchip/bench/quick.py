"""onchip bench --quick: a first look in under two minutes, and how long the whole benchmark takes."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence

from onchip.bench.frame import Case
from onchip.bench.report.results import Row, job_title
from onchip.measure.pace import Pace

QUICK_NAMES = ("decode", "mlp")  # without names
QUICK_ROWS = (1, 1000, 65_536)  # the default with them
QUICK_PACE = Pace(rounds=3, block_s=0.1, warm_up_s=0.05, pause_s=0.05, min_runs=1)
MOST_LONGER = 4.0  # times
LIMIT_S = 90.0  # of all benchmarks; a job begins only if it should end before, and the first always begins


class Limit:
    """Decides which jobs of a benchmark still begin, by the time of the last one."""

    def __init__(self, limit_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._limit_s = now, limit_s
        self._begin = self._last_begin = now()
        self._last: Sequence[Case] = ()
        self.done: list[tuple[float, Sequence[Case]]] = []  # the seconds of each job, and its cases
        self.left_out: list[str] = []

    def begins(self, cases: Sequence[Case]) -> bool:
        """Whether a job begins now; called before each job."""
        self.end()
        used = self._now() - self._begin
        if self.done and used + self._estimate_s(cases) > self._limit_s:
            self.left_out.append(job_title(cases[0]))
            return False
        self._last, self._last_begin = cases, self._now()
        return True

    def end(self) -> None:
        """The last job has ended."""
        if self._last:
            self.done.append((self._now() - self._last_begin, self._last))
            self._last = ()

    def _estimate_s(self, cases: Sequence[Case]) -> float:
        """As long as the last job, or longer as its floor is: at most MOST_LONGER, as a part of it was preparation."""
        seconds, last = self.done[-1]
        now, before = floor_of(cases[0]), floor_of(last[0])
        return seconds * min(max(1.0, now / before), MOST_LONGER) if now and before else seconds


def floor_of(case: Case) -> float:
    """In milliseconds; 0 if it is not known."""
    return (case.floor_ms() if callable(case.floor_ms) else case.floor_ms) or 0.0


def whole_seconds(cases: Sequence[Case], rows: Sequence[Row], done: Sequence[tuple[float, Sequence[Case]]]) -> float:
    """About how long these cases take at their own pace, by what a few of them took.

    cases  all of the whole benchmark
    rows   measured now
    done   the seconds of each job measured now, and its cases
    """
    measured = {(job_title(row), row.engine): row.median_ms for row in rows if row.median_ms}
    runs = {}  # milliseconds of a run; the reported time may be of a part of it, or of several
    for case in itertools.chain.from_iterable(group for _, group in done):
        if ms := measured.get((job_title(case), case.engine)):
            runs[job_title(case), case.engine] = ms * case.parts, floor_of(case) * case.parts
    if not runs:
        return 0.0
    usual_ms = statistics.fmean(ms for ms, _ in runs.values())
    ratio = statistics.median(ms / floor if floor else 1.0 for ms, floor in runs.values())
    timed = sum(_timing_s(QUICK_PACE, ms) for ms, _ in runs.values())
    prepare_s = max(0.0, sum(seconds for seconds, _ in done) - timed) / len(runs)
    total = 0.0
    for case in cases:
        known = runs.get((job_title(case), case.engine))
        ms = known[0] if known else ratio * floor_of(case) * case.parts or usual_ms
        total += prepare_s + _timing_s(case.pace or Pace(), ms)
    return total


def _timing_s(pace: Pace, ms: float) -> float:
    """The time of all blocks of an engine whose run takes `ms`."""
    block_s = max(pace.min_runs * ms / 1e3, min(pace.block_s, pace.max_runs * ms / 1e3))
    return pace.rounds * (pace.pause_s + (max(pace.warm_up_s, ms / 1e3) if pace.warm_up_s else 0.0) + block_s)


def text_of(seconds: float) -> str:
    """ "40 s", "12 min", "1.5 h": two digits of an estimate."""
    if seconds < 90:
        return f"{max(10, round(seconds, -1)):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.2g} h"
