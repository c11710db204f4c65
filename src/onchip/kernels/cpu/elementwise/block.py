"""Compiled side of pointwise.py: runs a table of operations on one block of elements at a time."""

from __future__ import annotations

from onchip.kernels.cpu.compiler.jit import ALL, code_call, compiled, floats_at, ints_at, linked
from onchip.kernels.cpu.compiler.late_numba import types
from onchip.kernels.cpu.microkernels.activation import activate
from onchip.kernels.cpu.threading.threads import run_tasks
from onchip.network.recipe import Array

BLOCK = 1024  # elements: 4 KiB per value
FEW = 16  # blocks per thread: below this, a thread is not woken
GATHER, SLICE, ACTIVATE, COPY, CALL = range(5)  # operations; from CALL on: a function's address
IN_MEMORY, REPEATED, IN_SCRATCH, BROADCAST = range(4)  # where a value is stored


@linked(*(types.int64,) * 6)
def gather(dst: int, src: int, indices: int, count: int, first: int, code: int) -> None:
    """dst[n] = src[indices[n]] for elements of four or eight bytes.

    first  position of the first element in its row
    code   pointwise.py's _gather_code: element bytes; whether a run is contiguous in src, else one repeated element;
           length of the runs, or 0 for arbitrary indices
    """
    index, nbytes, is_line, run = ints_at(indices, count), code & 15, code >> 4 & 1, code >> 8
    if nbytes == 8:
        y64, x64 = ints_at(dst, count), ints_at(src, ALL)
        for n in range(count):
            y64[n] = x64[index[n]]
    elif run == 0:
        y, x = floats_at(dst, count), floats_at(src, ALL)
        for n in range(count):
            y[n] = x[index[n]]
    else:
        n, left = 0, run - first % run
        while n < count:
            length = min(left, count - n)
            y, x = floats_at(dst + n * 4, length), floats_at(src + index[n] * 4, length)
            if is_line:
                for i in range(length):
                    y[i] = x[i]
            else:
                value = x[0]
                for i in range(length):
                    y[i] = value
            n, left = n + length, run


@linked(*(types.int64,) * 3)
def copy(dst: int, src: int, count: int) -> None:
    y, x = floats_at(dst, count), floats_at(src, count)
    for n in range(count):
        y[n] = x[n]


@linked(*(types.int64,) * 7)
def slice_lines(dst: int, src: int, first: int, count: int, width: int, x_width: int, offset: int) -> None:
    """Elements from `first` on of lines of `width`, each `offset` elements into a line of `x_width` elements."""
    n = 0
    while n < count:
        line, column = (first + n) // width, (first + n) % width
        length = min(width - column, count - n)
        y, x = floats_at(dst + n * 4, length), floats_at(src + (line * x_width + offset + column) * 4, length)
        for i in range(length):
            y[i] = x[i]
        n += length


_call = code_call(5)  # dst, two operands, count, code

# Layout of the array that `run_blocks` reads: addresses, then sizes.
_TABLE, _VALUES, _MEMORY, _ADDRESSES, _SCRATCH, _OPERATIONS, _COUNT, _ARRAYS, _SLOTS, _SIZE, _WORDS = range(11)


@compiled()
def _block(worker: int, task: int, run: Array, B: int) -> None:
    """Run all operations on one block.

    table      (operations, 5)  operation, code, result, first and second operand. GATHER: code of _gather_code, second
                                is the index array; SLICE: code is both widths, second the offset in a line; COPY: code
                                is the element size
    values     (values, 4)      where it is stored, slot in `memory` or in scratch, elements per row, element size
    memory     addresses of inputs, outputs, weights and index arrays
    addresses  per worker: the address of every value
    scratch    per worker: `slots` blocks
    """
    table, values, size = ints_at(run[_TABLE], 5 * run[_OPERATIONS]), ints_at(run[_VALUES], 4 * run[_COUNT]), run[_SIZE]
    memory, addresses = ints_at(run[_MEMORY], ALL), ints_at(run[_ADDRESSES] + worker * run[_COUNT] * 8, run[_COUNT])
    scratch = run[_SCRATCH] + worker * run[_SLOTS] * BLOCK * 4
    rows = max(1, BLOCK // size)
    blocks = (size + BLOCK - 1) // BLOCK  # per row; 1 if a block holds whole rows
    row, first = task // blocks * rows, task % blocks * BLOCK
    count = min(BLOCK, size - first) if blocks > 1 else min(rows, B - row) * size
    for v in range(run[_COUNT]):
        where, slot, nbytes = values[4 * v], values[4 * v + 1], values[4 * v + 3]
        if where == IN_MEMORY:
            addresses[v] = memory[slot] + (row * size + first) * nbytes
        elif where == REPEATED:
            addresses[v] = memory[slot] + first * nbytes
        elif where == IN_SCRATCH:
            addresses[v] = scratch + slot * BLOCK * 4
        else:
            addresses[v] = memory[slot] + row * values[4 * v + 2] * nbytes
    for i in range(run[_OPERATIONS]):
        entry = table[5 * i : 5 * i + 5]
        kind, code, dst, a, b = entry[0], entry[1], addresses[entry[2]], addresses[entry[3]], entry[4]
        if kind >= CALL:
            _call(kind, dst, a, addresses[b], count, code)
        elif kind == GATHER:
            gather(dst, a, memory[b] + first * 8, count, first, code)
        elif kind == SLICE:
            slice_lines(dst, a, first, count, code >> 32, code & 0xFFFFFFFF, b)
        elif kind == COPY:
            copy(dst, a, count * code // 4)
        else:
            if dst != a:
                copy(dst, a, count)
            activate(dst, 1, count, count, code)


@linked(*(types.int64,) * 4)
def run_blocks(facts: int, operands: int, B: int, threads: int) -> None:
    """Entry point of a CompiledLaunch."""
    run = ints_at(facts, _WORDS)
    arrays, memory, size = ints_at(operands, run[_ARRAYS]), ints_at(run[_MEMORY], run[_ARRAYS]), run[_SIZE]
    for i in range(run[_ARRAYS]):
        memory[i] = arrays[i]
    rows, blocks = max(1, BLOCK // size), (size + BLOCK - 1) // BLOCK
    tasks = (B + rows - 1) // rows * blocks
    run_tasks(_block, (run, B), tasks, max(1, min(threads, tasks // FEW)))
