"""copy_runs: runs of consecutive elements, each copied from evenly spaced ones: weights in another order."""

from __future__ import annotations

import numpy as np

from onchip.kernels.cpu.compiler.jit import ALL, address, address_of, compiled, floats_at, ints_at, linked
from onchip.kernels.cpu.compiler.late_numba import types
from onchip.kernels.cpu.threading.launches import CompiledLaunch, words
from onchip.kernels.cpu.threading.threads import run_tasks
from onchip.network.recipe import Array

MAX_RUN = 1 << 12  # elements: longer runs are divided
_TASK_RUNS = 64
_THREAD_ELEMENTS = 1 << 14  # per thread: below this, a thread is not woken

_TABLE, _RUNS, _ELEMENTS, _FIELDS = range(4)


@compiled()
def _copy(worker: int, task: int, table: int, runs: int) -> None:
    first = task * _TASK_RUNS
    for i in range(first, min(runs, first + _TASK_RUNS)):
        run = ints_at(table + i * 32, 4)
        count, step = run[2], run[3]
        y, x = floats_at(run[0], count), floats_at(run[1], ALL)
        if step == 1:
            for n in range(count):
                y[n] = x[n]
        else:
            for n in range(count):
                y[n] = x[n * step]


@linked(*(types.int64,) * 4)
def _run(facts: int, operands: int, B: int, threads: int) -> None:
    """Entry point of a CompiledLaunch."""
    fields = ints_at(facts, _FIELDS)
    runs = fields[_RUNS]
    threads = max(1, min(threads, fields[_ELEMENTS] // _THREAD_ELEMENTS))
    run_tasks(_copy, (fields[_TABLE], runs), (runs + _TASK_RUNS - 1) // _TASK_RUNS, threads)


def copy_runs(table: Array) -> CompiledLaunch:
    """The launch of these copies; table (runs, 4): addresses of target and source, count, elements between sources."""
    table = np.ascontiguousarray(table, np.int64)
    fields = words(table, len(table), int(table[:, 2].sum()))
    return CompiledLaunch(address_of(_run), lambda threads: (address(fields), (fields, table)))
