"""The interpreter that conv_fused launches: it runs a table of operations on images, one after the other.

A row of the table is an operation; it begins with the address of the operation's code (conv/operation.py).
"""

from __future__ import annotations

from onchip.kernels.cpu.compiler.jit import code_call, compiled, int_at, ints_at, linked
from onchip.kernels.cpu.compiler.late_numba import types
from onchip.kernels.cpu.conv.operation import CALL_BYTES, put_call
from onchip.kernels.cpu.threading.threads import run_tasks
from onchip.network.recipe import Array

# Fields of the array that `run_images` reads: table address and bytes per row; addresses of all threads' scratch
# and Calls; operation count; scratch floats per thread; images per tile; whether threads share operations; image flop.
_TABLE, _ROW_BYTES, _SCRATCH, _CALLS, _L, _FLOATS, _TILE_IMAGES, _IS_SHARED, _FLOP, _FIELDS = range(10)

_THREAD_FLOP = 100_000  # per thread: below this, waking a thread takes longer than the work


_run = code_call(2)  # an operation's code, on the addresses of its table row and of its Call


@compiled(inline=True)
def _code(row: int) -> int:
    return ints_at(row, 2)[0]  # type: ignore[no-any-return]


@compiled(inline=True)
def _segment(row: int) -> tuple[int, int]:
    """Images per group of an operation's segment, and the segment's last operation."""
    head = ints_at(row, 3)
    return head[1], head[2]


@linked(*(types.int64,) * 9)
def tile_of_images(
    table: int, row_bytes: int, call: int, L: int, scratch: int, images: int, first: int, x: int, y: int
) -> None:
    """Run all operations on a tile of images: segment by segment, and within a segment group by group."""
    start, end = table, table + L * row_bytes
    while start < end:
        group, last = _segment(start)
        stop = table + (last + 1) * row_bytes
        for skip in range(0, images, group):
            put_call(call, scratch, min(group, images - skip), first + skip, skip, x, y, 0, 1)
            for row in range(start, stop, row_bytes):
                _run(_code(row), row, call)
        start = stop


@compiled()
def _tile_task(worker: int, task: int, args: Array, tile: int, B: int, x: int, y: int) -> None:
    first, base, call = task * tile, args[_SCRATCH] + worker * args[_FLOATS] * 4, args[_CALLS] + worker * CALL_BYTES
    tile_of_images(args[_TABLE], args[_ROW_BYTES], call, args[_L], base, min(tile, B - first), first, x, y)


@compiled()
def _part(worker: int, part: int, args: Array, row: int, images: int, skip: int, x: int, y: int, parts: int) -> None:
    call = args[_CALLS] + worker * CALL_BYTES
    put_call(call, args[_SCRATCH], images, skip, skip, x, y, part, parts)
    _run(_code(row), row, call)


@linked(*(types.int64,) * 5)
def shared_images(facts: int, B: int, x: int, y: int, threads: int) -> None:
    """tile_of_images, but all threads share every operation."""
    args = ints_at(facts, _FIELDS)
    table, row_bytes = args[_TABLE], args[_ROW_BYTES]
    start, end = table, table + args[_L] * row_bytes
    while start < end:
        group, last = _segment(start)
        stop = table + (last + 1) * row_bytes
        for skip in range(0, B, group):
            images = min(group, B - skip)
            for row in range(start, stop, row_bytes):
                run_tasks(_part, (args, row, images, skip, x, y, threads), threads, threads)
        start = stop


@linked(*(types.int64,) * 4)
def run_images(facts: int, operands: int, B: int, threads: int) -> None:
    """Run B images; entry point of a CompiledLaunch."""
    args, x, y = ints_at(facts, _FIELDS), int_at(operands), int_at(operands + 8)
    max_images = args[_TILE_IMAGES]
    if threads > B and max_images >= B and args[_IS_SHARED]:
        shared_images(facts, B, x, y, threads)
        return
    threads = max(1, min(threads, B * args[_FLOP] // _THREAD_FLOP))
    rounds = (B + max_images * threads - 1) // (max_images * threads)
    tile = (B + rounds * threads - 1) // (rounds * threads)  # the same number of tiles for each thread
    run_tasks(_tile_task, (args, tile, B, x, y), (B + tile - 1) // tile, threads)
