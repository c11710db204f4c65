"""Fused attention over short sequences: host side of attention/fused.cu."""

from __future__ import annotations

import math
from collections.abc import Iterator
from ctypes import c_int32, c_int64
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from onchip.kernels.cuda.attention.match import Attention, find_attention
from onchip.kernels.cuda.common.arguments import NOTHING, Input, Output, Struct, Weight
from onchip.kernels.cuda.common.c_struct import CStruct
from onchip.kernels.cuda.common.costs import costs_of
from onchip.kernels.cuda.common.dtypes import ELEMENT_TYPES
from onchip.kernels.cuda.common.kernel import CudaKernel, instance
from onchip.kernels.cuda.common.precision import PRECISIONS, order_of, tensor_core_cost
from onchip.kernels.cuda.common.program import Budget, Instance, KernelLaunch, Program, Steps, grid_1d
from onchip.kernels.cuda.common.strides import Heads
from onchip.kernels.cuda.common.weights import stretched
from onchip.kernels.layer_kernel import recipe_bytes
from onchip.network.graph import Network
from onchip.network.layers import MatMul, Mul, Permute, Reshape, Slice
from onchip.network.recipe import Array, Recipe, recipe_op
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Refusal, Use

SOURCE = Path(__file__).with_suffix(".cu")
ROWS, WARPS = 16, 4  # queries per warp; warps per block
KEYS, WIDTHS = (16, 32, 64, 128), (16, 32, 64)  # compiled instances
PART = 32  # K elements per partial sum of 3xTF32


class HeadsStruct(CStruct):
    source, c_name = SOURCE, "Heads"
    _fields_ = (("first", c_int64), ("row", c_int64), ("head", c_int64), ("step", c_int64), ("each", c_int64))


class Sizes(CStruct):
    source, c_name = SOURCE, "Sizes"
    _fields_ = (
        ("count", c_int64), ("heads", c_int32), ("Sq", c_int32), ("Sk", c_int32), ("D", c_int32), ("V", c_int32),
        ("shift_head", c_int32), ("q", HeadsStruct), ("k", HeadsStruct), ("v", HeadsStruct), ("y", HeadsStruct),
    )  # fmt: skip


@dataclass(frozen=True)
class AttentionLowering:
    """attention(q, k, v, scale, shift, y, sizes)"""

    precision: str
    dtype: str
    sizes: tuple[int, int, int, int, int]  # heads per row, Sq, Sk, D, V
    views: tuple[Heads, Heads, Heads, Heads]  # of q, k, v and y
    inputs: tuple[int, int, int]  # input indices of q, k and v
    row_sizes: tuple[int, ...]  # elements per row of each
    has_scale: bool
    shifts: int  # 0: none; 1: shared by all heads; else one per head

    @property
    def instance(self) -> tuple[int, int]:
        """KEYS and WIDTH."""
        _, _, Sk, D, V = self.sizes
        return next(keys for keys in KEYS if keys >= Sk), next(width for width in WIDTHS if width >= max(D, V))

    @property
    def is_whole(self) -> bool:
        """Whether heads are full width, contiguous and aligned to 4 elements, so that loads need no mask."""
        offsets = [n for view in self.views for n in (view.first, view.head, view.step)] + list(self.row_sizes)
        is_full = all(size == self.instance[1] for size in self.sizes[3:])
        return is_full and all(view.element == 1 for view in self.views) and not any(n % 4 for n in offsets)

    def at(self, B: int) -> Steps:
        heads, Sq, *_ = self.sizes
        warps = B * heads * math.ceil(Sq / ROWS)
        if not warps:
            return Steps(())
        keys, width = self.instance
        head = f"{PRECISIONS[self.precision].name}, {ELEMENT_TYPES[self.dtype]}, {keys}, {width}"
        program = Program(SOURCE, f"attention<{head}, {'true' if self.is_whole else 'false'}>")
        scale = Weight("scale") if self.has_scale else NOTHING
        shift = Weight("shift") if self.shifts else NOTHING
        arguments = (*map(Input, self.inputs), scale, shift, Output(0), self._sizes(B))
        config = grid_1d(math.ceil(warps / WARPS), 32 * WARPS)
        return Steps((KernelLaunch(program, config, arguments, Budget(registers=255, spill_bytes=384)),))

    def _sizes(self, B: int) -> Struct:
        heads, Sq, Sk, D, V = self.sizes
        q, k, v, y = (
            HeadsStruct.of(first=view.first, row=row, head=view.head, step=view.step, each=view.element)
            for view, row in zip(self.views, self.row_sizes, strict=True)
        )
        return Sizes.of(
            count=B * heads, heads=heads, Sq=Sq, Sk=Sk, D=D, V=V, shift_head=Sq * Sk if self.shifts > 1 else 0,
            q=q, k=k, v=v, y=y,
        )  # fmt: skip


