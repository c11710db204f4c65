"""Where the time of a network's calls and trainings goes: per kernel, beside bytes, flop, floor and estimate."""

from __future__ import annotations

import contextlib
import functools
import statistics
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from onchip.errors import InputError
from onchip.measure.profile_training import TrainingProfile, summarise_trainings
from onchip.network.text import fitted_columns, plural, rate_text, size_text
from onchip.plan.plan import format_us
from onchip.plan.step_info import StepInfo, steps_of_chunks
from onchip.runtime import engine as engines
from onchip.runtime.engine import Engine
from onchip.runtime.sampling import LIMIT
from onchip.runtime.spans import COPY, MEMSET, Call, Recorder, Resources
from onchip.train import recording
from onchip.train.recording import TrainingRecorder

HEAD = ["kernel", "layers", "calls", "total", "mean", "p95", "share", "bytes", "flop", "rate", "of floor", "estimate"]
GPU_HEAD = ["launches", "registers", "shared", "occupancy"]
OVERLAP = 1.02  # kernels overlap if their times add up to so much more than the time in which any of them runs

_recording = threading.Lock()


@dataclass(frozen=True)
class KernelTime:
    """A group of the plan over all calls. Bytes, flop, floor and estimate are those of a mean call, in its chunks."""

    kernel: str
    layers: tuple[str, ...]
    calls: int
    total_us: float
    mean_us: float  # per call; where threads run different rows, of a thread
    p95_us: float
    share: float  # of all kernels' time
    nbytes: float
    flop: float
    bytes_per_s: float
    flop_per_s: float
    of_floor: float  # the floor divided by the mean time, at most 1: the rates behind it may be too low
    estimate_us: float
    launches: float  # per call, on a GPU
    resources: Resources

    def cells(self) -> list[str]:
        return [
            self.kernel, layers_text(self.layers), f"{self.calls:,}", format_us(self.total_us),
            format_us(self.mean_us), format_us(self.p95_us), f"{self.share:.1%}", size_text(round(self.nbytes)),
            f"{self.flop:.3g}", f"{rate_text(self.bytes_per_s, 'B')}, {rate_text(self.flop_per_s, 'flop')}",
            f"{self.of_floor:.0%}", format_us(self.estimate_us),
        ]  # fmt: skip

    def gpu_cells(self) -> list[str]:
        used = self.resources
        return [f"{self.launches:.3g}", str(used.registers), f"{used.shared_bytes:,} B", f"{used.occupancy:.0%}"]


@dataclass(frozen=True)
class CopyTime:
    """Copies of one kind, between host and GPU or into and out of pinned memory, over all calls. They overlap."""

    name: str
    copies: int
    total_us: float
    nbytes: int
    bytes_per_s: float  # while one runs

    @property
    def text(self) -> str:
        rate = f"{rate_text(self.bytes_per_s, 'B')} each"
        return f"{self.name}: {format_us(self.total_us)} in total, {size_text(self.nbytes)}, {rate}"


