"""Ids of a batch, sorted: host side of gradient/sort_ids.cu."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from onchip.errors import PlanError
from onchip.kernels.cuda.common.arguments import NOTHING, Argument, Input, Scratch, UInt32
from onchip.kernels.cuda.common.dtypes import IDS
from onchip.kernels.cuda.common.program import Budget, Instance, KernelLaunch, Program, grid_1d

SOURCE = Path(__file__).with_suffix(".cu")
THREADS, MAX_RANKED, TILE, DIGIT_BITS = 256, 8192, 4096, 10  # as in gradient/sort_ids.cu
MAX_IDS = 1 << 31
_ALIGN_BYTES = 16


@dataclass(frozen=True)
class SortedIds:
    """The launches that sort input 0, N ids below V, and where in scratch memory the result is.

    ranges  (V, 2) uint32, at 0: the begin and the end of each id in keys and order; cleared before the first launch
    keys    (N,) uint32: the sorted ids; V where an id is out of range
    order   (N,) uint32: the position of each in the batch
    """

    launches: tuple[KernelLaunch, ...]
    keys: Scratch
    order: Scratch
    range_bytes: int
    scratch_bytes: int


def sort_ids(ids_dtype: str, N: int, V: int) -> SortedIds:
    if N >= MAX_IDS:
        raise PlanError("too many ids", got=f"{N:,}", expected=f"fewer than {MAX_IDS:,} per step", hint="fewer rows")
    range_bytes = _aligned(8 * V)
    arrays = [Scratch(range_bytes + i * _aligned(4 * N)) for i in range(4)]
    keys, order = arrays[:2]
    end = range_bytes + 2 * _aligned(4 * N)
    if N <= MAX_RANKED:
        arguments = (Input(0), keys, order, Scratch(0), UInt32(N), UInt32(V))
        launches = (_launch(f"rank_ids<{IDS[ids_dtype]}>", -(-N // 32), *arguments),) if N else ()
        return SortedIds(launches, keys, order, range_bytes, end)
    return _sorted_by_digits(ids_dtype, N, V, arrays, range_bytes)


def _sorted_by_digits(ids_dtype: str, N: int, V: int, arrays: list[Scratch], range_bytes: int) -> SortedIds:
    """Every digit sorts from one pair of arrays into the other."""
    shifts = digit_shifts(V)
    tiles, bits = -(-N // TILE), shifts[1] if len(shifts) > 1 else V.bit_length()
    digits = 1 << bits
    counts = Scratch(arrays[3].offset + _aligned(4 * N))
    totals = Scratch(counts.offset + _aligned(4 * digits * tiles))
    launches: list[KernelLaunch] = []
    read: Argument = Input(0)
    positions: Argument = NOTHING
    name, to = IDS[ids_dtype], len(shifts) % 2 * 2
    for shift in shifts:
        to = 2 - to  # the last digit sorts into the first pair
        keys, order = arrays[to : to + 2]
        sizes = UInt32(N), UInt32(V), UInt32(shift), UInt32(digits)
        launches += (
            _launch(f"count_digits<{name}>", tiles, read, counts, *sizes),
            _launch("scan_digits", digits, counts, totals, UInt32(tiles)),
            _launch(f"scatter_ids<{name}>", tiles, read, positions, counts, totals, keys, order, *sizes),
        )
        name, read, positions = "unsigned int", keys, order
    keys, order = arrays[:2]
    launches.append(_launch("find_rows", -(-N // THREADS), keys, Scratch(0), UInt32(N), UInt32(V)))
    return SortedIds(tuple(launches), keys, order, range_bytes, totals.offset + _aligned(4 * digits))


def digit_shifts(V: int) -> list[int]:
    """The first bit of each digit of 0 .. V, the low one first."""
    passes = -(-V.bit_length() // DIGIT_BITS)
    bits = -(-V.bit_length() // passes)
    return list(range(0, passes * bits, bits))


def _launch(name: str, blocks: int, *arguments: Argument) -> KernelLaunch:
    return KernelLaunch(Program(SOURCE, name), grid_1d(blocks, THREADS), arguments, Budget(registers=128))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES


def _instance(dtype: str, N: int, launch: int) -> Instance:
    sort = sort_ids(dtype, N, 100_000).launches[launch]
    return Instance(sort.program.name_expression, lambda device: sort)


INSTANCES = (
    _instance("int64", 1000, 0), _instance("int32", 1000, 0), *(_instance("int32", 1 << 20, i) for i in range(7)),
    _instance("int64", 1 << 20, 0), _instance("int64", 1 << 20, 2),
)  # fmt: skip
