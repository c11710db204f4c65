"""What rungs on a GPU share: rows that stay on the device, runs of launches, and the device's own clock."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np

from onchip.kernels.cuda.program import Budget, Fixed, Instance, LaunchConfig, Program
from onchip.plan.device import Device
from onchip.runtime.gpu import Buffer, Function, Gpu, Graph
from onchip.spec.recipe import Array

# Warps that a multiprocessor holds at the most (CUDA C++ programming guide, technical specifications).
_WARPS = {"sm_80": 64, "sm_86": 48, "sm_89": 48, "sm_90a": 64, "sm_100": 64, "sm_120": 48}
_SAMPLE_MS, _MAX_CALLS = 5.0, 200
KERNELS = Path(__file__).parent / "cuda"
THREADS = 256  # of a block of most kernels there


class DeviceRows:
    """Rows on the host and, once a rung asks, on the GPU in its precision, where all rungs share them."""

    def __init__(self, host: Array) -> None:
        self.host = host  # (B, ...) float32
        self._there: dict[str, Buffer] = {}

    def __len__(self) -> int:
        return len(self.host)

    def __getitem__(self, rows: slice) -> DeviceRows:
        part = self.host[rows]
        return self if len(part) == len(self) else DeviceRows(part)

    def on(self, gpu: Gpu, dtype: str) -> Buffer:
        if dtype not in self._there:
            self._there[dtype] = gpu.upload(self.host.astype(dtype, copy=False))
        return self._there[dtype]


@dataclass(frozen=True)
class Launch:
    function: Function
    config: LaunchConfig
    arguments: tuple[Any, ...]  # as gpu.launch takes them; a Buffer is kept, and handed on as its pointer

    @property
    def threads(self) -> int:
        x, y, z = self.config.block
        return x * y * z

    def occupancy(self, arch: str) -> float:
        """The share of a multiprocessor's warps that its registers and shared memory leave room for."""
        blocks = self.function.blocks_per_unit(self.threads, self.config.shared_bytes)
        return blocks * -(-self.threads // 32) / _WARPS[arch]


class DeviceRun:
    """A run of a rung: its launches, one after the other. Called, it runs once and hands back y."""

    def __init__(self, gpu: Gpu, launches: Sequence[Launch], y: Buffer, shape: tuple[int, ...], dtype: str) -> None:
        """y is what the last launch writes: of this shape and dtype, row-major."""
        self._gpu, self._launches = gpu, launches
        self._y, self._shape, self._dtype = y, shape, dtype
        self._start, self._end = gpu.event(), gpu.event()

    @property
    def facts(self) -> dict[str, int | str]:
        """Of several launches, what the one that takes the most of it takes."""
        launches = self._launches
        return {
            "launches": len(launches),
            "registers": max(each.function.registers for each in launches),
            "shared bytes": max(each.function.static_shared_bytes + each.config.shared_bytes for each in launches),
            "occupancy": f"{100 * min(each.occupancy(self._gpu.device.arch) for each in launches):.0f}%",
        }

    def __call__(self) -> Array:
        self._enqueue(self._gpu.stream)
        return self._gpu.download(self._y, np.empty(self._shape, self._dtype))

    def _enqueue(self, stream: int, calls: int = 1) -> None:
        for _ in range(calls):
            for each in self._launches:
                arguments = [a.pointer if isinstance(a, Buffer) else a for a in each.arguments]
                self._gpu.launch(each.function, each.config, arguments, stream)

    def sample_ms(self) -> float:
        """Milliseconds of one run, launches included: the mean of as many runs in a row as take a few milliseconds."""
        graph, calls = self._graph
        return self._time(graph) / calls

    @functools.cached_property
    def _graph(self) -> tuple[Graph, int]:
        once = self._time(self._gpu.capture(self._enqueue))
        calls = min(max(round(_SAMPLE_MS / max(once, 1e-6)), 1), _MAX_CALLS)
        return self._gpu.capture(functools.partial(self._enqueue, calls=calls)), calls

    def _time(self, graph: Graph) -> float:
        graph.launch()  # keeps the GPU busy while the host puts the rest on the stream
        self._start.record()
        graph.launch()
        self._end.record()
        return self._end.ms_since(self._start)


def line_launch(function: Function, blocks: int, *arguments: Any) -> Launch:
    return Launch(function, LaunchConfig((blocks, 1, 1), (THREADS, 1, 1), 0), arguments)


class CudaKernels(Protocol):
    """A rung with kernels of its own."""

    name: ClassVar[str]
    max_registers: ClassVar[int]  # a thread

    @classmethod
    def programs(cls) -> tuple[Program, ...]: ...


def rung_instances(rungs: Iterable[type[CudaKernels]]) -> tuple[Instance, ...]:
    """Every kernel of the rungs, for make check-kernels: compiled, never launched."""
    config = LaunchConfig((1, 1, 1), (THREADS, 1, 1), 0)
    kernels = [(rung, each) for rung in rungs for each in rung.programs()]
    return tuple(
        Instance(f"{rung.name}: {each.name_expression}", _always(Fixed(each, config, Budget(rung.max_registers))))
        for rung, each in kernels
    )


def _always(launch: Fixed) -> Callable[[Device], Fixed]:
    return lambda device: launch


def count(B: int) -> ctypes.c_int64:
    """A number of rows as kernels take it."""
    return ctypes.c_int64(B)
