"""A CUDA driver in Python, for tests of what surrounds it: memory is the host's, a launch is decoded and recorded, and
a Python function stands for the kernel. It shows which calls are made with what, not what a GPU does with them.
A lazy one does what is put on a stream as late as it may: when that stream is waited for."""

# ruff: noqa: N802 - the names are the driver's

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from onchip.plan.device import H200
from onchip.runtime.cuda.gpu import Gpu
from onchip.runtime.cuda.nvrtc import Binary

CONTEXT = 77
TFLOAT32 = 11  # of CUtensorMapDataType
FREE_BYTES = 10_000


class _Names:
    """An enum of the driver: every name is there."""

    def __getattr__(self, name: str) -> int:
        known = {"CU_MEMORYTYPE_HOST": 1, "CU_POINTER_ATTRIBUTE_MEMORY_TYPE": 2}
        return {**known, "CU_TENSOR_MAP_DATA_TYPE_TFLOAT32": TFLOAT32}.get(name, 9)


class _Properties:
    def __init__(self) -> None:
        self.location = _Names()


@dataclass(frozen=True)
class Launched:
    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_bytes: int
    stream: int
    overlaps: bool
    words: tuple[Any, ...]  # the first 8 bytes of each argument, or all bytes of one that is larger
    cluster: int = 1
    cooperative: bool = False


@dataclass
class Capture:
    """What streams that record have recorded: kernels and other actions by node, and what each waits for."""

    nodes: dict[int, Launched | Callable[[], object]]
    after: dict[int, frozenset[int]]
    ends: dict[int, frozenset[int]]  # of each stream: what the next one on it waits for


class _Contexts(threading.local):
    """What is current in a thread."""

    def __init__(self) -> None:
        self.stack: list[int] = []


