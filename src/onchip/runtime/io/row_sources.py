"""Rows that are read on demand: from files or a random generator, converted to a network's input type."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from onchip.errors import InputError, ShapeError
from onchip.formats.arrays.npz import open_npz
from onchip.formats.arrays.row_files import RowSource, open_flat_rows, open_rows
from onchip.formats.tables.rows_text import read_rows_text
from onchip.formats.tables.table_files import is_table
from onchip.network.graph import Network
from onchip.network.layers import SequenceMax
from onchip.network.meaning import Meaning
from onchip.network.names import did_you_mean
from onchip.network.reading import show
from onchip.network.recipe import Array
from onchip.network.types import TensorType, numpy_dtype
from onchip.plan.kernel import MAX_ROWS
from onchip.runtime.engine import id_limits
from onchip.runtime.io.table_rows import TableRows, open_table

SKIPPED_ELEMENTS = 1 << 20  # drawn at a time to skip random rows


class Source(Protocol):
    """Rows that are read on demand: a RowSource of formats/arrays, RandomRows, FittedRows, or similar."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    def __len__(self) -> int: ...
    def read(self, start: int, stop: int) -> Array: ...


def open_input_rows(
    path: Path,
    expected: TensorType,
    name: str = "",
    meaning: Meaning = Meaning(),  # noqa: B008 - frozen
) -> RowSource | TableRows:
    """The rows of a file. .txt is text and .bin raw values of the expected type; other formats have a header.

    path     a file, or several tables (see table_files)
    name     of the array in an .npz with several
    meaning  of the network: its columns
    """
    suffix = path.suffix.lower()
    if is_table(str(path)):
        return open_table(str(path), expected, meaning)
    if suffix == ".npz":
        return open_npz(path, name)
    if suffix == ".bin":
        return open_flat_rows(path, expected.row_shape, numpy_dtype(expected.dtype))
    if suffix == ".txt":
        return RowSource(read_rows_text(path, expected.row_size), lambda: None)
    return open_rows(path)


