"""Values whose batch axis is temporarily not first: steps first, as in ONNX's recurrent operators, or merged with
attention heads.

A Transpose that moves the batch, and the operators after it, move no data until another one restores the batch or an
operator needs the values. Often no permutation remains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from onchip.errors import FormatError
from onchip.formats.onnx.ops.base import Op
from onchip.formats.onnx.ops.graph_reader import GraphReader, Unfinished
from onchip.formats.onnx.ops.select import shape_part, slice_operands, split_ranges
from onchip.network.layers import Concat, Linear, Permute, Reshape, Slice
from onchip.network.layers.recurrent import Recurrent
from onchip.network.reading import MAX_RANK, show
from onchip.network.types import BATCH, Dim

Axis = tuple[int, ...]  # an axis of the file: the axes of `shape` merged into it, the last one fastest; () for size 1
ELEMENTWISE = ("Add", "Sub", "Mul", "Div", "Relu", "Sigmoid", "Tanh", "Gelu", "Cast")  # elementwise operators


@dataclass(frozen=True)
class AxisView(Unfinished):
    """The value x, viewed as `shape` (batch first, no other size of 1), then as the file's axes."""

    shape: tuple[Dim, ...]
    axes: tuple[Axis, ...]
    parts: tuple[AxisView, ...] = ()  # concatenated along the file's axis 0
    expected: ClassVar[str] = "a Transpose or Reshape that puts the batch first again: h.transpose(0, 1) in torch"

    @staticmethod
    def permuted(x: str, shape: Iterable[Dim], order: Iterable[int]) -> AxisView:
        """x viewed as `shape`, the batch first, with its axes permuted."""
        sizes = tuple(shape)
        stored = [axis for axis, size in enumerate(sizes) if axis == 0 or size != 1]
        axes = tuple((stored.index(axis),) if axis in stored else () for axis in order)
        return AxisView(x, tuple(sizes[axis] for axis in stored), axes)

    @property
    def file_shape(self) -> tuple[Dim, ...]:
        return tuple(batches(0 in axis, math.prod(int(self.shape[a]) for a in axis if a)) for axis in self.axes)

    def sizes(self, axis: Axis) -> tuple[Dim, ...]:
        """The sizes merged into an axis."""
        return tuple(self.shape[a] for a in axis)

    @property
    def x_order(self) -> tuple[Axis, ...]:
        """All axes in the order of x."""
        return tuple((axis,) for axis in range(len(self.shape)))

    def finish(self, graph: GraphReader, op: Op | None) -> str | None:
        """The value itself, if the batch is first."""
        return self.in_order(graph, op, self.axes) if self.axes[0] == (0,) else None

    def in_order(self, graph: GraphReader, op: Op | None, axes: tuple[Axis, ...]) -> str:
        """The name of a value with these axes, the batch first."""
        x, order = self.x, tuple(a for axis in axes for a in axis)
        if order != tuple(range(len(order))):
            x = graph.add_step(op, Permute(order), (self.in_order(graph, op, self.x_order),))
        sizes = tuple(math.prod(int(self.shape[a]) for a in axis) for axis in axes[1:])
        return x if graph.types[x].row_shape == sizes else graph.add_step(op, Reshape(sizes), (x,))


def batches(has_batch: bool, count: int) -> Dim:
    """A size: a count, or a count per row of the batch."""
    return count if not has_batch else BATCH if count == 1 else f"{BATCH}*{count}"


def counted(size: Dim) -> tuple[bool, int]:
    """The inverse of `batches`."""
    if not isinstance(size, str):
        return False, int(size)
    return True, int(size.removeprefix(BATCH).removeprefix("*") or 1)


