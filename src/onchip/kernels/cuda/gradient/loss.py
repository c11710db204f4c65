"""The loss of a batch and the gradient of the network's output: host side of gradient/loss.cu."""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import c_double
from dataclasses import dataclass
from pathlib import Path

from onchip.kernels.cuda.common.arguments import NOTHING, Argument, Input, Int64, Output, Scratch
from onchip.kernels.cuda.common.dtypes import FLOATS
from onchip.kernels.cuda.common.kernel import instance
from onchip.kernels.cuda.common.program import Budget, Instance, KernelLaunch, Program, Steps, grid_1d
from onchip.kernels.cuda.gradient.batch_sum import accumulated, sum_batch
from onchip.kernels.cuda.gradient.kernel import OneDtypeKernel
from onchip.network.graph import Network, Node
from onchip.network.layers import (
    AbsoluteError,
    BatchSum,
    BinaryCrossEntropy,
    Correct,
    CrossEntropy,
    HuberLoss,
    InputGrad,
    Layer,
    Mul,
    SquaredError,
)
from onchip.network.types import DTYPE_BYTES
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Cost, Job, Refusal

SOURCE = Path(__file__).with_suffix(".cu")
THREADS, BLOCKS_PER_SM = 256, 8
LONG = 1024  # longest row for one warp
MEANS = BinaryCrossEntropy, AbsoluteError, HuberLoss


@dataclass(frozen=True)
class LossLowering:
    """y, target[, share] -> the losses, or their sum and the gradient of y, or this gradient alone."""

    loss: str  # in C++
    dtype: str
    N: int
    smoothing: float
    inputs: tuple[int, int, int]  # the indices of y, target and share; -1: no share
    writes: tuple[str, ...]  # per output: "losses", "total" or "gradient"
    units: int

    def at(self, B: int) -> Steps:
        outputs: dict[str, Argument] = {what: Output(i) for i, what in enumerate(self.writes)}
        nbytes = B * DTYPE_BYTES[accumulated(self.dtype)] if "total" in outputs else 0
        lanes = THREADS if self.N > LONG else 32
        blocks = min(-(-B * lanes // THREADS), self.units * BLOCKS_PER_SM)
        y, target, share = (Input(i) if i >= 0 else NOTHING for i in self.inputs)
        shared, bits = Scratch(0) if nbytes else NOTHING, int.from_bytes(bytes(c_double(self.smoothing)), "little")
        rows = KernelLaunch(
            Program(SOURCE, f"loss<{self.loss}, {FLOATS[self.dtype]}, {lanes}>"), grid_1d(blocks),
            (
                y, target, share, outputs.get("losses", NOTHING), shared, outputs.get("gradient", NOTHING),
                Int64(B), Int64(self.N), Int64(bits),
            ),
            Budget(64),
        )  # fmt: skip
        if not nbytes:
            return Steps((rows,))
        dtypes = accumulated(self.dtype), self.dtype
        sums, scratch = sum_batch(dtypes, B, 1, self.units, Scratch(0), outputs["total"], -(-nbytes // 16) * 16)
        return Steps((rows, *sums), scratch)


class LossKernel(OneDtypeKernel):
    name = "loss"
    layers = (CrossEntropy, SquaredError, *MEANS, Correct, InputGrad)
    order = "per lane, then in a tree; rows by chunk"

    def applies(self, net: Network, start: int) -> bool:
        layer = net.nodes[start].layer
        return not isinstance(layer, InputGrad) or (_is_loss(layer.of) and layer.index == 0)

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        node = net.nodes[start]
        y, target = node.inputs[:2]
        if net.types[target].dtype not in ("int64", net.types[y].dtype):
            yield Refusal(self.name, node.name, f"classes as int64, not {net.types[target].dtype}")
            return
        if isinstance(node.layer, InputGrad):
            if len(set(node.inputs)) < len(node.inputs):
                yield Refusal(self.name, node.name, "separate y, target and share")
                return
            yield self._claim(net, (node,), node.layer.of, (0, 1, len(node.inputs) - 1), ("gradient",), device)
            return
        yield self._claim(net, (node,), node.layer, (0, 1, -1), ("losses",), device)
        if len(whole := _whole(net, start)) == 4 and len({y, target, whole[1].inputs[1]}) == 3:
            yield self._claim(net, whole, node.layer, (0, 1, 2), ("total", "gradient"), device)

    def _claim(
        self, net: Network, nodes: tuple[Node, ...], loss: Layer, inputs: tuple[int, int, int], writes: tuple[str, ...],
        device: Device,
    ) -> Claim:  # fmt: skip
        y = net.types[nodes[0].inputs[0]]
        smoothing = loss.smoothing if isinstance(loss, CrossEntropy) else 0.0
        name = f"Mean<{loss.kind}>" if isinstance(loss, MEANS) else loss.kind
        if isinstance(loss, SquaredError):
            name = f"SquaredError<{str(loss.is_mean).lower()}>"
        lowering = LossLowering(name, y.dtype, y.row_size, smoothing, inputs, writes, device.units)
        moved = y.row_bytes * (1 + ("gradient" in writes)) + net.types[nodes[0].inputs[1]].row_bytes
        cost = Cost(sum(map(net.row_flop, nodes)), moved, launches=2 if "total" in writes else 1)
        names = tuple(node.name for node in nodes)
        return self.claim(net, nodes[0], lowering, nodes=names, cost=cost, label=f"loss<{name},{y.row_size}>")


def _is_loss(layer: Layer) -> bool:
    return isinstance(layer, (CrossEntropy, SquaredError, *MEANS))


def _whole(net: Network, start: int) -> tuple[Node, ...]:
    """The nodes of the loss and of its gradient, as plan/gradient/step.py writes them: loss, share, sum, gradient."""
    nodes = net.nodes[start : start + 4]
    if len(nodes) < 4:
        return ()
    losses, shared, total, gradient = nodes
    fits = (
        isinstance(shared.layer, Mul)
        and not shared.weights
        and len(shared.inputs) == 2
        and shared.inputs[0] == losses.name
        and isinstance(total.layer, BatchSum)
        and total.inputs == (shared.name,)
        and isinstance(gradient.layer, InputGrad)
        and gradient.layer.of == losses.layer
        and gradient.layer.index == 0
        and gradient.inputs[:2] == losses.inputs
        and gradient.inputs[-1] == shared.inputs[1]
    )
    inside = {losses.name, shared.name}
    is_private = inside.isdisjoint(net.kept) and all(reader in nodes for name in inside for reader in net.readers(name))
    return tuple(nodes) if fits and is_private else ()


def _instance(name: str, loss: str, N: int = 10, dtype: str = "float32", p: float = 0.0) -> Instance:
    return instance(name, LossLowering(loss, dtype, N, p, (0, 1, 2), ("total", "gradient"), 132))


INSTANCES = (
    _instance("classes", "CrossEntropy", p=0.1),
    _instance("many classes", "CrossEntropy", 5000, p=0.1),
    _instance("mse", "SquaredError<true>"),
    _instance("doubles", "SquaredError<false>", dtype="float64"),
    _instance("bce", "Mean<BinaryCrossEntropy>"),
    _instance("bce of many doubles", "Mean<BinaryCrossEntropy>", 5000, "float64"),
    _instance("mae", "Mean<AbsoluteError>", dtype="bfloat16"),
    _instance("huber", "Mean<HuberLoss>"),
    instance("correct", LossLowering("Correct", "float32", 10, 0.0, (0, 1, -1), ("losses",), 132)),
)
