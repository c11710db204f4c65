"""Indices of the largest and smallest values, which have no derivative; the top k."""

from __future__ import annotations

import numpy as np

from onchip.kernels.reference.base import Arrays, Gradients, Weights, backward_of, forward_of
from onchip.network.layers import ArgMax, ArgMin, ArgTopK, TopK
from onchip.network.recipe import Array


@forward_of(ArgMax, ArgMin)
def argument(layer: ArgMax | ArgMin, xs: Arrays, w: Weights) -> Array:
    (x,) = xs
    find = np.argmax if isinstance(layer, ArgMax) else np.argmin  # NaN wins over every number
    if not layer.last:
        return np.asarray(find(x, axis=layer.axis, keepdims=layer.keep), np.int64)
    indices = x.shape[layer.axis] - 1 - find(np.flip(x, layer.axis), axis=layer.axis, keepdims=layer.keep)
    return np.asarray(indices, np.int64)


@forward_of(ArgTopK)
def top_indices(layer: ArgTopK, xs: Arrays, w: Weights) -> Array:
    return _indices(layer, xs[0])


@forward_of(TopK)
def top(layer: TopK, xs: Arrays, w: Weights) -> Array:
    return np.take_along_axis(xs[0], _indices(layer, xs[0]), layer.axis)


@backward_of(TopK)
def top_back(layer: TopK, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
    dx = np.zeros_like(xs[0])
    np.put_along_axis(dx, _indices(layer, xs[0]), dy, layer.axis)
    return (dx,), {}


def _indices(layer: TopK | ArgTopK, x: Array) -> Array:
    """NumPy sorts NaNs last, whatever their sign."""
    if layer.largest:  # flipped twice, so that a stable sort puts the first of equal values first
        n = x.shape[layer.axis]
        indices = n - 1 - np.flip(np.argsort(np.flip(x, layer.axis), layer.axis, kind="stable"), layer.axis)
    else:
        indices = np.argsort(x, layer.axis, kind="stable")
    return np.asarray(np.take(indices, np.arange(layer.k), layer.axis), np.int64)
