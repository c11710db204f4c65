"""Gather: from a constant table by ids that are values (Embedding), or from a value by constant indices; OneHot."""

from __future__ import annotations

from typing import cast

import numpy as np

from onchip.errors import FormatError
from onchip.formats.onnx.ops.base import Op, reads, writes
from onchip.formats.onnx.ops.graph_reader import GraphReader
from onchip.formats.onnx.ops.graph_writer import GraphWriter
from onchip.formats.onnx.ops.lengths import narrow_ints
from onchip.formats.onnx.ops.select import gather_constant
from onchip.formats.onnx.ops.truth import Truth
from onchip.network.graph import Node
from onchip.network.layers import Embedding, Permute, Reshape
from onchip.network.layers.cast import IntDtype
from onchip.network.reading import show

_MAX_ONE_HOT = 1 << 12  # the table is its square


@reads("Gather")
def read_gather(graph: GraphReader, op: Op) -> None:
    if not graph.is_constant(op, 0):
        if not graph.is_constant(op, 1):
            got, expected = ", ".join(op.inputs), "a constant table, or constant indices"
            raise FormatError(f"{op}: one of its operands must be a constant", got=got, expected=expected)
        gather_constant(graph, op)
        return
    table, ids, axis = graph.constant(op, 0), narrow_ints(graph, op, 1), op.attribute("axis", 0)
    if table.ndim == 0 or axis not in (0, -table.ndim):
        raise FormatError(f"{op}: only rows can be looked up", got=f"axis {axis} of {table.shape}", expected="axis 0")
    weight = graph.weight(op.inputs[0], table.reshape(len(table), -1) if table.size else table)
    if table.ndim == 2:
        graph.add(op, Embedding(), (ids,), {"weight": weight})
    else:
        rows = graph.add_step(op, Embedding(), (ids,), {"weight": weight})
        graph.add(op, Reshape((*graph.types[ids].row_shape, *table.shape[1:])), (rows,))


@reads("OneHot")
def read_one_hot(graph: GraphReader, op: Op) -> None:
    """A lookup in an identity matrix; the new axis is last, or is permuted into position."""
    ids, values = narrow_ints(graph, op, 0), graph.constant(op, 2)
    depth, rank = int(graph.constant(op, 1).reshape(())), len(graph.shape(ids)) + 1
    axis = op.attribute("axis", -1)
    is_truth = values.tolist() == [0, 1] and values.dtype.kind in "ib"  # a Cast follows
    if not 0 < depth <= _MAX_ONE_HOT or values.shape != (2,) or not (is_truth or values.dtype.kind in "fV"):
        got, expected = f"depth {depth}, values {show(values.tolist())}", f"up to {_MAX_ONE_HOT:,}; floats, or 0 and 1"
        raise FormatError(f"{op}: bad operands", got=got, expected=expected)
    if not -rank <= axis < rank or (axis % rank == 0 and not graph.one_row):
        raise FormatError(f"{op}: axis out of range", got=f"axis {axis}", expected=f"1 to {rank - 1}")
    dtype = np.dtype(np.float32) if is_truth else values.dtype
    table = np.where(np.eye(depth, dtype=bool), values[1], values[0]).astype(dtype)
    rows = graph.add_step(op, Embedding(), (ids,), {"weight": graph.weight(f"{op.outputs[0]}_rows", table)})
    order = list(range(len(graph.types[rows].shape) - 1))
    order.insert(axis % rank + graph.one_row, len(order))
    y = graph.add_step(op, Permute(tuple(order)), (rows,)) if order != sorted(order) else rows
    if is_truth:
        graph.begin(op, Truth(y, dtype=cast(IntDtype, values.dtype.name)))
    else:
        graph.bind_output(op, 0, y)


@writes(Embedding)
def write_embedding(graph: GraphWriter, node: Node) -> None:
    graph.emit("Gather", node, [graph.weight(node, "weight"), graph.value(node)])
