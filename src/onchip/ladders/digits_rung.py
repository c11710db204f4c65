"""A rung of the digits ladder: an epoch as the launches of its steps, and the memory that they use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, cast

from onchip.errors import PlanError
from onchip.kernels.cuda.common.arguments import Memory, Scratch, UInt32, Weight
from onchip.kernels.cuda.common.program import KernelLaunch, LaunchConfig, Program, Steps
from onchip.ladders.device import THREADS
from onchip.ladders.digits_truth import DigitsTruth, batch_sizes
from onchip.ladders.training import (
    KernelRung,
    TrainingRows,
    TrainingRun,
    batch_buffers,
    float32,
    layer_arrays,
    layer_widths,
    network_of,
    row_flop,
)
from onchip.measure.truth import Verdict
from onchip.network.graph import Network
from onchip.network.recipe import Array
from onchip.plan.kernel import Cost
from onchip.runtime.cuda.gpu import Gpu
from onchip.workloads import digits

TILE = 16  # rows and columns per block
Launches = tuple[KernelLaunch, ...]


@dataclass(frozen=True)
class Step:
    """A training step on B rows, and the memory of its operands."""

    index: int
    B: int
    widths: tuple[int, ...]  # 784, 320, 160, 10
    capacity: int  # rows of a whole batch

    @property
    def last(self) -> int:
        """The last layer."""
        return len(self.widths) - 2

    def sizes(self, layer: int) -> tuple[UInt32, UInt32, UInt32]:
        """B, K, N"""
        return UInt32(self.B), UInt32(self.widths[layer]), UInt32(self.widths[layer + 1])

    def x(self, layer: int) -> Memory:
        """The layer's input."""
        return Weight(f"x{self.index}") if layer == 0 else self.a(layer - 1)

    @property
    def y(self) -> Weight:
        return Weight(f"y{self.index}")

    def a(self, layer: int) -> Scratch:
        """The layer's output; of the last one, the probabilities."""
        return Scratch(self._offset(2 * layer))

    def dz(self, layer: int) -> Scratch:
        """The gradient of the layer's sums, times B."""
        return Scratch(self._offset(2 * layer + 1))

    @property
    def scratch_bytes(self) -> int:
        return self._offset(2 * self.last + 2)

    def _offset(self, index: int) -> int:
        return sum(-(-4 * self.capacity * self.widths[1 + i // 2] // 256) * 256 for i in range(index))


class CudaRung(KernelRung):
    """A rung as the launches of each part of a step; most rungs change one part of the previous one."""

    # Over the outputs and gradients of the first layer, and over the probabilities, targets and their gradients.
    cost_passes: ClassVar[tuple[int, int]]
    is_graph: ClassVar[bool] = False  # timed as a CUDA graph, not launch by launch

    def forward(self, step: Step, layer: int) -> Launches:
        raise NotImplementedError

    def loss(self, step: Step) -> Launches:
        """The loss; dz of the last layer."""
        raise NotImplementedError

    def propagate(self, step: Step, layer: int) -> Launches:
        """dz of the previous layer."""
        raise NotImplementedError

    def update(self, step: Step, layer: int) -> Launches:
        raise NotImplementedError

    def launches(self, step: Step) -> Iterator[KernelLaunch]:
        for layer in range(step.last + 1):
            yield from self.forward(step, layer)
        yield from self.loss(step)
        for layer in reversed(range(step.last + 1)):
            if layer > 0:
                yield from self.propagate(step, layer)  # it reads the weights before they are updated
            yield from self.update(step, layer)

    def epoch(self, steps: Sequence[Step]) -> Launches:
        return tuple(launch for step in steps for launch in self.launches(step))

    @classmethod
    def programs(cls) -> tuple[Program, ...]:
        step = Step(0, digits.BATCH_SIZE, (784, *digits.HIDDEN, digits.CLASSES), digits.BATCH_SIZE)
        return tuple(dict.fromkeys(launch.program for launch in cls().epoch((step,))))

    def prepare(self, net: Network, x: TrainingRows, threads: int) -> TrainingRun:
        gpu, sizes = Gpu.get(), batch_sizes(len(x))
        initial = layer_arrays(net)
        widths = layer_widths(net)
        if widths[-1] > TILE:
            raise PlanError(f"softmax of {widths[-1]} classes in a tile", got=str(widths[-1]), expected=f"<= {TILE}")
        steps = [Step(i, B, widths, sizes[0]) for i, B in enumerate(sizes)]
        rows = batch_buffers(x.on(gpu, "x"), "x", 4 * widths[0], sizes)
        rows |= batch_buffers(x.on(gpu, "y"), "y", 4 * widths[-1], sizes)
        launches = Steps(self.epoch(steps), steps[0].scratch_bytes)
        return TrainingRun(
            gpu, launches, rows, initial, lambda arrays: network_of(net, arrays), len(sizes), self.is_graph
        )

    def cost(self, net: Network, B: int) -> Cost:
        """Each kernel reads or writes each of its operands once. x: forward, update. Gradients of later hidden layers
        are propagated, too: a pass more. Weights in each step: forward, propagation, and the update, which writes them.
        """
        widths = layer_widths(net)
        D_in, *hidden, D_out = widths
        of_hidden, of_output = self.cost_passes
        values = 2 * D_in + of_hidden * sum(hidden) + sum(hidden[1:]) + of_output * D_out
        weights = [K * N for K, N in pairwise(widths)]
        fixed = 4 * (4 * sum(weights) - weights[0]) * len(batch_sizes(B))
        return Cost(row_flop(widths), 4 * values, fixed, launches=0)

    def verify(self, truth: Any, got: Array) -> Verdict:
        return cast(DigitsTruth, truth).verify_in(self.precision, got)


def tiles(rows: int, columns: int, threads: int = THREADS) -> LaunchConfig:
    """A block per tile of 16 x 16."""
    return LaunchConfig((-(-columns // TILE), -(-rows // TILE), 1), (threads, 1, 1), 0)


def rate_of(step: Step) -> UInt32:
    """The learning rate divided by B: dz is the gradient times B."""
    return float32(digits.LR / step.B)