@dataclass(frozen=True)
class EngineProfile:
    """The recorded calls of one engine."""

    network: str
    chosen: str  # its device, and why
    where: str  # "rank 1 on host", of a job of several ranks
    rows: int  # of all calls
    calls: int
    recorded: int  # calls
    call_us: float  # mean time of a recorded call, on the host
    kernel_us: float  # of it, the time in which a kernel runs: where several overlap, it counts once
    threads: tuple[float, ...]  # CPU time of the calling thread and of each helper, as a share of the calls' time
    imbalance: float  # the busiest thread's CPU time divided by their mean; 0 if it is not counted
    kernels: tuple[KernelTime, ...]  # those with the most time first
    copies: tuple[CopyTime, ...]  # of host arrays, on a GPU
    clock: str  # on a GPU: what measured the times of kernels and copies
    lost: int  # calls that are left out: some of their times are missing
    # What a roofline needs: the device of the plan, and the most that it can do.
    device: str
    precision: str
    peak_flops: float
    bandwidth: float  # bytes/s of main memory
    cache_bandwidth: float

    @property
    def text(self) -> str:
        return self.fitted(1 << 30)

    def fitted(self, width: int) -> str:
        """The table, and what it leaves out, in lines of at most `width` characters."""
        lost = f"{plural(self.lost, 'call')} left out: some of their times are missing"
        if not self.calls:
            return f"{self.network} on {self.chosen}: no calls" + (f"; {lost}" if self.lost else "")
        on_gpu = self.chosen.startswith("cuda")
        where = f"{self.where}: " if self.where else ""
        head = HEAD + (GPU_HEAD if on_gpu else [])
        rows = [kernel.cells() + (kernel.gpu_cells() if on_gpu else []) for kernel in self.kernels]
        lines = [
            f"{where}{self.network} on {self.chosen}: {plural(self.calls, 'call')}, {plural(self.rows, 'row')}",
            fitted_columns(head, rows, width, right=range(2, len(head))),
            f"a recorded call takes {format_us(self.call_us)}: {format_us(self.kernel_us)} in kernels, "
            f"{format_us(self.call_us - self.kernel_us)} before, between and after them{self._overlap}",
        ]
        if self.recorded < self.calls:
            few = f"{self.recorded:,} of {self.calls:,} calls were recorded"
            lines.append(f"{few}, to keep recording below {LIMIT:.0%} of their time; totals are of all calls")
        if self.clock:
            lines.append(f"times of kernels by {self.clock}" + (f"; {lost}" if self.lost else ""))
        lines += [copy.text for copy in self.copies]
        if self.threads:
            used = ", ".join(f"{share:.0%}" for share in self.threads)
            lines.append(f"CPU time per thread, of the calls' time: {used}; busiest: {self.imbalance:.2f}x the mean")
        return "\n".join(lines)

    @property
    def _overlap(self) -> str:
        """Why the kernels' times may add up to more than the call."""
        added = sum(kernel.mean_us for kernel in self.kernels)
        if added <= OVERLAP * self.kernel_us:
            return ""
        return f"; kernels overlap: their times add up to {format_us(added)}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Profile:
    """What ran inside `with onchip.profile() as found:`. Print it; save_trace writes a timeline."""

    recorded: list[tuple[str, Recorder]] = field(default_factory=list)  # each engine's device, and its calls
    recorded_trainings: list[TrainingRecorder] = field(default_factory=list)

    @property
    def engines(self) -> tuple[EngineProfile, ...]:
        """One per engine that was called."""
        return tuple(summarise(*each) for each in self.recorded if each[1].calls or each[1].lost)

    @property
    def trainings(self) -> tuple[TrainingProfile, ...]:
        """One per kind of training: runs of the same network, device and kernel are added."""
        return summarise_trainings(self._begun())

    def add_ranks(self, name: str, others: Sequence[tuple[str, Recorder]]) -> None:
        """What other ranks recorded, on this one's clock.

        name  of this rank
        """
        for _, recorder in self.recorded:
            recorder.where = name
        self.recorded += others

    def __str__(self) -> str:
        return self.text

    @property
    def text(self) -> str:
        return self.fitted(1 << 30)

    def fitted(self, width: int) -> str:
        """The tables, trainings first, in lines of at most `width` characters."""
        tables = [each.fitted(width) for each in self.trainings] + [each.fitted(width) for each in self.engines]
        return "\n\n".join(tables) or "no calls were recorded"

    def to_dict(self) -> dict[str, Any]:
        return {
            "engines": [each.to_dict() for each in self.engines],
            "trainings": [each.to_dict() for each in self.trainings],
        }

    def save_trace(self, path: str | Path) -> None:
        """Write the timeline in Chrome's trace format: open it with https://ui.perfetto.dev."""
        from onchip.measure.trace import save_trace

        engines = [(chosen, recorder) for chosen, recorder in self.recorded if recorder.calls]
        save_trace(path, engines, self._begun())

    def _begun(self) -> list[TrainingRecorder]:
        return [training for training in self.recorded_trainings if training.plan is not None]


@contextlib.contextmanager
def profile() -> Iterator[Profile]:
    """Record when each kernel of an engine runs: with onchip.profile() as found: engine(x), then print(found).

    It records calls of all engines of this process, also of those that are created inside: so few that recording takes
    less than 3% of the time. Totals are of all calls. A recorded call returns the same bits; on a GPU without CUPTI its
    kernels run one after the other, and with arrays on a GPU it returns when it is done. Of a training
    that begins inside (fit, fit_many, estimators) it records the phases and the time of the steps; its results do not
    change.
    """
    found = Profile()

    def record(engine: Engine) -> None:
        recorder = Recorder(engine.plan)
        found.recorded.append((engine.chosen, recorder))
        engine.record(recorder)

    if not _recording.acquire(blocking=False):
        raise InputError("two profiles at a time", got="a profile inside another", expected="one", hint="leave one out")
    try:
        engines.ON_NEW.append(record)
        recording.ON_NEW.append(found.recorded_trainings.append)
        for engine in list(engines.ENGINES):
            record(engine)
        yield found
    finally:
        engines.ON_NEW.remove(record)
        recording.ON_NEW.clear()  # one profile at a time
        for engine in list(engines.ENGINES):
            engine.record(None)
        for _, recorder in found.recorded:
            recorder.finish()  # also of engines that are gone
        _recording.release()


