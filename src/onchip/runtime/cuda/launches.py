"""Kernels and graphs loaded on a GPU, and launches with arguments that are prepared once."""

from __future__ import annotations

import ctypes
import itertools
import operator
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from onchip.kernels.cuda.common.arguments import TENSOR_MAP_BYTES, TENSOR_MAP_DTYPES, TensorMap, WindowMap
from onchip.kernels.cuda.common.program import LaunchConfig
from onchip.runtime.cuda.driver import call, fail
from onchip.runtime.cuda.nvrtc import Binary

_CONTEXT_CODES = (201, 400, 709)  # invalid context, invalid handle, context destroyed: another context is current
# CU_LAUNCH_ATTRIBUTE_COOPERATIVE, _CLUSTER_DIMENSION, _PROGRAMMATIC_STREAM_SERIALIZATION
_COOPERATIVE, _CLUSTER, _OVERLAPS = 2, 4, 6
# CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC, CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC
_PROGRAMMATIC_PORT, _PROGRAMMATIC_EDGE = 1, 1
_PORTABLE_CLUSTER = 8  # blocks: the portable maximum; larger clusters must be allowed explicitly
_TENSOR_MAP_BYTES, _TENSOR_MAP_ALIGN = 128, 64
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}  # bytes -> CU_TENSOR_MAP_SWIZZLE_*
MAX_STREAMS = 256  # cached handles


class LaunchContext(Protocol):
    """What launches need of a Gpu: entry points of the driver, and its streams."""

    driver: Any
    stream: int
    streams: Streams
    launch_kernel: Callable[..., int]
    launch_graph: Callable[..., int]
    add_kernel_node: Callable[..., int]
    set_node_attribute: Callable[..., int]
    set_kernel_node: Callable[..., int]
    encode_tensor_map: Callable[..., int]
    encode_window_map: Callable[..., int]

    def relaxed(self) -> AbstractContextManager[None]: ...
    def clear(self, pointer: int, nbytes: int, stream: int) -> None: ...
    def synchronise(self, stream: int | None = None, kernel: str = "") -> None: ...
    def is_capturing(self, stream: int) -> bool: ...
    def __enter__(self) -> object: ...
    def __exit__(self, *error: object) -> None: ...


class Function:
    """A kernel compiled for a GPU and loaded there."""

    def __init__(self, driver: Any, name: str, handle: Any, binary: Binary) -> None:
        self._driver, self.name, self.handle = driver, name, handle
        self.entry = binary.entry  # the name as the compiler mangled it
        self.registers, self.spill_bytes = binary.registers, binary.spill_bytes  # per thread, from the compiler
        shared = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
        self.static_shared_bytes = int(call(driver.cuFuncGetAttribute, shared, handle))
        self._shared_limit, self._allowing = 0, threading.Lock()

    def allow_shared(self, shared_bytes: int) -> None:
        """Raise the limit of dynamic shared memory to at least this much."""
        driver = self._driver
        with self._allowing:
            if shared_bytes > self._shared_limit:
                limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                call(driver.cuFuncSetAttribute, self.handle, limit, shared_bytes, doing=f"loading {self.name}")
                self._shared_limit = shared_bytes

    def allow_cluster(self, blocks: int) -> None:
        """Allow clusters of this size, which may exceed the portable maximum."""
        if blocks > _PORTABLE_CLUSTER:
            attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
            call(self._driver.cuFuncSetAttribute, self.handle, attribute, 1, doing=f"loading {self.name}")

    def blocks_per_sm(self, threads: int, shared_bytes: int) -> int:
        """Occupancy: blocks of this size per SM."""
        query = self._driver.cuOccupancyMaxActiveBlocksPerMultiprocessor
        return int(call(query, self.handle, threads, shared_bytes))


class Graph:
    """An executable graph. It keeps `keeps` alive; the caller keeps all other memory that its nodes use alive."""

    def __init__(self, gpu: LaunchContext, graph: Any, keeps: object) -> None:
        self._gpu, self._keeps = gpu, keeps
        self._template = graph  # its nodes identify those of the executable graph in updates
        try:
            self._handle = call(gpu.driver.cuGraphInstantiate, graph, 0)
        except BaseException:
            gpu.driver.cuGraphDestroy(graph)
            raise
        # The arguments of cuGraphLaunch as ctypes values: a launch is one driver call without conversions.
        self._launch, self._streams, self._launch_args = gpu.launch_graph, gpu.streams, _c_handle(int(self._handle))

    def launch(self, stream: int | None = None) -> None:
        """Launch on a stream. Stream 0 is the current context's: enter this GPU's context if another may be current."""
        on = self._streams[self._gpu.stream if stream is None else stream]
        if code := self._launch(self._launch_args, on):
            _retry(self._gpu, code, self._launch, (self._launch_args, on), "launching a graph")

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if hasattr(self, "_handle") and not is_ending():
            with self._gpu.relaxed():
                self._gpu.driver.cuGraphDestroy(self._template)
                self._gpu.driver.cuGraphExecDestroy(self._handle)

    def update_of(self, node: Any, launch: Call) -> Callable[[], None]:
        """A function that copies the current arguments of a launch into its kernel node, from the next launch on.

        node  as GraphBuilder.add returned it
        """
        params = launch.node_params
        arguments = (_c_handle(int(self._handle)), _c_handle(int(node)), ctypes.byref(params))

        def update(set_params: Callable[..., int] = self._gpu.set_kernel_node) -> None:
            if code := set_params(*arguments):
                _retry(self._gpu, code, set_params, arguments, f"updating {launch.name} in a graph")

        return update


