"""Identity, reshape and permute."""

from __future__ import annotations

import math

import numpy as np

from onchip.kernels.reference.base import Arrays, Gradients, Weights, backward_of, forward_of
from onchip.network.layers import Dropout, Identity, Permute, Reshape
from onchip.network.recipe import Array


@forward_of(Identity, Dropout)
def identity(layer: Identity, xs: Arrays, w: Weights) -> Array:
    return xs[0]


@backward_of(Identity, Dropout)
def identity_back(layer: Identity, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
    return (dy,), {}


@forward_of(Reshape)
def reshape(layer: Reshape, xs: Arrays, w: Weights) -> Array:
    (x,) = xs
    known = math.prod(d for d in layer.row_shape if d != -1)
    left = math.prod(x.shape[1:]) // known if -1 in layer.row_shape else 0  # NumPy cannot infer it for 0 rows
    return x.reshape(x.shape[0], *(left if d == -1 else d for d in layer.row_shape))


@backward_of(Reshape)
def reshape_back(layer: Reshape, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
    return (dy.reshape(xs[0].shape),), {}


@forward_of(Permute)
def permute(layer: Permute, xs: Arrays, w: Weights) -> Array:
    return xs[0].transpose(layer.axes)


@backward_of(Permute)
def permute_back(layer: Permute, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
    return (dy.transpose(np.argsort(layer.axes)),), {}
