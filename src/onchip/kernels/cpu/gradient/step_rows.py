"""step_rows: the rows of a step from a data set in memory, and the step's row of a table, in one launch.

Idea    A task copies some rows of the batch from every array of the data set, so that ids are read once.
Floor   Memory: every row is read and written once.
Limits  Any dtype. An index outside its array counts as the nearest one inside.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from onchip.kernels.cpu.compiler.jit import (
    address,
    address_of,
    bytes_at,
    compiled,
    floats_at,
    int_at,
    ints_at,
    linked,
)
from onchip.kernels.cpu.compiler.late_numba import types
from onchip.kernels.cpu.kernel import CpuKernel
from onchip.kernels.cpu.threading.launches import CompiledLaunch, words
from onchip.kernels.cpu.threading.threads import run_tasks
from onchip.kernels.dataset_run import IDS, ROW, StepRows, claim_rows
from onchip.network.graph import Network
from onchip.network.layers import RowIds, StepRow
from onchip.network.layers.dataset import FIRST_ROW, STEP
from onchip.network.recipe import Array
from onchip.network.types import DTYPE_BYTES
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job

_TASK_BYTES = 1 << 15
_THREAD_BYTES = 1 << 17  # per thread: below this, a thread is not woken

_ARRAYS, _COUNT, _ORDER, _IDS, _POSITION, _BYTES, _FIELDS = range(7)  # of the facts; bytes per row of the batch
_KIND, _DATA, _ROWS, _ROW_BYTES, _OUTPUT, _COLUMNS = range(6)  # of an array


@compiled(inline=True)
def _inside(index: int, count: int) -> int:
    return max(0, min(index, count - 1))


@compiled()
def _copy(source: int, target: int, nbytes: int) -> None:
    if nbytes % 8 == 0:
        x, y = ints_at(source, nbytes // 8), ints_at(target, nbytes // 8)
        for i in range(nbytes // 8):
            y[i] = x[i]
    elif nbytes % 4 == 0:
        v, w = floats_at(source, nbytes // 4), floats_at(target, nbytes // 4)
        for i in range(nbytes // 4):
            w[i] = v[i]
    else:
        a, b = bytes_at(source, nbytes), bytes_at(target, nbytes)
        for i in range(nbytes):
            b[i] = a[i]


@compiled()
def _rows(worker: int, task: int, facts: Array, operands: int, B: int, task_rows: int) -> None:
    first, position = task * task_rows, ints_at(facts[_POSITION], 2)
    end, order = min(B, first + task_rows), ints_at(facts[_ORDER], facts[_IDS])
    for j in range(facts[_COUNT]):
        array = ints_at(facts[_ARRAYS] + j * _COLUMNS * 8, _COLUMNS)
        y, nbytes = int_at(operands + array[_OUTPUT] * 8), array[_ROW_BYTES]
        if array[_KIND] == ROW:
            if task == 0:
                _copy(array[_DATA] + _inside(position[STEP], array[_ROWS]) * nbytes, y, nbytes)
            continue
        for b in range(first, end):
            index = order[_inside(position[FIRST_ROW] + b, facts[_IDS])]
            if array[_KIND] == IDS:
                ints_at(y, B)[b] = index
            else:
                _copy(array[_DATA] + _inside(index, array[_ROWS]) * nbytes, y + b * nbytes, nbytes)


@linked(*(types.int64,) * 4)
def _run(facts_at: int, operands: int, B: int, threads: int) -> None:
    """Entry point of a CompiledLaunch."""
    facts = ints_at(facts_at, _FIELDS)
    task_rows = max(1, _TASK_BYTES // facts[_BYTES])
    threads = max(1, min(threads, B * facts[_BYTES] // _THREAD_BYTES))
    run_tasks(_rows, (facts, operands, B, task_rows), max(1, (B + task_rows - 1) // task_rows), threads)


class StepRowsKernel(CpuKernel):
    name = "step_rows"
    layers = (RowIds, StepRow)
    dtypes = DTYPE_BYTES

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim]:
        claim = claim_rows(self.name, net, start)
        if claim is not None:
            yield claim

    def bind(self, claim: Claim, weights: dict[str, Array]) -> CompiledLaunch:
        meta = claim.facts
        assert isinstance(meta, StepRows)
        outputs = 1  # after the only input
        arrays = words(*(
            field
            for each in meta.arrays
            for field in (each.kind, weights[each.data] if each.data else 0, each.rows, each.row_bytes,
                          outputs + each.output)
        ))  # fmt: skip
        of_batch = 8 + sum(each.row_bytes for each in meta.arrays if each.kind != ROW)
        facts = words(arrays, len(meta.arrays), weights.get("order", 0), meta.ids, weights["position"], of_batch)
        assert all(np.asarray(array).flags.c_contiguous for array in weights.values())
        return CompiledLaunch(address_of(_run), lambda threads: (address(facts), (facts, arrays, weights)))
