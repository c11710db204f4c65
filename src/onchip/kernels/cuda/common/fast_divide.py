"""Division by launch-time constants as a multiplication: the host side of common/fast_divide.cuh."""

from __future__ import annotations

from ctypes import c_uint32
from pathlib import Path

from onchip.kernels.cuda.common.arguments import Struct
from onchip.kernels.cuda.common.c_struct import CStruct

SOURCE = Path(__file__).with_suffix(".cuh")
MAX_ELEMENTS = 1 << 31  # indices have 31 bits


class Divider(CStruct):
    source, c_name = SOURCE, "Divider"
    _fields_ = (("size", c_uint32), ("magic", c_uint32), ("shift", c_uint32))


class SmallDivider(CStruct):
    source, c_name = SOURCE, "SmallDivider"
    _fields_ = (("size", c_uint32), ("magic", c_uint32))


def magic_of(size: int) -> tuple[int, int]:
    """(magic, shift) such that n // size == n * magic >> 32 + shift for every n < 2^31; size >= 2."""
    bits = (size - 1).bit_length()
    return (1 << 31 + bits) // size + 1, bits - 1


def divider(size: int) -> Struct:
    """Sizes of 2^31 and up need no magic: the quotient of a 31-bit index is 0."""
    magic, shift = magic_of(size) if 1 < size < MAX_ELEMENTS else (0, 0)
    return Divider.of(size=size, magic=magic, shift=shift)


def small_divider(size: int) -> Struct:
    """For indices below 2^15."""
    return SmallDivider.of(size=size, magic=min((1 << 32) // size, (1 << 32) - 1))


def index_of(count: int) -> str:
    """The C++ index type for `count` elements and one grid stride past the end."""
    return "u32" if count < MAX_ELEMENTS // 2 else "long long"
