"""Constant matrices along single axes of a row: what filters and uneven windows over a picture come to."""

from __future__ import annotations

import math

import numpy as np

from onchip.errors import FormatError
from onchip.formats.onnx_ops.base import Op
from onchip.formats.onnx_ops.graph_reader import GraphReader
from onchip.spec.layers import Linear, Permute
from onchip.spec.recipe import Array
from onchip.spec.types import numpy_dtype

_MOST_NUMBERS = 1 << 20  # of a matrix: more is work that a filter of some taps is not


def multiply_along(graph: GraphReader, op: Op, x: str, matrices: dict[int, Array]) -> str:
    """x times a matrix (sizes of y, sizes of x) along each of these axes, the batch being 0; the last axis first."""
    for axis, matrix in sorted(matrices.items(), reverse=True):
        if matrix.size > _MOST_NUMBERS:
            got = f"{matrix.shape[1]} to {matrix.shape[0]} along axis {axis}"
            raise FormatError(f"{op}: its axes are too long", got=got, expected=f"a product below {_MOST_NUMBERS:,}")
        rank = len(graph.types[x].shape)
        order = [*(a for a in range(rank) if a != axis), axis]
        weight = matrix.astype(numpy_dtype(graph.types[x].dtype))
        roles = {"weight": graph.weight(f"{op.outputs[0]}_axis{axis}", weight)}
        last = graph.add_step(op, Permute(tuple(order)), (x,)) if axis < rank - 1 else x
        x = graph.add_step(op, Linear(), (last,), roles)
        if axis < rank - 1:
            x = graph.add_step(op, Permute(tuple(int(a) for a in np.argsort(order))), (x,))
    return x


def filter_matrix(at: Array, n: int, scale: float, a: float | None, within: bool) -> Array:
    """Row i makes, of n numbers, the one that lies at at[i]: a mean of those around it, weighted by a filter.

    scale   below 1, the filter is as much wider
    a       of a cubic filter; None is a linear one
    within  places outside count for nothing; else they are the first number, or the last
    """
    wide = max(1.0, 1 / scale)
    reach = math.ceil((1 if a is None else 2) * wide)
    first = np.floor(at).astype(np.int64)
    places = first[:, None] + np.arange(1 - reach, 1 + reach)
    d = np.abs(places - at[:, None]) / wide
    if a is None:
        weights = np.maximum(0, 1 - d)
    else:
        near = ((a + 2) * d - (a + 3)) * d * d + 1
        weights = np.where(d <= 1, near, np.where(d < 2, ((d - 5) * d + 8) * d * a - 4 * a, 0))
    if within:
        weights = np.where((places >= 0) & (places < n), weights, 0)
    weights = weights / weights.sum(axis=1, keepdims=True)
    matrix = np.zeros((len(at), n))
    np.add.at(matrix, (np.arange(len(at))[:, None], np.clip(places, 0, n - 1)), weights)
    return matrix