class AttentionFusedKernel(CudaKernel):
    name = "attention"
    layers = (MatMul, Mul, Permute, Reshape, Slice)
    dtypes = ELEMENT_TYPES

    def applies(self, net: Network, start: int) -> bool:
        return find_attention(net, start) is not None

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        """Claims may start at any layout node before the first gemm whose output only the attention reads."""
        found = find_attention(net, start)
        assert found is not None
        if found.Sk > KEYS[-1] or max(found.D, found.V) > WIDTHS[-1]:
            most = f"supports up to {KEYS[-1]} keys and heads of {WIDTHS[-1]} elements"
            got = f"{found.Sk:,} and {max(found.D, found.V):,}"
            yield Refusal(self.name, found.nodes[0].name, f"{most}, got {got}")
        else:
            yield self._claim(net, found, device, job)

    def _claim(self, net: Network, found: Attention, device: Device, job: Job) -> Claim:
        views, y = (found.q, found.k, found.v, found.y), net.types[found.nodes[-1].name]
        read = (name for node in found.nodes for name in node.inputs)
        values = [name for name in dict.fromkeys(read) if name in {view.value for view in views[:3]}]
        recipes = {}
        if found.scales:
            recipes["scale"] = Recipe.of(product_of, found.scales, (1,))
        shifts = 0
        if found.shift is not None:
            leading = found.leading if math.prod(net.weights[found.shift].shape[:-2]) > 1 else (1,)
            shifts, shape = math.prod(leading), (*leading, found.Sq, found.Sk)
            recipes["shift"] = Recipe.of(stretched, (found.shift,), shape, to=shape)
        q, k, v = (values.index(view.value) for view in views[:3])
        sizes = (math.prod(found.leading), found.Sq, found.Sk, found.D, found.V)
        row_sizes = tuple(net.types[view.value].row_size for view in views)
        gemm_flop = sum(net.row_flop(node) for node in found.nodes if isinstance(node.layer, MatMul))
        moved = sum(net.types[name].row_bytes for name in values) + y.row_bytes
        rate = costs_of(device).attention.share
        cost = tensor_core_cost(job.precision, gemm_flop, moved, recipe_bytes(recipes), rate=rate)
        lowering = AttentionLowering(
            job.precision, y.dtype, sizes, views, (q, k, v), row_sizes, bool(found.scales), shifts
        )
        return self.claim(
            net, found.nodes[0], lowering, label=f"{self.name}<{sizes[0]} heads,{found.Sk},{found.D}>",
            nodes=tuple(node.name for node in found.nodes), recipes=recipes, why="scores stay in registers",
            cost=replace(cost, row_flop=cost.row_flop + sum(map(net.row_flop, found.nodes)) - gemm_flop),
            order=order_of(job.precision, "mma", PART, "head, then keys,"),
            reads={name: Use(is_read_often=True) for name in values},
        )  # fmt: skip


@recipe_op
def product_of(*scales: Array) -> Array:
    """Product of single-element weights: (1,)."""
    return np.asarray(math.prod(float(scale.reshape(())) for scale in scales)).reshape(1)


def _instance(precision: str, dtype: str, S: int, D: int, is_whole: bool = True) -> Instance:
    view, n = Heads("", 0, D, 4 * D, 1), 0 if is_whole else 1
    lowering = AttentionLowering(
        precision, dtype, (4, S - n, S - n, D - n, D - n), (view,) * 4, (0, 0, 0), (4 * S * D,) * 4, True, 0
    )
    name = f"{precision} on {dtype}, {S} keys of {D}" + ("" if is_whole else ", unaligned rows")
    return instance(name, lowering)


INSTANCES = (
    _instance("fp32", "float32", 32, 16), _instance("fp32", "float32", 128, 64), _instance("tf32", "float32", 64, 32),
    _instance("fp16", "float16", 32, 16), _instance("bf16", "bfloat16", 128, 64), _instance("fp16", "float32", 64, 64),
    _instance("fp32", "float32", 32, 64, is_whole=False), _instance("bf16", "bfloat16", 64, 32, is_whole=False),
)  # fmt: skip