def summarise(chosen: str, recorder: Recorder) -> EngineProfile:
    """The times of each group over all calls."""
    plan, calls = recorder.plan, recorder.calls
    counts = [call.count for call in calls]
    at = functools.cache(functools.partial(steps_of_chunks, plan))
    of_groups = [_times(call, len(plan.groups)) for call in calls]
    whole = sum(sum(times) * count for times, count in zip(of_groups, counts, strict=True)) or 1.0
    kernels = [
        _kernel_time(
            [times[i] for times in of_groups], [at(call.chunks or (call.rows,))[i] for call in calls], counts, whole,
            _mean([sum(span.group == i and span.name != MEMSET for span in call.spans) for call in calls], counts),
            recorder.resources.get(i, Resources()),
        )
        for i, group in enumerate(plan.groups if calls else ())
        if not group.claim.is_view or any(times[i] for times in of_groups)
    ]  # fmt: skip
    peak = plan.device.peak
    call_us = _mean([(call.end_ns - call.begin_ns) / 1e3 for call in calls], counts)
    threads = _threads(calls)
    return EngineProfile(
        plan.network.name, chosen, recorder.where, sum(call.rows * call.count for call in calls), sum(counts),
        len(calls), call_us, _mean([_kernel_us(call) for call in calls], counts), threads,
        max(threads) / statistics.fmean(threads) if any(threads) else 0.0,
        tuple(sorted(kernels, key=lambda kernel: -kernel.total_us)), _copy_times(calls), recorder.clock, recorder.lost,
        plan.device.name, plan.job.precision, peak.flops[plan.job.precision], peak.bandwidth, peak.cache_bandwidth,
    )  # fmt: skip


def _mean(values: Sequence[float], counts: Sequence[int]) -> float:
    return statistics.fmean(values, weights=counts) if values else 0.0


def _times(call: Call, groups: int) -> list[float]:
    """Microseconds of each group in a call: of the mean thread where threads run different rows.

    Launches of a group that overlap on a stream count once.
    """
    times, ends = [0.0] * groups, dict[tuple[str, int], int]()
    for span in call.spans:  # in the order in which they begin
        if span.group != COPY:
            end = ends.get((span.track, span.group), 0)
            times[span.group] += max(0, span.end_ns - max(span.begin_ns, end)) / 1e3 / call.workers
            ends[span.track, span.group] = max(span.end_ns, end)
    return times


def _kernel_us(call: Call) -> float:
    """Microseconds of the call in which a kernel runs, on any track."""
    total, end = 0, call.begin_ns
    for span in call.spans:  # in the order in which they begin
        if span.group != COPY:
            until = min(span.end_ns, call.end_ns)
            total += max(0, until - max(span.begin_ns, end))
            end = max(end, until)
    return total / 1e3


def _copy_times(calls: Sequence[Call]) -> tuple[CopyTime, ...]:
    """In the order in which a call begins them."""
    names = dict.fromkeys(span.name for call in calls for span in call.spans if span.group == COPY)
    found = []
    for name in names:
        spans = [(span, call.count) for call in calls for span in call.spans if span.name == name]
        total_us = sum((span.end_ns - span.begin_ns) / 1e3 * count for span, count in spans)
        nbytes = sum(span.nbytes * count for span, count in spans)
        copies = sum(count for _, count in spans)
        found.append(CopyTime(name, copies, total_us, nbytes, nbytes / total_us * 1e6 if total_us else 0.0))
    return tuple(found)


def _kernel_time(
    times: Sequence[float], steps: Sequence[StepInfo], counts: Sequence[int], whole_us: float, launches: float,
    resources: Resources,
) -> KernelTime:  # fmt: skip
    total, first = sum(us * count for us, count in zip(times, counts, strict=True)), steps[0]
    mean = total / sum(counts)
    nbytes, flop, floor, estimate = (
        _mean(values, counts)
        for values in zip(*((s.nbytes, s.flop, s.floor_us, s.estimate_us) for s in steps), strict=True)
    )
    seconds = mean / 1e6 or float("inf")
    return KernelTime(
        first.label, first.layers, sum(counts), total, mean, float(np.percentile(times, 95)), total / whole_us, nbytes,
        flop, nbytes / seconds, flop / seconds, min(1.0, floor / mean) if mean else 0.0, estimate, launches,
        resources,
    )  # fmt: skip


def _threads(calls: Sequence[Call]) -> tuple[float, ...]:
    """CPU time of each thread, as a share of the time of the calls in which it was counted."""
    calls = [call for call in calls if call.cpu_ns]
    most = max((len(call.cpu_ns) for call in calls), default=0)
    wall = sum(call.end_ns - call.begin_ns for call in calls) or 1
    used = [0] * most
    for call in calls:
        for i, ns in enumerate(call.cpu_ns):
            used[i] += ns
    return tuple(ns / wall for ns in used)


def layers_text(layers: Sequence[str]) -> str:
    return f"{layers[0]}..{layers[-1]}" if len(layers) > 1 else "".join(layers)
