"""LinearResize: interpolation axis by axis. (NearestResize is a selection: select.py.)"""

from __future__ import annotations

import numpy as np

from onchip.kernels.reference.base import Arrays, Gradients, Weights, backward_of, forward_of
from onchip.network.layers import LinearResize
from onchip.network.recipe import Array


@forward_of(LinearResize)
def linear_resize(layer: LinearResize, xs: Arrays, w: Weights) -> Array:
    (x,) = xs
    for axis, taps in enumerate(layer.taps(x.shape[1:]), start=1):
        if taps is not None:
            share = _broadcastable(taps.share, x, axis)
            x = np.take(x, taps.low, axis) * (1 - share) + np.take(x, taps.high, axis) * share
    return x


@backward_of(LinearResize)
def linear_resize_back(layer: LinearResize, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
    for axis, taps in enumerate(layer.taps(xs[0].shape[1:]), start=1):
        if taps is not None:
            share, moved = _broadcastable(taps.share, dy, 0), np.moveaxis(dy, axis, 0)
            dx = np.zeros((xs[0].shape[axis], *moved.shape[1:]), dy.dtype)
            np.add.at(dx, taps.low, moved * (1 - share))
            np.add.at(dx, taps.high, moved * share)
            dy = np.moveaxis(dx, 0, axis)
    return (dy,), {}


def _broadcastable(values: Array, x: Array, axis: int) -> Array:
    """Values of an axis in the dtype of x, shaped to broadcast along that axis."""
    return values.astype(x.dtype).reshape(-1, *(1,) * (x.ndim - 1 - axis))
