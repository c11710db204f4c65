"""A plan on a GPU that appends calls to a recorder: the part that does not depend on how launches are timed."""

from __future__ import annotations

import abc
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from time import perf_counter_ns
from typing import Any, Generic, TypeVar

from onchip.network.recipe import Array
from onchip.runtime.arrays.adapters import Torch, kind_of
from onchip.runtime.arrays.calls import DeviceCalls
from onchip.runtime.backend import Run
from onchip.runtime.cuda.backend import CudaBound
from onchip.runtime.cuda.bound_plan import BoundRows, StreamKey, stream_key
from onchip.runtime.cuda.occupancy import occupancy
from onchip.runtime.cuda.status import Ticket
from onchip.runtime.nvtx_ranges import named_range
from onchip.runtime.sampling import Turn
from onchip.runtime.spans import Recorder, Resources

C = TypeVar("C")  # what is known of a call while it runs


class _ThreadCall(threading.local, Generic[C]):
    """The call that this thread records."""

    call: C | None = None


class RecordedPlan(CudaBound, abc.ABC, Generic[C]):
    """It shares the weights, kernels and status words of the plain plan, which runs the calls that are not recorded."""

    def __init__(self, plain: CudaBound, recorder: Recorder) -> None:
        super().__init__(plain.gpu, plain.plan, plain.groups)
        self.found, self._host_status = plain.found, plain._host_status
        self._plain, self._recorder = plain, recorder
        recorder.sampling.begin()
        self._here: _ThreadCall[C] = _ThreadCall()
        self._tracks: dict[StreamKey, str] = {}
        self._labels = ", ".join(self.plan.groups[group.index].claim.label for group in self.groups)

    def run(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array], B: int) -> None:
        sampling = self._recorder.sampling
        turn, begin = sampling.turn(B), perf_counter_ns()
        if turn is Turn.RECORD:
            with self._range_of(B), self._recording(B):
                super().run(inputs, outputs, B)
        else:
            self._plain.run(inputs, outputs, B)
        if turn is Turn.SKIP:
            sampling.skipped(B)
        else:
            sampling.took(B, turn, begin, perf_counter_ns())

    def run_like(self, x: object) -> Run | None:
        kind = kind_of(x, self.gpu)
        if kind is None:
            return None
        recorded, plain, sampling = DeviceCalls(kind, self), self._plain.run_like(x), self._recorder.sampling
        if plain is None or not isinstance(kind, Torch):
            return recorded
        refuses_graphs = kind.refuses_graphs

        def run(rows: Sequence[Any], out: Any = None) -> Any:
            """The plain plan launches graphs of its own for torch."""
            B = rows[0].shape[0] if rows[0].ndim else 0
            if not B or sampling.turn(B) is not Turn.SKIP or refuses_graphs():
                return recorded(rows, out)
            result = plain(rows, out)
            sampling.skipped(B)
            return result

        return run

    def enqueue(self, pointers: Mapping[str, int], B: int, stream: int) -> Ticket:
        """As the plain plan's, but a call that is recorded or timed begins when the stream is idle, and returns when it
        is done. A stream that the caller captures gets the plain plan's launches, and they are not recorded."""
        sampling = self._recorder.sampling
        with self.gpu:
            if self.gpu.is_capturing(stream):
                return self._plain.enqueue(pointers, B, stream)
            turn = sampling.turn(B)
            if turn is Turn.SKIP:
                ticket = self._plain.enqueue(pointers, B, stream)
                sampling.skipped(B)
                return ticket
            self.gpu.synchronise(stream)
            begin = perf_counter_ns()
            if turn is Turn.RECORD:
                with self._range_of(B), self._recording(B):
                    ticket = super().enqueue(pointers, B, stream)
                    self.gpu.synchronise(stream)
            else:
                ticket = self._plain.enqueue(pointers, B, stream)
                self.gpu.synchronise(stream)
            sampling.took(B, turn, begin, perf_counter_ns())
            return ticket

    def _range_of(self, B: int) -> AbstractContextManager[None]:
        return named_range(f"{self.plan.network.name}, {B:,} rows")

    @abc.abstractmethod
    def _recording(self, B: int) -> AbstractContextManager[None]:
        """Append a call of what this thread launches inside, and waits for; nothing if it raises."""

    @abc.abstractmethod
    def _record_chunk(
        self, call: C, bound: BoundRows, pointers: Mapping[str, int], B: int, stream: int, status: int
    ) -> None:
        """Launch a chunk of this call."""

    def _enqueue_chunk(self, bound: BoundRows, pointers: Mapping[str, int], B: int, stream: int, status: int) -> None:
        call = self._here.call
        assert call is not None  # the plain plan runs all others
        if not self._recorder.resources:
            self._recorder.resources.update(self._resources(bound, B))
        with named_range(self._labels):
            self._record_chunk(call, bound, pointers, B, stream, status)

    def _launch_chunk(self, bound: BoundRows, pointers: Mapping[str, int], B: int, stream: int, status: int) -> None:
        """As the plain plan does."""
        super()._enqueue_chunk(bound, pointers, B, stream, status)

    def _track_of(self, stream: int) -> str:
        return self._tracks.setdefault(stream_key(stream), f"stream {len(self._tracks) + 1}")

    def _resources(self, bound: BoundRows, B: int) -> Iterator[tuple[int, Resources]]:
        """Of every group, from its launches for B rows."""
        for group, steps in bound.steps:
            launches = list(zip(group.lowering.at(B).launches, steps.functions, strict=True))
            if launches:
                registers = max(function.registers for _, function in launches)
                shared_bytes = max(f.static_shared_bytes + launch.config.shared_bytes for launch, f in launches)
                least = min(occupancy(*each, self.gpu.device.arch) for each in launches)
                yield group.index, Resources(registers, shared_bytes, least)
