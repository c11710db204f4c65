"""Launches of compiled code. Several run in one call: with few rows, Python would take longer than the kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from onchip.kernels.cpu.compiler.jit import ALL, code_call, compiled, data_of, entry, int_at, ints_at
from onchip.kernels.cpu.threading.atomics import atomic_add, nanoseconds
from onchip.kernels.cpu.threading.threads import FreeList, run_tasks
from onchip.network.recipe import Array

Launch = Callable[[Sequence[Array], Sequence[Array], int], None]  # (inputs, outputs, threads)


class CompiledLaunch:
    """A launch that compiled code can run, too."""

    def __init__(
        self,
        code: int,
        facts: Callable[[int], tuple[int, object]],
        check: Callable[[Sequence[Array]], None] | None = None,
        checked: int = 0,
    ) -> None:
        """
        code     address of a linked function of (facts, addresses of inputs and outputs, rows of the inputs, threads)
        facts    for a thread count: the address of the code's parameters, with scratch for one call at a time, and the
                 object to keep alive with it
        check    raises for invalid input values. For such a value, the code only sets the first word of its facts and
                 accesses no memory with it
        checked  the index of the only input that `check` reads
        """
        self.code, self.facts, self.check, self.checked = code, facts, check, checked
        self._spare = FreeList(facts)

    def __call__(self, inputs: Sequence[Array], outputs: Sequence[Array], threads: int) -> None:
        if self.check is not None:
            self.check(inputs)
        facts = self._spare.take(threads)
        operands = np.array([id(array) for array in (*inputs, *outputs)], np.int64)
        _launch(self.code, facts[0], id(operands), len(operands), len(inputs[0]), threads)
        self._spare.give_back(facts)


def words(*values: int | Array) -> Array:
    """An int64 array for compiled code: ints, and the addresses of arrays."""
    return np.array([each.ctypes.data if isinstance(each, np.ndarray) else each for each in values], np.int64)


@compiled(inline=True)
def operand_at(facts: Array, field: int, operands: int) -> int:
    """The address of an operand, by the field that holds its index; 0 if the field is -1."""
    return int_at(operands + facts[field] * 8) if facts[field] >= 0 else 0


_call = code_call(4)  # (facts, operands, B, threads)


@entry
def _launch(code: int, facts: int, operands: int, count: int, B: int, threads: int) -> int:
    """operands: the id of an array of ids of arrays; overwritten"""
    addresses = ints_at(data_of(operands), count)
    for i in range(count):
        addresses[i] = data_of(addresses[i])
    _call(code, facts, data_of(operands), B, threads)
    return 0


# Fields of a worker's task for run_launches: the numbers of launches, operands and arrays, then the addresses of
#   launches       four words each: code, facts, first operand, whether it checks values
#   value_of       of each operand: the index of its value
#   values         of each array: its id; of each intermediate value: its offset, in bytes per row
#   addresses      of each operand: its address, overwritten
#   intermediates  memory for intermediate values
#   row_bytes      of each array
_COUNT, _OPERANDS, _ARRAYS, _LAUNCHES, _VALUE_OF, _VALUES, _ADDRESSES, _INTERMEDIATES, _ROW_BYTES, _FIELDS = range(10)


@compiled()
def _launch_all(fields: Array, first: int, rows: int, threads: int) -> None:
    """Run all launches in order on `rows` rows of the arrays, from row `first`."""
    count, arrays, row_bytes = fields[_OPERANDS], fields[_ARRAYS], ints_at(fields[_ROW_BYTES], fields[_ARRAYS])
    operands, values, addresses = (
        ints_at(fields[_VALUE_OF], count),
        ints_at(fields[_VALUES], ALL),
        ints_at(fields[_ADDRESSES], count),
    )
    for i in range(count):
        value = operands[i]
        if value < arrays:
            addresses[i] = data_of(values[value]) + first * row_bytes[value]
        else:
            addresses[i] = fields[_INTERMEDIATES] + values[value] * rows
    launches = ints_at(fields[_LAUNCHES], 4 * fields[_COUNT])
    for i in range(fields[_COUNT]):
        _call(launches[4 * i], launches[4 * i + 1], fields[_ADDRESSES] + launches[4 * i + 2] * 8, rows, threads)


@compiled()
def _has_invalid(fields: Array) -> bool:
    """Whether a launch met an invalid value; clears its flag."""
    launches, is_invalid = ints_at(fields[_LAUNCHES], 4 * fields[_COUNT]), False
    for i in range(fields[_COUNT]):
        if launches[4 * i + 3]:
            first = ints_at(launches[4 * i + 1], 1)
            is_invalid |= first[0] != 0
            first[0] = 0
    return is_invalid


@compiled()
def _chunk(worker: int, index: int, tasks: int, B: int, chunk: int) -> None:
    first = index * chunk
    _launch_all(ints_at(int_at(tasks + worker * 8), _FIELDS), first, min(chunk, B - first), 1)


@compiled()
def _run_chunks(tasks: int, B: int, chunk: int, threads: int) -> bool:
    if chunk >= B:
        _launch_all(ints_at(int_at(tasks), _FIELDS), 0, B, threads)
        return not _has_invalid(ints_at(int_at(tasks), _FIELDS))
    run_tasks(_chunk, (tasks, B, chunk), (B + chunk - 1) // chunk, threads)
    is_valid = True
    for worker in range(threads):
        is_valid &= not _has_invalid(ints_at(int_at(tasks + worker * 8), _FIELDS))
    return is_valid


# Quotas: how many calls may run before the caller decides what to do with the next one. A slot serves one number of
# rows at a time. Its fields: rows, the calls that have run, and how many may. After the slots, when a call was refused.
SLOTS, QUOTA_ROWS, QUOTA_RUN, QUOTA_MOST, QUOTA_FIELDS = 61, 0, 1, 2, 3
REFUSED_NS = SLOTS * QUOTA_FIELDS


@compiled()
def _is_within(quotas: int, slot: int, B: int) -> bool:
    """Count a call with B rows; False if it may not run."""
    if int_at(slot + 8 * QUOTA_ROWS) == B:
        if atomic_add(slot + 8 * QUOTA_RUN, 1) < int_at(slot + 8 * QUOTA_MOST):
            return True
        atomic_add(slot + 8 * QUOTA_RUN, -1)
    ints_at(quotas, REFUSED_NS + 1)[REFUSED_NS] = nanoseconds()
    return False


@entry
def run_launches(tasks: int, B: int, chunk: int, threads: int, x: int, y: int) -> int:
    """Run all launches on B rows: in chunks, one thread each; or as one chunk on all threads.

    Returns whether all input values were valid, and the call within its quota.

    tasks  address of the address of each worker's fields; before it, the address of quotas, or 0
    x, y   ids of the only input and output, which saves writing them from Python; 0: already written
    """
    quotas = int_at(tasks - 8)
    slot = quotas + 8 * QUOTA_FIELDS * (B % SLOTS)
    if quotas and not _is_within(quotas, slot, B):
        return False
    if x:
        values = ints_at(ints_at(int_at(tasks), _FIELDS)[_VALUES], 2)
        values[0], values[1] = x, y
    is_valid = _run_chunks(tasks, B, chunk, threads)
    if quotas and not is_valid:
        atomic_add(slot + 8 * QUOTA_RUN, -1)  # it runs again, to be reported
    return is_valid


@entry
def run_table(table: int, count: int, threads: int) -> int:
    """Run launches in order, each on all threads; four words each: code, facts, address of its operands, rows."""
    launches = ints_at(table, 4 * count)
    for i in range(count):
        _call(launches[4 * i], launches[4 * i + 1], launches[4 * i + 2], launches[4 * i + 3], threads)
    return 0
