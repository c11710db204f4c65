"""Concat and Interleave: host side of layout/concat.cu."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from ctypes import c_int64, c_uint32, c_void_p
from dataclasses import dataclass
from pathlib import Path

from onchip.kernels.cuda.common.arguments import Input, Int64, Output, Struct, UInt32
from onchip.kernels.cuda.common.c_struct import CStruct
from onchip.kernels.cuda.common.fast_divide import Divider, divider, index_of
from onchip.kernels.cuda.common.kernel import CudaKernel, instance
from onchip.kernels.cuda.common.permute import WORDS
from onchip.kernels.cuda.common.program import Budget, Instance, KernelLaunch, Program, Steps, grid_1d
from onchip.network.graph import Network, Node
from onchip.network.layers import Concat, Interleave
from onchip.network.layers.base import row_axis
from onchip.network.types import DTYPE_BYTES
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Cost, Job
from onchip.plan.layout import CHANNELS_LAST, ROWS, has_channels, stored_type

SOURCE = Path(__file__).with_suffix(".cu")
THREADS, PER_THREAD, BLOCKS_PER_SM = 256, 4, 8
MAX_VALUES = 8  # values per launch
ABSENT = (1 << 32) - 1  # start of an absent value


class Lines(CStruct):
    source, c_name = SOURCE, "Lines"
    _fields_ = (("x", c_void_p * MAX_VALUES), ("begin", c_uint32 * (MAX_VALUES + 1)), ("words", Divider))


class ValueStruct(CStruct):
    source, c_name = SOURCE, "Value"
    _fields_ = (
        ("count", c_int64), ("H", c_int64), ("W", c_int64), ("step_h", c_int64), ("step_w", c_int64),
        ("at_h", c_int64), ("at_w", c_int64), ("h", Divider), ("w", Divider), ("inner", Divider),
    )  # fmt: skip


class Values(CStruct):
    source, c_name = SOURCE, "Values"
    _fields_ = (("x", c_void_p * MAX_VALUES), ("value", ValueStruct * MAX_VALUES))


@dataclass(frozen=True)
class ConcatLowering:
    """concat(lines, y, count, pitch, at)"""

    row_lines: int  # lines per batch row; in a line, each value is contiguous
    operands: tuple[int, ...]  # input index of each value
    line_bytes: tuple[int, ...]  # bytes per line of each value

    @property
    def word_bytes(self) -> int:
        return math.gcd(*self.line_bytes, 16)

    def at(self, B: int) -> Steps:
        if not B * self.row_lines:
            return Steps(())
        words = [line // self.word_bytes for line in self.line_bytes]
        present = [value for value, count in enumerate(words) if count]
        starts = range(0, len(present), MAX_VALUES)
        return Steps(tuple(self._launch(B, words, present[i : i + MAX_VALUES]) for i in starts))

    def _launch(self, B: int, words: Sequence[int], values: Sequence[int]) -> KernelLaunch:
        begins = [0, *itertools.accumulate(words[value] for value in values)]
        count = B * self.row_lines * begins[-1]
        lines = Lines.of(
            x=[Input(self.operands[value]) for value in values],
            begin=[*begins, *[ABSENT] * (MAX_VALUES - len(values))], words=divider(begins[-1]),
        )  # fmt: skip
        sizes = Int64(count), Int64(sum(words)), Int64(sum(words[: values[0]]))
        program = Program(SOURCE, f"concat<{WORDS[self.word_bytes]}, {index_of(count)}>")
        config = grid_1d(-(-count // (THREADS * PER_THREAD)))
        return KernelLaunch(program, config, (lines, Output(0), *sizes), Budget(registers=64))


@dataclass(frozen=True)
class Value:
    """A value (outer, h, w, inner) and its pixels in y (outer, H, W, inner); all have the same inner."""

    operand: int  # input index
    row_outer: int  # per batch row
    hw: tuple[int, int]
    inner_bytes: int
    y_hw: tuple[int, int]
    stride: tuple[int, int]
    offset: tuple[int, int]

    @property
    def word_bytes(self) -> int:
        return math.gcd(self.inner_bytes, 16)

    def count(self, B: int) -> int:
        """Words of B batch rows."""
        return B * self.row_outer * math.prod(self.hw) * self.inner_bytes // self.word_bytes

    def packed(self, B: int) -> Struct:
        (h, w), (H, W), (step_h, step_w), (at_h, at_w) = self.hw, self.y_hw, self.stride, self.offset
        return ValueStruct.of(
            count=self.count(B), H=H, W=W, step_h=step_h, step_w=step_w, at_h=at_h, at_w=at_w,
            h=divider(h), w=divider(w), inner=divider(self.inner_bytes // self.word_bytes),
        )  # fmt: skip


@dataclass(frozen=True)
class InterleaveLowering:
    """interleave(values, y, blocks)"""

    values: tuple[Value, ...]
    units: int

    def at(self, B: int) -> Steps:
        present = [value for value in self.values if value.count(B)]
        return Steps(tuple(self._launch(present[i : i + MAX_VALUES], B) for i in range(0, len(present), MAX_VALUES)))

    def _launch(self, values: Sequence[Value], B: int) -> KernelLaunch:
        max_words = max(value.count(B) for value in values)
        blocks = min(-(-max_words // (THREADS * PER_THREAD)), -(-self.units * BLOCKS_PER_SM // len(values)))
        packed = Values.of(x=[Input(value.operand) for value in values], value=[value.packed(B) for value in values])
        program = Program(SOURCE, f"interleave<{WORDS[values[0].word_bytes]}, {index_of(max_words)}>")
        arguments = packed, Output(0), UInt32(blocks)
        return KernelLaunch(program, grid_1d(blocks * len(values)), arguments, Budget(registers=64))


class ConcatKernel(CudaKernel):
    name = "concat"
    layers = (Concat, Interleave)
    dtypes = DTYPE_BYTES

    def label(self, net: Network, node: Node) -> str:
        return f"{self.name}<{node.layer.kind},{len(node.inputs)}>"

    def cost(self, net: Network, node: Node) -> Cost:
        return Cost(0, 2 * net.types[node.name].row_bytes, launches=math.ceil(len(node.inputs) / MAX_VALUES))

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim]:
        node = net.nodes[start]
        why = f"{len(node.inputs)} values, up to {MAX_VALUES} per launch"
        for layout in (ROWS, CHANNELS_LAST) if _may_be_nhwc(net, node) else (ROWS,):
            yield self.claim(net, node, _lowering(net, node, layout, device), layout, why=why)


def _may_be_nhwc(net: Network, node: Node) -> bool:
    """Whether all values may be NHWC: network inputs and outputs stay row-major."""
    ends = net.inputs.keys() & set(node.inputs) or not net.readers(node.name)
    return not ends and all(has_channels(net.types[value]) for value in (*node.inputs, node.name))


def _lowering(net: Network, node: Node, layout: str, device: Device) -> ConcatLowering | InterleaveLowering:
    layer, y = node.layer, net.types[node.name]
    operands = list(dict.fromkeys(node.inputs))
    indices, item_bytes = tuple(map(operands.index, node.inputs)), DTYPE_BYTES[y.dtype]
    is_nhwc = layout == CHANNELS_LAST
    *shapes, to = (stored_type(net.types[value], layout).row_shape for value in (*node.inputs, node.name))
    if isinstance(layer, Concat):
        axis = row_axis(layer.axis, y) - 1
        axis = (axis or len(to)) - 1 if is_nhwc else axis
        # A value is contiguous from the axis on.
        return ConcatLowering(math.prod(to[:axis]), indices, tuple(item_bytes * math.prod(x[axis:]) for x in shapes))
    assert isinstance(layer, Interleave)
    values = []
    for x, operand, phase in zip(shapes, indices, layer.phases(), strict=True):
        outer, inner = (1, item_bytes * x[-1]) if is_nhwc else (x[0], item_bytes)
        hw, y_hw = (_pair(shape[:-1] if is_nhwc else shape[1:]) for shape in (x, to))
        values.append(Value(operand, outer, hw, inner, y_hw, _pair(layer.stride), _pair(phase, 0)))
    return InterleaveLowering(tuple(values), device.units)


def _pair(sizes: tuple[int, ...], first: int = 1) -> tuple[int, int]:
    """The sizes of both axes; `first` where there is only one."""
    return (sizes[0], sizes[1]) if len(sizes) == 2 else (first, sizes[0])


def _concat(name: str, *line_bytes: int) -> Instance:
    lowering = ConcatLowering(100, tuple(range(len(line_bytes))), line_bytes)
    return instance(f"concat, {name}", lowering, B=64)


def _interleave(name: str, inner_bytes: int) -> Instance:
    value = Value(0, 8, (3, 5), inner_bytes, (6, 10), (2, 2), (1, 0))
    return instance(name, InterleaveLowering((value,) * 4, 132), B=64)


INSTANCES = (
    _interleave("floats", 4), _interleave("bytes", 3), _interleave("halves", 2), _interleave("doubles", 8),
    _interleave("16 bytes", 16), _concat("16 bytes", 32, 64), _concat("halves", 6, 8),
)  # fmt: skip
