"""The number of elements in each window of an average pool; torch and JAX cover only some cases."""

from __future__ import annotations

import numpy as np

from onchip.network.layers import AvgPool1d, AvgPool2d
from onchip.network.layers.conv import geometry
from onchip.network.recipe import Array


def elements_per_window(layer: AvgPool1d | AvgPool2d, sizes: tuple[int, ...], counts: tuple[int, ...]) -> Array:
    """The divisor of each window's mean, including pads if they count: (counts..., float32)."""
    stride, pads, dilation = geometry(layer)
    total: Array = np.ones((), np.float32)
    for axis, (n, P) in enumerate(zip(sizes, counts, strict=True)):
        before, after = pads[axis], pads[len(sizes) + axis]
        taps = np.arange(P)[:, None] * stride[axis] + np.arange(layer.kernel[axis]) * dilation[axis] - before
        low, high = (-before, n + after) if layer.count_pads else (0, n)
        total = total[..., None] * ((taps >= low) & (taps < high)).sum(axis=1)
    return total.astype(np.float32)
