"""Timing for ladders and benchmarks: competitors are interleaved, and every block has its own warm-up."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

Run = Callable[[], object]


@runtime_checkable
class OwnClock(Protocol):
    """A run with its own clock, e.g. CUDA events."""

    def sample_ms(self) -> float:
        """Run, and return milliseconds per run; a sample may cover several runs."""


@dataclass(frozen=True)
class Pace:
    """Sampling plan. A block lasts `block_s`, with at least `min_runs` and at most `max_runs` runs."""

    rounds: int = 10  # blocks per competitor: many short ones, because a shared machine is slow for seconds at a time
    block_s: float = 0.3
    warm_up_s: float = 0.1  # at least one run; 0: no warm-up
    pause_s: float = 0.2
    min_runs: int = 2
    max_runs: int = 200


@dataclass(frozen=True)
class Timing:
    median_ms: float
    p20_ms: float
    p80_ms: float
    samples_ms: tuple[float, ...]  # raw, in order


def summarise(samples_ms: Sequence[float], scale: float = 1.0) -> Timing:
    """Median and spread; `scale` converts the time of a run to the reported time."""
    samples = [float(f"{sample * scale:.6g}") for sample in samples_ms]
    p20, median, p80 = (float(f"{p:.6g}") for p in np.percentile(samples, [20, 50, 80]))
    return Timing(median, p20, p80, tuple(samples))


def show_ms(ms: float | None) -> str:
    """Four significant digits."""
    if ms is None:
        return "-"
    digits = 3 if ms == 0 else max(0, 3 - math.floor(math.log10(ms)))
    return f"{ms:,.{min(digits, 6)}f}"


def blas_limiter(threads: int) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """A context in which NumPy's BLAS uses this many threads; entering costs 30 us, or nothing if it already does."""
    import threadpoolctl

    libraries = threadpoolctl.ThreadpoolController().select(user_api="blas")
    if all(library.num_threads == threads for library in libraries.lib_controllers):
        return contextlib.nullcontext
    return functools.partial(libraries.limit, limits=threads)


def interleave(
    runs: Sequence[Run], pace: Pace | None = None, on_block: Callable[[int, int], None] | None = None
) -> list[list[float]]:
    """Milliseconds of every run, one list per competitor: A-block, B-block, A-block, ...

    Interleaving makes a temporary slowdown of the machine affect every competitor. A pause precedes each block, because
    thread pools (OpenMP, onnxruntime) spin for a while after their work. on_block(round, competitor) is called before
    each block.
    """
    pace = pace or Pace()
    samples: list[list[float]] = [[] for _ in runs]
    for round_ in range(pace.rounds):
        for i, run in enumerate(runs):
            if on_block is not None:
                on_block(round_, i)
            time.sleep(pace.pause_s)
            samples[i] += _block(run, pace)
    return samples


def _host_ms(run: Run) -> float:
    start = time.perf_counter_ns()
    run()
    return (time.perf_counter_ns() - start) / 1e6


def _block(run: Run, pace: Pace) -> list[float]:
    sample = run.sample_ms if isinstance(run, OwnClock) else functools.partial(_host_ms, run)
    collecting = gc.isenabled()
    gc.disable()  # no garbage collection within a timed run
    try:
        if pace.warm_up_s > 0:
            until = time.perf_counter() + pace.warm_up_s
            sample()
            while time.perf_counter() < until:
                sample()
        samples: list[float] = []
        until = time.perf_counter() + pace.block_s
        while len(samples) < pace.min_runs or (time.perf_counter() < until and len(samples) < pace.max_runs):
            samples.append(sample())
        return samples
    finally:
        if collecting:
            gc.enable()
