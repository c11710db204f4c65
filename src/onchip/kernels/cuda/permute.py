"""Axes in another order on a GPU: the host's side of swap_axes.cu and permute.cu.

A Permute by itself, and values that a plan wants in another layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from onchip.kernels.cuda.mlp_packing import PRECISIONS
from onchip.kernels.cuda.program import (
    EVERY_CHIP,
    NUMBERS,
    Argument,
    Budget,
    Input,
    Instance,
    Int64,
    KernelLaunch,
    LaunchConfig,
    Output,
    Program,
    Steps,
)
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Price, Refusal, Use
from onchip.plan.layout import CHANNELS_LAST
from onchip.spec.layers import Permute
from onchip.spec.network import Network
from onchip.spec.types import DTYPE_BYTES, TensorType

ARCHITECTURES = EVERY_CHIP
FOLDER = Path(__file__).parent
# Numbers are only moved: what they are does not matter, how long they are does.
WORDS = {1: "unsigned char", 2: "unsigned short", 4: "unsigned", 8: "unsigned long long"}
THREADS, SIDE, TOGETHER, BLOCKS_A_UNIT = 256, 32, 4, 8
MOST_AXES = 6


def swap_axes(item_bytes: int, shape: tuple[int, int, int], units: int, x: Argument, y: Argument) -> KernelLaunch:
    """swap_axes(x, y, outer, N, M): (outer, N, M) -> (outer, M, N)"""
    outer, N, M = shape
    blocks = outer * -(-N // SIDE) * -(-M // SIDE)
    program = Program(FOLDER / "swap_axes.cu", f"swap_axes<{WORDS[item_bytes]}>")
    return KernelLaunch(program, _line(blocks, units), (x, y, *map(Int64, shape)), Budget(registers=40))


def permute(
    dtypes: tuple[str, str], shape: Sequence[int], axes: Sequence[int], units: int, x: Argument, y: Argument
) -> KernelLaunch:
    """permute(x, y, count, n1..n5, s0..s5): the array of this shape with its axes in this order, from dtype to dtype"""
    shape, axes = merge_axes(shape, axes)
    assert len(shape) <= MOST_AXES, f"{len(shape)} axes move apart, at most {MOST_AXES} can"
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    missing = MOST_AXES - len(shape)
    sizes = (*(1,) * missing, *(shape[axis] for axis in axes))
    steps = (*(0,) * missing, *(strides[axis] for axis in axes))
    count = math.prod(shape)
    given, made = dtypes
    names = (WORDS[DTYPE_BYTES[given]],) * 2 if given == made else (NUMBERS[given], NUMBERS[made])
    program = Program(FOLDER / "permute.cu", f"permute<{', '.join(names)}>")
    numbers = (count, *sizes[1:], *steps)
    arguments = (x, y, *map(Int64, numbers))
    return KernelLaunch(program, _line(-(-count // (THREADS * TOGETHER)), units), arguments, Budget(registers=48))


def _line(blocks: int, units: int) -> LaunchConfig:
    return LaunchConfig((max(1, min(blocks, units * BLOCKS_A_UNIT)), 1, 1), (THREADS, 1, 1), 0)


def merge_axes(shape: Sequence[int], axes: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The same move with fewer axes: those that stay next to each other are one, those of size 1 are gone."""
    kept = [axis for axis in axes if shape[axis] != 1]
    runs: list[list[int]] = []
    for axis in kept:
        is_next = bool(runs) and all(shape[between] == 1 for between in range(runs[-1][-1] + 1, axis))
        if is_next and axis > runs[-1][-1]:
            runs[-1].append(axis)
        else:
            runs.append([axis])
    order = sorted(range(len(runs)), key=lambda i: runs[i][0])
    merged = tuple(math.prod(shape[axis] for axis in runs[i]) for i in order)
    return merged, tuple(order.index(i) for i in range(len(runs)))


@dataclass(frozen=True)
class PermuteLowering:
    dtype: str
    row_shape: tuple[int, ...]
    axes: tuple[int, ...]  # of the whole array, the batch in front
    units: int

    def at(self, B: int) -> Steps:
        shape, axes = merge_axes((B, *self.row_shape), self.axes)
        if not math.prod(shape):
            return Steps(())
        if axes in ((1, 0), (0, 2, 1)):
            outer, N, M = (1, *shape) if len(shape) == 2 else shape
            return Steps((swap_axes(DTYPE_BYTES[self.dtype], (outer, N, M), self.units, Input(0), Output(0)),))
        return Steps((permute((self.dtype, self.dtype), shape, axes, self.units, Input(0), Output(0)),))


class PermuteAlone:
    name = "permute"
    device_kind = "cuda"
    precisions = tuple(PRECISIONS)

    def claims(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        node = net.nodes[start]
        if not isinstance(node.layer, Permute) or job.is_training:
            return
        x = net.types[node.inputs[0]]
        if device.arch not in ARCHITECTURES or len(merge_axes((2, *x.row_shape), node.layer.axes)[0]) > MOST_AXES:
            why = f"moves up to {MOST_AXES} axes on {', '.join(ARCHITECTURES)}"
            yield Refusal(self.name, node.name, f"{why}, not {x} on {device.arch}")
            return
        label, why = f"{self.name}<{','.join(map(str, node.layer.axes))}>", "one layer by itself"
        yield Claim(
            self.name, label, (node.name,), Price(0, 2 * x.row_bytes), why, facts=_lowering(x, node.layer.axes, device)
        )

    def conversion(self, net: Network, value: str, given: str, wanted: str, device: Device, job: Job) -> Claim | None:
        x = net.types[value]
        rank = len(x.shape)
        to_last = (0, *range(2, rank), 1)
        if wanted == CHANNELS_LAST:
            lowering = _lowering(x, to_last, device)
        else:
            lowering = _lowering(TensorType((x.shape[0], *x.shape[2:], x.shape[1]), x.dtype), _turned(to_last), device)
        why = f"{value} lies in {given}"
        return Claim(
            self.name, f"{self.name}<{wanted}>", (), Price(0, 2 * x.row_bytes), why, facts=lowering,
            reads={value: Use(given)}, gives={value: wanted},
        )  # fmt: skip


def _turned(axes: Sequence[int]) -> tuple[int, ...]:
    """The order that undoes another one."""
    return tuple(sorted(range(len(axes)), key=lambda i: axes[i]))


def _lowering(x: TensorType, axes: tuple[int, ...], device: Device) -> PermuteLowering:
    return PermuteLowering(x.dtype, x.row_shape, axes, device.units)


def _instance(given: str, made: str) -> Instance:
    shape, axes = (8, 3, 5, 7), (0, 3, 2, 1)
    name = given if given == made else f"{given} to {made}"
    return Instance(name, lambda device: permute((given, made), shape, axes, device.units, Input(0), Output(0)))


def _swap(name: str, item_bytes: int) -> Instance:
    return Instance(name, lambda device: swap_axes(item_bytes, (8, 3, 5), device.units, Input(0), Output(0)))


INSTANCES = (
    *(_instance(dtype, dtype) for dtype in ("float32", "float16", "uint8", "float64")),
    _instance("bfloat16", "float32"),
    _instance("float32", "float16"),
    *(_swap(f"two axes, {name}", size) for name, size in (("floats", 4), ("halves", 2), ("bytes", 1), ("doubles", 8))),
)
