"""A plan on the CPU that records when each of its groups ran, and on which thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from onchip.kernels.cpu.threading.launches import CompiledLaunch, Launch
from onchip.kernels.cpu.threading.threads import HELPERS, start_helpers
from onchip.kernels.cpu.threading.timed import CAPACITY, Run, TimedLaunch
from onchip.network.recipe import Array
from onchip.plan.step_info import StepInfo
from onchip.runtime.cpu.backend import CpuBound, Step
from onchip.runtime.nvtx_ranges import named_range
from onchip.runtime.spans import Call, Recorder, Span

RECORD_NS, SHARE = 6_000, 0.02  # to record a call takes about this long; at most this share of all calls' time
_CPU_NS, _LONG_NS = 20_000_000, 200_000  # CPU time is counted this often at most, in calls that are longer than this


class _Pending(NamedTuple):
    """A call whose runs have not been collected."""

    begin_ns: int
    end_ns: int
    rows: int
    skipped: int  # calls before it that were not recorded
    workers: int
    cpu_ns: tuple[int, ...]


class RecordedCpu:
    """Runs as the plain plan does, in one compiled call where that is possible, with a clock around each launch.

    Between two calls it does next to nothing: the threads that help would fall asleep.
    """

    checks_ids = CpuBound.checks_ids

    def __init__(self, plain: CpuBound, recorder: Recorder) -> None:
        self._recorder, self._lock = recorder, threading.Lock()
        recorder.collect = self.collect
        self._timed: list[tuple[int, TimedLaunch]] = []  # each with its group
        self._runs: list[tuple[int, Run]] = []  # of launches that Python calls
        self._pending: list[_Pending] = []
        self._pending_runs = 0  # per launch and thread, at most
        self._quick_call = plain.quick_call()
        self._skipped, self._left = 0, 0  # calls since the last recorded one, and to the next one
        self._counted_ns = 0  # when CPU time was last counted
        self._is_compiled = plain.chunks is not None
        self._bound = plain.with_launches(self._with_clock)
        self._labels = [group.claim.label for group in plain.plan.groups]
        self._network = plain.plan.network.name

    def _with_clock(self, step: Step) -> Launch:
        if self._is_compiled and isinstance(step.launch, CompiledLaunch):
            timed = TimedLaunch(step.launch)
            self._timed.append((step.group, timed))
            return timed.timed

        def run(inputs: Sequence[Array], outputs: Sequence[Array], threads: int) -> None:
            with named_range(self._labels[step.group]):
                begin = time.perf_counter_ns()
                step.launch(inputs, outputs, threads)
            self._runs.append((step.group, Run(0, begin, time.perf_counter_ns(), len(outputs[0]))))

        return run

    def run(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array], B: int) -> None:
        """As the plain plan; one call at a time."""
        with named_range(f"{self._network}, {B:,} rows"):
            self._run(inputs, outputs, B)

    def _run(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array], B: int) -> None:
        bound = self._bound
        chunk = B if bound.chunks is None else bound.chunks.rows_of_chunk(B)
        runs = -(-B // chunk)
        with self._lock:
            if self._pending_runs + runs > CAPACITY:
                self._collect()
            start_helpers(bound.threads)
            begin = time.perf_counter_ns()
            threads = _threads() if begin - self._counted_ns > _CPU_NS else ()
            if threads:
                before, self._counted_ns = _cpu_ns(threads), begin
                begin = time.perf_counter_ns()
            bound.run(inputs, outputs, B)
            end = time.perf_counter_ns()
            used: tuple[int, ...] = ()
            if threads and end - begin > _LONG_NS:
                used = tuple(later - earlier for earlier, later in zip(before, _cpu_ns(threads), strict=True))
            workers = bound.threads if runs > 1 else 1
            self._pending.append(_Pending(begin, end, B, self._skipped, workers, used))
            self._pending_runs += runs
            self._skipped, self._left = 0, int(RECORD_NS / (SHARE * max(1, end - begin)))

    def collect(self) -> None:
        """Append the pending calls to the recorder."""
        with self._lock:
            self._collect()

    def _collect(self) -> None:
        runs = self._runs + [(group, run) for group, timed in self._timed for run in timed.take()]
        runs.sort(key=lambda each: each[1].begin_ns)
        at = 0
        for begin, end, rows, skipped, workers, cpu_ns in self._pending:
            self._recorder.repeat_last(skipped)
            spans = []
            while at < len(runs) and runs[at][1].begin_ns <= end:
                if runs[at][1].begin_ns >= begin:  # those of a call that failed are skipped
                    spans.append(self._span(*runs[at]))
                at += 1
            self._recorder.append(Call(begin, end, rows, tuple(spans), workers=workers, cpu_ns=cpu_ns))
        self._recorder.repeat_last(self._skipped)
        self._skipped = 0
        self._runs, self._pending, self._pending_runs = [], [], 0

    def _span(self, group: int, run: Run) -> Span:
        return Span(f"thread {run.worker}", self._labels[group], group, run.begin_ns, run.end_ns, run.rows)

    def run_like(self, x: Any) -> None:
        return None

    def quick_call(self) -> Callable[[tuple[Any, ...], Any], Any] | None:
        """Runs calls that are not recorded; None for the others."""
        plain = self._quick_call
        if plain is None:
            return None

        def call(rows: tuple[Any, ...], out: Any) -> Any:
            if self._left <= 0 or (result := plain(rows, out)) is None:
                return None
            self._left -= 1
            self._skipped += 1
            return result

        return call

    def wait(self) -> None:
        return

    def steps(self, B: int) -> tuple[StepInfo, ...]:
        return self._bound.steps(B)

    def together(self, *_: object) -> NoReturn:
        raise AssertionError("only plans for inference are recorded")

    trainers = together


def _threads() -> tuple[int, ...]:
    """The calling thread and the helpers; none where the system does not count CPU time by thread."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return ()
    return (threading.get_ident(), *(helper.ident for helper in HELPERS if helper.ident is not None))


def _cpu_ns(threads: Sequence[int]) -> list[int]:
    """The CPU time of each thread."""
    return [time.clock_gettime_ns(time.pthread_getcpuclockid(thread)) for thread in threads]
