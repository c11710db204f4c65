"""Dynamic scheduling of a job's chunks: on demand and in order, each once; faster workers get more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from onchip.network.recipe import Array
from onchip.network.types import TensorType, numpy_dtype
from onchip.runtime.io.output import ChunkRecord, PartialOutput
from onchip.runtime.io.stream import Chunk, ChunkDone

OnChunk = Callable[[Chunk | None], None]  # receives the chunk that a rank starts

FIRST_ROWS = 5  # of the results, kept for display


@dataclass(frozen=True, eq=False)
class StreamReport:
    rows: int
    resumed_rows: int  # of these, done by an earlier run
    seconds: float  # reading, running and writing together
    engine_seconds: float  # of the worker that ran longest
    bad_rows: int  # input rows that hold a NaN or an infinity
    first_bad_row: int | None
    first_rows: Array  # the first few results

    @property
    def rows_per_s(self) -> float:
        return (self.rows - self.resumed_rows) / max(self.seconds, 1e-9)

    @property
    def engine_rows_per_s(self) -> float:
        return (self.rows - self.resumed_rows) / self.engine_seconds if self.engine_seconds else 0.0


@dataclass(frozen=True, eq=False)
class Finished:
    """A chunk that is run and written, as its worker reports it."""

    record: ChunkRecord
    engine_seconds: float
    first_rows: Array | None  # those of the first few results that it contains


def finished(done: ChunkDone, write: Callable[[int, Array], str] | None) -> Finished:
    """Write a chunk's results, if there is an output, and return its report."""
    start, y = done.chunk.start, done.y
    digest = "" if write is None else write(start, y)
    first = y[: FIRST_ROWS - start].copy() if start < FIRST_ROWS else None
    record = ChunkRecord(done.chunk.number, digest, done.bad_rows, done.first_bad_row)
    return Finished(record, done.engine_seconds, first)


@dataclass
class _Worker:
    chunks: dict[int, Chunk] = field(default_factory=dict)  # assigned to it, by number
    since: float = 0.0  # when it began the first of them
    engine_seconds: float = 0.0


class ChunkScheduler:
    """The remaining chunks of a job and those in flight. Thread-safe."""

    def __init__(
        self, chunks: Sequence[Chunk], output: PartialOutput | None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._output, self._clock, self._lock = output, clock, threading.Lock()
        self._records = dict(output.records) if output is not None else {}
        self._chunks, self._first = chunks, dict[int, Array]()
        self._left = [chunk for chunk in reversed(chunks) if chunk.number not in self._records]
        self._workers: dict[int, _Worker] = {}
        self._started = clock()
        self.resumed_rows = self.rows_done = sum(self._rows(number) for number in self._records)
        if output is not None:
            for number in self._records:
                chunk = chunks[number]
                if chunk.start < FIRST_ROWS:
                    self._first[chunk.start] = output.read(chunk.start, min(chunk.stop, FIRST_ROWS))

    def take(self, worker: int) -> Chunk | None:
        """Assign the next chunk to this worker; None if no chunk is left."""
        with self._lock:
            if not self._left:
                return None
            state = self._workers.setdefault(worker, _Worker())
            if not state.chunks:
                state.since = self._clock()
            chunk = self._left.pop()
            state.chunks[chunk.number] = chunk
            return chunk

    def finish(self, worker: int, result: Finished) -> None:
        """Record that a worker's chunk is run and written."""
        with self._lock:
            state = self._workers[worker]
            del state.chunks[result.record.chunk]
            state.since = self._clock()
            state.engine_seconds += result.engine_seconds
            chunk = self._chunks[result.record.chunk]
            self._records[chunk.number] = result.record
            self.rows_done += chunk.stop - chunk.start
            if result.first_rows is not None:
                self._first[chunk.start] = result.first_rows
            if self._output is not None:
                self._output.record(result.record)

    def stop(self) -> None:
        """Schedule no more chunks."""
        with self._lock:
            self._left.clear()

    @property
    def left(self) -> int:
        """Chunks that are not assigned yet."""
        return len(self._left)

    @property
    def is_done(self) -> bool:
        return len(self._records) == len(self._chunks)

    def held(self, worker: int) -> int:
        return len(self._workers[worker].chunks) if worker in self._workers else 0

    def late(self, deadline_s: float) -> tuple[int, Chunk] | None:
        """A worker that has spent longer than this on a chunk, and the chunk."""
        with self._lock:
            for worker, state in self._workers.items():
                if state.chunks and self._clock() - state.since > deadline_s:
                    return worker, min(state.chunks.values(), key=lambda chunk: chunk.number)
        return None

    @property
    def rows_per_s(self) -> float:
        return (self.rows_done - self.resumed_rows) / max(self._clock() - self._started, 1e-9)

    def report(self, row_type: TensorType) -> StreamReport:
        records = self._records.values()
        bad = [record.first_bad_row for record in records if record.first_bad_row is not None]
        none = np.empty((0, *row_type.row_shape), numpy_dtype(row_type.dtype))
        first = np.concatenate([none, *(self._first[start] for start in sorted(self._first))])
        longest = max((state.engine_seconds for state in self._workers.values()), default=0.0)
        return StreamReport(
            self.rows_done, self.resumed_rows, self._clock() - self._started, longest,
            sum(record.bad_rows for record in records), min(bad, default=None), first,
        )  # fmt: skip

    def _rows(self, number: int) -> int:
        return self._chunks[number].stop - self._chunks[number].start
