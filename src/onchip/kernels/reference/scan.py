"""Scans: prefix sums, products, maxima and minima."""

from __future__ import annotations

from typing import Any

import numpy as np

from onchip.network.recipe import Array
from onchip.network.scan_op import ScanOp

_UFUNCS: dict[str, Any] = {"sum": np.add, "max": np.maximum, "min": np.minimum, "product": np.multiply}
CHUNK = 1 << 16  # elements of a row that are in the widest dtype at a time


def scan(x: Array, how: ScanOp, dtype: str | None = None) -> Array:
    """An inclusive or exclusive scan along the last axis, sequentially. Ints keep their dtype; they wrap.

    dtype  floats are computed and returned in it. None: the reference, in float64; sums and products use the widest
           dtype of the machine, which on x86 has eleven more bits.
    """
    is_float = x.dtype.kind == "f"
    kind = np.dtype(dtype or "float64") if is_float else x.dtype
    carry_dtype = np.dtype(np.longdouble) if is_float and dtype is None else kind
    ufunc, N = _UFUNCS[how.op], x.shape[-1]
    x = x[..., ::-1] if how.reverse else x
    y = np.empty(x.shape, kind)
    carry = np.full(x.shape[:-1], how.identity(kind.name), carry_dtype)
    with np.errstate(all="ignore"):
        for first in range(0, N, CHUNK):
            chunk = x[..., first : first + CHUNK].astype(carry_dtype)
            chunk[..., 0] = ufunc(carry, chunk[..., 0])
            totals = ufunc.accumulate(chunk, axis=-1, dtype=carry_dtype)
            carry = totals[..., -1]
            y[..., first : first + CHUNK] = totals
    if how.exclusive and N:
        y[..., 1:] = y[..., :-1].copy()
        y[..., 0] = how.identity(kind.name)
    return y[..., ::-1] if how.reverse else y
