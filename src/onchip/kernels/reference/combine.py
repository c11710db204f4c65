"""Layers that read several values: sums, products, concatenation, phases woven together."""

from __future__ import annotations

import operator
from functools import reduce

import numpy as np

from onchip.kernels.reference.base import Arrays, Gradients, Weights, backward_of, forward_of
from onchip.spec.layers import Add, Concat, Interleave, Mul
from onchip.spec.recipe import Array


@forward_of(Add)
def add(layer: Add, xs: Arrays, w: Weights) -> Array:
    return reduce(operator.add, (*xs, *w.values()))


@backward_of(Add)
def add_back(layer: Add, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
    return tuple(_unstretched(dy, x.shape) for x in xs), {role: _unstretched(dy, v.shape) for role, v in w.items()}


@forward_of(Mul)
def mul(layer: Mul, xs: Arrays, w: Weights) -> Array:
    return reduce(operator.mul, (*xs, *w.values()))


@backward_of(Mul)
def mul_back(layer: Mul, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
    factors = (*xs, *w.values())
    slopes = []
    for i, factor in enumerate(factors):
        others = reduce(operator.mul, (*factors[:i], *factors[i + 1 :]))
        slopes.append(_unstretched(dy * others, factor.shape))
    return tuple(slopes[: len(xs)]), dict(zip(w, slopes[len(xs) :], strict=True))


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
    for places, x in zip(_phase_places(layer), xs, strict=True):
        y[places] = x
    return y


@backward_of(Interleave)
def interleave_back(layer: Interleave, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
    return tuple(dy[places] for places in _phase_places(layer)), {}


def _phase_places(layer: Interleave) -> list[tuple[slice, ...]]:
    whole = (slice(None), slice(None))
    return [
        (*whole, *(slice(p, None, s) for p, s in zip(phase, layer.stride, strict=True))) for phase in layer.phases()
    ]


def _unstretched(dy: Array, shape: tuple[int, ...]) -> Array:
    """The gradient of an operand of this shape: summed over the axes along which it was stretched."""
    missing = dy.ndim - len(shape)
    stretched = tuple(a for a, d in enumerate(dy.shape) if a < missing or (shape[a - missing] == 1 and d != 1))
    dx: Array = dy.sum(axis=stretched).reshape(shape)
    return dx
