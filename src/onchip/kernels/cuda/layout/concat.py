"""Concat and Interleave: host side of layout/concat.cu."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from onchip.kernels.cuda.common.fast_divide import divider, index_of
from onchip.kernels.cuda.common.precision import PRECISIONS
from onchip.kernels.cuda.common.program import (
    EVERY_CHIP,
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
from onchip.kernels.cuda.layout.permute import WORDS
from onchip.network.graph import Network, Node
from onchip.network.layers import Concat, Interleave
from onchip.network.layers.base import row_axis
from onchip.network.types import DTYPE_BYTES, TensorType
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Cost, Job, Refusal, Use
from onchip.plan.layout import CHANNELS_LAST, has_channels, stored_type

SOURCE = Path(__file__).with_suffix(".cu")
ARCHITECTURES = EVERY_CHIP
THREADS, TOGETHER, BLOCKS_PER_SM = 256, 4, 8
MOST = 8  # values per launch
NOWHERE = (1 << 32) - 1  # start of an absent value


@dataclass(frozen=True)
class ConcatLowering:
    """concat(lines, y, count, pitch, at)"""

    row_lines: int  # per batch row
    operands: tuple[int, ...]  # input index of each value
    line_bytes: tuple[int, ...]  # bytes per line of each value

    @property
    def word_bytes(self) -> int:
        return math.gcd(*self.line_bytes, 16)

    def at(self, B: int) -> Steps:
        if not B * self.row_lines:
            return Steps(())
        words = [line // self.word_bytes for line in self.line_bytes]
        there = [value for value, count in enumerate(words) if count]
        return Steps(tuple(self._launch(B, words, there[i : i + MOST]) for i in range(0, len(there), MOST)))

    def _launch(self, B: int, words: Sequence[int], values: Sequence[int]) -> KernelLaunch:
        begins = [0, *itertools.accumulate(words[value] for value in values)]
        count = B * self.row_lines * begins[-1]
        missing = MOST - len(values)
        lines = Struct(
            (*(Input(self.operands[value]) for value in values), *[Int64(0)] * missing),
            struct.pack(f"<{MOST + 1}I", *begins, *[NOWHERE] * missing) + divider(begins[-1]).data,
        )
        sizes = Int64(count), Int64(sum(words)), Int64(sum(words[: values[0]]))
        program = Program(SOURCE, f"concat<{WORDS[self.word_bytes]}, {index_of(count)}>")
        config = in_line(-(-count // (THREADS * TOGETHER)))
        return KernelLaunch(program, config, (lines, Output(0), *sizes), Budget(registers=64))


@dataclass(frozen=True)
class Part:
    """A value (outer, h, w, inner) and its position in (outer, H, W, inner); inner in bytes, the same for all."""

    operand: int  # input index
    row_outer: int  # per batch row
    sides: tuple[int, int]
    inner_bytes: int
    sides_of_all: tuple[int, int]
    step: tuple[int, int]
    at: tuple[int, int]

    @property
    def word_bytes(self) -> int:
        return math.gcd(self.inner_bytes, 16)

    def count(self, B: int) -> int:
        """Words."""
        return B * self.row_outer * math.prod(self.sides) * self.inner_bytes // self.word_bytes

    def packed(self, B: int) -> bytes:
        """`Value` of layout/concat.cu."""
        places = struct.pack("<7q", self.count(B), *self.sides_of_all, *self.step, *self.at)
        sizes = (*self.sides, self.inner_bytes // self.word_bytes)
        return (places + b"".join(divider(size).data for size in sizes)).ljust(96, b"\0")


@dataclass(frozen=True)
class InterleaveLowering:
    """interleave(values, y, blocks)"""

    parts: tuple[Part, ...]
    units: int

    def at(self, B: int) -> Steps:
        there = [part for part in self.parts if part.count(B)]
        return Steps(tuple(self._launch(there[i : i + MOST], B) for i in range(0, len(there), MOST)))

    def _launch(self, parts: Sequence[Part], B: int) -> KernelLaunch:
        most = max(part.count(B) for part in parts)
        blocks = min(-(-most // (THREADS * TOGETHER)), -(-self.units * BLOCKS_PER_SM // len(parts)))
        missing = MOST - len(parts)
        values = Struct(
            (*(Input(part.operand) for part in parts), *[Int64(0)] * missing),
            b"".join(part.packed(B) for part in parts).ljust(MOST * 96, b"\0"),
        )
        program = Program(SOURCE, f"interleave<{WORDS[parts[0].word_bytes]}, {index_of(most)}>")
        arguments = values, Output(0), UInt32(blocks)
        return KernelLaunch(program, in_line(blocks * len(parts)), arguments, Budget(registers=64))


class ConcatKernel:
    name = "concat"
    device_kind = "cuda"
    precisions = tuple(PRECISIONS)

    def claims(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        node = net.nodes[start]
        if not isinstance(node.layer, Concat | Interleave) or job.is_training:
            return
        if device.arch not in ARCHITECTURES:
            yield Refusal(self.name, node.name, f"on {', '.join(ARCHITECTURES)}, not on {device.arch}")
            return
        y = net.types[node.name]
        launches = math.ceil(len(node.inputs) / MOST)
        cost = Cost(0, 2 * y.row_bytes, launches=launches)
        label = f"{self.name}<{node.layer.kind},{len(node.inputs)}>"
        for is_last in (False, True) if _has_channels(net, node) else (False,):
            yield Claim(
                self.name, label, (node.name,), cost, f"{len(node.inputs)} values, up to {MOST} a launch",
                facts=_lowering(net, node, is_last, device),
                reads={value: Use(CHANNELS_LAST) for value in node.inputs} if is_last else {},
                writes={node.name: CHANNELS_LAST} if is_last else {},
            )  # fmt: skip


def _has_channels(net: Network, node: Node) -> bool:
    """Whether all values may be NHWC: network inputs and outputs stay row-major."""
    ends = net.inputs.keys() & set(node.inputs) or not net.readers(node.name)
    return not ends and all(has_channels(net.types[value]) for value in (*node.inputs, node.name))


def _lowering(net: Network, node: Node, is_last: bool, device: Device) -> ConcatLowering | InterleaveLowering:
    layer, y = node.layer, net.types[node.name]
    operands = list(dict.fromkeys(node.inputs))
    numbers, item_bytes = tuple(map(operands.index, node.inputs)), DTYPE_BYTES[y.dtype]
    given, to = [_lie(net.types[value], is_last) for value in node.inputs], _lie(y, is_last)
    if isinstance(layer, Concat):
        axis = row_axis(layer.axis, y) - 1
        axis = (axis or len(to)) - 1 if is_last else axis
        # From the axis on, a value is contiguous.
        return ConcatLowering(math.prod(to[:axis]), numbers, tuple(item_bytes * math.prod(x[axis:]) for x in given))
    assert isinstance(layer, Interleave)
    parts = []
    for x, operand, phase in zip(given, numbers, layer.phases(), strict=True):
        outer, inner = (1, item_bytes * x[-1]) if is_last else (x[0], item_bytes)
        pixels, all_pixels = (_pair(shape[:-1] if is_last else shape[1:]) for shape in (x, to))
        parts.append(Part(operand, outer, pixels, inner, all_pixels, _pair(layer.stride), _pair(phase, 0)))
    return InterleaveLowering(tuple(parts), device.units)


def _lie(given: TensorType, is_last: bool) -> tuple[int, ...]:
    return stored_type(given, CHANNELS_LAST).row_shape if is_last else given.row_shape


def _pair(sizes: tuple[int, ...], first: int = 1) -> tuple[int, int]:
    """The values of both axes; `first` for a missing axis."""
    return (sizes[0], sizes[1]) if len(sizes) == 2 else (first, sizes[0])


def _concat(name: str, *line_bytes: int) -> Instance:
    lowering = ConcatLowering(100, tuple(range(len(line_bytes))), line_bytes)
    return Instance(f"concat, {name}", lambda device: lowering.at(64).launches[0])


def _interleave(name: str, inner_bytes: int) -> Instance:
    part = Part(0, 8, (3, 5), inner_bytes, (6, 10), (2, 2), (1, 0))
    return Instance(name, lambda device: InterleaveLowering((part,) * 4, device.units).at(64).launches[0])


INSTANCES = (
    _interleave("floats", 4), _interleave("bytes", 3), _interleave("halves", 2), _interleave("doubles", 8),
    _interleave("16 bytes", 16), _concat("16 bytes", 32, 64), _concat("halves", 6, 8),
)  # fmt: skip
