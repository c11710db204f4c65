"""Integer arithmetic and casts between dtypes, on blocks in cache: the CALL operations of pointwise.

Each is a separate function, called by address, so a network compiles only those it uses. Integers are computed as int64
and wrap when they are stored as int32.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from onchip.kernels.cpu.compiler.jit import array_at, bytes_at, compiled, doubles_at, floats_at, ints_at, linked
from onchip.kernels.cpu.compiler.late_numba import intrinsic, types
from onchip.network.layers import Add, Div, Equal, Greater, GreaterOrEqual, Layer, Mask, Max, Min, Mod, Mul, Sub

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
COMPUTED_INTS = ("int64", "int32")
INT_COMBINATIONS: tuple[type[Layer], ...] = (
    Add, Mul, Max, Min, Sub, Mask, Div, Greater, GreaterOrEqual, Equal, Mod,
)  # index = code  # fmt: skip
_ADD, _MUL, _MAX, _MIN, _SUB, _MASK, _DIV, _GREATER, _GREATER_OR_EQUAL, _EQUAL, _MOD, _TRUNCATED_MOD = range(12)


def int_code(layer: Layer) -> int:
    """The code of a layer in `combine_ints`."""
    return _TRUNCATED_MOD if isinstance(layer, Mod) and layer.truncated else INT_COMBINATIONS.index(type(layer))


@compiled(inline=True)
def _quotient(a: int, b: int) -> int:
    """a / b truncated, b != 0; the lowest int by -1 wraps."""
    if b == -1:
        return -a
    down = a // b
    return down + 1 if down < 0 and down * b != a else down


@_elementwise
def combine_ints(dst: int, first: int, second: int, count: int, code: int) -> None:
    y, a, b = ints_at(dst, count), ints_at(first, count), ints_at(second, count)
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
            has_other_sign = rest != 0 and (rest < 0) != (b[n] < 0)
            y[n] = rest + b[n] if code == _MOD and has_other_sign else rest


# By (input dtype, output dtype): Casts, ToInts and integer arithmetic.
CODE = CASTS | TO_INT_CASTS | {("int64", "int64"): combine_ints}
