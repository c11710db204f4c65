"""Kernels and graphs that are loaded on a GPU, and launches of them with everything written down once."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from onchip.kernels.cuda.program import LaunchConfig
from onchip.runtime.cuda.driver import call, fail

if TYPE_CHECKING:
    from onchip.runtime.cuda.gpu import Buffer, Gpu

_CONTEXT_CODES = (201, 400, 709)  # invalid context, invalid handle, context destroyed: another context is current
_OVERLAP_ATTRIBUTE = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_MOST_STREAMS = 256  # whose handles are kept ready for the driver


class Function:
    """A kernel that is compiled for a GPU and loaded there."""

    def __init__(self, driver: Any, name: str, handle: Any, registers: int, spill_bytes: int) -> None:
        self._driver, self.name, self.handle = driver, name, handle
        self.registers, self.spill_bytes = registers, spill_bytes  # a thread, as the compiler tells them
        shared = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
        self.static_shared_bytes = int(call(driver.cuFuncGetAttribute, shared, handle))
        self._shared_limit, self._allowing = 0, threading.Lock()

    def allow_shared(self, shared_bytes: int) -> None:
        """Let it be launched with this much dynamic shared memory; the largest ever asked for counts."""
        driver = self._driver
        with self._allowing:
            if shared_bytes > self._shared_limit:
                limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                call(driver.cuFuncSetAttribute, self.handle, limit, shared_bytes, doing=f"loading {self.name}")
                self._shared_limit = shared_bytes

    def blocks_per_unit(self, threads: int, shared_bytes: int) -> int:
        """Blocks of this size that a multiprocessor holds at a time."""
        ask = self._driver.cuOccupancyMaxActiveBlocksPerMultiprocessor
        return int(call(ask, self.handle, threads, shared_bytes))


class Graph:
    """Work that was captured, launched again as a whole. Keep the memory it uses, but what it is told to keep."""

    def __init__(self, gpu: Gpu, graph: Any, keeps: Buffer | None) -> None:
        self._gpu, self._keeps = gpu, keeps
        try:
            self._handle = call(gpu.driver.cuGraphInstantiate, graph, 0)
        finally:
            gpu.driver.cuGraphDestroy(graph)
        # What cuGraphLaunch takes, as ctypes has it ready: a launch costs one call of the driver, and no conversion.
        self._launch, self._streams, self._given = gpu.launch_graph, gpu.streams, _ready(int(self._handle))

    def launch(self, stream: int | None = None) -> None:
        """Put it on a stream. Stream 0 is the current context's: enter the GPU's own where another may be current."""
        on = self._streams[self._gpu.stream if stream is None else stream]
        if code := self._launch(self._given, on):
            _retry(self._gpu, code, self._launch, (self._given, on), "launching a graph")

    def __del__(self) -> None:
        if hasattr(self, "_handle") and not sys.is_finalizing():
            with self._gpu.relaxed():
                self._gpu.driver.cuGraphExecDestroy(self._handle)


def _ready(handle: int) -> Any:
    """A handle as ctypes hands it on: a plain int would be converted in every call."""
    return ctypes.c_void_p.from_param(handle)


class Streams(dict[int, Any]):
    """A stream -> its handle, ready for the driver."""

    def __missing__(self, stream: int) -> Any:
        if len(self) >= _MOST_STREAMS:
            self.clear()
        made = self[stream] = _ready(stream)
        return made


def _retry(gpu: Gpu, code: int, launch: Callable[..., int], given: Sequence[Any], doing: str) -> None:
    """Once more in our own context: the thread is new, or another GPU's context is current in it."""
    if code in _CONTEXT_CODES:
        with gpu:
            code = launch(*given)
    if code:
        fail(code, doing)


class _Attribute(ctypes.Structure):  # CUlaunchAttribute, its 64-byte value seen as ints
    _fields_ = (("id", ctypes.c_uint), ("unused", ctypes.c_uint), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):  # CUlaunchConfig
    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_uint64), ("attributes", ctypes.c_void_p), ("attribute_count", ctypes.c_uint),
    )  # fmt: skip


class Call:
    """A launch with everything written down: to launch it again costs one call of the driver, and no conversion.

    `arguments` are ctypes values; set `.value` of one to change it. Not for two threads at a time.
    """

    def __init__(self, gpu: Gpu, function: Function, config: LaunchConfig, arguments: Sequence[Any]) -> None:
        self.arguments = [ctypes.c_uint64(a) if isinstance(a, int) else a for a in arguments]
        self.name = function.name
        self._gpu = gpu
        # The driver wants an array of addresses, one for each argument.
        self._addresses = (ctypes.c_void_p * len(self.arguments))(*map(ctypes.addressof, self.arguments))
        self._attribute = _Attribute(_OVERLAP_ATTRIBUTE, 0, (1,))
        self.config = _Config(config.grid, config.block, config.shared_bytes)
        if config.overlaps:
            self.config.attributes, self.config.attribute_count = ctypes.addressof(self._attribute), 1
        self._launch = gpu.launch_kernel
        self._given = (
            ctypes.byref(self.config), _ready(int(function.handle)), ctypes.byref(self._addresses), None,
        )  # fmt: skip

    def launch(self, stream: int) -> None:
        self.config.stream = stream
        if code := self._launch(*self._given):
            _retry(self._gpu, code, self._launch, self._given, f"launching {self.name}")
