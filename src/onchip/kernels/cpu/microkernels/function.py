"""Functions of one and two elements, for the expressions of elementwise layers; and loops, where a loop is needed.

As in exponential.py, they are implemented here where LLVM can vectorise them. Powers are computed in float64, accurate
to one float32 ulp. The rest, huge angles and powers of non-positive bases, runs element by element through the C
library in float64.
"""

from __future__ import annotations

import math

import numpy as np

from onchip.kernels.cpu.compiler.jit import compiled, floats_at, linked, multiply_add
from onchip.kernels.cpu.compiler.late_numba import types
from onchip.kernels.cpu.microkernels.exponential import expm1_exp, scaled_erfc

_f = np.float32
_ZERO, _ONE, _TWO, _HALF = _f(0), _f(1), _f(2), _f(0.5)
_MAX_ANGLE = _f(1e4)  # up to here, n * _RIGHT_1 and n * _RIGHT_2 are exact
_RIGHT_1, _RIGHT_2, _RIGHT_3 = (
    _f(1.5703125),
    _f(0.0004837512969970703),
    _f(7.549790126404332e-08),
)  # pi / 2 as a sum: 11 bits, 11 more, the rest
_PER_RIGHT_ANGLE, _ROUND = _f(2 / math.pi), _f(1.5 * 2.0**23)  # adding _ROUND rounds to an integer in the low bits
_S3, _S5, _S7, _S9 = (_f((-1) ** i / math.factorial(2 * i + 1)) for i in range(1, 5))
_C4, _C6, _C8, _C10 = (_f((-1) ** i / math.factorial(2 * i)) for i in range(2, 6))
# erf(x) / x as a polynomial of x^2, lowest power first: a least-squares fit to scipy.special.erf on 400 Chebyshev
# points of 0 < x^2 < 1, relative error 4e-11.
_P0, _P1, _P2, _P3, _P4, _P5, _P6, _P7 = (
    _f(c) for c in (
        1.1283791670623617, -0.3761263847599064, 0.11283782622056336, -0.02686543831031566, 0.005221053412194647,
        -0.0008484396547222682, 0.00011268253874249521, -9.673590754781416e-06,
    )
)  # fmt: skip
# atan(x) / x as a polynomial of x^2, lowest power first: a least-squares fit to arctan on 400 Chebyshev points of
# 0 < x^2 < 1, relative error 3e-9.
_A0, _A1, _A2, _A3, _A4, _A5, _A6, _A7, _A8, _A9 = (
    _f(c) for c in (
        0.9999999972583171, -0.33333277788038695, 0.19998113468479217, -0.14260394787747216, 0.10934234989629382,
        -0.08355068436871976, 0.05717845685657837, -0.030438311689812793, 0.010533082390852981, -0.0017111374422124775,
    )
)  # fmt: skip
_HALF_PI, _HALF_PI_REST = _f(math.pi / 2), _f(math.pi / 2 - float(_f(math.pi / 2)))
_LN_2, _LOG2_E, _ROOT_HALF_BITS, _FRACTION = math.log(2), math.log2(math.e), 0x3FE6A09E667F3BCD, (1 << 52) - 1
_TINY_ANGLE = _f(1e-4)  # below, tan x = x in float32
_TINY, _LARGEST = _f(2.0**-126), np.finfo(_f).max
_MAX_EXPONENT = 300.0  # exp overflows float32 above this, and is 0 below its negative


@compiled(inline=True)
def _sine(x: np.float32, quarters: int) -> np.float32:
    """sin(x + quarters * pi / 2) for |x| <= _MAX_ANGLE."""
    t = np.float32(multiply_add(x, _PER_RIGHT_ANGLE, _ROUND))
    n = t - _ROUND
    r = multiply_add(-n, _RIGHT_3, multiply_add(-n, _RIGHT_2, multiply_add(-n, _RIGHT_1, x)))  # -45 to 45 degrees
    q = r * r
    quarter = t.view(np.int32) + np.int32(quarters)
    sine = multiply_add(r * q, multiply_add(q, multiply_add(q, multiply_add(q, _S9, _S7), _S5), _S3), r)
    high = multiply_add(q, multiply_add(q, multiply_add(q, _C10, _C8), _C6), _C4)
    cosine = multiply_add(q * q, high, multiply_add(-_HALF, q, _ONE))
    size: np.float32 = sine if quarter & np.int32(1) == 0 else cosine
    return size if quarter & np.int32(2) == 0 else -size


@linked(*(types.int64,) * 5)
def sines(dst: int, src: int, _: int, count: int, quarters: int) -> None:
    """sin(x + quarters * pi / 2); quarters = 1 for cosines. May be in place."""
    y, x = floats_at(dst, count), floats_at(src, count)
    is_far = False
    for n in range(count):
        is_far |= not abs(x[n]) <= _MAX_ANGLE  # or NaN
    if is_far:
        for n in range(count):
            if abs(x[n]) <= _MAX_ANGLE:
                y[n] = _sine(x[n], quarters)
            else:
                y[n] = _f(math.cos(np.float64(x[n])) if quarters else math.sin(np.float64(x[n])))
        return
    for n in range(count):
        y[n] = _sine(x[n], quarters)


