"""Layers of several inputs: elementwise, concatenation, interleaved phases."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import reduce

import numpy as np

from onchip.kernels.reference.base import Arrays, Gradients, Weights, backward_of, forward_of
from onchip.network.divisors import check_divisors
from onchip.network.layers import (
    Add,
    Concat,
    Div,
    Equal,
    Greater,
    GreaterOrEqual,
    Interleave,
    Mask,
    Max,
    Min,
    Mod,
    Mul,
    Ordered,
    Pow,
    PReLU,
    Sub,
)
from onchip.network.recipe import Array


@forward_of(Add)
def add(layer: Add, xs: Arrays, w: Weights) -> Array:
    return reduce(operator.add, (*xs, *w.values()))


@backward_of(Add)
def add_back(layer: Add, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
    return tuple(unbroadcast(dy, x.shape) for x in xs), {role: unbroadcast(dy, v.shape) for role, v in w.items()}


@forward_of(Mul)
def mul(layer: Mul, xs: Arrays, w: Weights) -> Array:
    return reduce(operator.mul, (*xs, *w.values()))


@backward_of(Mul)
def mul_back(layer: Mul, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
    factors = (*xs, *w.values())
    gradients = []
    for i, factor in enumerate(factors):
        others = reduce(operator.mul, (*factors[:i], *factors[i + 1 :]))
        gradients.append(unbroadcast(dy * others, factor.shape))
    return tuple(gradients[: len(xs)]), dict(zip(w, gradients[len(xs) :], strict=True))


@forward_of(Max, Min)
def extreme(layer: Max | Min, xs: Arrays, w: Weights) -> Array:
    return reduce(np.maximum if isinstance(layer, Max) else np.minimum, (*xs, *w.values()))  # they propagate NaN


@backward_of(Max, Min)
def extreme_back(layer: Max | Min, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
    """The gradient goes to the first operand that equals the result."""
    gradients, assigned = [], np.zeros(y.shape, bool)
    for operand in (*xs, *w.values()):
        is_first = (operand == y) & ~assigned
        gradients.append(unbroadcast(dy * is_first, operand.shape))
        assigned |= is_first
    return tuple(gradients[: len(xs)]), dict(zip(w, gradients[len(xs) :], strict=True))


# -- two ordered operands --------------------------------------------------------------------------------------


def _quotient(a: Array, b: Array) -> Array:
    if a.dtype.kind == "f":
        return np.asarray(a / b)
    _check_divisors(a, b, "Div")
    low = a // b  # NumPy rounds down; Div rounds toward 0
    return np.asarray(low + ((low * b != a) & ((a < 0) != (b < 0))))


def _check_divisors(a: Array, b: Array, name: str) -> None:
    """InputError if ints are divided by 0: NumPy would return 0."""
    shape = np.broadcast_shapes(a.shape, b.shape)
    if a.dtype.kind != "f" and 0 not in shape:
        check_divisors(np.broadcast_to(b, shape), name)


def _power(a: Array, b: Array) -> Array:
    """a ** b; NumPy computes b = 1/2 as a square root, which is NaN for -infinity instead of infinity."""
    return np.where(np.isneginf(a) & (b == 0.5), np.inf, np.power(a, b)).astype(a.dtype)


# (a, b) -> the result; (a, b, result) -> its derivatives with respect to a and b.
_ORDERED: dict[type[Ordered], Callable[[Array, Array], Array]] = {
    Sub: operator.sub,
    Div: _quotient,
    Pow: _power,
    PReLU: lambda a, b: np.where(a >= 0, a, a * b),
    Greater: lambda a, b: (a > b).astype(a.dtype),
    GreaterOrEqual: lambda a, b: (a >= b).astype(a.dtype),
    Equal: lambda a, b: (a == b).astype(a.dtype),
}
_DERIVATIVES: dict[type[Ordered], Callable[[Array, Array, Array], tuple[Array | int, Array | int]]] = {
    Sub: lambda a, b, y: (1, -1),
    Div: lambda a, b, y: (1 / b, -y / b),
    Pow: lambda a, b, y: (b * np.power(a, b - 1), y * np.log(np.where(a > 0, a, 1))),
    PReLU: lambda a, b, y: (np.where(a >= 0, 1, b), np.where(a >= 0, 0, a)),
    Greater: lambda a, b, y: (0, 0),
    GreaterOrEqual: lambda a, b, y: (0, 0),
    Equal: lambda a, b, y: (0, 0),
}


def operands(xs: Arrays, w: Weights) -> Arrays:
    return (*((w["first"],) if "first" in w else ()), *xs, *((w["constant"],) if "constant" in w else ()))


@forward_of(*_ORDERED)
def ordered(layer: Ordered, xs: Arrays, w: Weights) -> Array:
    a, b = operands(xs, w)
    return _ORDERED[type(layer)](a, b)


@backward_of(*_ORDERED)
def ordered_back(layer: Ordered, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
    a, b = operands(xs, w)
    da, db = (unbroadcast(dy * s, v.shape) for v, s in zip((a, b), _DERIVATIVES[type(layer)](a, b, y), strict=True))
    if "first" in w:
        return (db,), {"first": da}
    return ((da,), {"constant": db}) if w else ((da, db), {})


@forward_of(Mod)
def mod(layer: Mod, xs: Arrays, w: Weights) -> Array:
    a, b = operands(xs, w)
    _check_divisors(a, b, "Mod")
    return np.asarray(np.fmod(a, b) if layer.truncated else np.mod(a, b))


@forward_of(Mask)
def mask(layer: Mask, xs: Arrays, w: Weights) -> Array:
    a, b = _masked(xs, w)
    return np.where(b != 0, a, a.dtype.type(0))


@backward_of(Mask)
def mask_back(layer: Mask, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
    """The gradient of the mask is zero."""
    a, b = _masked(xs, w)
    da = unbroadcast(dy * (b != 0), a.shape)
    if "first" in w:
        return (np.zeros_like(b),), {"first": da}
    return ((da,) if w else (da, np.zeros_like(b))), {}


def _masked(xs: Arrays, w: Weights) -> tuple[Array, Array]:
    """The masked operand, and the mask."""
    return w.get("first", xs[0]), w.get("mask", xs[-1])


@forward_of(Concat)
def concat(layer: Concat, xs: Arrays, w: Weights) -> Array:
    return np.concatenate(xs, axis=layer.axis)


@backward_of(Concat)
def concat_back(layer: Concat, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
    ends = np.cumsum([x.shape[layer.axis] for x in xs])
    return tuple(np.split(dy, ends[:-1], axis=layer.axis)), {}


@forward_of(Interleave)
def interleave(layer: Interleave, xs: Arrays, w: Weights) -> Array:
    sizes = [
        max((x.shape[2 + a] - 1) * stride + phase[a] + 1 for phase, x in zip(layer.phases(), xs, strict=True))
        for a, stride in enumerate(layer.stride)
    ]
    y = np.empty((*xs[0].shape[:2], *sizes), xs[0].dtype)
    for slices, x in zip(_phase_slices(layer), xs, strict=True):
        y[slices] = x
    return y


@backward_of(Interleave)
def interleave_back(layer: Interleave, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
    return tuple(dy[slices] for slices in _phase_slices(layer)), {}


def _phase_slices(layer: Interleave) -> list[tuple[slice, ...]]:
    whole = (slice(None), slice(None))
    return [
        (*whole, *(slice(p, None, s) for p, s in zip(phase, layer.stride, strict=True))) for phase in layer.phases()
    ]


def unbroadcast(dy: Array, shape: tuple[int, ...]) -> Array:
    """The gradient of an operand of this shape: summed over the axes along which it was broadcast."""
    missing = dy.ndim - len(shape)
    expanded = tuple(a for a, d in enumerate(dy.shape) if a < missing or (shape[a - missing] == 1 and d != 1))
    dx: Array = dy.sum(axis=expanded).reshape(shape)
    return dx
