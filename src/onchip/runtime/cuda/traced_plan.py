"""A recorded plan whose launches are the plain plan's: CUPTI notes when each kernel and copy ran."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter_ns

from onchip.runtime.cuda.activities import Activities, Copy, Launch, Node
from onchip.runtime.cuda.backend import CudaBound
from onchip.runtime.cuda.bound_plan import MAX_CALLS, BoundRows
from onchip.runtime.cuda.recorded_plan import RecordedPlan
from onchip.runtime.cuda.timed_copies import HostCopies
from onchip.runtime.spans import MEMSET, Call, Recorder, Span

MAX_BYTES = 64 << 20  # of records that are kept: Python takes about a second to read them


@dataclass(eq=False)
class TracedCall:
    """A call whose activities have not been read."""

    rows: int
    begin_ns: int
    end_ns: int = 0
    count: int = 1
    spans: list[Span] = field(default_factory=list)  # of the host
    work: list[Launch | Copy] = field(default_factory=list)
    was_incomplete: bool = False  # when the activities were read the last time

    def whole(self, activities: Activities, ahead_ns: int) -> Call | None:
        """The call with its spans; None if an activity is missing."""
        spans = list(self.spans)
        for work in self.work:
            found = work.spans(activities.of(work.tag), ahead_ns)
            if found is None:
                return None
            spans += found
        spans.sort(key=lambda span: span.begin_ns)
        chunks = tuple(work.rows for work in self.work if isinstance(work, Launch))
        return Call(self.begin_ns, self.end_ns, self.rows, tuple(spans), chunks, count=self.count)


class TracedCopies(HostCopies):
    """Copies between host and GPU have an id each."""

    def __init__(self, call: TracedCall, track_of: Callable[[int], str], activities: Activities) -> None:
        """track_of  the track of a stream"""
        super().__init__(call.spans)
        self._call, self._track_of, self._activities = call, track_of, activities

    def mark(self, stream: int) -> int:
        return self._activities.push()

    def enqueued(self, name: str, nbytes: int, before: int, stream: int) -> None:
        self._activities.pop()
        self._call.work.append(Copy(before, self._track_of(stream), name, nbytes))

    def read(self, stream: int) -> None:
        return


class TracedPlan(RecordedPlan[TracedCall]):
    """Activities are read when the recorder's calls are: to read them after each call would delay the next one."""

    def __init__(self, plain: CudaBound, recorder: Recorder, activities: Activities) -> None:
        """activities  that have begun; the recorder's `finish` ends them"""
        super().__init__(plain, recorder)
        self._activities, self._is_ended = activities, False
        self._pending: deque[TracedCall] = deque()
        self._collecting = threading.Lock()
        self._nodes: dict[int, Sequence[Node]] = {}  # by rows
        recorder.collect, recorder.finish = self.collect, self.finish

    @contextmanager
    def _recording(self, B: int) -> Iterator[None]:
        call = self._here.call = TracedCall(B, perf_counter_ns())
        try:
            yield
        finally:
            self._here.call = None
        call.end_ns, call.count = perf_counter_ns(), self._recorder.sampling.stands_for(B)
        if self._is_ended:
            self._recorder.lost += call.count
            return
        self._pending.append(call)
        if self._activities.nbytes > MAX_BYTES:
            self.collect()

    def collect(self) -> None:
        """Append the calls to the recorder that are complete. One that is incomplete twice is lost."""
        with self._collecting:
            if not self._is_ended:
                self._collect()

    def finish(self) -> None:
        """Append what is complete, and record no more."""
        with self._collecting:
            if not self._is_ended:
                self._collect()
                self._is_ended = True
                self._recorder.lost += sum(call.count for call in self._pending)
                self._activities.end()

    def _collect(self) -> None:
        count, done = len(self._pending), set[int]()  # other threads may append more
        if not count:
            return
        ahead_ns = self._activities.read()
        for _ in range(count):
            call = self._pending.popleft()
            whole = call.whole(self._activities, ahead_ns)
            if whole is None and not call.was_incomplete:
                call.was_incomplete = True
                self._pending.append(call)
                continue
            done |= {work.tag for work in call.work}
            if whole is not None:
                self._recorder.append(whole)
            else:
                self._recorder.lost += call.count
        self._activities.forget(done)

    def _copies(self) -> TracedCopies:
        call = self._here.call
        assert call is not None  # inside `run`
        return TracedCopies(call, self._track_of, self._activities)

    def _record_chunk(
        self, call: TracedCall, bound: BoundRows, pointers: Mapping[str, int], B: int, stream: int, status: int
    ) -> None:
        with self._activities.tagged() as tag:
            self._launch_chunk(bound, pointers, B, stream, status)
        call.work.append(Launch(tag, self._track_of(stream), B, self._nodes_of(bound, B)))

    def _nodes_of(self, bound: BoundRows, B: int) -> Sequence[Node]:
        if B not in self._nodes:
            if len(self._nodes) >= MAX_CALLS:
                self._nodes.clear()
            nodes: list[Node] = []
            for group, steps in bound.steps:
                if steps.node_count > len(steps.functions):
                    nodes.append(Node("", MEMSET, group.index))
                nodes += [Node(function.entry, function.name, group.index) for function in steps.functions]
            self._nodes[B] = tuple(nodes)
        return self._nodes[B]
