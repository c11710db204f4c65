"""LayerNorm, RMSNorm and GroupNorm: host side of reduction/norm.cu."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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
    grid_1d,
)
from onchip.kernels.cuda.common.weights import stretched
from onchip.network.graph import Network, Node
from onchip.network.layers import Add, RowNorm
from onchip.network.layers.norm import NormSegments
from onchip.network.recipe import Recipe, as_is
from onchip.network.types import DTYPE_BYTES
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Cost, Job, Refusal

SOURCE = Path(__file__).with_suffix(".cu")
ARCHITECTURES = EVERY_CHIP
THREADS, BLOCKS_PER_SM, WAVES = 256, 8, 32
MAX_PER_THREAD = 32  # elements in registers
PREFERRED_PER_THREAD = 8  # elements, for short segments
MAX_ELEMENTS = 1 << 30  # per segment


@dataclass(frozen=True)
class NormLowering:
    """norm_lanes(x, weight, bias, y, outer, N, norm, fused_add), or norm_rows without fused_add"""

    dtype: str
    segments: NormSegments  # per batch row
    weights: int  # elements of weight and of bias
    roles: tuple[str, ...]  # "weight" and "bias", where present
    is_centred: bool
    eps: float
    units: int
    addend: str = ""  # of a fused Add: "value" or "constant"
    stores_sum: bool = False

    @property
    def vector(self) -> int:
        """Elements per load."""
        return 4 if self.segments.size % 4 == 0 and DTYPE_BYTES[self.dtype] <= 4 else 1

    @property
    def lanes(self) -> int:
        """Threads per segment: part of a warp, a warp, or a block; 0: a block that does not keep it in registers."""
        threads = -(-self.segments.size // PREFERRED_PER_THREAD)
        if self.segments.size <= 32 * MAX_PER_THREAD:
            return min(32, 1 << (threads - 1).bit_length())
        return THREADS if self.segments.size <= THREADS * MAX_PER_THREAD else 0

    @property
    def program(self) -> Program:
        element, V = FLOATS[self.dtype], self.vector
        if not self.lanes:
            return Program(SOURCE, f"norm_rows<{element}, {V}>")
        vectors = -(-self.segments.size // (V * self.lanes))
        return Program(SOURCE, f"norm_lanes<{element}, {V}, {self.lanes}, {1 << (vectors - 1).bit_length()}>")

    def at(self, B: int) -> Steps:
        outer = B * self.segments.count
        if not outer:
            return Steps(())
        channels = self.segments.size // self.segments.run
        norm = divider(self.segments.run).data + struct.pack(
            "<IIId", self.weights // channels or 1, channels, self.is_centred, self.eps
        )
        blocks = min(-(-outer * (self.lanes or THREADS) // THREADS), self.units * BLOCKS_PER_SM * WAVES)
        weight, bias = (Weight(role) if role in self.roles else Int64(0) for role in ("weight", "bias"))
        arguments: tuple[Argument, ...] = (
            Input(0), weight, bias, Output(int(self.stores_sum)), Int64(outer), UInt32(self.segments.size),
            Struct((), norm),
        )  # fmt: skip
        if self.lanes:
            arguments += (self._fused_add(outer),)
        budget = Budget(registers=128, spill_bytes=16)
        return Steps((KernelLaunch(self.program, grid_1d(blocks), arguments, budget),))

    def _fused_add(self, outer: int) -> Struct:
        """`FusedAdd` of reduction/norm.cu."""
        others: dict[str, Memory | Int64] = {"": Int64(0), "value": Input(1), "constant": Weight("added")}
        total = Output(0) if self.stores_sum else Int64(0)
        return Struct(
            (others[self.addend], total), struct.pack("<q", self.segments.count if self.addend == "constant" else outer)
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
        segments = node.layer.parts(x)
        if x.dtype not in FLOATS or device.arch not in ARCHITECTURES or segments.size >= MAX_ELEMENTS:
            if add is None:
                why = f"needs fewer than {MAX_ELEMENTS:,} values in {', '.join(FLOATS)} on {', '.join(ARCHITECTURES)}"
                yield Refusal(self.name, node.name, f"{why}, not {x} on {device.arch}")
        elif add is None or (node.inputs == (add.name,) and _can_fuse(net, add)):
            claim = _claim(net, node, add, device)
            lowering = claim.facts
            assert isinstance(lowering, NormLowering)
            if add is None or lowering.lanes:
                yield claim


def _can_fuse(net: Network, add: Node) -> bool:
    """Whether the Add has two values of one shape, or a value and a constant."""
    types = [net.types[value] for value in (*add.inputs, add.name)]
    return len({*add.inputs}) + len(add.weights) == 2 == len(add.inputs) + len(add.weights) and len({*types}) == 1


def _claim(net: Network, node: Node, add: Node | None, device: Device) -> Claim:
    layer, x = node.layer, net.types[node.inputs[0]]
    assert isinstance(layer, RowNorm)
    segments, shape = layer.parts(x), layer.weight_shape(x)
    acc_dtype = "float64" if x.dtype == "float64" else "float32"
    recipes = {role: Recipe.of(as_is, (name,), shape, acc_dtype) for role, name in node.weights.items()}
    nodes: tuple[str, ...] = (node.name,)
    values, addend, stores_sum = 2, "", False
    if add is not None:
        nodes, addend = (add.name, node.name), "constant" if add.weights else "value"
        stores_sum = len(net.readers(add.name)) > 1 or add.name in net.output_names
        values += (addend == "value") + stores_sum
        for constant in add.weights.values():
            recipes["added"] = Recipe.of(stretched, (constant,), x.row_shape, x.dtype, to=x.row_shape)
    roles = tuple(node.weights)
    return Claim(
        NormKernel.name, f"{layer.kind.lower()}<{segments.size}{',Add' if addend else ''}>", nodes,
        Cost(
            sum(net.row_flop(net.by_name[name]) for name in nodes), values * x.row_bytes,
            sum(recipe.nbytes for recipe in recipes.values()),
        ),
        "each row is read once" if addend else "single layer", recipes, order="in threads, then in a tree",
        facts=NormLowering(
            x.dtype, segments, math.prod(shape), roles, layer.is_centred, layer.attributes()["eps"], device.units,
            addend, stores_sum,
        ),
    )  # fmt: skip


def _instance(name: str, dtype: str, segments: NormSegments, weights: int = 0) -> Instance:
    roles = ("weight", "bias") if weights else ()
    lowering = NormLowering(dtype, segments, weights, roles, True, 1e-5, 132)
    return Instance(name, lambda device: lowering.at(1000).launches[0])


INSTANCES = (
    _instance("rows", "float32", NormSegments(1, 768, 1), 768),
    _instance("short rows", "float32", NormSegments(1, 16, 1), 16),
    _instance("odd rows", "float32", NormSegments(1, 17, 1), 17),
    _instance("single elements", "float16", NormSegments(3, 1, 1)),
    _instance("rows of a warp", "float32", NormSegments(1, 1021, 1), 1021),
    _instance("rows of a block", "float32", NormSegments(1, 8192, 1), 8192),
    _instance("odd rows of a block", "bfloat16", NormSegments(1, 8191, 1), 8191),
    _instance("groups", "float16", NormSegments(8, 4 * 49, 49), 32),
    _instance("long groups", "float32", NormSegments(8, 4 * 112 * 112, 112 * 112), 32),
    _instance("long odd groups", "float16", NormSegments(8, 3 * 111 * 111, 111 * 111), 24),
    _instance("doubles", "float64", NormSegments(1, 768, 1), 768),
    _instance("long doubles", "float64", NormSegments(1, 5000, 1), 5000),
    _instance("very long doubles", "float64", NormSegments(1, 50000, 1), 50000),
)
