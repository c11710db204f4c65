"""Tables in fp8, as both devices store them: e4m3 values, and per channel a peak, the value that LARGEST stands for.

An e4m3 has 4 significant bits: the relative error of a value is up to 1/16, that of a sum less. The peak is LARGEST
times a power of two, not below the channel's largest value. So a value rounds independently of the others in its table,
unless it is below a ten-thousandth of the largest.
"""

from __future__ import annotations

import numpy as np

from onchip.network.recipe import Array, Recipe, recipe_op
from onchip.network.types import numpy_dtype

FP8, LARGEST = "float8_e4m3fn", 448.0
LEAST = np.float32(1e-32)  # below this a channel is stored as zeros: LARGEST / peak could overflow
_CHUNK = 1024  # rows at a time: tables are large


def peaks_of(tables: str | Recipe, C: int) -> Recipe:
    """The peak of each channel of a table."""
    return Recipe.of(table_peaks, (tables,), (C,))


@recipe_op
def table_peaks(tables: Array) -> Array:
    """(V, K, C) -> (C): LARGEST times a power of two, the next one above a channel's largest finite magnitude."""
    peaks = np.zeros(tables.shape[2], np.float32)
    for v in range(0, len(tables), _CHUNK):
        sizes = np.abs(tables[v : v + _CHUNK].astype(np.float32))
        np.maximum(peaks, np.where(np.isfinite(sizes), sizes, 0).max(axis=(0, 1)), out=peaks)
    bits = (peaks / np.float32(LARGEST)).view(np.uint32)
    powers = ((bits + np.uint32(0x7FFFFF)) & np.uint32(0x7F800000)).view(np.float32)  # rounded up to a power of two
    with np.errstate(over="ignore"):
        rounded = powers * np.float32(LARGEST)
    return np.where((peaks > LEAST) & np.isfinite(rounded), rounded, peaks)


def in_fp8(tables: Array, peaks: Array) -> Array:
    """(V, K, C) as e4m3 values, each channel times LARGEST over its peak; NaN for what is not finite."""
    values = np.empty(tables.shape, numpy_dtype(FP8))
    with np.errstate(all="ignore"):
        factors = np.where(peaks > LEAST, np.float32(LARGEST) / peaks, np.float32(0))
        for v in range(0, len(tables), _CHUNK):
            values[v : v + _CHUNK] = (tables[v : v + _CHUNK].astype(np.float32) * factors).astype(values.dtype)
    return values


def scales(peaks: Array) -> Array:
    """The factor of each channel's values."""
    return peaks * np.float32(1 / LARGEST)
