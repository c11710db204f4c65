"""Rows normalised by their own statistics: LayerNorm, RMSNorm, GroupNorm."""

from __future__ import annotations

import numpy as np

from onchip.kernels.reference.base import Arrays, Gradients, Weights, backward_of, forward_of
from onchip.network.layers import GroupNorm, LayerNorm, RMSNorm, RowNorm
from onchip.network.recipe import Array
from onchip.network.types import BATCH, TensorType


@forward_of(LayerNorm, RMSNorm, GroupNorm)
def row_norm(layer: RowNorm, xs: Arrays, w: Weights) -> Array:
    y = _normalised(layer, xs[0])[0].reshape(xs[0].shape)
    if "weight" in w:
        y = y * _broadcastable(layer, w["weight"], y)
    return y + _broadcastable(layer, w["bias"], y) if "bias" in w else y


@backward_of(LayerNorm, RMSNorm, GroupNorm)
def row_norm_back(layer: RowNorm, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
    """With n = (x - mean) / s:  dx = (dn - mean(dn) - n mean(dn n)) / s; RMSNorm lacks the second term."""
    (x,) = xs
    n, s = _normalised(layer, x)
    dn, dw = dy, {}
    if "weight" in w:
        dw["weight"] = _weight_gradient(layer, dy * n.reshape(x.shape))
        dn = dy * _broadcastable(layer, w["weight"], x)
    if "bias" in w:
        dw["bias"] = _weight_gradient(layer, dy)
    dn = dn.reshape(n.shape)
    dx = dn - n * (dn * n).mean(axis=-1, keepdims=True)
    if layer.is_centred:
        dx = dx - dn.mean(axis=-1, keepdims=True)
    return ((dx / s).reshape(x.shape),), dw


def _normalised(layer: RowNorm, x: Array) -> tuple[Array, Array]:
    """The segments of x (B, segments, elements), normalised, and their divisors (B, segments, 1)."""
    segments = layer.parts(TensorType((BATCH, *x.shape[1:])))
    n: Array = x.reshape(len(x), segments.count, segments.size)
    if layer.is_centred:
        n = n - n.mean(axis=-1, keepdims=True)
    s = np.sqrt((n * n).mean(axis=-1, keepdims=True) + layer.attributes()["eps"])
    return n / s, s


def _broadcastable(layer: RowNorm, values: Array, x: Array) -> Array:
    """Weights shaped to broadcast to x: along axis 1 for channels, else along the last axes."""
    return values.reshape(-1, *(1,) * (x.ndim - 2)) if isinstance(layer, GroupNorm) else values


def _weight_gradient(layer: RowNorm, gradient: Array) -> Array:
    """The gradient summed over all elements that use the same weight."""
    axis = 1 if isinstance(layer, GroupNorm) else layer.attributes()["axis"] % gradient.ndim
    others = [a for a in range(gradient.ndim) if (a != axis if isinstance(layer, GroupNorm) else a < axis)]
    return np.asarray(gradient.sum(axis=tuple(others)))
