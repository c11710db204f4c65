"""LayerNorm, RMSNorm and GroupNorm: host side of reduction/norm.cu."""

from __future__ import annotations

import math
from collections.abc import Iterator
from ctypes import c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path

from onchip.kernels.cuda.common.arguments import NOTHING, Argument, Input, Int64, Memory, Output, Struct, UInt32, Weight
from onchip.kernels.cuda.common.c_struct import CStruct
from onchip.kernels.cuda.common.dtypes import FLOATS
from onchip.kernels.cuda.common.kernel import CudaKernel, instance
from onchip.kernels.cuda.common.program import Budget, Instance, KernelLaunch, Program, Steps, grid_1d
from onchip.kernels.cuda.common.row_norm import MAX_ELEMENTS, norm_struct
from onchip.kernels.cuda.common.rows import THREADS, RowThreads
from onchip.kernels.cuda.common.weights import stretched
from onchip.kernels.layer_kernel import recipe_bytes
from onchip.network.graph import Network, Node
from onchip.network.layers import Add, RowNorm
from onchip.network.layers.norm import NormSegments
from onchip.network.recipe import Recipe, as_is
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Cost, Job, Refusal

SOURCE = Path(__file__).with_suffix(".cu")
BLOCKS_PER_SM, WAVES = 8, 32


class FusedAdd(CStruct):
    source, c_name = SOURCE, "FusedAdd<float>"
    _fields_ = (("other", c_void_p), ("sum", c_void_p), ("period", c_int64))


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
    def threads(self) -> RowThreads:
        """Of a segment; no lanes: a block that does not keep it in registers."""
        return RowThreads.of(self.segments.size, self.dtype)

    @property
    def program(self) -> Program:
        element, threads = FLOATS[self.dtype], self.threads
        if not threads.lanes:
            return Program(SOURCE, f"norm_rows<{element}, {threads.vector}>")
        return Program(SOURCE, f"norm_lanes<{element}, {threads.vector}, {threads.lanes}, {threads.items}>")

    def at(self, B: int) -> Steps:
        outer = B * self.segments.count
        if not outer:
            return Steps(())
        norm = norm_struct(self.segments, self.weights, self.is_centred, self.eps)
        lanes = self.threads.lanes
        blocks = min(-(-outer * (lanes or THREADS) // THREADS), self.units * BLOCKS_PER_SM * WAVES)
        weight, bias = (Weight(role) if role in self.roles else NOTHING for role in ("weight", "bias"))
        arguments: tuple[Argument, ...] = (
            Input(0), weight, bias, Output(int(self.stores_sum)), Int64(outer), UInt32(self.segments.size), norm,
        )  # fmt: skip
        if lanes:
            arguments += (self._fused_add(outer),)
        budget = Budget(registers=128, spill_bytes=16)
        return Steps((KernelLaunch(self.program, grid_1d(blocks), arguments, budget),))

    def _fused_add(self, outer: int) -> Struct:
        others: dict[str, Memory | Int64] = {"": NOTHING, "value": Input(1), "constant": Weight("added")}
        return FusedAdd.of(
            other=others[self.addend], sum=Output(0) if self.stores_sum else NOTHING,
            period=self.segments.count if self.addend == "constant" else outer,
        )  # fmt: skip


class NormKernel(CudaKernel):
    """A norm, or an Add and the norm that follows it."""

    name = "norm"
    layers = (RowNorm, Add)

    def applies(self, net: Network, start: int) -> bool:
        return isinstance(net.nodes[start].layer, RowNorm) or _norm_after(net, start) is not None

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        node = net.nodes[start]
        norm = _norm_after(net, start) if isinstance(node.layer, Add) else node
        assert norm is not None
        layer, x = norm.layer, net.types[norm.inputs[0]]
        assert isinstance(layer, RowNorm)
        segments, shape, add = layer.parts(x), layer.weight_shape(x), node if node is not norm else None
        if segments.size >= MAX_ELEMENTS:
            if add is None:
                why = f"supports fewer than {MAX_ELEMENTS:,} values per segment, not {segments.size:,}"
                yield Refusal(self.name, node.name, why)
            return
        acc_dtype = "float64" if x.dtype == "float64" else "float32"
        recipes = {role: Recipe.of(as_is, (name,), shape, acc_dtype) for role, name in norm.weights.items()}
        nodes, values, addend, stores_sum = [norm], 2, "", False
        if add is not None:
            nodes, addend = [add, norm], "constant" if add.weights else "value"
            stores_sum = len(net.readers(add.name)) > 1 or add.name in net.kept
            values += (addend == "value") + stores_sum
            for constant in add.weights.values():
                recipes["added"] = Recipe.of(stretched, (constant,), x.row_shape, x.dtype, to=x.row_shape)
        lowering = NormLowering(
            x.dtype, segments, math.prod(shape), tuple(norm.weights), layer.is_centred, layer.attributes()["eps"],
            device.units, addend, stores_sum,
        )  # fmt: skip
        if add is not None and not lowering.threads.lanes:
            return
        yield self.claim(
            net, norm, lowering, nodes=tuple(each.name for each in nodes),
            label=f"{layer.kind.lower()}<{segments.size}{',Add' if addend else ''}>",
            cost=Cost(sum(map(net.row_flop, nodes)), values * x.row_bytes, recipe_bytes(recipes)),
            why="each row is read once" if addend else "single layer", recipes=recipes,
            order="in threads, then in a tree",
        )  # fmt: skip


def _norm_after(net: Network, start: int) -> Node | None:
    """The norm after an Add of two values of one shape, or of a value and a constant, if it reads only that sum."""
    add, after = net.nodes[start], net.nodes[start + 1 : start + 2]
    types = {net.types[value] for value in (*add.inputs, add.name)}
    has_two = len({*add.inputs}) + len(add.weights) == 2 == len(add.inputs) + len(add.weights)
    reads_sum = (node for node in after if isinstance(node.layer, RowNorm) and node.inputs == (add.name,))
    return next(reads_sum, None) if has_two and len(types) == 1 else None


def _instance(name: str, dtype: str, segments: NormSegments, weights: int = 0) -> Instance:
    roles = ("weight", "bias") if weights else ()
    lowering = NormLowering(dtype, segments, weights, roles, True, 1e-5, 132)
    return instance(name, lowering)


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
