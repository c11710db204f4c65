"""The times of the launches of a training step, measured on a copy of the state: the training stays the same."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from onchip.errors import DeviceError
from onchip.kernels.cuda.train.large_batch.launches import TrainLowering
from onchip.kernels.training import LaunchTime
from onchip.runtime.cuda.bound_steps import BoundSteps
from onchip.runtime.cuda.gpu import BufferPart, Gpu
from onchip.runtime.cuda.timed_graph import EventGraphBuilder, GpuClock
from onchip.runtime.cuda.train_memory import Memory

_MAX_STEPS = 16
_RUNS = 2  # the last one counts: the first launch of a graph takes longer


def time_launches(
    gpu: Gpu, lowering: TrainLowering, stream: int, memories: Sequence[Memory], rows: Sequence[int]
) -> tuple[LaunchTime, ...]:
    """Run a few steps of the orders that are on the GPU, one launch at a time; nothing if a copy does not fit there.

    memories  of the networks, parts of one buffer and data that the steps only read
    rows      per network, of its first order; 0: it idles
    """
    count = min(_MAX_STEPS, *(-(-each // lowering.batch) for each in rows if each))
    whole = next(part.whole for part in memories[0].values() if isinstance(part, BufferPart))
    try:
        copy = gpu.reserve(whole.nbytes)
    except DeviceError:
        return ()
    copies = [
        {name: BufferPart(copy, part.offset, part.nbytes) if isinstance(part, BufferPart) else part
         for name, part in memory.items()}
        for memory in memories
    ]  # fmt: skip
    with gpu, gpu.relaxed():
        event_ns, builder = GpuClock(gpu).event_ns, EventGraphBuilder(gpu)
        bound = [BoundSteps(gpu, lowering.steps(size), state=copies[0]) for size in lowering.graphs_of(count)]
        for steps in bound:
            steps.add_to(builder, (), (), 0)
        graph = builder.finish(bound)
        for _ in range(_RUNS):
            gpu.copy(copy.pointer, whole.pointer, whole.nbytes, stream)
            for memory, each in zip(copies, rows, strict=True):
                progress = np.array([0, min(each, count * lowering.batch)], np.int64)  # the next step, and the last row
                gpu.write(memory["progress"], progress, stream)
            graph.launch(stream)
            gpu.synchronise(stream)
        times: dict[str, list[float]] = {}
        for name, (earlier, later) in zip(builder.names, itertools.pairwise(builder.events), strict=True):
            times.setdefault(name, []).append(max(0.0, later.ms_since(earlier) * 1e3 - event_ns / 1e3))
    return tuple(LaunchTime(name, len(us) / count, sum(us) / count) for name, us in times.items())
