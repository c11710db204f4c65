"""Casts between dtypes, on blocks in cache. Integers are computed as int64 and wrap when they are stored as int32."""

from __future__ import annotations

from typing import Any

import numpy as np

from onchip.kernels.cpu.compiler.jit import array_at, bytes_at, doubles_at, floats_at, ints_at, linked
from onchip.kernels.cpu.compiler.late_numba import intrinsic, types

_f, _i = np.float32, np.int32
_INFINITY, _SIGN_16 = _i(0x7F800000), _i(0x8000)
_REBIAS = _f(2.0**112)  # from float16's exponent bias to float32's
_HALF_MAX, _HALF_MIN = _f(65520), _f(2.0**-14)  # from _HALF_MAX on, infinity; below _HALF_MIN, subnormal
_HALF, _HALF_BITS = _f(0.5), _i(0x3F000000)  # adding _HALF rounds a subnormal to float16's last bit

_elementwise = linked(*(types.int64,) * 5)  # (dst, first, second, count, code)


@intrinsic
def _int32s_at(typing_context: Any, where: Any, count: Any) -> Any:
    return array_at(types.int32)


@intrinsic
def _int16s_at(typing_context: Any, where: Any, count: Any) -> Any:
    return array_at(types.int16)


# -- to float32, rounded once ----------------------------------------------------------------------------------


@_elementwise
def from_int64(dst: int, src: int, _: int, count: int, code: int) -> None:
    y, x = floats_at(dst, count), ints_at(src, count)
    for n in range(count):
        y[n] = _f(x[n])


@_elementwise
def from_int32(dst: int, src: int, _: int, count: int, code: int) -> None:
    y, x = floats_at(dst, count), _int32s_at(src, count)
    for n in range(count):
        y[n] = _f(x[n])


@_elementwise
def from_int16(dst: int, src: int, _: int, count: int, code: int) -> None:
    y, x = floats_at(dst, count), _int16s_at(src, count)
    for n in range(count):
        y[n] = _f(x[n])


@_elementwise
def from_int8(dst: int, src: int, _: int, count: int, code: int) -> None:
    y, x = floats_at(dst, count), bytes_at(src, count)
    for n in range(count):
        y[n] = _f(np.int8(x[n]))


@_elementwise
def from_uint8(dst: int, src: int, _: int, count: int, code: int) -> None:
    y, x = floats_at(dst, count), bytes_at(src, count)
    for n in range(count):
        y[n] = _f(x[n])


@_elementwise
def from_float64(dst: int, src: int, _: int, count: int, code: int) -> None:
    y, x = floats_at(dst, count), doubles_at(src, count)
    for n in range(count):
        y[n] = _f(x[n])


@_elementwise
def from_float16(dst: int, src: int, _: int, count: int, code: int) -> None:
    y, x = _int32s_at(dst, count), _int16s_at(src, count)
    for n in range(count):
        size = _i(x[n] & 0x7FFF)
        wide = _i(size << 13)
        scaled = _f(wide.view(np.float32) * _REBIAS)
        is_special = size >= 0x7C00  # infinity or NaN
        y[n] = (wide | _INFINITY if is_special else scaled.view(np.int32)) | (x[n] & _SIGN_16) << 16


@_elementwise
def from_bfloat16(dst: int, src: int, _: int, count: int, code: int) -> None:
    y, x = _int32s_at(dst, count), _int16s_at(src, count)
    for n in range(count):
        y[n] = _i(x[n]) << 16


# -- from float32, round to nearest even ------------------------------------------------------------------------


@_elementwise
def to_float64(dst: int, src: int, _: int, count: int, code: int) -> None:
    y, x = doubles_at(dst, count), floats_at(src, count)
    for n in range(count):
        y[n] = np.float64(x[n])


@_elementwise
def to_float16(dst: int, src: int, _: int, count: int, code: int) -> None:
    y, x = _int16s_at(dst, count), _int32s_at(src, count)
    for n in range(count):
        size = _i(x[n] & 0x7FFFFFFF)
        magnitude = _f(size.view(np.float32))
        subnormal = _f(magnitude + _HALF)
        normal = ((size + 0xFFF + (size >> 13 & 1)) >> 13) - (112 << 10)
        finite = normal if magnitude >= _HALF_MIN else subnormal.view(np.int32) - _HALF_BITS
        bits = finite if magnitude < _HALF_MAX else 0x7C00
        bits = bits if magnitude == magnitude else 0x7E00 | (size >> 13 & 0x3FF)
        y[n] = np.int16(bits | (x[n] >> 16 & _SIGN_16))


@_elementwise
def to_bfloat16(dst: int, src: int, _: int, count: int, code: int) -> None:
    y, x = _int16s_at(dst, count), _int32s_at(src, count)
    for n in range(count):
        size = x[n] & 0x7FFFFFFF
        bits = (size + 0x7FFF + (size >> 16 & 1)) >> 16 if size <= _INFINITY else 0x7FC0
        y[n] = np.int16(bits | (x[n] >> 16 & _SIGN_16))


