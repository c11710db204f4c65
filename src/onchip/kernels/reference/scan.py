"""Running sums."""

from __future__ import annotations

import dataclasses

import numpy as np

from onchip.kernels.reference.base import Arrays, Gradients, Weights, backward_of, forward_of
from onchip.spec.layers import CumSum
from onchip.spec.recipe import Array


@forward_of(CumSum)
def cum_sum(layer: CumSum, xs: Arrays, w: Weights) -> Array:
    x = np.moveaxis(xs[0], layer.axis, -1)
    if layer.reverse:
        x = x[..., ::-1]
    y: Array = np.cumsum(x, axis=-1, dtype=x.dtype)  # of ints in their own type: they wrap
    if layer.exclusive and y.shape[-1]:
        y = np.concatenate((np.zeros_like(y[..., :1]), y[..., :-1]), axis=-1)
    if layer.reverse:
        y = y[..., ::-1]
    return np.moveaxis(y, -1, layer.axis)


@backward_of(CumSum)
def cum_sum_back(layer: CumSum, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
    return (cum_sum(dataclasses.replace(layer, reverse=not layer.reverse), (dy,), w),), {}
