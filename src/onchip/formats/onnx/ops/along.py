"""Filters along single axes of a row: each output is a weighted sum of a few neighbouring inputs."""

from __future__ import annotations

import math

import numpy as np

from onchip.formats.onnx.ops.base import Op
from onchip.formats.onnx.ops.graph_reader import GraphReader
from onchip.network.layers import Gather, GlobalSum, Mask, Mul, Reshape
from onchip.network.recipe import Array
from onchip.network.types import numpy_dtype

_NOTHING = 1e-9  # smaller weights are rounded zeros


def filter_along(graph: GraphReader, op: Op, x: str, axis: int, places: Array, weights: Array) -> str:
    """y[i] = sum over k of weights[k, i] * x[places[k, i]], along an axis; axis 0 is the batch.

    Inputs with weight 0 are masked out, as NaN or infinity times 0 is NaN.
    """
    row, taps = graph.types[x].row_shape, weights.shape
    dtype, name = numpy_dtype(graph.types[x].dtype), f"{op.outputs[0]}_axis{axis}"
    graph.spend(op, weights.size)
    chosen = graph.add_step(op, Gather(axis, tuple(places.reshape(-1).tolist())), (x,))
    chosen = graph.add_step(op, Reshape((*row[: axis - 1], *taps, *row[axis:])), (chosen,))
    factors = weights.astype(dtype).reshape(*taps, *(1,) * (len(row) - axis))
    if not factors.all():
        mask = graph.weight(f"{name}_counts", (factors != 0).astype(dtype))
        chosen = graph.add_step(op, Mask(), (chosen,), {"mask": mask})
    scaled = graph.add_step(op, Mul(), (chosen,), {"constant": graph.weight(name, factors)})
    return graph.add_step(op, GlobalSum((axis,)), (scaled,))


def filter_taps(at: Array, n: int, scale: float, a: float | None, within: bool) -> tuple[Array, Array]:
    """Indices and weights, both (taps, len(at)), that interpolate n elements at positions `at`.

    scale   below 1, the filter is wider by 1 / scale
    a       of a cubic filter; None: linear
    within  positions outside have weight 0; else they are clamped to the first or last element
    """
    wide = max(1.0, 1 / scale)
    reach = math.ceil((1 if a is None else 2) * wide)
    places = np.floor(at).astype(np.int64) + np.arange(1 - reach, 1 + reach)[:, None]
    d = np.abs(places - at) / wide
    if a is None:
        weights = np.maximum(0, 1 - d)
    else:
        near = ((a + 2) * d - (a + 3)) * d * d + 1
        weights = np.where(d <= 1, near, np.where(d < 2, ((d - 5) * d + 8) * d * a - 4 * a, 0))
    if within:
        weights = np.where((places >= 0) & (places < n), weights, 0)
    weights = weights / weights.sum(axis=0)
    weights = np.where(np.abs(weights) < _NOTHING, 0, weights)
    used = weights.any(axis=1)
    return np.clip(places, 0, n - 1)[used], weights[used]
