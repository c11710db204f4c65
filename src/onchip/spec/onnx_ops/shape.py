"""Flatten and Reshape."""

from __future__ import annotations

import numpy as np

from onchip.errors import FormatError, InputError
from onchip.spec.layers import Reshape
from onchip.spec.network import Node
from onchip.spec.onnx_ops.base import GraphReader, GraphWriter, Op, reads, writes
from onchip.spec.reading import MAX_RANK, show


@reads("Flatten")
def read_flatten(graph: GraphReader, op: Op) -> None:
    x = graph.value(op)
    axis = op.attribute("axis", 1)
    if axis not in (1, 1 - len(graph.types[x].shape)) or axis == 0:
        raise FormatError(f"{op} would mix the rows of the batch", got=f"axis {axis}", expected="axis 1")
    graph.add(op, Reshape((-1,)), (x,))


@reads("Reshape")
def read_reshape(graph: GraphReader, op: Op) -> None:
    x = graph.value(op)
    array = graph.constant(op, 1)
    if array.ndim != 1 or array.dtype != np.int64 or not 1 <= array.size <= MAX_RANK:
        raise FormatError(
            f"{op}: bad shape operand", got=f"{array.dtype.name} {array.shape}", expected="1-D int64, the batch first"
        )
    first, *row_shape = (int(d) for d in array)
    allow_zero = op.attribute("allowzero", 0) != 0
    if first != -1 and first != graph.batch and (first != 0 or allow_zero):
        raise FormatError(
            f"{op}: the first size must be the batch", got=show([first, *row_shape]),
            expected="0, -1 or the batch that the graph's input has",
            hint="export with a dynamic batch, or use Flatten",
        )  # fmt: skip
    if not allow_zero:
        row_shape = [_copied(graph, op, x, axis) if d == 0 else d for axis, d in enumerate(row_shape, start=1)]
    if first == -1 and -1 in row_shape:
        raise FormatError(f"{op}: two sizes are -1", got=show([first, *row_shape]))
    graph.add(op, Reshape(tuple(row_shape)), (x,))


def _copied(graph: GraphReader, op: Op, x: str, axis: int) -> int:
    shape = graph.types[x].shape
    if axis >= len(shape):
        raise FormatError(f"{op}: a 0 copies a size that is not there", got=f"axis {axis} of {graph.types[x]}")
    return int(shape[axis])


@writes(Reshape)
def write_reshape(graph: GraphWriter, node: Node) -> None:
    row_shape = graph.net.types[node.name].row_shape
    if 0 in row_shape:
        raise InputError(f"layer '{node.name}': ONNX cannot reshape empty rows", got=str(graph.net.types[node.name]))
    shape = graph.constant(f"{node.name}_shape", np.array([0, *row_shape], np.int64))
    graph.emit("Reshape", node, [graph.value(node), shape])