class FakeDriver:
    """The part of cuda.bindings.driver that onchip calls."""

    CU_MEMHOSTALLOC_PORTABLE, CU_MEMHOSTALLOC_DEVICEMAP = 1, 2
    CUmemPoolProps = _Properties

    def __init__(self, argument_count: Callable[[str], int] = lambda kernel: 4) -> None:
        self.calls: list[str] = []
        self.launches: list[Launched] = []
        self.run: Callable[[Launched], None] = lambda launched: None  # the kernel
        self.answers: dict[str, int] = {}  # function -> the code it answers with
        self.shuffled: random.Random | None = None  # set: graphs run in any order that their edges allow
        self.locked: set[int] = set()  # pinned host memory
        self.memory: dict[int, Any] = {}  # pointer -> what keeps it
        self.max_bytes = 1 << 40
        self.pool_bytes: dict[int, int] = {}  # pointer -> size
        self.pool_high = 0
        self.clock: Callable[[], float] = time.perf_counter  # seconds: when events are recorded
        self.lazy = False
        self.pending: dict[int, list[Callable[[], object]]] = {}  # stream -> what it has to do
        self._argument_count = argument_count
        self._last_handle = 1000
        self._working = threading.RLock()
        self.contexts = _Contexts()
        self._names: dict[int, str] = {}
        self._captures: dict[int, Capture] = {}  # by stream
        self._times: dict[int, float] = {}  # when those were recorded, to a stream that captures nothing
        self._streams: dict[int, int] = {}  # where those were recorded
        self._events: dict[int, tuple[Capture, frozenset[int]]] = {}  # those recorded while capturing
        self.graphs: dict[int, dict[int, Launched | Callable[[], object]]] = {}  # by node
        self.events_of: dict[int, list[int]] = {}  # graph -> those that its nodes record
        self.alive_events: set[int] = set()
        self.captured: list[Capture] = []
        self.built: dict[int, dict[int, frozenset[int]]] = {}  # graph -> node -> the nodes that it waits for
        self.begins_before: set[tuple[int, int]] = set()  # nodes of which the second may begin before the first ends
        self.replays: list[tuple[int, int]] = []  # (graph, stream)
        pointer = ctypes.c_void_p
        self._entries = {
            b"cuLaunchKernelEx": ctypes.CFUNCTYPE(ctypes.c_int, *[pointer] * 4)(self._on_launch),
            b"cuGraphLaunch": ctypes.CFUNCTYPE(ctypes.c_int, *[pointer] * 2)(self._on_graph_launch),
            b"cuGraphAddKernelNode": ctypes.CFUNCTYPE(ctypes.c_int, *[pointer] * 3, ctypes.c_size_t, pointer)(
                self._on_add_kernel
            ),
            b"cuGraphKernelNodeSetAttribute": ctypes.CFUNCTYPE(ctypes.c_int, pointer, ctypes.c_int, pointer)(
                self._on_node_attribute
            ),
            b"cuGraphExecKernelNodeSetParams": ctypes.CFUNCTYPE(ctypes.c_int, *[pointer] * 3)(self._on_update),
            b"cuTensorMapEncodeTiled": ctypes.CFUNCTYPE(
                ctypes.c_int, pointer, ctypes.c_int, ctypes.c_uint, *[pointer] * 5, *[ctypes.c_int] * 4
            )(self._on_encode),
            b"cuTensorMapEncodeIm2col": ctypes.CFUNCTYPE(
                ctypes.c_int,
                pointer,
                ctypes.c_int,
                ctypes.c_uint,
                *[pointer] * 5,
                *[ctypes.c_uint] * 2,
                pointer,
                *[ctypes.c_int] * 4,
            )(self._on_encode_windows),
        }

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            return _Names()  # an enum
        return lambda *arguments: (self._told(name),)

    def _told(self, name: str) -> int:
        self.calls.append(name)
        return self.answers.get(name, 0)

    def _handle(self) -> int:
        self._last_handle += 16
        return self._last_handle

    def _allocate(self, nbytes: int) -> int:
        kept = np.full(nbytes + 512, 0xAB, np.uint8)
        pointer = -(-kept.ctypes.data // 512) * 512
        self.memory[pointer] = kept
        return pointer

    # -- contexts, streams, events ---------------------------------------------------------------------------

    def cuDeviceGet(self, index):
        return 0, index

    def cuDevicePrimaryCtxRetain(self, device):
        return 0, CONTEXT

    def cuCtxSetCurrent(self, context):
        self.contexts.stack = [context]
        return (0,)

    def cuCtxPushCurrent(self, context):
        self.contexts.stack.append(context)
        return (0,)

    def cuCtxPopCurrent(self):
        return 0, self.contexts.stack.pop()

    def cuStreamCreate(self, flags):
        return self._told("cuStreamCreate"), self._handle()

    def cuStreamSynchronize(self, stream):
        for action in self.pending.pop(stream, []):
            action()
        return (self._told("cuStreamSynchronize"),)

    def put(self, stream, action: Callable[[], object]) -> None:
        """Work on a stream: done now, or when the stream is waited for."""
        if self.lazy:
            self.pending.setdefault(stream, []).append(action)
        else:
            with self._working:  # a graph's kernels run in sequence, even if other threads launch
                action()

    def cuEventRecord(self, event, stream):
        if stream in self._captures:
            capture = self._captures[stream]
            self._events[event] = (capture, capture.ends[stream])
        else:
            self._events.pop(event, None)
            self._times.pop(event, None)
            self._streams[event] = stream
            self.put(stream, lambda: self._times.update({event: self.clock()}))
        return (self._told("cuEventRecord"),)

    def cuEventSynchronize(self, event):
        actions = self.pending.get(self._streams.get(event, -1), [])
        while event not in self._times and actions:  # what the stream has to do up to the event
            actions.pop(0)()
        return (self._told("cuEventSynchronize"),)

    def cuEventElapsedTime(self, earlier, later):
        return self._told("cuEventElapsedTime"), 1e3 * (self._times[later] - self._times[earlier])

    def cuStreamWaitEvent(self, stream, event, flags):
        if event in self._events:  # a stream that waits for what is recorded records too
            capture, ends = self._events[event]
            self._captures[stream] = capture
            capture.ends[stream] = capture.ends.get(stream, frozenset()) | ends
        return (self._told("cuStreamWaitEvent"),)

    def cuEventCreate(self, flags):
        event = self._handle()
        self.alive_events.add(event)
        return self._told("cuEventCreate"), event

    def cuEventDestroy(self, event):
        self.alive_events.remove(event)
        return (self._told("cuEventDestroy"),)

    def cuStreamIsCapturing(self, stream):
        return 0, int(stream in self._captures)

    def cuThreadExchangeStreamCaptureMode(self, mode):
        return 0, mode

    # -- memory ----------------------------------------------------------------------------------------------

    def cuMemPoolCreate(self, properties):
        return 0, 55

    def cuuint64_t(self, value):
        return value

    def cuMemGetInfo(self):
        return 0, FREE_BYTES, 2 * FREE_BYTES

    def cuMemAlloc(self, nbytes):
        code = self._told("cuMemAlloc") or (2 if nbytes > self.max_bytes else 0)
        return code, None if code else self._allocate(nbytes)

    def cuMemAllocFromPoolAsync(self, nbytes, pool, stream):
        code = self._told("cuMemAllocFromPoolAsync") or (2 if nbytes > self.max_bytes else 0)
        pointer = None if code else self._allocate(nbytes)
        if pointer is not None:
            self.pool_bytes[pointer] = nbytes
            self.pool_high = max(self.pool_high, sum(self.pool_bytes.values()))
        return code, pointer

    def cuMemPoolGetAttribute(self, pool, attribute):
        return 0, self.pool_high  # the one attribute that is read

    def cuMemPoolSetAttribute(self, pool, attribute, value):
        if value == 0:  # of the same attribute
            self.pool_high = sum(self.pool_bytes.values())
        return (self._told("cuMemPoolSetAttribute"),)

    def cuMemFree(self, pointer):
        del self.memory[pointer]
        return (self._told("cuMemFree"),)

    def cuMemFreeAsync(self, pointer, stream):
        del self.pool_bytes[pointer]
        self.put(stream, lambda: self.memory.pop(pointer))  # earlier work on the stream may still use it
        return (self._told("cuMemFreeAsync"),)

    def cuMemHostAlloc(self, nbytes, flags):
        return self._told("cuMemHostAlloc"), self._allocate(nbytes)

    def cuMemFreeHost(self, pointer):
        del self.memory[pointer]
        return (self._told("cuMemFreeHost"),)

    def cuMemcpyHtoDAsync(self, target, source, nbytes, stream):
        code = self._told("cuMemcpyHtoDAsync")
        if not code:
            self.put(stream, lambda: ctypes.memmove(target, source, nbytes))
        return (code,)

    def cuMemcpyDtoHAsync(self, target, source, nbytes, stream):
        code = self._told("cuMemcpyDtoHAsync")
        if not code:
            self.put(stream, lambda: ctypes.memmove(target, source, nbytes))
        return (code,)

    def cuMemcpyDtoDAsync(self, target, source, nbytes, stream):
        ctypes.memmove(target, source, nbytes)
        return (self._told("cuMemcpyDtoDAsync"),)

    def cuMemsetD8Async(self, target, value, nbytes, stream):
        self._record_or_put(stream, lambda: ctypes.memset(target, value, nbytes))
        return (self._told("cuMemsetD8Async"),)

    def _record_or_put(self, stream, action: Launched | Callable[[], object]) -> None:
        if (capture := self._captures.get(stream)) is not None:
            node = self._handle()
            capture.nodes[node], capture.after[node] = action, capture.ends[stream]
            capture.ends[stream] = frozenset([node])
        else:
            self.put(stream, lambda: self._do(action))

    def _do(self, action: Launched | Callable[[], object]) -> None:
        if isinstance(action, Launched):
            self.run(action)
        else:
            action()

    def CUdeviceptr(self, pointer):
        return pointer

    def CUDA_RESOURCE_DESC(self):
        return SimpleNamespace(res=SimpleNamespace(linear=SimpleNamespace()))

    def CUDA_TEXTURE_DESC(self):
        return SimpleNamespace()

    def cuTexObjectCreate(self, resource, texture, view):
        """The handle is the pointer."""
        return self._told("cuTexObjectCreate"), resource.res.linear.devPtr

    def cuPointerGetAttribute(self, attribute, pointer):
        if attribute == 2:  # what kind of memory
            return (0, 1) if pointer in self.locked else (1, None)
        return 0, 0  # which GPU

    # -- kernels ---------------------------------------------------------------------------------------------

    def cuModuleLoadData(self, cubin):
        return self._told("cuModuleLoadData"), 33

    def cuModuleGetFunction(self, module, name):
        handle = self._handle()
        self._names[handle] = name.decode()
        return 0, handle

    def cuFuncGetAttribute(self, attribute, function):
        return 0, 128

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, function, threads, shared_bytes):
        return 0, 2

    def cuGetProcAddress(self, name, version, flags):
        return 0, ctypes.cast(self._entries[name], ctypes.c_void_p).value, 0

    def _on_launch(self, config, function, addresses, extra) -> int:
        if not self.contexts.stack:
            return 201  # CUDA_ERROR_INVALID_CONTEXT
        if code := self._told("cuLaunchKernelEx"):
            return code
        kernel = self._names[function]
        sizes = (ctypes.c_uint * 7).from_address(config)  # as cuda.h lays CUlaunchConfig out
        stream, attributes = (ctypes.c_uint64 * 2).from_address(config + 32)
        wanted = {}  # id of an attribute -> its value's first number
        for i in range(ctypes.c_uint.from_address(config + 48).value):
            identity, _, value = (ctypes.c_uint * 3).from_address(attributes + 72 * i)
            wanted[identity] = value
        launched = Launched(
            kernel, tuple(sizes[:3]), tuple(sizes[3:6]), sizes[6], stream, wanted.get(6) == 1,
            self._words(kernel, addresses), wanted.get(4, 1), wanted.get(2) == 1,
        )  # fmt: skip
        self.launches.append(launched)
        self._record_or_put(stream, launched)
        return 0

    def _words(self, kernel: str, addresses: int) -> tuple[Any, ...]:
        at = (ctypes.c_uint64 * self._argument_count(kernel)).from_address(addresses)
        return tuple(self.argument(kernel, number, address) for number, address in enumerate(at))

    def argument(self, kernel: str, number: int, address: int) -> Any:
        return ctypes.c_uint64.from_address(address).value

    def _on_encode(self, to, dtype, rank, pointer, shape, strides, box, steps, interleave, swizzle, ahead, fill) -> int:
        """The fake descriptor: the pointer, then the rank, the sizes, the strides, the tile and the swizzle mode."""
        assert to % 64 == 0
        sizes = (ctypes.c_uint64 * rank).from_address(shape), (ctypes.c_uint64 * (rank - 1)).from_address(strides)
        boxes = (ctypes.c_uint32 * rank).from_address(box)
        told = [pointer, rank, *sizes[0], *sizes[1], *boxes, swizzle]
        told += [0] * (15 - len(told)) + [dtype == TFLOAT32]
        (ctypes.c_uint64 * len(told)).from_address(to)[:] = told
        return self._told("cuTensorMapEncodeTiled")

    def _on_encode_windows(
        self, to, dtype, rank, pointer, shape, strides, lower, upper, channels, pixels, steps, interleave, swizzle,
        ahead, fill,
    ) -> int:  # fmt: skip
        """The fake descriptor: the pointer; C, W, H, B; bytes per element; channels and pixels of a tile; corners and
        steps along W and H."""
        assert (to % 64, rank) == (0, 4)
        sizes = (ctypes.c_uint64 * 4).from_address(shape)
        element_bytes = (ctypes.c_uint64 * 3).from_address(strides)[0] // sizes[0]
        corners = [(ctypes.c_int * 2).from_address(corner)[:] for corner in (lower, upper)]
        assert all(-128 <= n < 128 for corner in corners for n in corner)
        walked = (ctypes.c_uint32 * 4).from_address(steps)
        told = [pointer, *sizes, element_bytes, channels, pixels, *corners[0], *corners[1], *walked[1:3], swizzle]
        told += [dtype == TFLOAT32]
        (ctypes.c_int64 * len(told)).from_address(to)[:] = told
        return self._told("cuTensorMapEncodeIm2col")

    # -- graphs ----------------------------------------------------------------------------------------------

    def cuStreamBeginCapture(self, stream, mode):
        self._captures[stream] = Capture({}, {}, {stream: frozenset()})
        return (0,)

    def cuStreamEndCapture(self, stream):
        handle, capture = self._handle(), self._captures[stream]
        joined = capture.ends[stream]
        for node in reversed(capture.nodes):  # every branch must have come back
            joined |= capture.after[node] if node in joined else frozenset()
        assert joined == set(capture.nodes), "CUDA_ERROR_STREAM_CAPTURE_UNJOINED"
        for each in [each for each, found in self._captures.items() if found is capture]:
            del self._captures[each]
        self._events = {event: found for event, found in self._events.items() if found[0] is not capture}
        self.graphs[handle] = dict(capture.nodes)
        self.captured.append(capture)
        return 0, handle

    def cuGraphCreate(self, flags):
        handle = self._handle()
        self.graphs[handle], self.built[handle] = {}, {}
        return self._told("cuGraphCreate"), handle

    def _on_add_kernel(self, made, graph, after, count, params) -> int:
        if not self.contexts.stack:
            return 201  # CUDA_ERROR_INVALID_CONTEXT
        if code := self._told("cuGraphAddKernelNode"):
            return code
        function = ctypes.c_uint64.from_address(params).value  # as cuda.h lays CUDA_KERNEL_NODE_PARAMS out
        sizes = (ctypes.c_uint * 7).from_address(params + 8)
        addresses = ctypes.c_uint64.from_address(params + 40).value
        kernel, waits = self._names[function], (ctypes.c_uint64 * count).from_address(after) if count else ()
        words = self._words(kernel, addresses)
        launched = Launched(kernel, tuple(sizes[:3]), tuple(sizes[3:6]), sizes[6], 0, False, words)
        ctypes.c_uint64.from_address(made).value = self._add_node(graph, launched, waits)
        return 0

    def _add_node(self, graph, action: Launched | Callable[[], object], after) -> int:
        node = self._handle()
        assert set(after) <= set(self.graphs[graph])
        self.graphs[graph][node], self.built[graph][node] = action, frozenset(after)
        return node

    def _on_node_attribute(self, node, attribute, value) -> int:
        (graph,) = (graph for graph, nodes in self.graphs.items() if node in nodes)
        number = ctypes.c_int.from_address(value).value
        changed = {4: {"cluster": number}, 2: {"cooperative": number == 1}}[attribute]
        self.graphs[graph][node] = replace(self.graphs[graph][node], **changed)
        return self._told("cuGraphKernelNodeSetAttribute")

    def CUgraphNode(self, handle):
        return handle

    def CUDA_MEMSET_NODE_PARAMS(self):
        return _Properties()

    def CUgraphEdgeData(self):
        return _Properties()

    def cuCtxGetCurrent(self):
        return 0, self.contexts.stack[-1]

    def cuGraphAddMemsetNode(self, graph, after, count, told, context):
        assert len(after) == count
        node = self._add_node(graph, lambda: ctypes.memset(told.dst, told.value, told.width), after)
        return self._told("cuGraphAddMemsetNode"), node

    def cuGraphAddEventRecordNode(self, graph, after, count, event):
        assert len(after) == count
        self.events_of.setdefault(graph, []).append(event)
        node = self._add_node(graph, lambda: self._times.update({event: self.clock()}), after)
        return self._told("cuGraphAddEventRecordNode"), node

    def cuGraphAddDependencies(self, graph, before, behind, edges, count):
        (first,), (second,), (edge,) = before, behind, edges
        assert (edge.from_port, edge.to_port, edge.type, count) == (1, 0, 1, 1)
        self.built[graph][second] |= {first}
        self.begins_before.add((first, second))
        return (self._told("cuGraphAddDependencies"),)

    cuGraphAddDependencies_v2 = cuGraphAddDependencies  # noqa: N815

    def cuGraphInstantiate(self, graph, flags):
        return self._told("cuGraphInstantiate"), graph

    def cuGraphExecDestroy(self, graph):
        del self.graphs[graph]
        return (self._told("cuGraphExecDestroy"),)

    def _on_graph_launch(self, graph, stream) -> int:
        stream = stream or 0
        if not self.contexts.stack:
            return 201  # CUDA_ERROR_INVALID_CONTEXT
        if code := self._told("cuGraphLaunch"):
            return code
        assert stream not in self._captures
        self.replays.append((graph, stream))
        nodes = self.graphs[graph] if self.shuffled is None else self._any_order(graph)
        actions = [self.graphs[graph][node] for node in nodes]  # later updates are for later launches
        for event in self.events_of.get(graph, []):
            assert event in self.alive_events
            self._times.pop(event, None)  # the nodes record them again
        self.put(stream, lambda: [self._do(action) for action in actions])
        return 0

    def _any_order(self, graph) -> list[int]:
        """The nodes in an order that their edges allow."""
        done, waiting = list[int](), dict(self.built[graph])
        while waiting:
            ready = [node for node, after in waiting.items() if after <= set(done)]
            done.append(self.shuffled.choice(ready))
            del waiting[done[-1]]
        return done

    def _on_update(self, graph, node, params) -> int:
        if not self.contexts.stack:
            return 201  # CUDA_ERROR_INVALID_CONTEXT
        if code := self._told("cuGraphExecKernelNodeSetParams"):
            return code
        before = self.graphs[graph][node]
        assert isinstance(before, Launched)
        function = ctypes.c_uint64.from_address(params).value  # as cuda.h lays CUDA_KERNEL_NODE_PARAMS out
        sizes = (ctypes.c_uint * 7).from_address(params + 8)
        addresses, *others = (ctypes.c_uint64 * 4).from_address(params + 40)
        assert (self._names[function], *sizes) == (before.kernel, *before.grid, *before.block, before.shared_bytes)
        assert others == [0, 0, 0]
        self.graphs[graph][node] = replace(before, words=self._words(before.kernel, addresses))
        return 0


