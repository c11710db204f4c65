"""Batched gemms of two values."""

from __future__ import annotations

import numpy as np

from onchip.kernels.reference.base import Arrays, Gradients, Weights, backward_of, forward_of
from onchip.kernels.reference.combine import operands, unbroadcast
from onchip.network.layers import MatMul
from onchip.network.recipe import Array


@forward_of(MatMul)
def matmul(layer: MatMul, xs: Arrays, w: Weights) -> Array:
    a, b = operands(xs, w)
    y: Array = a @ b
    return y


@backward_of(MatMul)
def matmul_back(layer: MatMul, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
    a, b = operands(xs, w)
    da = unbroadcast(dy @ np.swapaxes(b, -1, -2), a.shape)
    db = unbroadcast(np.swapaxes(a, -1, -2) @ dy, b.shape)
    if "first" in w:
        return (db,), {"first": da}
    return ((da,), {"constant": db}) if w else ((da, db), {})
