"""Axes in another order on a GPU: the host's side of permute.cu.

A Permute by itself, and values that a plan wants in another layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from onchip.kernels.cuda.divide import divider, index_of
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
    Output,
    Program,
    Steps,
    in_line,
)
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Price, Refusal, Use
from onchip.plan.layout import CHANNELS_LAST
from onchip.spec.layers import Permute
from onchip.spec.network import Network
from onchip.spec.types import DTYPE_BYTES, TensorType

ARCHITECTURES = EVERY_CHIP
SOURCE = Path(__file__).with_suffix(".cu")
# Numbers are only moved: what they are does not matter, how long they are does.
WORDS = {1: "unsigned char", 2: "unsigned short", 4: "unsigned", 8: "unsigned long long", 16: "uint4"}
THREADS, SIDE, AT_ONCE, TOGETHER, BLOCKS_A_UNIT = 256, 32, 2, 4, 8
MOST_AXES = 6


def permute(
    dtypes: tuple[str, str], shape: Sequence[int], axes: Sequence[int], units: int, x: Argument, y: Argument
) -> KernelLaunch:
    """The array of this shape with its axes in this order, from dtype to dtype."""
    shape, axes = merge_axes(shape, axes)
    assert len(shape) <= MOST_AXES, f"{len(shape)} axes move apart, at most {MOST_AXES} can"
    is_last_still = not axes or axes[-1] == len(axes) - 1
    return (_rows if is_last_still else _tiles)(dtypes, shape, axes, units, x, y)


def _rows(
    dtypes: tuple[str, str], shape: tuple[int, ...], axes: tuple[int, ...], units: int, x: Argument, y: Argument
) -> KernelLaunch:
    """permute_rows(x, y, count, n1..n5, s0..s4)"""
    given, made = dtypes
    names = NUMBERS.get(given, ""), NUMBERS.get(made, "")
    if given == made:  # as long words as a run of neighbours is made of
        word = math.gcd(16, DTYPE_BYTES[given] * (shape[-1] if shape else 1))
        names = (WORDS[word],) * 2
        shape = (*shape[:-1], (shape[-1] if shape else 1) * DTYPE_BYTES[given] // word)
    if len(shape) == 1:  # a copy: the first axis may have any size
        shape, axes = (shape[0], 1), (0, 1)
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    first, *others = axes
    missing = (1,) * (MOST_AXES - len(axes))
    sizes = (*missing, *(shape[axis] for axis in others))
    steps = (strides[first], *missing, *(strides[axis] for axis in others))
    count = math.prod(shape)
    program = Program(SOURCE, f"permute_rows<{', '.join(names)}, {index_of(count)}>")
    arguments = (x, y, Int64(count), *map(divider, sizes), *map(Int64, steps[:-1]))
    return KernelLaunch(
        program, in_line(min(-(-count // (THREADS * TOGETHER)), units * BLOCKS_A_UNIT)), arguments, Budget(registers=80)
    )


def _tiles(
    dtypes: tuple[str, str], shape: tuple[int, ...], axes: tuple[int, ...], units: int, x: Argument, y: Argument
) -> KernelLaunch:
    """permute_tiles(x, y, tiles, Na, Nb, across, down, n1..n3, xa, yb, s0..s3, t0..t3)"""
    given, made = dtypes
    names = (WORDS[DTYPE_BYTES[given]],) * 2 if given == made else (NUMBERS[given], NUMBERS[made])
    a, b = axes[-1], len(shape) - 1  # the last axis of y, and that of x, as x counts them
    in_x = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    in_y = {axis: math.prod(shape[other] for other in axes[i + 1 :]) for i, axis in enumerate(axes)}
    others = [axis for axis in range(len(shape)) if axis not in (a, b)]
    missing = (0,) * (MOST_AXES - 2 - len(others))  # behind the first, which may have any size
    sizes = [*(shape[axis] for axis in others[:1]), *(1 for _ in missing), *(shape[axis] for axis in others[1:])]
    from_x = [*(in_x[axis] for axis in others[:1]), *missing, *(in_x[axis] for axis in others[1:])]
    to_y = [*(in_y[axis] for axis in others[:1]), *missing, *(in_y[axis] for axis in others[1:])]
    across, down = -(-shape[a] // SIDE), -(-shape[b] // SIDE)
    tiles = math.prod(sizes) * across * down
    program = Program(SOURCE, f"permute_tiles<{', '.join(names)}, {index_of(tiles)}>")
    arguments = (
        x, y, Int64(tiles), Int64(shape[a]), Int64(shape[b]), *map(divider, (across, down, *sizes[1:])),
        *map(Int64, (in_x[a], in_y[b], *from_x, *to_y)),
    )  # fmt: skip
    return KernelLaunch(
        program, in_line(min(-(-tiles // AT_ONCE), units * BLOCKS_A_UNIT)), arguments, Budget(registers=80)
    )


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
        shape = (B, *self.row_shape)
        dtypes = self.dtype, self.dtype
        return Steps((permute(dtypes, shape, self.axes, self.units, Input(0), Output(0)),) if math.prod(shape) else ())


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


def _instance(given: str, made: str, *axes: int) -> Instance:
    shape = (8, 3, 5, 7)
    name = f"{given} to {made}, {axes}"
    return Instance(name, lambda device: permute((given, made), shape, axes, device.units, Input(0), Output(0)))


INSTANCES = (
    *(_instance(dtype, dtype, 0, 3, 2, 1) for dtype in ("float32", "float16", "uint8", "float64")),
    *(_instance(dtype, dtype, 0, 2, 1, 3) for dtype in ("float32", "float16", "uint8", "float64")),
    _instance("bfloat16", "float32", 0, 3, 2, 1),
    _instance("float32", "float16", 0, 1, 2, 3),
)
