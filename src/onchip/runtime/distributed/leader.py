"""Rank 0 of a job. Its workers are the engines of this process and the other ranks (follower.py).

Chunks go to any free worker. Rank 0 plans, broadcasts `Orders`, schedules, writes the manifest and runs chunks too: on
a thread, while the main thread handles messages. Every other rank has one chunk running and one queued.
Rows that a rank cannot read from its own file, and results that it cannot write, travel in the messages while it runs
another chunk.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from time import perf_counter_ns
from types import TracebackType
from typing import Self

from onchip.errors import RankError
from onchip.network.recipe import Array
from onchip.plan.plan import Plan
from onchip.runtime.distributed.messages import (
    DEADLINE_S,
    START_PART,
    Assignment,
    Bye,
    ChunkResult,
    ClockAnswer,
    ClockRequest,
    End,
    Failed,
    Orders,
    Ready,
    Rest,
    Synced,
)
from onchip.runtime.distributed.ranks import Naps, Ranks, name_of, of_rank
from onchip.runtime.distributed.schedule import ChunkScheduler, OnChunk, StreamReport, finished
from onchip.runtime.distributed.worker import Worker
from onchip.runtime.engine import Engine
from onchip.runtime.io.output import PartialOutput
from onchip.runtime.io.packed import stored_type
from onchip.runtime.io.row_sources import Source
from onchip.runtime.io.slices import SliceFile
from onchip.runtime.io.stream import Chunk, run_chunks
from onchip.runtime.spans import Recorder

GOODBYE_S = 5.0  # ranks that do not end within this time are killed


class RankGroup:
    """Rank 0's side of a job. Leaving the block ends the other ranks in any case.

    log  called with the device of each rank
    """

    def __init__(self, ranks: Ranks, deadline_s: float = DEADLINE_S, log: Callable[[str], None] = print) -> None:
        self._ranks, self._deadline_s, self._say = ranks, deadline_s, log
        self._others = set(range(1, ranks.size))
        self._ready: dict[int, Ready] = {}
        self._synced: dict[int, Synced] = {}
        self._has_orders, self._naps = False, Naps()

    def begin(self, orders: Orders) -> None:
        """Broadcast the orders to the other ranks, which start preparing."""
        self._has_orders = True
        self._ranks.broadcast(orders)
        self._ranks.wait_s = self._deadline_s * START_PART

    def run(
        self,
        engines: Sequence[Engine],
        sources: Sequence[Source],
        output: PartialOutput | None,
        chunks: Sequence[Chunk],
        on_progress: Callable[[int, float], None] = lambda rows, per_s: None,
        on_chunk: OnChunk = lambda chunk: None,
    ) -> StreamReport:
        """Run the chunks that the output does not have yet.

        engines      of this process: one, or one per GPU
        on_progress  called often, with the rows done and rows/s so far
        """
        self._scheduler, self._sources, self._output = ChunkScheduler(chunks, output), sources, output

        def tick() -> None:
            self._serve()
            on_progress(self._scheduler.rows_done, self._scheduler.rows_per_s)

        workers = self._start(engines, on_chunk)
        try:
            for _ in self._naps:
                tick()
                for worker in workers:
                    worker.raise_error()
                # In a short job, a rank that is not ready yet has nothing to sync.
                if self._scheduler.is_done and set(self._synced) >= set(self._ready):
                    break
        except BaseException as error:
            self._scheduler.stop()
            if not isinstance(error, RankError):  # a RankError may mean that this rank itself hangs
                for worker in workers:
                    worker.join(GOODBYE_S)
            raise
        for worker in workers:
            worker.join()
        return self._scheduler.report(stored_type(engines[0].plan.network))

    def recorded(self, plan: Plan) -> list[tuple[str, Recorder]]:
        """The device of every other rank and its calls, if the orders were to record them.

        plan  that the ranks ran
        """
        found = []
        for rank, synced in sorted(self._synced.items()):
            if synced.recorded is not None:
                recorder = Recorder(plan, name_of(rank, self._ranks))
                recorder.resources.update(synced.recorded.resources)
                recorder.clock, recorder.lost = synced.recorded.clock, synced.recorded.lost
                for call in synced.recorded.calls:
                    recorder.append(call)
                found.append((synced.recorded.chosen, recorder))
        return found

    def _start(self, engines: Sequence[Engine], on_chunk: OnChunk) -> list[Worker]:
        """One thread per engine of this process, which takes chunks until none is left."""
        scheduler, output = self._scheduler, self._output
        is_alone = len(engines) == 1 and not self._others
        packed = None if is_alone else pack_sources(self._sources)

        def take(number: int) -> Chunk | None:
            chunk = scheduler.take(number)
            if len(engines) == 1:
                on_chunk(chunk)
            return chunk

        def work(number: int) -> None:
            # Readers and random generators have a position: each thread needs a copy. Rows in memory are shared.
            sources = self._sources if packed is None else pickle.loads(packed)
            with _open_slices(output) as write:
                chunks = iter(lambda: take(number), None)
                for result in run_chunks(engines[number], sources, chunks, lambda done: finished(done, write)):
                    scheduler.finish(number, result)
                    self._naps.news()

        return [Worker(functools.partial(work, number), f"onchip-engine-{number}") for number in range(len(engines))]

    def _serve(self) -> None:
        """Handle received messages; raise RankError for a hanging rank, or the error of another rank."""
        while (found := self._ranks.receive()) is not None:
            self._naps.news()
            rank, message = found
            if isinstance(message, Ready):
                self._ready[rank] = message
                self._say(f"rank {rank} on {self._ranks.hosts[rank]}: {message.device}")
            elif isinstance(message, ChunkResult):
                result = message.finished
                if message.y is not None and self._output is not None:
                    digest = self._output.write(self._output.cuts[result.record.chunk], message.y)
                    result = replace(result, record=replace(result.record, digest=digest))
                self._scheduler.finish(rank, result)
            elif isinstance(message, Failed):
                raise of_rank(message.error, rank, self._ranks.hosts[rank])
            elif isinstance(message, Synced):
                self._synced[rank] = message
            elif isinstance(message, ClockRequest):
                self._ranks.send(rank, ClockAnswer(message.sent_ns, perf_counter_ns()))
                continue
            self._assign(rank)
        late = self._scheduler.late(self._deadline_s) if self._others else None
        if late is not None:
            rank, chunk = late
            raise RankError(
                f"rank {rank} on {self._ranks.hosts[rank]} hangs",
                got=f"chunk {chunk.number}, rows {chunk.start:,} to {chunk.stop - 1:,}, for {self._deadline_s:g} s",
                expected="less", hint="--resume continues from finished chunks; a longer --deadline if it is only slow",
            )  # fmt: skip

    def _assign(self, rank: int) -> None:
        if rank not in self._ready or rank in self._synced:
            return
        while self._scheduler.held(rank) < (2 if self._scheduler.left > 2 * self._ranks.size else 1):
            chunk = self._scheduler.take(rank)
            if chunk is None:
                break
            rows = None
            if not self._ready[rank].can_read:
                rows = tuple(source.read(chunk.start, chunk.stop) for source in self._sources)
            self._ranks.send(rank, Assignment(chunk, rows))
        if not self._scheduler.held(rank):
            self._ranks.send(rank, Rest())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._has_orders:
            self._ranks.broadcast(None)
            self._ranks.leave()
            return
        code = None if error is None else getattr(error, "exit_code", 2)
        if isinstance(error, RankError):
            self._ranks.leave(code)
            return
        for rank in self._others:
            self._ranks.send(rank, End())
        left, started = set(self._others), time.monotonic()
        are_slow = error is None and set(self._ready) < self._others  # some may still be compiling
        wait_s = self._deadline_s * START_PART if are_slow else GOODBYE_S
        for _ in Naps():
            while (found := self._ranks.receive()) is not None:
                if isinstance(found[1], Bye):
                    left.discard(found[0])
            if not left or time.monotonic() - started > wait_s:
                break
        for rank in sorted(left):
            self._say(f"rank {rank} on {self._ranks.hosts[rank]} does not exit: killing it")
        self._ranks.leave(code or 0 if left else None)


@contextlib.contextmanager
def _open_slices(output: PartialOutput | None) -> Iterator[Callable[[int, Array], str] | None]:
    """A function that writes rows to the output through a separate file object with its own position."""
    if output is None:
        yield None
        return
    with SliceFile(output.slices) as file:
        yield file.write


def pack_sources(sources: Sequence[Source]) -> bytes | None:
    """The sources, pickled for another process; None if their rows are in this process's memory."""
    try:
        return pickle.dumps(tuple(sources))
    except (pickle.PicklingError, AttributeError, TypeError):  # the last two: objects that cannot be pickled
        return None
