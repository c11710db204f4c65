"""Shared by all GPU rungs: device-resident rows, sequences of launches, and timing by CUDA events."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np

from onchip.kernels.cuda.common.program import Budget, Instance, KernelLaunch, LaunchConfig, Program, Steps
from onchip.network.recipe import Array
from onchip.plan.device import Device
from onchip.runtime.cuda.bound_steps import BoundSteps
from onchip.runtime.cuda.gpu import Buffer, Gpu
from onchip.runtime.cuda.launches import Graph
from onchip.runtime.cuda.occupancy import occupancy

_SAMPLE_MS, _MAX_CALLS = 5.0, 200
KERNELS = Path(__file__).parent / "cuda"
THREADS = 256  # per block, in most kernels


class DeviceRows:
    """Rows on the host and, uploaded once per dtype on first use, on the GPU; all rungs share them."""

    def __init__(self, host: Array) -> None:
        self.host = host  # (B, ...) float32
        self._buffers: dict[str, Buffer] = {}

    def __len__(self) -> int:
        return len(self.host)

    def __getitem__(self, rows: slice) -> DeviceRows:
        host = self.host[rows]
        return self if len(host) == len(self) else DeviceRows(host)

    def on(self, gpu: Gpu, dtype: str) -> Buffer:
        if dtype not in self._buffers:
            self._buffers[dtype] = gpu.upload(self.host.astype(dtype, copy=False))
        return self._buffers[dtype]


class DeviceRun:
    """One run of a rung, a sequence of launches. Calling it runs once and returns y."""

    def __init__(
        self, gpu: Gpu, steps: Steps, x: Buffer, weights: Mapping[str, Buffer], shape: tuple[int, ...], dtype: str,
        state: Mapping[str, Buffer] | None = None,
    ) -> None:  # fmt: skip
        """shape, dtype: of y, row-major."""
        self._gpu, self._steps, self._x, self._shape, self._dtype = gpu, steps, x, shape, dtype
        self._operands = weights, state
        self._bound = BoundSteps(gpu, steps, *self._operands)
        self._y = gpu.allocate(math.prod(shape) * np.dtype(dtype).itemsize)
        self._scratch = gpu.reserve(steps.scratch_bytes)
        self._start, self._end = gpu.event(), gpu.event()

    @property
    def facts(self) -> dict[str, int | str]:
        """Launches, and the resources of the kernel that takes the most time."""
        heaviest = max(self.kernels, key=lambda kernel: kernel["ms"])
        resources = {name: heaviest[name] for name in ("registers", "shared bytes", "occupancy")}
        return {"launches": len(self._steps.launches), **resources}

    @functools.cached_property
    def kernels(self) -> tuple[dict[str, Any], ...]:
        """Every kernel, in the order of their first launches: launches per run, time and resources."""
        found: dict[tuple[str, int, int], dict[str, Any]] = {}
        for launch, function, ms in zip(self._steps.launches, self._bound.functions, self._launch_ms(), strict=True):
            threads = math.prod(launch.config.block)
            kernel = found.setdefault((function.name, threads, launch.config.shared_bytes), {
                "kernel": function.name, "launches": 0, "ms": 0.0, "threads": threads,
                "registers": function.registers,
                "shared bytes": function.static_shared_bytes + launch.config.shared_bytes,
                "occupancy": f"{100 * occupancy(launch, function, self._gpu.device.arch):.0f}%",
            })  # fmt: skip
            kernel["launches"] += 1
            kernel["ms"] += ms
        return tuple({**kernel, "ms": float(f"{kernel['ms']:.4g}")} for kernel in found.values())

    def _launch_ms(self) -> list[float]:
        """The time of each launch, gaps before it included: enough to tell the heavy kernels from the light ones.

        The launches run one after the other, also where they have branches: the time of concurrent ones overlaps.
        """
        launches = tuple(dataclasses.replace(launch, after=None) for launch in self._steps.launches)
        in_order = BoundSteps(self._gpu, dataclasses.replace(self._steps, launches=launches), *self._operands)
        events = [self._start]

        def record(stream: int) -> None:
            events.append(self._gpu.event())
            events[-1].record(stream)

        self()  # the first launch of a kernel takes longer
        self._restore()
        self._start.record()
        in_order.enqueue(*self._pointers, self._gpu.stream, record)
        return [later.ms_since(earlier) for earlier, later in itertools.pairwise(events)]

    def __call__(self) -> Array:
        self._enqueue(self._gpu.stream)
        return self._gpu.download(self._y, np.empty(self._shape, self._dtype))

    def _enqueue(self, stream: int, calls: int = 1) -> None:
        for _ in range(calls):
            self._bound.enqueue(*self._pointers, stream)

    @property
    def _pointers(self) -> tuple[list[int], list[int], int]:
        """Of x, y and scratch."""
        return [self._x.pointer], [self._y.pointer], self._scratch.pointer

    def _restore(self) -> None:
        """Undo what earlier runs changed, before a timed one; a run that trains overrides this."""

    def sample_ms(self) -> float:
        """Milliseconds per run, launches included: the mean over back-to-back runs that take a few milliseconds."""
        graph, calls = self._graph
        self._restore()
        return self._time(graph) / calls

    @functools.cached_property
    def _graph(self) -> tuple[Graph, int]:
        once = self._time(self._gpu.capture(self._enqueue))
        calls = calls_per_sample(once)
        return self._gpu.capture(functools.partial(self._enqueue, calls=calls)), calls

    def _time(self, graph: Graph) -> float:
        graph.launch()  # keeps the GPU busy while the host enqueues the rest
        self._start.record()
        graph.launch()
        self._end.record()
        return self._end.ms_since(self._start)


def calls_per_sample(once_ms: float) -> int:
    """Runs per sample, so that a sample takes a few milliseconds."""
    return min(max(round(_SAMPLE_MS / max(once_ms, 1e-6)), 1), _MAX_CALLS)


def grid_1d(blocks: int, threads: int = THREADS) -> LaunchConfig:
    return LaunchConfig((blocks, 1, 1), (threads, 1, 1), 0)


def cover(count: int, threads: int = THREADS) -> LaunchConfig:
    """A thread per element."""
    return grid_1d(-(-count // threads), threads)


class CudaKernels(Protocol):
    """A rung with its own kernels."""

    name: ClassVar[str]
    max_registers: ClassVar[int]  # per thread

    @classmethod
    def programs(cls) -> tuple[Program, ...]: ...


def rung_instances(rungs: Iterable[type[CudaKernels]]) -> tuple[Instance, ...]:
    """Every kernel of the rungs, for make check-kernels, which compiles but does not launch them."""
    kernels = [(rung, program) for rung in rungs for program in rung.programs()]
    return tuple(
        Instance(f"{rung.name}: {program.name_expression}", _one_block(program, Budget(rung.max_registers)))
        for rung, program in kernels
    )


def _one_block(program: Program, budget: Budget) -> Callable[[Device], KernelLaunch]:
    return lambda device: KernelLaunch(program, grid_1d(1), (), budget)
