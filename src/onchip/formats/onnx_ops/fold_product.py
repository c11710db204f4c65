"""Products of constants alone: the first step of a loop that was unrolled begins with zeros."""

from __future__ import annotations

import numpy as np

from onchip.formats.onnx_ops.base import Op, folds
from onchip.formats.onnx_ops.graph_reader import GraphReader
from onchip.spec.recipe import Array


@folds("Gemm", "MatMul")
def fold_product(graph: GraphReader, op: Op) -> Array:
    a, b = graph.constant(op, 0), graph.constant(op, 1)
    a, b = (array.T if op.attribute(name, 0) else array for array, name in ((a, "transA"), (b, "transB")))
    graph.spend(op, a.size * (b.shape[-1] if b.ndim > 1 else 1))
    product = op.attribute("alpha", 1.0) * (a.astype(np.float64) @ b.astype(np.float64))
    if graph.has(op, 2):
        product = product + op.attribute("beta", 1.0) * graph.constant(op, 2)
    return np.asarray(product, a.dtype)
