"""Activations: elementwise; and softmax, over an axis."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from onchip.errors import ShapeError
from onchip.network.error_function import erfc
from onchip.network.layers.base import (
    Activation,
    Arrays,
    Expression,
    Gradients,
    Layer,
    Spelling,
    Types,
    Weights,
    WeightTypes,
    need_float,
    row_axis,
)
from onchip.network.recipe import Array
from onchip.network.types import TensorType

_TANH_SCALE, _TANH_CUBE = math.sqrt(2 / math.pi), 0.044715  # of GELU's approximation


class ReLU(Activation):
    """max(x, 0); NaN stays NaN."""

    onnx = Spelling("Relu")
    cuda = "x < 0 ? 0 : x"
    cpu = "0 if x < 0 else x"

    def function(self, x: Array) -> Array:
        y: Array = np.maximum(x, x.dtype.type(0))  # np.maximum propagates NaN
        return y

    def derivative(self, x: Array, y: Array) -> Array:
        return np.asarray(y > 0)


@dataclass(frozen=True, eq=False, repr=False)
class LeakyReLU(Activation):
    """x where x >= 0, else slope * x."""

    slope: float = 0.01
    flop_each: ClassVar[int] = 2
    onnx = Spelling("LeakyRelu", alpha="slope")
    torch = Spelling("leaky_relu", negative_slope="slope")
    cuda = "x >= 0 ? x : slope * x"
    cpu = "slope * x if x < 0 else x"
    grad_of = "y"
    cuda_grad = "y >= 0 ? dy : slope * dy"
    cpu_grad = "slope * dy if y < 0 else dy"

    def function(self, x: Array) -> Array:
        return np.where(x >= 0, x, self.slope * x)

    def derivative(self, x: Array, y: Array) -> Array:
        return np.where(x >= 0, 1, self.slope).astype(x.dtype)


@dataclass(frozen=True, eq=False, repr=False)
class Clip(Activation):
    """min(max(x, low), high), None for no bound; NaN stays NaN. ReLU6 is Clip(0, 6). The derivative is 0 at a bound."""

    low: float | None = None
    high: float | None = None
    flop_each: ClassVar[int] = 2
    cuda = cpu = "clip(x, low, high)"
    grad_of = "y"
    cuda_grad = "y > low && y < high ? dy : 0"
    cpu_grad = "dy if y > low and y < high else 0"

    def __post_init__(self) -> None:
        if any(bound is not None and math.isnan(bound) for bound in (self.low, self.high)):
            raise ShapeError("bad bounds", got=f"{self.low}, {self.high}", expected="numbers, or None", hint="0, 6")

    torch = Spelling("clamp", min="low", max="high")

    def function(self, x: Array) -> Array:
        """The lower bound first, so that the upper one wins if they cross; each rounded to x's dtype."""
        y = x if self.low is None else np.maximum(x, x.dtype.type(self.low))
        return y if self.high is None else np.minimum(y, y.dtype.type(self.high))

    def derivative(self, x: Array, y: Array) -> Array:
        is_above = y == y if self.low is None else y > x.dtype.type(self.low)
        return np.asarray(is_above if self.high is None else is_above & (y < x.dtype.type(self.high)))


class Sigmoid(Activation):
    """1 / (1 + exp(-x))."""

    flop_each: ClassVar[int] = 20  # an exponential is a polynomial of degree 6 and a division
    onnx = Spelling("Sigmoid")
    torch = Spelling("sigmoid")
    jax = "nn.sigmoid"
    cuda = "exact_sigmoid(x)"
    fast = "fast_sigmoid(x)"
    cpu = "sigmoid(x)"
    grad_of = "y"
    cuda_grad = cpu_grad = "dy * y * (1 - y)"

    def function(self, x: Array) -> Array:
        return _sigmoid(x)

    def derivative(self, x: Array, y: Array) -> Array:
        return np.asarray(y * (1 - y))


class Tanh(Activation):
    flop_each: ClassVar[int] = 20
    onnx = Spelling("Tanh")
    torch = Spelling("tanh")
    jax = "numpy.tanh"
    cuda = "exact_tanh(x)"
    fast = "fast_tanh(x)"
    cpu = "tanh(x)"
    grad_of = "y"
    cuda_grad = cpu_grad = "dy * (1 - y * y)"

    def function(self, x: Array) -> Array:
        return np.tanh(x)

    def derivative(self, x: Array, y: Array) -> Array:
        return 1 - y * y


class SiLU(Activation):
    """x * sigmoid(x)."""

    flop_each: ClassVar[int] = 21
    torch = Spelling("silu")
    jax = "nn.silu"
    cuda = "x * exact_sigmoid(x)"
    fast = "x * fast_sigmoid(x)"
    cpu = "x * sigmoid(x)"
    grad_of = "x"
    cuda_grad = cpu_grad = "dy * silu_derivative(x)"

    def function(self, x: Array) -> Array:
        return x * _sigmoid(x)

    def derivative(self, x: Array, y: Array) -> Array:
        s = _sigmoid(x)
        return np.asarray(s + x * s * (1 - s))


