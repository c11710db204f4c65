"""move: Permute, Concat, Interleave and layout conversions, as strided copies.

Idea      A launch copies boxes: all elements of one input, with a stride along every axis in x and in y. Adjacent axes
          that are contiguous in both are merged. The last two axes are a plane, copied line by line.
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
from onchip.kernels.cpu.kernel import CpuKernel
from onchip.kernels.cpu.threading.launches import CompiledLaunch, words
from onchip.kernels.cpu.threading.threads import run_tasks
from onchip.network.graph import Network, Node
from onchip.network.layers import Concat, Interleave, Layer, Permute
from onchip.network.recipe import Array
from onchip.network.types import DTYPE_BYTES
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Refusal, Use
from onchip.plan.layout import CHANNELS_LAST, ROWS, has_channels, stored_row_axis, stored_type

_TASK_WORDS = 1 << 12  # minimum of y per task
_MAX_OUTER = 6  # axes of a box before its plane

# Fields of a launch; a word is four bytes, or one. Then the fields of a box: its operand and the words of a row of it,
# its planes, its offsets in x and y, the lines and words per line of a plane with their strides in x and y, the number
# of outer axes, and per outer axis its size and strides.
_BOXES, _COUNT, _Y, _Y_ROW, _PLANES, _PER_TASK, _IS_BYTES, _WORDS = range(8)
_FROM, _X_ROW, _BOX_PLANES, _X_AT, _Y_AT, _LINES, _X_LINE, _Y_LINE, _N, _X_N, _Y_N, _AXES, _FIRST_AXIS = range(13)
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
def _planes(worker: int, task: int, launch: Array, operands: int, planes: int) -> None:
    """Copy some planes; they are numbered row by row of the batch, then box by box."""
    y, per_task = int_at(operands + launch[_Y] * 8), launch[_PER_TASK]
    for plane in range(task * per_task, min(planes, (task + 1) * per_task)):
        row, index = plane // launch[_PLANES], plane % launch[_PLANES]
        at = launch[_BOXES]
        while index >= int_at(at + _BOX_PLANES * 8):
            index -= int_at(at + _BOX_PLANES * 8)
            at += _BOX_WORDS * 8
        box = ints_at(at, _BOX_WORDS)
        x_at, y_at = row * box[_X_ROW] + box[_X_AT], row * launch[_Y_ROW] + box[_Y_AT]
        for axis in range(box[_AXES] - 1, -1, -1):
            first = _FIRST_AXIS + 3 * axis
            i = index % box[first]
            index //= box[first]
            x_at += i * box[first + 1]
            y_at += i * box[first + 2]
        x = int_at(operands + box[_FROM] * 8)
        for line in range(box[_LINES]):
            x_from, y_to = x_at + line * box[_X_LINE], y_at + line * box[_Y_LINE]
            if launch[_IS_BYTES]:
                _copy_line(bytes_at(x + x_from, ALL), bytes_at(y + y_to, ALL), box[_N], box[_X_N], box[_Y_N])
            else:
                _copy_line(floats_at(x + x_from * 4, ALL), floats_at(y + y_to * 4, ALL), box[_N], box[_X_N], box[_Y_N])


@linked(*(types.int64,) * 4)
def _run(facts: int, operands: int, B: int, threads: int) -> None:
    """The code of a CompiledLaunch."""
    launch = ints_at(facts, _WORDS)
    planes = B * launch[_PLANES]
    tasks = (planes + launch[_PER_TASK] - 1) // launch[_PER_TASK]
    run_tasks(_planes, (launch, operands, planes), tasks, max(1, min(threads, tasks // 2)))


@dataclass(frozen=True)
class Box:
    """A strided copy per row: the operand, the size of every axis, and its strides in x and y, all in elements."""

    operand: int
    x_row: int
    sizes: tuple[int, ...]
    x_steps: tuple[int, ...]
    y_steps: tuple[int, ...]
    x_at: int = 0
    y_at: int = 0

    def axes(self, each: int) -> list[tuple[int, int, int]]:
        """(size, x stride, y stride) per axis in words, `each` per element; axes of size 1 dropped, others merged."""
        axes = [*zip(self.sizes, self.x_steps, self.y_steps, strict=True)]
        merged: list[tuple[int, int, int]] = [] if each == 1 else [(each, 1, 1)]
        for size, x, y in reversed(axes):
            x, y = x * each, y * each
            if merged and merged[0][0] * merged[0][1] == x and merged[0][0] * merged[0][2] == y:
                merged[0] = (merged[0][0] * size, *merged[0][1:])
            elif size != 1:
                merged.insert(0, (size, x, y))
        return [*[(1, 0, 0)] * (2 - len(merged)), *merged]


@dataclass(frozen=True)
class Facts:
    boxes: tuple[Box, ...]
    operands: int  # inputs
    y_row: int
    nbytes: int  # of an element


class MoveKernel(CpuKernel):
    name = "move"
    layers = (Permute, Concat, Interleave)
    dtypes = DTYPE_BYTES  # a copy

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        node, y = net.nodes[start], net.types[net.nodes[start].name]
        for layout in (ROWS, CHANNELS_LAST) if _may_be_nhwc(net, node) else (ROWS,):
            boxes = _boxes(net, node, layout)
            if any(len(box.axes(2)) > 2 + _MAX_OUTER for box in boxes):
                yield Refusal(self.name, node.name, f"at most {2 + _MAX_OUTER} axes per row after merging")
                return
            facts = Facts(boxes, len(set(node.inputs)), y.row_size, DTYPE_BYTES[y.dtype])
            cost = CoreCost(0, 2 * y.row_bytes, row_cache_bytes=_cached(facts))
            yield self.claim(net, node, facts, layout, cost=cost)

    def conversion(self, net: Network, value: str, source: str, target: str, device: Device, job: Job) -> Claim:
        x, rank = stored_type(net.types[value], source), len(net.types[value].shape)
        permute = Permute((0, *range(2, rank), 1) if target == CHANNELS_LAST else (0, rank - 1, *range(1, rank - 1)))
        facts = Facts((_permuted(permute, x.row_shape),), 1, x.row_size, DTYPE_BYTES[x.dtype])
        return Claim(
            self.name, f"{self.name}<{target}>", (), CoreCost(0, 2 * x.row_bytes, row_cache_bytes=_cached(facts)),
            f"{value} is stored as {source}", facts=facts, reads={value: Use(source)}, writes={value: target},
        )  # fmt: skip

    def bind(self, claim: Claim, weights: dict[str, Array]) -> CompiledLaunch:
        facts = claim.facts
        assert isinstance(facts, Facts)
        return launch_boxes(facts)


def launch_boxes(facts: Facts) -> CompiledLaunch:
    word_bytes = 4 if facts.nbytes % 4 == 0 else 1
    each = facts.nbytes // word_bytes
    boxes = [box for box in facts.boxes if math.prod(box.sizes)]
    table = np.zeros((len(boxes), _BOX_WORDS), np.int64)
    for fields, box in zip(table, boxes, strict=True):
        *outer, (lines, x_line, y_line), (count, x_step, y_step) = box.axes(each)
        planes = math.prod(size for size, _, _ in outer)
        fields[:_FIRST_AXIS] = (
            box.operand, box.x_row * each, planes, box.x_at * each, box.y_at * each, lines, x_line, y_line, count,
            x_step, y_step, len(outer),
        )  # fmt: skip
        fields[_FIRST_AXIS : _FIRST_AXIS + 3 * len(outer)] = np.reshape(outer, -1)
    planes = int(table[:, _BOX_PLANES].sum())
    per_task = max(1, _TASK_WORDS * planes // max(1, facts.y_row * each))
    launch = words(table, len(boxes), facts.operands, facts.y_row * each, planes, per_task, int(word_bytes == 1))
    return CompiledLaunch(address_of(_run), lambda threads: (address(launch), (launch, table)))


def _cached(facts: Facts) -> int:
    """Strided elements take longer than contiguous lines."""
    is_strided = any(box.axes(1)[-1][1] != 1 for box in facts.boxes)
    return facts.y_row * facts.nbytes * (2 if is_strided else 1)


def _may_be_nhwc(net: Network, node: Node) -> bool:
    """Whether all its values may be NHWC: none is a network input or output, which are NCHW."""
    inside = not any(value in net.inputs for value in node.inputs) and bool(net.readers(node.name))
    is_joined = isinstance(node.layer, Concat) and len(net.types[node.name].shape) > 2
    return is_joined and inside and all(has_channels(net.types[value]) for value in (*node.inputs, node.name))


def _boxes(net: Network, node: Node, layout: str) -> tuple[Box, ...]:
    values, rows = (
        tuple(dict.fromkeys(node.inputs)),
        [stored_type(x, layout).row_shape for x in net.input_types(node)],
    )
    y, layer = stored_type(net.types[node.name], layout).row_shape, node.layer
    if isinstance(layer, Permute):
        return (_permuted(layer, rows[0]),)
    boxes, offset = [], 0
    operands = {value: i for i, value in enumerate(values)}
    phases = layer.phases() if isinstance(layer, Interleave) else []
    for i, (value, row) in enumerate(zip(node.inputs, rows, strict=True)):
        steps = _strides(y)
        if phases:
            y_at = sum(p * step for p, step in zip(phases[i], steps[1:], strict=True))
            strides = (1, *_layer_strides(layer))
            steps = tuple(step * stride for step, stride in zip(steps, strides, strict=True))
        else:
            axis = _axis(layer, len(net.types[value].shape), layout)
            y_at, offset = offset * steps[axis], offset + row[axis]
        boxes.append(Box(operands[value], math.prod(row), row, _strides(row), steps, y_at=y_at))
    return tuple(boxes)


def _permuted(layer: Permute, row: tuple[int, ...]) -> Box:
    """One box, its axes in the order of y."""
    order = [axis - 1 for axis in layer.axes[1:]]
    sizes, steps = tuple(row[axis] for axis in order), _strides(row)
    return Box(0, math.prod(row), sizes, tuple(steps[axis] for axis in order), _strides(sizes))


def _layer_strides(layer: Layer) -> tuple[int, ...]:
    assert isinstance(layer, Interleave)
    return layer.stride


def _axis(layer: Layer, rank: int, layout: str) -> int:
    assert isinstance(layer, Concat)
    return stored_row_axis(layer.axis % rank, rank, layout)


def _strides(row: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides, in elements."""
    return tuple(math.prod(row[axis + 1 :]) for axis in range(len(row)))
