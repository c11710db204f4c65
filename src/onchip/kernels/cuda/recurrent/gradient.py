"""The gradients of the gates of LSTM, GRU and RNN: host side of recurrent/gradient.cu."""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import c_int64, c_uint32, c_void_p
from dataclasses import dataclass
from pathlib import Path

from onchip.kernels.cuda.common.arguments import NOTHING, Input, Output, Scratch, Struct, Weight
from onchip.kernels.cuda.common.c_struct import CStruct
from onchip.kernels.cuda.common.costs import costs_of
from onchip.kernels.cuda.common.dtypes import FLOATS
from onchip.kernels.cuda.common.kernel import CudaKernel
from onchip.kernels.cuda.common.program import Budget, Instance, KernelLaunch, LaunchConfig, Program, Steps
from onchip.kernels.cuda.recurrent.simt import CHUNK, OUTPUTS, cell_of, moved_bytes
from onchip.kernels.layer_kernel import recipe_bytes
from onchip.network.graph import Network, Node
from onchip.network.layers import RecurrentGrad
from onchip.network.recipe import Recipe, as_is
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Cost, Job, Refusal

SOURCE = Path(__file__).with_suffix(".cu")
MAX_THREADS, MIN_SHARE = 1024, 16  # per block; rows of R per part
MAX_ROWS = {4: 8, 8: 4}  # sequences per block, by accumulator bytes
GATES = {"Lstm": 4, "GruAfter": 3, "GruBefore": 3, "RnnTanh": 1, "RnnRelu": 1}


class Arrays(CStruct):
    source, c_name = SOURCE.with_suffix(".cuh"), "Arrays<float>"
    _fields_ = (
        ("x", c_void_p), ("dy", c_void_p), ("sums", c_void_p * 2), ("before", c_void_p * 2), ("first_c", c_void_p),
        ("R", c_void_p), ("bias", c_void_p), ("y", c_void_p), ("cells", c_void_p),
    )  # fmt: skip


class Sizes(CStruct):
    source, c_name = SOURCE, "Sizes"
    _fields_ = (
        ("N", c_int64), ("S", c_int64), ("D", c_uint32), ("H", c_uint32), ("lanes", c_uint32), ("parts", c_uint32),
        ("kept", c_uint32), ("is_reverse", c_uint32), ("of_last", c_uint32), ("index", c_uint32),
    )  # fmt: skip


@dataclass(frozen=True)
class RecurrentGradShape:
    """Shape of the gradient of a recurrent layer, shared by the kernels of this package."""

    cell: str  # struct in recurrent/cells.cuh
    dtype: str
    inputs: tuple[int, ...]  # index of each operand
    sequences: int  # per batch row
    S: int
    D: int
    H: int
    is_reverse: bool
    output: str
    index: int  # of the layer
    has_bias: bool

    @staticmethod
    def of(net: Network, node: Node) -> RecurrentGradShape:
        assert isinstance(node.layer, RecurrentGrad)
        layer, x = node.layer.of, net.types[node.inputs[0]]
        D, width, H = net.weights[node.weights["recurrence"]].shape
        S, values = int(x.shape[-2]), tuple(dict.fromkeys(node.inputs))
        return RecurrentGradShape(
            cell_of(layer), x.dtype, tuple(map(values.index, node.inputs)), x.row_size // (S * D * width), S, D, H,
            layer.direction == "reverse", layer.output, node.layer.index, "bias" in node.weights,
        )  # fmt: skip

    @property
    def gates(self) -> int:
        return GATES[self.cell]

    @property
    def acc_bytes(self) -> int:
        return 8 if self.dtype == "float64" else 4

    @property
    def arrays(self) -> Struct:
        values = [Input(i) for i in self.inputs]
        cells = values[2 + 2 * self.D :]
        return Arrays.of(
            x=values[0], dy=values[1], sums=values[2 : 2 + self.D], before=values[2 + self.D : 2 + 2 * self.D],
            first_c=cells[0] if cells else NOTHING, R=Weight("recurrence"),
            bias=Weight("bias") if self.has_bias else NOTHING, y=Output(0), cells=Scratch(0),
        )  # fmt: skip

    def scratch_bytes(self, N: int) -> int:
        """The cells of N sequences."""
        return N * self.D * self.S * self.H * self.acc_bytes if self.cell == "Lstm" else 0