def reads_permuted(graph: GraphReader, op: Op) -> bool:
    """Handle a node whose input or output does not have the batch first; return whether it was handled."""
    if graph.one_row or not op.inputs:
        return False
    found = (graph.unfinished.get(name) for name in (op.inputs if op.kind in ELEMENTWISE else op.inputs[:1]))
    view = next((value for value in found if isinstance(value, AxisView)), None)
    if view is None:
        if op.kind not in ("Transpose", "Unsqueeze", "Reshape") or op.inputs[0] not in graph.values:
            return False
        shape = graph.types[graph.value(op)].shape
        if op.kind == "Reshape" and not _moves_batch(graph, op):
            return False
        result = HANDLERS[op.kind](graph, op, AxisView.permuted(graph.value(op), shape, range(len(shape))))
        if result is not None and result.axes[0] == (0,):
            return False  # the batch stays first
    elif op.kind == "Shape":
        graph.add_constant(op, np.array(shape_part(op, view.file_shape), object))
        return True
    elif op.kind not in HANDLERS or (view.axes[0] == (0,) and op.kind in (*ELEMENTWISE, "Gemm", "MatMul")):
        return False
    else:
        result = HANDLERS[op.kind](graph, op, view)
    if result is not None:
        graph.begin(op, result)
    return result is not None


def _moves_batch(graph: GraphReader, op: Op) -> bool:
    """Whether a Reshape merges the batch with another axis, explicitly or by the size of its first axis."""
    if not graph.is_constant(op, 1):
        return False
    wanted = graph.constant_or_shape(op, 1).ravel().tolist()
    if wanted[:1] == [-1] and all(isinstance(size, int) and size > 0 for size in wanted[1:]):
        count, rest = graph.types[graph.value(op)].row_size, math.prod(wanted[1:])
        return bool(count != rest and count % rest == 0)
    if graph.batch and len(wanted) > 1 and isinstance(wanted[0], int) and wanted[0] > graph.batch:
        return wanted[0] % graph.batch == 0
    return any(isinstance(size, str) and size != BATCH for size in wanted)


def _transpose(graph: GraphReader, op: Op, view: AxisView) -> AxisView | None:
    rank = len(view.axes)
    order = op.sizes("perm", list(range(rank))[::-1], rank)
    if sorted(order) != list(range(rank)):
        return None
    return AxisView(view.x, view.shape, tuple(view.axes[axis] for axis in order))


def _squeeze(graph: GraphReader, op: Op, view: AxisView) -> AxisView:
    axes, rank = graph.axes(op, since=13), len(view.axes)
    if axes is None or any(not -rank <= a < rank or view.axes[a] for a in axes):
        raise FormatError(
            f"{op}: can only squeeze 1", got=f"axes {axes} of {show(list(view.file_shape))}", expected="axes of 1"
        )
    gone = {a % rank for a in axes}
    return AxisView(view.x, view.shape, tuple(axis for a, axis in enumerate(view.axes) if a not in gone))


def _unsqueeze(graph: GraphReader, op: Op, view: AxisView) -> AxisView:
    new = graph.new_axes(op)
    rank = len(view.axes) + len(new)
    added = {axis % rank for axis in new if -rank <= axis < rank}
    if rank > MAX_RANK or len(added) < len(new):
        raise FormatError(f"{op}: bad axes", got=show(new), expected=f"different ones from {-rank} to {rank - 1}")
    old = iter(view.axes)
    return AxisView(view.x, view.shape, tuple(() if axis in added else next(old) for axis in range(rank)))


def _reshape(graph: GraphReader, op: Op, view: AxisView) -> AxisView:
    """The same elements in the same order: axes are merged and split."""
    before = view.file_shape
    wanted: list[Dim] = graph.constant_or_shape(op, 1).ravel().tolist()
    if not op.attribute("allowzero", 0):
        wanted = [before[axis] if d == 0 and axis < len(before) else d for axis, d in enumerate(wanted)]
    if len(wanted) > MAX_RANK:
        raise FormatError(f"{op}: too many axes", got=str(len(wanted)), expected=f"at most {MAX_RANK}")
    fixed = [] if graph.batch is None or any(isinstance(d, str) for d in wanted) else _of_batch(wanted, graph.batch)
    candidates = [candidate for sizes in (*fixed, wanted) if (candidate := _split_up(view, sizes)) is not None]
    if not candidates:
        got = f"{show(list(before))} to {show(wanted)}"
        raise FormatError(f"{op} would mix the rows of the batch", got=got, expected="a separate batch")
    return max(candidates, key=lambda candidate: _likelihood(view, candidate))


