"""Functions of a float32 for the expressions of layers: those with an exponential or a logarithm, and clip.

The exponential is implemented here, in arithmetic that LLVM vectorises: an element's bits depend neither on its
position nor on the installed math library.
"""

from __future__ import annotations

import math

import numpy as np

from onchip.kernels.cpu.compiler.jit import compiled, multiply_add

_f = np.float32
_LOG2_E = _f(math.log2(math.e))
# ln 2 as a sum of two: n * _LN2_HIGH is exact for |n| < 2^11.
_LN2_HIGH = _f(0.693359375)
_LN2_LOW = _f(math.log(2) - 0.693359375)
_LOWEST = _f(-88.0)  # below, exp is subnormal in float32 and flushed to 0
_ROUND, _ROUND_BITS, _ONE_BITS = _f(1.5 * 2.0**23), np.int32(0x4B400000), np.int32(127 << 23)
# (exp(r) - 1 - r) / r^2, lowest power first: a minimax fit of degree 4 on 4,000 Chebyshev points of |r| < ln 2 / 2,
# error 3e-9.
_C2, _C3, _C4, _C5, _C6 = (
    _f(c) for c in (0.5000000053644, 0.1666651910543, 0.0416662073135, 0.0083689228773, 0.0013950482011)
)
_ZERO, _ONE, _TWO, _HALF = _f(0), _f(1), _f(2), _f(0.5)
_HIGHEST = _f(89.0)  # above, exp overflows to infinity
_INFINITY, _NAN, _SMALLEST_NORMAL, _TWO_23, _TWENTY_THREE = _f(np.inf), _f(np.nan), _f(2.0**-126), _f(2.0**23), _f(23)
_ROOT_HALF_BITS, _FRACTION = np.int32(0x3F3504F3), np.int32(0x7FFFFF)
_L3, _L5, _L7, _L9, _L11, _L13, _L15 = (_f(1 / i) for i in range(3, 17, 2))
_SQRT_HALF, _TWO_SQRT_2_PI, _CUBE = _f(math.sqrt(0.5)), _f(2 * math.sqrt(2 / math.pi)), _f(0.044715)
_THREE, _FOUR, _DENSITY = _f(3), _f(4), _f(1 / math.sqrt(2 * math.pi))
# exp(z^2) erfc(z) / t as a polynomial of 2 t - 1, t = 1 / (1 + z / 2), lowest power first: a least-squares fit of
# degree 10 to scipy.special.erfcx on 400 Chebyshev points of 0 < t < 1, relative error 1.2e-8.
_E0, _E1, _E2, _E3, _E4, _E5, _E6, _E7, _E8, _E9, _E10 = (
    _f(c) for c in (
        0.5107913568226585, 0.3435803176545198, 0.13973573727472155, 0.018221683841490675, -0.010751651348367345,
        -0.0032435045765516687, 0.001529217895571233, 0.00043074142647858167, -0.0002994437955726657,
        -3.663364550972988e-05, 4.2183040300389774e-05,
    )
)  # fmt: skip


@compiled(inline=True)
def _exp_parts(x: np.float32) -> tuple[np.int32, np.float32]:
    """n and q of exp(x) = 2^n (1 + q), |r| <= ln 2 / 2, q = r + r^2/2 + ... (error 3e-9), for -88 <= x <= 89.

    Adding 1.5 * 2^23 rounds n to an integer and leaves it in the low bits; the high bits are garbage.
    """
    t = np.float32(multiply_add(x, _LOG2_E, _ROUND))
    n = t - _ROUND
    r = multiply_add(-n, _LN2_LOW, multiply_add(-n, _LN2_HIGH, x))
    c = multiply_add(r, multiply_add(r, multiply_add(r, multiply_add(r, _C6, _C5), _C4), _C3), _C2)
    return t.view(np.int32), multiply_add(r * r, c, r)


