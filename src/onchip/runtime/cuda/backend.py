"""The CUDA backend: binds plans to one GPU, for host arrays and GPU arrays."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter_ns
from typing import Any, NoReturn, cast

from onchip.errors import DeviceError, PlanError
from onchip.kernels.cuda import KERNELS
from onchip.kernels.cuda.common.program import Lowering
from onchip.kernels.cuda.layout.permute import PermuteLowering
from onchip.network.recipe import Array
from onchip.plan.build_cost import recipe_rates_of
from onchip.plan.plan import Plan
from onchip.runtime.arrays.adapters import kind_of
from onchip.runtime.arrays.calls import DeviceCalls, Run, device_run
from onchip.runtime.cuda.bound_plan import MAX_GRAPHS, BoundGroup, BoundPlan, BoundRows, StreamKey, stream_key
from onchip.runtime.cuda.gpu import Event, Gpu
from onchip.runtime.cuda.occupancy import occupancy
from onchip.runtime.cuda.status import Ticket
from onchip.runtime.cuda.timed_copies import TimedCopies
from onchip.runtime.cuda.timed_graph import EventGraphBuilder, GpuClock, Launched, TimedGraph
from onchip.runtime.cuda.trainer import TrainingBound
from onchip.runtime.cuda.weights import make_weights
from onchip.runtime.spans import Call, Recorder, Resources


class CudaBound(BoundPlan):
    """A plan on a GPU, with the interface that engines use."""

    checks_ids = True  # in the lookup kernel: a check on the host would read them twice while the GPU waits

    def run_like(self, x: Any) -> Run | None:
        """A function that runs arrays of x's type in place; None if x is not on a GPU."""
        return device_run(x, self)

    def quick_call(self) -> None:
        return None

    def recorded(self, recorder: Recorder) -> RecordedPlan:
        return RecordedPlan(self.gpu, self.plan, self.groups, recorder)

    def together(self, *_: object) -> NoReturn:
        raise PlanError("a plan for inference cannot train", got="no loss", expected="a plan for training")

    trainers = together


class _ThreadCall(threading.local):
    """The call that this thread records."""

    launched: Launched | None = None


