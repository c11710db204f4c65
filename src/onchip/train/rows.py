"""Conversion of user data: NumPy arrays of any float type, torch tensors, data frames."""

from __future__ import annotations

from typing import Any

import numpy as np

from onchip.cache import print_unless_quiet
from onchip.network.recipe import Array
from onchip.network.types import numpy_dtype


def as_array(x: Any) -> Any:
    """Convert a torch tensor or a data frame to a NumPy array; return anything else unchanged."""
    if isinstance(x, np.ndarray):
        return x
    if hasattr(x, "detach") and hasattr(x, "cpu"):
        return x.detach().cpu().numpy()
    return np.asarray(x.to_numpy()) if hasattr(x, "to_numpy") else x


def as_rows(x: Any, dtype: str, what: str = "rows") -> Any:
    """Convert other float types and numeric tables to an array of this float type, and other integers to this one, if
    it can hold them; log the conversion of floats once."""
    array, wanted = as_array(x), numpy_dtype(dtype)
    if not isinstance(array, np.ndarray) or array.dtype == wanted:
        return array
    if "float" not in dtype:
        fits = array.dtype.kind in "iu" and "int" in dtype and _fits(array, np.iinfo(wanted))
        return array.astype(wanted) if fits else array
    is_table = x is not array
    if array.dtype.kind != "f" and not (is_table and array.dtype.kind in "iub"):
        return array
    print_unless_quiet(f"fit: {what} in {array.dtype.name} are converted to {dtype}")
    with np.errstate(over="ignore"):  # infinities are reported later
        converted: Array = array.astype(wanted)
    return converted


def _fits(array: Array, limits: np.iinfo[Any]) -> bool:
    return not array.size or bool(limits.min <= array.min() and array.max() <= limits.max)


def as_targets(y: Any, loss: str) -> Any:
    """Convert targets to an array: float32 for regression losses."""
    return as_array(y) if loss == "cross_entropy" else as_rows(y, "float32", "targets")
