"""Stream rows through an engine in chunks: a file larger than memory needs bounded memory."""

from __future__ import annotations

import concurrent.futures
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, TypeVar

import numpy as np

from onchip.errors import InputError
from onchip.network.recipe import Array
from onchip.network.types import numpy_dtype
from onchip.plan.plan import Plan
from onchip.runtime.engine import Engine
from onchip.runtime.io.packed import pack, stored_type
from onchip.runtime.io.row_sources import Source, rows_not_finite

CHUNK_BYTES = 8 << 20  # of input and output at a time: dwarfs the cost of a launch, and its memory is reused
GPU_CHUNK_BYTES = 64 << 20  # on a GPU: several chunks of staging.py, so that copies and kernels overlap within one
BETWEEN_BYTES = 256 << 20  # of values between groups at a time
GPU_BETWEEN_PART = 8  # on a GPU: a fraction of its memory
CHUNK_US = 250_000  # by the plan's estimate at a time: progress and Ctrl-C are handled a few times per second
MIN_CHUNK_ROWS = 64  # weights are read once per chunk: amortise them over some rows
MESSAGE_US = 500  # per chunk, with several workers: to write, report and record it
LONG_ROWS, FIRST_PART = 1 << 16, 8  # reading a chunk this long takes a while: the first one is a fraction of it


class Readable(Protocol):
    def read(self, start: int, stop: int) -> Array: ...


class Sink(Protocol):
    def write(self, rows: Array) -> None: ...


def chunk_rows(plan: Plan) -> int:
    """The default rows per chunk: few enough for memory and for a moving progress bar."""
    net, on_gpu, many = plan.network, plan.device.kind == "cuda", 1 << 20
    row_bytes = sum(t.row_bytes for t in (*net.inputs.values(), *map(net.types.__getitem__, net.outputs)))
    by_bytes = (GPU_CHUNK_BYTES if on_gpu else CHUNK_BYTES) // max(1, row_bytes)
    max_between = plan.device.memory_bytes // GPU_BETWEEN_PART if on_gpu else BETWEEN_BYTES
    by_between = max_between // max(1, plan.between_bytes)
    row_us = (plan.estimate_at(2 * many) - plan.estimate_at(many)) / many
    by_time = max(MIN_CHUNK_ROWS, int(CHUNK_US / max(row_us, 1e-6)))
    return max(1, min(many, by_bytes, by_between, by_time))


def check_chunk(batch_rows: int) -> None:
    if batch_rows < 1:
        hint = "--batch 65536, or no --batch"
        raise InputError("bad number of rows per chunk", got=str(batch_rows), expected="at least 1", hint=hint)


def cut_rows(total: int, batch_rows: int, ahead: bool) -> tuple[int, ...]:
    """The first rows of chunks of `batch_rows` rows.

    ahead  the next chunk is read while one runs: the first is short, since nothing runs while it is read
    """
    check_chunk(batch_rows)
    first = batch_rows // FIRST_PART if ahead and batch_rows >= LONG_ROWS else batch_rows
    return (0, *range(first, total, batch_rows)) if total else ()


