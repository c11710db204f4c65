"""Arithmetic: split a batch of host rows into chunks (a slot each), and their copies into slices (a thread each)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from onchip.plan.host_call import SLOT_BYTES

AHEAD = 2  # chunks that are copied to their slots while an earlier one is in flight
SLOTS = AHEAD + 3  # plus one being sent, one in the kernels or returning, one being copied out
MIN_CHUNK_BYTES = 2 << 20  # 40 us of the bus: below, waking threads and launching takes longer than it gains
OFFERED_BYTES = 384 << 10  # 40 us of one core: less is not worth waking a thread (5 us, and its wait for the GIL)
# Every slice costs some us under the GIL, so they are few and large.
CHUNK_BYTES = 1 << 20
MAX_SLICES = 4  # per array and chunk: with those of AHEAD + 1 chunks, more than there are threads
ALIGN_BYTES = 256


def chunk_rows(row_bytes: Sequence[int], B: int) -> int:
    """Rows per chunk of a batch: several chunks even for a smaller batch, so that there is something to overlap.

    row_bytes  of each input and output
    """
    padding, of_all = ALIGN_BYTES * len(row_bytes), max(1, sum(row_bytes))
    most, least = (max(1, (size - padding) // of_all) for size in (SLOT_BYTES, MIN_CHUNK_BYTES))
    step = min(most, max(least, -(-B // (2 * SLOTS))))
    chunks = -(-B // step)
    return -(-B // chunks)  # all of the same size


def place_in_slot(row_bytes: Sequence[int], rows: int) -> list[int]:
    """The offset of each array of a chunk in its slot, and the total size."""
    sizes = (-(-size * rows // ALIGN_BYTES) * ALIGN_BYTES for size in row_bytes)
    return [0, *accumulate(sizes)]


def cut_in_slices(nbytes: int, min_bytes: int) -> list[tuple[int, int]]:
    """Begin and end of the slices of a copy, one per thread; a single one if more do not pay."""
    count = max(1, min(MAX_SLICES, nbytes // min_bytes))
    return list(pairwise(nbytes * i // count for i in range(count + 1)))


@dataclass(frozen=True, eq=False)
class Cut:
    """How batches of one shape are split into chunks."""

    row_bytes: Sequence[int]  # of each input and output
    step: int  # rows per chunk
    count: int
    offsets: Sequence[int]  # of each array in a slot
    size: int  # total
    slices: Sequence[Sequence[tuple[int, int]]]  # per array: begin and end, in the bytes of a chunk

    @classmethod
    def of(cls, row_bytes: Sequence[int], B: int) -> Cut:
        step = chunk_rows(row_bytes, B)
        count = -(-B // step)
        *offsets, size = place_in_slot(row_bytes, step)
        least = CHUNK_BYTES if count > 1 else OFFERED_BYTES
        slices = [cut_in_slices(each * step, least) for each in row_bytes]
        return cls(row_bytes, step, count, offsets, size, slices)
