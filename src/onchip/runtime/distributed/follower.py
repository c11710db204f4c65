"""The side of every rank but 0: make ready what rank 0 says, run the chunks that it deals. Rank 0's side is leader.py."""

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
from onchip.runtime.distributed.messages import START_PART, Bye, Deal, End, Failed, Orders, Ready, Rest, Synced, Told
from onchip.runtime.distributed.ranks import Naps, Ranks, rank_device, rank_threads, silent, wait_for
from onchip.runtime.distributed.schedule import OnChunk, finished
from onchip.runtime.distributed.worker import Worker
from onchip.runtime.engine import Engine, read_plan
from onchip.runtime.io.row_sources import Source
from onchip.runtime.io.slices import SliceFile, has_token
from onchip.runtime.io.stream import Chunk, ChunkDone, run_chunks


class SentRows:
    """Rows of an input that came with a chunk."""

    def __init__(self) -> None:
        self.rows: dict[int, Array] = {}  # by the number of the first

    def read(self, start: int, stop: int) -> Array:
        return self.rows.pop(start)


def follow(ranks: Ranks, on_chunk: OnChunk = lambda chunk: None) -> int:
    """Do what rank 0 says until it ends the job; gives the exit code. Nothing is said: rank 0 speaks.

    What fails here is told to rank 0, and its exit code counts: a rank that is ready when the job is done finds no
    output to write to any more. RankError if rank 0 hangs.
    """
    _load_kernels()
    orders = ranks.broadcast(None)
    if orders is None:  # rank 0 found something wrong before there was anything to do
        ranks.leave()
        return 2
    try:
        _work(ranks, orders, on_chunk)
    except RankError:  # rank 0 is silent: this one speaks
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
    """Load what rank 0 loads while it plans: this rank should not begin a second later for it."""
    from onchip.kernels import cpu  # noqa: F401 - for its own sake

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
    engine = Engine(plan, backend, device, orders.debug)
    engine.warm_up()
    with contextlib.ExitStack() as stack:
        file = None
        if orders.slices is not None and has_token(orders.slices):
            file = stack.enter_context(SliceFile(orders.slices))
        _work_on(ranks, orders, engine, file, device if threads is None else f"{device}, {_threads(threads)}", on_chunk)


def _work_on(
    ranks: Ranks, orders: Orders, engine: Engine, file: SliceFile | None, device: str, on_chunk: OnChunk
) -> None:
    """Run the chunks that rank 0 deals, until it says that it is the end. A thread runs them; this one talks."""
    sources, sent = _open_sources(orders, len(engine.plan.network.inputs))
    todo: queue.SimpleQueue[Chunk | None] = queue.SimpleQueue()
    done: queue.SimpleQueue[Told] = queue.SimpleQueue()

    def dealt() -> Iterator[Chunk | None]:
        while True:
            try:
                chunk = todo.get(block=not counts.under_way)
            except queue.Empty:
                yield None  # give what is done
                continue
            if chunk is None:
                return
            counts.under_way += 1
            on_chunk(chunk)
            yield chunk

    def then(ran: ChunkDone) -> Told:
        y = None if file is not None or orders.slices is None else ran.y.copy()
        return Told(finished(ran, file.write if file is not None else None), y)

    def work() -> None:
        for told in run_chunks(engine, sent or sources, dealt(), then):
            counts.under_way -= 1
            done.put(told)
            naps.news()

    counts, naps = _Counts(), Naps()
    worker = Worker(work, "onchip-engine")
    try:
        ranks.send(0, Ready(device, can_read=not sent, can_write=file is not None))
        _talk(ranks, orders, file, sent, worker, todo, done, naps)
    finally:
        todo.put(None)
    worker.join()


@dataclass
class _Counts:
    under_way: int = 0  # chunks that the engine's thread has taken and not given yet


def _talk(
    ranks: Ranks,
    orders: Orders,
    file: SliceFile | None,
    sent: Sequence[SentRows],
    worker: Worker,
    todo: queue.SimpleQueue[Chunk | None],
    done: queue.SimpleQueue[Told],
    naps: Naps,
) -> None:
    """Bring the worker what rank 0 deals, and rank 0 what the worker did, until the end."""
    held, since = 0, time.monotonic()
    wait_s: float | None = orders.deadline_s * START_PART  # for the first word of rank 0
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
                ranks.send(0, Synced())
                wait_s = None  # as long as the others, and the end of the file, take
            elif isinstance(message, Deal):
                for source, rows in zip(sent, message.rows or (), strict=True):
                    source.rows[message.chunk.start] = rows
                wait_s = orders.deadline_s
                held += 1
                todo.put(message.chunk)
        while not done.empty():
            held, since = held - 1, time.monotonic()
            ranks.send(0, done.get())
        if not held and wait_s is not None and time.monotonic() - since > wait_s:
            raise silent(f"rank 0 on {ranks.hosts[0]} hangs", wait_s)


def _threads(count: int) -> str:
    return f"{count} {'thread' if count == 1 else 'threads'}"


def _open_sources(orders: Orders, inputs: int) -> tuple[Sequence[Source], list[SentRows]]:
    """The sources of the rows, as far as this rank can read them itself; else such that wait for what is sent."""
    if orders.sources is not None:
        try:
            return pickle.loads(orders.sources), []
        except OnchipError:  # its machine has not these files
            pass
    return (), [SentRows() for _ in range(inputs)]