def share_rows(plan: Plan, total: int, most: int, workers: int) -> tuple[int, ...]:
    """First rows of chunks of at most `most` rows for several workers: the last are short, so that all end together."""
    least = _min_rows(plan, max(1, min(most, total // (2 * workers))))
    cuts, start = [], 0
    while start < total:
        cuts.append(start)
        start += min(most, max(least, math.ceil((total - start) / (2 * workers))))
    return tuple(cuts)


def _min_rows(plan: Plan, most: int) -> int:
    """The shortest chunk: idle workers wait for half of one at the end, but short chunks cost more per row."""

    def row_us(rows: int) -> float:
        return (plan.estimate_at(rows) + MESSAGE_US) / rows

    sizes = [most >> i for i in range(most.bit_length())]
    return min(sizes, key=lambda rows: plan.estimate_at(rows) / 2 + (row_us(rows) - row_us(most)) * most)


@dataclass(frozen=True)
class Chunk:
    """Rows start .. stop - 1 of a job: the unit that is run, written and, with several workers, scheduled."""

    number: int
    start: int
    stop: int


def chunks_of(cuts: Sequence[int], total: int) -> list[Chunk]:
    return [Chunk(i, start, stop) for i, (start, stop) in enumerate(pairwise([*cuts, total]))]


def read_chunks(
    sources: Sequence[Readable], chunks: Iterable[Chunk | None], ahead: bool
) -> Iterator[tuple[Chunk, tuple[Array, ...], Array] | None]:
    """The rows of every input, chunk by chunk, and the indices of those that hold a NaN or an infinity.

    chunks  may hold None: no further chunk yet; then yield what was read, or None if there is nothing
    ahead   a thread reads the next chunk while one is in use
    """

    def read(chunk: Chunk) -> tuple[Chunk, tuple[Array, ...], Array]:
        xs = tuple(source.read(chunk.start, chunk.stop) for source in sources)
        bad = [rows_not_finite(x) for x in xs]
        return chunk, xs, bad[0] if len(bad) == 1 else np.unique(np.concatenate(bad))

    if not ahead:
        yield from (None if chunk is None else read(chunk) for chunk in chunks)
        return
    with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="onchip-read") as reader:
        waiting: deque[concurrent.futures.Future[tuple[Chunk, tuple[Array, ...], Array]]] = deque()
        for chunk in chunks:
            if chunk is not None:
                waiting.append(reader.submit(read, chunk))
            if len(waiting) > (chunk is not None):
                yield waiting.popleft().result()
            elif chunk is None:
                yield None
        while waiting:
            yield waiting.popleft().result()


@dataclass(frozen=True, eq=False)
class ChunkDone:
    """A chunk that an engine has run: y is of the `stored_type`. A later chunk overwrites it."""

    chunk: Chunk
    y: Array
    bad_rows: int
    first_bad_row: int | None
    engine_seconds: float


T = TypeVar("T")


def run_chunks(
    engine: Engine, sources: Sequence[Readable], chunks: Iterable[Chunk | None], then: Callable[[ChunkDone], T]
) -> Iterator[T]:
    """Run these chunks of `sources`, one source per input, and yield `then(done)` of each.

    then  called for one chunk at a time, in order; on a GPU by a thread, while the next chunk runs

    Memory holds one chunk at a time on a CPU; on a GPU the rows and the results of two.
    """
    ahead = reads_ahead(engine.plan)
    stored = stored_type(engine.plan.network)
    outs = [np.empty((0, *stored.row_shape), numpy_dtype(stored.dtype)) for _ in range(2)]
    in_flight: concurrent.futures.Future[T] | None = None
    with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="onchip-write") as writer:
        for read in read_chunks(sources, chunks, ahead):
            done = None if read is None else _run_chunk(engine, *read, outs)
            if in_flight is not None:
                yield in_flight.result()
                in_flight = None
            if done is not None and ahead:
                in_flight = writer.submit(then, done)
                outs.reverse()
            elif done is not None:
                yield then(done)
        if in_flight is not None:
            yield in_flight.result()


def _run_chunk(engine: Engine, chunk: Chunk, xs: tuple[Array, ...], bad: Array, outs: list[Array]) -> ChunkDone:
    """Run a chunk into the first of `outs`, which is reallocated if it is too small."""
    rows = chunk.stop - chunk.start
    if len(outs[0]) < rows:
        outs[0] = np.empty((rows, *outs[0].shape[1:]), outs[0].dtype)
    begin = time.perf_counter()
    try:
        has_one = len(engine.plan.network.outputs) == 1
        y = engine(*xs, out=outs[0][:rows]) if has_one else pack(engine(*xs), outs[0][:rows])
    except InputError:
        engine.check_ids(*xs, first_row=chunk.start)  # the engine counts rows within this chunk only
        raise
    seconds = time.perf_counter() - begin
    return ChunkDone(chunk, y, bad.size, chunk.start + int(bad[0]) if bad.size else None, seconds)


def reads_ahead(plan: Plan) -> bool:
    """Only on a GPU. On a CPU, reading ahead gains nothing (tried): its thread takes a core from the engine."""
    return plan.device.kind == "cuda"


def run_rows(engine: Engine, sources: Sequence[Source], sink: Sink, batch_rows: int) -> None:
    """Run every row of `sources` and write the results to `sink`, in order.

    batch_rows  rows at a time; the results do not depend on it
    """
    total = len(sources[0])
    chunks = chunks_of(cut_rows(total, batch_rows, reads_ahead(engine.plan)), total)
    for _ in run_chunks(engine, sources, chunks, lambda done: sink.write(done.y)):
        pass
