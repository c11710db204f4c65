"""A plan on a GPU that appends its calls to a recorder: the part that does not depend on how launches are timed."""

from __future__ import annotations

import abc
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Generic, TypeVar

from onchip.network.recipe import Array
from onchip.runtime.arrays.adapters import kind_of
from onchip.runtime.arrays.calls import DeviceCalls, Run
from onchip.runtime.cuda.backend import CudaBound
from onchip.runtime.cuda.bound_plan import BoundRows, StreamKey, stream_key
from onchip.runtime.cuda.occupancy import occupancy
from onchip.runtime.cuda.status import Ticket
from onchip.runtime.nvtx_ranges import named_range
from onchip.runtime.spans import Recorder, Resources

C = TypeVar("C")  # what is known of a call while it runs


class _ThreadCall(threading.local, Generic[C]):
    """The call that this thread records."""

    call: C | None = None


class RecordedPlan(CudaBound, abc.ABC, Generic[C]):
    """It shares the weights and kernels of the plan that it was made from."""

    def __init__(self, plain: CudaBound, recorder: Recorder) -> None:
        super().__init__(plain.gpu, plain.plan, plain.groups)
        self._recorder = recorder
        self._here: _ThreadCall[C] = _ThreadCall()
        self._tracks: dict[StreamKey, str] = {}
        self._labels = ", ".join(self.plan.groups[group.index].claim.label for group in self.groups)

    def run(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array], B: int) -> None:
        with self._range_of(B), self._recording(B):
            super().run(inputs, outputs, B)

    def run_like(self, x: object) -> Run | None:
        kind = kind_of(x, self.gpu)  # not device_run: for torch it launches graphs of its own
        return DeviceCalls(kind, self) if kind is not None else None

    def enqueue(self, pointers: Mapping[str, int], B: int, stream: int) -> Ticket:
        """As the plain plan's, but returns when the launches are done. A stream that the caller captures gets the plain
        plan's launches, and they are not recorded."""
        with self.gpu:
            if self.gpu.is_capturing(stream):
                return super().enqueue(pointers, B, stream)
            with self._range_of(B), self._recording(B):
                ticket = super().enqueue(pointers, B, stream)
                self.gpu.synchronise(stream)
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
        if call is None:  # the caller captures the stream
            self._launch_chunk(bound, pointers, B, stream, status)
            return
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
