"""Gemms of constants, such as the first step of an unrolled loop with zero state; and Muls of sizes."""

from __future__ import annotations

import numpy as np

from onchip.formats.onnx.ops.base import Op, folds
from onchip.formats.onnx.ops.fold import fold_arithmetic
from onchip.formats.onnx.ops.graph_reader import GraphReader
from onchip.formats.onnx.ops.permuted import batches, counted
from onchip.network.recipe import Array


@folds("Gemm", "MatMul")
def fold_product(graph: GraphReader, op: Op) -> Array:
    a, b = graph.constant(op, 0), graph.constant(op, 1)
    a, b = (array.T if op.attribute(name, 0) else array for array, name in ((a, "transA"), (b, "transB")))
    graph.spend(op, a.size * (b.shape[-1] if b.ndim > 1 else 1))
    y = op.attribute("alpha", 1.0) * (a.astype(np.float64) @ b.astype(np.float64))
    if graph.has(op, 2):
        y = y + op.attribute("beta", 1.0) * graph.constant(op, 2)
    return np.asarray(y, a.dtype)


@folds("Mul")
def fold_times(graph: GraphReader, op: Op) -> Array:
    """As other arithmetic, but one size may include the batch: a count per row."""
    a, b = (graph.constant_or_shape(op, index) for index in range(2))
    factors = [[counted(size) for size in array.ravel().tolist()] if array.dtype == object else [] for array in (a, b)]
    if not any(has_batch for array in factors for has_batch, _ in array) or max(a.size, b.size) != 1:
        return fold_arithmetic(graph, op)
    (first, n), (second, m) = counted(a.item()), counted(b.item())
    if first and second:
        return fold_arithmetic(graph, op)  # raises: depends on the batch
    return np.array(batches(True, n * m), object).reshape(np.broadcast_shapes(a.shape, b.shape))
