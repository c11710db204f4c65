"""The compiled side of pointwise.py, which writes the tables: what a run of layers does to a block of numbers."""

from __future__ import annotations

from onchip.kernels.cpu.compiler.jit import ALL, code_call, compiled, floats_at, ints_at, linked
from onchip.kernels.cpu.compiler.late_numba import types
from onchip.kernels.cpu.microkernels.activation import activate
from onchip.kernels.cpu.microkernels.function import apply, combine
from onchip.kernels.cpu.threading.threads import run_tasks
from onchip.network.recipe import Array

BLOCK = 1024  # numbers: 4 KiB of each value
FEW = 16  # blocks of a thread: for fewer it is not woken
GATHER, CUT, ACTIVATE, APPLY, COMBINE, MOVE, CALL = range(7)  # operations; from CALL on the address of a function
OUTSIDE, WRITTEN_OUT, INSIDE, STRETCHED = range(4)  # where a value is


@linked(*(types.int64,) * 6)
def gather(to: int, source: int, places: int, count: int, first: int, code: int) -> None:
    """to[n] = source[places[n]], of numbers of four or eight bytes.

    first  of the numbers: its place in a row
    code   bytes, whether the numbers of a run are neighbours in `source`, else the same one, and how long runs are:
           as pointwise.py's _stretch_code has them; 0: number by number
    """
    at, nbytes, is_line, run = ints_at(places, count), code & 15, code >> 4 & 1, code >> 8
    if nbytes == 8:
        wide, given = ints_at(to, count), ints_at(source, ALL)
        for n in range(count):
            wide[n] = given[at[n]]
    elif run == 0:
        y, x = floats_at(to, count), floats_at(source, ALL)
        for n in range(count):
            y[n] = x[at[n]]
    else:
        n, left = 0, run - first % run
        while n < count:
            some = min(left, count - n)
            y, x = floats_at(to + n * 4, some), floats_at(source + at[n] * 4, some)
            if is_line:
                for i in range(some):
                    y[i] = x[i]
            else:
                number = x[0]
                for i in range(some):
                    y[i] = number
            n, left = n + some, run


@linked(*(types.int64,) * 7)
def cut(to: int, source: int, first: int, count: int, width: int, own: int, offset: int) -> None:
    """Numbers `first` and on of lines of `width`, which lie `offset` numbers inside lines of `own`."""
    n = 0
    while n < count:
        line, column = (first + n) // width, (first + n) % width
        some = min(width - column, count - n)
        y, x = floats_at(to + n * 4, some), floats_at(source + (line * own + offset + column) * 4, some)
        for i in range(some):
            y[i] = x[i]
        n += some


_call = code_call(5)  # of where to, two operands, how many numbers, what is told

# What `run_blocks` is told of a run once: addresses, then numbers.
_TABLE, _VALUES, _MEMORY, _PLACES, _SCRATCH, _OPERATIONS, _COUNT, _ARRAYS, _SLOTS, _SIZE, _WORDS = range(11)


@compiled()
def _block(worker: int, piece: int, run: Array, B: int) -> None:
    """One block of the run.

    table    (operations, 5)  what, code, and the values: made, first, second (of a GATHER: its places; of a
                               CUT: where in a line, the code being both widths); the code of a GATHER is that of
                               pointwise.py's _stretch_code, of a MOVE the bytes of a number
    values   (values, 4)      where it is, its place in `memory` or in scratch memory, numbers of a row, bytes of each
    memory   addresses of inputs, outputs, weights and places
    places   of each worker: addresses of the values
    scratch  `slots` blocks of each worker
    """
    table, values, size = ints_at(run[_TABLE], 5 * run[_OPERATIONS]), ints_at(run[_VALUES], 4 * run[_COUNT]), run[_SIZE]
    memory, at = ints_at(run[_MEMORY], ALL), ints_at(run[_PLACES] + worker * run[_COUNT] * 8, run[_COUNT])
    scratch = run[_SCRATCH] + worker * run[_SLOTS] * BLOCK * 4
    rows = max(1, BLOCK // size)
    blocks = (size + BLOCK - 1) // BLOCK  # of a row; one if rows are whole
    row, first = piece // blocks * rows, piece % blocks * BLOCK
    count = min(BLOCK, size - first) if blocks > 1 else min(rows, B - row) * size
    for v in range(run[_COUNT]):
        where, place, nbytes = values[4 * v], values[4 * v + 1], values[4 * v + 3]
        if where == OUTSIDE:
            at[v] = memory[place] + (row * size + first) * nbytes
        elif where == WRITTEN_OUT:
            at[v] = memory[place] + first * nbytes
        elif where == INSIDE:
            at[v] = scratch + place * BLOCK * 4
        else:
            at[v] = memory[place] + row * values[4 * v + 2] * nbytes
    for i in range(run[_OPERATIONS]):
        operation = table[5 * i : 5 * i + 5]
        what, code, to, a, b = operation[0], operation[1], at[operation[2]], at[operation[3]], operation[4]
        if what == COMBINE:
            combine(to, a, at[b], count, code)
        elif what == GATHER:
            gather(to, a, memory[b] + first * 8, count, first, code)
        elif what == CUT:
            cut(to, a, first, count, code >> 32, code & 0xFFFFFFFF, b)
        elif what == APPLY:
            apply(to, a, count, code)
        elif what == MOVE:
            apply(to, a, count * code // 4, -1)
        elif what >= CALL:
            _call(what, to, a, at[b], count, code)
        else:
            if to != a:
                apply(to, a, count, -1)
            activate(to, 1, count, count, code)


@linked(*(types.int64,) * 4)
def run_blocks(facts: int, operands: int, B: int, threads: int) -> None:
    """The code of a CompiledLaunch."""
    run = ints_at(facts, _WORDS)
    given, memory, size = ints_at(operands, run[_ARRAYS]), ints_at(run[_MEMORY], run[_ARRAYS]), run[_SIZE]
    for i in range(run[_ARRAYS]):
        memory[i] = given[i]
    rows, blocks = max(1, BLOCK // size), (size + BLOCK - 1) // BLOCK
    pieces = (B + rows - 1) // rows * blocks
    run_tasks(_block, (run, B), pieces, max(1, min(threads, pieces // FEW)))
