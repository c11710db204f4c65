"""LSTM, GRU and RNN on CUDA cores: host side of recurrent/simt.cu."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from onchip.kernels.cuda.common.arguments import NOTHING, Argument, Input, Int64, Output, UInt32, Weight
from onchip.kernels.cuda.common.costs import costs_of
from onchip.kernels.cuda.common.dtypes import FLOATS
from onchip.kernels.cuda.common.kernel import CudaKernel
from onchip.kernels.cuda.common.program import Budget, Instance, KernelLaunch, LaunchConfig, Program, Steps
from onchip.kernels.layer_kernel import recipe_bytes
from onchip.network.graph import Network, Node
from onchip.network.layers import GRU, LSTM, RNN, Recurrent
from onchip.network.recipe import Array, Recipe, as_is, rearranging_op
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Cost, Job, Refusal

SOURCE = Path(__file__).with_suffix(".cu")
THREADS, CHUNK = 256, 64  # as in recurrent/simt.cu
MAX_ROWS = {4: 8, 8: 4}  # sequences per thread, by accumulator bytes
OUTPUTS = ("sequence", "last", "cell")


@dataclass(frozen=True)
class RecurrentShape:
    """Shape of a recurrent layer, shared by all kernels of this package."""

    cell: str  # struct in recurrent/cells.cuh
    dtype: str
    sequences: int  # per batch row
    S: int
    D: int
    H: int
    is_reverse: bool
    output: str
    has_bias: bool
    states: tuple[int, ...]  # input indices of the initial states

    @staticmethod
    def of(net: Network, node: Node) -> RecurrentShape:
        layer, x = node.layer, net.types[node.inputs[0]]
        assert isinstance(layer, Recurrent)
        D, width, H = net.weights[node.weights["recurrence"]].shape
        S, values = int(x.shape[-2]), tuple(dict.fromkeys(node.inputs))
        return RecurrentShape(
            cell_of(layer), x.dtype, x.row_size // (S * D * width), S, D, H, layer.direction == "reverse", layer.output,
            "bias" in node.weights, tuple(values.index(state) for state in node.inputs[1:]),
        )  # fmt: skip

    @property
    def arrays(self) -> tuple[Argument, ...]:
        """x, R, bias, first_h, first_c, y"""
        bias = Weight("bias") if self.has_bias else NOTHING
        missing = [NOTHING] * (2 - len(self.states))
        return (Input(0), Weight("recurrence"), bias, *map(Input, self.states), *missing, Output(0))

    @property
    def flags(self) -> tuple[UInt32, UInt32]:
        """backwards, output"""
        return UInt32(self.is_reverse), UInt32(OUTPUTS.index(self.output))


@dataclass(frozen=True)
class RecurrentLowering(RecurrentShape):
    """recurrent(x, R, bias, first_h, first_c, y, N, S, D, units, lanes, backwards, output)"""

    units: int
    shared_limit: int

    @property
    def acc_bytes(self) -> int:
        return 8 if self.dtype == "float64" else 4

    @property
    def lanes(self) -> int:
        return min(THREADS, max(32, 1 << (self.H - 1).bit_length()))

    def shared_bytes(self, rows: int) -> int:
        buffers = 3 if self.cell in ("Lstm", "GruBefore") else 2
        return buffers * self.H * THREADS // self.lanes * rows * self.acc_bytes

    def rows_for(self, N: int) -> int:
        """Sequences per thread: as many as fit in shared memory while every SM still gets a block."""
        rows = MAX_ROWS[self.acc_bytes]
        while rows > 1 and (
            self.shared_bytes(rows) > self.shared_limit or -(-N // (THREADS // self.lanes * rows)) * self.D < self.units
        ):
            rows //= 2
        return rows

    def at(self, B: int) -> Steps:
        N = B * self.sequences
        if not N:
            return Steps(())
        rows = self.rows_for(N)
        blocks = -(-N // (THREADS // self.lanes * rows)) * self.D
        program = Program(SOURCE, f"recurrent<{self.cell}, {FLOATS[self.dtype]}, {rows}>")
        sizes = (Int64(N), Int64(self.S), UInt32(self.D), UInt32(self.H), UInt32(self.lanes))
        config = LaunchConfig((blocks, 1, 1), (THREADS, 1, 1), self.shared_bytes(rows))
        arguments = (*self.arrays, *sizes, *self.flags)
        return Steps((KernelLaunch(program, config, arguments, Budget(registers=128, spill_bytes=32)),))


class RecurrentKernel(CudaKernel):
    name = "recurrent"
    layers = (Recurrent,)
    order = f"units in order, partial sums of {CHUNK}"

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        node = net.nodes[start]
        shape = RecurrentShape.of(net, node)
        lowering = RecurrentLowering(**vars(shape), units=device.units, shared_limit=device.fast_bytes)
        if lowering.shared_bytes(1) > device.fast_bytes:
            needed = f"{lowering.shared_bytes(1):,} of {device.fast_bytes:,} B of shared memory"
            yield Refusal(self.name, node.name, f"states of {shape.H:,} units take {needed}")
            return
        recipes = gate_recipes(net, node, shape)
        costs = costs_of(device).recurrent_simt
        step_us = costs.step_us + recipes["recurrence"].nbytes / shape.D / costs.bytes_per_us
        yield self.claim(
            net, node, lowering, label=label_of(self.name, node, shape), recipes=recipes,
            why=f"{shape.S} steps in one launch", fast_bytes=lowering.shared_bytes(lowering.rows_for(job.batch)),
            cost=Cost(
                net.row_flop(node), moved_bytes(net, node), recipe_bytes(recipes),
                rate=costs.share * device.flops["fp32"] / device.flops[job.precision],  # fp32 FFMA at any precision
                min_us=shape.S * step_us, why_slow="steps depend on each other",
            ),
        )  # fmt: skip


def label_of(kernel: str, node: Node, shape: RecurrentShape) -> str:
    return f"{kernel}<{node.layer.kind},{shape.H}>"


def moved_bytes(net: Network, node: Node) -> int:
    """Bytes of the inputs and the output, per batch row."""
    return sum(net.types[value].row_bytes for value in (*dict.fromkeys(node.inputs), node.name))


def gate_recipes(net: Network, node: Node, shape: RecurrentShape) -> dict[str, Recipe]:
    name, acc_dtype = node.weights["recurrence"], "float64" if shape.dtype == "float64" else "float32"
    size = math.prod(net.weights[name].shape)
    late = shape.H if shape.cell == "GruBefore" else 0
    recipes = {"recurrence": Recipe.of(turned_gates, (name,), (size,), acc_dtype, late=late)}
    if shape.has_bias:
        recipes["bias"] = Recipe.of(as_is, (node.weights["bias"],), (shape.D, shape.H), acc_dtype)
    return recipes


def cell_of(layer: Recurrent) -> str:
    if isinstance(layer, GRU):
        return "GruAfter" if layer.reset_after else "GruBefore"
    if isinstance(layer, RNN):
        return "RnnTanh" if layer.activation == "tanh" else "RnnRelu"
    assert isinstance(layer, LSTM)
    return "Lstm"


@rearranging_op
def turned_gates(recurrence: Array, late: int) -> Array:
    """(D, G * H, H) -> flat (D, from unit, to unit, gate); the last `late` of G * H form a second such array."""
    D, width, H = recurrence.shape
    gate_groups = [recurrence[:, : width - late], recurrence[:, width - late :]]
    return np.concatenate([group.reshape(D, -1, H, H).transpose(0, 3, 2, 1).ravel() for group in gate_groups])


def _instance(cell: str, dtype: str, H: int, B: int) -> Instance:
    def launch(device: Device) -> KernelLaunch:
        lowering = RecurrentLowering(
            cell, dtype, 1, 64, 1, H, False, "sequence", cell == "GruAfter", (), device.units, device.fast_bytes
        )
        return lowering.at(B).launches[0]

    return Instance(f"{cell}, {dtype}, {H} units, {B} sequences", launch)


INSTANCES = (
    _instance("Lstm", "float32", 128, 1 << 14), _instance("Lstm", "float16", 512, 1 << 12),
    _instance("Lstm", "float64", 64, 1 << 14), _instance("Lstm", "float32", 128, 1),
    _instance("GruAfter", "bfloat16", 128, 1 << 14), _instance("GruBefore", "float32", 128, 1 << 14),
    _instance("RnnTanh", "float32", 128, 1 << 14), _instance("RnnRelu", "float32", 128, 7),
)  # fmt: skip
