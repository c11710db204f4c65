"""A recorded plan that times its launches with CUDA events in its graphs: they run one after the other."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter_ns

from onchip.runtime.cuda.backend import CudaBound
from onchip.runtime.cuda.bound_plan import MAX_GRAPHS, BoundRows, stream_key
from onchip.runtime.cuda.gpu import Event
from onchip.runtime.cuda.recorded_plan import RecordedPlan
from onchip.runtime.cuda.timed_copies import TimedCopies
from onchip.runtime.cuda.timed_graph import EventGraphBuilder, GpuClock, Launched, TimedGraph
from onchip.runtime.spans import Call, Recorder


class TimedPlan(RecordedPlan[Launched]):
    """In debug mode its launches are not checked."""

    def __init__(self, plain: CudaBound, recorder: Recorder) -> None:
        super().__init__(plain, recorder)
        self._clock = GpuClock(self.gpu)
        self._timed: OrderedDict[tuple[int, ...], TimedGraph] = OrderedDict()
        self._free_events: list[Event] = []  # for copies

    @contextmanager
    def _recording(self, B: int) -> Iterator[None]:
        launched = self._here.call = Launched(self._clock.now())
        begin = perf_counter_ns()
        try:
            yield
        finally:
            self._here.call = None
        end = perf_counter_ns()
        with self.gpu, self.gpu.relaxed(), self._lock:
            for graph in self._timed.values():
                if graph.launched is launched:
                    graph.read()
            spans = sorted(launched.spans, key=lambda span: span.begin_ns)
            count = self._recorder.sampling.stands_for(B)
            self._recorder.append(Call(begin, end, B, tuple(spans), tuple(launched.chunks), count=count))

    def _copies(self) -> TimedCopies:
        launched = self._here.call
        assert launched is not None  # inside `run`
        return TimedCopies(self.gpu, launched, self._track_of, self._free_events)

    def _record_chunk(
        self, call: Launched, bound: BoundRows, pointers: Mapping[str, int], B: int, stream: int, status: int
    ) -> None:
        key = (B, status, *stream_key(stream))
        call.chunks.append(B)
        with self.gpu.relaxed(), self._lock:  # a graph is updated, launched and read by one thread at a time
            if key not in self._timed:
                self._timed[key] = self._time(bound, pointers, B, stream, status)
            self._timed.move_to_end(key)
            self._timed[key].launch(pointers, stream, call)
            if len(self._timed) > MAX_GRAPHS:
                _, oldest = self._timed.popitem(last=False)
                oldest.read()

    def _time(self, bound: BoundRows, pointers: Mapping[str, int], B: int, stream: int, status: int) -> TimedGraph:
        builder = EventGraphBuilder(self.gpu)
        graph = self.graph(B, pointers, stream, status, builder)
        groups = [group.index for group, steps in bound.steps for _ in range(steps.node_count)]
        return TimedGraph(graph, builder, groups, self.gpu.event(), self._clock.event_ns, self._track_of(stream), B)
