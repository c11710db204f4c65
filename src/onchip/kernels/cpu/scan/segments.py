"""The parts of a scan: the work of one thread on one segment, compiled for an op and a dtype.

A lane is scanned from its first part to its last: a long row, a few adjacent short rows, or a few columns of a matrix.
A part function is called by its address with one of five tasks:

    COPY   state = other
    TOTAL  state = the part's total
    JOIN   state = state op other
    SCAN   y = the part's scan, after state; other is overwritten
    RESCAN as SCAN, but left to right where SCAN is unsafe; state = carry-out; other is state

SCAN sets the lane's doubt flag where products of floats may have overflowed although their results have not
(scan/blocks.py). Such a lane is scanned again, part after part; its x must be unchanged.

x, y     all elements, flat; y may be x, unless lanes may be scanned again
state    one element of the total's dtype per row or column
job      the fields of a Job
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from onchip.kernels.cpu.compiler.jit import address_of, compiled, ints_at, linked
from onchip.kernels.cpu.compiler.late_numba import TypeName, types
from onchip.kernels.cpu.scan.blocks import (
    BLOCK,
    SAFE,
    STREAM_ALIGNMENT,
    STRIP,
    scan_row,
    scan_strip,
    total_row,
    total_strip,
)
from onchip.network.scan_op import OPS, ScanOp

SEGMENT = 1 << 14  # elements per part of a row: with the prefetched ones they stay in L2
COPY, TOTAL, JOIN, SCAN, RESCAN = range(5)  # tasks
_LONG = 1 << 12  # elements: such rows are streamed although their ends share cache lines with other rows
_SUM, _PRODUCT, _MAX = (OPS.index(name) for name in ("sum", "product", "max"))


class Job(NamedTuple):
    lanes: int
    parts: int  # per lane
    threads: int
    N: int  # elements of a row, or of a column
    exclusive: bool
    reverse: bool
    rows: int = 0
    rows_per_lane: int = 0
    stream: bool = False  # non-temporal stores to y where its alignment allows; rows only
    columns: int = 0  # per matrix
    columns_per_lane: int = 0
    part_length: int = 0  # columns; for rows it is SEGMENT
    doubts: int = 0  # address of a flag per lane; set by `_launch`


# Indices of the fields.
(
    _LANES, _PARTS, _THREADS, _N, _EXCLUSIVE, _REVERSE, _ROWS, _ROWS_PER_LANE, _STREAM, _COLUMNS, _COLUMNS_PER_LANE,
    _PART_LENGTH, _DOUBTS,
) = range(len(Job._fields))  # fmt: skip


@compiled(inline=True)
def _combine(op: int, earlier: Any, later: Any) -> Any:
    if op == _SUM:
        return earlier + later
    if op == _PRODUCT:
        return earlier * later
    if op == _MAX:
        return earlier if (earlier >= later) | (earlier != earlier) else later
    return earlier if (earlier <= later) | (earlier != earlier) else later


@compiled(inline=True)
def _begin(N: int, part: int, length: int, reverse: bool) -> int:
    """The begin of a part; all but the last have one length; in reverse they count from the end."""
    return max(0, N - (part + 1) * length) if reverse else part * length


@compiled(inline=True)
def _multiply(x: Any, y: Any, first: int, count: int, total: Any, exclusive: bool, reverse: bool) -> Any:
    """Scan a row's products from left to right, one by one; return the last."""
    for i in range(count):
        at = first + (count - 1 - i if reverse else i)
        before, total = total, total * x[at]
        y[at] = before if exclusive else total
    return total