class RecordedPlan(CudaBound):
    """A bound plan that appends each call to a recorder, with the times of its launches, which run one after the other,
    and of the copies of host arrays.

    It shares the weights and kernels of the plan that it was made from. In debug mode its launches are not checked.
    """

    def __init__(self, gpu: Gpu, plan: Plan, groups: Sequence[BoundGroup], recorder: Recorder) -> None:
        super().__init__(gpu, plan, groups)
        self._recorder, self._clock = recorder, GpuClock(gpu)
        self._here = _ThreadCall()
        self._timed: OrderedDict[tuple[int, ...], TimedGraph] = OrderedDict()
        self._tracks: dict[StreamKey, str] = {}
        self._free_events: list[Event] = []  # for copies

    def run(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array], B: int) -> None:
        with self._recording(B):
            super().run(inputs, outputs, B)

    def run_like(self, x: Any) -> Run | None:
        kind = kind_of(x, self.gpu)  # not device_run: for torch it launches graphs of its own
        return DeviceCalls(kind, self) if kind is not None else None

    def enqueue(self, pointers: Mapping[str, int], B: int, stream: int) -> Ticket:
        """As the plain plan's, but returns when the launches are done. A stream that the caller captures gets the plain
        plan's launches, and they are not recorded."""
        with self.gpu:
            if self.gpu.is_capturing(stream):
                return super().enqueue(pointers, B, stream)
            with self._recording(B):
                ticket = super().enqueue(pointers, B, stream)
                self.gpu.synchronise(stream)
            return ticket

    @contextmanager
    def _recording(self, B: int) -> Iterator[None]:
        """Append a call of what this thread launches inside, and waits for; nothing if it raises."""
        launched = self._here.launched = Launched(self._clock.now())
        begin = perf_counter_ns()
        try:
            yield
        finally:
            self._here.launched = None
        end = perf_counter_ns()
        with self.gpu, self.gpu.relaxed(), self._lock:
            for graph in self._timed.values():
                if graph.launched is launched:
                    graph.read()
            spans = sorted(launched.spans, key=lambda span: span.begin_ns)
            self._recorder.append(Call(begin, end, B, tuple(spans)))

    def _timed_copies(self) -> TimedCopies | None:
        launched = self._here.launched
        assert launched is not None  # inside `run`
        return TimedCopies(self.gpu, launched, self._track_of, self._free_events)

    def _track_of(self, stream: int) -> str:
        return self._tracks.setdefault(stream_key(stream), f"stream {len(self._tracks) + 1}")

    def _enqueue_chunk(self, bound: BoundRows, pointers: Mapping[str, int], B: int, stream: int, status: int) -> None:
        launched = self._here.launched
        if launched is None:  # the caller captures the stream
            super()._enqueue_chunk(bound, pointers, B, stream, status)
            return
        key = (B, status, *stream_key(stream))
        with self.gpu.relaxed(), self._lock:  # a graph is updated, launched and read by one thread at a time
            if key not in self._timed:
                self._timed[key] = self._time(bound, pointers, B, stream, status)
            self._timed.move_to_end(key)
            self._timed[key].launch(pointers, stream, launched)
            if len(self._timed) > MAX_GRAPHS:
                _, oldest = self._timed.popitem(last=False)
                oldest.read()

    def _time(self, bound: BoundRows, pointers: Mapping[str, int], B: int, stream: int, status: int) -> TimedGraph:
        if not self._recorder.resources:
            self._recorder.resources.update(self._resources(bound, B))
        builder = EventGraphBuilder(self.gpu)
        graph = self.graph(B, pointers, stream, status, builder)
        groups = [group.index for group, steps in bound.steps for _ in range(steps.node_count)]
        return TimedGraph(graph, builder, groups, self.gpu.event(), self._clock.event_ns, self._track_of(stream), B)

    def _resources(self, bound: BoundRows, B: int) -> Iterator[tuple[int, Resources]]:
        """Of every group, from its launches for B rows."""
        for group, steps in bound.steps:
            launches = list(zip(group.lowering.at(B).launches, steps.functions, strict=True))
            if launches:
                registers = max(function.registers for _, function in launches)
                shared_bytes = max(f.static_shared_bytes + launch.config.shared_bytes for launch, f in launches)
                least = min(occupancy(*each, self.gpu.device.arch) for each in launches)
                yield group.index, Resources(registers, shared_bytes, least, len(launches))


class CudaBackend:
    """Binds plans to one GPU."""

    def __init__(self, device_index: int = 0) -> None:
        self.gpu = Gpu.get(device_index)
        self.device = self.gpu.device
        self.requested: tuple[str, int | None] = f"cuda:{device_index}", None

    def bind(self, plan: Plan) -> CudaBound | TrainingBound:
        if plan.device.arch != self.device.arch:
            raise DeviceError("the plan is for another device", got=plan.device.arch, expected=self.device.arch)
        return TrainingBound(self.gpu, plan) if plan.job.is_training else self.bind_rows(plan)

    def bind_rows(self, plan: Plan) -> CudaBound:
        """Compile each group for this GPU and compute its weights, on the GPU or the host."""
        wanted = [recipe for group in plan.groups for recipe in group.claim.recipes.values()]
        built = make_weights(self.gpu, wanted, plan.network.weights, recipe_rates_of(KERNELS, self.device))
        groups = []
        for i, group in enumerate(plan.groups):
            inputs, outputs = (tuple(plan.stored_in[name] for name in names) for names in (group.inputs, group.outputs))
            lowering = cast(Lowering, group.claim.facts)
            if group.claim.is_view:
                if inputs == outputs:
                    continue
                # A view that must be copied: a permute that keeps the order of the axes.
                t, units = plan.types[group.outputs[0]], self.device.units
                lowering = PermuteLowering((t.dtype,) * 2, t.row_shape, tuple(range(len(t.shape))), units)
            weights = {name: built[recipe] for name, recipe in group.claim.recipes.items()}
            groups.append(BoundGroup(i, lowering, inputs, weights, outputs))
        bound = CudaBound(self.gpu, plan, groups)
        bound.at(plan.job.batch)  # compiles the job's kernels before it is timed
        return bound