class GraphBuilder:
    """A graph built node by node. It captures no stream, so it cannot interfere with the work of other threads."""

    def __init__(self, gpu: LaunchContext) -> None:
        self._gpu = gpu
        self._graph = call(gpu.driver.cuGraphCreate, 0)
        self._kernels: set[int] = set()

    def add(self, launch: Call, after: Sequence[int], overlaps: bool = True) -> int:
        """Add a launch after these nodes, with its current arguments; returns its node.

        overlaps  whether it may begin before a single one of them has ended
        """
        overlaps = overlaps and launch.overlaps and len(after) == 1 and after[0] in self._kernels
        waits = () if overlaps else after
        handle, params = ctypes.c_uint64(0), launch.node_params
        arguments = (
            ctypes.byref(handle), _c_handle(int(self._graph)), (ctypes.c_uint64 * len(waits))(*waits),
            ctypes.c_size_t(len(waits)), ctypes.byref(params),
        )  # fmt: skip
        if code := self._gpu.add_kernel_node(*arguments):
            _retry(self._gpu, code, self._gpu.add_kernel_node, arguments, f"adding {launch.name} to a graph")
        node = int(handle.value)
        for attribute in launch.node_attributes:
            value = (_c_handle(node), ctypes.c_int(attribute.id), ctypes.byref(attribute.value))
            if code := self._gpu.set_node_attribute(*value):
                fail(code, f"adding {launch.name} to a graph")
        if overlaps:
            self._add_programmatic_edge(after[0], node)
        self._kernels.add(node)
        return node

    def clear(self, pointer: int, nbytes: int, after: Sequence[int]) -> int:
        """Add a memset to zero after these nodes; returns its node."""
        driver = self._gpu.driver
        params = driver.CUDA_MEMSET_NODE_PARAMS()
        params.dst, params.value, params.elementSize, params.width, params.height = pointer, 0, 1, nbytes, 1
        nodes = [driver.CUgraphNode(node) for node in after]
        context = call(driver.cuCtxGetCurrent)
        return int(call(driver.cuGraphAddMemsetNode, self._graph, nodes, len(nodes), params, context))

    def record(self, event: Any, after: Sequence[int]) -> int:
        """Add a node that records an event, by its handle, after these nodes; returns it."""
        driver = self._gpu.driver
        nodes = [driver.CUgraphNode(node) for node in after]
        return int(call(driver.cuGraphAddEventRecordNode, self._graph, nodes, len(nodes), event))

    def finish(self, keeps: object) -> Graph:
        """The executable graph; it keeps `keeps` alive."""
        return Graph(self._gpu, self._graph, keeps)

    def _add_programmatic_edge(self, first: int, second: int) -> None:
        """Programmatic dependent launch: the second kernel itself waits for the first (LaunchConfig.overlaps)."""
        driver = self._gpu.driver
        edge = driver.CUgraphEdgeData()
        edge.from_port, edge.to_port, edge.type = _PROGRAMMATIC_PORT, 0, _PROGRAMMATIC_EDGE
        add = getattr(driver, "cuGraphAddDependencies_v2", driver.cuGraphAddDependencies)  # CUDA 12, CUDA 13
        call(add, self._graph, [driver.CUgraphNode(first)], [driver.CUgraphNode(second)], [edge], 1)


def _c_handle(handle: int) -> Any:
    """A handle as a ctypes argument: an int would be converted in every call."""
    return ctypes.c_void_p.from_param(handle)


class Streams(dict[int, Any]):
    """A cache: stream -> its handle as a ctypes argument."""

    def __missing__(self, stream: int) -> Any:
        if len(self) >= MAX_STREAMS:
            self.clear()
        handle = self[stream] = _c_handle(stream)
        return handle


def _retry(gpu: LaunchContext, code: int, launch: Callable[..., int], arguments: Sequence[Any], doing: str) -> None:
    """Retry with this GPU's context current, if it was not; raise any other error."""
    if code in _CONTEXT_CODES:
        with gpu:
            code = launch(*arguments)
    if code:
        fail(code, doing)


class _Attribute(ctypes.Structure):  # CUlaunchAttribute, with its 64-byte value as ints
    _fields_ = (("id", ctypes.c_uint), ("unused", ctypes.c_uint), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):  # CUlaunchConfig
    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_uint64), ("attributes", ctypes.c_void_p), ("attribute_count", ctypes.c_uint),
    )  # fmt: skip