@dataclass(frozen=True, eq=False, repr=False)
class GELU(Activation):
    """x * Phi(x), Phi the CDF of the normal distribution: exact by erf, or approximated by

    "tanh": x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))).
    """

    approximate: Literal["none", "tanh"] = "none"
    flop_each: ClassVar[int] = 27
    torch = Spelling("gelu", approximate="approximate")
    cuda: ClassVar[Expression] = {"": "exact_gelu(x)", "tanh": "tanh_gelu(x)"}
    fast: ClassVar[Expression] = {"": "fast_gelu(x)", "tanh": "fast_tanh_gelu(x)"}
    cpu: ClassVar[Expression] = {"": "gelu(x)", "tanh": "gelu_tanh(x)"}
    grad_of = "x"
    cuda_grad: ClassVar[Expression] = {"": "dy * gelu_derivative(x)", "tanh": "dy * tanh_gelu_derivative(x)"}
    cpu_grad: ClassVar[Expression] = {"": "dy * gelu_derivative(x)", "tanh": "dy * gelu_tanh_derivative(x)"}

    @property
    def variant(self) -> str:
        return "tanh" if self.approximate == "tanh" else ""

    def function(self, x: Array) -> Array:
        return x * self._factor(x)

    def derivative(self, x: Array, y: Array) -> Array:
        factor = self._factor(x)
        if self.approximate == "tanh":  # factor = (1 + tanh(inner)) / 2
            dinner = _TANH_SCALE * (1 + 3 * _TANH_CUBE * x * x)
            dfactor = 2 * factor * (1 - factor) * dinner
        else:
            dfactor = np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
        return np.asarray(factor + x * dfactor)

    def _factor(self, x: Array) -> Array:
        if self.approximate == "tanh":
            return (1 + np.tanh(_TANH_SCALE * (x + _TANH_CUBE * x * x * x))) / 2
        y: Array = erfc(x * -math.sqrt(0.5)) / 2  # 1 + erf(x) would lose every digit for x far below 0
        return y


@dataclass(frozen=True, eq=False, repr=False)
class ELU(Activation):
    """x where x >= 0, else alpha * (exp(x) - 1)."""

    alpha: float = 1.0
    flop_each: ClassVar[int] = 21
    onnx = Spelling("Elu", alpha="alpha")
    torch = Spelling("elu", alpha="alpha")
    cuda = cpu = "elu(x, alpha)"
    grad_of = "y"
    cuda_grad = "y >= 0 ? dy : dy * (y + alpha)"
    cpu_grad = "dy * (y + alpha) if y < 0 else dy"

    def function(self, x: Array) -> Array:
        return _elu(x, self.alpha)

    def derivative(self, x: Array, y: Array) -> Array:
        return np.where(x >= 0, x.dtype.type(1), y + self.alpha)


class SELU(Activation):
    """1.0507 * ELU(1.6733), both to the last digit of a float32 (`SCALE` and `ALPHA`)."""

    SCALE: ClassVar[float] = 1.05070102214813232421875
    ALPHA: ClassVar[float] = 1.67326319217681884765625
    flop_each: ClassVar[int] = 22
    torch = Spelling("selu")
    jax = "nn.selu"
    cuda = cpu = f"{SCALE} * elu(x, {ALPHA})"
    grad_of = "y"
    cuda_grad = f"dy * (y >= 0 ? {SCALE} : y + {SCALE * ALPHA})"
    cpu_grad = f"dy * (y + {SCALE * ALPHA} if y < 0 else {SCALE})"

    def function(self, x: Array) -> Array:
        return self.SCALE * _elu(x, self.ALPHA)

    def derivative(self, x: Array, y: Array) -> Array:
        return np.where(x >= 0, x.dtype.type(self.SCALE), y + self.SCALE * self.ALPHA)


@dataclass(frozen=True, eq=False, repr=False)
class HardSigmoid(Activation):
    """min(max(slope * x + shift, 0), 1)."""

    slope: float = 0.2
    shift: float = 0.5
    flop_each: ClassVar[int] = 4
    onnx = Spelling("HardSigmoid", alpha="slope", beta="shift")
    cuda = cpu = "hard_sigmoid(x, slope, shift)"
    grad_of = "y"
    cuda_grad = "y > 0 && y < 1 ? slope * dy : 0"
    cpu_grad = "slope * dy if y > 0 and y < 1 else 0"

    def function(self, x: Array) -> Array:
        return _hard_sigmoid(x, self.slope, self.shift)

    def derivative(self, x: Array, y: Array) -> Array:
        return self.slope * ((y > 0) & (y < 1)).astype(x.dtype)


