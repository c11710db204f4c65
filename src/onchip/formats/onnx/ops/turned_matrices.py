"""Attention with heads, or windows of an image, merged with the batch: batched gemms, softmax and norms."""

from __future__ import annotations

from onchip.formats.onnx.ops.base import Op
from onchip.formats.onnx.ops.graph_reader import GraphReader
from onchip.formats.onnx.ops.turned import ALIKE, HANDLERS, Turned, alike, ends_last, product
from onchip.network.layers import MatMul


def matmul(graph: GraphReader, op: Op, given: Turned) -> Turned | None:
    """(B * n, M, K) times (B * n, K, N), both viewed as (B, n, ..): a batched gemm per row of the batch."""
    if graph.is_constant(op, 1):
        return product(graph, op, given)
    pair = [graph.unfinished.get(name) for name in op.inputs]
    values = [_in_front(graph, op, one) for one in pair if isinstance(one, Turned) and _fits(one, given, -2)]
    if len(values) != 2 or len(given.axes) < 3 or None in values:
        return None
    return _seen(graph, graph.add_step(op, MatMul(), (str(values[0]), str(values[1]))), given)


def combined(graph: GraphReader, op: Op, given: Turned) -> Turned | None:
    """Elementwise: in the values' layout if possible, else in the file's order, with constants shared by all rows."""
    if (made := alike(graph, op, given)) is not None:
        return made
    inputs = []
    for index, name in enumerate(op.inputs):
        other = graph.unfinished.get(name)
        if isinstance(other, Turned) and _fits(other, given, len(given.axes)):
            value = _in_front(graph, op, other)
            if value is None:
                return None
            inputs.append(graph.part_value(op, value))
        elif graph.is_constant(op, index) and graph.constant(op, index).ndim < len(given.axes):
            inputs.append(name)
        else:
            return None
    name = graph.part(op, op.kind, inputs, **op.attributes)
    return _seen(graph, graph.value(Op(op.kind, op.name, (name,), op.outputs, {})), given)


def _fits(one: Turned, given: Turned, axes: int) -> bool:
    """Whether both have equal sizes along the file's first axes and the same batch position."""
    return one.file_shape[:axes] == given.file_shape[:axes] and _is_first(one) == _is_first(given)


def _is_first(given: Turned) -> bool:
    return given.axes[0][:1] == (0,)


def _in_front(graph: GraphReader, op: Op, given: Turned) -> str | None:
    """The value (B, n, ..), where the file's axis 0 is B * n or n * B; None if it is not."""
    front = given.axes[0]
    if 0 not in (front[:1] + front[-1:]):
        return None
    beside = front[1:] if front[0] == 0 else front[:-1]
    return given.in_order(graph, op, ((0,), beside, *given.axes[1:]))


def _seen(graph: GraphReader, x: str, given: Turned) -> Turned:
    """x (B, n, ..) viewed as in the file, with the batch at the position of `given`."""
    shape = graph.types[x].shape
    kept = [axis for axis, size in enumerate(shape) if axis == 0 or size != 1]
    groups = [(0, 1) if _is_first(given) else (1, 0), *((axis,) for axis in range(2, len(shape)))]
    axes = tuple(tuple(kept.index(axis) for axis in group if axis in kept) for group in groups)
    return Turned(x, tuple(shape[axis] for axis in kept), axes)


def along_rows(graph: GraphReader, op: Op, given: Turned) -> Turned | None:
    """Softmax and norms along the file's last axis."""
    rank = len(given.axes)
    default = 1 if op.kind in ("Softmax", "LogSoftmax") and graph.opset < 13 else -1
    if op.attribute("axis", default) not in (-1, rank - 1) or 0 in given.axes[-1] or not given.axes[-1]:
        return None
    order, seen = ends_last(given)
    x = graph.part_value(op, given.in_order(graph, op, order))
    name = graph.part(op, op.kind, [x, *op.inputs[1:]], **{**op.attributes, "axis": len(order) - 1})
    return Turned(graph.value(Op(op.kind, op.name, (name,), op.outputs, {})), seen.shape, seen.axes)


HANDLERS["MatMul"] = matmul
HANDLERS.update(dict.fromkeys(ALIKE, combined))
HANDLERS.update(dict.fromkeys(("Softmax", "LogSoftmax", "LayerNormalization"), along_rows))
