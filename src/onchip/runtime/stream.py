"""Rows through an engine, a piece at a time: a file larger than memory passes in bounded space."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import numpy as np

from onchip.errors import InputError
from onchip.files import check_writable
from onchip.formats.arrays import FlatWriter, NpyWriter, RowWriter
from onchip.formats.csv_writer import CsvWriter
from onchip.formats.images import BmpWriter, PngWriter, is_image
from onchip.formats.rows_text import TextWriter
from onchip.plan.plan import Plan
from onchip.runtime.engine import Engine
from onchip.runtime.row_sources import Source, rows_not_finite
from onchip.spec.network import Network
from onchip.spec.recipe import Array
from onchip.spec.types import numpy_dtype

PIECE_BYTES = 8 << 20  # of input and output at a time: dwarfs the cost of a launch, and its memory is reused
GPU_PIECE_BYTES = 64 << 20  # on a GPU: some chunks of staging.py, so that copies and kernels overlap within a piece
BETWEEN_BYTES = 256 << 20  # of values between groups at a time
GPU_BETWEEN_PART = 8  # on a GPU: of its memory, since a piece is some chunks, each with work for the whole GPU
PIECE_US = 250_000  # by the plan's estimate at a time: progress is told and Ctrl-C heard a few times a second
LEAST_PIECE_ROWS = 64  # but weights are read once a piece: share them between some rows
LONG_ROWS, FIRST_PART = 1 << 16, 8  # a piece of so many rows takes a while to read: the first is such a part of it
FIRST_ROWS = 5  # of the results, kept for showing


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


# -- what comes out ----------------------------------------------------------------------------------------


WRITERS: dict[str, type[RowWriter]] = {
    ".npy": NpyWriter, ".bin": FlatWriter, ".csv": CsvWriter, ".txt": TextWriter, ".bmp": BmpWriter, ".png": PngWriter,
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
def open_output(path: Path | None, net: Network, rows: int, top: int | None = None) -> Iterator[Sink | None]:
    """The file for the results of `rows` rows; it appears when the block ends well. No path, no sink.

    Whatever can be known to stop the writing is raised now, not after the work.

    top  how many classes of a row are written into a .csv, where the network knows their names
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
    make: Callable[..., RowWriter] = WRITERS[suffix]
    if suffix == ".csv":
        make = functools.partial(CsvWriter, classes=net.meaning.classes, top=top or 1)
    with make(path, (rows, *net.output.row_shape), numpy_dtype(net.output.dtype)) as writer:
        yield writer


# -- between -----------------------------------------------------------------------------------------------


def piece_rows(plan: Plan) -> int:
    """How many rows make a piece when nobody says: few enough for memory and for a moving progress bar."""
    net, on_gpu, many = plan.network, plan.device.kind == "cuda", 1 << 20
    row_bytes = sum(given.row_bytes for given in (*net.inputs.values(), net.output))
    by_bytes = (GPU_PIECE_BYTES if on_gpu else PIECE_BYTES) // max(1, row_bytes)
    most_between = plan.device.memory_bytes // GPU_BETWEEN_PART if on_gpu else BETWEEN_BYTES
    by_between = most_between // max(1, plan.between_bytes)
    row_us = (plan.estimate_at(2 * many) - plan.estimate_at(many)) / many
    by_time = max(LEAST_PIECE_ROWS, int(PIECE_US / max(row_us, 1e-6)))
    return max(1, min(many, by_bytes, by_between, by_time))


def check_piece(batch_rows: int) -> None:
    if batch_rows < 1:
        hint = "--batch 65536, or no --batch"
        raise InputError("bad number of rows at a time", got=str(batch_rows), expected="at least 1", hint=hint)


def pieces(sources: Sequence[Source], batch_rows: int, ahead: bool) -> Iterator[tuple[int, tuple[Array, ...], Array]]:
    """The rows a piece at a time: the number of its first row, the rows of every input, and which of them hold a NaN
    or an infinity.

    ahead  while one piece is in use, a thread reads the next one; the first is short, since nobody works meanwhile
    """

    def read(start: int, stop: int) -> tuple[int, tuple[Array, ...], Array]:
        xs = tuple(source.read(start, stop) for source in sources)
        bad = [rows_not_finite(x) for x in xs]
        return start, xs, bad[0] if len(bad) == 1 else np.unique(np.concatenate(bad))

    total = len(sources[0])
    first = batch_rows // FIRST_PART if ahead and batch_rows >= LONG_ROWS else batch_rows
    starts = [0, *range(first, total, batch_rows)] if total else []
    ends = pairwise([*starts, total])
    if not ahead:
        yield from itertools.starmap(read, ends)
        return
    with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="onchip-read") as reader:
        waiting: deque[concurrent.futures.Future[tuple[int, tuple[Array, ...], Array]]] = deque()
        for start, stop in ends:
            waiting.append(reader.submit(read, start, stop))
            if len(waiting) > 1:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def run_rows(
    engine: Engine,
    sources: Sequence[Source],
    sink: Sink | None,
    batch_rows: int,
    on_progress: Callable[[int, float], None] | None = None,
) -> StreamReport:
    """Run every row of `sources`, one for each input, and hand the results to `sink`, in order; one piece is in memory
    at a time, or two where the next one is read ahead.

    batch_rows   rows a piece; the results do not depend on it
    on_progress  called after each piece with the rows done and the rows/s so far
    """
    check_piece(batch_rows)
    total = len(sources[0])
    out = np.empty((min(batch_rows, total), *engine.output.row_shape), numpy_dtype(engine.output.dtype))
    first_rows = out[:0].copy()
    bad_rows, first_bad_row, engine_seconds = 0, None, 0.0
    started = time.perf_counter()
    # On a CPU a thread that reads ahead gains nothing (tried): it takes a core from the engine.
    for start, xs, bad in pieces(sources, batch_rows, ahead=engine.plan.device.kind == "cuda"):
        stop = start + len(xs[0])
        if bad.size and first_bad_row is None:
            first_bad_row = start + int(bad[0])
        bad_rows += bad.size
        begin = time.perf_counter()
        try:
            y = engine(*xs, out=out[: stop - start])
        except InputError:
            engine.check_ids(*xs, first_row=start)  # of its rows the engine knows no number but in this piece
            raise
        engine_seconds += time.perf_counter() - begin
        if len(first_rows) < FIRST_ROWS:
            first_rows = np.concatenate([first_rows, y[: FIRST_ROWS - len(first_rows)]])
        if sink is not None:
            sink.write(y)
        if on_progress is not None:
            on_progress(stop, stop / (time.perf_counter() - started))
    return StreamReport(total, time.perf_counter() - started, engine_seconds, bad_rows, first_bad_row, first_rows)
