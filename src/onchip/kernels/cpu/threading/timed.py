"""A compiled launch that records when it begins and ends. Launches that are not recorded contain no clock."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from onchip.kernels.cpu.compiler.jit import address, address_of, code_call, ints_at, linked
from onchip.kernels.cpu.compiler.late_numba import types
from onchip.kernels.cpu.threading.atomics import nanoseconds
from onchip.kernels.cpu.threading.launches import CompiledLaunch
from onchip.network.recipe import Array

CAPACITY = 4096  # runs per thread and call that are kept
# Facts of a timed launch, in words. The first is the flag of launches that check values (CompiledLaunch.check).
_FLAG, _CHECKS, _CODE, _FACTS, _COUNT, _TIMES, _FIELDS = range(7)
_WORDS = 3  # per run: begin, end, rows

_call = code_call(4)


@linked(types.int64, types.int64, types.int64, types.int64)
def _run_timed(facts: int, operands: int, B: int, threads: int) -> None:
    fields = ints_at(facts, _FIELDS)
    begin = nanoseconds()
    _call(fields[_CODE], fields[_FACTS], operands, B, threads)
    end = nanoseconds()
    at = fields[_COUNT] % CAPACITY
    times = ints_at(fields[_TIMES], _WORDS * CAPACITY)
    times[_WORDS * at], times[_WORDS * at + 1], times[_WORDS * at + 2] = begin, end, B
    fields[_COUNT] += 1
    if fields[_CHECKS]:
        inner = ints_at(fields[_FACTS], 1)
        fields[_FLAG], inner[0] = inner[0], 0


class Run(NamedTuple):
    worker: int  # of the threads that run different rows; 0 if all share the launch
    begin_ns: int  # of time.perf_counter_ns
    end_ns: int
    rows: int


class TimedLaunch:
    """A launch, and the runs of it since `take` was last called. For one caller at a time."""

    def __init__(self, launch: CompiledLaunch) -> None:
        self._launch = launch
        self._workers: dict[int, list[tuple[Array, Array]]] = {}  # by threads per run: fields and times of each worker
        self.timed = CompiledLaunch(address_of(_run_timed), self._make_facts, launch.check, launch.checked)

    def _make_facts(self, threads: int) -> tuple[int, object]:
        launch, inner = self._launch, self._launch.facts(threads)
        times, fields = np.zeros((CAPACITY, _WORDS), np.int64), np.zeros(_FIELDS, np.int64)
        fields[_CHECKS], fields[_CODE], fields[_FACTS] = launch.check is not None, launch.code, inner[0]
        fields[_TIMES] = address(times)
        self._workers.setdefault(threads, []).append((fields, times))
        return address(fields), (fields, times, inner)

    def take(self) -> list[Run]:
        """The runs since the last call, at most CAPACITY per worker."""
        runs = []
        for workers in self._workers.values():
            for worker, (fields, times) in enumerate(workers):
                count = min(int(fields[_COUNT]), CAPACITY)
                fields[_COUNT] = 0
                runs += [Run(worker, *row) for row in times[:count].tolist()]
        return runs
