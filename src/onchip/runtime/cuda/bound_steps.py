"""The launches of a claim, bound to a GPU: engines, scans and ladders all launch kernels through this."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from onchip.kernels.cuda.common.arguments import (
    Argument,
    Input,
    Int64,
    Memory,
    Output,
    Scratch,
    State,
    StatusWord,
    Struct,
    TensorMap,
    Texture,
    UInt32,
    Weight,
    WindowMap,
)
from onchip.kernels.cuda.common.program import KernelLaunch, Steps
from onchip.runtime.cuda.gpu import Buffer, Event, Gpu, SideStream
from onchip.runtime.cuda.launches import Call, Function, GraphBuilder, TensorMapArgument
from onchip.runtime.cuda.status import STATUS_BYTES
from onchip.runtime.cuda.texture import TextureObject

_START = -1  # the point before the first launch, among the launch indices


class BoundSteps:
    """Steps for one batch size, compiled and loaded, with all arguments prepared except the pointers of a call.

    Not thread-safe: the pointers are written in place.
    """

    def __init__(
        self, gpu: Gpu, steps: Steps, weights: Mapping[str, Buffer] | None = None,
        state: Mapping[str, Buffer] | None = None,
    ) -> None:  # fmt: skip
        """weights  from the claim's recipes, by name; kept alive
        state    memory that the launches modify, by name; kept alive
        """
        self.scratch_bytes = steps.scratch_bytes
        self.functions: list[Function] = []
        self.calls: list[Call] = []
        self.uses: list[list[tuple[Any, Input | Output]]] = []  # per launch: its pointer arguments
        self._gpu, self._cleared_bytes = gpu, steps.cleared_bytes
        self._weights, self._state = weights or {}, state or {}
        self._inputs: list[tuple[Any, int]] = []  # argument, index of its input
        self._outputs: list[tuple[Any, int]] = []
        self._scratches: list[tuple[Any, int]] = []  # argument, offset
        self._statuses: list[tuple[Any, int]] = []
        self._textures: list[TextureObject] = []
        for launch in steps.launches:
            self._bind(gpu, launch)
        self.status_bytes = len(self._statuses) * STATUS_BYTES
        self._after = [launch.after for launch in steps.launches]
        in_order = all(after is None for after in self._after)
        self._branches = None if in_order else _Branches(gpu, steps.launches)

    def _bind(self, gpu: Gpu, launch: KernelLaunch) -> None:
        function = gpu.load(launch.program, launch.config.shared_bytes, launch.config.cluster)
        self.uses.append([])
        arguments = [self._to_ctypes(argument) for argument in launch.arguments]
        self.functions.append(function)
        self.calls.append(gpu.prepare(function, launch.config, arguments))

    def _to_ctypes(self, argument: Argument) -> Any:
        """The argument as a ctypes value; pointers that change per call are recorded to be set later."""
        match argument:
            case Int64(value):
                return ctypes.c_int64(value)
            case UInt32(value):
                return ctypes.c_uint32(value)
            case StatusWord():
                word = ctypes.c_uint64(0)
                self._statuses.append((word, len(self._statuses) * STATUS_BYTES))
                return word
            case TensorMap(of) | WindowMap(of):
                return self._set_pointer(TensorMapArgument(self._gpu, argument), of)
            case Struct(data, pointers):
                whole = ctypes.create_string_buffer(data, len(data))
                for offset, pointer in pointers:
                    self._set_pointer(ctypes.c_uint64.from_buffer(whole, offset), pointer)
                return whole
            case Texture(of, elements):
                texture = TextureObject(self._gpu, self._set_pointer(ctypes.c_uint64(0), of).value, elements)
                self._textures.append(texture)
                return ctypes.c_uint64(texture.handle)
            case _:
                return self._set_pointer(ctypes.c_uint64(0), argument)

    def _set_pointer(self, argument: Any, memory: Memory | Int64) -> Any:
        match memory:
            case Int64(value):
                argument.value = value
            case Weight(name):
                argument.value = self._weights[name].pointer
            case State(name):
                argument.value = self._state[name].pointer
            case Scratch(offset):
                self._scratches.append((argument, offset))
            case Input(index) | Output(index):
                (self._inputs if isinstance(memory, Input) else self._outputs).append((argument, index))
                self.uses[-1].append((argument, memory))
        return argument

    def enqueue(
        self, inputs: Sequence[int], outputs: Sequence[int], scratch: int, stream: int,
        after_launch: Callable[[int], None] | None = None, status: int = 0,
    ) -> None:  # fmt: skip
        """Put the launches on a stream.

        inputs, outputs  pointers, in the group's order
        scratch          pointer to `scratch_bytes` that only this call uses
        after_launch     called after each launch with its stream
        status           pointer to STATUS_BYTES per StatusWord
        """
        self._set(inputs, outputs, scratch, status)
        if self._cleared_bytes:
            self._gpu.clear(scratch, self._cleared_bytes, stream)
        if self._branches is not None:
            self._branches.enqueue(self.calls, stream, after_launch)
            return
        for call in self.calls:
            call.launch(stream)
            if after_launch is not None:
                after_launch(stream)

    def add_to(
        self, graph: GraphBuilder, inputs: Sequence[int], outputs: Sequence[int], scratch: int,
        dependencies: Sequence[int] = (), status: int = 0, overlaps: bool = True,
    ) -> tuple[list[int], list[int]]:  # fmt: skip
        """Add the launches to a graph after these nodes; returns the nodes of all launches and the final ones.

        overlaps  whether a launch may begin before the only one of these nodes has ended
        """
        self._set(inputs, outputs, scratch, status)
        if self._cleared_bytes:
            dependencies = [graph.clear(scratch, self._cleared_bytes, dependencies)]
        nodes: list[int] = []
        ends = list(dependencies)
        for i, (launch, after) in enumerate(zip(self.calls, self._after, strict=True)):
            indices = range(max(0, i - 1), i) if after is None else after
            waits = [nodes[earlier] for earlier in indices]
            nodes.append(graph.add(launch, waits or list(dependencies), overlaps or bool(waits)))
            waits = waits or list(dependencies)
            ends = [*(node for node in ends if node not in waits), nodes[-1]]
        return nodes, ends

    @property
    def node_count(self) -> int:
        """Nodes that `add_to` adds: the launches, and a memset of scratch memory that must begin as zeros."""
        return len(self.calls) + bool(self._cleared_bytes)

    def _set(self, inputs: Sequence[int], outputs: Sequence[int], scratch: int, status: int) -> None:
        for argument, index in self._inputs:
            argument.value = inputs[index]
        for argument, index in self._outputs:
            argument.value = outputs[index]
        for argument, offset in self._scratches:
            argument.value = scratch + offset
        for argument, offset in self._statuses:
            argument.value = status + offset

    @property
    def pointers(self) -> tuple[Any, Any] | None:
        """The arguments for x and y, if there is one launch with one input, one output and no scratch or status."""
        if len(self.calls) != 1 or len(self._inputs) != 1 or len(self._outputs) != 1:
            return None
        if self._scratches or self._statuses or self._cleared_bytes:
            return None
        return self._inputs[0][0], self._outputs[0][0]


class _Branches:
    """Launches that do not all depend on the previous one: some run on side streams, joined by events.

    Under stream capture they become branches of the graph.
    """

    def __init__(self, gpu: Gpu, launches: Sequence[KernelLaunch]) -> None:
        self._lanes: list[int] = []  # per launch: 0 is the caller's stream, others are side streams
        self._waits: list[list[int]] = []  # per launch: the launches of other lanes that it waits for
        last: list[int] = []  # launch per lane
        for i, launch in enumerate(launches):
            after = tuple(range(max(0, i - 1), i)) if launch.after is None else launch.after
            assert all(0 <= earlier < i for earlier in after), f"launch {i} cannot wait for {after}"
            lane = next((lane for lane, end in enumerate(last) if end in after), len(last))
            is_new = lane == len(last)
            last[lane : lane + 1] = [i]
            self._lanes.append(lane)
            waits = [earlier for earlier in after if self._lanes[earlier] != lane]
            self._waits.append(waits or [_START] * (is_new and lane > 0))
        self._ends = last[1:]  # later work on the caller's stream waits for these
        known = {earlier for waits in self._waits for earlier in waits} | set(self._ends)
        self._events: dict[int, Event] = {i: gpu.event() for i in known}
        self._streams = [SideStream(gpu) for _ in self._ends]

    def enqueue(self, calls: Sequence[Call], stream: int, after_launch: Callable[[int], None] | None) -> None:
        events, streams = self._events, [stream, *(side.handle for side in self._streams)]
        if _START in events:
            events[_START].record(stream)
        for i, (call, lane, waits) in enumerate(zip(calls, self._lanes, self._waits, strict=True)):
            on = streams[lane]
            for earlier in waits:
                events[earlier].block_stream(on)
            call.launch(on)
            if i in events:
                events[i].record(on)
            if after_launch is not None:
                after_launch(on)
        for end in self._ends:
            events[end].block_stream(stream)