class _NodeParams(ctypes.Structure):  # CUDA_KERNEL_NODE_PARAMS_v2
    _fields_ = (
        ("function", ctypes.c_void_p), ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint), ("arguments", ctypes.c_void_p), ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p), ("context", ctypes.c_void_p),
    )  # fmt: skip


class TensorMapArgument:
    """A tensor map as a launch argument. Setting `value`, the array's address, encodes the map again."""

    def __init__(self, gpu: LaunchContext, tensor_map: TensorMap | WindowMap) -> None:
        rank, element_bytes = len(tensor_map.shape), TENSOR_MAP_BYTES[tensor_map.dtype]
        kind = getattr(gpu.driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{TENSOR_MAP_DTYPES[tensor_map.dtype]}")
        self._storage = ctypes.create_string_buffer(_TENSOR_MAP_BYTES + _TENSOR_MAP_ALIGN)
        begin = ctypes.addressof(self._storage)
        self.address = -(-begin // _TENSOR_MAP_ALIGN) * _TENSOR_MAP_ALIGN
        strides = list(itertools.accumulate(tensor_map.shape, operator.mul, initial=element_bytes))[1:-1]
        sizes = (ctypes.c_uint64 * rank)(*tensor_map.shape), (ctypes.c_uint64 * max(1, rank - 1))(*strides)
        if isinstance(tensor_map, TensorMap):
            self._encode = gpu.encode_tensor_map
            box, steps = (ctypes.c_uint32 * rank)(*tensor_map.box), (ctypes.c_uint32 * rank)(*[1] * rank)
            boxes: tuple[Any, ...] = box, steps
        else:
            self._encode = gpu.encode_window_map
            corners = [(ctypes.c_int * 2)(*corner) for corner in ([-n for n in tensor_map.before], tensor_map.after)]
            boxes = *corners, tensor_map.channels, tensor_map.pixels, (ctypes.c_uint32 * rank)(1, *tensor_map.stride, 1)
        # Not interleaved, 128-byte L2 promotion, zero fill outside.
        self._sizes = (*sizes, *boxes, 0, _SWIZZLES[tensor_map.swizzle_bytes], 2, 0)
        self._kind, self._map, self._pointer = (int(kind), rank), tensor_map, 0

    @property
    def value(self) -> int:
        return self._pointer

    @value.setter
    def value(self, pointer: int) -> None:
        if pointer == self._pointer:
            return
        if code := self._encode(ctypes.c_void_p(self.address), *self._kind, ctypes.c_void_p(pointer), *self._sizes):
            fail(code, f"encoding {self._map}")
        self._pointer = pointer


class Call:
    """A launch with prepared arguments: launching it again is one driver call without conversions.

    `arguments` are ctypes values and TensorMapArguments; set `.value` of one to change it. Not thread-safe.
    """

    def __init__(self, gpu: LaunchContext, function: Function, config: LaunchConfig, arguments: Sequence[Any]) -> None:
        self.arguments = [ctypes.c_uint64(a) if isinstance(a, int) else a for a in arguments]
        self.name = function.name
        self._gpu = gpu
        # The driver expects an array with the address of each argument.
        self._addresses = (ctypes.c_void_p * len(self.arguments))(*map(_address_of, self.arguments))
        self.config = _Config(config.grid, config.block, config.shared_bytes)
        self.overlaps = config.overlaps
        self.node_attributes = [_Attribute(_CLUSTER, 0, (config.cluster, 1, 1))] if config.cluster > 1 else []
        self.node_attributes += [_Attribute(_COOPERATIVE, 0, (1,))] if config.cooperative else []
        wanted = [*([_Attribute(_OVERLAPS, 0, (1,))] if config.overlaps else []), *self.node_attributes]
        if wanted:
            self._attributes = (_Attribute * len(wanted))(*wanted)
            self.config.attributes, self.config.attribute_count = ctypes.addressof(self._attributes), len(wanted)
        self._function = int(function.handle)
        self._launch = gpu.launch_kernel
        self._launch_args = (
            ctypes.byref(self.config), _c_handle(self._function), ctypes.byref(self._addresses), None,
        )  # fmt: skip

    def launch(self, stream: int) -> None:
        self.config.stream = stream
        if code := self._launch(*self._launch_args):
            _retry(self._gpu, code, self._launch, self._launch_args, f"launching {self.name}")

    @property
    def node_params(self) -> _NodeParams:
        """The launch as kernel node parameters; they point to the arguments of this launch."""
        config = self.config
        addresses = ctypes.addressof(self._addresses)
        return _NodeParams(self._function, config.grid, config.block, config.shared_bytes, addresses)


def _address_of(argument: Any) -> int:
    return argument.address if isinstance(argument, TensorMapArgument) else ctypes.addressof(argument)
