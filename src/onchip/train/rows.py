"""Rows and targets as users have them: NumPy arrays of any float type, torch tensors, data frames."""

from __future__ import annotations

from typing import Any

import numpy as np

from onchip.cache import say_unless_quiet
from onchip.network.recipe import Array
from onchip.network.types import numpy_dtype


def as_array(x: Any) -> Any:
    """A torch tensor or a data frame as a NumPy array; anything else as it is."""
    if isinstance(x, np.ndarray):
        return x
    if hasattr(x, "detach") and hasattr(x, "cpu"):
        return x.detach().cpu().numpy()
    return np.asarray(x.to_numpy()) if hasattr(x, "to_numpy") else x


def as_rows(x: Any, dtype: str, what: str = "rows") -> Any:
    """x as an array of this float type, if it is an array of another one, or a table of numbers; what is converted is
    said, once."""
    array, wanted = as_array(x), numpy_dtype(dtype)
    if not isinstance(array, np.ndarray) or array.dtype == wanted or "float" not in dtype:
        return array
    is_table = x is not array
    if array.dtype.kind != "f" and not (is_table and array.dtype.kind in "iub"):
        return array
    say_unless_quiet(f"fit: {what} in {array.dtype.name} are converted to {dtype}")
    with np.errstate(over="ignore"):  # infinities are found later, and said
        converted: Array = array.astype(wanted)
    return converted


def as_targets(y: Any, loss: str) -> Any:
    """y as an array: of float32 for a loss of numbers."""
    return as_array(y) if loss == "cross_entropy" else as_rows(y, "float32", "targets")
