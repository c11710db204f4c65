"""Division by launch-time constants as a multiplication: the host side of common/fast_divide.cuh."""

from __future__ import annotations

import struct

from onchip.kernels.cuda.common.program import Struct

MAX_ELEMENTS = 1 << 31  # indices have 31 bits


def magic_of(size: int) -> tuple[int, int]:
    """(magic, shift) such that n // size == n * magic >> 32 + shift for every n < 2^31; size >= 2."""
    bits = (size - 1).bit_length()
    return (1 << 31 + bits) // size + 1, bits - 1


def divider(size: int) -> Struct:
    """The struct Divider. Sizes of 2^31 and up need no magic: the quotient of a 31-bit index is 0."""
    assert 1 <= size < 1 << 32, f"{size:,} does not fit"
    return Struct((), struct.pack("<III", size, *(magic_of(size) if 1 < size < MAX_ELEMENTS else (0, 0))))


def small_divider(size: int) -> Struct:
    """The struct SmallDivider, for indices below 2^15."""
    return Struct((), struct.pack("<II", size, min((1 << 32) // size, (1 << 32) - 1)))


def index_of(count: int) -> str:
    """The C++ index type for `count` elements and one grid stride past the end."""
    return "u32" if count < MAX_ELEMENTS // 2 else "long long"
