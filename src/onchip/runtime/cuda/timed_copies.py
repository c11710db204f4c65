"""The copies of a recorded call over host arrays, on the clock of time.perf_counter_ns."""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

from onchip.network.recipe import Array
from onchip.runtime.cuda.gpu import Event, Gpu
from onchip.runtime.cuda.timed_graph import Launched
from onchip.runtime.spans import COPY, Span

TO_GPU, TO_HOST = "copy to the GPU", "copy to the host"
INTO_PINNED, OUT_OF_PINNED = "copy into pinned memory", "copy out of pinned memory"


class HostCopies(abc.ABC):
    """Appends the copies of one call to its spans. Its host copies may run on any thread."""

    def __init__(self, spans: list[Span]) -> None:
        self._spans = spans

    def copy_in(self, target: Array, source: Array) -> None:
        """A copy into pinned memory, by the calling thread."""
        self._copy(INTO_PINNED, target, source)

    def copy_out(self, target: Array, source: Array) -> None:
        self._copy(OUT_OF_PINNED, target, source)

    def _copy(self, name: str, target: Array, source: Array) -> None:
        begin = perf_counter_ns()
        target[...] = source
        end = perf_counter_ns()
        track = f"host thread {threading.current_thread().name}"
        self._spans.append(Span(track, name, COPY, begin, end, 0, target.nbytes))

    @abc.abstractmethod
    def mark(self, stream: int) -> Any:
        """Before a copy is put on the stream: what `enqueued` needs."""

    @abc.abstractmethod
    def enqueued(self, name: str, nbytes: int, before: Any, stream: int) -> None:
        """A copy was put on the stream, after this mark."""

    @abc.abstractmethod
    def read(self, stream: int) -> None:
        """The stream has been waited for."""


class TimedCopies(HostCopies):
    """With events before and after each copy between host and GPU."""

    def __init__(self, gpu: Gpu, launched: Launched, track_of: Callable[[int], str], free_events: list[Event]) -> None:
        """track_of     the track of a stream
        free_events  those of earlier calls, reused
        """
        super().__init__(launched.spans)
        self._gpu, self._launched, self._track_of, self._free = gpu, launched, track_of, free_events
        # By stream: copies with the events before and after each, until the stream has been waited for.
        self._in_flight: dict[int, list[tuple[str, int, Event, Event]]] = {}

    def mark(self, stream: int) -> Event:
        with self._gpu.relaxed():
            event = self._free.pop() if self._free else self._gpu.event()
        event.record(stream)
        return event

    def enqueued(self, name: str, nbytes: int, before: Event, stream: int) -> None:
        self._in_flight.setdefault(stream, []).append((name, nbytes, before, self.mark(stream)))

    def read(self, stream: int) -> None:
        for name, nbytes, before, after in self._in_flight.pop(stream, ()):
            with self._gpu.relaxed():
                times = self._launched.base.ns_at(before), self._launched.base.ns_at(after)
            self._spans.append(Span(self._track_of(stream), name, COPY, *times, 0, nbytes))
            self._free += (before, after)
