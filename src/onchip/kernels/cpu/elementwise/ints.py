"""Ints, and numbers of one type as those of another, on blocks that lie in cache: what pointwise's operations do.

Each is a function of its own, called by its address, so that a network has those compiled that it needs. Ints are
computed as int64, and wrap where they are written back as int32.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from onchip.kernels.cpu.compiler.jit import array_at, bytes_at, compiled, doubles_at, floats_at, ints_at, linked
from onchip.kernels.cpu.compiler.late_numba import intrinsic, types
from onchip.network.layers import Add, Div, Equal, Greater, GreaterOrEqual, Layer, Mask, Max, Min, Mod, Mul, Sub

_f, _i = np.float32, np.int32
_INFINITY, _SIGN_16 = _i(0x7F800000), _i(0x8000)
_UP = _f(2.0**112)  # from the exponents of float16 to those of float32
_HALF_MAX, _HALF_MIN = _f(65520), _f(2.0**-14)  # from here on an infinity; below it float16 has fewer digits
_HALF, _HALF_BITS = _f(0.5), _i(0x3F000000)  # sums of it and less than _HALF_MIN end where float16's digits do

_number = linked(*(types.int64,) * 5)  # a function of: where to, first, second, how many numbers, a code


@intrinsic
def _words_at(typing_context: Any, where: Any, count: Any) -> Any:
    return array_at(types.int32)


@intrinsic
def _shorts_at(typing_context: Any, where: Any, count: Any) -> Any:
    return array_at(types.int16)


# -- to float32, rounded once ----------------------------------------------------------------------------------


@_number
def from_int64(to: int, source: int, _: int, count: int, code: int) -> None:
    y, x = floats_at(to, count), ints_at(source, count)
    for n in range(count):
        y[n] = _f(x[n])


@_number
def from_int32(to: int, source: int, _: int, count: int, code: int) -> None:
    y, x = floats_at(to, count), _words_at(source, count)
    for n in range(count):
        y[n] = _f(x[n])


@_number
def from_int16(to: int, source: int, _: int, count: int, code: int) -> None:
    y, x = floats_at(to, count), _shorts_at(source, count)
    for n in range(count):
        y[n] = _f(x[n])


@_number
def from_int8(to: int, source: int, _: int, count: int, code: int) -> None:
    y, x = floats_at(to, count), bytes_at(source, count)
    for n in range(count):
        y[n] = _f(np.int8(x[n]))


@_number
def from_uint8(to: int, source: int, _: int, count: int, code: int) -> None:
    y, x = floats_at(to, count), bytes_at(source, count)
    for n in range(count):
        y[n] = _f(x[n])


@_number
def from_float64(to: int, source: int, _: int, count: int, code: int) -> None:
    y, x = floats_at(to, count), doubles_at(source, count)
    for n in range(count):
        y[n] = _f(x[n])


@_number
def from_float16(to: int, source: int, _: int, count: int, code: int) -> None:
    y, x = _words_at(to, count), _shorts_at(source, count)
    for n in range(count):
        size = _i(x[n] & 0x7FFF)
        wide = _i(size << 13)
        scaled = _f(wide.view(np.float32) * _UP)
        is_odd = size >= 0x7C00  # an infinity or no number
        y[n] = (wide | _INFINITY if is_odd else scaled.view(np.int32)) | (x[n] & _SIGN_16) << 16


@_number
def from_bfloat16(to: int, source: int, _: int, count: int, code: int) -> None:
    y, x = _words_at(to, count), _shorts_at(source, count)
    for n in range(count):
        y[n] = _i(x[n]) << 16


# -- from float32, to the nearest, to even where two are as near ------------------------------------------------


@_number
def to_float64(to: int, source: int, _: int, count: int, code: int) -> None:
    y, x = doubles_at(to, count), floats_at(source, count)
    for n in range(count):
        y[n] = np.float64(x[n])


@_number
def to_float16(to: int, source: int, _: int, count: int, code: int) -> None:
    y, x = _shorts_at(to, count), _words_at(source, count)
    for n in range(count):
        size = _i(x[n] & 0x7FFFFFFF)
        number = _f(size.view(np.float32))
        few = _f(number + _HALF)
        many = ((size + 0xFFF + (size >> 13 & 1)) >> 13) - (112 << 10)
        finite = many if number >= _HALF_MIN else few.view(np.int32) - _HALF_BITS
        made = finite if number < _HALF_MAX else 0x7C00
        made = made if number == number else 0x7E00 | (size >> 13 & 0x3FF)
        y[n] = np.int16(made | (x[n] >> 16 & _SIGN_16))


@_number
def to_bfloat16(to: int, source: int, _: int, count: int, code: int) -> None:
    y, x = _shorts_at(to, count), _words_at(source, count)
    for n in range(count):
        size = x[n] & 0x7FFFFFFF
        made = (size + 0x7FFF + (size >> 16 & 1)) >> 16 if size <= _INFINITY else 0x7FC0
        y[n] = np.int16(made | (x[n] >> 16 & _SIGN_16))


# -- ints as float64, exact up to 2^53 --------------------------------------------------------------------------


@_number
def int64_as_double(to: int, source: int, _: int, count: int, code: int) -> None:
    y, x = doubles_at(to, count), ints_at(source, count)
    for n in range(count):
        y[n] = np.float64(x[n])


@_number
def int32_as_double(to: int, source: int, _: int, count: int, code: int) -> None:
    y, x = doubles_at(to, count), _words_at(source, count)
    for n in range(count):
        y[n] = np.float64(x[n])


# -- to ints: the whole part of floats, the last bits of ints, whether a number is not 0 -------------------------


@_number
def whole_int64(to: int, source: int, _: int, count: int, code: int) -> None:
    y, x = ints_at(to, count), floats_at(source, count)
    for n in range(count):
        y[n] = np.int64(x[n])


@_number
def whole_int32(to: int, source: int, _: int, count: int, code: int) -> None:
    y, x = _words_at(to, count), floats_at(source, count)
    for n in range(count):
        y[n] = _i(x[n])


@_number
def whole_byte(to: int, source: int, _: int, count: int, code: int) -> None:
    """uint8, or int8, which has the same last bits."""
    y, x = bytes_at(to, count), floats_at(source, count)
    for n in range(count):
        y[n] = np.uint8(_i(x[n]))


@_number
def whole_of_double(to: int, source: int, _: int, count: int, code: int) -> None:
    y, x = ints_at(to, count), doubles_at(source, count)
    for n in range(count):
        y[n] = np.int64(x[n])


@_number
def is_not_zero(to: int, source: int, _: int, count: int, code: int) -> None:
    y, x = bytes_at(to, count), floats_at(source, count)
    for n in range(count):
        y[n] = x[n] != _f(0)


@_number
def int64_is_not_zero(to: int, source: int, _: int, count: int, code: int) -> None:
    y, x = bytes_at(to, count), ints_at(source, count)
    for n in range(count):
        y[n] = x[n] != 0


@_number
def int32_is_not_zero(to: int, source: int, _: int, count: int, code: int) -> None:
    y, x = bytes_at(to, count), _words_at(source, count)
    for n in range(count):
        y[n] = x[n] != 0


@_number
def bool_as_int64(to: int, source: int, _: int, count: int, code: int) -> None:
    y, x = ints_at(to, count), bytes_at(source, count)
    for n in range(count):
        y[n] = x[n]


@_number
def bool_as_int32(to: int, source: int, _: int, count: int, code: int) -> None:
    y, x = _words_at(to, count), bytes_at(source, count)
    for n in range(count):
        y[n] = x[n]


# -- ints ------------------------------------------------------------------------------------------------------


@_number
def widen(to: int, source: int, _: int, count: int, code: int) -> None:
    y, x = ints_at(to, count), _words_at(source, count)
    for n in range(count):
        y[n] = x[n]


@_number
def wrap(to: int, source: int, _: int, count: int, code: int) -> None:
    """int64 as int32: the last bits."""
    y, x = _words_at(to, count), ints_at(source, count)
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
WHOLES: dict[tuple[str, str], Any] = {
    ("float32", "int64"): whole_int64, ("float32", "int32"): whole_int32, ("float32", "uint8"): whole_byte,
    ("float32", "int8"): whole_byte, ("float32", "bool"): is_not_zero, ("float64", "int64"): whole_of_double,
    ("int64", "int32"): wrap, ("int32", "int64"): widen, ("int64", "bool"): int64_is_not_zero,
    ("int32", "bool"): int32_is_not_zero, ("bool", "int64"): bool_as_int64, ("bool", "int32"): bool_as_int32,
}  # fmt: skip
COMPUTED_INTS = ("int64", "int32")
INT_COMBINATIONS: tuple[type[Layer], ...] = (
    Add, Mul, Max, Min, Sub, Mask, Div, Greater, GreaterOrEqual, Equal, Mod,
)  # by their codes  # fmt: skip
_ADD, _MUL, _MAX, _MIN, _SUB, _MASK, _DIV, _GREATER, _GREATER_OR_EQUAL, _EQUAL, _MOD, _TRUNCATED_MOD = range(12)


def int_code(layer: Layer) -> int:
    """What `combine_ints` knows it by."""
    return _TRUNCATED_MOD if isinstance(layer, Mod) and layer.truncated else INT_COMBINATIONS.index(type(layer))


@compiled(inline=True)
def _quotient(a: int, b: int) -> int:
    """The whole part of a / b, which is not 0; the least int by -1 wraps."""
    if b == -1:
        return -a
    down = a // b
    return down + 1 if down < 0 and down * b != a else down


@_number
def combine_ints(to: int, first: int, second: int, count: int, code: int) -> None:
    y, a, b = ints_at(to, count), ints_at(first, count), ints_at(second, count)
    if code == _ADD:
        for n in range(count):
            y[n] = a[n] + b[n]
    elif code == _MUL:
        for n in range(count):
            y[n] = a[n] * b[n]
    elif code == _MAX:
        for n in range(count):
            y[n] = b[n] if b[n] > a[n] else a[n]
    elif code == _MIN:
        for n in range(count):
            y[n] = b[n] if b[n] < a[n] else a[n]
    elif code == _SUB:
        for n in range(count):
            y[n] = a[n] - b[n]
    elif code == _MASK:
        for n in range(count):
            y[n] = a[n] if b[n] != 0 else 0
    elif code == _GREATER:
        for n in range(count):
            y[n] = 1 if a[n] > b[n] else 0
    elif code == _GREATER_OR_EQUAL:
        for n in range(count):
            y[n] = 1 if a[n] >= b[n] else 0
    elif code == _EQUAL:
        for n in range(count):
            y[n] = 1 if a[n] == b[n] else 0
    elif code == _DIV:
        for n in range(count):
            y[n] = _quotient(a[n], b[n])
    else:
        for n in range(count):
            rest = a[n] - _quotient(a[n], b[n]) * b[n]
            is_across = rest != 0 and (rest < 0) != (b[n] < 0)
            y[n] = rest + b[n] if code == _MOD and is_across else rest


# By what is given and what is made: Casts, ToInts, and what is computed of ints.
CODE = CASTS | WHOLES | {("int64", "int64"): combine_ints}
