"""Training on a GPU: the data, the weights and what the optimiser keeps lie there; steps are graphs, many in one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from onchip.errors import KernelError, PlanError
from onchip.kernels.cuda.mlp_train import RULE_FLOATS, TrainLowering
from onchip.kernels.cuda.program import Steps
from onchip.kernels.training import (
    STATE_NAMES,
    SharedData,
    bytes_of,
    check_restored,
    epochs_at_once,
    rules_of_steps,
)
from onchip.plan.kernel import OPTIMISERS
from onchip.plan.plan import Plan
from onchip.plan.step_info import StepInfo, steps_of
from onchip.runtime.cuda.bound_steps import BoundSteps
from onchip.runtime.cuda.gpu import Buffer, Gpu, SideStream
from onchip.runtime.cuda.launches import Graph, GraphBuilder
from onchip.spec.recipe import Array, materialise

SLICE_BYTES = 64 << 20  # of rows that are copied at a time
_KEPT = ("mean", "square")  # the kernels' names for what optimisers keep, in the order of STATE_NAMES


class CudaTrainer:
    """One training run on a GPU, on a stream of its own: several may run side by side."""

    def __init__(self, gpu: Gpu, plan: Plan, x: Array, y: Array, shared: SharedData) -> None:
        """x (n, D_in) float32; y (n,) int64 classes or (n, D_out) float32 targets; both are copied to the GPU, once for
        all runs that share them."""
        (group,) = plan.groups  # a training kernel claims the whole network
        assert isinstance(group.claim.facts, TrainLowering)
        self.x, self.job, self.lowering = x, plan.job, group.claim.facts
        self.steps_done = 0
        self._gpu, self._layers = gpu, self.lowering.layers
        with gpu:
            self._stream = SideStream(gpu)
        self._memory: dict[str, Buffer] = {}
        self._capacity = 0  # rows of orders
        self._sent: dict[int, Array] = {}  # the orders that lie there, by the row that they begin at
        self._graphs: dict[int, Graph] = {}
        self._losses: Graph | None = None
        self._send_data(x, y, shared)
        self._make_memory()
        self._write_weights({name: materialise(name, plan.network.weights) for name in self._weight_names()}, "", "w")
        a_step = self.job.batch
        self._make_room(epochs_at_once(len(x), a_step) * -(-len(x) // a_step) * a_step)

    @property
    def gpu_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._memory.values())

    def steps(
        self, order: Array, lr: float, momentum: float, decay: float, meanwhile: Callable[[], None] | None = None
    ) -> tuple[Array, Array]:
        return self.epochs((order,), (lr,), momentum, decay, meanwhile)[0]

    def epochs(
        self, orders: Sequence[Array], lrs: Sequence[float], momentum: float, decay: float,
        meanwhile: Callable[[], None] | None = None,
    ) -> list[tuple[Array, Array]]:  # fmt: skip
        batch, rows = self.job.batch, len(orders[0])
        count = -(-rows // batch)  # steps of an order; each begins a multiple of `batch` rows behind the one before
        self._make_room(len(orders) * count * batch)
        if not count:  # no step: what the run will launch is made ready
            for size in set(self.lowering.graphs_of(-(-len(self.x) // batch))):
                self._graph(size)
            return [(np.zeros(0), np.zeros(0, np.int64))] * len(orders)
        sizes = np.full(count, batch)
        sizes[-1] = rows - (count - 1) * batch
        rules = np.zeros((len(orders) * count, RULE_FLOATS), np.float32)
        for i, lr in enumerate(lrs):
            given = rules_of_steps(
                self.job, self._layers[-1].N, sizes, self.steps_done + i * count, lr, momentum, decay
            )
            rules[i * count : (i + 1) * count, : given.shape[1]] = given
        with self._gpu:
            self._gpu.write(self._memory["rules"], rules, self._stream.handle)
            for i, order in enumerate(orders):
                self._begin(order, i * count)
                for size in self.lowering.graphs_of(count):
                    self._graph(size).launch(self._stream.handle)
            if meanwhile is not None:
                meanwhile()
            losses, hits = self._end(len(orders) * count, self.lowering.groups)
        self.steps_done += len(orders) * count
        losses, hits = losses.reshape(-1, count), hits.reshape(-1, count)
        if self.job.loss != "half_sse":
            losses /= sizes
        return list(zip(losses, hits, strict=True))

    def evaluate(self, order: Array) -> tuple[float, int]:
        self._make_room(len(order))
        if self._losses is None:
            self._losses = self._build(self.lowering.losses())
        if not len(order):
            return 0.0, 0
        with self._gpu:
            self._begin(order)
            count = -(-len(order) // self.lowering.row_count)
            for _ in range(count):
                self._losses.launch(self._stream.handle)
            losses, hits = self._end(count)
        return float(losses.sum()) / (1 if self.job.loss == "half_sse" else len(order)), int(hits.sum())

    # -- weights and state by name -----------------------------------------------------------------------------

    def weights(self) -> dict[str, Array]:
        return self._read_weights("", "w")

    def state(self) -> dict[str, Array]:
        kept = {"steps": np.array([self.steps_done])}
        for name, memory in zip(STATE_NAMES[self.job.optimiser], _KEPT, strict=False):
            kept |= self._read_weights(f"{name}:", memory)
        return kept

    def check(self, weights: Mapping[str, Array], state: Mapping[str, Array]) -> None:
        check_restored(weights, state, self.weights(), self.state())

    def restore(self, weights: Mapping[str, Array], state: Mapping[str, Array]) -> None:
        self.check(weights, state)
        self._write_weights(weights, "", "w")
        for name, memory in zip(STATE_NAMES[self.job.optimiser], _KEPT, strict=False):
            self._write_weights(state, f"{name}:", memory)
        self.steps_done = int(state["steps"][0])

    def _weight_names(self) -> Iterator[str]:
        for layer in self._layers:
            yield layer.weight
            if layer.bias:
                yield layer.bias

    def _read_weights(self, prefix: str, memory: str) -> dict[str, Array]:
        named: dict[str, Array] = {}
        for i, layer in enumerate(self._layers):
            rows = self._gpu.download(self._memory[f"{memory}{i}"], np.empty((layer.N, layer.stride), np.float32))
            named[prefix + layer.weight] = rows[:, : layer.D].copy()
            if layer.bias:
                named[prefix + layer.bias] = rows[:, layer.D].copy()
        return named

    def _write_weights(self, arrays: Mapping[str, Array], prefix: str, memory: str) -> None:
        for i, layer in enumerate(self._layers):
            rows = np.zeros((layer.N, layer.stride), np.float32)
            rows[:, : layer.D] = arrays[prefix + layer.weight]
            if layer.bias:
                rows[:, layer.D] = arrays[prefix + layer.bias]
            with self._gpu:
                self._gpu.write(self._memory[f"{memory}{i}"], rows, self._stream.handle)
                self._gpu.synchronise(self._stream.handle)

    # -- memory --------------------------------------------------------------------------------------------------

    def _upload(self, name: str, array: Array) -> None:
        self._memory[name] = self._gpu.upload(array)

    def _send(
        self, name: str, rows: int, width: int, fill: Callable[[Array, int], None] | None = None,
        dtype: Any = np.float32,
    ) -> Buffer:  # fmt: skip
        """Make (rows, width) numbers there: zeros, and what `fill` writes to some rows, of which it knows the first."""
        row_bytes, stream = np.dtype(dtype).itemsize * width, self._stream.handle
        buffer = self._memory[name] = self._gpu.reserve(rows * row_bytes)
        most = max(1, SLICE_BYTES // row_bytes)
        with self._gpu:
            if fill is None:
                self._gpu.clear(buffer.pointer, rows * row_bytes, stream)
                return buffer
            for first in range(0, rows, most):
                some = np.zeros((min(most, rows - first), width), dtype)
                fill(some, first)
                self._gpu.write(buffer, some, stream, first * row_bytes)
                self._gpu.synchronise(stream)
        return buffer

    def _send_data(self, x: Array, y: Array, shared: SharedData) -> None:
        first_layer, byte_rows = self._layers[0], self.lowering.byte_rows
        name, given, stride, one = "x", x, first_layer.stride, 1
        if byte_rows:
            found = shared.get("bytes", lambda: bytes_of(x))
            assert found is not None, "the plan knows that rows are bytes"
            name, given, stride, one = "bytes", found[0], byte_rows.stride, byte_rows.one

        def fill(some: Array, first: int) -> None:
            some[:, : first_layer.D] = given[first : first + len(some)]
            some[:, first_layer.D : first_layer.terms] = one

        # A network without a bias in its first layer wants other rows.
        self._memory[name] = shared.get(
            (name, self._gpu.index, first_layer.terms), lambda: self._send(name, len(x), stride, fill, given.dtype)
        )
        self._memory["targets"] = shared.get(("targets", self._gpu.index), lambda: self._gpu.upload(y))

    def _make_memory(self) -> None:
        rows, kept = self.lowering.row_count, OPTIMISERS[self.job.optimiser]
        for i, layer in enumerate(self._layers):
            width, terms = self.lowering.width(i), self._layers[i + 1].terms if i + 1 < len(self._layers) else layer.N

            def fill(some: Array, first: int, N: int = layer.N, terms: int = terms) -> None:
                some[:, N:terms] = 1

            self._send(f"a{i}", rows, width, fill)
            self._send(f"dz{i}", rows, width)
            for memory in ("w", *_KEPT[:kept]):
                self._send(f"{memory}{i}", layer.N, layer.stride)
            if slices := self.lowering.slices(i):
                self._memory[f"parts{i}"] = self._gpu.reserve(slices * 4 * layer.N * layer.stride)
        if byte_rows := self.lowering.byte_rows:
            for name, K in (("w_parts", byte_rows.terms), ("dz_parts", self.job.batch)):
                self._memory[name] = self._gpu.reserve(byte_rows.bytes_of_parts(K))
        for name, nbytes in self.lowering.own_memory().items():
            self._send(name, 1, nbytes, dtype=np.uint8)
        self._upload("losses", np.zeros(rows))
        self._upload("hits", np.zeros(rows, np.int32))
        self._upload("progress", np.zeros(2, np.int64))

    def _make_room(self, rows: int) -> None:
        """For an order of so many rows. Graphs know where it lies, so they are made anew."""
        if rows <= self._capacity:
            return
        steps = max(-(-rows // self.job.batch), -(-rows // self.lowering.row_count))
        self._graphs, self._losses, self._capacity = {}, None, rows
        self._sent = {}
        told = 8 * self.lowering.groups
        for name, row_bytes in (("rules", 4 * RULE_FLOATS), ("step_losses", told), ("step_hits", told)):
            self._memory[name] = self._gpu.reserve(steps * row_bytes)
        self._memory["order"] = self._gpu.reserve(rows * 8)

    # -- work ----------------------------------------------------------------------------------------------------

    def _graph(self, steps: int) -> Graph:
        if steps not in self._graphs:
            self._graphs[steps] = self._build(self.lowering.steps(steps))
        return self._graphs[steps]

    def _build(self, steps: Steps) -> Graph:
        bound = BoundSteps(self._gpu, steps, state=self._memory)
        with self._gpu, self._gpu.relaxed():
            graph = GraphBuilder(self._gpu)
            bound.add_to(graph, (), (), 0)
            return graph.finish(None)

    def _begin(self, order: Array, first_step: int = 0) -> None:
        """The next steps are those from first_step on, of the rows `order`."""
        stream, order, first = self._stream.handle, np.ascontiguousarray(order, np.int64), first_step * self.job.batch
        sent = self._sent.get(first)
        if sent is None or (order.ctypes.data, len(order)) != (sent.ctypes.data, len(sent)):
            self._sent = {at: there for at, there in self._sent.items() if not _overlap(at, there, first, order)}
            self._gpu.write(self._memory["order"], order, stream, first * order.itemsize)
            self._sent[first] = order  # kept, so no other array can lie there
        self._gpu.write(self._memory["progress"], np.array([first_step, first + len(order)]), stream)

    def _end(self, count: int, groups: int = 1) -> tuple[Array, Array]:
        """The losses and hits of the steps, when they are done."""
        stream, losses, hits = self._stream.handle, np.empty((count, groups)), np.empty((count, groups), np.int64)
        self._gpu.download(self._memory["step_losses"], losses, stream)
        self._gpu.download(self._memory["step_hits"], hits, stream)
        if "status" in self._memory:
            status = self._gpu.download(self._memory["status"], np.empty(2, np.uint32), stream)
            if status[1]:
                raise KernelError(
                    "blocks that train together did not find each other", got="a wait past its deadline",
                    expected="every block on the GPU at a time", hint="fewer programs on this GPU, or another one",
                )  # fmt: skip
        return losses.sum(axis=1), hits.sum(axis=1)


def _overlap(at: int, order: Array, other_at: int, other: Array) -> bool:
    return at < other_at + len(other) and other_at < at + len(order)


class TrainingBound:
    """A plan for training on a GPU."""

    checks_ids = False  # it has none

    def __init__(self, gpu: Gpu, plan: Plan) -> None:
        self.gpu, self.plan = gpu, plan

    def trainer(self, x: Array, y: Array, shared: SharedData | None) -> CudaTrainer:
        return CudaTrainer(self.gpu, self.plan, x, y, shared or SharedData())

    def run(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array], B: int) -> NoReturn:
        raise PlanError("a plan for training runs no rows", got=self.plan.job.loss, expected="a plan for inference")

    def run_like(self, x: object) -> None:
        return None

    def quick_call(self) -> None:
        return None

    def wait(self) -> None:
        self.gpu.wait_for_all()

    def steps(self, B: int) -> tuple[StepInfo, ...]:
        return steps_of(self.plan, B)
