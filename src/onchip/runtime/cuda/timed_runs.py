"""The times of the launches of a training step, measured on a copy of the state: the training stays the same."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from onchip.errors import DeviceError
from onchip.kernels.cuda.common.program import Steps
from onchip.kernels.cuda.common.training import PHASE_CLOCKS, PROGRESS, TrainingLowering
from onchip.kernels.training import LaunchTime
from onchip.network.recipe import Array
from onchip.runtime.cuda.bound_steps import BoundSteps
from onchip.runtime.cuda.gpu import BufferPart, Gpu
from onchip.runtime.cuda.run_memory import Memory
from onchip.runtime.cuda.timed_graph import EventGraphBuilder, GpuClock

_MAX_STEPS, _MAX_PERSISTENT_STEPS = 16, 1024  # a persistent kernel loads its weights once per launch
_RUNS = 2  # the last one counts: the first launch of a graph takes longer


def time_launches(
    gpu: Gpu, lowering: TrainingLowering, stream: int, memories: Sequence[Memory], rows: Sequence[int]
) -> tuple[LaunchTime, ...]:
    """Run some steps of the orders that are on the GPU, one launch at a time; nothing if a copy does not fit there.

    memories  of the networks, parts of one buffer and data that the steps only read
    rows      per network, of its first order; 0: it idles
    """
    most = _MAX_PERSISTENT_STEPS if lowering.is_persistent else _MAX_STEPS
    count = min(most, *(-(-each // lowering.batch) for each in rows if each))
    sizes = lowering.graphs_of(count)
    steps = [lowering.steps(size) for size in sizes]
    last_rows = [min(each, count * lowering.batch) for each in rows]
    profiled, clock_shape = steps, (0, 0)
    if lowering.is_persistent:
        (whole,) = steps
        counting, clock_shape = lowering.with_phase_clocks(whole)
        profiled = [counting]
    try:
        copy = _StateCopy(gpu, stream, memories, last_rows, clock_shape)
    except DeviceError:
        return ()
    estimates = [us for size in sizes for us in lowering.launch_estimates(size or count)]
    runs: dict[str, list[tuple[float, float]]] = {}
    for (name, us), estimate in zip(copy.time(steps), estimates, strict=True):
        runs.setdefault(name, []).append((us, estimate))
    launches = tuple(
        LaunchTime(name, len(each) / count, sum(us for us, _ in each) / count, sum(us for _, us in each) / count)
        for name, each in runs.items()
    )
    if not lowering.is_persistent:
        return launches
    (launch,) = launches
    ((_, us),) = copy.time(profiled)
    return (replace(launch, phases=lowering.phases(copy.phase_clocks(), launch.us), profiled_us=us / count),)


class _StateCopy:
    """A copy of the networks' memory, and phase clocks."""

    def __init__(
        self, gpu: Gpu, stream: int, memories: Sequence[Memory], last_rows: Sequence[int], clock_shape: tuple[int, int]
    ) -> None:
        """last_rows  per network: the end of the rows that its steps train on"""
        self._gpu, self._stream, self._last_rows = gpu, stream, last_rows
        self._clocks = np.zeros(clock_shape, np.uint32)
        self._source = next(part.whole for part in memories[0].values() if isinstance(part, BufferPart))
        self._copy = gpu.reserve(self._source.nbytes + self._clocks.nbytes)
        self._memories = [
            {name: BufferPart(self._copy, part.offset, part.nbytes) if isinstance(part, BufferPart) else part
             for name, part in memory.items()}
            for memory in memories
        ]  # fmt: skip
        self._on_gpu = BufferPart(self._copy, self._source.nbytes, self._clocks.nbytes)

    def time(self, steps: Sequence[Steps]) -> list[tuple[str, float]]:
        """Run the steps one launch at a time; returns each launch's kernel and its time in us."""
        gpu, state = self._gpu, {**self._memories[0], PHASE_CLOCKS: self._on_gpu}
        with gpu, gpu.relaxed():
            event_us, builder = GpuClock(gpu).event_ns / 1e3, EventGraphBuilder(gpu)
            bound = [BoundSteps(gpu, each, state=state) for each in steps]
            for each in bound:
                each.add_to(builder, (), (), 0)
            graph = builder.finish(bound)
            for _ in range(_RUNS):
                self._reset()
                graph.launch(self._stream)
                gpu.synchronise(self._stream)
            between = itertools.pairwise(builder.events)
            times = [max(0.0, later.ms_since(earlier) * 1e3 - event_us) for earlier, later in between]
        return list(zip(builder.names, times, strict=True))

    def phase_clocks(self) -> Array:
        """Those of the last launch."""
        return self._gpu.download(self._on_gpu, self._clocks, self._stream)

    def _reset(self) -> None:
        self._gpu.copy(self._copy.pointer, self._source.pointer, self._source.nbytes, self._stream)
        for memory, last in zip(self._memories, self._last_rows, strict=True):
            self._gpu.write(memory[PROGRESS], np.array([0, last], np.int64), self._stream)  # first step, last row
        if self._clocks.size:
            self._gpu.clear(self._on_gpu.pointer, self._clocks.nbytes, self._stream)
