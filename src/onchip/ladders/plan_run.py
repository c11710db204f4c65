"""A rung that runs the engine: a whole plan, of several groups, on rows that are on the GPU."""

from __future__ import annotations

import functools

import numpy as np

from onchip.ladders.device import calls_per_sample
from onchip.network.recipe import Array
from onchip.plan.plan import Plan
from onchip.runtime.cuda.backend import CudaBackend
from onchip.runtime.cuda.gpu import Buffer
from onchip.runtime.cuda.occupancy import occupancy


class PlanRun:
    """A plan of one input and one output over B rows. Calling it runs once and returns y.

    A plan of one kernel is timed like the other rungs (DeviceRun), replayed from a graph of many runs; this one is
    launched as the engine launches it, a graph per run.
    """

    def __init__(self, plan: Plan, x: Buffer, B: int) -> None:
        """plan  for this GPU, perhaps estimated for another number of rows"""
        self._bound, self._x, self._B = CudaBackend().bind(plan), x, B
        self._gpu, net = self._bound.gpu, plan.network
        ((source, _),), (target,) = net.inputs.items(), net.outputs
        self._type = net.types[target]
        self._y = self._gpu.reserve(B * self._type.row_bytes)
        self._pointers = {source: x.pointer, target: self._y.pointer}
        self._start, self._end = self._gpu.event(), self._gpu.event()

    @property
    def facts(self) -> dict[str, int | str]:
        """Resource use: the maximum over the launches (for occupancy, the minimum)."""
        launches = [
            (launch, function)
            for group, bound in self._bound.at(self._B).steps
            for launch, function in zip(group.lowering.at(self._B).launches, bound.functions, strict=True)
        ]
        return {
            "launches": len(launches),
            "registers": max(function.registers for _, function in launches),
            "shared bytes": max(f.static_shared_bytes + launch.config.shared_bytes for launch, f in launches),
            "occupancy": f"{100 * min(occupancy(*each, self._gpu.device.arch) for each in launches):.0f}%",
        }

    def __call__(self) -> Array:
        self._bound.enqueue(self._pointers, self._B, self._gpu.stream).wait()
        return self._gpu.download(self._y, np.empty((self._B, *self._type.row_shape), self._type.dtype))

    def sample_ms(self) -> float:
        """Milliseconds per run, launches included: the mean over back-to-back runs that take a few milliseconds."""
        return self._time(self._calls) / self._calls

    @functools.cached_property
    def _calls(self) -> int:
        self()  # from the second call on, the launches are one graph
        return calls_per_sample(self._time(1))

    def _time(self, calls: int) -> float:
        enqueue = functools.partial(self._bound.enqueue, self._pointers, self._B, self._gpu.stream)
        enqueue()  # keeps the GPU busy while the host enqueues the rest
        self._start.record()
        for _ in range(calls):
            enqueue()
        self._end.record()
        return self._end.ms_since(self._start)
