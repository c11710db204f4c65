"""GatherElements: one index per row, such as the last step of a sequence or the value of an action.

    x[arange(B), ids] = Gather(Flatten(x, axis 2), Range(0, B) * T + ids)

is an equivalent form for x (B, T, ..): exporters index through all rows of the batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from onchip.errors import FormatError
from onchip.formats.onnx.ops.base import Op, reads
from onchip.formats.onnx.ops.graph_reader import GraphReader, Unfinished
from onchip.formats.onnx.ops.select import row_axis_of, shape_part
from onchip.network.layers import Embedding, GlobalSum, Mask, Permute, Reshape, Tile
from onchip.network.types import BATCH, numpy_dtype

_MAX_SIZE = 1 << 10  # to select from: the table is its square


@reads("GatherElements")
def read_gather_elements(graph: GraphReader, op: Op) -> None:
    """y[.., k, ..] = x[.., ids[.., k, ..], ..]: a masked sum over all positions: the ids select one, and NaN at
    the others has no effect.
    """
    x, ids = graph.value(op), graph.value(op, 1)
    at = row_axis_of(graph, op, x, op.attribute("axis", 0))
    row, wanted = list(graph.types[x].row_shape), list(graph.types[ids].row_shape)
    if [*wanted[:at], row[at], *wanted[at + 1 :]] != row or not 0 < row[at] <= _MAX_SIZE:
        got, expected = f"{graph.types[x]} by {graph.types[ids]}", f"ids of its shape, up to {_MAX_SIZE:,} on the axis"
        raise FormatError(f"{op}: shapes do not fit", got=got, expected=expected)
    node = graph.nodes.get(ids)
    if node is not None and isinstance(node.layer, Tile) and node.layer.repeats[at] == 1:
        (ids,) = node.inputs  # constant along the other axes
    graph.bind_output(op, 0, _select(graph, op, x, ids, at))


def _select(graph: GraphReader, op: Op, x: str, ids: str, at: int) -> str:
    """x (.., n, ..) by ids (.., k, ..), which have size 1 where they are constant along an axis."""
    row = graph.types[x].row_shape
    table = graph.weight(f"{op.outputs[0]}_places", np.eye(row[at], dtype=numpy_dtype(graph.types[x].dtype)))
    one_hot = graph.add_step(op, Embedding(), (ids,), {"weight": table})  # (.., k, .., n)
    order = list(range(len(row) + 1))
    order.insert(at + 2, len(row) + 1)  # (.., k, n, ..)
    if order != sorted(order):
        one_hot = graph.add_step(op, Permute(tuple(order)), (one_hot,))
    expanded = graph.add_step(op, Reshape((*row[:at], 1, *row[at:])), (x,))
    masked = graph.add_step(op, Mask(), (expanded, one_hot))
    return graph.add_step(op, GlobalSum((at + 2,)), (masked,))


# -- indices through the whole batch ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowIndices(Unfinished):
    """0, 1, .. per row of the batch, times `times`, plus ids x (B,) if any."""

    times: int
    expected: ClassVar[str] = "x[arange(B), ids]: a Mul by a size, an Add of ids and a Gather by them"


@dataclass(frozen=True)
class FlatRows(Unfinished):
    """x (B, T, ..) as (B * T, ..)."""

    expected: ClassVar[str] = "a Flatten from axis 1, which keeps rows separate; or x[arange(B), ids]"


def reads_row_indices(graph: GraphReader, op: Op) -> bool:
    """Handle a node that is part of x[arange(B), ids]; return whether it was handled."""
    if op.kind == "Range":
        return _begins(graph, op)
    if op.kind == "Flatten" and op.attribute("axis", 1) == 2 and not graph.one_row and not graph.is_constant(op, 0):
        graph.begin(op, FlatRows(graph.value(op)))
        return True
    found = [graph.unfinished.get(name) for name in op.inputs]
    indices = next((one for one in found if isinstance(one, RowIndices)), None)
    if indices is None or op.kind not in ("Add", "Cast", "Gather", "Mul", "Shape"):
        return False
    other = 1 - found.index(indices)
    if op.kind == "Cast":
        graph.begin(op, indices)
    elif op.kind == "Shape" and indices.x:
        graph.add_constant(op, np.array(shape_part(op, graph.types[indices.x].shape), object))
    elif op.kind == "Mul" and not indices.x and graph.is_constant(op, other) and graph.constant(op, other).size == 1:
        graph.begin(op, RowIndices("", indices.times * int(graph.constant(op, other).reshape(()))))
    elif op.kind == "Add" and not indices.x and graph.types[graph.value(op, other)].row_shape == ():
        graph.begin(op, RowIndices(graph.value(op, other), indices.times))
    elif op.kind == "Gather" and isinstance(found[0], FlatRows) and indices.x and op.attribute("axis", 0) == 0:
        return _ends(graph, op, found[0].x, indices)
    else:
        return False
    return True


def _begins(graph: GraphReader, op: Op) -> bool:
    if len(op.inputs) != 3 or not all(graph.is_constant(op, index) for index in range(3)):
        return False
    operands = [graph.constant_or_shape(op, index).ravel().tolist() for index in range(3)]
    if operands != [[0], [BATCH], [1]]:
        return False
    graph.begin(op, RowIndices("", 1))
    return True


def _ends(graph: GraphReader, op: Op, x: str, indices: RowIndices) -> bool:
    row = graph.types[x].row_shape
    if not row or row[0] != indices.times or row[0] > _MAX_SIZE:
        return False
    ids = graph.add_step(op, Reshape((1,) * len(row)), (indices.x,))
    selected = _select(graph, op, x, ids, 0)
    graph.add(op, Reshape((math.prod(row[1:]),)), (selected,))
    return True
