"""Training on a GPU: data, weights and optimiser state stay there; graphs hold many steps each. Networks of the same
shape share their launches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn, cast

import numpy as np

from onchip.errors import KernelError, PlanError
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
    check_restored,
    mean_losses,
    weights_of_batches,
)
from onchip.network.graph import Network
from onchip.network.recipe import Array, materialise
from onchip.plan.plan import Plan
from onchip.plan.step_info import StepInfo, steps_of
from onchip.runtime.cuda.bound_steps import BoundSteps
from onchip.runtime.cuda.gpu import Gpu, SideStream
from onchip.runtime.cuda.launches import Graph
from onchip.runtime.cuda.timed_steps import time_launches
from onchip.runtime.cuda.train_memory import Memory, allocate_memory, send_data

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


class CudaJointTrainer:
    """Training runs of networks of the same shape, in the same launches."""

    is_asynchronous = True

    def __init__(self, launches: JointLaunches, trainers: Sequence[CudaTrainer]) -> None:
        self.trainers, self._launches, self.seconds = trainers, launches, 0.0
        self._begun, self._done = launches.gpu.event(), launches.gpu.event()

    def make_ready(self) -> None:
        self._launches.make_ready()

    def begin(self, runs: Sequence[Epochs | None]) -> None:
        launches = self._launches
        self._build_graphs(runs)
        with launches.gpu:
            self._begun.record(launches.stream)
        work = [
            (trainer, trainer.begin(epochs) if epochs else [])
            for trainer, epochs in zip(self.trainers, runs, strict=True)
        ]
        with launches.gpu:
            first = 0
            for together in self._together([[order for order, _ in orders] for _, orders in work]):
                counts = [trainer.begin_orders(orders[first : first + together]) for trainer, orders in work]
                first += together
                for size in launches.sizes_of(max(counts)):
                    launches.steps(size).launch(launches.stream)
            self._done.record(launches.stream)

    def _build_graphs(self, runs: Sequence[Epochs | None]) -> None:
        """Those that `begin` launches: not while their steps are timed."""
        launches, first = self._launches, 0
        orders = [epochs.orders if epochs is not None else () for epochs in runs]
        for together in self._together(orders):
            rows = [[len(order) for order in each[first : first + together]] for each in orders]
            first += together
            for size in launches.sizes_of(max(sum(-(-n // launches.lowering.batch) for n in each) for each in rows)):
                launches.steps(size)

    def end(self) -> list[Trained]:
        trained = [trainer.end() for trainer in self.trainers]
        with self._launches.gpu:
            self.seconds = self._done.ms_since(self._begun) / 1e3
        return trained

    def time_steps(self) -> None:
        return  # launch_times runs steps of its own

    def launch_times(self) -> tuple[LaunchTime, ...]:
        launches = self._launches
        memories, rows = zip(*((trainer.memory, trainer.sent_rows) for trainer in self.trainers), strict=True)
        return time_launches(launches.gpu, launches.lowering, launches.stream, memories, rows)

    def _together(self, runs: Sequence[Sequence[Array]]) -> list[int]:
        """How many orders of each run each round of launches joins."""
        batch, most = self._launches.lowering.batch, max(map(len, runs))
        joined = min(joined_epochs(len(order), batch) for orders in runs for order in orders)
        return [joined] * (most // joined) + [1] * (most % joined)


class CudaTrainer:
    """One training run of a CudaJointTrainer."""

    def __init__(
        self, launches: JointLaunches, network: Network, x: Array, row_weights: Array | None, memory: Memory
    ) -> None:
        self.launches, self.x, self.memory, self.steps_done = launches, x, memory, 0
        self._gpu, self._stream = launches.gpu, launches.stream
        self._lowering = launches.lowering.with_memory(1, 0)
        self._training = self._lowering.training
        self._weights = np.zeros(
            (0, 0)
        )  # of the current epochs: per order and step, the sum of the batch's row weights
        self._sent: dict[int, Array] = {}  # the orders on the GPU, by their first row
        self._order_is_there = launches.gpu.event()
        self._losses: Graph | None = None
        self._row_weights = row_weights
        if row_weights is not None:
            with self._gpu:
                self._gpu.write(memory[ROW_WEIGHTS], row_weights, self._stream)
                self._gpu.synchronise(self._stream)
        self._write({name: materialise(name, network.weights) for name in network.weights}, {})

    @property
    def gpu_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.memory.values())

    @property
    def sent_rows(self) -> int:
        """The rows of the first order on the GPU."""
        return len(self._sent[0]) if 0 in self._sent else 0

    def begin(self, epochs: Epochs) -> list[tuple[Array, int]]:
        """Upload the optimiser values of each step; returns the epochs's orders, each with its first step."""
        self._weights = weights = self._weights_of_steps(epochs.orders)
        count, rates = weights.shape[1], (epochs.lrs.reshape(-1), epochs.momentum, epochs.decay)
        values = self._lowering.values(weights.reshape(-1), self.steps_done, *rates)
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
        self._gpu.write(self.memory[ORDER], order, self.launches.copies, first * order.itemsize)
        self._order_is_there.record(self.launches.copies)
        self._order_is_there.block_stream(self._stream)
        self._sent[first] = order  # a reference, so that no other array can have its address

    def end(self) -> Trained:
        """The results of the current epochs, if there is one, when its steps are done."""
        weights, self._weights = self._weights, np.zeros((0, 0))
        if not weights.size:
            return []
        losses, correct = self._results(weights.size, self._lowering.groups)
        self.steps_done += weights.size
        losses = mean_losses(self._training.loss, losses.reshape(weights.shape), weights)
        return list(zip(losses, correct.reshape(weights.shape), strict=True))

    def _weights_of_steps(self, orders: Sequence[Array]) -> Array:
        """(orders, steps). Each order begins a whole number of batches after the previous one."""
        batch = self._lowering.batch
        if self._row_weights is None:  # every row has weight 1
            return np.tile(weights_of_batches(orders[0], batch, None), (len(orders), 1))
        return np.stack([weights_of_batches(order, batch, self._row_weights) for order in orders])

    def evaluate(self, order: Array) -> tuple[float, int]:
        if self._losses is None:
            self._losses = self.launches.build(self._lowering.losses(), self.memory)
        if not len(order):
            return 0.0, 0
        with self._gpu:
            self.begin_orders([(order, 0)])
            count = -(-len(order) // self._lowering.row_count)
            for _ in range(count):
                self._losses.launch(self._stream)
            losses, correct = self._results(count)
        weight = weights_of_batches(order, len(order), self._row_weights)
        return float(mean_losses(self._training.loss, losses.sum(keepdims=True), weight)[0]), int(correct.sum())

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

    # -- weights and state by name -----------------------------------------------------------------------------

    def weights(self) -> dict[str, Array]:
        return self._lowering.weights(self._read)

    def state(self) -> dict[str, Array]:
        return {"steps": np.array([self.steps_done])} | self._lowering.moments(self._read)

    def check(self, weights: Mapping[str, Array], state: Mapping[str, Array]) -> None:
        check_restored(weights, state, self.weights(), self.state())

    def restore(self, weights: Mapping[str, Array], state: Mapping[str, Array]) -> None:
        self.check(weights, state)
        self._write(weights, state)
        self.steps_done = int(state["steps"][0])

    def _read(self, name: str, array: Array) -> Array:
        return self._gpu.download(self.memory[name], array)

    def _write(self, weights: Mapping[str, Array], state: Mapping[str, Array]) -> None:
        for name, array in self._lowering.stored(weights, state):
            with self._gpu:
                self._gpu.write(self.memory[name], array, self._stream)
                self._gpu.synchronise(self._stream)


def joined_epochs(rows: int, batch: int) -> int:
    """How many epochs are trained as one. Only epochs of whole batches can be joined: they are contiguous."""
    return 1 if rows % batch else -(-JOINED_STEPS * batch // rows)


def powers_of_two(count: int) -> list[int]:
    """The powers of two that add up to it, largest first."""
    return [1 << i for i in reversed(range(count.bit_length())) if count >> i & 1]


def _overlap(at: int, order: Array, other_at: int, other: Array) -> bool:
    return at < other_at + len(other) and other_at < at + len(order)


class TrainingBound:
    """A plan for training on a GPU."""

    checks_ids = False  # training networks have no ids

    def __init__(self, gpu: Gpu, plan: Plan) -> None:
        self.gpu, self.plan = gpu, plan
        (group,) = plan.groups  # a training kernel claims the whole network
        self._lowering = cast(TrainingLowering, group.claim.facts)

    def together(self, count: int) -> int:
        return self._lowering.for_networks(count).networks

    def trainers(
        self, networks: Sequence[Network], x: Array, y: Array, row_weights: Sequence[Array | None],
        orders: Sequence[int], shared: SharedData,
    ) -> CudaJointTrainer:  # fmt: skip
        """x (n, D_in) float32; y (n,) int64 classes or (n, D_out) float32 targets; both are copied to the GPU once for
        all runs that share them. Each run has its own row_weights."""
        lowering = self._lowering.for_networks(len(networks))
        data = send_data(self.gpu, lowering, x, y, shared)
        stride_bytes, extra_memory = allocate_memory(self.gpu, lowering, orders, len(x))
        memories = [data | memory for memory in extra_memory]
        launches = JointLaunches(self.gpu, lowering.with_memory(lowering.networks, stride_bytes), memories[0], orders)
        each = zip(networks, row_weights, memories, strict=True)
        trainers = [CudaTrainer(launches, network, x, of_rows, memory) for network, of_rows, memory in each]
        return CudaJointTrainer(launches, trainers)

    def run(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array], B: int) -> NoReturn:
        loss = self._lowering.training.loss
        raise PlanError("a plan for training cannot run rows", got=loss, expected="a plan for inference")

    def run_like(self, x: object) -> None:
        return None

    def quick_call(self) -> None:
        return None

    def wait(self) -> None:
        self.gpu.wait_for_all()

    def steps(self, B: int) -> tuple[StepInfo, ...]:
        return steps_of(self.plan, B)