class RandomRows:
    """Random rows of a seed, drawn when read. Reads must be in order; skipped rows are drawn too.

    With `rng = numpy.random.default_rng(seed)`, floats are `rng.standard_normal((rows, ...), dtype=float32)` and ids
    are `rng.integers(0, id_limit, (rows, ...))` in the input's dtype.
    """

    def __init__(self, row_type: TensorType, rows: int, seed: int, id_limit: int | None = None) -> None:
        if not 1 <= rows <= MAX_ROWS:
            expected = f"at least 1, at most {MAX_ROWS:,}"
            raise InputError("bad number of random rows", got=show(rows), expected=expected, hint="--count 64")
        if seed < 0:
            raise InputError("bad seed", got=str(seed), expected="at least 0", hint="--seed 0")
        self.shape, self.dtype = (rows, *row_type.row_shape), numpy_dtype(row_type.dtype)
        self._requested = row_type, rows, seed, id_limit
        self._limit = id_limit
        if id_limit is None and "float" not in row_type.dtype:
            raise InputError(
                "cannot generate random rows for this network", got=f"input {row_type}", expected="floats or token ids",
                hint="pass a file of rows instead of --count",
            )  # fmt: skip
        self._rng = np.random.default_rng(seed)
        self._drawn = 0

    def __len__(self) -> int:
        return self.shape[0]

    def read(self, start: int, stop: int) -> Array:
        assert start >= self._drawn, f"random rows are read in order: row {self._drawn} is next, not {start}"
        step = max(1, SKIPPED_ELEMENTS // max(1, math.prod(self.shape[1:])))
        while self._drawn < start:
            self._draw(min(start, self._drawn + step))
        return self._draw(min(stop, len(self)))

    def _draw(self, stop: int) -> Array:
        shape = (stop - self._drawn, *self.shape[1:])
        self._drawn = stop
        if self._limit is not None:
            return self._rng.integers(0, self._limit, shape, dtype=self.dtype)
        return self._rng.standard_normal(shape, dtype=np.float32).astype(self.dtype, copy=False)

    def __reduce__(self) -> tuple[object, ...]:
        return RandomRows, self._requested  # restarts at the first row


class WalkRows:
    """Rows on a closed walk from each random row to the next: between neighbours a and b, cos(t) a + sin(t) b, which
    are as random as those.
    """

    def __init__(self, row_type: TensorType, points: int, frames: int, seed: int) -> None:
        """points  random rows, as of RandomRows
        frames  rows from each of them to the next
        """
        if frames < 1:
            raise InputError("bad number of frames", got=show(frames), expected="at least 1", hint="--walk 12")
        if "float" not in row_type.dtype:
            expected = "an input of floats, such as the generator's"
            raise InputError("cannot walk between ids", got=f"input {row_type}", expected=expected, hint="omit --walk")
        source = RandomRows(row_type, points, seed)
        self._points, self._frames = source.read(0, points), frames
        self.shape, self.dtype = (points * frames, *row_type.row_shape), source.dtype

    def __len__(self) -> int:
        return self.shape[0]

    def read(self, start: int, stop: int) -> Array:
        point, frame = np.divmod(np.arange(start, min(stop, len(self))), self._frames)
        t = (frame / self._frames * (np.pi / 2)).reshape(-1, *(1,) * (len(self.shape) - 1))
        following = self._points[(point + 1) % len(self._points)]
        rows: Array = np.cos(t) * self._points[point] + np.sin(t) * following
        return rows.astype(self.dtype)


class FittedRows:
    """A source converted to the network's input type; `notes` lists the conversions.

    Rows of the same size but a different shape are reshaped. Values are converted only if `scale` is given.
    """

    def __init__(self, source: Source, expected: TensorType, scale: float | None = None) -> None:
        row_shape = tuple(source.shape[1:])
        if math.prod(row_shape) != expected.row_size:
            got = str(list(source.shape))
            single = source.shape == (expected.row_size,)
            hint = "a single row is a batch of one: x.reshape(1, -1)" if single else "rows shaped like the input"
            raise ShapeError("the rows have the wrong shape", got=got, expected=str(expected), hint=hint)
        self.shape = (source.shape[0], *expected.row_shape)
        self.dtype = numpy_dtype(expected.dtype)
        self.notes: tuple[str, ...] = ()
        self.parts: tuple[tuple[str, int], ...] = getattr(source, "parts", ())  # of tables: their names and rows
        self._source, self._scale = source, scale
        if _sizes(row_shape) != _sizes(expected.row_shape):
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
            with np.errstate(over="ignore"):  # overflow becomes infinity; such rows are counted and reported
                rows = rows.astype(self.dtype) / self.dtype.type(self._scale)
        return rows.reshape(len(rows), *self.shape[1:])


class LengthRows(FittedRows):
    """Lengths of sequences. Kernels treat a negative one as 0; in a file it is an error."""

    def read(self, start: int, stop: int) -> Array:
        rows = super().read(start, stop)
        if (bad := np.flatnonzero(rows < 0)).size:
            what, hint = f"row {start + int(bad[0])}: a negative length", "the lengths of these sequences"
            raise InputError(what, got=str(rows[bad[0]]), expected="0 or more", hint=hint)
        return rows


def _sizes(row_shape: tuple[int, ...]) -> str:
    return "x".join(map(str, row_shape)) or "1"


def _check_dtype(got: np.dtype[Any], expected: str) -> None:
    if got == numpy_dtype(expected):
        return
    hint = f"numpy.save the rows as {expected}"
    if "float" in expected:
        hint = f"--scale 255 (convert to {expected} and divide by 255: pixels) or --scale 1 (only convert)"
    raise ShapeError("the rows have the wrong dtype", got=got.name, expected=expected, hint=hint)


def _check_scale(scale: float, expected: str) -> None:
    if not (math.isfinite(scale) and scale != 0):
        raise InputError("bad scale", got=f"{scale:g}", expected="finite, not 0", hint="--scale 255 for pixels")
    if "float" not in expected:
        got = f"--scale {scale:g} for {expected} rows"
        hint = "omit --scale"
        raise InputError("only float rows can be scaled", got=got, expected="no --scale for this network", hint=hint)


def rows_not_finite(x: Array) -> Array:
    """Indices of the rows that hold a NaN or an infinity."""
    if x.dtype.kind in "iub" or np.isfinite(x).all():
        return np.empty(0, np.int64)
    return np.flatnonzero(~np.isfinite(x).reshape(len(x), -1).all(axis=1))


# -- all inputs --------------------------------------------------------------------------------------------


def input_files(net: Network, first: Path | None, named: Mapping[str, Path], counted: Sequence[str]) -> dict[str, Path]:
    """The file of every input: `first` for the first one, `named` for others, none for lengths in `counted`."""
    names = list(net.inputs)
    for name in named:
        if name not in names:
            got, hint = f"{name}={named[name]}", did_you_mean(name, names) or f"--input {names[-1]}={named[name]}"
            raise InputError(f"'{net.name}' has no such input", got=got, expected=", ".join(names), hint=hint)
    files = {**({names[0]: first} if first is not None else {}), **named}
    for name, other in ((names[0], str(first) if first is not None else ""), *((n, "--padding") for n in counted)):
        if name in named and other:
            got = f"{other} and --input {name}={named[name]}"
            hint = "omit one of them"
            raise InputError(f"two sources for the input '{name}'", got=got, expected="one", hint=hint)
    if missing := [name for name in names if name not in files and name not in counted]:
        expected = "a file for each of " + ", ".join(f"{name}: {t}" for name, t in net.inputs.items())
        hint = f"--input {missing[0]}={missing[0]}.npy"
        raise InputError(f"no rows for the input '{missing[0]}'", got=show(sorted(files)), expected=expected, hint=hint)
    return {name: files[name] for name in names if name not in counted}


@contextlib.contextmanager
def open_inputs(
    net: Network, files: Mapping[str, Path], scale: float | None = None, padding: int | None = None
) -> Iterator[tuple[FittedRows, ...]]:
    """The rows of every input, in the network's order; float inputs are scaled (see FittedRows).

    padding  the id that pads rows of ids at their end: count the lengths from it
    """
    has_floats = any("float" in net.inputs[name].dtype for name in files)
    with contextlib.ExitStack() as stack:
        opened: dict[str, FittedRows] = {}
        for name, path in files.items():
            row_type = net.inputs[name]
            meaning = net.meaning if len(net.inputs) == 1 else Meaning()
            source = open_input_rows(path, row_type, name, meaning)
            stack.callback(source.close)
            divisor = scale
            if scale is None and net.meaning.scale and source.dtype == np.uint8:  # as in training
                divisor = net.meaning.scale
            fit = LengthRows if name in length_limits(net) else FittedRows
            opened[name] = fit(source, row_type, divisor if "float" in row_type.dtype or not has_floats else None)
        if padding is not None:
            ids, lengths = padded_inputs(net)
            opened[lengths] = FittedRows(CountedLengths(opened[ids], padding, net.inputs[lengths]), net.inputs[lengths])
        counts = {name: len(opened[name]) for name in net.inputs}
        if len(set(counts.values())) > 1:
            got = ", ".join(f"{name}: {count:,} rows" for name, count in counts.items())
            hint = "files of equal length"
            raise ShapeError("the inputs have different numbers of rows", got=got, expected="equal numbers", hint=hint)
        yield tuple(opened[name] for name in net.inputs)


def random_inputs(net: Network, rows: int, seed: int) -> tuple[RandomRows, ...]:
    """Random rows of every input; input i, counted from 0, uses seed + i."""
    limits = {**length_limits(net), **id_limits(net)}
    return tuple(
        RandomRows(row_type, rows, seed + i, limits.get(name)) for i, (name, row_type) in enumerate(net.inputs.items())
    )


def length_limits(net: Network) -> dict[str, int]:
    """For each input that holds sequence lengths: one more than the longest that affects the result."""
    limits: dict[str, int] = {}
    for node in net.nodes:
        if isinstance(node.layer, SequenceMax) and node.inputs[1] in net.inputs:
            P = int(net.types[node.inputs[0]].shape[2])
            longest = (P - 1) * node.layer.stride + node.layer.window
            limits[node.inputs[1]] = max(longest + 1, limits.get(node.inputs[1], 0))
    return limits


def padded_inputs(net: Network) -> tuple[str, str]:
    """The input of ids (B, S) and the input of their lengths; InputError unless there is exactly one of each."""
    ids, lengths = (sorted(limits(net)) for limits in (id_limits, length_limits))
    if len(ids) != 1 or len(lengths) != 1 or len(net.inputs[ids[0]].row_shape) != 1:
        got = ", ".join(f"{name}: {t}" for name, t in net.inputs.items())
        expected = "a network that reads ids (B, S) and their lengths (B,)"
        raise InputError("no lengths to count from padding", got=got, expected=expected, hint="omit --padding")
    return ids[0], lengths[0]


class CountedLengths:
    """Ids per row before the padding at its end."""

    def __init__(self, ids: Source, padding: int, expected: TensorType) -> None:
        self.shape, self.dtype = (len(ids),), numpy_dtype(expected.dtype)
        self._ids, self._padding = ids, padding

    def __len__(self) -> int:
        return self.shape[0]

    def read(self, start: int, stop: int) -> Array:
        """(stop - start,); reads the ids a second time, which is cheap for a file."""
        is_token = self._ids.read(start, stop) != self._padding
        last = is_token[:, ::-1].argmax(axis=1) if is_token.shape[1] else 0
        counted: Array = np.where(is_token.any(axis=1), is_token.shape[1] - last, 0).astype(self.dtype)
        return counted
