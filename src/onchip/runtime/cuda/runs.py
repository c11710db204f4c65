"""Training runs on a GPU whose steps a kernel runs whole: data, weights and optimiser state stay there; graphs hold
many steps each. Networks of the same shape share their launches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np

from onchip.errors import KernelError
from onchip.kernels.cuda.common.program import Steps
from onchip.kernels.cuda.common.training import (
    ORDER,
    PROGRESS,
    ROW_WEIGHTS,
    STATUS,
    STEP_CORRECT,
    STEP_LOSSES,
    STEP_VALUES,
    TrainingLowering,
)
from onchip.kernels.training import (
    Epochs,
    LaunchTime,
    SharedData,
    Trained,
    mean_losses,
    weights_of_batches,
)
from onchip.network.recipe import Array, materialise
from onchip.plan.plan import Plan
from onchip.runtime.backend import NetworkRun
from onchip.runtime.cuda.bound_steps import BoundSteps
from onchip.runtime.cuda.gpu import Gpu, SideStream
from onchip.runtime.cuda.launches import Graph
from onchip.runtime.cuda.run_memory import Memory, allocate_memory, send_data
from onchip.runtime.cuda.timed_runs import time_launches

JOINED_STEPS = 8  # join epochs with fewer steps: a graph has a fixed cost at its beginning and end


class JointLaunches:
    """The launches of networks that train together, on their own stream: several groups may run concurrently."""

    def __init__(self, gpu: Gpu, lowering: TrainingLowering, memory: Memory, orders: Sequence[int]) -> None:
        """memory  the first network's
        orders  row counts of the orders that they will train on
        """
        self.gpu, self.lowering, self._memory = gpu, lowering, memory
        with gpu:
            self._side, self._copies = SideStream(gpu), SideStream(gpu)
        self.stream, self.copies = self._side.handle, self._copies.handle
        self._graphs: dict[int, Graph] = {}
        self._sizes = set[int]()
        for rows in orders:
            steps = -(-rows // lowering.batch)
            joined = steps * joined_epochs(rows, lowering.batch)
            self._sizes |= {*lowering.graphs_of(steps), *lowering.graphs_of(joined)}

    def steps(self, size: int) -> Graph:
        """A graph of `size` steps of all networks."""
        if size not in self._graphs:
            self._graphs[size] = self.build(self.lowering.steps(size), self._memory)
        return self._graphs[size]

    def sizes_of(self, count: int) -> list[int]:
        """Graph sizes that add up to `count` steps: those of whole epochs, else powers of two. A long epoch may be cut
        after any step, and each size needs a graph."""
        sizes: list[int] = []
        for size in self.lowering.graphs_of(count):
            sizes += [size] if size in self._sizes else powers_of_two(size)
        return sizes

    def make_ready(self) -> None:
        """Build the graphs that an epoch will launch."""
        for size in self._sizes:
            self.steps(size)

    def build(self, steps: Steps, memory: Memory) -> Graph:
        bound = BoundSteps(self.gpu, steps, state=memory)
        with self.gpu, self.gpu.relaxed():
            graph = self.gpu.graph_builder()
            bound.add_to(graph, (), (), 0)
            return graph.finish(None)


class CudaRuns:
    """Training runs of networks of the same shape, in the same launches."""

    is_asynchronous = True

    def __init__(
        self, gpu: Gpu, plan: Plan, runs: Sequence[NetworkRun], x: Array, y: Array, shared: SharedData
    ) -> None:
        """x (n, ...) float32; y (n,) int64 classes or (n, D_out) float32 targets; both are copied to the GPU once for
        all runs that share them."""
        lowering = lowering_of(plan).for_networks(len(runs))
        orders = [rows for run in runs for rows in (run.rows, run.held) if rows]
        data = send_data(gpu, lowering, x.reshape(len(x), -1), y, shared)
        stride_bytes, own = allocate_memory(gpu, lowering, orders, len(x))
        memories = [data | memory for memory in own]
        lowering = lowering.with_memory(lowering.networks, stride_bytes)
        self._launches = launches = JointLaunches(gpu, lowering, memories[0], orders)
        self._runs = [CudaRun(launches, run, memory) for run, memory in zip(runs, memories, strict=True)]
        self._begun, self._done, self.seconds = gpu.event(), gpu.event(), 0.0

    def make_ready(self) -> None:
        self._launches.make_ready()

    def begin(self, epochs: Sequence[Epochs | None]) -> None:
        launches = self._launches
        self._build_graphs(epochs)
        with launches.gpu:
            self._begun.record(launches.stream)
        work = [(run, run.begin(each) if each else []) for run, each in zip(self._runs, epochs, strict=True)]
        with launches.gpu:
            first = 0
            for together in self._together([[order for order, _ in orders] for _, orders in work]):
                counts = [run.begin_orders(orders[first : first + together]) for run, orders in work]
                first += together
                for size in launches.sizes_of(max(counts)):
                    launches.steps(size).launch(launches.stream)
            self._done.record(launches.stream)

    def _build_graphs(self, epochs: Sequence[Epochs | None]) -> None:
        """Those that `begin` launches: not while their steps are timed."""
        launches, first = self._launches, 0
        orders = [each.orders if each is not None else () for each in epochs]
        for together in self._together(orders):
            rows = [[len(order) for order in each[first : first + together]] for each in orders]
            first += together
            for size in launches.sizes_of(max(sum(-(-n // launches.lowering.batch) for n in each) for each in rows)):
                launches.steps(size)

    def end(self) -> list[Trained]:
        trained = [run.end() for run in self._runs]
        with self._launches.gpu:
            self.seconds = self._done.ms_since(self._begun) / 1e3
        return trained

    def evaluate(self, run: int, order: Array) -> tuple[float, int]:
        return self._runs[run].evaluate(order)

    def weights(self, run: int) -> dict[str, Array]:
        return self._launches.lowering.weights(self._runs[run].read)

    def moments(self, run: int) -> dict[str, Array]:
        return self._launches.lowering.moments(self._runs[run].read)

    def write(self, run: int, weights: Mapping[str, Array], state: Mapping[str, Array]) -> None:
        self._runs[run].write(weights, state)

    def gpu_bytes(self, run: int) -> int:
        return sum(buffer.nbytes for buffer in self._runs[run].memory.values())

    def time_steps(self) -> None:
        return  # launch_times runs steps of its own

    def launch_times(self) -> tuple[LaunchTime, ...]:
        launches = self._launches
        memories, rows = zip(*((run.memory, run.sent_rows) for run in self._runs), strict=True)
        return time_launches(launches.gpu, launches.lowering, launches.stream, memories, rows)

    def _together(self, runs: Sequence[Sequence[Array]]) -> list[int]:
        """How many orders of each run each round of launches joins."""
        batch, most = self._launches.lowering.batch, max(map(len, runs))
        joined = min(joined_epochs(len(order), batch) for orders in runs for order in orders)
        return [joined] * (most // joined) + [1] * (most % joined)


class CudaRun:
    """One run of a CudaRuns."""

    def __init__(self, launches: JointLaunches, run: NetworkRun, memory: Memory) -> None:
        self.memory, self._launches = memory, launches
        self._gpu, self._stream = launches.gpu, launches.stream
        self._lowering = launches.lowering.with_memory(1, 0)
        # Of the current epochs: per order and step, the sum of the batch's row weights.
        self._weights = np.zeros((0, 0))
        self._sent: dict[int, Array] = {}  # the orders on the GPU, by their first row
        self._order_is_there = launches.gpu.event()
        self._losses: Graph | None = None
        self._row_weights = run.row_weights
        if run.row_weights is not None:
            with self._gpu:
                self._gpu.write(memory[ROW_WEIGHTS], run.row_weights, self._stream)
                self._gpu.synchronise(self._stream)
        weights = run.network.weights
        self.write({name: materialise(name, weights) for name in weights}, {})

    @property
    def sent_rows(self) -> int:
        """The rows of the first order on the GPU."""
        return len(self._sent[0]) if 0 in self._sent else 0

    def begin(self, epochs: Epochs) -> list[tuple[Array, int]]:
        """Upload the optimiser values of each step; returns the epochs's orders, each with its first step."""
        self._weights = weights = self._weights_of_steps(epochs.orders)
        count, rates = weights.shape[1], (epochs.lrs.reshape(-1), epochs.momentum, epochs.decay)
        values = self._lowering.values(weights.reshape(-1), epochs.steps_done, *rates)
        with self._gpu:
            self._gpu.write(self.memory[STEP_VALUES], values, self._stream)
        return [(order, i * count) for i, order in enumerate(epochs.orders)]

    def begin_orders(self, orders: Sequence[tuple[Array, int]]) -> int:
        """Make the next steps read these orders, each with its first step; returns their number. Without orders, this
        network idles during the steps of the others."""
        batch, steps, progress = self._lowering.batch, 0, [0, 0]
        for order, first_step in orders:
            self._send_order(np.ascontiguousarray(order, np.int64), first_step * batch)
            steps += -(-len(order) // batch)
            progress = [orders[0][1], first_step * batch + len(order)]
        self._gpu.write(self.memory[PROGRESS], np.array(progress, np.int64), self._stream)
        return steps

    def _send_order(self, order: Array, first: int) -> None:
        """Upload an order so that its first row is row `first` of all orders, unless it is already there."""
        sent = self._sent.get(first)
        if sent is not None and (order.ctypes.data, len(order)) == (sent.ctypes.data, len(sent)):
            return
        self._sent = {at: old for at, old in self._sent.items() if not _overlap(at, old, first, order)}
        # On its own stream: on the other one the driver would wait until the previous steps are done.
        self._gpu.write(self.memory[ORDER], order, self._launches.copies, first * order.itemsize)
        self._order_is_there.record(self._launches.copies)
        self._order_is_there.block_stream(self._stream)
        self._sent[first] = order  # a reference, so that no other array can have its address

    def end(self) -> Trained:
        """The results of the current epochs, if there is one, when its steps are done."""
        weights, self._weights = self._weights, np.zeros((0, 0))
        if not weights.size:
            return []
        losses, correct = self._results(weights.size, self._lowering.groups)
        losses = mean_losses(self._lowering.training.loss, losses.reshape(weights.shape), weights)
        return list(zip(losses, correct.reshape(weights.shape), strict=True))

    def _weights_of_steps(self, orders: Sequence[Array]) -> Array:
        """(orders, steps). Each order begins a whole number of batches after the previous one."""
        batch = self._lowering.batch
        if self._row_weights is None:  # every row has weight 1
            return np.tile(weights_of_batches(orders[0], batch, None), (len(orders), 1))
        return np.stack([weights_of_batches(order, batch, self._row_weights) for order in orders])

    def evaluate(self, order: Array) -> tuple[float, int]:
        if self._losses is None:
            self._losses = self._launches.build(self._lowering.losses(), self.memory)
        if not len(order):
            return 0.0, 0
        with self._gpu:
            self.begin_orders([(order, 0)])
            count = -(-len(order) // self._lowering.row_count)
            for _ in range(count):
                self._losses.launch(self._stream)
            losses, correct = self._results(count)
        weight = weights_of_batches(order, len(order), self._row_weights)
        (loss,) = mean_losses(self._lowering.training.loss, losses.sum(keepdims=True), weight)
        return float(loss), int(correct.sum())

    def _results(self, count: int, groups: int = 1) -> tuple[Array, Array]:
        """The losses and correct predictions of the steps, when they are done."""
        losses, correct = np.empty((count, groups)), np.empty((count, groups), np.int64)
        self._gpu.download(self.memory[STEP_LOSSES], losses, self._stream)
        self._gpu.download(self.memory[STEP_CORRECT], correct, self._stream)
        if STATUS in self.memory:
            status = self._gpu.download(self.memory[STATUS], np.empty(2, np.uint32), self._stream)
            if status[1]:
                raise KernelError(
                    "grid barrier timed out during training", got="blocks that waited past the deadline",
                    expected="all blocks resident at once", hint="run fewer programs on this GPU, or use another GPU",
                )  # fmt: skip
        return losses.sum(axis=1), correct.sum(axis=1)

    # -- weights and optimiser state ---------------------------------------------------------------------------

    def read(self, name: str, array: Array) -> Array:
        return self._gpu.download(self.memory[name], array)

    def write(self, weights: Mapping[str, Array], state: Mapping[str, Array]) -> None:
        for name, array in self._lowering.stored(weights, state):
            with self._gpu:
                self._gpu.write(self.memory[name], array, self._stream)
                self._gpu.synchronise(self._stream)


def lowering_of(plan: Plan) -> TrainingLowering:
    """Of a plan whose steps a kernel runs whole."""
    (group,) = plan.groups
    return cast(TrainingLowering, group.claim.facts)


def joined_epochs(rows: int, batch: int) -> int:
    """How many epochs are trained as one. Only epochs of whole batches can be joined: they are contiguous."""
    return 1 if rows % batch else -(-JOINED_STEPS * batch // rows)


def powers_of_two(count: int) -> list[int]:
    """The powers of two that add up to it, largest first."""
    return [1 << i for i in reversed(range(count.bit_length())) if count >> i & 1]


def _overlap(at: int, order: Array, other_at: int, other: Array) -> bool:
    return at < other_at + len(other) and other_at < at + len(order)
