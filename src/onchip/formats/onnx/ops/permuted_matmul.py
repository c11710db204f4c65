"""Attention with heads, or windows of an image, merged with the batch: batched gemms, softmax and norms."""

from __future__ import annotations

from onchip.formats.onnx.ops.base import Op
from onchip.formats.onnx.ops.graph_reader import GraphReader
from onchip.formats.onnx.ops.permuted import ELEMENTWISE, HANDLERS, AxisView, elementwise, ends_last, gemm
from onchip.network.layers import MatMul


def matmul(graph: GraphReader, op: Op, view: AxisView) -> AxisView | None:
    """(B * n, M, K) times (B * n, K, N), both viewed as (B, n, ..): a batched gemm per row of the batch."""
    if graph.is_constant(op, 1):
        return gemm(graph, op, view)
    pair = [graph.unfinished.get(name) for name in op.inputs]
    values = [_batch_first(graph, op, one) for one in pair if isinstance(one, AxisView) and _fits(one, view, -2)]
    if len(values) != 2 or len(view.axes) < 3 or None in values:
        return None
    return _view_of(graph, graph.add_step(op, MatMul(), (str(values[0]), str(values[1]))), view)


def elementwise_by_rows(graph: GraphReader, op: Op, view: AxisView) -> AxisView | None:
    """Elementwise: in the values' layout if possible, else in the file's order; constants are shared by all rows."""
    if (result := elementwise(graph, op, view)) is not None:
        return result
    inputs = []
    for index, name in enumerate(op.inputs):
        other = graph.unfinished.get(name)
        if isinstance(other, AxisView) and _fits(other, view, len(view.axes)):
            value = _batch_first(graph, op, other)
            if value is None:
                return None
            inputs.append(graph.part_value(op, value))
        elif graph.is_constant(op, index) and graph.constant(op, index).ndim < len(view.axes):
            inputs.append(name)
        else:
            return None
    name = graph.part(op, op.kind, inputs, **op.attributes)
    return _view_of(graph, graph.value(Op(op.kind, op.name, (name,), op.outputs, {})), view)


def _fits(one: AxisView, view: AxisView, axes: int) -> bool:
    """Whether both have equal sizes along the file's first axes and the same batch position."""
    return one.file_shape[:axes] == view.file_shape[:axes] and _is_first(one) == _is_first(view)


def _is_first(view: AxisView) -> bool:
    return view.axes[0][:1] == (0,)


def _batch_first(graph: GraphReader, op: Op, view: AxisView) -> str | None:
    """The value (B, n, ..), where the file's axis 0 is B * n or n * B; None if it is not."""
    first = view.axes[0]
    if 0 not in (first[:1] + first[-1:]):
        return None
    merged = first[1:] if first[0] == 0 else first[:-1]
    return view.in_order(graph, op, ((0,), merged, *view.axes[1:]))


def _view_of(graph: GraphReader, x: str, view: AxisView) -> AxisView:
    """x (B, n, ..) viewed as in the file, with the batch at the position of `view`."""
    shape = graph.types[x].shape
    stored = [axis for axis, size in enumerate(shape) if axis == 0 or size != 1]
    groups = [(0, 1) if _is_first(view) else (1, 0), *((axis,) for axis in range(2, len(shape)))]
    axes = tuple(tuple(stored.index(axis) for axis in group if axis in stored) for group in groups)
    return AxisView(x, tuple(shape[axis] for axis in stored), axes)


def last_axis_op(graph: GraphReader, op: Op, view: AxisView) -> AxisView | None:
    """Softmax and norms along the file's last axis."""
    rank = len(view.axes)
    default = 1 if op.kind in ("Softmax", "LogSoftmax") and graph.opset < 13 else -1
    if op.attribute("axis", default) not in (-1, rank - 1) or 0 in view.axes[-1] or not view.axes[-1]:
        return None
    order, seen = ends_last(view)
    x = graph.part_value(op, view.in_order(graph, op, order))
    name = graph.part(op, op.kind, [x, *op.inputs[1:]], **{**op.attributes, "axis": len(order) - 1})
    return AxisView(graph.value(Op(op.kind, op.name, (name,), op.outputs, {})), seen.shape, seen.axes)


HANDLERS["MatMul"] = matmul
HANDLERS.update(dict.fromkeys(ELEMENTWISE, elementwise_by_rows))
HANDLERS.update(dict.fromkeys(("Softmax", "LogSoftmax", "LayerNormalization"), last_axis_op))