@compiled(inline=True)
def expm1_exp(x: np.float32) -> tuple[np.float32, np.float32]:
    """exp(x) - 1 and exp(x) for x <= 88; 0 for exp below -88; NaN for NaN."""
    n, q = _exp_parts(_LOWEST if x < _LOWEST else x)
    scale = np.int32((n << np.int32(23)) + _ONE_BITS).view(np.float32)
    return multiply_add(scale, q, scale - _ONE), multiply_add(scale, q, scale)


@compiled(inline=True)
def sigmoid(x: np.float32) -> np.float32:
    _, e = expm1_exp(-abs(x))
    return (_ONE if x >= _ZERO else e) / (_ONE + e)


@compiled(inline=True)
def tanh(x: np.float32) -> np.float32:
    m, _ = expm1_exp(-_TWO * abs(x))
    size = -m / (_TWO + m)
    return size if x >= _ZERO else -size


@compiled(inline=True)
def scaled_erfc(t: np.float32) -> np.float32:
    """exp(z^2) erfc(z) / t for t = 1 / (1 + z / 2), z >= 0."""
    u = multiply_add(_TWO, t, -_ONE)
    high = multiply_add(u, multiply_add(u, multiply_add(u, _E10, _E9), _E8), _E7)
    middle = multiply_add(u, multiply_add(u, multiply_add(u, high, _E6), _E5), _E4)
    low: np.float32 = multiply_add(u, multiply_add(u, multiply_add(u, multiply_add(u, middle, _E3), _E2), _E1), _E0)
    return low


@compiled(inline=True)
def gelu(x: np.float32) -> np.float32:
    """x / 2 erfc(-x / sqrt 2)."""
    z = abs(x) * _SQRT_HALF
    t = _ONE / multiply_add(_HALF, z, _ONE)
    _, e = expm1_exp(-z * z)
    tail: np.float32 = t * e * scaled_erfc(t)  # erfc(z)
    return _HALF * x * (tail if x < _ZERO else _TWO - tail)


@compiled(inline=True)
def gelu_tanh(x: np.float32) -> np.float32:
    """(1 + tanh u) / 2 is the sigmoid of 2 u."""
    return x * sigmoid(_TWO_SQRT_2_PI * (x + _CUBE * x * x * x))


@compiled(inline=True)
def silu_derivative(x: np.float32) -> np.float32:
    low = sigmoid(-abs(x))
    s, rest = (low, _ONE - low) if x < _ZERO else (_ONE - low, low)
    y: np.float32 = s * (_ONE + x * rest)
    return y


@compiled(inline=True)
def gelu_derivative(x: np.float32) -> np.float32:
    """Phi(x) + x phi(x): the normal distribution and its density, which is exp(-x^2 / 2) / sqrt(2 pi)."""
    z = abs(x) * _SQRT_HALF
    t = _ONE / multiply_add(_HALF, z, _ONE)
    _, e = expm1_exp(-z * z)
    tail = t * e * scaled_erfc(t)
    y: np.float32 = multiply_add(x, _DENSITY * e, _HALF * (tail if x < _ZERO else _TWO - tail))
    return y


@compiled(inline=True)
def gelu_tanh_derivative(x: np.float32) -> np.float32:
    """s + x s (1 - s) 2 u', s the sigmoid of 2 u."""
    q = _CUBE * x * x
    low = sigmoid(-abs(_TWO_SQRT_2_PI * x * (_ONE + q)))
    s, rest = (low, _ONE - low) if x < _ZERO else (_ONE - low, low)
    return s * (_ONE + x * rest * _TWO_SQRT_2_PI * (_ONE + _THREE * q))


@compiled(inline=True)
def exponential(x: np.float32) -> np.float32:
    """exp of any float; 0 below -88. The power of 2 is applied as two factors: 2^128 overflows."""
    inside = _LOWEST if x < _LOWEST else x
    last, q = _exp_parts(_HIGHEST if inside > _HIGHEST else inside)
    n = last - _ROUND_BITS
    half = n >> np.int32(1)
    low = np.int32((half << np.int32(23)) + _ONE_BITS).view(np.float32)
    high = np.int32(((n - half) << np.int32(23)) + _ONE_BITS).view(np.float32)
    y: np.float32 = multiply_add(low, q, low) * high
    return _ZERO if x < _LOWEST else y


