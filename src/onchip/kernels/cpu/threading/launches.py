"""Launches, and several of them in one call into compiled code: with few rows, what takes long is the Python around."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from onchip.kernels.cpu.compiler.jit import ALL, code_call, compiled, data_of, entry, int_at, ints_at
from onchip.kernels.cpu.threading.threads import Spare, run_tasks
from onchip.network.recipe import Array

Launch = Callable[[Sequence[Array], Sequence[Array], int], None]  # (inputs, outputs, threads)


class CompiledLaunch:
    """A launch that compiled code can make, too."""

    def __init__(
        self,
        code: int,
        facts: Callable[[int], tuple[int, object]],
        check: Callable[[Sequence[Array]], None] | None = None,
    ) -> None:
        """
        code   address of a linked function of: its facts, the addresses of inputs and outputs as a list, B, threads
        facts  of a number of threads: the address of what the code wants to know, with scratch for one call at a time,
               and what is kept as long as that
        check  raises what is wrong with numbers of the inputs. The code itself sets the first word of its facts where
               it meets such numbers, and touches no memory for them
        """
        self.code, self.facts, self.check = code, facts, check
        self._spare = Spare(facts)

    def __call__(self, inputs: Sequence[Array], outputs: Sequence[Array], threads: int) -> None:
        if self.check is not None:
            self.check(inputs)
        facts = self._spare.take(threads)
        operands = np.array([id(array) for array in (*inputs, *outputs)], np.int64)
        _launch(self.code, facts[0], id(operands), len(operands), len(outputs[0]), threads)
        self._spare.give_back(facts)


def words(*numbers: int | Array) -> Array:
    """What compiled code reads as a list of int64: numbers, and of arrays their addresses."""
    return np.array([each.ctypes.data if isinstance(each, np.ndarray) else each for each in numbers], np.int64)


_call = code_call(4)  # of facts, operands, B, threads


@entry
def _launch(code: int, facts: int, operands: int, count: int, B: int, threads: int) -> int:
    """operands: the id of an array of ids of arrays; overwritten"""
    places = ints_at(data_of(operands), count)
    for i in range(count):
        places[i] = data_of(places[i])
    _call(code, facts, data_of(operands), B, threads)
    return 0


# What run_launches is told: how many launches, operands and arrays there are; then addresses of
# the launches: each its code, its facts, its first operand, whether it checks
# the operands: each the number of its value
# the values: first the ids of the arrays, then of each value in between where it begins, in bytes a row
# the operands' addresses, overwritten
# memory for the values in between
# the bytes of a row of each array
_COUNT, _OPERANDS, _ARRAYS, _LAUNCHES, _NUMBERS, _VALUES, _PLACES, _BETWEEN, _ROW_BYTES, _WORDS = range(10)


@compiled()
def _launch_all(told: Array, first: int, rows: int, threads: int) -> None:
    """Launch after launch on rows `first`, .. of the arrays."""
    count, arrays, row_bytes = told[_OPERANDS], told[_ARRAYS], ints_at(told[_ROW_BYTES], told[_ARRAYS])
    operands, values, places = (
        ints_at(told[_NUMBERS], count),
        ints_at(told[_VALUES], ALL),
        ints_at(told[_PLACES], count),
    )
    for i in range(count):
        value = operands[i]
        if value < arrays:
            places[i] = data_of(values[value]) + first * row_bytes[value]
        else:
            places[i] = told[_BETWEEN] + values[value] * rows
    launches = ints_at(told[_LAUNCHES], 4 * told[_COUNT])
    for i in range(told[_COUNT]):
        _call(launches[4 * i], launches[4 * i + 1], told[_PLACES] + launches[4 * i + 2] * 8, rows, threads)


@compiled()
def _found_bad(told: Array) -> bool:
    """Whether a launch met numbers that it could do nothing with; forgotten then."""
    launches, is_bad = ints_at(told[_LAUNCHES], 4 * told[_COUNT]), False
    for i in range(told[_COUNT]):
        if launches[4 * i + 3]:
            first = ints_at(launches[4 * i + 1], 1)
            is_bad |= first[0] != 0
            first[0] = 0
    return is_bad


@compiled()
def _chunk(worker: int, piece: int, team: int, B: int, chunk: int) -> None:
    first = piece * chunk
    _launch_all(ints_at(int_at(team + worker * 8), _WORDS), first, min(chunk, B - first), 1)


@compiled()
def _run_chunks(team: int, B: int, chunk: int, threads: int) -> bool:
    if chunk >= B:
        _launch_all(ints_at(int_at(team), _WORDS), 0, B, threads)
        return not _found_bad(ints_at(int_at(team), _WORDS))
    run_tasks(_chunk, (team, B, chunk), (B + chunk - 1) // chunk, threads)
    is_good = True
    for worker in range(threads):
        is_good &= not _found_bad(ints_at(int_at(team + worker * 8), _WORDS))
    return is_good


@entry
def run_launches(team: int, B: int, chunk: int, threads: int, x: int, y: int) -> int:
    """All launches on B rows: chunk by chunk, each by one thread; or, in one chunk, by all threads.

    Gives whether all numbers could be used.

    team  address of the addresses of what each worker is told
    x, y  ids of the one input and the one output, quicker than to write them down from Python; 0 where that is done
    """
    if x:
        values = ints_at(ints_at(int_at(team), _WORDS)[_VALUES], 2)
        values[0], values[1] = x, y
    return _run_chunks(team, B, chunk, threads)
