"""move: Permute, Concat, Interleave and values to another layout: numbers that only go to other places.

Idea      A launch is some boxes: all numbers of a value, or of one of several, with a step along every axis in x and in
          y. Axes that follow each other in both are one; the last two are a plane, which is copied line by line.
Floor     Memory: x in, y out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from onchip.kernels.cpu.compiler.jit import (
    ALL,
    address,
    address_of,
    bytes_at,
    compiled,
    floats_at,
    int_at,
    ints_at,
    linked,
)
from onchip.kernels.cpu.compiler.late_numba import types
from onchip.kernels.cpu.cost import CoreCost
from onchip.kernels.cpu.threading.launches import CompiledLaunch, words
from onchip.kernels.cpu.threading.threads import run_tasks
from onchip.network.graph import Network, Node
from onchip.network.layers import Concat, Interleave, Layer, Permute
from onchip.network.recipe import Array
from onchip.network.types import DTYPE_BYTES
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Refusal, Use
from onchip.plan.layout import CHANNELS_LAST, ROWS, has_channels, stored_row_axis, stored_type

_TASK_WORDS = 1 << 12  # of y that a thread takes at a time, at least
_MAX_OUTER = 6  # axes of a box in front of its plane

# What `_run` is told of a launch once; a word is four bytes, or one. Then of each box: the operand that it is copied
# from and the words of its row, its planes, where it begins in x and y, lines and numbers of a plane with their steps
# in x and in y, how many axes are in front, and the size of each with its steps.
_BOXES, _COUNT, _Y, _Y_ROW, _PLANES, _TOGETHER, _IS_BYTES, _WORDS = range(8)
_FROM, _X_ROW, _OWN, _X_AT, _Y_AT, _LINES, _X_LINE, _Y_LINE, _N, _X_N, _Y_N, _AXES, _FIRST_AXIS = range(13)
_BOX_WORDS = _FIRST_AXIS + 3 * _MAX_OUTER


@compiled(inline=True)
def _copy_line(x: Array, y: Array, count: int, x_step: int, y_step: int) -> None:
    if x_step == 1 and y_step == 1:
        for n in range(count):
            y[n] = x[n]
    elif y_step == 1:
        for n in range(count):
            y[n] = x[n * x_step]
    else:
        for n in range(count):
            y[n * y_step] = x[n * x_step]


@compiled()
def _planes(worker: int, piece: int, launch: Array, operands: int, planes: int) -> None:
    """Some planes: those of the first row of the batch, box by box, then those of the next row."""
    y, together = int_at(operands + launch[_Y] * 8), launch[_TOGETHER]
    for plane in range(piece * together, min(planes, (piece + 1) * together)):
        row, number = plane // launch[_PLANES], plane % launch[_PLANES]
        at = launch[_BOXES]
        while number >= int_at(at + _OWN * 8):
            number -= int_at(at + _OWN * 8)
            at += _BOX_WORDS * 8
        box = ints_at(at, _BOX_WORDS)
        x_at, y_at = row * box[_X_ROW] + box[_X_AT], row * launch[_Y_ROW] + box[_Y_AT]
        for axis in range(box[_AXES] - 1, -1, -1):
            first = _FIRST_AXIS + 3 * axis
            i = number % box[first]
            number //= box[first]
            x_at += i * box[first + 1]
            y_at += i * box[first + 2]
        x = int_at(operands + box[_FROM] * 8)
        for line in range(box[_LINES]):
            here, there = x_at + line * box[_X_LINE], y_at + line * box[_Y_LINE]
            if launch[_IS_BYTES]:
                _copy_line(bytes_at(x + here, ALL), bytes_at(y + there, ALL), box[_N], box[_X_N], box[_Y_N])
            else:
                _copy_line(floats_at(x + here * 4, ALL), floats_at(y + there * 4, ALL), box[_N], box[_X_N], box[_Y_N])


@linked(*(types.int64,) * 4)
def _run(facts: int, operands: int, B: int, threads: int) -> None:
    """The code of a CompiledLaunch."""
    launch = ints_at(facts, _WORDS)
    planes = B * launch[_PLANES]
    pieces = (planes + launch[_TOGETHER] - 1) // launch[_TOGETHER]
    run_tasks(_planes, (launch, operands, planes), pieces, max(1, min(threads, pieces // 2)))


@dataclass(frozen=True)
class Box:
    """Of a row: the operand that is copied, the size of every axis, steps along them in x and in y; in numbers."""

    operand: int
    x_row: int
    sizes: tuple[int, ...]
    x_steps: tuple[int, ...]
    y_steps: tuple[int, ...]
    x_at: int = 0
    y_at: int = 0

    def axes(self, each: int) -> list[tuple[int, int, int]]:
        """Size and steps in words, `each` to a number; axes of one are left out, and neighbours that are one joined."""
        whole = [*zip(self.sizes, self.x_steps, self.y_steps, strict=True)]
        found: list[tuple[int, int, int]] = [] if each == 1 else [(each, 1, 1)]
        for size, x, y in reversed(whole):
            x, y = x * each, y * each
            if found and found[0][0] * found[0][1] == x and found[0][0] * found[0][2] == y:
                found[0] = (found[0][0] * size, *found[0][1:])
            elif size != 1:
                found.insert(0, (size, x, y))
        return [*[(1, 0, 0)] * (2 - len(found)), *found]


@dataclass(frozen=True)
class Facts:
    boxes: tuple[Box, ...]
    operands: int  # inputs
    y_row: int
    nbytes: int  # of a number


class Move:
    name = "move"
    device_kind = "cpu"
    precisions = ("fp32",)  # numbers are only moved

    def claims(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        node = net.nodes[start]
        if job.is_training or not isinstance(node.layer, Permute | Concat | Interleave):
            return
        values = tuple(dict.fromkeys(node.inputs))
        moved = net.types[node.name].row_bytes
        for layout in (ROWS, CHANNELS_LAST) if _may_be_nhwc(net, node) else (ROWS,):
            is_last = layout == CHANNELS_LAST
            boxes = _boxes(net, node, layout)
            if any(len(box.axes(2)) > 2 + _MAX_OUTER for box in boxes):
                yield Refusal(self.name, node.name, f"walks over at most {2 + _MAX_OUTER} axes of a row")
                return
            facts = Facts(boxes, len(values), net.types[node.name].row_size, DTYPE_BYTES[net.types[node.name].dtype])
            yield Claim(
                self.name, f"{self.name}<{node.layer.kind}>", (node.name,),
                CoreCost(0, 2 * moved, row_cache_bytes=_cached(facts)), "one layer by itself", facts=facts,
                reads=dict.fromkeys(values, Use(layout)) if is_last else {},
                writes={node.name: layout} if is_last else {},
            )  # fmt: skip

    def conversion(self, net: Network, value: str, given: str, wanted: str, device: Device, job: Job) -> Claim:
        there, rank = stored_type(net.types[value], given), len(net.types[value].shape)
        turn = Permute((0, *range(2, rank), 1) if wanted == CHANNELS_LAST else (0, rank - 1, *range(1, rank - 1)))
        facts = Facts((_turned(turn, there.row_shape),), 1, there.row_size, DTYPE_BYTES[there.dtype])
        return Claim(
            self.name, f"{self.name}<{wanted}>", (), CoreCost(0, 2 * there.row_bytes, row_cache_bytes=_cached(facts)),
            f"{value} lies in {given}", facts=facts, reads={value: Use(given)}, writes={value: wanted},
        )  # fmt: skip

    def bind(self, claim: Claim, weights: dict[str, Array]) -> CompiledLaunch:
        facts = claim.facts
        assert isinstance(facts, Facts)
        return launch_boxes(facts)


def launch_boxes(facts: Facts) -> CompiledLaunch:
    word = 4 if facts.nbytes % 4 == 0 else 1
    each = facts.nbytes // word
    boxes = [box for box in facts.boxes if math.prod(box.sizes)]
    table = np.zeros((len(boxes), _BOX_WORDS), np.int64)
    for told, box in zip(table, boxes, strict=True):
        *outer, (lines, x_line, y_line), (count, x_step, y_step) = box.axes(each)
        planes = math.prod(size for size, _, _ in outer)
        told[:_FIRST_AXIS] = (
            box.operand, box.x_row * each, planes, box.x_at * each, box.y_at * each, lines, x_line, y_line, count,
            x_step, y_step, len(outer),
        )  # fmt: skip
        told[_FIRST_AXIS : _FIRST_AXIS + 3 * len(outer)] = np.reshape(outer, -1)
    planes = int(table[:, _OWN].sum())
    together = max(1, _TASK_WORDS * planes // max(1, facts.y_row * each))
    launch = words(table, len(boxes), facts.operands, facts.y_row * each, planes, together, int(word == 1))
    return CompiledLaunch(address_of(_run), lambda threads: (address(launch), (launch, table)))


def _cached(facts: Facts) -> int:
    """Numbers that are copied one by one, not in lines, take longer."""
    is_turned = any(box.axes(1)[-1][1] != 1 for box in facts.boxes)
    return facts.y_row * facts.nbytes * (2 if is_turned else 1)


def _may_be_nhwc(net: Network, node: Node) -> bool:
    """Whether its values may all lie with channels last: none of them is at the network's own ends."""
    inside = not any(value in net.inputs for value in node.inputs) and bool(net.readers(node.name))
    is_joined = isinstance(node.layer, Concat) and len(net.types[node.name].shape) > 2
    return is_joined and inside and all(has_channels(net.types[value]) for value in (*node.inputs, node.name))