# -- ints as float64, exact up to 2^53 --------------------------------------------------------------------------


@_elementwise
def int64_as_double(dst: int, src: int, _: int, count: int, code: int) -> None:
    y, x = doubles_at(dst, count), ints_at(src, count)
    for n in range(count):
        y[n] = np.float64(x[n])


@_elementwise
def int32_as_double(dst: int, src: int, _: int, count: int, code: int) -> None:
    y, x = doubles_at(dst, count), _int32s_at(src, count)
    for n in range(count):
        y[n] = np.float64(x[n])


# -- to ints: truncated floats, low bits of wider ints; to bool: x != 0 -----------------------------------------


@_elementwise
def trunc_int64(dst: int, src: int, _: int, count: int, code: int) -> None:
    y, x = ints_at(dst, count), floats_at(src, count)
    for n in range(count):
        y[n] = np.int64(x[n])


@_elementwise
def trunc_int32(dst: int, src: int, _: int, count: int, code: int) -> None:
    y, x = _int32s_at(dst, count), floats_at(src, count)
    for n in range(count):
        y[n] = _i(x[n])


@_elementwise
def trunc_byte(dst: int, src: int, _: int, count: int, code: int) -> None:
    """uint8; also int8, which has the same low bits."""
    y, x = bytes_at(dst, count), floats_at(src, count)
    for n in range(count):
        y[n] = np.uint8(_i(x[n]))


@_elementwise
def trunc_double(dst: int, src: int, _: int, count: int, code: int) -> None:
    y, x = ints_at(dst, count), doubles_at(src, count)
    for n in range(count):
        y[n] = np.int64(x[n])


@_elementwise
def is_not_zero(dst: int, src: int, _: int, count: int, code: int) -> None:
    y, x = bytes_at(dst, count), floats_at(src, count)
    for n in range(count):
        y[n] = x[n] != _f(0)


@_elementwise
def int64_is_not_zero(dst: int, src: int, _: int, count: int, code: int) -> None:
    y, x = bytes_at(dst, count), ints_at(src, count)
    for n in range(count):
        y[n] = x[n] != 0


@_elementwise
def int32_is_not_zero(dst: int, src: int, _: int, count: int, code: int) -> None:
    y, x = bytes_at(dst, count), _int32s_at(src, count)
    for n in range(count):
        y[n] = x[n] != 0


@_elementwise
def bool_as_int64(dst: int, src: int, _: int, count: int, code: int) -> None:
    y, x = ints_at(dst, count), bytes_at(src, count)
    for n in range(count):
        y[n] = x[n]


@_elementwise
def bool_as_int32(dst: int, src: int, _: int, count: int, code: int) -> None:
    y, x = _int32s_at(dst, count), bytes_at(src, count)
    for n in range(count):
        y[n] = x[n]


# -- ints ------------------------------------------------------------------------------------------------------


@_elementwise
def widen(dst: int, src: int, _: int, count: int, code: int) -> None:
    y, x = ints_at(dst, count), _int32s_at(src, count)
    for n in range(count):
        y[n] = x[n]


@_elementwise
def wrap(dst: int, src: int, _: int, count: int, code: int) -> None:
    """int64 to int32: the low bits."""
    y, x = _int32s_at(dst, count), ints_at(src, count)
    for n in range(count):
        y[n] = _i(x[n])


CASTS: dict[tuple[str, str], Any] = {
    ("int64", "float32"): from_int64, ("int32", "float32"): from_int32, ("int16", "float32"): from_int16,
    ("int8", "float32"): from_int8, ("uint8", "float32"): from_uint8, ("bool", "float32"): from_uint8,
    ("float64", "float32"): from_float64, ("float16", "float32"): from_float16,
    ("bfloat16", "float32"): from_bfloat16, ("float32", "float64"): to_float64,
    ("float32", "float16"): to_float16, ("float32", "bfloat16"): to_bfloat16,
    ("int64", "float64"): int64_as_double, ("int32", "float64"): int32_as_double,
}  # fmt: skip
TO_INT_CASTS: dict[tuple[str, str], Any] = {
    ("float32", "int64"): trunc_int64, ("float32", "int32"): trunc_int32, ("float32", "uint8"): trunc_byte,
    ("float32", "int8"): trunc_byte, ("float32", "bool"): is_not_zero, ("float64", "int64"): trunc_double,
    ("int64", "int32"): wrap, ("int32", "int64"): widen, ("int64", "bool"): int64_is_not_zero,
    ("int32", "bool"): int32_is_not_zero, ("bool", "int64"): bool_as_int64, ("bool", "int32"): bool_as_int32,
}  # fmt: skip
ALL_CASTS = CASTS | TO_INT_CASTS
COMPUTED_INTS = ("int64", "int32")
