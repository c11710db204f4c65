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
        sizes = lowering.graphs_of(count)
        bound = [BoundSteps(gpu, lowering.steps(size), state=copies[0]) for size in sizes]
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
        between = itertools.pairwise(builder.events)
        measured = [max(0.0, later.ms_since(earlier) * 1e3 - event_ns / 1e3) for earlier, later in between]
    estimates = [us for size in sizes for us in lowering.launch_estimates(size or count)]
    runs: dict[str, list[tuple[float, float]]] = {}
    for name, us, estimate in zip(builder.names, measured, estimates, strict=True):
        runs.setdefault(name, []).append((us, estimate))
    return tuple(
        LaunchTime(name, len(each) / count, sum(us for us, _ in each) / count, sum(us for _, us in each) / count)
        for name, each in runs.items()
    )
