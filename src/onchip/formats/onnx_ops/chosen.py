"""GatherElements: a place for each row, as the last step of a sequence or the value of an action."""

from __future__ import annotations

import numpy as np

from onchip.errors import FormatError
from onchip.formats.onnx_ops.base import Op, reads
from onchip.formats.onnx_ops.graph_reader import GraphReader
from onchip.formats.onnx_ops.select import row_axis_of
from onchip.spec.layers import Embedding, GlobalSum, Mask, Permute, Reshape, Tile
from onchip.spec.types import numpy_dtype

_MOST_PLACES = 1 << 10  # to choose from: a table has the square of it


@reads("GatherElements")
def read_gather_elements(graph: GraphReader, op: Op) -> None:
    """y[.., k, ..] = x[.., ids[.., k, ..], ..]: a sum over all places, of which the ids leave one, whatever the others
    hold."""
    x, ids = graph.value(op), graph.value(op, 1)
    at = row_axis_of(graph, op, x, op.attribute("axis", 0))
    row, wanted = list(graph.types[x].row_shape), list(graph.types[ids].row_shape)
    if [*wanted[:at], row[at], *wanted[at + 1 :]] != row or not 0 < row[at] <= _MOST_PLACES:
        got, expected = f"{graph.types[x]} by {graph.types[ids]}", f"ids of its shape but for up to {_MOST_PLACES:,}"
        raise FormatError(f"{op}: shapes do not fit", got=got, expected=expected)
    node = graph.nodes.get(ids)
    if node is not None and isinstance(node.layer, Tile) and node.layer.repeats[at] == 1:
        (ids,) = node.inputs  # the same along other axes
    table = graph.weight(f"{op.outputs[0]}_places", np.eye(row[at], dtype=numpy_dtype(graph.types[x].dtype)))
    chosen = graph.add_step(op, Embedding(), (ids,), {"weight": table})  # (.., k, .., n)
    order = list(range(len(row) + 1))
    order.insert(at + 2, len(row) + 1)  # (.., k, n, ..)
    if order != sorted(order):
        chosen = graph.add_step(op, Permute(tuple(order)), (chosen,))
    wide = graph.add_step(op, Reshape((*row[:at], 1, *row[at:])), (x,))
    kept = graph.add_step(op, Mask(), (wide, chosen))
    graph.add(op, GlobalSum((at + 2,)), (kept,))
