"""Conversion of user data: NumPy arrays of any float type, torch tensors, data frames; one, or several by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onchip.cache import print_unless_quiet
from onchip.errors import InputError
from onchip.network.recipe import Array
from onchip.network.types import numpy_dtype

CHUNK = 1 << 20  # elements
Rows = Array | dict[str, Array]  # of the only input or output; or of several, by name


def by_name(arrays: Any, names: Sequence[str], what: str) -> dict[str, Any]:
    """A dict of arrays, or a tuple of them in the order of these names, or the array of the only name, by name.

    InputError for another number of arrays, or other names.

    what  the names, for the message: "input"
    """
    if len(names) == 1 and isinstance(arrays, np.ndarray):
        return {names[0]: arrays}
    if isinstance(arrays, Mapping):
        if arrays.keys() == set(names):
            return {name: arrays[name] for name in names}
        got = ", ".join(map(str, arrays)) or "none"
    elif len(names) == 1:
        return {names[0]: arrays}
    elif isinstance(arrays, tuple | list) and len(arrays) == len(names):
        return dict(zip(names, arrays, strict=True))
    else:
        got = f"{len(arrays)} arrays" if isinstance(arrays, tuple | list) else f"one {type(arrays).__name__}"
    raise InputError(
        f"the arrays do not fit the {what}s", got=got, expected=f"one for each {what}: {', '.join(names)}",
        hint=f"a dict, {{{', '.join(f'{name!r}: ...' for name in names)}}}" + ", or a tuple" * (len(names) > 1),
    )  # fmt: skip


def count_rows(rows: Rows) -> int:
    return len(next(iter(rows.values())) if isinstance(rows, dict) else rows)


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


def as_ids(x: Array, dtype: str, what: str, *, most: int | None = None) -> Array:
    """x as integers of this dtype; InputError for the first value that is none, or is beyond +-most."""
    least, limit = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    if most is not None:
        least, limit = max(least, -most), min(limit, most)
    is_id = (x >= least) & (x < limit + 1 if x.dtype.kind == "f" else x <= limit)  # a float cannot hold every limit
    if x.dtype.kind == "f":
        is_id &= x == np.floor(x)
    if not is_id.all():
        row, *position = np.argwhere(~is_id)[0].tolist()
        raise InputError(
            f"{what} are not ids", got=f"{x[(row, *position)]} in row {row}",
            expected=f"integers that {dtype} holds{'' if most is None else f', at most {most:,}'}",
            hint="ids as an array or a file of integers",
        )  # fmt: skip
    return x.astype(dtype, copy=False)


def _fits(array: Array, limits: np.iinfo[Any]) -> bool:
    return not array.size or bool(limits.min <= array.min() and array.max() <= limits.max)


def as_targets(y: Any, loss: str, dtype: str) -> Any:
    """Convert targets to an array, floats to this float type; not classes."""
    return as_array(y) if loss == "cross_entropy" else as_rows(y, dtype, "targets")


def check_finite(x: Array, what: str = "rows") -> None:
    """InputError that names the first row with a NaN or an infinity."""
    if "float" not in x.dtype.name:
        return
    with np.errstate(over="ignore", invalid="ignore"):
        total = x.sum(dtype=np.result_type(x.dtype, np.float32))  # NaN and infinity remain in a sum, which may overflow
    chunk = max(1, CHUNK // max(1, x[:1].size))
    for first in range(0, 0 if np.isfinite(total) else len(x), chunk):
        bad = np.argwhere(~np.isfinite(x[first : first + chunk]))
        if len(bad):
            row, *position = (int(i) for i in bad[0])
            where = f"row {first + row}" + (f", position {', '.join(map(str, position))}" if position else "")
            raise InputError(
                f"{what} are not finite", got=f"{x[(first + row, *position)]} in {where}", expected="finite values",
                hint="fill in or drop rows with missing values",
            )  # fmt: skip
