"""Elementwise functions other than activations: used for distances, norms and positions."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from onchip.network.error_function import erf
from onchip.network.layers.base import Elementwise, Spelling
from onchip.network.recipe import Array


class Abs(Elementwise):
    """|x|."""

    onnx = Spelling("Abs")
    torch = Spelling("abs")
    jax = "numpy.abs"
    cuda = "abs_of(x)"
    cpu = "abs(x)"
    grad_of = "x"
    cuda_grad = "dy * sign_of(x)"
    cpu_grad = "dy if x > 0 else -dy if x < 0 else 0 * dy"

    def function(self, x: Array) -> Array:
        return np.abs(x)

    def derivative(self, x: Array, y: Array) -> Array:
        return np.sign(x)


class Sign(Elementwise):
    """1 for x > 0, -1 for x < 0, 0 for 0 and NaN for NaN."""

    onnx = Spelling("Sign")
    torch = Spelling("sign")
    jax = "numpy.sign"
    cuda = "sign_of(x)"
    cpu = "1 if x > 0 else -1 if x < 0 else 0 if x == 0 else x"

    def function(self, x: Array) -> Array:
        return np.sign(x)

    def derivative(self, x: Array, y: Array) -> Array:
        return np.zeros_like(x)


class Sqrt(Elementwise):
    """The square root; NaN for x < 0."""

    flop_each: ClassVar[int] = 8
    onnx = Spelling("Sqrt")
    torch = Spelling("sqrt")
    jax = "numpy.sqrt"
    cuda = "sqrt_of(x)"
    cpu = "sqrt(x)"
    grad_of = "y"
    cuda_grad = "quotient_of(0.5 * dy, y)"
    cpu_grad = "0.5 * dy / y"

    def function(self, x: Array) -> Array:
        return np.sqrt(x)

    def derivative(self, x: Array, y: Array) -> Array:
        return 0.5 / y


class Reciprocal(Elementwise):
    """1 / x."""

    flop_each: ClassVar[int] = 8
    onnx = Spelling("Reciprocal")
    torch = Spelling("reciprocal")
    jax = "numpy.reciprocal"
    cuda = "quotient_of(1, x)"
    cpu = "1 / x"
    grad_of = "y"
    cuda_grad = cpu_grad = "-dy * y * y"

    def function(self, x: Array) -> Array:
        return np.reciprocal(x)

    def derivative(self, x: Array, y: Array) -> Array:
        return -y * y


class Exp(Elementwise):
    flop_each: ClassVar[int] = 16
    onnx = Spelling("Exp")
    torch = Spelling("exp")
    jax = "numpy.exp"
    cuda = "exp_of(x)"
    cpu = "exponential(x)"

    def function(self, x: Array) -> Array:
        return np.exp(x)

    def derivative(self, x: Array, y: Array) -> Array:
        return y


class Log(Elementwise):
    """The natural logarithm; NaN for x < 0."""

    flop_each: ClassVar[int] = 20
    onnx = Spelling("Log")
    torch = Spelling("log")
    jax = "numpy.log"
    cuda = "log_of(x)"
    cpu = "logarithm(x)"

    def function(self, x: Array) -> Array:
        return np.log(x)

    def derivative(self, x: Array, y: Array) -> Array:
        return 1 / x


class Sin(Elementwise):
    """x in radians."""

    flop_each: ClassVar[int] = 25
    onnx = Spelling("Sin")
    torch = Spelling("sin")
    jax = "numpy.sin"
    cuda = "sin_of(x)"
    cpu = "sines"

    def function(self, x: Array) -> Array:
        return np.sin(x)

    def derivative(self, x: Array, y: Array) -> Array:
        return np.cos(x)


class Cos(Elementwise):
    """x in radians."""

    flop_each: ClassVar[int] = 25
    onnx = Spelling("Cos")
    torch = Spelling("cos")
    jax = "numpy.cos"
    cuda = "cos_of(x)"
    cpu = "cosines"

    def function(self, x: Array) -> Array:
        return np.cos(x)

    def derivative(self, x: Array, y: Array) -> Array:
        return -np.sin(x)


class Atan(Elementwise):
    """The arc tangent, in radians."""

    flop_each: ClassVar[int] = 25
    onnx = Spelling("Atan")
    torch = Spelling("atan")
    jax = "numpy.arctan"
    cuda = "atan_of(x)"
    cpu = "arctan(x)"
    grad_of = "x"
    cuda_grad = "quotient_of(dy, 1 + x * x)"
    cpu_grad = "dy / (1 + x * x)"

    def function(self, x: Array) -> Array:
        return np.arctan(x)

    def derivative(self, x: Array, y: Array) -> Array:
        return 1 / (1 + x * x)


class Erf(Elementwise):
    """2 / sqrt(pi) times the integral of exp(-t^2) from 0 to x."""

    flop_each: ClassVar[int] = 27
    onnx = Spelling("Erf")
    torch = Spelling("erf")
    jax = "lax.erf"
    cuda = "erf_of(x)"
    cpu = "error_function(x)"
    grad_of = "x"
    cuda_grad = "dy * (1.1283791670955126 * exp_of(-x * x))"
    cpu_grad = "dy * (1.1283791670955126 * exponential(-x * x))"

    def function(self, x: Array) -> Array:
        return erf(x)

    def derivative(self, x: Array, y: Array) -> Array:
        return np.asarray(2 / math.sqrt(math.pi) * np.exp(-x * x))


class Floor(Elementwise):
    """The largest integer <= x."""

    onnx = Spelling("Floor")
    torch = Spelling("floor")
    jax = "numpy.floor"
    cuda = "floor_of(x)"
    cpu = "floor(x)"

    def function(self, x: Array) -> Array:
        return np.floor(x)

    def derivative(self, x: Array, y: Array) -> Array:
        return np.zeros_like(x)


class Ceil(Elementwise):
    """The smallest integer >= x."""

    onnx = Spelling("Ceil")
    torch = Spelling("ceil")
    jax = "numpy.ceil"
    cuda = "ceil_of(x)"
    cpu = "ceil(x)"

    def function(self, x: Array) -> Array:
        return np.ceil(x)

    def derivative(self, x: Array, y: Array) -> Array:
        return np.zeros_like(x)


class Round(Elementwise):
    """The nearest integer; ties to even."""

    onnx = Spelling("Round")
    torch = Spelling("round")
    jax = "numpy.round"
    cuda = "rint_of(x)"
    cpu = "rint(x)"

    def function(self, x: Array) -> Array:
        return np.rint(x)

    def derivative(self, x: Array, y: Array) -> Array:
        return np.zeros_like(x)
