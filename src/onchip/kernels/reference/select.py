"""Layers that select elements of a row: Slice, Gather, Pad, Tile, NearestResize."""

from __future__ import annotations

import numpy as np

from onchip.kernels.reference.base import Arrays, Gradients, Weights, backward_of, forward_of
from onchip.network.layers import Gather, NearestResize, Pad, Selection, Slice, Tile
from onchip.network.recipe import Array

_KINDS = (Slice, Gather, Pad, Tile, NearestResize)


@forward_of(*_KINDS)
def select(layer: Selection, xs: Arrays, w: Weights) -> Array:
    (x,) = xs
    for axis, indices in enumerate(layer.source_indices(x.shape[1:]), start=1):
        if indices is not None:
            x = np.take(x, indices, axis)
            np.moveaxis(x, axis, 0)[indices < 0] = layer.fill
    return x


@backward_of(*_KINDS)
def select_back(layer: Selection, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
    """Sums the gradients of an element that was selected several times."""
    (x,) = xs
    for axis, indices in enumerate(layer.source_indices(x.shape[1:]), start=1):
        if indices is not None:
            moved = np.moveaxis(dy, axis, 0)
            dx = np.zeros((x.shape[axis], *moved.shape[1:]), dy.dtype)
            np.add.at(dx, indices[indices >= 0], moved[indices >= 0])
            dy = np.moveaxis(dx, 0, axis)
    return (dy,), {}
