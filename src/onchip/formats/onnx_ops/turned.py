"""Values whose batch does not stand in front for a while, as ONNX's recurrent operators want them: steps first.

Nothing is moved by a Transpose that takes the batch from the front, nor by what follows, until another one brings it
back or an operator takes the steps from there: what is left to do then is often nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from onchip.errors import FormatError
from onchip.formats.onnx_ops.base import Op
from onchip.formats.onnx_ops.graph_reader import GraphReader, Unfinished
from onchip.spec.layers import Concat, Permute, Reshape
from onchip.spec.layers.recurrent import Recurrent
from onchip.spec.reading import MAX_RANK, show
from onchip.spec.types import BATCH, Dim


@dataclass(frozen=True)
class Turned(Unfinished):
    """The value x, seen as `shape` with the batch in front, and then with its axes in the order `axes`."""

    shape: tuple[Dim, ...]
    axes: tuple[int, ...]
    parts: tuple[Turned, ...] = ()  # those that stand one after the other along the file's axis 0
    expected: ClassVar[str] = "a Transpose that puts the batch first again: h.transpose(0, 1) in torch"

    @property
    def file_shape(self) -> tuple[Dim, ...]:
        return tuple(self.shape[axis] for axis in self.axes)

    def finish(self, graph: GraphReader, op: Op | None) -> str | None:
        """The value itself, where the batch is in front."""
        return self.in_order(graph, op, self.axes) if self.axes[0] == 0 else None

    def in_order(self, graph: GraphReader, op: Op | None, axes: tuple[int, ...]) -> str:
        """The name of a value of these axes, the batch first."""
        x = self.x
        if graph.types[x].shape != self.shape:
            x = graph.add_step(op, Reshape(tuple(int(d) for d in self.shape[1:])), (x,))
        return x if axes == tuple(range(len(axes))) else graph.add_step(op, Permute(axes), (x,))


def reads_turned(graph: GraphReader, op: Op) -> bool:
    """Whether the node only says how a value is seen whose batch is not in front, or will not be; if so, it is done."""
    given = graph.unfinished.get(op.inputs[0]) if op.inputs else None
    if isinstance(given, Turned):
        if op.kind == "Shape" and not op.attributes:
            graph.add_constant(op, np.array(given.file_shape, object))
            return True
        made = _HANDLERS[op.kind](graph, op, given) if op.kind in _HANDLERS else None
    elif op.kind in ("Transpose", "Unsqueeze") and not graph.one_row and op.inputs and op.inputs[0] in graph.values:
        x = graph.value(op)
        shape = graph.types[x].shape
        made = _HANDLERS[op.kind](graph, op, Turned(x, shape, tuple(range(len(shape)))))
        if made is not None and made.axes[0] == 0:
            return False  # the batch stays where it is
    else:
        return False
    if made is not None:
        graph.begin(op, made)
    return made is not None


def _transpose(graph: GraphReader, op: Op, given: Turned) -> Turned:
    rank = len(given.axes)
    order = op.sizes("perm", list(range(rank))[::-1], rank)
    if sorted(order) != list(range(rank)):
        raise FormatError(f"{op}: bad order of axes", got=show(order), expected=f"each of 0 to {rank - 1}")
    return Turned(given.x, given.shape, tuple(given.axes[axis] for axis in order))


def _squeeze(graph: GraphReader, op: Op, given: Turned) -> Turned:
    axes, rank = graph.axes(op, since=13), len(given.axes)
    if axes is None or any(not -rank <= a < rank or given.file_shape[a] != 1 for a in axes):
        raise FormatError(f"{op}: only sizes of 1 can go", got=f"axes {axes} of {show(list(given.file_shape))}")
    return _without(given, {given.axes[a] for a in axes})


def _unsqueeze(graph: GraphReader, op: Op, given: Turned) -> Turned:
    new = graph.new_axes(op)
    rank = len(given.axes) + len(new)
    places = {axis % rank for axis in new if -rank <= axis < rank}
    if rank > MAX_RANK or len(places) < len(new):
        raise FormatError(f"{op}: bad axes", got=show(new), expected=f"different ones from {-rank} to {rank - 1}")
    added = iter(range(len(given.shape), rank))
    old = iter(given.axes)
    axes = tuple(next(added) if axis in places else next(old) for axis in range(rank))
    return _sorted(Turned(given.x, (*given.shape, *(1,) * len(new)), axes))


def _sorted(given: Turned) -> Turned:
    """The same with axes of size 1 where the file has them, between those that are there: nothing moves."""
    ones = {axis for axis, size in enumerate(given.shape) if size == 1}
    wide = iter(axis for axis in range(1, len(given.shape)) if axis not in ones)
    order = [0]
    for axis in given.axes:
        if axis:
            order.append(axis if axis in ones else next(wide))
    return Turned(given.x, tuple(given.shape[axis] for axis in order), tuple(order.index(axis) for axis in given.axes))


def _without(given: Turned, gone: set[int]) -> Turned:
    """The same without axes (of `shape`) that have a size of 1."""
    kept = [axis for axis in range(len(given.shape)) if axis not in gone]
    axes = tuple(kept.index(axis) for axis in given.axes if axis not in gone)
    return Turned(given.x, tuple(given.shape[axis] for axis in kept), axes)


def _reshape(graph: GraphReader, op: Op, given: Turned) -> Turned | None:
    """Sizes in front of the batch and behind it change, each by themselves."""
    before = given.file_shape
    wanted: list[Dim] = graph.constant_or_shape(op, 1).tolist()
    if not op.attribute("allowzero", 0):
        wanted = [before[axis] if d == 0 and axis < len(before) else d for axis, d in enumerate(wanted)]
    place = before.index(BATCH)
    if BATCH not in wanted and wanted.count(-1) == 1 and graph.batch is None:
        wanted[wanted.index(-1)] = BATCH  # the batch itself, if all others are there
    if BATCH not in wanted and graph.batch is not None and wanted.count(graph.batch) == 1:
        wanted[wanted.index(graph.batch)] = BATCH
    at = wanted.index(BATCH) if BATCH in wanted else -1
    sides = ((before[:place], wanted[:at]), (before[place + 1 :], wanted[at + 1 :]))
    made: list[list[int]] = []
    for old, new in sides:
        count, known = math.prod(int(d) for d in old), math.prod(int(d) for d in new if d != -1)
        sizes = [count // known if d == -1 and known else int(d) for d in new]
        if at < 0 or math.prod(sizes) != count or new.count(-1) > 1:
            got = f"{show(list(before))} to {show(wanted)}"
            raise FormatError(f"{op} would mix the rows of the batch", got=got, expected="the batch by itself")
        made.append(sizes)
    order = (0, *(axis for axis in given.axes if axis != 0))  # as the file has the numbers of a row
    x = given.x if order == tuple(range(len(order))) else given.in_order(graph, op, order)
    return _seen(x, made[0], made[1])


def _seen(x: str, front: list[int], behind: list[int]) -> Turned:
    """A value whose row has the sizes in front of the batch, then those behind it."""
    count = len(front)
    axes = (*range(1, 1 + count), 0, *range(1 + count, 1 + count + len(behind)))
    return Turned(x, (BATCH, *front, *behind), axes)


def _concat(graph: GraphReader, op: Op, given: Turned) -> Turned | None:
    """The last states of several layers, one after the other: of most, only one is read then."""
    found = [graph.unfinished.get(name) for name in op.inputs]
    parts = tuple(part for part in found if isinstance(part, Turned) and part.axes == given.axes)
    if len(parts) < len(found) or given.axes[0] == 0 or op.attribute("axis", 0) != 0:
        return None
    values = tuple(part.in_order(graph, op, tuple(range(len(part.axes)))) for part in parts)
    together = graph.add_step(op, Concat(given.axes[0]), values)
    return Turned(together, graph.types[together].shape, given.axes, parts)


def _gather(graph: GraphReader, op: Op, given: Turned) -> Turned | None:
    """One place along an axis: of one place, or the last step of a sequence that is walked forward, or any other."""
    if not graph.is_constant(op, 1) or graph.constant(op, 1).ndim:
        return None
    rank, place = len(given.axes), int(graph.constant(op, 1))
    axis = op.attribute("axis", 0)
    if not -rank <= axis < rank or given.file_shape[axis] == BATCH:
        return None
    size = int(given.file_shape[axis])
    if not -size <= place < size:
        raise FormatError(f"{op}: out of range", got=f"place {place}", expected=f"{-size} to {size - 1}")
    place, axis = place % size, axis % rank
    for part in given.parts if axis == 0 else ():
        if place < (count := int(part.file_shape[0])):
            return _chosen(graph, op, part, axis, place, count)
        place -= count
    return _chosen(graph, op, given, axis, place, size)


def _chosen(graph: GraphReader, op: Op, given: Turned, axis: int, place: int, size: int) -> Turned | None:
    """The same without the file's axis, of whose size one place is left."""
    along = given.axes[axis]
    if size == 1:
        return _without(given, {along})
    shape = list(given.shape)
    shape[along] = 1
    last = last_step(graph, op, given.x) if place == size - 1 and _is_step(graph, given, along) else None
    if last is not None:
        return _without(Turned(last, tuple(shape), given.axes), {along})
    if given.axes[0] == 0:
        return None  # a value, as all others
    x = graph.part_value(op, given.in_order(graph, op, tuple(range(len(given.axes)))))
    chosen = graph.part(op, "Gather", [x, graph.part_constant(op, np.array(place))], axis=along)
    value = graph.value(Op(op.kind, op.name, (chosen,), op.outputs, {}))
    return _without(Turned(value, tuple(shape), given.axes), {along})


def _is_step(graph: GraphReader, given: Turned, axis: int) -> bool:
    """Whether the axis is that of the steps of the recurrent layer that makes x (B, S, H)."""
    return axis == 1 and graph.types[given.x].shape[:2] == given.shape[:2]


def last_step(graph: GraphReader, op: Op, x: str) -> str | None:
    """What the last step alone of a recurrent layer makes that is walked forward; None if x is something else."""
    node = graph.nodes.get(x)
    if node is None or not isinstance(node.layer, Recurrent):
        return None
    if node.layer.direction != "forward" or node.layer.output != "sequence" or len(graph.types[x].shape) != 3:
        return None
    layer = type(node.layer)(**{**node.layer.attributes(), "output": "last"})
    return graph.add_step(op, layer, node.inputs, node.weights)


_HANDLERS: dict[str, Callable[[GraphReader, Op, Turned], Turned | None]] = {
    "Transpose": _transpose,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Reshape": _reshape,
    "Gather": _gather,
    "Concat": _concat,
    "Identity": lambda graph, op, given: given,
}
