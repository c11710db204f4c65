"""Rows as callers pass them: NumPy arrays, torch CPU tensors, nested lists and data frames, of any numeric dtype.

Nothing here imports torch or pandas: a caller with a tensor or a data frame has them loaded.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from onchip.cache import print_unless_quiet
from onchip.errors import InputError, ShapeError
from onchip.formats.tables.encoding import encode, raw_frame
from onchip.network.meaning import Meaning
from onchip.network.reading import show
from onchip.network.recipe import Array
from onchip.network.types import DTYPE_BYTES, TensorType, numpy_dtype

_NUMBER = (bool, int, float, np.bool_, np.number)


class HostRowsError(InputError):
    """An array of a kind that the device supports, but on the host: the engine's host path accepts it."""


def check_rows(x: Any, expected: TensorType) -> Array:
    """x as a contiguous array, if it holds rows of `expected`; else ShapeError."""
    if not isinstance(x, np.ndarray):
        raise ShapeError(
            "input is not an array", got=type(x).__name__, expected=f"NumPy {expected}", hint="np.asarray(x)"
        )
    _check_shape(x, expected)
    if x.dtype.newbyteorder("=") != numpy_dtype(expected.dtype):
        hint = f"x.astype(np.{expected.dtype})"
        raise ShapeError("input has the wrong dtype", got=x.dtype.name, expected=expected.dtype, hint=hint)
    return np.ascontiguousarray(x, numpy_dtype(expected.dtype))  # native byte order


def convert_rows(x: Any, name: str, expected: TensorType, net: str, meaning: Meaning) -> Array:
    """x, in any form and numeric dtype, as a contiguous array of `expected`; a dtype conversion is reported once.

    name     of the input, in messages; net: of its network
    meaning  of the network, if this is its only input: its names select a data frame's columns, if all exist, and its
             scale divides bytes

    ShapeError or InputError if values would be lost: floats for ints, or values beyond the dtype's range.
    """
    array = _as_array(x, name, meaning)
    _check_shape(array, expected)
    dtype, wanted = array.dtype.newbyteorder("="), numpy_dtype(expected.dtype)
    if dtype == wanted:
        return np.ascontiguousarray(array, wanted)
    converted = _converted(array, name, expected)
    divided = ""
    if dtype == np.uint8 and meaning.scale and "float" in expected.dtype:
        converted /= wanted.type(meaning.scale)
        divided = f" and divided by {meaning.scale:g}"
    if not isinstance(x, list | tuple):  # lists have no dtype
        print_unless_quiet(
            f"engine of {net}: input '{name}' is converted from {dtype.name} to {wanted.name}{divided} in every call"
        )
    return converted


def _check_shape(x: Array, expected: TensorType) -> None:
    if x.ndim != len(expected.shape) or x.shape[1:] != expected.row_shape:
        raise ShapeError(
            "input has the wrong shape", got=str(list(x.shape)), expected=str(expected), hint=_shape_hint(x, expected)
        )


def _shape_hint(x: Array, expected: TensorType) -> str:
    """How to reshape x into such rows without moving an element to another row; "" if that is impossible."""
    if x.shape == expected.row_shape:
        return "x[None]: a single row is a batch of one"
    if x.ndim and int(np.prod(x.shape[1:])) == expected.row_size:
        return f"x.reshape(len(x), {', '.join(map(str, expected.row_shape))})"
    return ""


# -- dtypes ------------------------------------------------------------------------------------------------------


def _converted(x: Array, name: str, expected: TensorType) -> Array:
    """x in the expected dtype, if that can hold its values; floats are rounded."""
    wanted = numpy_dtype(expected.dtype)
    is_float = _is_float(x.dtype)
    if not (is_float or x.dtype.kind in "iub") or (is_float and not _is_float(wanted)):
        hint = f"x.astype(np.{expected.dtype}), if all values are integers" if is_float else ""
        raise ShapeError(f"input '{name}' has the wrong dtype", got=x.dtype.name, expected=expected.dtype, hint=hint)
    with np.errstate(over="ignore", invalid="ignore"):
        converted = np.ascontiguousarray(x.astype(wanted))
    if _is_float(wanted):
        lost = ~np.isfinite(converted)
        if lost.any():  # rare, so x is only checked then
            lost &= np.isfinite(x)
    elif np.can_cast(x.dtype, wanted):
        return converted
    else:
        least, most = (0, 1) if wanted.kind == "b" else (int(np.iinfo(wanted).min), int(np.iinfo(wanted).max))
        lost = (x < least) | (x > most)
    if lost.any():
        row, *position = (int(i) for i in np.argwhere(lost)[0])
        where = f"row {row}" + (f", position {', '.join(map(str, position))}" if position else "")
        raise InputError(
            f"{where} of input '{name}' is out of range for {expected.dtype}",
            got=f"{x[(row, *position)]} in {x.dtype.name}", expected=f"values of {expected.dtype}",
            hint="rows in the range that the network was trained on",
        )  # fmt: skip
    return converted