class HardSwish(Activation):
    """x * min(max(x / 6 + 1 / 2, 0), 1)."""

    flop_each: ClassVar[int] = 5
    torch = Spelling("hardswish")
    jax = "nn.hard_swish"
    cuda = cpu = f"x * hard_sigmoid(x, {1 / 6}, 0.5)"
    grad_of = "x"
    cuda_grad = f"x <= -3 ? 0 : x >= 3 ? dy : dy * (x * {1 / 3} + 0.5)"
    cpu_grad = f"0 if x <= -3 else dy if x >= 3 else dy * (x * {1 / 3} + 0.5)"

    def function(self, x: Array) -> Array:
        return x * _hard_sigmoid(x, 1 / 6, 0.5)

    def derivative(self, x: Array, y: Array) -> Array:
        factor = _hard_sigmoid(x, 1 / 6, 0.5)
        return factor + x / 6 * ((factor > 0) & (factor < 1))


class Softplus(Activation):
    """log(1 + exp(x))."""

    flop_each: ClassVar[int] = 35
    onnx = Spelling("Softplus")
    torch = Spelling("softplus")
    jax = "nn.softplus"
    cuda = "(x < 0 ? 0 : x) + log1p_of(exp_of(-abs_of(x)))"
    cpu = "softplus(x)"
    grad_of = "y"
    cuda_grad = cpu_grad = "-dy * elu(-y, 1)"

    def function(self, x: Array) -> Array:
        y: Array = np.logaddexp(x, x.dtype.type(0))
        return y

    def derivative(self, x: Array, y: Array) -> Array:
        return -np.expm1(-y)  # sigmoid(x)


class Softsign(Activation):
    """x / (1 + |x|)."""

    flop_each: ClassVar[int] = 10
    onnx = Spelling("Softsign")
    torch = Spelling("softsign")
    jax = "nn.soft_sign"
    cuda = "softsign(x)"
    cpu = "x / (1 + abs(x))"
    grad_of = "x"
    cuda_grad = "quotient_of(dy, (1 + abs_of(x)) * (1 + abs_of(x)))"
    cpu_grad = "dy / ((1 + abs(x)) * (1 + abs(x)))"

    def function(self, x: Array) -> Array:
        y: Array = x / (1 + np.abs(x))
        return y

    def derivative(self, x: Array, y: Array) -> Array:
        return 1 / (1 + np.abs(x)) ** 2


class Mish(Activation):
    """x * tanh(log(1 + exp(x)))."""

    flop_each: ClassVar[int] = 28
    torch = Spelling("mish")
    jax = "nn.mish"
    cuda = cpu = "mish(x)"
    grad_of = "x"
    cuda_grad = cpu_grad = "dy * mish_derivative(x)"

    def function(self, x: Array) -> Array:
        y: Array = x * np.tanh(np.logaddexp(x, x.dtype.type(0)))
        return y

    def derivative(self, x: Array, y: Array) -> Array:
        factor = np.tanh(np.logaddexp(x, x.dtype.type(0)))
        return np.asarray(factor + x * (1 - factor * factor) * _sigmoid(x))


@dataclass(frozen=True, eq=False, repr=False)
class _OverAxis(Layer, abstract=True):
    axis: int = -1
    needs_x: ClassVar[bool] = False

    def infer(self, inputs: Types, weights: WeightTypes) -> TensorType:
        (x,) = inputs
        need_float(x)
        axis = row_axis(self.axis, x)
        if x.shape[axis] == 0:
            raise ShapeError("nothing to sum", got=str(x), expected=f"at least 1 element along axis {self.axis}")
        return x

    def row_flop(self, inputs: Types, weights: WeightTypes) -> int:
        return 22 * inputs[0].row_size


class Softmax(_OverAxis):
    """exp(x - max) / sum(exp(x - max)) over an axis."""

    def forward(self, xs: Arrays, w: Weights) -> Array:
        (x,) = xs
        e: Array = np.exp(x - x.max(axis=self.axis, keepdims=True))
        y: Array = e / e.sum(axis=self.axis, keepdims=True)
        return y

    def backward(self, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
        return (y * (dy - (dy * y).sum(axis=self.axis, keepdims=True)),), {}


class LogSoftmax(_OverAxis):
    """x - max - log(sum(exp(x - max))) over an axis."""

    def forward(self, xs: Arrays, w: Weights) -> Array:
        (x,) = xs
        shifted = x - x.max(axis=self.axis, keepdims=True)
        y: Array = shifted - np.log(np.exp(shifted).sum(axis=self.axis, keepdims=True))
        return y

    def backward(self, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
        return (dy - np.exp(y) * dy.sum(axis=self.axis, keepdims=True),), {}


def _sigmoid(x: Array) -> Array:
    small = np.exp(-np.abs(x))  # at most 1: no overflow
    y: Array = np.where(x >= 0, 1, small) / (1 + small)
    return y


def _elu(x: Array, alpha: float) -> Array:
    return np.where(x >= 0, x, alpha * np.expm1(np.minimum(x, x.dtype.type(0))))


def _hard_sigmoid(x: Array, slope: float, shift: float) -> Array:
    one, zero = x.dtype.type(1), x.dtype.type(0)
    y: Array = np.minimum(np.maximum(slope * x + shift, zero), one)
    return y
