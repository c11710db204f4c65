"""Operations on images, one after the other: what conv_fused launches. A row of the table is an operation, and begins
with the address of the code that carries it out (image_operation.py).
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from onchip.kernels.cpu.image_operation import CALL_BYTES, put_call
from onchip.kernels.cpu.jit import compiled, ints_at, linked, take_ticket


@intrinsic  # type: ignore[untyped-decorator]
def _run(typing_context: Any, code: Any, row: Any, call: Any) -> Any:
    """Call the code of an operation, by its address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 2)
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 3), codegen


@compiled(inline=True)
def _code(row: int) -> int:
    return ints_at(row, 2)[0]  # type: ignore[no-any-return]


@compiled(inline=True)
def _group(row: int) -> int:
    return ints_at(row, 2)[1]  # type: ignore[no-any-return]


@linked(*(types.int64,) * 9)
def tile_of_images(
    table: int, row_bytes: int, call: int, L: int, here: int, images: int, first: int, x: int, y: int
) -> None:
    """A tile of images through all operations: a group of images through those with one group, then the next group."""
    end, start = table + L * row_bytes, table
    while start < end:
        group, stop = _group(start), start + row_bytes
        while stop < end and _group(stop) == group:
            stop += row_bytes
        for skip in range(0, images, group):
            put_call(call, here, min(group, images - skip), first + skip, skip, x, y, 0, 1)
            for row in range(start, stop, row_bytes):
                _run(_code(row), row, call)
        start = stop


@compiled()
def run_tile(table: int, row_bytes: int, scratch: int, calls: int, L: int, own: int, B: int, x: int, y: int) -> None:
    """B images that are one tile, by the thread that calls: with nobody to share with, waking others is a loss."""
    tile_of_images(table, row_bytes, calls, L, scratch, B, 0, x, y)


@compiled(parallel=True)
def run_images(
    table: int, row_bytes: int, scratch: int, calls: int, L: int, own: int, tile: int, B: int, x: int, y: int,
    threads: int, tickets: int,
) -> None:  # fmt: skip
    """B images, `tile` at a time. Everything else but sizes is an address.

    table    L operations, row_bytes apart
    scratch  `own` floats a thread
    calls    a Call a thread
    """
    ints_at(tickets, 1)[0] = 0
    for worker in numba.prange(threads):
        here, call = scratch + worker * own * 4, calls + worker * CALL_BYTES
        while True:
            first = take_ticket(tickets) * tile
            if first >= B:
                break
            tile_of_images(table, row_bytes, call, L, here, min(tile, B - first), first, x, y)


@compiled(parallel=True)
def run_few_images(
    table: int, row_bytes: int, scratch: int, calls: int, L: int, own: int, B: int, x: int, y: int, threads: int
) -> None:
    """The same for fewer images than threads: the threads share every operation."""
    for i in range(L):
        for worker in numba.prange(threads):
            row, call = table + i * row_bytes, calls + worker * CALL_BYTES
            put_call(call, scratch, B, 0, 0, x, y, worker, threads)
            _run(_code(row), row, call)
