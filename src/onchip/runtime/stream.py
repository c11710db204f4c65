"""Rows through an engine, a piece at a time: a file larger than memory passes in bounded space."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from onchip.errors import InputError, ShapeError
from onchip.files import check_writable
from onchip.formats.arrays import FlatWriter, NpyWriter, RowSource, RowWriter, open_flat_rows, open_rows
from onchip.formats.images import BmpWriter, PngWriter, is_image
from onchip.formats.rows_text import TextWriter, read_rows_text
from onchip.plan.kernel import MAX_ROWS
from onchip.plan.plan import Plan
from onchip.runtime.engine import Engine
from onchip.spec.network import Network
from onchip.spec.reading import show
from onchip.spec.recipe import Array
from onchip.spec.types import TensorType, numpy_dtype

PIECE_BYTES = 8 << 20  # of input and output at a time: dwarfs the cost of a launch, and its memory is reused
GPU_PIECE_BYTES = 64 << 20  # on a GPU: some chunks of staging.py, so that copies and kernels overlap within a piece
BETWEEN_BYTES = 256 << 20  # of values between groups at a time
GPU_BETWEEN_PART = 8  # on a GPU: of its memory, since a piece is some chunks, each with work for the whole GPU
PIECE_US = 250_000  # by the plan's estimate at a time: progress is told and Ctrl-C heard a few times a second
LEAST_PIECE_ROWS = 64  # but weights are read once a piece: share them between some rows
LONG_ROWS, FIRST_PART = 1 << 16, 8  # a piece of so many rows takes a while to read: the first is such a part of it
FIRST_ROWS = 5  # of the results, kept for showing


class Source(Protocol):
    """Rows that are read when asked for: a file (spec.arrays.RowSource), RandomRows, FittedRows, or anything alike."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    def __len__(self) -> int: ...
    def read(self, start: int, stop: int) -> Array: ...


class Sink(Protocol):
    def write(self, rows: Array) -> None: ...


@dataclass(frozen=True, eq=False)
class StreamReport:
    rows: int
    seconds: float  # reading, running and writing together
    engine_seconds: float
    bad_rows: int  # rows of the input that hold a NaN or an infinity
    first_bad_row: int | None
    first_rows: Array  # the first few results

    @property
    def rows_per_s(self) -> float:
        return self.rows / self.seconds if self.rows else 0.0

    @property
    def engine_rows_per_s(self) -> float:
        return self.rows / self.engine_seconds if self.rows else 0.0


# -- what goes in ------------------------------------------------------------------------------------------


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


# -- what comes out ----------------------------------------------------------------------------------------


WRITERS: dict[str, type[RowWriter]] = {
    ".npy": NpyWriter, ".bin": FlatWriter, ".txt": TextWriter, ".bmp": BmpWriter, ".png": PngWriter,
}  # fmt: skip
PICTURES = (".bmp", ".png")
FOR_IMAGES = (".txt", *PICTURES)  # only for a network whose rows come out as images


def check_output_suffix(path: Path | None) -> None:
    """InputError for an output of an unknown format. It needs no network, so it can be said before all work."""
    if path is not None and path.suffix.lower() not in WRITERS:
        got = f"suffix '{path.suffix}'" if path.suffix else "no suffix"
        hint = f"-o {path.with_suffix('.npy')}" if path.name else "-o out.npy"
        expected = ", ".join(WRITERS)
        raise InputError(f"cannot write {path}: unknown format", got=got, expected=expected, hint=hint)


@contextlib.contextmanager
def open_output(path: Path | None, net: Network, rows: int) -> Iterator[Sink | None]:
    """The file for the results of `rows` rows; it appears when the block ends well. No path, no sink.

    Whatever can be known to stop the writing is raised now, not after the work.
    """
    if path is None:
        yield None
        return
    check_output_suffix(path)
    suffix = path.suffix.lower()
    if suffix in FOR_IMAGES and not is_image(net.output):
        others = ", ".join(kind for kind in WRITERS if kind not in FOR_IMAGES)
        raise InputError(
            f"cannot write {path}: '{net.name}' makes no images", got=f"rows {net.output}, format {suffix}",
            expected=f"rows (H, W, 3), (H, W, 1) or (H, W) for {suffix}, or one of {others}",
            hint=f"-o {path.with_suffix('.npy')}",
        )  # fmt: skip
    check_writable(path)
    with WRITERS[suffix](path, (rows, *net.output.row_shape), numpy_dtype(net.output.dtype)) as writer:
        yield writer