def _likelihood(view: AxisView, result: AxisView) -> tuple[bool, bool, int]:
    """Rank candidates: a batch of 1 may be at several positions, each correct for one row. Prefer a batch that is a
    separate axis, is not part of the last axis (along which gemms reduce), and retains previous axes.
    """
    old = {*map(view.sizes, view.axes)}
    return (0,) in result.axes, 0 not in result.axes[-1], len({*map(result.sizes, result.axes)} & old)


def _of_batch(wanted: list[Dim], batch: int) -> list[list[Dim]]:
    """Candidates for sizes of a file with a fixed batch, with the batch factored out of one size each."""
    candidates = [axis for axis, d in enumerate(wanted) if int(d) > 0 and int(d) % batch == 0]
    return [[*wanted[:axis], batches(True, int(wanted[axis]) // batch), *wanted[axis + 1 :]] for axis in candidates]


def _split_up(view: AxisView, wanted: list[Dim]) -> AxisView | None:
    """The same elements as axes of these sizes; None if the batch would not stay separate."""
    has_batch = any(isinstance(d, str) for d in wanted)
    count = math.prod(int(d) for d in view.shape[1:])
    known = math.prod(counted(d)[1] for d in wanted if d != -1)
    wanted = [batches(not has_batch, count // max(known, 1)) if d == -1 else d for d in wanted]
    # By axis of x: axis 3 splits into (3, 0) and (3, 1). `left` is in the file's element order.
    factors: dict[Axis, Dim] = {(a,): size for a, size in enumerate(view.shape)}
    left: list[Axis] = [(a,) for axis in view.axes for a in axis]
    result = [_taken(left, factors, *counted(size)) for size in wanted]
    if left or not count or None in result:
        return None
    order = sorted(factors)
    axes = tuple(tuple(order.index(factor) for factor in axis or ()) for axis in result)
    return AxisView(view.x, tuple(factors[factor] for factor in order), axes)


def _taken(left: list[Axis], factors: dict[Axis, Dim], has_batch: bool, count: int) -> tuple[Axis, ...] | None:
    """Take the first remaining factors whose product is this size, with or without the batch; None if none do."""
    taken: list[Axis] = []
    while left and (has_batch or count > 1):
        factor = left.pop(0)
        size = factors[factor]
        if isinstance(size, str):
            if not has_batch:
                return None
            has_batch = False
        elif count % size == 0:
            count //= size
        elif size % count == 0 and count > 1:
            first, rest = (*factor, 0), (*factor, 1)
            del factors[factor]
            factors[first], factors[rest] = count, size // count
            left.insert(0, rest)
            factor, count = first, 1
        else:
            return None
        taken.append(factor)
    return None if has_batch or count != 1 else tuple(taken)


def _concat(graph: GraphReader, op: Op, view: AxisView) -> AxisView | None:
    """Concatenate the last states of several layers; usually only one of them is read later."""
    found = [graph.unfinished.get(name) for name in op.inputs]
    parts = tuple(part for part in found if isinstance(part, AxisView) and len(part.axes) == len(view.axes))
    positions = {part.axes.index((0,)) for part in parts if (0,) in part.axes}
    if len(parts) < len(found) or len(positions) != 1 or op.attribute("axis", 0) != 0 or positions == {0}:
        return None
    values = tuple(part.in_order(graph, op, ((0,), *(axis for axis in part.axes if axis != (0,)))) for part in parts)
    joined = graph.add_step(op, Concat(1), values)
    order = list(range(1, len(view.axes)))
    order.insert(positions.pop(), 0)
    result = AxisView.permuted(joined, graph.types[joined].shape, order)
    return AxisView(result.x, result.shape, result.axes, parts)


def _gather(graph: GraphReader, op: Op, view: AxisView) -> AxisView | None:
    """One index along an axis: an axis of size 1, the last step of a forward sequence, or any other."""
    if not graph.is_constant(op, 1) or graph.constant(op, 1).ndim:
        return None
    rank, index, axis = len(view.axes), int(graph.constant(op, 1)), op.attribute("axis", 0)
    if not -rank <= axis < rank or len(view.axes[axis]) > 1 or view.axes[axis] == (0,):
        return None
    axis %= rank
    size = int(view.file_shape[axis])
    if not -size <= index < size:
        raise FormatError(f"{op}: out of range", got=f"index {index}", expected=f"{-size} to {size - 1}")
    index %= size
    for part in view.parts if axis == 0 else ():
        if index < (count := int(part.file_shape[0])):
            return _select_index(graph, op, part, axis, index)
        index -= count
    return _select_index(graph, op, view, axis, index)


def _select_index(graph: GraphReader, op: Op, view: AxisView, axis: int, index: int) -> AxisView | None:
    """Select one index of the file's axis, which disappears."""
    others = tuple(each for a, each in enumerate(view.axes) if a != axis)
    if not view.axes[axis]:
        return AxisView(view.x, view.shape, others)
    (source,) = view.axes[axis]
    is_step = source == 1 and graph.types[view.x].shape[:2] == view.shape[:2]
    selected = last_step(graph, op, view.x) if is_step and index == int(view.shape[1]) - 1 else None
    if selected is None:
        if view.axes[0] == (0,):
            return None  # an ordinary value
        x = graph.part_value(op, view.in_order(graph, op, view.x_order))
        name = graph.part(op, "Gather", [x, graph.part_constant(op, np.array(index))], axis=source)
        selected = graph.value(Op(op.kind, op.name, (name,), op.outputs, {}))
    left = tuple(tuple(a - (a > source) for a in each) for each in others)
    return AxisView(selected, (*view.shape[:source], *view.shape[source + 1 :]), left)


def _split(graph: GraphReader, op: Op, view: AxisView) -> AxisView | None:
    """A Slice per output along one axis, as in q, k, v = qkv.permute(2, 0, 3, 1, 4)."""
    rank, axis = len(view.axes), op.attribute("axis", 0)
    if not -rank <= axis < rank or len(view.axes[axis]) != 1 or view.axes[axis] == (0,) or view.axes[0] == (0,):
        return None
    (source,) = view.axes[axis]
    result = [_ranged(graph, op, view, source, indices) for indices in split_ranges(graph, op, int(view.shape[source]))]
    for output, other in enumerate(result[1:], start=1):
        graph.begin(op, other, output)
    return result[0]


def _slice(graph: GraphReader, op: Op, view: AxisView) -> AxisView | None:
    """Slice along one axis with step 1, as in q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)."""
    starts, ends, axes, steps = slice_operands(graph, op)
    rank = len(view.axes)
    if len(axes) != 1 or steps != [1] or not -rank <= axes[0] < rank or view.axes[0] == (0,):
        return None
    if len(view.axes[axes[0]]) != 1 or view.axes[axes[0]] == (0,):
        return None
    (source,) = view.axes[axes[0]]
    indices = range(int(view.shape[source]))[starts[0] : ends[0]]
    return _ranged(graph, op, view, source, indices) if indices else None


def _ranged(graph: GraphReader, op: Op, view: AxisView, source: int, indices: range) -> AxisView:
    """Restrict an axis of `shape` to a contiguous range."""
    ranges = [range(int(d)) for d in view.shape[1:]]
    ranges[source - 1] = indices
    layer = Slice(tuple(r.start for r in ranges), tuple(map(len, ranges)), (1,) * len(ranges))
    part = graph.add_step(op, layer, (view.in_order(graph, op, view.x_order),))
    shape, axes = list(view.shape), view.axes
    shape[source] = len(indices)
    if len(indices) == 1:
        del shape[source]
        axes = tuple(tuple(a - (a > source) for a in each if a != source) for each in axes)
    return AxisView(part, tuple(shape), axes)


def last_step(graph: GraphReader, op: Op, x: str) -> str | None:
    """The last step's output of a forward recurrent layer; None if x is something else."""
    node = graph.nodes.get(x)
    if node is None or not isinstance(node.layer, Recurrent):
        return None
    if node.layer.direction != "forward" or node.layer.output != "sequence" or len(graph.types[x].shape) != 3:
        return None
    layer = type(node.layer)(**{**node.layer.attributes(), "output": "last"})
    return graph.add_step(op, layer, node.inputs, node.weights)


def ends_last(view: AxisView) -> tuple[tuple[Axis, ...], AxisView]:
    """An axis order with the file's last axis last and merged; and the resulting view, without x."""
    *leading, last = view.axes
    order = [a for axis in view.x_order for a in axis if a not in last]
    sizes = (*(view.shape[a] for a in order), math.prod(int(view.shape[a]) for a in last))
    axes = (*(tuple(order.index(a) for a in axis) for axis in leading), (len(order),))
    return (*((a,) for a in order), last), AxisView("", sizes, axes)


def gemm(graph: GraphReader, op: Op, view: AxisView) -> AxisView | None:
    """Gemm with a constant matrix along the file's last axis."""
    if not graph.is_constant(op, 1) or graph.constant(op, 1).ndim != 2 or 0 in view.axes[-1] or not view.axes[-1]:
        return None
    if op.attribute("transA", 0) or any(op.attribute(name, 1.0) != 1 for name in ("alpha", "beta")):
        return None
    order, seen = ends_last(view)
    x = view.in_order(graph, op, order)
    matrix = graph.weight_constant(op, 1, x)
    roles = {"weight": graph.weight(op.inputs[1], matrix if op.attribute("transB", 0) else matrix.T)}
    if graph.has(op, 2):
        if not graph.is_constant(op, 2) or graph.constant(op, 2).ndim != 1:
            return None
        roles["bias"] = graph.weight(op.inputs[2], graph.weight_constant(op, 2, x))
    result = graph.add_step(op, Linear(), (x,), roles)
    return AxisView(result, (*seen.shape[:-1], graph.types[result].row_shape[-1]), seen.axes)


def elementwise(graph: GraphReader, op: Op, view: AxisView) -> AxisView | None:
    """Elementwise, with another value of the same view, or with constants along the last axis."""
    if 0 in view.axes[-1] or not view.axes[-1]:
        return None
    order, seen = ends_last(view)
    inputs = []
    for index, name in enumerate(op.inputs):
        other = graph.unfinished.get(name)
        if isinstance(other, AxisView) and (other.shape, other.axes) == (view.shape, view.axes):
            inputs.append(graph.part_value(op, other.in_order(graph, op, order)))
        elif graph.is_constant(op, index) and all(size == 1 for size in graph.constant(op, index).shape[:-1]):
            inputs.append(name)
        else:
            return None
    name = graph.part(op, op.kind, inputs, **op.attributes)
    return AxisView(graph.value(Op(op.kind, op.name, (name,), op.outputs, {})), seen.shape, seen.axes)


HANDLERS: dict[str, Callable[[GraphReader, Op, AxisView], AxisView | None]] = {
    "Transpose": _transpose,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Reshape": _reshape,
    "Gather": _gather,
    "Slice": _slice,
    "Split": _split,
    "Concat": _concat,
    "Gemm": gemm,
    "MatMul": gemm,
    "Identity": lambda graph, op, view: view,
    **dict.fromkeys(ELEMENTWISE, elementwise),
}
