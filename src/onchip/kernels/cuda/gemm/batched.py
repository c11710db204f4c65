"""Batched GEMM on CUDA cores: the host side of gemm/batched.cu."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from ctypes import c_int64
from dataclasses import dataclass
from pathlib import Path

from onchip.kernels.cuda.common.arguments import Argument, Input, Int64, Memory, Output, Weight
from onchip.kernels.cuda.common.c_struct import CStruct
from onchip.kernels.cuda.common.costs import costs_of
from onchip.kernels.cuda.common.dtypes import FLOATS
from onchip.kernels.cuda.common.kernel import CudaKernel, instance
from onchip.kernels.cuda.common.program import Budget, Instance, KernelLaunch, Program, Steps, grid_1d
from onchip.kernels.layer_kernel import recipe_bytes
from onchip.network.graph import Network, Node
from onchip.network.layers import MatMul
from onchip.network.recipe import Recipe, as_is
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Cost, Job, Refusal, Use

SOURCE = Path(__file__).with_suffix(".cu")
MAX_AXES = 4  # batch axes, including B
SMALL = 32  # tile side where a matrix has at most as many rows and columns; else twice that
MAX_BLOCKS = 2**31 - 1


class BatchAxes(CStruct):
    source, c_name = SOURCE.with_suffix(".cuh"), "BatchAxes"
    _fields_ = tuple((name, c_int64 * MAX_AXES) for name in ("size", "a_stride", "b_stride"))


@dataclass(frozen=True)
class Operand:
    """A value or a weight: its memory and its shape without the batch axis, which only a value has."""

    at: Memory
    row: tuple[int, ...]

    def strides(self, leading: tuple[int, ...]) -> tuple[int, ...]:
        """Matrix strides along B and the leading axes; 0 where broadcast."""
        row = (1,) * (2 + len(leading) - len(self.row)) + self.row
        steps = [math.prod(row[axis + 1 :]) if row[axis] > 1 else 0 for axis in range(len(leading))]
        return (0 if isinstance(self.at, Weight) else math.prod(row), *steps)


@dataclass(frozen=True)
class MatMulShape:
    """A batched GEMM y = a b, for any kernel."""

    dtype: str
    a: Operand
    b: Operand
    leading: tuple[int, ...]  # leading axes of y, without B

    @property
    def sizes(self) -> tuple[int, int, int]:
        """M, N, K"""
        return self.a.row[-2], self.b.row[-1], self.a.row[-1]

    def count(self, B: int) -> int:
        """Number of matrices."""
        return B * math.prod(self.leading)

    def tiles(self, B: int, side: int) -> int:
        M, N, _ = self.sizes
        return self.count(B) * math.ceil(M / side) * math.ceil(N / side)

    def arguments(self, B: int) -> tuple[Argument, ...]:
        """a, b, y, count, M, N, K, batch; missing batch axes come first"""
        missing, a, b = MAX_AXES - 1 - len(self.leading), self.a.strides(self.leading), self.b.strides(self.leading)
        batch = BatchAxes.of(
            size=(*[1] * missing, B, *self.leading), a_stride=(*[0] * missing, *a), b_stride=(*[0] * missing, *b)
        )
        return (self.a.at, self.b.at, Output(0), *map(Int64, (self.count(B), *self.sizes)), batch)


@dataclass(frozen=True)
class MatMulLowering(MatMulShape):
    """matmul(a, b, y, count, M, N, K, batch)"""

    def at(self, B: int) -> Steps:
        side = SMALL if max(self.sizes[:2]) <= SMALL else 2 * SMALL
        tiles = self.tiles(B, side)
        if not tiles:
            return Steps(())
        program = Program(SOURCE, f"matmul<{FLOATS[self.dtype]}, {side}>")
        config = grid_1d(min(tiles, MAX_BLOCKS), side * side // 16)
        return Steps((KernelLaunch(program, config, self.arguments(B), Budget(registers=176)),))


class MatMulKernel(CudaKernel):
    name = "matmul"
    layers = (MatMul,)
    order = "k in order, partial sums of 128"

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        node = net.nodes[start]
        leading = len(net.types[node.name].row_shape) - 2
        if leading >= MAX_AXES:
            why = f"supports at most {MAX_AXES - 1} leading axes per row, got {leading}"
            yield Refusal(self.name, node.name, why)
            return
        (gemm, recipes), share = operands_of(net, node), costs_of(device).matmul.simt_share
        yield self.claim(
            net, node, MatMulLowering(**vars(gemm)), label=label_of(self.name, gemm), recipes=recipes,
            cost=Cost(net.row_flop(node), *moved_bytes(net, node, recipes), precision="fp32", rate=share),
            why="a matmul of two values", reads={name: Use(is_read_often=True) for name in node.inputs},
        )  # fmt: skip


def label_of(kernel: str, gemm: MatMulShape) -> str:
    M, N, K = gemm.sizes
    return f"{kernel}<{M},{K},{N}>"


def moved_bytes(net: Network, node: Node, recipes: Mapping[str, Recipe]) -> tuple[int, int]:
    """Bytes per row of the batch, and bytes of weights per launch."""
    values = dict.fromkeys((*node.inputs, node.name))
    return sum(net.types[name].row_bytes for name in values), recipe_bytes(recipes)


def operands_of(net: Network, node: Node) -> tuple[MatMulShape, dict[str, Recipe]]:
    """The batched GEMM of a MatMul node, and the recipe of its weight operand, if any."""
    y, values = net.types[node.name], tuple(dict.fromkeys(node.inputs))
    operands = [Operand(Input(values.index(name)), net.types[name].row_shape) for name in node.inputs]
    recipes = {}
    for role, name in node.weights.items():
        shape = tuple(int(d) for d in net.weights[name].shape)
        recipes[role] = Recipe.of(as_is, (name,), shape, y.dtype)
        operands.insert(0 if role == "first" else 1, Operand(Weight(role), shape))
    a, b = operands
    return MatMulShape(y.dtype, a, b, y.row_shape[:-2]), recipes


def _instance(dtype: str, side: int) -> Instance:
    lowering = MatMulLowering(dtype, Operand(Input(0), (4, side, 64)), Operand(Input(1), (4, 64, side)), (4,))
    return instance(f"{dtype}, {side} x {side}", lowering)


INSTANCES = tuple(_instance(dtype, side) for dtype in FLOATS for side in (32, 64))
