"""Where the largest and the smallest numbers stand; steps, which have no slope."""

from __future__ import annotations

import numpy as np

from onchip.kernels.reference.base import Arrays, Weights, forward_of
from onchip.spec.layers import ArgMax, ArgMin
from onchip.spec.recipe import Array


@forward_of(ArgMax, ArgMin)
def argument(layer: ArgMax | ArgMin, xs: Arrays, w: Weights) -> Array:
    (x,) = xs
    find = np.argmax if isinstance(layer, ArgMax) else np.argmin  # a NaN is found before all numbers
    if not layer.last:
        return np.asarray(find(x, axis=layer.axis, keepdims=layer.keep), np.int64)
    places = x.shape[layer.axis] - 1 - find(np.flip(x, layer.axis), axis=layer.axis, keepdims=layer.keep)
    return np.asarray(places, np.int64)