def _is_float(dtype: np.dtype[Any]) -> bool:
    return dtype.kind == "f" or (dtype.name in DTYPE_BYTES and "float" in dtype.name)  # ml_dtypes' are of kind V


# -- forms -------------------------------------------------------------------------------------------------------


def _as_array(x: Any, name: str, meaning: Meaning) -> Array:
    if isinstance(x, np.ndarray):
        return x
    if is_tensor(x):
        return tensor_array(x, f"input '{name}'")
    if hasattr(x, "to_numpy"):
        return _table_array(x, name, meaning)
    if not isinstance(x, list | tuple):
        expected, hint = "an array, a torch CPU tensor, a list or a data frame", "np.asarray(x)"
        raise ShapeError(f"input '{name}' is not an array", got=type(x).__name__, expected=expected, hint=hint)
    try:
        return np.asarray(x)
    except (TypeError, ValueError) as error:  # variable-length rows
        got = str(error).split("\n")[0]
        raise ShapeError(f"input '{name}' is not an array", got=got, expected="rows of equal length") from None


def _table_array(x: Any, name: str, meaning: Meaning) -> Array:
    """A data frame or one of its columns, of pandas or a similar library."""
    names = list(getattr(x, "columns", ()))
    if meaning.table and {column.name for column in meaning.table} <= set(names):
        encoded = encode(raw_frame(x, meaning.table), meaning.table)
        for note in encoded.notes:
            print_unless_quiet(f"input '{name}': {note}", once=f"unknown texts of {name}")
        return encoded.x
    if meaning.columns and set(meaning.columns) <= set(names):
        names = list(meaning.columns)
        x = x[names]
    array = np.asarray(x.to_numpy())
    if array.dtype.kind in "iufb":
        return array
    columns = array.T if names else array[None]  # object dtype, where columns have different dtypes
    for column, values in zip(names or [getattr(x, "name", None)], columns, strict=True):
        odd = next((repr(value) for value in values if not isinstance(value, _NUMBER)), "")
        if odd or array.dtype.kind != "O":
            raise InputError(
                f"column {show(str(column))} of input '{name}' is not numeric", got=show(odd or array.dtype.name),
                expected="numeric columns without missing values", hint="select the columns that the network reads",
            )  # fmt: skip
    is_whole = all(isinstance(value, int | np.integer | np.bool_) for value in array.ravel())
    return array.astype(np.int64 if is_whole else np.float64)


# -- torch -------------------------------------------------------------------------------------------------------


def is_tensor(x: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def tensor_array(x: Any, what: str) -> Array:
    """The memory of a CPU tensor as an array; detached from its gradient."""
    torch: Any = sys.modules["torch"]
    if x.device.type != "cpu":
        got, hint = f"a tensor on {x.device}", "x.cpu()"
        raise InputError(f"{what} is not on the host", got=got, expected="a CPU tensor", hint=hint)
    dtype = str(x.dtype).removeprefix("torch.")
    try:
        x = x.detach()
        if dtype in DTYPE_BYTES and numpy_dtype(dtype).kind == "V":  # NumPy has no such type
            bits = x.view(torch.int16 if DTYPE_BYTES[dtype] == 2 else torch.uint8).numpy()
            array: Array = bits.view(numpy_dtype(dtype))
        else:
            array = x.numpy()
    except (TypeError, RuntimeError) as error:  # sparse, quantised, or a lazily computed view
        got = f"{dtype}: {str(error).splitlines()[0]}"
        raise InputError(
            f"{what} is not a dense tensor", got=got, expected="a dense CPU tensor", hint="x.numpy()"
        ) from None
    return array


def array_tensor(array: Array) -> Any:
    """A tensor that shares an array's memory."""
    torch: Any = sys.modules["torch"]
    if array.dtype.kind != "V":
        return torch.from_numpy(array)
    bits = array.view(np.int16 if array.dtype.itemsize == 2 else np.uint8)
    return torch.from_numpy(bits).view(getattr(torch, array.dtype.name))
