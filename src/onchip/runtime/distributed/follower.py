"""The ranks other than 0: they prepare what rank 0 sends and run the chunks that it schedules (leader.py)."""

from __future__ import annotations

import contextlib
import pickle
import queue
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from onchip.errors import OnchipError, RankError
from onchip.network.recipe import Array
from onchip.runtime.cuda.devices import cuda_devices
from onchip.runtime.distributed.messages import (
    START_PART,
    Assignment,
    Bye,
    ChunkResult,
    ClockAnswer,
    End,
    Failed,
    Orders,
    Ready,
    Rest,
    Synced,
)
from onchip.runtime.distributed.ranks import Naps, Ranks, rank_device, rank_threads, silent, wait_for
from onchip.runtime.distributed.recording import Recording
from onchip.runtime.distributed.schedule import OnChunk, finished
from onchip.runtime.distributed.worker import Worker
from onchip.runtime.engine import Engine, read_plan
from onchip.runtime.io.row_sources import Source
from onchip.runtime.io.slices import SliceFile, has_token
from onchip.runtime.io.stream import Chunk, ChunkDone, run_chunks


class SentRows:
    """Rows of an input that were sent with a chunk."""

    def __init__(self) -> None:
        self.rows: dict[int, Array] = {}  # by the index of the first row

    def read(self, start: int, stop: int) -> Array:
        return self.rows.pop(start)


def follow(ranks: Ranks, on_chunk: OnChunk = lambda chunk: None) -> int:
    """Follow rank 0's orders until it ends the job; returns the exit code. Prints nothing: only rank 0 prints.

    A failure here is sent to rank 0, whose exit code counts: a rank that is ready only after the job is done has no
    output to write to. RankError if rank 0 hangs.
    """
    _load_kernels()
    orders = ranks.broadcast(None)
    if orders is None:  # rank 0 failed before there was any work
        ranks.leave()
        return 2
    try:
        _work(ranks, orders, on_chunk)
    except RankError:  # rank 0 is silent: this rank reports it
        ranks.leave(1)
        raise
    except OnchipError as error:
        ranks.send(0, Failed(error))
        while not isinstance(wait_for(ranks, None, "")[1], End):
            pass
    ranks.send(0, Bye())
    ranks.receive()
    on_chunk(None)
    ranks.leave()
    return 0


def _load_kernels() -> None:
    """Import what rank 0 imports while it plans, so that this rank does not start a second later."""
    from onchip.kernels import cpu  # noqa: F401 - for its side effect

    if cuda_devices():
        from onchip.kernels import cuda  # noqa: F401


def _work(ranks: Ranks, orders: Orders, on_chunk: OnChunk) -> None:
    device = rank_device(orders.device, ranks, len(cuda_devices()) if orders.device == "cuda" else 0)
    threads = rank_threads(orders.threads, ranks) if device == "cpu" else None
    ranks.wait_s = orders.deadline_s * START_PART
    try:
        plan, backend = read_plan(orders.plan, orders.weights, (device, threads), ranks)
    except OnchipError as error:
        if orders.meets:
            ranks.meet(error)
        raise
    engine = Engine(plan, backend, device)
    engine.warm_up()
    with contextlib.ExitStack() as stack:
        file = None
        if orders.slices is not None and has_token(orders.slices):
            file = stack.enter_context(SliceFile(orders.slices))
        _work_on(ranks, orders, engine, file, device if threads is None else f"{device}, {_threads(threads)}", on_chunk)


def _work_on(
    ranks: Ranks, orders: Orders, engine: Engine, file: SliceFile | None, device: str, on_chunk: OnChunk
) -> None:
    """Run the chunks that rank 0 schedules, until End. A thread runs them; this one handles messages."""
    sources, sent = _open_sources(orders, len(engine.plan.network.inputs))
    todo: queue.SimpleQueue[Chunk | None] = queue.SimpleQueue()
    done: queue.SimpleQueue[ChunkResult] = queue.SimpleQueue()

    def assigned() -> Iterator[Chunk | None]:
        while True:
            try:
                chunk = todo.get(block=not counts.in_flight)
            except queue.Empty:
                yield None  # flush finished chunks
                continue
            if chunk is None:
                return
            counts.in_flight += 1
            on_chunk(chunk)
            yield chunk

    def then(ran: ChunkDone) -> ChunkResult:
        y = None if file is not None or orders.slices is None else ran.y.copy()
        return ChunkResult(finished(ran, file.write if file is not None else None), y)

    def work() -> None:
        for result in run_chunks(engine, sent or sources, assigned(), then):
            counts.in_flight -= 1
            done.put(result)
            naps.news()

    counts, naps = _Counts(), Naps()
    recording = Recording(ranks, engine) if orders.records else None
    worker = Worker(work, "onchip-engine")
    try:
        ranks.send(0, Ready(device, can_read=not sent, can_write=file is not None))
        _handle_messages(ranks, orders, file, sent, worker, todo, done, naps, recording)
    finally:
        todo.put(None)
    worker.join()


@dataclass
class _Counts:
    in_flight: int = 0  # chunks that the engine's thread has started and not finished


def _handle_messages(
    ranks: Ranks,
    orders: Orders,
    file: SliceFile | None,
    sent: Sequence[SentRows],
    worker: Worker,
    todo: queue.SimpleQueue[Chunk | None],
    done: queue.SimpleQueue[ChunkResult],
    naps: Naps,
    recording: Recording | None,
) -> None:
    """Pass rank 0's chunks to the worker and the worker's results to rank 0, until End."""
    in_flight, since = 0, time.monotonic()
    wait_s: float | None = orders.deadline_s * START_PART  # for the first message of rank 0
    for _ in naps:
        worker.raise_error()
        while (found := ranks.receive()) is not None:
            naps.news()
            since, message = time.monotonic(), found[1]
            if isinstance(message, End):
                return
            if isinstance(message, Rest):
                if file is not None:
                    file.sync()
                ranks.send(0, Synced(recording.recorded() if recording is not None else None))
                wait_s = None  # no limit: the other ranks and the final file may take long
            elif isinstance(message, ClockAnswer) and recording is not None:
                recording.on_answer(message)
            elif isinstance(message, Assignment):
                for source, rows in zip(sent, message.rows or (), strict=True):
                    source.rows[message.chunk.start] = rows
                wait_s = orders.deadline_s
                in_flight += 1
                todo.put(message.chunk)
        while not done.empty():
            in_flight, since = in_flight - 1, time.monotonic()
            ranks.send(0, done.get())
        if not in_flight and wait_s is not None and time.monotonic() - since > wait_s:
            raise silent(f"rank 0 on {ranks.hosts[0]} hangs", wait_s)


def _threads(count: int) -> str:
    return f"{count} {'thread' if count == 1 else 'threads'}"


def _open_sources(orders: Orders, inputs: int) -> tuple[Sequence[Source], list[SentRows]]:
    """The row sources, if this rank can open them itself; else placeholders for the rows that are sent."""
    if orders.sources is not None:
        try:
            return pickle.loads(orders.sources), []
        except OnchipError:  # the files are not on this machine
            pass
    return (), [SentRows() for _ in range(inputs)]
