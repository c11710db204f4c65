"""step_counters: what a step over a data set leaves for the next one, its counters and its loss in the log, in place.

Idea    One launch of one thread: a few numbers change.
State   The new value of a state may be stored in the state's own array; any other array receives a copy first.
Limits  A log of any dtype; counters are int64. A step past the end of the log is not logged.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from onchip.kernels.cpu.compiler.jit import address, address_of, bytes_at, compiled, int_at, ints_at, linked
from onchip.kernels.cpu.compiler.late_numba import types
from onchip.kernels.cpu.kernel import CpuKernel
from onchip.kernels.cpu.threading.launches import CompiledLaunch, words
from onchip.kernels.dataset_run import StepCounters, claim_counters
from onchip.network.graph import Network
from onchip.network.layers import Counted
from onchip.network.layers.dataset import STEP
from onchip.network.recipe import Array
from onchip.network.types import DTYPE_BYTES
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job

_POSITION, _LOGS, _LOG_COUNT, _COUNTERS, _COUNTER_COUNT, _FIELDS = range(6)  # of the facts
_VALUE, _LOG, _NEW_LOG, _STEPS, _NUMBER_BYTES, _LOG_COLUMNS = range(6)
_STATE, _NEW_STATE, _SIZE, _PER_STEP, _PER_ROW, _COUNTER_COLUMNS = range(6)


@compiled(inline=True)
def _copy(source: int, target: int, nbytes: int) -> None:
    x, y = bytes_at(source, nbytes), bytes_at(target, nbytes)
    for i in range(nbytes):
        y[i] = x[i]


@linked(*(types.int64,) * 4)
def _run(facts_at: int, operands: int, B: int, threads: int) -> None:
    """Entry point of a CompiledLaunch."""
    facts = ints_at(facts_at, _FIELDS)
    for j in range(facts[_LOG_COUNT]):  # before the counters: the position may be one of them
        log = ints_at(facts[_LOGS] + j * _LOG_COLUMNS * 8, _LOG_COLUMNS)
        step, nbytes = ints_at(facts[_POSITION], 2)[STEP], log[_NUMBER_BYTES]
        new = int_at(operands + log[_NEW_LOG] * 8)
        if new != log[_LOG]:
            _copy(log[_LOG], new, log[_STEPS] * nbytes)
        if 0 <= step < log[_STEPS]:
            _copy(int_at(operands + log[_VALUE] * 8), new + step * nbytes, nbytes)
    for j in range(facts[_COUNTER_COUNT]):
        state = ints_at(facts[_COUNTERS] + j * _COUNTER_COLUMNS * 8, _COUNTER_COLUMNS)
        n = state[_SIZE]
        old, counted = ints_at(state[_STATE], n), ints_at(int_at(operands + state[_NEW_STATE] * 8), n)
        per_step, per_row = ints_at(state[_PER_STEP], n), ints_at(state[_PER_ROW], n)
        for i in range(n):
            counted[i] = old[i] + per_step[i] + B * per_row[i]


class StepCountersKernel(CpuKernel):
    name = "step_counters"
    layers = (Counted,)
    dtypes = DTYPE_BYTES

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim]:
        claim = claim_counters(self.name, net, start)
        if claim is not None:
            yield claim

    def bind(self, claim: Claim, weights: dict[str, Array]) -> CompiledLaunch:
        meta = claim.facts
        assert isinstance(meta, StepCounters)
        outputs = meta.inputs
        added = [np.array((each.per_step, each.per_row), np.int64) for each in meta.counters]
        logs = words(*(
            field
            for each in meta.logs
            for field in (each.value, weights[each.log], outputs + each.output, each.steps, each.number_bytes)
        ))  # fmt: skip
        counters = words(*(
            field
            for each, (per_step, per_row) in zip(meta.counters, added, strict=True)
            for field in (weights[each.counters], outputs + each.output, len(per_step), per_step, per_row)
        ))  # fmt: skip
        facts = words(weights.get("position", 0), logs, len(meta.logs), counters, len(meta.counters))
        return CompiledLaunch(
            address_of(_run), lambda threads: (address(facts), (facts, logs, counters, added, weights))
        )
