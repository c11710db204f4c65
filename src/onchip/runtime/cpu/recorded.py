"""A plan on the CPU that records when each of its groups ran, and on which thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from onchip.kernels.cpu.threading.launches import CompiledLaunch, Launch
from onchip.kernels.cpu.threading.threads import HELPERS, start_helpers
from onchip.kernels.cpu.threading.timed import CAPACITY, Run, TimedLaunch
from onchip.network.recipe import Array
from onchip.plan.step_info import StepInfo
from onchip.runtime.cpu.backend import CpuBound, Step
from onchip.runtime.cpu.chunks import Chunks
from onchip.runtime.cpu.quick_call import quick_call
from onchip.runtime.cpu.quotas import Quotas
from onchip.runtime.nvtx_ranges import named_range
from onchip.runtime.sampling import Turn
from onchip.runtime.spans import Call, Recorder, Span

_CPU_NS, _LONG_NS = 20_000_000, 200_000  # CPU time is counted this often at most, in calls that are longer than this


class _Pending(NamedTuple):
    """A call whose runs have not been collected."""

    begin_ns: int
    end_ns: int
    rows: int
    workers: int
    cpu_ns: tuple[int, ...]
    stands_for: int  # calls, itself included


class RecordedCpu:
    """Runs as the plain plan does, in one compiled call where that is possible, with a clock around each launch.

    Between two calls it does next to nothing: the threads that help would fall asleep.
    """

    checks_ids = CpuBound.checks_ids

    def __init__(self, plain: CpuBound, recorder: Recorder) -> None:
        self._recorder, self._lock = recorder, threading.Lock()
        recorder.collect = recorder.finish = self.collect
        recorder.sampling.begin()
        self._quotas = Quotas(recorder.sampling)
        self._timed: list[tuple[int, TimedLaunch]] = []  # each with its group
        self._runs: list[tuple[int, Run]] = []  # of launches that Python calls
        self._pending: list[_Pending] = []
        self._pending_runs = 0  # per launch and thread, at most
        self._plain = plain
        self._plain_quick_call: Callable[[tuple[Any, ...], Any], Any] | None = None  # if the engine uses one
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
        """As the plain plan; one recorded call at a time."""
        begin, turn = self._quotas.begin_ns(), self._quotas.turn(B)
        if turn is Turn.SKIP:
            self._plain.run(inputs, outputs, B)
            self._recorder.sampling.skipped(B)
        elif turn is Turn.TIME:
            begin, end = self._time_plain(begin, inputs, outputs, B)
            self._recorder.sampling.took(B, turn, begin, end)
        else:
            with named_range(f"{self._network}, {B:,} rows"):
                self._record(inputs, outputs, B)
            self._recorder.sampling.took(B, turn, begin, time.perf_counter_ns())
        self._quotas.grant(B)

    def _time_plain(
        self, begin: int, inputs: Mapping[str, Array], outputs: Mapping[str, Array], B: int
    ) -> tuple[int, int]:
        """Run a plain call; returns its begin, or that of the fast path that a plain call takes, and its end."""
        net = self._plain.plan.network
        if self._plain_quick_call is not None:
            rows, quick_begin = tuple(inputs[name] for name in net.inputs), time.perf_counter_ns()
            found, end = self._plain_quick_call(rows, None), time.perf_counter_ns()
            if found is not None:
                for name, result in zip(net.outputs, found if len(net.outputs) > 1 else (found,), strict=True):
                    outputs[name][...] = result
                return quick_begin, end
        self._plain.run(inputs, outputs, B)
        return begin, time.perf_counter_ns()

    def _record(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array], B: int) -> None:
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
            self._pending.append(_Pending(begin, end, B, workers, used, self._recorder.sampling.stands_for(B)))
            self._pending_runs += runs

    def collect(self) -> None:
        """Append the pending calls to the recorder."""
        self._quotas.count()
        with self._lock:
            self._collect()

    def _collect(self) -> None:
        runs = self._runs + [(group, run) for group, timed in self._timed for run in timed.take()]
        runs.sort(key=lambda each: each[1].begin_ns)
        at = 0
        for begin, end, rows, workers, cpu_ns, count in self._pending:
            spans = []
            while at < len(runs) and runs[at][1].begin_ns <= end:
                if runs[at][1].begin_ns >= begin:  # those of a call that failed are skipped
                    spans.append(self._span(*runs[at]))
                at += 1
            self._recorder.append(Call(begin, end, rows, tuple(spans), (), workers, cpu_ns, count))
        self._runs, self._pending, self._pending_runs = [], [], 0

    def _span(self, group: int, run: Run) -> Span:
        return Span(f"thread {run.worker}", self._labels[group], group, run.begin_ns, run.end_ns, run.rows)

    def run_like(self, x: Any) -> None:
        return None

    def quick_call(self) -> Callable[[tuple[Any, ...], Any], Any] | None:
        """Runs calls that are skipped; returns None for the others."""
        self._plain_quick_call = self._plain.quick_call()
        chunks = self._plain.chunks
        if chunks is None:
            return None
        within = Chunks(self._plain.plan, chunks.launches, chunks.threads, self._quotas.words)
        return quick_call(self._plain.plan, within)

    def wait(self) -> None:
        return

    def steps(self, B: int) -> tuple[StepInfo, ...]:
        return self._bound.steps(B)


def _threads() -> tuple[int, ...]:
    """The calling thread and the helpers; none where the system does not count CPU time by thread."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return ()
    return (threading.get_ident(), *(helper.ident for helper in HELPERS if helper.ident is not None))


def _cpu_ns(threads: Sequence[int]) -> list[int]:
    """The CPU time of each thread."""
    return [time.clock_gettime_ns(time.pthread_getcpuclockid(thread)) for thread in threads]
