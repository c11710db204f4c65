"""What the calls of an engine did: when each group of its plan ran, and on which thread or stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from onchip.plan.plan import Plan
from onchip.runtime.sampling import Sampling

MAX_CALLS = 100_000  # kept per engine
COPY = -1  # in place of a group
MEMSET = "memset"  # the name of a span that clears scratch memory


@dataclass(frozen=True, slots=True)
class Span:
    """Work on one track: a launch of a group of the plan, or a copy."""

    track: str  # "thread 0", "stream 1", "host thread MainThread"
    name: str  # of the kernel, as the plan or the compiler has it
    group: int  # index in the plan's groups; COPY: a copy
    begin_ns: int  # of time.perf_counter_ns, on every track
    end_ns: int
    rows: int  # of a launch
    nbytes: int = 0  # of a copy


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the engine, on its host thread."""

    begin_ns: int
    end_ns: int
    rows: int
    spans: tuple[Span, ...]
    chunks: tuple[int, ...] = ()  # rows of each, where the groups ran chunk by chunk; (): all rows at once
    workers: int = 1  # threads that ran different rows of the call, each through all groups
    cpu_ns: tuple[int, ...] = ()  # CPU time of the caller's thread and of each helper, where the system counts it
    count: int = 1  # calls that it stands for: itself, and those before it that were not recorded

    def shifted(self, ns: int) -> Call:
        """The same call, so much later."""
        if not ns:
            return self
        spans = (replace(span, begin_ns=span.begin_ns + ns, end_ns=span.end_ns + ns) for span in self.spans)
        return replace(self, begin_ns=self.begin_ns + ns, end_ns=self.end_ns + ns, spans=tuple(spans))


@dataclass(frozen=True, slots=True)
class Resources:
    """What the launches of a group use at most; of occupancy, the least. 0 where a device has no such thing."""

    registers: int = 0  # per thread
    shared_bytes: int = 0  # per block
    occupancy: float = 0.0  # share of an SM's warps


def count_calls(recorders: Iterable[Recorder]) -> tuple[int, int]:
    """Recorded calls, and all calls that they stand for."""
    calls = [call for recorder in recorders for call in recorder.calls]
    return len(calls), sum(call.count for call in calls)


class Recorder:
    """The calls of one engine, in order."""

    def __init__(self, plan: Plan, where: str = "") -> None:
        self.plan = plan
        self.where = where  # "rank 1 on host", of a job of several ranks
        self.sampling = Sampling()
        self.resources: dict[int, Resources] = {}  # by group, of a GPU
        # Puts calls that are not yet in `calls` there: to do so after each call would delay the next one.
        self.collect: Callable[[], None] = lambda: None
        self.finish: Callable[[], None] = lambda: None  # ends the recording
        self.clock = ""  # of a GPU: what measures its times
        self.lost = 0  # calls that are left out: their times are incomplete
        self._calls: list[Call] = []

    @property
    def calls(self) -> list[Call]:
        """The recorded calls. The last one of its rows also stands for later ones that were not recorded."""
        self.collect()
        for rows, count in self.sampling.take_unrecorded().items():
            at = next((i for i in reversed(range(len(self._calls))) if self._calls[i].rows == rows), None)
            if at is None:
                self.sampling.add_unrecorded(rows, count)
            else:
                self._calls[at] = replace(self._calls[at], count=self._calls[at].count + count)
        return self._calls

    def append(self, call: Call) -> None:
        """Add a call; from MAX_CALLS on it only counts."""
        if len(self._calls) < MAX_CALLS:
            self._calls.append(call)
        else:
            self.sampling.add_unrecorded(call.rows, call.count)
