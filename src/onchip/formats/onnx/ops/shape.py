"""Reshape, Flatten, Squeeze, Unsqueeze and Transpose."""

from __future__ import annotations

import math

import numpy as np

from onchip.errors import FormatError, InputError
from onchip.formats.onnx.ops.base import Op, reads, writes
from onchip.formats.onnx.ops.graph_reader import GraphReader
from onchip.formats.onnx.ops.graph_writer import GraphWriter
from onchip.network.graph import Node
from onchip.network.layers import Permute, Reshape
from onchip.network.reading import MAX_RANK, show
from onchip.network.types import BATCH, Dim


@reads("Flatten")
def read_flatten(graph: GraphReader, op: Op) -> None:
    x = graph.value(op)
    shape, axis = graph.shape(x), op.attribute("axis", 1)
    if not -len(shape) <= axis <= len(shape):
        raise FormatError(f"{op}: axis out of range", got=f"axis {axis}", expected=f"up to {len(shape)}")
    axis = axis + len(shape) if axis < 0 else axis
    if not graph.one_row and axis != 1:
        raise FormatError(f"{op} would mix the rows of the batch", got=f"axis {axis}", expected="axis 1")
    if graph.one_row:
        sizes = [int(d) for d in shape]
        graph.add(op, graph.reshape(op, [math.prod(sizes[:axis]), math.prod(sizes[axis:])]), (x,))
    else:
        graph.add(op, graph.reshape(op, [BATCH, -1]), (x,))


@reads("Reshape")
def read_reshape(graph: GraphReader, op: Op) -> None:
    x = graph.value(op)
    array = graph.constant_or_shape(op, 1)
    if array.ndim != 1 or array.dtype not in (np.int64, object) or not (1 - graph.one_row <= array.size <= MAX_RANK):
        raise FormatError(
            f"{op}: bad shape operand", got=f"{array.dtype.name} {array.shape}", expected="1-D int64, the batch first"
        )
    shape: list[Dim] = array.tolist()
    if not op.attribute("allowzero", 0):
        shape = [_copied(graph, op, x, axis) if d == 0 else d for axis, d in enumerate(shape)]
    graph.add(op, graph.reshape(op, shape), (x,))


def _copied(graph: GraphReader, op: Op, x: str, axis: int) -> Dim:
    shape = graph.shape(x)
    if axis >= len(shape):
        raise FormatError(
            f"{op}: a 0 copies a missing size",
            got=f"axis {axis} of {graph.types[x]}",
            expected="at most as many sizes",
        )
    return shape[axis]


@reads("Squeeze")
def read_squeeze(graph: GraphReader, op: Op) -> None:
    x, axes = graph.value(op), graph.axes(op, since=13)
    shape = graph.shape(x)
    if axes is None:
        gone = {axis for axis, d in enumerate(shape) if d == 1}
    else:
        gone = {graph.axis(op, x, axis) - graph.one_row for axis in axes}
    if any(shape[axis] not in (1, BATCH) for axis in gone):
        raise FormatError(f"{op}: can only squeeze 1", got=f"axes {axes} of {graph.types[x]}", expected="axes of 1")
    if axes is None and not graph.one_row and graph.batch == 1:
        raise FormatError(
            f"{op} has no axes, and the batch is 1", expected="axes", hint="x.squeeze(1) in torch, for axis 1"
        )
    graph.add(op, graph.reshape(op, [d for axis, d in enumerate(shape) if axis not in gone]), (x,))


@reads("Unsqueeze")
def read_unsqueeze(graph: GraphReader, op: Op) -> None:
    x, axes = graph.value(op), graph.new_axes(op)
    rank = len(graph.shape(x)) + len(axes)
    new = {axis % rank for axis in axes if -rank <= axis < rank}
    if rank > MAX_RANK or len(new) < len(axes):
        raise FormatError(f"{op}: bad axes", got=show(axes), expected=f"different ones from {-rank} to {rank - 1}")
    sizes = iter(graph.shape(x))
    graph.add(op, graph.reshape(op, [1 if axis in new else next(sizes) for axis in range(rank)]), (x,))


@reads("Transpose")
def read_transpose(graph: GraphReader, op: Op) -> None:
    x = graph.value(op)
    rank = len(graph.shape(x))
    axes = [axis + graph.one_row for axis in op.sizes("perm", list(range(rank))[::-1], rank)]
    graph.add(op, Permute((0, *axes) if graph.one_row else tuple(axes)), (x,))


@writes(Reshape)
def write_reshape(graph: GraphWriter, node: Node) -> None:
    row_shape = graph.net.types[node.name].row_shape
    if 0 in row_shape:
        raise InputError(f"layer '{node.name}': ONNX cannot reshape empty rows", got=str(graph.net.types[node.name]))
    shape = graph.constant(f"{node.name}_shape", np.array([0, *row_shape], np.int64))
    graph.emit("Reshape", node, [graph.value(node), shape])


@writes(Permute)
def write_permute(graph: GraphWriter, node: Node) -> None:
    graph.emit("Transpose", node, [graph.value(node)], perm=list(node.layer.attributes()["axes"]))
