"""Reductions of constants, and the triangles used in attention masks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from onchip.formats.onnx.ops.base import Op, folds
from onchip.formats.onnx.ops.graph_reader import GraphReader
from onchip.formats.onnx.ops.reduce import axes_input_opset, keeps_axes
from onchip.network.recipe import Array

_REDUCTIONS: dict[str, Callable[..., Array]] = {
    "ReduceSum": np.sum, "ReduceProd": np.prod, "ReduceMean": np.mean, "ReduceMax": np.max, "ReduceMin": np.min,
    "ReduceL2": np.sum,  # of squares; the root follows
}  # fmt: skip


@folds(*_REDUCTIONS)
def fold_reduction(graph: GraphReader, op: Op) -> Array:
    array, axes = graph.constant(op, 0), graph.axes(op, axes_input_opset(op.kind))
    graph.spend(op, array.size)
    if not axes and op.attribute("noop_with_empty_axes", 0):
        return array
    wide = array.astype(np.float64) if array.dtype.kind == "f" else array
    over = tuple(axes) if axes else tuple(range(array.ndim))
    reduced = _REDUCTIONS[op.kind](wide * wide if op.kind == "ReduceL2" else wide, axis=over, keepdims=keeps_axes(op))
    return np.asarray(np.sqrt(reduced) if op.kind == "ReduceL2" else reduced).astype(array.dtype)


@folds("Trilu")
def fold_triangle(graph: GraphReader, op: Op) -> Array:
    """The part above or below a diagonal; zeros elsewhere."""
    array = graph.constant(op, 0)
    first = int(graph.constant(op, 1)) if graph.has(op, 1) else 0
    graph.spend(op, array.size)
    return np.triu(array, first) if op.attribute("upper", 1) else np.tril(array, first)
