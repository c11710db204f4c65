"""Operations on images, one after the other: what conv_fused launches. A row of the table is an operation, and begins
with the address of the code that carries it out (conv/operation.py).
"""

from __future__ import annotations

from onchip.kernels.cpu.compiler.jit import code_call, compiled, int_at, ints_at, linked
from onchip.kernels.cpu.compiler.late_numba import types
from onchip.kernels.cpu.conv.operation import CALL_BYTES, put_call
from onchip.kernels.cpu.threading.threads import run_tasks
from onchip.network.recipe import Array

# What `run_images` is told of a network once: its table of L operations, row_bytes apart; `own` floats of scratch and a
# Call for each thread; how many images a tile may have; whether operations are long enough to be shared; flop of an
# image.
_TABLE, _ROW_BYTES, _SCRATCH, _CALLS, _L, _OWN, _TILE, _IS_LONG, _FLOP, _WORDS = range(10)

_THREAD_FLOP = 100_000  # to call another thread for less takes longer than it does


_run = code_call(2)  # of an operation: its row of the table, and the call


@compiled(inline=True)
def _code(row: int) -> int:
    return ints_at(row, 2)[0]  # type: ignore[no-any-return]


@compiled(inline=True)
def _part(row: int) -> tuple[int, int]:
    """Of an operation: how many images go through it together, and with which last operation."""
    told = ints_at(row, 3)
    return told[1], told[2]


@linked(*(types.int64,) * 9)
def tile_of_images(
    table: int, row_bytes: int, call: int, L: int, here: int, images: int, first: int, x: int, y: int
) -> None:
    """A tile of images through all operations: a group of images through those of a part, then the next group."""
    start, end = table, table + L * row_bytes
    while start < end:
        group, last = _part(start)
        stop = table + (last + 1) * row_bytes
        for skip in range(0, images, group):
            put_call(call, here, min(group, images - skip), first + skip, skip, x, y, 0, 1)
            for row in range(start, stop, row_bytes):
                _run(_code(row), row, call)
        start = stop


@compiled()
def _tile(worker: int, piece: int, net: Array, tile: int, B: int, x: int, y: int) -> None:
    first, here, call = piece * tile, net[_SCRATCH] + worker * net[_OWN] * 4, net[_CALLS] + worker * CALL_BYTES
    tile_of_images(net[_TABLE], net[_ROW_BYTES], call, net[_L], here, min(tile, B - first), first, x, y)


@compiled()
def _share(worker: int, share: int, net: Array, row: int, images: int, skip: int, x: int, y: int, shares: int) -> None:
    call = net[_CALLS] + worker * CALL_BYTES
    put_call(call, net[_SCRATCH], images, skip, skip, x, y, share, shares)
    _run(_code(row), row, call)


@linked(*(types.int64,) * 5)
def shared_images(facts: int, B: int, x: int, y: int, threads: int) -> None:
    """tile_of_images by threads that share every operation."""
    net = ints_at(facts, _WORDS)
    table, row_bytes = net[_TABLE], net[_ROW_BYTES]
    start, end = table, table + net[_L] * row_bytes
    while start < end:
        group, last = _part(start)
        stop = table + (last + 1) * row_bytes
        for skip in range(0, B, group):
            images = min(group, B - skip)
            for row in range(start, stop, row_bytes):
                run_tasks(_share, (net, row, images, skip, x, y, threads), threads, threads)
        start = stop


@linked(*(types.int64,) * 4)
def run_images(facts: int, operands: int, B: int, threads: int) -> None:
    """B images; the code of a CompiledLaunch."""
    net, x, y = ints_at(facts, _WORDS), int_at(operands), int_at(operands + 8)
    most = net[_TILE]
    if threads > B and most >= B and net[_IS_LONG]:
        shared_images(facts, B, x, y, threads)
        return
    threads = max(1, min(threads, B * net[_FLOP] // _THREAD_FLOP))
    rounds = (B + most * threads - 1) // (most * threads)
    tile = (B + rounds * threads - 1) // (rounds * threads)  # as many tiles for each thread
    run_tasks(_tile, (net, tile, B, x, y), (B + tile - 1) // tile, threads)
