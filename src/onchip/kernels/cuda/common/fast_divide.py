"""Divisions by numbers that are known when a kernel is launched: the host side of common/fast_divide.cuh."""

from __future__ import annotations

import struct

from onchip.kernels.cuda.common.program import Struct

MOST = 1 << 31  # numbers that 31 bits count


def magic_of(size: int) -> tuple[int, int]:
    """(magic, shift) such that n // size is n * magic >> 32 + shift for every n < 2^31; size is 2 at least."""
    bits = (size - 1).bit_length()
    return (1 << 31 + bits) // size + 1, bits - 1


def divider(size: int) -> Struct:
    """A Divider. A size of 2^31 or more divides nothing that 31 bits count."""
    assert 1 <= size < 1 << 32, f"{size:,} does not fit"
    return Struct((), struct.pack("<III", size, *(magic_of(size) if 1 < size < MOST else (0, 0))))


def parts(size: int) -> Struct:
    """Parts, of fewer than 2^15 numbers."""
    return Struct((), struct.pack("<II", size, min((1 << 32) // size, (1 << 32) - 1)))


def index_of(count: int) -> str:
    """The type that a kernel counts `count` numbers with, and the step behind the last one."""
    return "u32" if count < MOST // 2 else "long long"
