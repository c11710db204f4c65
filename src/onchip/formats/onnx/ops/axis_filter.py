"""Filters along single axes of a row: each output is a weighted sum of a few neighbouring inputs."""

from __future__ import annotations

import math

import numpy as np

from onchip.formats.onnx.ops.base import Op
from onchip.formats.onnx.ops.graph_reader import GraphReader
from onchip.network.layers import Gather, GlobalSum, Mask, Mul, Reshape
from onchip.network.recipe import Array
from onchip.network.types import numpy_dtype

_ROUNDED_ZERO = 1e-9  # weights below this are rounded zeros


def filter_axis(graph: GraphReader, op: Op, x: str, axis: int, indices: Array, weights: Array) -> str:
    """y[i] = sum over k of weights[k, i] * x[indices[k, i]], along an axis; axis 0 is the batch.

    Inputs with weight 0 are masked out, as NaN or infinity times 0 is NaN.
    """
    row, taps = graph.types[x].row_shape, weights.shape
    dtype, name = numpy_dtype(graph.types[x].dtype), f"{op.outputs[0]}_axis{axis}"
    graph.spend(op, weights.size)
    y = graph.add_step(op, Gather(axis, tuple(indices.reshape(-1).tolist())), (x,))
    y = graph.add_step(op, Reshape((*row[: axis - 1], *taps, *row[axis:])), (y,))
    constant = weights.astype(dtype).reshape(*taps, *(1,) * (len(row) - axis))
    if not constant.all():
        mask = graph.weight(f"{name}_counts", (constant != 0).astype(dtype))
        y = graph.add_step(op, Mask(), (y,), {"mask": mask})
    scaled = graph.add_step(op, Mul(), (y,), {"constant": graph.weight(name, constant)})
    return graph.add_step(op, GlobalSum((axis,)), (scaled,))


def filter_taps(at: Array, n: int, scale: float, a: float | None, within: bool) -> tuple[Array, Array]:
    """Indices and weights, both (taps, len(at)), that interpolate n elements at positions `at`.

    scale   below 1, the filter is wider by 1 / scale
    a       of a cubic filter; None: linear
    within  positions outside have weight 0; else they are clamped to the first or last element
    """
    width = max(1.0, 1 / scale)
    radius = math.ceil((1 if a is None else 2) * width)
    indices = np.floor(at).astype(np.int64) + np.arange(1 - radius, 1 + radius)[:, None]
    d = np.abs(indices - at) / width
    if a is None:
        weights = np.maximum(0, 1 - d)
    else:
        near = ((a + 2) * d - (a + 3)) * d * d + 1
        weights = np.where(d <= 1, near, np.where(d < 2, ((d - 5) * d + 8) * d * a - 4 * a, 0))
    if within:
        weights = np.where((indices >= 0) & (indices < n), weights, 0)
    weights = weights / weights.sum(axis=0)
    weights = np.where(np.abs(weights) < _ROUNDED_ZERO, 0, weights)
    used = weights.any(axis=1)
    return np.clip(indices, 0, n - 1)[used], weights[used]