@linked(*(types.int64,) * 5)
def cosines(dst: int, src: int, _: int, count: int, code: int) -> None:
    sines(dst, src, src, count, 1)


@compiled(inline=True)
def error_function(x: np.float32) -> np.float32:
    """x P(x^2) up to 1; above, 1 - erfc(x), whose error is below the rounding of 1."""
    q = x * x
    high = multiply_add(q, multiply_add(q, multiply_add(q, _P7, _P6), _P5), _P4)
    near = x * multiply_add(q, multiply_add(q, multiply_add(q, multiply_add(q, high, _P3), _P2), _P1), _P0)
    z = abs(x)
    t = _ONE / multiply_add(_HALF, z, _ONE)
    _, e = expm1_exp(-q)
    far = _ONE - t * e * scaled_erfc(t)
    size: np.float32 = far if x >= _ZERO else -far
    y: np.float32 = near if z < _ONE or x != x else size
    return y


@compiled(inline=True)
def arctan(x: np.float32) -> np.float32:
    """arctan x; for |x| > 1, pi / 2 - arctan(1 / |x|)."""
    z = abs(x)
    is_steep = z > _ONE
    t = _ONE / z if is_steep else z
    q = t * t
    high = multiply_add(q, multiply_add(q, multiply_add(q, multiply_add(q, _A9, _A8), _A7), _A6), _A5)
    low = multiply_add(q, multiply_add(q, multiply_add(q, multiply_add(q, high, _A4), _A3), _A2), _A1)
    near = t * multiply_add(q, low, _A0)
    size: np.float32 = _HALF_PI - (near - _HALF_PI_REST) if is_steep else near
    y: np.float32 = size if x >= _ZERO else -size
    return x if x != x or z < _TINY_ANGLE else y


@compiled(inline=True)
def _power(a: np.float32, b: np.float32) -> np.float32:
    """a^b for normal a > 0 and finite b: exp(b log a); a = 2^e m, log m = 2 (s + s^3/3 + ..), s = (m - 1) / (m + 1)."""
    bits = np.float64(a).view(np.int64) - _ROOT_HALF_BITS
    m = np.int64((bits & _FRACTION) + _ROOT_HALF_BITS).view(np.float64)
    s = (m - 1.0) / (m + 1.0)
    q = s * s
    series = 1 / 11 + q * (1 / 13 + q * (1 / 15 + q * (1 / 17)))
    series = 1.0 + q * (1 / 3 + q * (1 / 5 + q * (1 / 7 + q * (1 / 9 + q * series))))
    exponent = np.float64(b) * (np.float64(bits >> 52) * _LN_2 + 2.0 * s * series)
    inside = exponent if exponent > -_MAX_EXPONENT else -_MAX_EXPONENT
    inside = inside if inside < _MAX_EXPONENT else _MAX_EXPONENT
    n = np.floor(inside * _LOG2_E + 0.5)
    r = inside - n * _LN_2
    c = 1 / 120 + r * (1 / 720 + r * (1 / 5040 + r * (1 / 40320 + r * (1 / 362880))))
    c = 1.0 + r * (1.0 + r * (1 / 2 + r * (1 / 6 + r * (1 / 24 + r * c))))
    return _f(c * np.int64((np.int64(n) + 1023) << 52).view(np.float64))


@compiled(inline=True)
def _root(a: np.float32, b: np.float32) -> np.float32:
    """a^b for b of 1/2 or -1/2, exact; as for powers, -0 and -infinity count as 0 and infinity."""
    root = np.sqrt(abs(a) if a + a == a else a)
    y: np.float32 = root if b > _ZERO else _ONE / root
    return y


@linked(*(types.int64,) * 5)
def powers(dst: int, first: int, second: int, count: int, code: int) -> None:
    """a^b elementwise; may be in place."""
    y, a, b = floats_at(dst, count), floats_at(first, count), floats_at(second, count)
    is_special, are_roots = False, True
    for n in range(count):
        are_roots &= abs(b[n]) == _HALF
        is_special |= not ((a[n] >= _TINY) & (a[n] <= _LARGEST) & (abs(b[n]) <= _LARGEST)) or abs(b[n]) == _HALF
    if are_roots:
        for n in range(count):
            y[n] = _root(a[n], b[n])
        return
    if is_special:
        for n in range(count):
            if abs(b[n]) == _HALF:
                y[n] = _root(a[n], b[n])
            elif _TINY <= a[n] <= _LARGEST and abs(b[n]) <= _LARGEST:
                y[n] = _power(a[n], b[n])
            else:
                y[n] = _f(math.pow(np.float64(a[n]), np.float64(b[n])))
        return
    for n in range(count):
        y[n] = _power(a[n], b[n])


@compiled(inline=True)
def quotient(a: np.float32, b: np.float32) -> np.float32:
    return a / b


@compiled(inline=True)
def truncated_remainder(a: np.float32, b: np.float32) -> np.float32:
    y: np.float32 = np.fmod(a, b)
    return y


@compiled(inline=True)
def remainder(a: np.float32, b: np.float32) -> np.float32:
    rest = np.fmod(a, b)
    has_other_sign = (rest < _ZERO) != (b < _ZERO) and rest != _ZERO
    y: np.float32 = rest + b if has_other_sign else rest
    return y
