"""LSTM, GRU and RNN over many sequences on tensor cores, input gemm fused: host side of recurrent/mma.cu."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from onchip.kernels.chain import is_closed
from onchip.kernels.cuda.common.arguments import NOTHING, Argument, Int64, UInt32, Weight
from onchip.kernels.cuda.common.costs import H200, RecurrentMmaCosts, costs_of
from onchip.kernels.cuda.common.dtypes import ELEMENT_TYPES
from onchip.kernels.cuda.common.kernel import CudaKernel
from onchip.kernels.cuda.common.precision import PRECISIONS, Precision, narrowed, order_of, round_tf32, tensor_core_cost
from onchip.kernels.cuda.common.program import Budget, Instance, KernelLaunch, LaunchConfig, Program, Steps
from onchip.kernels.cuda.recurrent.clusters import MAX_BLOCKS, max_blocks_of
from onchip.kernels.cuda.recurrent.simt import RecurrentShape
from onchip.kernels.layer_kernel import recipe_bytes
from onchip.network.graph import Network, Node
from onchip.network.layers import Linear, Recurrent
from onchip.network.recipe import Array, Recipe, recipe_op
from onchip.network.types import DTYPE_BYTES
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Refusal

SOURCE = Path(__file__).with_suffix(".cu")
TILE, OCTET = 16, 8  # sequences and units per mma
PART = 32  # K elements per partial sum of 3xTF32
FRAGMENT_BYTES = 256  # per gate of 8 units and k step
GATES = {"Lstm": 4, "GruAfter": 3, "GruBefore": 3, "RnnTanh": 1, "RnnRelu": 1}
MAX_WARPS = {64: 16, 128: 8}  # most registers per lane for recurrent weights -> warps per SM
REGISTERS = 65536  # per SM
RESERVED_BYTES = 1024  # of shared memory, per block


@dataclass(frozen=True)
class RecurrentMmaLowering(RecurrentShape):
    """recurrent_mma(x, R, inner_bias, first_h, first_c, y, W, bias, N, S, D, tiles, backwards, output)"""

    features: int  # per step; 0: x holds gate pre-activations
    has_input_bias: bool
    precision: str
    units: int  # SMs
    shared_limit: int
    max_blocks: int  # per cluster
    costs: RecurrentMmaCosts = field(default=H200.recurrent_mma, kw_only=True, repr=False)

    @property
    def computed(self) -> Precision:
        return PRECISIONS[self.precision]

    @property
    def gates(self) -> int:
        return GATES[self.cell]

    @property
    def max_warps(self) -> int:
        """Warps per SM; 0: the recurrent weights of a lane do not fit in registers."""
        registers = 2 * self.gates * _steps(self.H, self.computed)
        return next((warps for most, warps in MAX_WARPS.items() if registers <= most), 0)

    @property
    def blocks(self) -> int:
        """Blocks per cluster, so that every unit has a warp; 0: too many units."""
        counts = (1 << i for i in range(self.max_blocks.bit_length()))
        octets = math.ceil(self.H / OCTET)
        return next((count for count in counts if math.ceil(octets / count) <= self.max_warps), 0)

    @property
    def warps(self) -> int:
        """Warps per block."""
        return math.ceil(math.ceil(self.H / OCTET) / self.blocks)

    @property
    def blocks_per_sm(self) -> int:
        """Resident blocks per SM."""
        return self.max_warps // self.warps

    @property
    def tile_bytes(self) -> int:
        """Shared memory per tile."""
        buffers, saved = {"GruBefore": (3, 2), "Lstm": (2, 1), "GruAfter": (2, 1)}.get(self.cell, (2, 0))
        input_bytes = OCTET * DTYPE_BYTES[self.dtype] * (self.gates * self.warps | 1)
        if self.features:
            input_bytes = _line_bytes(self.features, self.computed)
        return TILE * (buffers * _line_bytes(self.H, self.computed) + 2 * input_bytes) + saved * 16 * 32 * self.warps

    @property
    def weight_bytes(self) -> int:
        """Shared memory of the input weights and biases."""
        if not self.features:
            return 0
        fragments = self.gates * self.warps * _steps(self.features, self.computed)
        return fragments * FRAGMENT_BYTES + self.gates * self.warps * OCTET * 4

    @property
    def max_tiles(self) -> int:
        """Tiles per block that fit in shared memory next to the SM's other blocks."""
        capacity = (self.shared_limit + RESERVED_BYTES) // self.blocks_per_sm - RESERVED_BYTES
        return max(0, capacity - self.weight_bytes) // self.tile_bytes

    @property
    def fits(self) -> bool:
        return self.blocks > 0 and self.max_tiles > 0

    def waves(self, N: int, tiles: int) -> int:
        """Waves of clusters that N sequences take."""
        concurrent = max(1, self.units * self.blocks_per_sm // self.blocks)
        return math.ceil(math.ceil(N / (TILE * tiles)) * self.D / concurrent)

    def tiles_for(self, N: int) -> int:
        """Tiles per block with the least estimated time; a step costs one extra tile. The choice changes no bit."""
        return min(range(1, self.max_tiles + 1), key=lambda tiles: self.waves(N, tiles) * (1 + tiles))

    def run_us(self, N: int, tile_us: float) -> float:
        """Estimated time of all steps; tile_us is the time of one tile of every block on an SM."""
        tiles = self.tiles_for(N)
        return self.waves(N, tiles) * self.S * (self.costs.step_us + tiles * tile_us)

    def shared_bytes(self, N: int) -> int:
        return self.tiles_for(N) * self.tile_bytes + self.weight_bytes

    def at(self, B: int) -> Steps:
        N = B * self.sequences
        if not N:
            return Steps(())
        head = f"{self.cell}, {self.computed.name}, {ELEMENT_TYPES[self.dtype]}"
        template = f"{self.H}, {self.features}, {self.warps}, {self.blocks}"
        program = Program(SOURCE, f"recurrent_mma<{head}, {template}>")
        tiles = self.tiles_for(N)
        grid = math.ceil(N / (TILE * tiles)) * self.D * self.blocks
        config = LaunchConfig((grid, 1, 1), (32 * self.warps, 1, 1), self.shared_bytes(N), cluster=self.blocks)
        sizes = (Int64(N), Int64(self.S), UInt32(self.D), UInt32(tiles), *self.flags)
        registers = min(255, REGISTERS // (32 * self.warps * self.blocks_per_sm) // 8 * 8)
        launch = KernelLaunch(
            program, config, (*self.arrays, *self.input_weights, *sizes), Budget(registers, spill_bytes=16)
        )
        return Steps((launch,))

    @property
    def input_weights(self) -> tuple[Argument, Argument]:
        """W, bias"""
        weight = Weight("input") if self.features else NOTHING
        return weight, Weight("input_bias") if self.has_input_bias else NOTHING


def _steps(K: int, computed: Precision) -> int:
    """mma steps over K elements."""
    return math.ceil(K / computed.step)


def _line_bytes(K: int, computed: Precision) -> int:
    """Row pitch of one sequence's mma operands in shared memory."""
    return 32 * _steps(K, computed) + 16


class RecurrentMmaKernel(CudaKernel):
    name = "recurrent_mma"
    layers = (Recurrent, Linear)
    dtypes = ELEMENT_TYPES

    def applies(self, net: Network, start: int) -> bool:
        return isinstance(_nodes(net, start)[-1].layer, Recurrent)

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        """A recurrent layer, or a Linear and the recurrent layer that is its only reader."""
        nodes = _nodes(net, start)
        first, has_linear = nodes[0], len(nodes) > 1
        shape = RecurrentShape.of(net, nodes[-1])
        features, computed = 0, PRECISIONS[job.precision]
        if has_linear:
            if nodes[1].inputs.count(first.name) > 1 or nodes[1].inputs[0] != first.name or not is_closed(net, nodes):
                return
            if shape.dtype != computed.dtype:
                return  # features are mma operands as stored
            features = int(net.types[first.inputs[0]].shape[-1])
            values = tuple(dict.fromkeys((first.inputs[0], *nodes[1].inputs[1:])))
            shape = replace(shape, states=tuple(values.index(state) for state in nodes[1].inputs[1:]))
        lowering = RecurrentMmaLowering(
            **vars(shape), features=features, has_input_bias=has_linear and "bias" in first.weights,
            precision=job.precision, units=device.units, shared_limit=device.fast_bytes,
            max_blocks=max_blocks_of(device), costs=costs_of(device).recurrent_mma,
        )  # fmt: skip
        if not lowering.fits:
            if not has_linear:
                needed = f"the recurrence of {shape.H:,} units in {job.precision}"
                yield Refusal(self.name, first.name, f"{needed} exceeds the registers of a cluster on {device.arch}")
            return
        yield self._claim(net, nodes, lowering, device, job)

    def _claim(
        self, net: Network, nodes: list[Node], lowering: RecurrentMmaLowering, device: Device, job: Job
    ) -> Claim:
        recipes, N = _recipes(nodes, lowering), job.batch * lowering.sequences
        values = dict.fromkeys(value for node in nodes for value in node.inputs if value != nodes[0].name)
        cost = tensor_core_cost(
            job.precision, sum(map(net.row_flop, nodes)),
            sum(net.types[value].row_bytes for value in (*values, nodes[-1].name)), recipe_bytes(recipes),
            why_slow="steps depend on each other",
        )  # fmt: skip
        flop, peak = cost.row_flop, device.flops[cost.precision or job.precision]
        step_flop = TILE * flop / (lowering.sequences * lowering.S * lowering.D) / lowering.blocks  # per tile
        share, step_us = lowering.costs.shares[lowering.computed.step], lowering.costs.step_us
        tile_us = step_flop * lowering.blocks_per_sm / (share * peak / device.units) * 1e6
        rate, min_us = flop * job.batch / (lowering.run_us(N, tile_us) * 1e-6 * peak), lowering.S * (step_us + tile_us)
        features = f"{lowering.features}," if lowering.features else ""
        return self.claim(
            net, nodes[0], lowering, label=f"{self.name}<{features}{nodes[-1].layer.kind},{lowering.H}>",
            nodes=tuple(node.name for node in nodes), cost=replace(cost, rate=rate, min_us=min_us), recipes=recipes,
            why=f"{lowering.S} steps in one launch, tensor cores, the recurrence in registers",
            fast_bytes=lowering.shared_bytes(N),
            order=order_of(job.precision, "mma", PART, "features, then units" if features else "units"),
        )  # fmt: skip


def _nodes(net: Network, start: int) -> list[Node]:
    """A recurrent layer, or a Linear and the node after it."""
    return list(net.nodes[start : start + 1 + isinstance(net.nodes[start].layer, Linear)])


# -- weights ---------------------------------------------------------------------------------------------------


def _recipes(nodes: list[Node], lowering: RecurrentMmaLowering) -> dict[str, Recipe]:
    computed, octets = lowering.computed, lowering.blocks * lowering.warps

    def fragments(name: str, K: int) -> Recipe:
        size = lowering.D * octets * OCTET * lowering.gates * _steps(K, computed) * computed.step
        return Recipe.of(
            gate_fragments, (name,), (size,), computed.dtype, precision=lowering.precision, gates=lowering.gates,
            units=lowering.H, octets=octets,
        )  # fmt: skip

    def shifts(name: str, gates: int) -> Recipe:
        size = lowering.D * octets * OCTET * gates
        return Recipe.of(
            gate_shifts, (name,), (size,), gates=gates, units=lowering.H, blocks=lowering.blocks, octets=octets,
        )  # fmt: skip

    weights = nodes[-1].weights
    recipes = {"recurrence": fragments(weights["recurrence"], lowering.H)}
    if lowering.has_bias:
        recipes["bias"] = shifts(weights["bias"], 1)
    if lowering.features:
        recipes["input"] = fragments(nodes[0].weights["weight"], lowering.features)
    if lowering.has_input_bias:
        recipes["input_bias"] = shifts(nodes[0].weights["bias"], lowering.gates)
    return recipes


@recipe_op
def gate_fragments(weight: Array, precision: str, gates: int, units: int, octets: int) -> Array:
    """(D * gates * units, K), or with an axis D -> flat (D, octets of units, gates, k steps, lanes, 2 registers).

    Padding units and k are zero.
    """
    computed, K = PRECISIONS[precision], weight.shape[-1]
    directions = weight.reshape(-1, gates, units, K)
    padded = np.zeros((len(directions), gates, octets * OCTET, _steps(K, computed) * computed.step), np.float32)
    padded[:, :, :units, :K] = directions
    if computed.per_word == 2:
        padded = narrowed(padded, computed.dtype)
    elif computed.splits == 1:
        padded = round_tf32(padded)
    # Lane (g, q) holds word q of each half of a k step, for unit g.
    fragments = padded.reshape(len(directions), gates, octets, OCTET, -1, 2, 4, computed.per_word)
    return np.ascontiguousarray(fragments.transpose(0, 2, 1, 4, 3, 6, 5, 7)).ravel()


@recipe_op
def gate_shifts(bias: Array, gates: int, units: int, blocks: int, octets: int) -> Array:
    """(D * gates * units), or with an axis D -> flat (D, blocks, gates, units of a block), zero padded."""
    directions = bias.reshape(-1, gates, units)
    padded = np.zeros((len(directions), gates, octets * OCTET), np.float32)
    padded[:, :, :units] = directions
    return np.ascontiguousarray(padded.reshape(len(directions), gates, blocks, -1).swapaxes(1, 2)).ravel()


def _instance(cell: str, precision: str, dtype: str, H: int, features: int = 0) -> Instance:
    def launch(device: Device) -> KernelLaunch:
        lowering = RecurrentMmaLowering(
            cell, dtype, 1, 64, 1, H, False, "sequence", cell == "GruAfter", (), features, features > 0, precision,
            device.units, device.fast_bytes, MAX_BLOCKS,
        )  # fmt: skip
        return lowering.at(1 << 14).launches[0]

    return Instance(f"{cell}, {precision} on {dtype}, {features} features, {H} units", launch)


INSTANCES = (
    _instance("Lstm", "fp16", "float16", 128, 10), _instance("Lstm", "fp16", "float16", 128),
    _instance("Lstm", "tf32", "float32", 128), _instance("Lstm", "fp32", "float32", 128, 40),
    _instance("Lstm", "bf16", "float32", 256), _instance("Lstm", "fp16", "float16", 33),
    _instance("GruAfter", "bf16", "bfloat16", 128, 64), _instance("GruAfter", "fp32", "float32", 64),
    _instance("GruBefore", "fp16", "float16", 128), _instance("GruBefore", "fp32", "float32", 96, 10),
    _instance("RnnTanh", "tf32", "float32", 512), _instance("RnnRelu", "fp16", "float16", 64),
)  # fmt: skip
