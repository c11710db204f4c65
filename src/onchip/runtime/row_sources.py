"""Rows that are read when asked for: of files, random ones, and both made to fit what a network reads."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from onchip.errors import InputError, ShapeError
from onchip.formats.arrays import RowSource, open_flat_rows, open_rows
from onchip.formats.rows_text import read_rows_text
from onchip.plan.kernel import MAX_ROWS
from onchip.spec.reading import show
from onchip.spec.recipe import Array
from onchip.spec.types import TensorType, numpy_dtype


class Source(Protocol):
    """Rows that are read when asked for: a file (spec.arrays.RowSource), RandomRows, FittedRows, or anything alike."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    def __len__(self) -> int: ...
    def read(self, start: int, stop: int) -> Array: ...


def open_input_rows(path: Path, expected: TensorType) -> RowSource:
    """The rows of a file. .txt is text and .bin bare numbers of the expected type; others say what they are."""
    suffix = path.suffix.lower()
    if suffix == ".bin":
        return open_flat_rows(path, expected.row_shape, numpy_dtype(expected.dtype))
    if suffix == ".txt":
        return RowSource(read_rows_text(path, expected.row_size), lambda: None)
    return open_rows(path)


class RandomRows:
    """Rows from a seed, drawn as they are read, which must be in order. With `rng = numpy.random.default_rng(seed)`:

    a float input is `rng.standard_normal((rows, ...), dtype=float32)`, ids are `rng.integers(0, V, (rows, ...))` of
    the input's dtype, V (`id_limit`) the rows of the table that they look into.
    """

    def __init__(self, given: TensorType, rows: int, seed: int, id_limit: int | None = None) -> None:
        if not 1 <= rows <= MAX_ROWS:
            expected = f"at least 1, at most {MAX_ROWS:,}"
            raise InputError("bad number of random rows", got=show(rows), expected=expected, hint="--count 64")
        if seed < 0:
            raise InputError("bad seed", got=str(seed), expected="at least 0", hint="--seed 0")
        self.shape, self.dtype = (rows, *given.row_shape), numpy_dtype(given.dtype)
        self._limit = id_limit
        if id_limit is None and "float" not in given.dtype:
            raise InputError(
                "cannot make random rows for this network", got=f"input {given}", expected="floats or token ids",
                hint="give a file of rows instead of --count",
            )  # fmt: skip
        self._rng = np.random.default_rng(seed)
        self._drawn = 0

    def __len__(self) -> int:
        return self.shape[0]

    def read(self, start: int, stop: int) -> Array:
        assert start == self._drawn, f"random rows are read in order: row {self._drawn} is next, not {start}"
        stop = min(stop, len(self))
        self._drawn = stop
        shape = (stop - start, *self.shape[1:])
        if self._limit is not None:
            return self._rng.integers(0, self._limit, shape, dtype=self.dtype)
        return self._rng.standard_normal(shape, dtype=np.float32).astype(self.dtype, copy=False)


class FittedRows:
    """A source whose rows are what the network reads; `notes` says what is done to them on the way.

    Rows of another shape but the same size are reshaped. Numbers are converted only if `scale` is given.
    """

    def __init__(self, source: Source, expected: TensorType, scale: float | None = None) -> None:
        row_shape = tuple(source.shape[1:])
        if math.prod(row_shape) != expected.row_size:
            got = str(list(source.shape))
            single = source.shape == (expected.row_size,)
            hint = "a single row is a batch of one: x.reshape(1, -1)" if single else "rows made for this network"
            raise ShapeError("the rows have another shape", got=got, expected=str(expected), hint=hint)
        self.shape = (source.shape[0], *expected.row_shape)
        self.dtype = numpy_dtype(expected.dtype)
        self.notes: tuple[str, ...] = ()
        self._source, self._scale = source, scale
        if row_shape != expected.row_shape:
            self.notes += (f"rows of {_sizes(row_shape)} are read as rows of {_sizes(expected.row_shape)}",)
        if scale is None:
            _check_dtype(source.dtype, expected.dtype)
        else:
            _check_scale(scale, expected.dtype)
            self.notes += (f"{source.dtype.name} is converted to {expected.dtype} and divided by {scale:g}",)

    def __len__(self) -> int:
        return self.shape[0]

    def read(self, start: int, stop: int) -> Array:
        rows = self._source.read(start, stop)
        if self._scale is not None:
            with np.errstate(over="ignore"):  # what is too large becomes an infinity, and those are counted and told
                rows = rows.astype(self.dtype) / self.dtype.type(self._scale)
        return rows.reshape(len(rows), *self.shape[1:])


def _sizes(row_shape: tuple[int, ...]) -> str:
    return "x".join(map(str, row_shape)) or "1"


def _check_dtype(got: np.dtype[Any], expected: str) -> None:
    if got == numpy_dtype(expected):
        return
    hint = f"numpy.save the rows as {expected}"
    if "float" in expected:
        hint = f"--scale 255 (convert to {expected} and divide by 255: pixels) or --scale 1 (only convert)"
    raise ShapeError("the rows have another dtype", got=got.name, expected=expected, hint=hint)


def _check_scale(scale: float, expected: str) -> None:
    if not (math.isfinite(scale) and scale != 0):
        raise InputError("bad scale", got=f"{scale:g}", expected="a number, not 0", hint="--scale 255 for pixels")
    if "float" not in expected:
        got = f"--scale {scale:g} for {expected} rows"
        hint = "leave --scale out"
        raise InputError("only float rows can be scaled", got=got, expected="no --scale for this network", hint=hint)


def rows_not_finite(x: Array) -> Array:
    """Numbers of the rows that hold a NaN or an infinity."""
    if x.dtype.kind in "iub" or np.isfinite(x).all():
        return np.empty(0, np.int64)
    return np.flatnonzero(~np.isfinite(x).reshape(len(x), -1).all(axis=1))
