"""A plan's graph that records when each of its launches ran, on the clock of time.perf_counter_ns."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns

from onchip.runtime.cuda.gpu import Event, Gpu
from onchip.runtime.cuda.launches import Call, GraphBuilder
from onchip.runtime.cuda.plan_graph import PlanGraph
from onchip.runtime.spans import MEMSET, Span

_TRIES = 5  # round trips to the GPU: the shortest is the most accurate
_EVENT_NODES = 30  # of the graph that measures the time of one
# The driver returns times between events as float32 milliseconds: after a second, in steps of 60 ns.
_MAX_BASE_NS = 1_000_000_000


class EventGraphBuilder(GraphBuilder):
    """A graph whose launches run one after the other, with an event before the first one and after each."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__(gpu)
        self.events: list[Event] = []
        self.names: list[str] = []  # of what runs between two events
        self._new_event, self._last = gpu.event, list[int]()
        self.mark()

    def add(self, launch: Call, after: Sequence[int], overlaps: bool = True) -> int:
        """Add a launch after all earlier nodes. It does not overlap with the event before it."""
        return self._between(launch.name, super().add(launch, self._last))

    def clear(self, pointer: int, nbytes: int, after: Sequence[int]) -> int:
        return self._between(MEMSET, super().clear(pointer, nbytes, self._last))

    def mark(self) -> None:
        """Add an event after all earlier nodes."""
        self.events.append(self._new_event())
        self._last = [self.record(self.events[-1].handle, self._last)]

    def _between(self, name: str, node: int) -> int:
        self.names.append(name)
        self._last = [node]
        self.mark()
        return node


@dataclass(frozen=True, eq=False)
class Moment:
    """An event, and when it was on the host's clock."""

    event: Event
    ns: int

    def ns_at(self, later: Event) -> int:
        """The time of a later event; waits for it."""
        return self.ns + _ns_between(self.event, later)


class GpuClock:
    """Maps events to the host's clock."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.event_ns = self._measure_event()
        self._base = self._measure_now()

    def now(self) -> Moment:
        """A moment of the last second."""
        if perf_counter_ns() - self._base.ns > _MAX_BASE_NS:
            self._base = self._measure_now()
        return self._base

    def _measure_now(self) -> Moment:
        tries = []
        with self._gpu, self._gpu.relaxed():
            for _ in range(_TRIES):
                event, begin = self._gpu.event(), perf_counter_ns()
                event.record()
                event.wait()
                duration = perf_counter_ns() - begin
                tries.append((duration, Moment(event, begin + duration // 2)))
        return min(tries, key=lambda each: each[0])[1]

    def _measure_event(self) -> int:
        """The time from one event node to the next: part of what lies between the events around a launch."""
        with self._gpu, self._gpu.relaxed():
            builder = EventGraphBuilder(self._gpu)
            for _ in range(_EVENT_NODES):
                builder.mark()
            graph = builder.finish(builder.events)
            for _ in range(2):  # the first launch takes longer
                graph.launch()
                self._gpu.synchronise()
            return round(statistics.median(itertools.starmap(_ns_between, itertools.pairwise(builder.events))))


@dataclass(eq=False)
class Launched:
    """What a call launched, as far as it has been read."""

    base: Moment
    chunks: list[int] = field(default_factory=list)  # rows of each
    spans: list[Span] = field(default_factory=list)


class TimedGraph:
    """The launches for one batch size on one stream, timed one launch of the graph at a time. Not thread-safe."""

    def __init__(
        self, graph: PlanGraph, builder: EventGraphBuilder, groups: Sequence[int], done: Event, event_ns: int,
        track: str, rows: int,
    ) -> None:  # fmt: skip
        """builder   that the graph was built with
        groups    the plan's group of each of the builder's names
        done      an event of this graph's own
        event_ns  subtracted from each time
        """
        self._graph, self._events, self._done, self._event_ns = graph, builder.events, done, event_ns
        self._names, self._track, self._rows = list(zip(builder.names, groups, strict=True)), track, rows
        self.launched: Launched | None = None  # the call whose launches have not been read

    def launch(self, pointers: Mapping[str, int], stream: int, launched: Launched) -> None:
        """Launch for a call, with the caller's arrays at these addresses; earlier launches are read first."""
        self.read()
        self._graph.point(pointers)
        self._graph.launch(stream)
        self._done.record(stream)
        self.launched = launched

    def read(self) -> None:
        """Wait for the last launch and append its spans to its call, once."""
        launched, self.launched = self.launched, None
        if launched is None:
            return
        self._done.wait()  # an event of the graph may still be the one of the launch before
        end = launched.base.ns_at(self._events[0])
        for (name, group), (earlier, later) in zip(self._names, itertools.pairwise(self._events), strict=True):
            duration = _ns_between(earlier, later)
            end += duration
            begin = end - max(0, duration - self._event_ns)
            launched.spans.append(Span(self._track, name, group, begin, end, self._rows))


def _ns_between(earlier: Event, later: Event) -> int:
    return round(1e6 * later.ms_since(earlier))
