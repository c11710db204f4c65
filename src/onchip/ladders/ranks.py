"""Rungs over several ranks: `onchip ladder decode --ranks 2`.

Rank 0 has the rows and collects the results. The other ranks follow: they run the rows that arrive with the same engine
and send the results back. Time includes these messages.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from onchip.errors import PlanError
from onchip.ladders import find_ladder
from onchip.ladders.frame import Rung
from onchip.network.graph import Network
from onchip.network.recipe import Array
from onchip.runtime.cuda.devices import cuda_devices
from onchip.runtime.distributed.ranks import Ranks, find_ranks, rank_device, rank_threads, wait_for
from onchip.runtime.engine import Engine, compile
from onchip.runtime.io.stream import chunk_rows, chunks_of, share_rows


@dataclass(frozen=True)
class Start:
    """What the other ranks prepare for."""

    device: str  # "cpu" or "cuda"
    rows: int  # of the whole job


@dataclass(frozen=True, eq=False)
class Part:
    """Rows of x that a rank is to run, or their results."""

    start: int
    rows: Array


def rank_engine(net: Network, device: str, threads: int | None, rows: int, ranks: Ranks) -> Engine:
    """This rank's engine, planned for its share of the rows: on "cuda" its GPU, else its share of the cores."""
    gpus = len(cuda_devices()) if device == "cuda" else 0
    of_rank = None if device == "cuda" else rank_threads(threads, ranks)
    return compile(net, rank_device(device, ranks, gpus), threads=of_rank, batch_hint=-(-rows // ranks.size))


def follow(name: str, threads: int | None, ranks: Ranks) -> None:
    """Every rank but 0: run the parts of this ladder's rows that rank 0 sends, until it ends the job."""
    start = wait_for(ranks, None, "")[1]
    if start is not None:
        ladder = find_ladder(name, start.device)
        engine = rank_engine(ladder.network(), start.device, threads, start.rows, ranks)
        while (part := wait_for(ranks, None, "")[1]) is not None:
            ranks.send(0, Part(part.start, engine(part.rows)))
    ranks.leave()


def begin(ranks: Ranks, device: str, rows: int) -> None:
    """Rank 0: let the other ranks prepare."""
    _send_all(ranks, Start(device, rows))


def end(ranks: Ranks) -> None:
    """Rank 0: end the other ranks, whether or not they have begun."""
    _send_all(ranks, None)
    ranks.leave()


def _send_all(ranks: Ranks, message: Start | None) -> None:
    for rank in range(1, ranks.size):
        ranks.send(rank, message)


class RankRun:
    """A function that runs all rows over the ranks and returns y."""

    def __init__(self, run: Callable[[], Array], facts: dict[str, int | str]) -> None:
        self._run, self.facts = run, facts

    def __call__(self) -> Array:
        return self._run()


class RankRung(Rung[Any]):
    is_engine = True

    def prepare(self, net: Network, x: Any, threads: int) -> RankRun:
        """x: rows on the host, or DeviceRows, which are on the host, too."""
        ranks = find_ranks()
        if ranks.size == 1:
            raise PlanError("it needs several ranks", hint="--ranks 2")
        device, host = ("cuda", x.host) if hasattr(x, "host") else ("cpu", x)
        engine = rank_engine(net, device, threads, len(x), ranks)
        parts = self.parts(engine, len(host), ranks)
        y = np.empty((len(host), *engine.output.row_shape), np.float32)

        def run() -> Array:
            self.run(engine, host, y, parts, ranks)
            return y

        return RankRun(run, {"ranks": ranks.size, "parts": len(parts)})

    @abc.abstractmethod
    def parts(self, engine: Engine, B: int, ranks: Ranks) -> list[slice]:
        """How rank 0 cuts the rows."""

    @abc.abstractmethod
    def run(self, engine: Engine, x: Array, y: Array, parts: list[slice], ranks: Ranks) -> None:
        """Rank 0's side of one run over all rows."""


class ScatterGather(RankRung):
    name = "scatter-gather"
    idea = "over --ranks: rank 0 sends equal parts, runs its own, then gathers the results, as the reports do"

    def parts(self, engine: Engine, B: int, ranks: Ranks) -> list[slice]:
        cuts = [B * rank // ranks.size for rank in range(ranks.size + 1)]
        return [slice(start, stop) for start, stop in pairwise(cuts)]

    def run(self, engine: Engine, x: Array, y: Array, parts: list[slice], ranks: Ranks) -> None:
        for rank, part in enumerate(parts[1:], 1):
            ranks.send(rank, Part(part.start, x[part]))
        y[parts[0]] = engine(x[parts[0]])
        for _ in parts[1:]:
            _store(wait_for(ranks, None, "")[1], y)


class ChunksOnDemand(RankRung):
    name = "chunks-on-demand"
    idea = "over --ranks: the engine's chunks; a rank gets the next one when it returns a result"
    why = "a slow rank gets fewer chunks, and rows travel while a rank runs the chunk before"

    def parts(self, engine: Engine, B: int, ranks: Ranks) -> list[slice]:
        cuts = share_rows(engine.plan, B, chunk_rows(engine.plan), ranks.size)
        return [slice(chunk.start, chunk.stop) for chunk in chunks_of(cuts, B)]

    def run(self, engine: Engine, x: Array, y: Array, parts: list[slice], ranks: Ranks) -> None:
        left, in_flight = iter(parts), 0
        for _ in range(2):  # one that runs, and one that waits
            for rank in range(1, ranks.size):
                in_flight += _send_next(ranks, rank, x, left)
        for own in left:
            y[own] = engine(x[own])
            while (found := ranks.receive()) is not None:
                _store(found[1], y)
                in_flight += _send_next(ranks, found[0], x, left) - 1
        for _ in range(in_flight):
            _store(wait_for(ranks, None, "")[1], y)


class SplitScatterGather(ScatterGather):
    precision = "3xtf32"  # of the engine's gemms in fp32 on a GPU


class SplitChunksOnDemand(ChunksOnDemand):
    precision = "3xtf32"


RANK_RUNGS: tuple[type[Rung[Any]], ...] = (ScatterGather, ChunksOnDemand)
SPLIT_RANK_RUNGS: tuple[type[Rung[Any]], ...] = (SplitScatterGather, SplitChunksOnDemand)


def _send_next(ranks: Ranks, rank: int, x: Array, left: Iterator[slice]) -> int:
    """Send the next part, if there is one; how many were sent."""
    part = next(left, None)
    if part is None:
        return 0
    ranks.send(rank, Part(part.start, x[part]))
    return 1


def _store(part: Part, y: Array) -> None:
    y[part.start : part.start + len(part.rows)] = part.rows
