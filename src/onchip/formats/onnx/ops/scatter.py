"""ScatterElements: write or add values at indices, e.g. one-hot rows, counts, expert weights.

    y[.., ids[.., k, ..], ..] = updates[.., k, ..]

Elements without an id keep the data; updates to the same element are added. The ids become one-hot rows.
"""

from __future__ import annotations

import numpy as np

from onchip.errors import FormatError
from onchip.formats.onnx.ops.base import Op, reads
from onchip.formats.onnx.ops.combine import combine
from onchip.formats.onnx.ops.graph_reader import GraphReader
from onchip.formats.onnx.ops.select import row_axis_of
from onchip.network.layers import Add, Embedding, GlobalSum, Greater, Mask, Mul, Permute, Reshape
from onchip.network.reading import show
from onchip.network.recipe import Array
from onchip.network.types import numpy_dtype

_MAX_SIZE = 1 << 10  # axis size n: the table is (n, n)
_EXPECTED = "ids and updates of one shape, the data's except the axis"


@reads("ScatterElements", "Scatter")
def read_scatter_elements(graph: GraphReader, op: Op) -> None:
    """ONNX leaves duplicate ids undefined: here, their updates are added."""
    ids, how = graph.value(op, 1), op.attribute("reduction", b"none")
    if how not in (b"none", b"add"):
        raise FormatError(f"{op}: bad attribute 'reduction'", got=show(how), expected="none or add")
    row = list(graph.types[ids].row_shape)
    at = row_axis_of(graph, op, ids, op.attribute("axis", 0))
    data = graph.constant(op, 0) if graph.is_constant(op, 0) else None
    shape = list(_row(graph, op, data).shape) if data is not None else list(graph.types[graph.value(op)].row_shape)
    if [*row[:at], shape[at], *row[at + 1 :]] != shape or not 0 < shape[at] <= _MAX_SIZE:
        got = f"{graph.types[ids]} into rows of {shape}"
        raise FormatError(f"{op}: shapes do not fit", got=got, expected=f"{_EXPECTED}, up to {_MAX_SIZE:,} along it")
    updates = graph.constant(op, 2) if graph.is_constant(op, 2) else None
    dtype = updates.dtype if updates is not None else numpy_dtype(graph.types[graph.value(op, 2)].dtype)
    one_hot = _one_hot(graph, op, ids, at, shape[at], dtype)  # (.., k, n, ..): one-hot ids
    if updates is not None:
        wide = np.expand_dims(_row(graph, op, updates), at + 1)
        name = graph.weight(f"{op.outputs[0]}_updates", wide)
        scattered = graph.add_step(op, Mul(), (one_hot,), {"constant": name})
    else:
        source = graph.value(op, 2)
        if list(graph.types[source].row_shape) != row:
            raise FormatError(f"{op}: shapes do not fit", got=str(graph.types[source]), expected=_EXPECTED)
        wide_value = graph.add_step(op, Reshape((*row[: at + 1], 1, *row[at + 1 :])), (source,))
        scattered = graph.add_step(op, Mask(), (wide_value, one_hot))
    total = graph.add_step(op, GlobalSum((at + 1,)), (scattered,))
    if data is not None and not data.any():
        graph.bind_output(op, 0, total)
        return
    base = {} if data is not None else {0: graph.value(op)}
    constants = {} if data is None else {0: data}
    if how == b"none":
        count = graph.add_step(op, GlobalSum((at + 1,)), (one_hot,))
        one = graph.weight("one", np.ones((), dtype))
        free = graph.add_step(op, Greater(), (count,), {"first": one})  # 1 > count
        if data is not None:
            base, constants = {0: combine(graph, op, Mul(), {0: free}, {1: data}, is_step=True, name=op.inputs[0])}, {}
        else:
            base = {0: graph.add_step(op, Mask(), (base[0], free))}
    combine(graph, op, Add(), {**base, 1: total}, constants, name=op.inputs[0])


def _row(graph: GraphReader, op: Op, array: Array) -> Array:
    """A constant without its batch axis."""
    if graph.one_row:
        return array
    once = graph.once(array)
    if once.shape[:1] != (1,):
        got = f"shape {array.shape}"
        raise FormatError(f"{op}: its constant varies over the batch", got=got, expected="size 1 on axis 0")
    row: Array = once[0]
    return row


def _one_hot(graph: GraphReader, op: Op, ids: str, at: int, n: int, dtype: np.dtype[np.generic]) -> str:
    """(.., k, ..) ids as one-hot (.., k, n, ..)."""
    table = graph.weight(f"{op.outputs[0]}_places", np.eye(n, dtype=dtype))
    rows = graph.add_step(op, Embedding(), (ids,), {"weight": table})  # (.., k, .., n)
    order = list(range(len(graph.types[ids].shape)))
    order.insert(at + 2, len(order))
    return graph.add_step(op, Permute(tuple(order)), (rows,)) if order != sorted(order) else rows