def _boxes(net: Network, node: Node, layout: str) -> tuple[Box, ...]:
    values, rows = (
        tuple(dict.fromkeys(node.inputs)),
        [stored_type(given, layout).row_shape for given in net.input_types(node)],
    )
    y, layer = stored_type(net.types[node.name], layout).row_shape, node.layer
    if isinstance(layer, Permute):
        return (_turned(layer, rows[0]),)
    boxes, along = [], 0
    numbers = {value: i for i, value in enumerate(values)}
    phases = layer.phases() if isinstance(layer, Interleave) else []
    for i, (value, row) in enumerate(zip(node.inputs, rows, strict=True)):
        steps = _steps(y)
        if phases:
            at = sum(p * step for p, step in zip(phases[i], steps[1:], strict=True))
            strides = (1, *_strides(layer))
            steps = tuple(step * stride for step, stride in zip(steps, strides, strict=True))
        else:
            axis = _axis(layer, len(net.types[value].shape), layout)
            at, along = along * steps[axis], along + row[axis]
        boxes.append(Box(numbers[value], math.prod(row), row, _steps(row), steps, y_at=at))
    return tuple(boxes)


def _turned(layer: Permute, row: tuple[int, ...]) -> Box:
    """One box, its axes as they are in y."""
    order = [axis - 1 for axis in layer.axes[1:]]
    sizes, steps = tuple(row[axis] for axis in order), _steps(row)
    return Box(0, math.prod(row), sizes, tuple(steps[axis] for axis in order), _steps(sizes))


def _strides(layer: Layer) -> tuple[int, ...]:
    assert isinstance(layer, Interleave)
    return layer.stride


def _axis(layer: Layer, rank: int, layout: str) -> int:
    assert isinstance(layer, Concat)
    return stored_row_axis(layer.axis % rank, rank, layout)


def _steps(row: Sequence[int]) -> tuple[int, ...]:
    """From number to number along each axis."""
    return tuple(math.prod(row[axis + 1 :]) for axis in range(len(row)))