@dataclass(frozen=True)
class RecurrentGradLowering(RecurrentGradShape):
    """recurrent_grad(arrays, sizes)"""

    units: int
    shared_limit: int

    @property
    def lanes(self) -> int:
        return min(MAX_THREADS, -(-self.H // 32) * 32)

    @property
    def parts(self) -> int:
        """Groups of threads that share the rows of R."""
        return max(1, min(MAX_THREADS // self.lanes, self.gates * self.H // MIN_SHARE))

    def state_bytes(self, rows: int) -> int:
        """Shared memory without rows of R."""
        values = self.gates + self.parts + (2 if self.cell == "Lstm" else 1)
        return values * self.H * rows * self.acc_bytes

    def rows_for(self, N: int) -> int:
        """Sequences per block: as many as fit in shared memory while every SM still gets a block."""
        rows = MAX_ROWS[self.acc_bytes]
        while rows > 1 and (self.state_bytes(rows) > self.shared_limit or -(-N // rows) * self.D < self.units):
            rows //= 2
        return rows

    def kept_for(self, rows: int) -> int:
        """Rows of R in shared memory, per part and gate."""
        row_bytes = self.gates * self.parts * self.H * self.acc_bytes
        return min(-(-self.H // self.parts), (self.shared_limit - self.state_bytes(rows)) // row_bytes)

    def shared_bytes(self, rows: int) -> int:
        kept = self.kept_for(rows) * self.gates * self.parts * self.H
        return self.state_bytes(rows) + kept * self.acc_bytes

    def at(self, B: int) -> Steps:
        N = B * self.sequences
        if not N:
            return Steps(())
        rows = self.rows_for(N)
        sizes = Sizes.of(
            N=N, S=self.S, D=self.D, H=self.H, lanes=self.lanes, parts=self.parts, kept=self.kept_for(rows),
            is_reverse=self.is_reverse, of_last=OUTPUTS.index(self.output), index=self.index,
        )  # fmt: skip
        program = Program(SOURCE, f"recurrent_grad<{self.cell}, {FLOATS[self.dtype]}, {rows}>")
        config = LaunchConfig((-(-N // rows) * self.D, 1, 1), (self.lanes * self.parts, 1, 1), self.shared_bytes(rows))
        launch = KernelLaunch(program, config, (self.arrays, sizes), Budget(64, spill_bytes=16))
        return Steps((launch,), self.scratch_bytes(N))


class RecurrentGradKernel(CudaKernel):
    name = "recurrent_grad"
    layers = (RecurrentGrad,)
    order = f"units in order in parts, partial sums of {CHUNK}"

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        node = net.nodes[start]
        shape = RecurrentGradShape.of(net, node)
        lowering = RecurrentGradLowering(**vars(shape), units=device.units, shared_limit=device.fast_bytes)
        if lowering.state_bytes(1) > device.fast_bytes:
            needed = f"{lowering.state_bytes(1):,} of {device.fast_bytes:,} B of shared memory"
            yield Refusal(self.name, node.name, f"gradients of {shape.H:,} units take {needed}")
            return
        recipes = recipes_of(net, node)
        costs, rows = costs_of(device).recurrent_simt, lowering.rows_for(job.batch * lowering.sequences)
        step_us = costs.step_us + recipes["recurrence"].nbytes / shape.D / costs.bytes_per_us
        yield self.claim(
            net, node, lowering, label=grad_label(self.name, node, shape), recipes=recipes,
            why=f"{shape.S} steps in one launch", fast_bytes=lowering.shared_bytes(rows),
            cost=Cost(
                net.row_flop(node), moved_bytes(net, node), recipe_bytes(recipes),
                rate=costs.share * device.flops["fp32"] / device.flops[job.precision],  # fp32 FFMA at any precision
                min_us=shape.S * step_us, why_slow="steps depend on each other",
            ),
        )  # fmt: skip


def grad_label(kernel: str, node: Node, shape: RecurrentGradShape) -> str:
    assert isinstance(node.layer, RecurrentGrad)
    return f"{kernel}<{node.layer.of.kind},{shape.H}>"


def recipes_of(net: Network, node: Node) -> dict[str, Recipe]:
    """The weights in the accumulator's dtype."""
    dtype = "float64" if net.types[node.inputs[0]].dtype == "float64" else "float32"
    return {role: Recipe.of(as_is, (name,), net.weights[name].shape, dtype) for role, name in node.weights.items()}


def _instance(cell: str, dtype: str, H: int, N: int) -> Instance:
    def launch(device: Device) -> KernelLaunch:
        lowering = RecurrentGradLowering(
            cell, dtype, (0, 1, 2, 3), 1, 64, 1, H, False, "sequence", 0, False, device.units, device.fast_bytes
        )
        return lowering.at(N).launches[0]

    return Instance(f"{cell}, {dtype}, {H} units, {N} sequences", launch)


INSTANCES = (
    _instance("Lstm", "float32", 128, 1 << 14), _instance("Lstm", "float32", 128, 1),
    _instance("Lstm", "float32", 100, 400), _instance("Lstm", "float32", 100, 800),
    _instance("Lstm", "float16", 512, 1 << 12), _instance("Lstm", "float64", 64, 1 << 14),
    _instance("GruAfter", "bfloat16", 128, 1 << 14), _instance("GruAfter", "float32", 128, 1 << 14),
    _instance("GruBefore", "float32", 128, 1 << 14), _instance("RnnTanh", "float32", 128, 1 << 14),
    _instance("RnnRelu", "float32", 128, 7),
)  # fmt: skip
