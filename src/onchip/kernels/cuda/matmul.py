"""Products of two values on a GPU: the host's side of matmul.cu."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from onchip.kernels.cuda.mlp_packing import PRECISIONS
from onchip.kernels.cuda.program import (
    EVERY_CHIP,
    FLOATS,
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
    Weight,
    in_line,
)
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Price, Refusal, Use
from onchip.spec.layers import MatMul
from onchip.spec.network import Network
from onchip.spec.recipe import Recipe, as_is

SOURCE = Path(__file__).with_suffix(".cu")
ARCHITECTURES = EVERY_CHIP
MOST_AXES = 4  # of a stack of matrices, the batch among them
SMALL = 32  # rows and columns of a tile, if a matrix has no more; else twice as many
MOST_BLOCKS = 2**31 - 1


@dataclass(frozen=True)
class Operand:
    """A value or a weight: where it is, and the shape of a row, in front of which a value has the batch."""

    at: Memory
    row: tuple[int, ...]

    def strides(self, front: tuple[int, ...]) -> tuple[int, ...]:
        """From matrix to matrix along the batch and the axes in front; 0 where it is stretched."""
        row = (1,) * (2 + len(front) - len(self.row)) + self.row
        steps = [math.prod(row[axis + 1 :]) if row[axis] > 1 else 0 for axis in range(len(front))]
        return (0 if isinstance(self.at, Weight) else math.prod(row), *steps)


@dataclass(frozen=True)
class MatMulLowering:
    """matmul(a, b, y, count, M, N, K, stack)"""

    dtype: str
    a: Operand
    b: Operand
    front: tuple[int, ...]  # axes of a row of y in front of its matrices

    def at(self, B: int) -> Steps:
        M, K, N = *self.a.row[-2:], self.b.row[-1]
        count = B * math.prod(self.front)
        if not count * M * N:
            return Steps(())
        side = SMALL if max(M, N) <= SMALL else 2 * SMALL
        tiles = count * -(-M // side) * -(-N // side)
        program = Program(SOURCE, f"matmul<{FLOATS[self.dtype]}, {side}>")
        config = in_line(min(tiles, MOST_BLOCKS), side * side // 16)
        arguments = (self.a.at, self.b.at, Output(0), *map(Int64, (count, M, N, K)), self._stack(B))
        return Steps((KernelLaunch(program, config, arguments, Budget(registers=176)),))

    def _stack(self, B: int) -> Struct:
        """`Stack` of matmul.cu: axes that are not there are in front."""
        columns = (B, *self.front), self.a.strides(self.front), self.b.strides(self.front)
        missing = MOST_AXES - len(columns[0])
        numbers = [n for column, none in zip(columns, (1, 0, 0), strict=True) for n in (*(none,) * missing, *column)]
        return Struct((), struct.pack(f"<{3 * MOST_AXES}q", *numbers))


class MatMulAlone:
    name = "matmul"
    device_kind = "cuda"
    precisions = tuple(PRECISIONS)  # it computes in float32, or in float64

    def claims(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        node = net.nodes[start]
        layer = node.layer
        if job.is_training or not isinstance(layer, MatMul):
            return
        y = net.types[node.name]
        front = y.row_shape[:-2]
        why = ""
        if y.dtype not in FLOATS or device.arch not in ARCHITECTURES:
            why = f"multiplies {', '.join(FLOATS)} on {', '.join(ARCHITECTURES)}, not {y} on {device.arch}"
        elif len(front) >= MOST_AXES:
            why = f"walks over at most {MOST_AXES - 1} axes of a row in front of its matrices, got {len(front)}"
        if why:
            yield Refusal(self.name, node.name, why)
            return
        values = tuple(dict.fromkeys(node.inputs))
        operands = [Operand(Input(values.index(name)), net.types[name].row_shape) for name in node.inputs]
        recipes = {}
        for role, name in node.weights.items():
            shape = tuple(int(d) for d in net.weights[name].shape)
            recipes[role] = Recipe.of(as_is, (name,), shape, y.dtype)
            operands.insert(0 if role == "first" else 1, Operand(Weight(role), shape))
        a, b = operands
        moved = sum(net.types[name].row_bytes for name in (*values, node.name))
        yield Claim(
            self.name, f"{self.name}<{a.row[-2]},{a.row[-1]},{b.row[-1]}>", (node.name,),
            Price(net.row_flop(node), moved, sum(recipe.nbytes for recipe in recipes.values()), precision="fp32"),
            "a product of two values", recipes, order="one after the other, in parts of 128",
            facts=MatMulLowering(y.dtype, a, b, front), reads={name: Use(is_read_often=True) for name in values},
        )  # fmt: skip


def _instance(dtype: str, side: int) -> Instance:
    made = MatMulLowering(dtype, Operand(Input(0), (4, side, 64)), Operand(Input(1), (4, 64, side)), (4,))
    return Instance(f"{dtype}, {side} x {side}", lambda device: made.at(1000).launches[0])


INSTANCES = tuple(_instance(dtype, side) for dtype in FLOATS for side in (32, 64))
