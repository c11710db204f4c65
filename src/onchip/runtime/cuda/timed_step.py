"""The times of the launches of a network with state on a GPU; the state stays as it was."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping

from onchip.errors import DeviceError
from onchip.runtime.cuda.bound_plan import BoundPlan
from onchip.runtime.cuda.gpu import Buffer, Gpu
from onchip.runtime.cuda.timed_graph import EventGraphBuilder, GpuClock

_RUNS = 6  # the first one does not count: it takes longer


def time_groups(
    gpu: Gpu, bound: BoundPlan, pointers: Mapping[str, int], B: int, changing: Mapping[str, Buffer]
) -> list[tuple[int, float]]:
    """Microseconds of every launch over B rows, one after the other, with its group's index in the plan. Nothing if
    there is no memory for a copy of the state.

    pointers  of the network's inputs and outputs
    changing  the state that runs replace
    """
    with gpu, gpu.relaxed():
        try:
            copies = {name: gpu.reserve(buffer.nbytes) for name, buffer in changing.items()}
        except DeviceError:
            return []
        for name, buffer in changing.items():
            gpu.copy(copies[name].pointer, buffer.pointer, buffer.nbytes, gpu.stream)
        event_us, builder = GpuClock(gpu).event_ns / 1e3, EventGraphBuilder(gpu)
        status = bound.found.pointer(gpu.stream, 0) if bound.found is not None else 0
        graph, runs = bound.graph(B, pointers, gpu.stream, status, builder), list[list[float]]()
        for _ in range(_RUNS):
            graph.launch(gpu.stream)
            gpu.synchronise()
            runs.append([1e3 * later.ms_since(earlier) for earlier, later in itertools.pairwise(builder.events)])
        for name, buffer in changing.items():
            gpu.copy(buffer.pointer, copies[name].pointer, buffer.nbytes, gpu.stream)
        gpu.synchronise()
    times = (max(0.0, statistics.median(each) - event_us) for each in zip(*runs[1:], strict=True))
    groups = (group.index for group, steps in bound.bind(B).steps for _ in range(steps.node_count))
    return list(zip(groups, times, strict=True))
