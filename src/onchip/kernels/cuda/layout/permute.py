"""Permute, and layout conversions that a plan needs, with an optional Cast: host side of layout/permute.cu."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from onchip.kernels.cuda.common.fast_divide import MOST, divider, index_of, parts
from onchip.kernels.cuda.common.precision import PRECISIONS
from onchip.kernels.cuda.common.program import (
    ELEMENT_TYPES,
    EVERY_CHIP,
    Argument,
    Budget,
    Input,
    Instance,
    Int64,
    KernelLaunch,
    Output,
    Program,
    Steps,
    Struct,
    UInt32,
    in_line,
)
from onchip.network.graph import Network, Node
from onchip.network.layers import Cast, Permute
from onchip.network.types import DTYPE_BYTES, TensorType
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Cost, Job, Refusal, Use
from onchip.plan.layout import CHANNELS_LAST, ROWS, has_channels, stored_type

ARCHITECTURES = EVERY_CHIP
SOURCE = Path(__file__).with_suffix(".cu")
# A copy depends on the element size only, not on the dtype.
WORDS = {1: "unsigned char", 2: "unsigned short", 4: "unsigned", 8: "unsigned long long", 16: "uint4"}
THREADS, TOGETHER, BLOCKS_PER_SM = 256, 4, 8
TILE, SLOTS, MAX_LINES = 4096, 4160, 1024  # per tile: elements, slots, lines or columns
SIDE, SMALL = 64, 2048  # preferred tile side; longest row of permute_small
MAX_BLOCKS = 1 << 20  # one tile or chunk per block, several beyond this
MAX_AXES, MAX_TOGETHER = 6, 4  # per array; per strided index
MAX_CHANNELS = 4  # of permute_few


def permute(
    dtypes: tuple[str, str],
    shape: Sequence[int],
    axes: Sequence[int],
    units: int,
    x: Argument,
    y: Argument,
    is_aligned: bool = True,
) -> KernelLaunch:
    """Permute the axes of an array of this shape, converting dtypes[0] to dtypes[1].

    is_aligned  x and y are 16-byte aligned; required if the last axis stays last
    """
    shape, axes = merge_axes(shape, axes)
    assert len(shape) <= MAX_AXES, f"{len(shape)} axes move apart, at most {MAX_AXES} can"
    if not axes or axes[-1] == len(axes) - 1:
        is_narrow = bool(axes) and shape[-1] * DTYPE_BYTES[dtypes[0]] % 8 != 0
        if is_narrow and _has_small_rows(shape, axes):
            return _small(dtypes, shape, axes, x, y)
        return _rows(dtypes, shape, axes, units, x, y)
    if is_aligned and (few := _few(dtypes, shape, axes, x, y)) is not None:
        return few
    groups = _groups(shape, axes)
    lines, columns = (math.prod(shape[axis] for axis in group) for group in groups)
    if lines * columns < TILE // 4 and _has_small_rows(shape, axes):
        return _small(dtypes, shape, axes, x, y)
    most = min(4, *(16 // DTYPE_BYTES[dtype] for dtype in dtypes)) if is_aligned else 1
    return _tiles(dtypes, shape, axes, groups, most, x, y)


def _rows(
    dtypes: tuple[str, str], shape: tuple[int, ...], axes: tuple[int, ...], units: int, x: Argument, y: Argument
) -> KernelLaunch:
    """permute_rows(x, y, count, n1..n5, s0..s4)"""
    given, made = dtypes
    names = ELEMENT_TYPES.get(given, ""), ELEMENT_TYPES.get(made, "")
    if given == made:  # the widest words that divide a contiguous run
        word = math.gcd(16, DTYPE_BYTES[given] * (shape[-1] if shape else 1))
        names = (WORDS[word],) * 2
        shape = (*shape[:-1], (shape[-1] if shape else 1) * DTYPE_BYTES[given] // word)
    if len(shape) == 1:  # a copy: the first axis may have any size
        shape, axes = (shape[0], 1), (0, 1)
    strides = _steps(shape)
    first, *others = axes
    missing = (1,) * (MAX_AXES - len(axes))
    sizes = (*missing, *(shape[axis] for axis in others))
    steps = (strides[first], *missing, *(strides[axis] for axis in others))
    count = math.prod(shape)
    program = Program(SOURCE, f"permute_rows<{', '.join(names)}, {index_of(count)}>")
    arguments = (x, y, Int64(count), *map(divider, sizes), *map(Int64, steps[:-1]))
    return KernelLaunch(
        program, in_line(min(-(-count // (THREADS * TOGETHER)), units * BLOCKS_PER_SM)), arguments, Budget(registers=80)
    )


def _few(
    dtypes: tuple[str, str], shape: tuple[int, ...], axes: tuple[int, ...], x: Argument, y: Argument
) -> KernelLaunch | None:
    """permute_few(x, y, groups, across): NCHW <-> NHWC with few channels; None for any other permutation."""
    item_bytes = DTYPE_BYTES[dtypes[0]]
    if dtypes[0] != dtypes[1] or axes not in ((1, 0), (0, 2, 1)):
        return None
    is_behind = shape[-2] < shape[-1]
    K, pixels = sorted(shape[-2:])
    across, rest = divmod(pixels * item_bytes, 16)
    if K > MAX_CHANNELS or rest or across >= MOST:
        return None
    groups = across * math.prod(shape[:-2])
    names = f"{WORDS[item_bytes]}, {index_of(groups)}, {K}, {str(is_behind).lower()}"
    return KernelLaunch(
        Program(SOURCE, f"permute_few<{names}>"), in_line(min(-(-groups // THREADS), MAX_BLOCKS)),
        (x, y, Int64(groups), divider(across)), Budget(registers=48, spill_bytes=24),  # sm_90 does not spill
    )  # fmt: skip


def _has_small_rows(shape: tuple[int, ...], axes: tuple[int, ...]) -> bool:
    """Whether short rows keep their order and are permuted one by one."""
    return 1 < len(axes) <= 1 + MAX_TOGETHER and axes[0] == 0 and math.prod(shape[1:]) <= SMALL


def _small(
    dtypes: tuple[str, str], shape: tuple[int, ...], axes: tuple[int, ...], x: Argument, y: Argument
) -> KernelLaunch:
    """permute_small(x, y, count, chunk, row, inner)"""
    count, size = math.prod(shape), math.prod(shape[1:])
    chunk = TILE // size * size
    steps = _steps(shape)
    inner = _axes([(shape[axis], steps[axis]) for axis in axes[1:]])
    return KernelLaunch(
        Program(SOURCE, f"permute_small<{', '.join(_numbers(dtypes))}>"), in_line(min(-(-count // chunk), MAX_BLOCKS)),
        (x, y, Int64(count), UInt32(chunk), parts(size), inner), Budget(registers=64),
    )  # fmt: skip


def _tiles(
    dtypes: tuple[str, str],
    shape: tuple[int, ...],
    axes: tuple[int, ...],
    groups: tuple[list[int], list[int]],
    most: int,  # elements per vector
    x: Argument,
    y: Argument,
) -> KernelLaunch:
    """permute_tiles(x, y, tiles, Na, Nb, across, down, by_x, by_y, lines, columns, outer_x, outer_y)"""
    a, b = groups
    outer = [axis for axis in range(len(shape)) if axis not in (*a, *b)]
    in_x, in_y = _steps(shape), dict(zip(axes, _steps([shape[axis] for axis in axes]), strict=True))
    Na, Nb = (math.prod(shape[axis] for axis in group) for group in groups)
    R, C = box_for(Na, Nb)
    across, down = -(-Na // R), -(-Nb // C)
    tiles = math.prod(shape[axis] for axis in outer) * across * down
    # All other strides are multiples of the length of a line, or of a column.
    VX, VY = (most if N % most == 0 else 1 for N in (Nb, Na))
    names = ", ".join(_numbers(dtypes))
    arguments = (
        x, y, Int64(tiles), Int64(Na), Int64(Nb), divider(across), divider(down), parts(C // VX), parts(R // VY),
        _axes([(shape[axis], in_x[axis]) for axis in a]), _axes([(shape[axis], in_y[axis]) for axis in b]),
        _axes([(shape[axis], in_x[axis]) for axis in outer]), _axes([(shape[axis], in_y[axis]) for axis in outer]),
    )  # fmt: skip
    program = Program(SOURCE, f"permute_tiles<{names}, {index_of(max(tiles, Na + R, Nb + C))}, {VX}, {VY}>")
    return KernelLaunch(program, in_line(min(tiles, MAX_BLOCKS)), arguments, Budget(registers=80))


def _groups(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """The axes of a column, the last of y, and those of a line, the last of x, numbered as in x.

    The shorter one takes the next axis until both are long enough; no axis is in both.
    """
    orders = list(axes), list(range(len(axes)))
    groups = [orders[0].pop()], [orders[1].pop()]
    while True:
        sizes = [math.prod(shape[axis] for axis in group) for group in groups]
        for i in sorted(range(2), key=lambda i: sizes[i]):
            is_free = bool(orders[i]) and orders[i][-1] not in groups[1 - i] and len(groups[i]) < MAX_TOGETHER
            if sizes[i] < SIDE and is_free:
                groups[i].insert(0, orders[i].pop())
                break
        else:
            return groups


def box_for(Na: int, Nb: int) -> tuple[int, int]:
    """Lines and columns per tile: square unless one is short; sized so that the last tile is not nearly empty."""
    R, C = min(SIDE, Na), min(SIDE, Nb)
    if C < SIDE:
        R = min(TILE // C, SLOTS // (C | 1), MAX_LINES) // 8 * 8
    elif R < SIDE:
        C = min(TILE // R, SLOTS // R - 1, MAX_LINES) // 8 * 8
    return _evenly(Na, R), _evenly(Nb, C)


def _evenly(N: int, most: int) -> int:
    """Tiles of about equal size, in multiples of 8 (a sector is 32 bytes)."""
    return N if most >= N else -(-N // -(-N // most) // 8) * 8


def _numbers(dtypes: tuple[str, str]) -> tuple[str, str]:
    given, made = dtypes
    return (WORDS[DTYPE_BYTES[given]],) * 2 if given == made else (ELEMENT_TYPES[given], ELEMENT_TYPES[made])


def _steps(shape: Sequence[int]) -> list[int]:
    """Row-major strides."""
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def _axes(axes: Sequence[tuple[int, int]]) -> Struct:
    """`Axes` of layout/permute.cu, from (size, stride) pairs. The first may have any size."""
    first, *others = axes or [(1, 0)]
    missing = [(1, 0)] * (MAX_TOGETHER - 1 - len(others))
    sizes = b"".join(divider(size).data for size, _ in (*missing, *others))
    steps = (first[1], *(step for _, step in (*missing, *others)))
    return Struct((), sizes + struct.pack("<I4q", len(axes) <= 1, *steps))


def merge_axes(shape: Sequence[int], axes: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The same permutation with fewer axes: adjacent ones merged, those of size 1 dropped."""
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
    dtypes: tuple[str, str]
    row_shape: tuple[int, ...]
    axes: tuple[int, ...]  # of the whole array, batch first
    units: int

    def at(self, B: int) -> Steps:
        shape = (B, *self.row_shape)
        if not math.prod(shape):
            return Steps(())
        return Steps((permute(self.dtypes, shape, self.axes, self.units, Input(0), Output(0)),))


