"""Linear and batch normalisation."""

from __future__ import annotations

import numpy as np

from onchip.kernels.reference.base import Arrays, Gradients, Weights, backward_of, forward_of
from onchip.network.layers import BatchNorm1d, BatchNorm2d, Linear
from onchip.network.recipe import Array

BatchNorm = BatchNorm1d | BatchNorm2d


@forward_of(Linear)
def linear(layer: Linear, xs: Arrays, w: Weights) -> Array:
    y: Array = xs[0] @ w["weight"].T
    return y + w["bias"] if "bias" in w else y


@backward_of(Linear)
def linear_back(layer: Linear, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
    D_out, D_in = w["weight"].shape
    rows, drows = xs[0].reshape(xs[0].size // D_in, D_in), dy.reshape(dy.size // D_out, D_out)
    dw = {"weight": drows.T @ rows}
    if "bias" in w:
        dw["bias"] = drows.sum(axis=0)
    return (dy @ w["weight"],), dw


@forward_of(BatchNorm1d, BatchNorm2d)
def batch_norm(layer: BatchNorm, xs: Arrays, w: Weights) -> Array:
    y = _normalised(layer, xs[0], w)
    if "weight" in w:
        y = y * _per_channel(w["weight"], y)
    return y + _per_channel(w["bias"], y) if "bias" in w else y


@backward_of(BatchNorm1d, BatchNorm2d)
def batch_norm_back(layer: BatchNorm, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
    """As in inference: mean and var are constants without gradients."""
    (x,) = xs
    others = tuple(axis for axis in range(x.ndim) if axis != 1)
    dw = {"bias": dy.sum(axis=others)} if "bias" in w else {}
    if "weight" in w:
        dw["weight"] = (dy * _normalised(layer, x, w)).sum(axis=others)
        dy = dy * _per_channel(w["weight"], x)
    return (dy / np.sqrt(_per_channel(w["var"], x) + layer.eps),), dw


def _normalised(layer: BatchNorm, x: Array, w: Weights) -> Array:
    y: Array = (x - _per_channel(w["mean"], x)) / np.sqrt(_per_channel(w["var"], x) + layer.eps)
    return y


def _per_channel(values: Array, x: Array) -> Array:
    """(C,) as (C, 1, ...), to broadcast along axis 1 of x."""
    return values.reshape(-1, *(1,) * (x.ndim - 2))
