"""The CUDA backend: a plan made ready for one GPU, and run there."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from onchip.errors import DeviceError, ShapeError
from onchip.kernels.cuda.program import Launch
from onchip.plan.planner import Plan
from onchip.runtime.cpu import bake
from onchip.runtime.gpu import Buffer, Call, Function, Gpu, Graph
from onchip.runtime.staging import staging_of
from onchip.spec.recipe import Array, Made
from onchip.spec.types import numpy_dtype

MOST_CALLS = 64  # kept a thread, by number of rows
MOST_GRAPHS = 8  # kept, each with its memory for values between groups


@dataclass(frozen=True, eq=False)
class Step:
    """One group, compiled and loaded, its weights on the GPU."""

    label: str
    function: Function
    launch: Launch
    inputs: tuple[str, ...]
    weights: tuple[Buffer, ...]
    outputs: tuple[str, ...]

    @functools.cached_property
    def slots(self) -> tuple[tuple[int, str], ...]:
        """Which argument is the pointer of which value: the inputs, the weights, the outputs, the count of rows."""
        behind = len(self.inputs) + len(self.weights)
        return (*enumerate(self.inputs), *enumerate(self.outputs, behind))

    def call(self, gpu: Gpu, B: int) -> Call:
        """The launch for B rows, with the pointers of its values still to be set."""
        weights = (buffer.pointer for buffer in self.weights)
        pointers = [*(0 for _ in self.inputs), *weights, *(0 for _ in self.outputs)]
        config = self.launch.launch_config(B)
        with gpu:
            self.function.allow_shared(config.shared_bytes)
        return Call(gpu, self.function, config, [*pointers, ctypes.c_int64(self.launch.count(B))])


class _Calls(threading.local):
    """A thread's own launches: the arguments of one are written in place."""

    def __init__(self) -> None:
        self.by_rows: dict[int, Call] = {}


@dataclass(frozen=True, eq=False)
class _Repeated:
    graph: Graph
    buffers: list[Buffer]  # what the graph keeps between groups


class PlanState:
    """A plan on a GPU. `enqueue` puts the network's work on a stream and returns at once."""

    def __init__(self, gpu: Gpu, plan: Plan, steps: Sequence[Step]) -> None:
        self.gpu, self.plan, self.steps = gpu, plan, tuple(steps)
        self.debug = False  # wait after every launch, so that a fault is known to be this kernel's
        net = plan.network
        made = {name for group in plan.groups for name in group.outputs}
        self._between = {name: net.types[name].row_bytes for name in made if name not in net.outputs}
        ends = (*net.inputs, *dict.fromkeys(net.outputs))
        self.row_bytes = sum(net.types[name].row_bytes for name in ends) + sum(self._between.values())
        self._calls = _Calls()
        self._graphs: OrderedDict[tuple[int, ...], _Repeated | None] = OrderedDict()
        self._lock = threading.Lock()

    def enqueue(self, pointers: Mapping[str, int], B: int, stream: int) -> None:
        """Run the network on B > 0 rows: one launch for one group; a graph for more, once they were seen before.

        pointers  of the network's inputs and outputs, 16-byte aligned, in the network's order
        """
        if len(self.steps) == 1:
            self._launch(self.steps[0], self.call(B), pointers, stream)
        elif self.debug or self.gpu.is_capturing(stream):
            self._launch_all(pointers, B, stream)
        else:
            self._launch_repeated(pointers, B, stream)

    def call(self, B: int) -> Call:
        """This thread's launch of the only group for B rows."""
        calls = self._calls.by_rows
        if B not in calls:
            if len(calls) >= MOST_CALLS:
                calls.clear()
            calls[B] = self.steps[0].call(self.gpu, B)
        return calls[B]

    def _launch(self, step: Step, call: Call, values: Mapping[str, int], stream: int) -> None:
        for index, name in step.slots:
            call.arguments[index].value = values[name]
        call.launch(stream)
        if self.debug and not self.gpu.is_capturing(stream):
            self.gpu.synchronise(stream, kernel=step.label)

    def _launch_all(self, pointers: Mapping[str, int], B: int, stream: int) -> None:
        allocate = self.gpu.allocate
        between = {name: allocate(size * B, stream, self.row_bytes) for name, size in self._between.items()}
        self._launch_steps({**pointers, **{name: buffer.pointer for name, buffer in between.items()}}, B, stream)

    def _launch_steps(self, values: Mapping[str, int], B: int, stream: int) -> None:
        for step in self.steps:
            self._launch(step, step.call(self.gpu, B), values, stream)

    def _launch_repeated(self, pointers: Mapping[str, int], B: int, stream: int) -> None:
        """The second time that the same rows lie at the same place, and from then on, one graph is launched."""
        key = (B, *pointers.values())
        with self._lock:  # a graph is launched by one thread at a time
            if key not in self._graphs:
                self._graphs[key] = None
                self._launch_all(pointers, B, stream)
            else:
                kept = self._graphs[key] or self._capture(pointers, B)
                self._graphs[key] = kept
                self._graphs.move_to_end(key)
                kept.graph.launch(stream)
            if len(self._graphs) > MOST_GRAPHS:
                self._graphs.popitem(last=False)

    def _capture(self, pointers: Mapping[str, int], B: int) -> _Repeated:
        # Not of the pool: the graph may run on any stream, and one launch of it waits for the one before.
        buffers = {name: self.gpu.reserve(size * B, self.row_bytes) for name, size in self._between.items()}
        values = {**pointers, **{name: buffer.pointer for name, buffer in buffers.items()}}
        graph = self.gpu.capture(lambda recording: self._launch_steps(values, B, recording))
        return _Repeated(graph, list(buffers.values()))


