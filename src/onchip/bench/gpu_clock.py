"""Timing on a GPU: times every way to run an engine (eager, CUDA graph) and keeps the fastest.

By default a sample is the time per call over back-to-back calls; if `synchronised`, that of one call plus
synchronisation, by the host's clock.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from onchip.bench.stage import Stage, Work, repeat
from onchip.measure.pace import Pace
from onchip.measure.truth import Verdict

CALLS = 20  # per sample, and per graph; fewer if a call takes long
PACE = Pace(rounds=5, block_s=0.03, warm_up_s=0.01, pause_s=0, min_runs=3, max_runs=60)
TRIALS = 3


@dataclass(frozen=True, eq=False)
class Forward:
    """One way to run a task."""

    call: Work  # runs all of it once; returns y
    captures: bool = True  # whether it can be captured into a graph; must be False if `wait` is set
    eager: bool = True  # whether to measure it without a graph
    wait: Callable[[Any], object] | None = None  # waits for y of an engine with its own streams; implies host timing


Variants = Mapping[str, Forward]


class GpuClock:
    """Times a `run` of back-to-back calls with CUDA events; a sample is the time per call."""

    def __init__(self, stage: Stage, run: Work, calls: int) -> None:
        self._stage, self._run, self._calls = stage, run, calls

    def __call__(self) -> Any:
        return self._run()

    def sample_ms(self) -> float:
        return self._stage.ms(self._run) / self._calls


class HostClock:
    """Times a `run` of back-to-back calls and the wait for the last with the host's clock, per call."""

    def __init__(self, run: Work, wait: Callable[[Any], object], calls: int) -> None:
        self._run, self._wait, self._calls = run, wait, calls

    def __call__(self) -> Any:
        y = self._run()
        self._wait(y)
        return y

    def sample_ms(self) -> float:
        start = time.perf_counter()
        self()
        return (time.perf_counter() - start) * 1e3 / self._calls


Run = GpuClock | HostClock


def ways(forward: Forward, stage: Stage, synchronised: bool, calls: int) -> Iterator[tuple[str, Run]]:
    """Every way to run this forward, with its name."""
    if synchronised:
        wait = forward.wait or (lambda y: stage.synchronise())
        if forward.eager:
            yield "", HostClock(forward.call, wait, 1)
        if forward.captures:
            yield "replayed graph", HostClock(stage.record(forward.call, 1), wait, 1)
        return
    repeated = functools.partial(repeat, forward.call, calls)
    if forward.wait is not None:
        yield f"{calls} calls", HostClock(repeated, forward.wait, calls)
    elif forward.eager:
        yield f"{calls} calls", GpuClock(stage, repeated, calls)
    if forward.captures:
        yield f"graph of {calls} calls", GpuClock(stage, stage.record(forward.call, calls), calls)


def fastest(variants: Variants, stage: Stage, synchronised: bool = False, calls: int = CALLS) -> tuple[Run, str]:
    """The fastest way to run the fastest variant, and its name. The others are freed."""
    best: Run | None = None
    best_ms, best_name = math.inf, ""
    for name, forward in variants.items():
        for way, run in ways(forward, stage, synchronised, calls):
            ms = statistics.median(run.sample_ms() for _ in range(TRIALS))
            if best is None or ms < best_ms:
                best, best_ms, best_name = run, ms, ", ".join(filter(None, [name, way]))
            del run
            stage.trim()
    if best is None:
        raise ValueError("no variant to run")
    return best, best_name


def check(stage: Stage, run: Run, verify: Callable[[Any], Verdict]) -> Verdict:
    """Run what will be timed, over memory filled with NaNs."""
    stage.trim()  # free what peers cached in the meantime: the first launch of a graph allocates
    y = run()
    stage.poison(y)
    del y  # an engine that allocates its result then reuses this memory
    return verify(run())