def fake_gpu(monkeypatch, driver: FakeDriver) -> Gpu:
    """A GPU on that driver, which `Gpu.get` finds; nothing is compiled."""
    gpu = Gpu(0, H200, driver)
    monkeypatch.setattr(Gpu, "get", staticmethod(lambda index=0: gpu))
    binary = lambda program, arch: Binary(b"", program.name_expression, 40, 0, False, False)  # noqa: E731
    monkeypatch.setattr("onchip.runtime.cuda.gpu.compile_program", binary)
    driver.calls.clear()
    return gpu


def floats(pointer: int, *shape: int) -> np.ndarray:
    """The fake GPU's memory as an array."""
    count = int(np.prod(shape))
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(pointer)).reshape(shape)


class Array:
    """An array on the fake GPU, as a library shows it."""

    def __init__(self, gpu: Gpu, values: np.ndarray, **facts: Any) -> None:
        self.buffer = gpu.upload(np.asarray(values))
        self.values, self.facts = values, facts

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.values.shape, "typestr": self.values.dtype.str, "data": (self.buffer.pointer, False),
            "strides": None, "version": 3, "stream": 1234, **self.facts,
        }  # fmt: skip

    @property
    def now(self) -> np.ndarray:
        held = np.ctypeslib.as_array((ctypes.c_uint8 * self.values.nbytes).from_address(self.buffer.pointer))
        return held.view(self.values.dtype).reshape(self.values.shape).copy()
