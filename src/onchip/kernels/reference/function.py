"""Elementwise functions, and their derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from onchip.kernels.reference.base import BACKWARD, FORWARD, Arrays, Backward, Forward, Gradients, Weights
from onchip.network.error_function import erf
from onchip.network.layers import Abs, Atan, Ceil, Cos, Erf, Exp, Floor, Layer, Log, Reciprocal, Round, Sign, Sin, Sqrt
from onchip.network.recipe import Array

# Layer -> y of x, and dy / dx of x and y.
_FUNCTIONS: dict[type[Layer], tuple[Callable[[Array], Array], Callable[[Array, Array], Array]]] = {
    Abs: (np.abs, lambda x, y: np.sign(x)),
    Sign: (np.sign, lambda x, y: np.zeros_like(x)),
    Sqrt: (np.sqrt, lambda x, y: 0.5 / y),
    Reciprocal: (np.reciprocal, lambda x, y: -y * y),
    Exp: (np.exp, lambda x, y: y),
    Log: (np.log, lambda x, y: 1 / x),
    Sin: (np.sin, lambda x, y: np.cos(x)),
    Cos: (np.cos, lambda x, y: -np.sin(x)),
    Atan: (np.arctan, lambda x, y: 1 / (1 + x * x)),
    Erf: (erf, lambda x, y: 2 / math.sqrt(math.pi) * np.exp(-x * x)),
    Floor: (np.floor, lambda x, y: np.zeros_like(x)),
    Ceil: (np.ceil, lambda x, y: np.zeros_like(x)),
    Round: (np.rint, lambda x, y: np.zeros_like(x)),
}


def _forward(function: Callable[[Array], Array]) -> Forward:
    def forward(layer: Layer, xs: Arrays, w: Weights) -> Array:
        return function(xs[0])

    return forward


def _backward(derivative: Callable[[Array, Array], Array]) -> Backward:
    def backward(layer: Layer, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
        return (dy * derivative(xs[0], y),), {}

    return backward


FORWARD.update({kind: _forward(function) for kind, (function, _) in _FUNCTIONS.items()})
BACKWARD.update({kind: _backward(derivative) for kind, (_, derivative) in _FUNCTIONS.items()})