@functools.cache
def row_part(op: str, dtype: str) -> int:
    """The address of the part function for rows."""
    code, item_bytes = OPS.index(op), np.dtype(dtype).itemsize
    is_watched, (least, most) = op == "product" and "float" in dtype, SAFE

    def row_part(x: Any, y: Any, state: Any, other: Any, job: Any, task: int, lane: int, part: int) -> None:
        if task == COPY:
            state[0] = other[0]
            return
        if task == JOIN:
            state[0] = _combine(code, state[0], other[0])
            return
        N, reverse = job[_N], job[_REVERSE] != 0
        begin = _begin(N, part, SEGMENT, reverse)
        count = min(SEGMENT, N - part * SEGMENT)
        row = lane * job[_ROWS_PER_LANE]
        first = row * N + begin
        if task == TOTAL:
            state[0] = total_row(x, first, count, code)
            return
        ahead = job[_THREADS] * SEGMENT * (-1 if reverse and job[_PARTS] > 1 else 1)  # about the next part
        if not 0 <= first + ahead < N * job[_ROWS]:
            ahead = 0
        exclusive, may_stream = job[_EXCLUSIVE] != 0, job[_STREAM] != 0 and (count % BLOCK == 0 or count >= _LONG)
        for r in range(row, min(row + job[_ROWS_PER_LANE], job[_ROWS])):
            first = r * N + begin
            blocks_at = first + (count % BLOCK if reverse else 0)
            stream = may_stream and blocks_at * item_bytes % STREAM_ALIGNMENT == 0
            end = state[0]
            is_safe = not is_watched or least <= abs(end) <= most
            if is_safe:
                is_safe = scan_row(x, y, first, count, end, exclusive, reverse, stream, ahead, code)
            if not is_safe:
                ints_at(job[_DOUBTS], job[_LANES])[lane] = 1
                if task == RESCAN or job[_PARTS] == 1:
                    end = _multiply(x, y, first, count, end, exclusive, reverse)
            elif task == RESCAN:
                end = _combine(code, end, total_row(x, first, count, code))
            if task == RESCAN:
                state[0] = end

    return _compile(row_part, op, dtype)


@functools.cache
def column_part(op: str, dtype: str) -> int:
    """The address of the part function for columns."""
    code = OPS.index(op)

    def column_part(x: Any, y: Any, state: Any, other: Any, job: Any, task: int, lane: int, part: int) -> None:
        N, all_columns, most, length = job[_N], job[_COLUMNS], job[_COLUMNS_PER_LANE], job[_PART_LENGTH]
        lanes = (all_columns + most - 1) // most  # per matrix
        left = lane % lanes * most
        width = min(most, all_columns - left)
        if task == COPY:
            for c in range(width):
                state[c] = other[c]
            return
        if task == JOIN:
            for c in range(width):
                state[c] = _combine(code, state[c], other[c])
            return
        exclusive, reverse = job[_EXCLUSIVE] != 0, job[_REVERSE] != 0
        count = min(length, N - part * length)
        top = lane // lanes * N + _begin(N, part, length, reverse)
        step = -all_columns if reverse else all_columns
        first = (top + count - 1 if reverse else top) * all_columns + left
        c, is_safe = 0, True
        while c < width:
            columns = STRIP if width - c >= STRIP else min(BLOCK, width - c)
            if task == TOTAL:
                total_strip(x, first + c, step, count, columns, state, c, code)
            else:  # always top to bottom: only `state`, from totals of other parts, can be unsafe
                is_safe &= scan_strip(x, y, first + c, step, count, columns, state, other, c, exclusive, code)
            c += columns
        if not is_safe:
            ints_at(job[_DOUBTS], job[_LANES])[lane] = 1

    return _compile(column_part, op, dtype)


def _compile(function: Callable[..., None], op: str, dtype: str) -> int:
    """The address of the function, compiled for elements of `dtype`."""
    function.__name__ = f"{function.__name__}_{op}_{dtype}"
    element, total = (TypeName(f"{name}*") for name in (dtype, ScanOp(op).total_dtype(dtype)))
    compiled_part = linked(element, element, total, total, TypeName("int64*"), *(types.int64,) * 3)(function)
    return address_of(compiled_part)
