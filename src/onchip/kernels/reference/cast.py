"""Casts. The reference computes every float in one dtype, and what a Cast does depends on it.

In float64 it computes the exact function, so a Cast between floats is the identity. Any other dtype is the naive run
that an engine is compared with: a Cast rounds as the engine's does.
"""

from __future__ import annotations

import numpy as np

from onchip.kernels.reference.base import Arrays, Gradients, Weights, backward_of, forward_of
from onchip.network.layers import Cast, ToInts
from onchip.network.recipe import Array
from onchip.network.types import numpy_dtype


@forward_of(Cast)
def cast(layer: Cast, xs: Arrays, w: Weights) -> Array:
    (x,) = xs
    if x.dtype != np.float32:
        return x.astype(np.float64, copy=False)  # float64, or ints and bools: exact up to 2^53
    return x.astype(numpy_dtype(layer.dtype)).astype(np.float32)


@backward_of(Cast)
def cast_back(layer: Cast, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
    """A straight-through gradient, as if rounding were the identity. Ints and bools have none."""
    return (dy if xs[0].dtype.kind == "f" else None,), {}


@forward_of(ToInts)
def to_ints(layer: ToInts, xs: Arrays, w: Weights) -> Array:
    return xs[0].astype(numpy_dtype(layer.dtype))