class CudaBackend:
    """Runs plans on one GPU. NumPy in, NumPy out; arrays on the GPU go through `device_arrays`."""

    def __init__(self, device_index: int = 0) -> None:
        self.gpu = Gpu.get(device_index)
        self.device = self.gpu.device
        self.asked: tuple[str, int | None] = f"cuda:{device_index}", None

    def prepare(self, plan: Plan) -> PlanState:
        """Compile each group for this GPU and upload the weights that its recipes make."""
        if plan.device.arch != self.device.arch:
            raise DeviceError("the plan is for another device", got=plan.device.arch, expected=self.device.arch)
        made: Made = {}
        steps = []
        for group in plan.groups:
            launch = cast(Launch, group.claim.facts)
            recipes = group.claim.recipes.values()
            weights = tuple(self.gpu.upload(bake(recipe, plan, made)) for recipe in recipes)
            function = self.gpu.load(launch.program, launch.launch_config(1).shared_bytes)
            steps.append(Step(group.claim.label, function, launch, group.inputs, weights, group.outputs))
        return PlanState(self.gpu, plan, steps)

    def run(self, state: PlanState, inputs: Mapping[str, Array], outputs: Mapping[str, Array], B: int) -> None:
        """Run the network on B rows; returns when the outputs are complete.

        inputs   name -> (B, ...) of the network's input types, row-major
        outputs  name -> (B, ...) of the network's output types, row-major, overwritten
        """
        net = state.plan.network
        for name, array in (*inputs.items(), *outputs.items()):
            given = net.types[name]
            fits = array.dtype == numpy_dtype(given.dtype) and array.shape == (B, *given.row_shape)
            if not (fits and array.flags.c_contiguous):
                got = f"{array.dtype}{list(array.shape)}"
                raise ShapeError(f"'{name}' does not fit", got=got, expected=f"{given} with B = {B}, row-major")
        if B == 0:
            return
        names = (*inputs, *outputs)

        def enqueue(given: Sequence[int], made: Sequence[int], rows: int, stream: int) -> None:
            state.enqueue(dict(zip(names, (*given, *made), strict=True)), rows, stream)

        staging_of(self.gpu).run(list(inputs.values()), list(outputs.values()), B, enqueue)
