"""How threads share rows that they hold in registers: one read for several passes."""

from __future__ import annotations

from dataclasses import dataclass

from onchip.network.types import DTYPE_BYTES

THREADS = 256  # per block
MAX_PER_THREAD = 32  # elements in registers
PREFERRED_PER_THREAD = 8  # elements, for short rows


@dataclass(frozen=True)
class RowThreads:
    vector: int  # elements per load; divides the row
    lanes: int  # threads per row: part of a warp, a warp, or a block; 0: it is too long for registers
    items: int  # vectors per thread, a power of two: few sizes, so few kernels to compile

    @staticmethod
    def of(size: int, dtype: str) -> RowThreads:
        """For rows of this many elements."""
        vector = 4 if size % 4 == 0 and DTYPE_BYTES[dtype] <= 4 else 1
        lanes = 0 if size > THREADS * MAX_PER_THREAD else THREADS
        if size <= 32 * MAX_PER_THREAD:
            lanes = min(32, 1 << (-(-size // PREFERRED_PER_THREAD) - 1).bit_length())
        vectors = -(-size // (vector * lanes)) if lanes else 0
        return RowThreads(vector, lanes, 1 << (vectors - 1).bit_length() if vectors else 0)
