"""Maxima and means along axes, and softmaxes, on a GPU: the host's side of reduce.cu and softmax.cu.

An array is (outer, N, inner), and N alone decides how the middle axis is walked over: a row's bits do not depend on its
batch. Axes that do not stand next to each other are moved to the end first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from onchip.kernels.cuda.mlp_packing import PRECISIONS
from onchip.kernels.cuda.permute import permute
from onchip.kernels.cuda.program import (
    EVERY_CHIP,
    FLOATS,
    Argument,
    Budget,
    Input,
    Instance,
    Int64,
    KernelLaunch,
    Output,
    Program,
    Scratch,
    Steps,
    UInt32,
    in_line,
)
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Price, Refusal
from onchip.spec.layers import GlobalMax, GlobalMean, Layer, LogSoftmax, Softmax
from onchip.spec.network import Network
from onchip.spec.types import DTYPE_BYTES

ARCHITECTURES = EVERY_CHIP
FOLDER = Path(__file__).parent
THREADS, COLUMNS, LINES, BLOCKS_A_UNIT = 256, 32, 8, 8
LONG = 1024  # numbers of a row that a warp holds in registers; a block shares a longer one
MOST_ITEMS = 32  # numbers that a thread holds
REDUCTIONS: dict[type[Layer], str] = {GlobalMax: "Max", GlobalMean: "Mean"}
SOFTMAXES: dict[type[Layer], str] = {Softmax: "Softmax", LogSoftmax: "LogSoftmax"}


def lanes_for(N: int) -> int:
    """Threads that share a row: so many that each has about four numbers, up to a warp; a block for a long one."""
    return THREADS if N > LONG else min(32, 1 << max(0, -(-N // 4) - 1).bit_length())


def along(file: str, how: str, dtype: str, shape: tuple[int, int, int], units: int, x: Argument) -> KernelLaunch:
    """reduce_rows, softmax_lanes or softmax_rows (x, y, outer, N), or their _columns (x, y, outer, N, inner)"""
    outer, N, inner = shape
    given, lanes = f"{how}, {FLOATS[dtype]}", lanes_for(N)
    sizes: tuple[Argument, ...] = tuple(map(Int64, (outer, N) if inner == 1 else shape))
    if inner > 1:
        held = -(-N // LINES)
        items = f", {1 << (held - 1).bit_length() if held <= MOST_ITEMS else 0}" if file == "softmax" else ""
        name, blocks = f"{file}_columns<{given}{items}>", outer * -(-inner // COLUMNS)
    elif file == "reduce":
        name, blocks = f"reduce_rows<{given}, {lanes}>", -(-outer * lanes // THREADS)
    elif N > LONG:
        name, blocks = f"softmax_rows<{given}>", outer
    else:
        items = str(1 << max(0, -(-N // lanes) - 1).bit_length())
        name, blocks = f"softmax_lanes<{given}, {lanes}, {items}>", -(-outer * lanes // THREADS)
        sizes = Int64(outer), UInt32(N)
    config = in_line(min(blocks, units * BLOCKS_A_UNIT))
    arguments = (x, Output(0), *sizes)
    return KernelLaunch(Program(FOLDER / f"{file}.cu", name), config, arguments, Budget(registers=128))


@dataclass(frozen=True)
class ReduceLowering:
    """A maximum or a mean over axes, or a softmax along one."""

    file: str
    how: str
    dtype: str
    row_shape: tuple[int, ...]
    axes: tuple[int, ...]  # of the whole array, the batch in front
    units: int

    @property
    def order(self) -> tuple[int, ...]:
        """All axes, those that are walked over behind the others."""
        rank = 1 + len(self.row_shape)
        return (*(axis for axis in range(rank) if axis not in self.axes), *self.axes)

    def middle(self, B: int) -> tuple[int, int, int] | None:
        """The array as (outer, N, inner), if the axes stand next to each other."""
        shape = (B, *self.row_shape)
        wide = [axis for axis in self.axes if shape[axis] != 1] or [self.axes[0]]
        between = range(wide[0], wide[-1] + 1)
        if any(shape[axis] != 1 and axis not in self.axes for axis in between):
            return None
        return (
            math.prod(shape[: wide[0]]), math.prod(shape[axis] for axis in between), math.prod(shape[wide[-1] + 1 :])
        )  # fmt: skip

    def at(self, B: int) -> Steps:
        count = B * math.prod(self.row_shape)
        if not count:
            return Steps(())
        if (middle := self.middle(B)) is not None:
            return Steps((along(self.file, self.how, self.dtype, middle, self.units, Input(0)),))
        item_bytes, N = DTYPE_BYTES[self.dtype], math.prod((B, *self.row_shape)[axis] for axis in self.axes)
        shape, dtypes = (B, *self.row_shape), (self.dtype, self.dtype)
        turned = permute(dtypes, shape, self.order, self.units, Input(0), Scratch(0))
        rows = along(self.file, self.how, self.dtype, (count // N, N, 1), self.units, Scratch(0))
        return Steps((turned, rows), count * item_bytes)


class ReduceAlone:
    name = "reduce"
    device_kind = "cuda"
    precisions = tuple(PRECISIONS)  # it computes in float32, or in float64

    def claims(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        node = net.nodes[start]
        layer = node.layer
        if not isinstance(layer, (*REDUCTIONS, *SOFTMAXES)) or job.is_training:
            return
        x, y = net.types[node.inputs[0]], net.types[node.name]
        if x.dtype not in FLOATS or device.arch not in ARCHITECTURES:
            why = f"computes on {', '.join(FLOATS)} on {', '.join(ARCHITECTURES)}"
            yield Refusal(self.name, node.name, f"{why}, not {x} on {device.arch}")
            return
        is_softmax = isinstance(layer, tuple(SOFTMAXES))
        given = (layer.attributes()["axis"],) if is_softmax else layer.attributes()["axes"]
        axes = tuple(sorted(axis % len(x.shape) for axis in given))
        file, how = ("softmax", SOFTMAXES[type(layer)]) if is_softmax else ("reduce", REDUCTIONS[type(layer)])
        lowering = ReduceLowering(file, how, x.dtype, x.row_shape, axes, device.units)
        is_moved = lowering.middle(2) is None
        moved = 2 * x.row_bytes if is_moved else 0
        yield Claim(
            self.name, f"{layer.kind.lower()}<{','.join(map(str, axes))}>", (node.name,),
            Price(net.row_flop(node), x.row_bytes + y.row_bytes + moved, launches=2 if is_moved else 1),
            "one layer by itself", facts=lowering, order="" if how == "Max" else "float64, in lanes, then in a tree",
        )  # fmt: skip


def _instance(name: str, file: str, how: str, dtype: str, *shape: int) -> Instance:
    outer, N, inner = shape
    return Instance(name, lambda device: along(file, how, dtype, (outer, N, inner), device.units, Input(0)))


INSTANCES = (
    _instance("mean of rows", "reduce", "Mean", "float32", 1000, 49, 1),
    _instance("mean of long rows", "reduce", "Mean", "float16", 10, 5000, 1),
    _instance("largest of rows", "reduce", "Max", "bfloat16", 1000, 7, 1),
    _instance("largest of columns", "reduce", "Max", "float32", 10, 20, 30),
    _instance("mean of columns", "reduce", "Mean", "float64", 10, 20, 30),
    _instance("softmax of short rows", "softmax", "Softmax", "float32", 1000, 10, 1),
    _instance("softmax of rows", "softmax", "Softmax", "float64", 1000, 1000, 1),
    _instance("softmax of long rows", "softmax", "Softmax", "float16", 10, 5000, 1),
    _instance("log-softmax of columns", "softmax", "LogSoftmax", "float32", 10, 200, 30),
    _instance("log-softmax of long columns", "softmax", "LogSoftmax", "float32", 10, 2000, 30),
    _instance("log-softmax of rows", "softmax", "LogSoftmax", "bfloat16", 1000, 100, 1),
)