# -- between -----------------------------------------------------------------------------------------------


def piece_rows(plan: Plan) -> int:
    """How many rows make a piece when nobody says: few enough for memory and for a moving progress bar."""
    net, on_gpu, many = plan.network, plan.device.kind == "cuda", 1 << 20
    by_bytes = (GPU_PIECE_BYTES if on_gpu else PIECE_BYTES) // max(1, net.input.row_bytes + net.output.row_bytes)
    most_between = plan.device.memory_bytes // GPU_BETWEEN_PART if on_gpu else BETWEEN_BYTES
    by_between = most_between // max(1, plan.between_bytes)
    row_us = (plan.estimate_at(2 * many) - plan.estimate_at(many)) / many
    by_time = max(LEAST_PIECE_ROWS, int(PIECE_US / max(row_us, 1e-6)))
    return max(1, min(many, by_bytes, by_between, by_time))


def check_piece(batch_rows: int) -> None:
    if batch_rows < 1:
        hint = "--batch 65536, or no --batch"
        raise InputError("bad number of rows at a time", got=str(batch_rows), expected="at least 1", hint=hint)


def pieces(source: Source, batch_rows: int, ahead: bool) -> Iterator[tuple[int, Array, Array]]:
    """The rows a piece at a time: the number of its first row, the rows, and which of them hold a NaN or an infinity.

    ahead  while one piece is in use, a thread reads the next one; the first is short, since nobody works meanwhile
    """

    def read(start: int, stop: int) -> tuple[int, Array, Array]:
        x = source.read(start, stop)
        return start, x, rows_not_finite(x)

    first = batch_rows // FIRST_PART if ahead and batch_rows >= LONG_ROWS else batch_rows
    starts = [0, *range(first, len(source), batch_rows)] if len(source) else []
    ends = pairwise([*starts, len(source)])
    if not ahead:
        yield from itertools.starmap(read, ends)
        return
    with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="onchip-read") as reader:
        waiting: deque[concurrent.futures.Future[tuple[int, Array, Array]]] = deque()
        for start, stop in ends:
            waiting.append(reader.submit(read, start, stop))
            if len(waiting) > 1:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def run_rows(
    engine: Engine,
    source: Source,
    sink: Sink | None,
    batch_rows: int,
    on_progress: Callable[[int, float], None] | None = None,
) -> StreamReport:
    """Run every row of `source` and hand the results to `sink`, in order; one piece is in memory at a time,
    or two where the next one is read ahead.

    batch_rows   rows a piece; the results do not depend on it
    on_progress  called after each piece with the rows done and the rows/s so far
    """
    check_piece(batch_rows)
    total = len(source)
    out = np.empty((min(batch_rows, total), *engine.output.row_shape), numpy_dtype(engine.output.dtype))
    first_rows = out[:0].copy()
    bad_rows, first_bad_row, engine_seconds = 0, None, 0.0
    started = time.perf_counter()
    # On a CPU a thread that reads ahead gains nothing (tried): it takes a core from the engine.
    for start, x, bad in pieces(source, batch_rows, ahead=engine.plan.device.kind == "cuda"):
        stop = start + len(x)
        if bad.size and first_bad_row is None:
            first_bad_row = start + int(bad[0])
        bad_rows += bad.size
        begin = time.perf_counter()
        try:
            y = engine(x, out=out[: stop - start])
        except InputError:
            engine.check_ids(x, first_row=start)  # of its rows the engine knows no number but in this piece
            raise
        engine_seconds += time.perf_counter() - begin
        if len(first_rows) < FIRST_ROWS:
            first_rows = np.concatenate([first_rows, y[: FIRST_ROWS - len(first_rows)]])
        if sink is not None:
            sink.write(y)
        if on_progress is not None:
            on_progress(stop, stop / (time.perf_counter() - started))
    return StreamReport(total, time.perf_counter() - started, engine_seconds, bad_rows, first_bad_row, first_rows)


def warm_up(engine: Engine) -> None:
    """Run one row of zeros: afterwards every kernel is compiled and loaded."""
    engine(np.zeros((1, *engine.input.row_shape), numpy_dtype(engine.input.dtype)))
