"""LayerNorm, RMSNorm and GroupNorm: host side of reduction/norm.cu."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from onchip.kernels.cuda.common.fast_divide import divider
from onchip.kernels.cuda.common.precision import PRECISIONS
from onchip.kernels.cuda.common.program import (
    EVERY_CHIP,
    FLOATS,
    Argument,
    Budget,
    Input,
    Instance,
    Int64,
    KernelLaunch,
    Memory,
    Output,
    Program,
    Steps,
    Struct,
    UInt32,
    Weight,
    in_line,
)
from onchip.network.graph import Network, Node
from onchip.network.layers import Add, RowNorm
from onchip.network.layers.norm import NormParts
from onchip.network.recipe import Array, Recipe, as_is, recipe_op
from onchip.network.types import DTYPE_BYTES
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Cost, Job, Refusal

SOURCE = Path(__file__).with_suffix(".cu")
ARCHITECTURES = EVERY_CHIP
THREADS, BLOCKS_PER_SM, WAVES = 256, 8, 32
MAX_HELD = 32  # elements held per thread
WANTED = 8  # elements per thread preferred for short parts
MAX_NUMBERS = 1 << 30  # per part


@dataclass(frozen=True)
class NormLowering:
    """norm_lanes(x, weight, bias, y, outer, N, how, added) or norm_rows without the last"""

    dtype: str
    parts: NormParts  # per batch row
    weights: int  # elements of weight and of bias
    roles: tuple[str, ...]  # "weight" and "bias", where present
    is_centred: bool
    eps: float
    units: int
    adds: str = ""  # operand of the fused Add: "value" or "constant"
    gives_sum: bool = False

    @property
    def neighbours(self) -> int:
        """Elements per load."""
        return 4 if self.parts.size % 4 == 0 and DTYPE_BYTES[self.dtype] <= 4 else 1

    @property
    def lanes(self) -> int:
        """Threads per part: some of a warp, a warp, or a block; 0: a block that does not hold the part in registers."""
        held = -(-self.parts.size // WANTED)
        if self.parts.size <= 32 * MAX_HELD:
            return min(32, 1 << (held - 1).bit_length())
        return THREADS if self.parts.size <= THREADS * MAX_HELD else 0

    @property
    def program(self) -> Program:
        numbers, V = FLOATS[self.dtype], self.neighbours
        if not self.lanes:
            return Program(SOURCE, f"norm_rows<{numbers}, {V}>")
        pieces = -(-self.parts.size // (V * self.lanes))
        return Program(SOURCE, f"norm_lanes<{numbers}, {V}, {self.lanes}, {1 << (pieces - 1).bit_length()}>")

    def at(self, B: int) -> Steps:
        outer = B * self.parts.count
        if not outer:
            return Steps(())
        each = self.parts.size // self.parts.run
        how = divider(self.parts.run).data + struct.pack(
            "<IIId", self.weights // each or 1, each, self.is_centred, self.eps
        )
        blocks = min(-(-outer * (self.lanes or THREADS) // THREADS), self.units * BLOCKS_PER_SM * WAVES)
        weight, bias = (Weight(role) if role in self.roles else Int64(0) for role in ("weight", "bias"))
        arguments: tuple[Argument, ...] = (
            Input(0), weight, bias, Output(int(self.gives_sum)), Int64(outer), UInt32(self.parts.size), Struct((), how),
        )  # fmt: skip
        if self.lanes:
            arguments += (self._added(outer),)
        budget = Budget(registers=128, spill_bytes=16)
        return Steps((KernelLaunch(self.program, in_line(blocks), arguments, budget),))

    def _added(self, outer: int) -> Struct:
        """`Added` of reduction/norm.cu."""
        others: dict[str, Memory | Int64] = {"": Int64(0), "value": Input(1), "constant": Weight("added")}
        total = Output(0) if self.gives_sum else Int64(0)
        return Struct(
            (others[self.adds], total), struct.pack("<q", self.parts.count if self.adds == "constant" else outer)
        )


class NormKernel:
    name = "norm"
    device_kind = "cuda"
    precisions = tuple(PRECISIONS)  # computes in float32, or in float64

    def claims(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        """A norm, or an Add and the norm that follows it."""
        node = net.nodes[start]
        if isinstance(node.layer, Add):
            node = net.nodes[start + 1] if start + 1 < len(net.nodes) else node
        if not isinstance(node.layer, RowNorm) or job.is_training:
            return
        add = net.nodes[start] if node is not net.nodes[start] else None
        x = net.types[node.inputs[0]]
        parts = node.layer.parts(x)
        if x.dtype not in FLOATS or device.arch not in ARCHITECTURES or parts.size >= MAX_NUMBERS:
            if add is None:
                why = f"normalises fewer than {MAX_NUMBERS:,} of {', '.join(FLOATS)} on {', '.join(ARCHITECTURES)}"
                yield Refusal(self.name, node.name, f"{why}, not {x} on {device.arch}")
        elif add is None or (node.inputs == (add.name,) and _takes(net, add)):
            claim = _claim(net, node, add, device)
            lowering = claim.facts
            assert isinstance(lowering, NormLowering)
            if add is None or lowering.lanes:
                yield claim


def _takes(net: Network, add: Node) -> bool:
    """Whether the Add has two values of one shape, or a value and a constant."""
    types = [net.types[value] for value in (*add.inputs, add.name)]
    return len({*add.inputs}) + len(add.weights) == 2 == len(add.inputs) + len(add.weights) and len({*types}) == 1


def _claim(net: Network, node: Node, add: Node | None, device: Device) -> Claim:
    layer, x = node.layer, net.types[node.inputs[0]]
    assert isinstance(layer, RowNorm)
    parts, shape = layer.parts(x), layer.weight_shape(x)
    wide = "float64" if x.dtype == "float64" else "float32"
    recipes = {role: Recipe.of(as_is, (name,), shape, wide) for role, name in node.weights.items()}
    nodes: tuple[str, ...] = (node.name,)
    values, adds, gives_sum = 2, "", False
    if add is not None:
        nodes, adds = (add.name, node.name), "constant" if add.weights else "value"
        gives_sum = len(net.readers(add.name)) > 1 or add.name in net.output_names
        values += (adds == "value") + gives_sum
        for constant in add.weights.values():
            recipes["added"] = Recipe.of(stretched, (constant,), x.row_shape, x.dtype, to=x.row_shape)
    roles = tuple(node.weights)
    return Claim(
        NormKernel.name, f"{layer.kind.lower()}<{parts.size}{',Add' if adds else ''}>", nodes,
        Cost(
            sum(net.row_flop(net.by_name[name]) for name in nodes), values * x.row_bytes,
            sum(recipe.nbytes for recipe in recipes.values()),
        ),
        "a row is read once" if adds else "one layer by itself", recipes, order="in threads, then in a tree",
        facts=NormLowering(
            x.dtype, parts, math.prod(shape), roles, layer.is_centred, layer.attributes()["eps"], device.units, adds,
            gives_sum,
        ),
    )  # fmt: skip


@recipe_op
def stretched(constant: Array, to: tuple[int, ...]) -> Array:
    return np.ascontiguousarray(np.broadcast_to(constant, to))


def _instance(name: str, dtype: str, parts: NormParts, weights: int = 0) -> Instance:
    roles = ("weight", "bias") if weights else ()
    made = NormLowering(dtype, parts, weights, roles, True, 1e-5, 132)
    return Instance(name, lambda device: made.at(1000).launches[0])


INSTANCES = (
    _instance("rows", "float32", NormParts(1, 768, 1), 768),
    _instance("short rows", "float32", NormParts(1, 16, 1), 16),
    _instance("odd rows", "float32", NormParts(1, 17, 1), 17),
    _instance("single numbers", "float16", NormParts(3, 1, 1)),
    _instance("rows of a warp", "float32", NormParts(1, 1021, 1), 1021),
    _instance("rows of a block", "float32", NormParts(1, 8192, 1), 8192),
    _instance("odd rows of a block", "bfloat16", NormParts(1, 8191, 1), 8191),
    _instance("groups", "float16", NormParts(8, 4 * 49, 49), 32),
    _instance("long groups", "float32", NormParts(8, 4 * 112 * 112, 112 * 112), 32),
    _instance("long odd groups", "float16", NormParts(8, 3 * 111 * 111, 111 * 111), 24),
    _instance("doubles", "float64", NormParts(1, 768, 1), 768),
    _instance("long doubles", "float64", NormParts(1, 5000, 1), 5000),
    _instance("very long doubles", "float64", NormParts(1, 50000, 1), 50000),
)
