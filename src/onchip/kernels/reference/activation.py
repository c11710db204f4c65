"""Elementwise activations, and the two softmaxes."""

from __future__ import annotations

import math

import numpy as np

from onchip.kernels.reference.base import Arrays, Gradients, Weights, backward_of, forward_of
from onchip.network.error_function import erfc
from onchip.network.layers import (
    ELU,
    GELU,
    SELU,
    Clip,
    HardSigmoid,
    HardSwish,
    LeakyReLU,
    LogSoftmax,
    Mish,
    ReLU,
    Sigmoid,
    SiLU,
    Softmax,
    Softplus,
    Softsign,
    Tanh,
)
from onchip.network.recipe import Array

_TANH_SCALE, _TANH_CUBE = math.sqrt(2 / math.pi), 0.044715  # of GELU's approximation


@forward_of(ReLU)
def relu(layer: ReLU, xs: Arrays, w: Weights) -> Array:
    (x,) = xs
    y: Array = np.maximum(x, x.dtype.type(0))  # np.maximum propagates NaN
    return y


@backward_of(ReLU)
def relu_back(layer: ReLU, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
    return (dy * (y > 0),), {}


@forward_of(LeakyReLU)
def leaky_relu(layer: LeakyReLU, xs: Arrays, w: Weights) -> Array:
    (x,) = xs
    return np.where(x >= 0, x, layer.slope * x)


@backward_of(LeakyReLU)
def leaky_relu_back(layer: LeakyReLU, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
    return (np.where(xs[0] >= 0, dy, layer.slope * dy),), {}


@forward_of(Clip)
def clip(layer: Clip, xs: Arrays, w: Weights) -> Array:
    """The lower bound first, so that the upper one wins if they cross; each rounded to x's dtype."""
    (y,) = xs
    if layer.low is not None:
        y = np.maximum(y, y.dtype.type(layer.low))
    return y if layer.high is None else np.minimum(y, y.dtype.type(layer.high))


@backward_of(Clip)
def clip_back(layer: Clip, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
    return (dy * (xs[0] == y),), {}


@forward_of(Sigmoid)
def sigmoid(layer: Sigmoid, xs: Arrays, w: Weights) -> Array:
    return _sigmoid(xs[0])


@backward_of(Sigmoid)
def sigmoid_back(layer: Sigmoid, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
    return (dy * y * (1 - y),), {}


@forward_of(Tanh)
def tanh(layer: Tanh, xs: Arrays, w: Weights) -> Array:
    return np.tanh(xs[0])


@backward_of(Tanh)
def tanh_back(layer: Tanh, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
    return (dy * (1 - y * y),), {}


@forward_of(SiLU)
def silu(layer: SiLU, xs: Arrays, w: Weights) -> Array:
    return xs[0] * _sigmoid(xs[0])


@backward_of(SiLU)
def silu_back(layer: SiLU, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
    s = _sigmoid(xs[0])
    return (dy * (s + y * (1 - s)),), {}


@forward_of(GELU)
def gelu(layer: GELU, xs: Arrays, w: Weights) -> Array:
    return xs[0] * _gelu_factor(layer, xs[0])


@backward_of(GELU)
def gelu_back(layer: GELU, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
    (x,) = xs
    factor = _gelu_factor(layer, x)
    if layer.approximate == "tanh":  # factor = (1 + tanh(inner)) / 2
        dinner = _TANH_SCALE * (1 + 3 * _TANH_CUBE * x * x)
        dfactor = 2 * factor * (1 - factor) * dinner
    else:
        dfactor = np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    return (dy * (factor + x * dfactor),), {}


@forward_of(ELU)
def elu(layer: ELU, xs: Arrays, w: Weights) -> Array:
    return _elu(xs[0], layer.alpha)


@backward_of(ELU)
def elu_back(layer: ELU, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
    return (np.where(xs[0] >= 0, dy, dy * (y + layer.alpha)),), {}


@forward_of(SELU)
def selu(layer: SELU, xs: Arrays, w: Weights) -> Array:
    return layer.SCALE * _elu(xs[0], layer.ALPHA)


@backward_of(SELU)
def selu_back(layer: SELU, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
    return (dy * np.where(xs[0] >= 0, layer.SCALE, y + layer.SCALE * layer.ALPHA),), {}


@forward_of(HardSigmoid)
def hard_sigmoid(layer: HardSigmoid, xs: Arrays, w: Weights) -> Array:
    return _hard_sigmoid(xs[0], layer.slope, layer.shift)


@backward_of(HardSigmoid)
def hard_sigmoid_back(layer: HardSigmoid, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
    return (layer.slope * dy * ((y > 0) & (y < 1)),), {}


@forward_of(HardSwish)
def hard_swish(layer: HardSwish, xs: Arrays, w: Weights) -> Array:
    return xs[0] * _hard_sigmoid(xs[0], 1 / 6, 0.5)


@backward_of(HardSwish)
def hard_swish_back(layer: HardSwish, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
    (x,) = xs
    factor = _hard_sigmoid(x, 1 / 6, 0.5)
    return (dy * (factor + x / 6 * ((factor > 0) & (factor < 1))),), {}


@forward_of(Softplus)
def softplus(layer: Softplus, xs: Arrays, w: Weights) -> Array:
    y: Array = np.logaddexp(xs[0], xs[0].dtype.type(0))
    return y


@backward_of(Softplus)
def softplus_back(layer: Softplus, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
    return (dy * _sigmoid(xs[0]),), {}


@forward_of(Softsign)
def softsign(layer: Softsign, xs: Arrays, w: Weights) -> Array:
    y: Array = xs[0] / (1 + np.abs(xs[0]))
    return y


@backward_of(Softsign)
def softsign_back(layer: Softsign, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
    return (dy / (1 + np.abs(xs[0])) ** 2,), {}


@forward_of(Mish)
def mish(layer: Mish, xs: Arrays, w: Weights) -> Array:
    y: Array = xs[0] * np.tanh(np.logaddexp(xs[0], xs[0].dtype.type(0)))
    return y


@backward_of(Mish)
def mish_back(layer: Mish, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
    (x,) = xs
    factor = np.tanh(np.logaddexp(x, x.dtype.type(0)))
    return (dy * (factor + x * (1 - factor * factor) * _sigmoid(x)),), {}


@forward_of(Softmax)
def softmax(layer: Softmax, xs: Arrays, w: Weights) -> Array:
    (x,) = xs
    e: Array = np.exp(x - x.max(axis=layer.axis, keepdims=True))
    y: Array = e / e.sum(axis=layer.axis, keepdims=True)
    return y


@backward_of(Softmax)
def softmax_back(layer: Softmax, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
    return (y * (dy - (dy * y).sum(axis=layer.axis, keepdims=True)),), {}


@forward_of(LogSoftmax)
def log_softmax(layer: LogSoftmax, xs: Arrays, w: Weights) -> Array:
    (x,) = xs
    shifted = x - x.max(axis=layer.axis, keepdims=True)
    y: Array = shifted - np.log(np.exp(shifted).sum(axis=layer.axis, keepdims=True))
    return y


@backward_of(LogSoftmax)
def log_softmax_back(layer: LogSoftmax, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
    return (dy - np.exp(y) * dy.sum(axis=layer.axis, keepdims=True),), {}


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


def _gelu_factor(layer: GELU, x: Array) -> Array:
    if layer.approximate == "tanh":
        return (1 + np.tanh(_TANH_SCALE * (x + _TANH_CUBE * x * x * x))) / 2
    y: Array = erfc(x * -math.sqrt(0.5)) / 2  # 1 + erf(x) would lose every digit for x far below 0
    return y