class PermuteKernel:
    name = "permute"
    device_kind = "cuda"
    precisions = tuple(PRECISIONS)

    def claims(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        node = net.nodes[start]
        if job.is_training:
            return
        if isinstance(node.layer, Cast):
            yield from self._casts(net, node, device)
        if not isinstance(node.layer, Permute):
            return
        x = net.types[node.inputs[0]]
        if device.arch not in ARCHITECTURES or len(merge_axes((2, *x.row_shape), node.layer.axes)[0]) > MAX_AXES:
            why = f"moves up to {MAX_AXES} axes on {', '.join(ARCHITECTURES)}"
            yield Refusal(self.name, node.name, f"{why}, not {x} on {device.arch}")
            return
        label, why = f"{self.name}<{','.join(map(str, node.layer.axes))}>", "one layer by itself"
        yield Claim(
            self.name,
            label,
            (node.name,),
            Cost(0, 2 * x.row_bytes),
            why,
            facts=PermuteLowering((x.dtype, x.dtype), x.row_shape, node.layer.axes, device.units),
        )

    def _casts(self, net: Network, node: Node, device: Device) -> Iterator[Claim]:
        """A Cast that also changes the layout, in one pass."""
        (value,) = node.inputs
        x, y = net.types[value], net.types[node.name]
        if not {x.dtype, y.dtype} <= ELEMENT_TYPES.keys() or not has_channels(x) or device.arch not in ARCHITECTURES:
            return
        for given, wanted in ((ROWS, CHANNELS_LAST), (CHANNELS_LAST, ROWS)):
            at_end = value in net.inputs if given == CHANNELS_LAST else not net.readers(node.name)
            if not at_end:  # network inputs and outputs stay row-major
                yield Claim(
                    self.name, f"{self.name}<{wanted},{y.dtype}>", (node.name,), Cost(0, x.row_bytes + y.row_bytes),
                    f"{value} lies in {given}", facts=_conversion(x, given, y.dtype, device),
                    reads={value: Use(given)}, writes={} if wanted == ROWS else {node.name: wanted},
                )  # fmt: skip

    def conversion(self, net: Network, value: str, given: str, wanted: str, device: Device, job: Job) -> Claim | None:
        x = net.types[value]
        return Claim(
            self.name, f"{self.name}<{wanted}>", (), Cost(0, 2 * x.row_bytes), f"{value} lies in {given}",
            facts=_conversion(x, given, x.dtype, device), reads={value: Use(given)}, writes={value: wanted},
        )  # fmt: skip


def _conversion(x: TensorType, given: str, dtype: str, device: Device) -> PermuteLowering:
    """Conversion from layout `given` to the other one."""
    to_last = (0, *range(2, len(x.shape)), 1)
    return PermuteLowering(
        (x.dtype, dtype), stored_type(x, given).row_shape, to_last if given == ROWS else _turned(to_last), device.units
    )


def _turned(axes: Sequence[int]) -> tuple[int, ...]:
    """The inverse permutation."""
    return tuple(sorted(range(len(axes)), key=lambda i: axes[i]))


def _instance(given: str, made: str, *axes: int, shape: tuple[int, ...] = (8, 64, 32, 32)) -> Instance:
    name = f"{given} to {made}, {shape}, {axes}"
    return Instance(name, lambda device: permute((given, made), shape, axes, device.units, Input(0), Output(0)))


_FOURS = (8, 4, 32), (8, 32, 4)
INSTANCES = (
    *(_instance(dtype, dtype, 0, 3, 2, 1) for dtype in ("float32", "float16", "uint8", "float64")),
    *(_instance(dtype, dtype, 0, 2, 1, 3) for dtype in ("float32", "float16", "uint8", "float64")),
    *(_instance(dtype, dtype, 0, 3, 2, 1, shape=(8, 33, 31, 35)) for dtype in ("float32", "uint8", "float64")),
    *(_instance(dtype, dtype, 0, 3, 2, 1, shape=(1 << 31, 64, 1, 33)) for dtype in ("float32", "float64")),
    *(_instance(dtype, dtype, 0, 3, 2, 1, shape=(8, 3, 5, 7)) for dtype in ("float16", "float64")),
    *(_instance(dtype, dtype, 0, 2, 3, 1, shape=(8, 3, 32, 32)) for dtype in ("float32", "float16", "uint8")),
    *(_instance(dtype, dtype, 0, 3, 1, 2, shape=(8, 32, 32, 3)) for dtype in ("float32", "float16", "uint8")),
    *(_instance(dtype, dtype, 0, 2, 1, shape=shape) for dtype in ("float16", "float64") for shape in _FOURS),
    _instance("bfloat16", "float32", 0, 3, 2, 1),
    _instance("float32", "float16", 0, 1, 2, 3),
)
