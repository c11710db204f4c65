"""Gather: from a constant table by ids that are values (Embedding), or from a value by constant indices."""

from __future__ import annotations

from onchip.errors import FormatError
from onchip.formats.onnx_ops.base import Op, reads, writes
from onchip.formats.onnx_ops.graph_reader import GraphReader
from onchip.formats.onnx_ops.graph_writer import GraphWriter
from onchip.formats.onnx_ops.select import gather_constant
from onchip.spec.layers import Embedding, Reshape
from onchip.spec.network import Node


@reads("Gather")
def read_gather(graph: GraphReader, op: Op) -> None:
    if not graph.is_constant(op, 0):
        if not graph.is_constant(op, 1):
            got, expected = ", ".join(op.inputs), "a constant table, or constant indices"
            raise FormatError(f"{op}: one of its operands must be a constant", got=got, expected=expected)
        gather_constant(graph, op)
        return
    table, ids, axis = graph.constant(op, 0), graph.value(op, 1), op.attribute("axis", 0)
    if table.ndim == 0 or axis not in (0, -table.ndim):
        raise FormatError(f"{op}: only rows can be looked up", got=f"axis {axis} of {table.shape}", expected="axis 0")
    weight = graph.weight(op.inputs[0], table.reshape(len(table), -1) if table.size else table)
    if table.ndim == 2:
        graph.add(op, Embedding(), (ids,), {"weight": weight})
    else:
        rows = graph.add_step(op, Embedding(), (ids,), {"weight": weight})
        graph.add(op, Reshape((*graph.types[ids].row_shape, *table.shape[1:])), (rows,))


@writes(Embedding)
def write_embedding(graph: GraphWriter, node: Node) -> None:
    graph.emit("Gather", node, [graph.weight(node, "weight"), graph.value(node)])