@compiled(inline=True)
def logarithm(x: np.float32) -> np.float32:
    """log x = e ln 2 + log m, x = 2^e m, sqrt 1/2 <= m < sqrt 2; log m = 2 (s + s^3/3 + ...), s = (m - 1) / (m + 1)."""
    is_tiny = x < _SMALLEST_NORMAL
    factor, less = (_TWO_23, _TWENTY_THREE) if is_tiny else (_ONE, _ZERO)
    scaled = np.float32(x * factor)
    bits = scaled.view(np.int32) - _ROOT_HALF_BITS
    e = np.float32(bits >> np.int32(23)) - less
    m = np.int32((bits & _FRACTION) + _ROOT_HALF_BITS).view(np.float32)
    s = (m - _ONE) / (m + _ONE)
    q = s * s
    high = multiply_add(q, multiply_add(q, multiply_add(q, _L11, _L9), _L7), _L5)
    series = multiply_add(s * q, multiply_add(q, high, _L3), s)
    y: np.float32 = multiply_add(e, _LN2_HIGH, multiply_add(e, _LN2_LOW, _TWO * series))
    if x == _ZERO:
        y = -_INFINITY
    if x < _ZERO:
        y = _NAN
    if x == _INFINITY or x != x:
        y = x
    return y


@compiled(inline=True)
def elu(x: np.float32, alpha: np.float32) -> np.float32:
    m, _ = expm1_exp(x if x < _ZERO else _ZERO)
    return alpha * m if x < _ZERO else x


@compiled(inline=True)
def clip(x: np.float32, low: np.float32, high: np.float32) -> np.float32:
    above = low if x < low else x
    return high if above > high else above


@compiled(inline=True)
def hard_sigmoid(x: np.float32, slope: np.float32, shift: np.float32) -> np.float32:
    return clip(multiply_add(slope, x, shift), _ZERO, _ONE)


@compiled(inline=True)
def softplus(x: np.float32) -> np.float32:
    """max(x, 0) + log(1 + exp(-|x|)); log(1 + e) is 2 (s + s^3/3 + s^5/5 + ...), s = e / (2 + e) <= 1/3."""
    _, e = expm1_exp(-abs(x))
    s = e / (_TWO + e)
    q = s * s
    high = multiply_add(q, multiply_add(q, multiply_add(q, multiply_add(q, _L15, _L13), _L11), _L9), _L7)
    series = multiply_add(s * q, multiply_add(q, multiply_add(q, high, _L5), _L3), s)
    above = _ZERO if x < _ZERO else x
    y: np.float32 = above + _TWO * series
    return y


@compiled(inline=True)
def mish(x: np.float32) -> np.float32:
    """tanh(log(1 + e)) is ((1 + e)^2 - 1) / ((1 + e)^2 + 1); above 0 a quotient in exp(-x)."""
    _, e = expm1_exp(-abs(x))
    above = e * (e + _TWO) if x < _ZERO else multiply_add(_TWO, e, _ONE)
    below = above + _TWO if x < _ZERO else multiply_add(_TWO * e, e, above)
    return x * (above / below)


@compiled(inline=True)
def mish_derivative(x: np.float32) -> np.float32:
    """tanh + x (1 - tanh^2) sigmoid, with the quotient of mish. (1 - tanh^2) sigmoid is 4 e (1 + e) / below^2 for
    x < 0, else 4 e^2 (1 + e) / below^2."""
    _, e = expm1_exp(-abs(x))
    above = e * (e + _TWO) if x < _ZERO else multiply_add(_TWO, e, _ONE)
    below = above + _TWO if x < _ZERO else multiply_add(_TWO * e, e, above)
    rest = _FOUR * e * (_ONE + e) * (_ONE if x < _ZERO else e)
    return (above + x * rest / below) / below
