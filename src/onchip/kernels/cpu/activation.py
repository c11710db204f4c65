"""Activations and softmax on rows that lie in cache.

The exponential is our own: plain arithmetic that LLVM turns into vector code, so a number's bits depend
neither on its place in a row nor on which math library is installed.
"""

from __future__ import annotations

import math

import numpy as np

from onchip.kernels.cpu.jit import compiled
from onchip.spec.recipe import Array

IDENTITY, RELU, SIGMOID, TANH = 0, 1, 2, 3
CODES = {"Identity": IDENTITY, "ReLU": RELU, "Sigmoid": SIGMOID, "Tanh": TANH}
NO_NORMALISER, SOFTMAX, LOG_SOFTMAX = 0, 1, 2
NORMALISERS = {"": NO_NORMALISER, "Softmax": SOFTMAX, "LogSoftmax": LOG_SOFTMAX}

_f = np.float32
_LOG2_E = _f(math.log2(math.e))
# ln 2 in two parts: n * _LN2_HIGH is exact for |n| < 2^11, the rest makes up the difference.
_LN2_HIGH = _f(0.693359375)
_LN2_LOW = _f(math.log(2) - 0.693359375)
_LOWEST = _f(-87.0)  # exp of less is below the smallest normal float32; it becomes 0
_C2, _C3, _C4, _C5, _C6, _C7 = (_f(1 / math.factorial(i)) for i in range(2, 8))
_ZERO, _ONE, _TWO, _HALF = _f(0), _f(1), _f(2), _f(0.5)


@compiled(inline=True)
def expm1_exp(x: np.float32) -> tuple[np.float32, np.float32]:
    """exp(x) - 1 and exp(x) for x <= 0; 0 for exp below -87; NaN for NaN.

    exp(x) = 2^n (1 + q) with |r| <= ln 2 / 2 and q = r + r^2/2 + ... + r^7/5040 (error 5e-9 of 1).
    """
    inside = x if x > _LOWEST else _LOWEST  # also -inf; a NaN becomes _LOWEST here and comes back below
    n = np.floor(inside * _LOG2_E + _HALF)
    r = (inside - n * _LN2_HIGH) - n * _LN2_LOW
    q = r + r * r * (_C2 + r * (_C3 + r * (_C4 + r * (_C5 + r * (_C6 + r * _C7)))))
    scale = np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
    less_one = scale * q + (scale - _ONE)
    whole = scale * q + scale
    if x < _LOWEST:
        less_one, whole = -_ONE, _ZERO
    if x != x:
        less_one, whole = x, x
    return less_one, whole


@compiled(inline=True)
def sigmoid(x: np.float32) -> np.float32:
    _, e = expm1_exp(-abs(x))
    return (_ONE if x >= _ZERO else e) / (_ONE + e)


@compiled(inline=True)
def tanh(x: np.float32) -> np.float32:
    m, _ = expm1_exp(-_TWO * abs(x))
    size = -m / (_TWO + m)
    return size if x >= _ZERO else -size


# In the loops below every row is cut out as a slice first: Numba allows negative indices, and only an index that
# counts from 0 is known not to be one, which is what lets LLVM turn the loop into vector code.


@compiled()
def activate(a: Array, begin: int, count: int, width: int, stride: int, code: int) -> None:
    """Apply an activation to a[begin + r * stride + n] for r < count, n < width, in place."""
    for r in range(count):
        row = a[begin + r * stride : begin + r * stride + width]
        if code == RELU:
            for n in range(width):
                row[n] = _ZERO if row[n] < _ZERO else row[n]
        elif code == SIGMOID:
            for n in range(width):
                row[n] = sigmoid(row[n])
        elif code == TANH:
            for n in range(width):
                row[n] = tanh(row[n])


@compiled()
def normalise(a: Array, begin: int, count: int, width: int, stride: int, code: int) -> None:
    """Softmax or log-softmax of the rows a[begin + r * stride : + width], in place, sums in order of n."""
    for r in range(count):
        row = a[begin + r * stride : begin + r * stride + width]
        highest = row[0]
        for n in range(1, width):
            highest = row[n] if row[n] > highest or row[n] != row[n] else highest
        total = 0.0  # float64: a float32 sum over a very wide row would lose digits
        for n in range(width):
            shifted = row[n] - highest
            _, e = expm1_exp(shifted)
            total += np.float64(e)
            row[n] = e if code == SOFTMAX else shifted
        if code == SOFTMAX:
            scale = np.float32(total)
            for n in range(width):
                row[n] = row[n] / scale
        else:
            log_total = np.float32(math.log(total))
            for n in range(width):
                row[n] = row[n] - log_total
