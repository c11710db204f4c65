"""Windows over the axes after the channels, tap by tap: a tap is one position of the kernel.

The elements that a tap reads over all windows are one strided slice of the padded input. Pads are as in the layers:
before each axis, then after each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from onchip.network.recipe import Array

Sizes = Sequence[int]
Slices = tuple[slice, ...]


def pad(x: Array, pads: Sizes, value: float) -> Array:
    rank = len(pads) // 2
    return np.pad(x, ((0, 0), (0, 0), *zip(pads[:rank], pads[rank:], strict=True)), constant_values=value)


def taps(kernel: Sizes, counts: Sizes, stride: Sizes, dilation: Sizes) -> Iterator[Slices]:
    """The slice of each tap in a padded input (B, C, ...), for `counts` windows per axis; the last axis is fastest."""
    for tap in np.ndindex(*kernel):
        axes = zip(tap, counts, stride, dilation, strict=True)
        yield (slice(None), slice(None), *(slice(k * d, k * d + (n - 1) * s + 1, s) for k, n, s, d in axes))


def unfold(x: Array, kernel: Sizes, counts: Sizes, stride: Sizes, pads: Sizes, dilation: Sizes) -> Array:
    """im2col: the windows of x (B, C, sizes...), zero-padded: (B, C, taps, counts...)."""
    padded = pad(x, pads, 0)
    return np.stack([padded[slices] for slices in taps(kernel, counts, stride, dilation)], axis=2)


def fold(columns: Array, kernel: Sizes, sizes: Sizes, stride: Sizes, pads: Sizes, dilation: Sizes) -> Array:
    """col2im: windows (B, C, taps, counts...) summed at their positions: (B, C, sizes...), without the padding."""
    before, after = pads[: len(sizes)], pads[len(sizes) :]
    padded_sizes = [b + n + a for b, n, a in zip(before, sizes, after, strict=True)]
    padded = np.zeros((*columns.shape[:2], *padded_sizes), columns.dtype)
    for tap, slices in enumerate(taps(kernel, columns.shape[3:], stride, dilation)):
        padded[slices] += columns[:, :, tap]
    whole = (slice(None), slice(None))
    return padded[(*whole, *(slice(b, b + n) for b, n in zip(before, sizes, strict=True)))]
