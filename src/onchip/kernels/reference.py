"""What every layer means: NumPy, one operation at a time. In float64 this is the truth of the tests.

`forward(net, x, "float64")` is what every engine is held against; `forward(net, x, "float32")` is the
naive run whose error is the yardstick. Types narrower than float32 compute in float32 and round after
every operation, as hardware does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from onchip.errors import InputError
from onchip.spec.layers import Layer, Linear, LogSoftmax, ReLU, Reshape, Sigmoid, Softmax, Tanh
from onchip.spec.network import Network
from onchip.spec.recipe import Array, materialise
from onchip.spec.types import DTYPE_BYTES, numpy_dtype

Weights = Mapping[str, Array]  # role -> array
Forward = Callable[[Any, Array, Weights], Array]
Backward = Callable[
    [Any, Array, Weights, Array, Array], tuple[Array, dict[str, Array]]
]  # (layer, x, w, y, dy) -> dx, dw

FORWARD: dict[type[Layer], Forward] = {}
BACKWARD: dict[type[Layer], Backward] = {}


def _forward(kind: type[Layer]) -> Callable[[Forward], Forward]:
    return lambda function: FORWARD.setdefault(kind, function)


def _backward(kind: type[Layer]) -> Callable[[Backward], Backward]:
    return lambda function: BACKWARD.setdefault(kind, function)


# -- one function a layer ----------------------------------------------------------------------------------


@_forward(Linear)
def linear(layer: Linear, x: Array, w: Weights) -> Array:
    y = x @ w["weight"].T
    return y + w["bias"] if "bias" in w else y


@_backward(Linear)
def linear_back(layer: Linear, x: Array, w: Weights, y: Array, dy: Array) -> tuple[Array, dict[str, Array]]:
    rows, drows = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    dw = {"weight": drows.T @ rows}
    if "bias" in w:
        dw["bias"] = drows.sum(axis=0)
    return dy @ w["weight"], dw


@_forward(ReLU)
def relu(layer: ReLU, x: Array, w: Weights) -> Array:
    y: Array = np.maximum(x, x.dtype.type(0))  # np.maximum hands NaN on
    return y


@_backward(ReLU)
def relu_back(layer: ReLU, x: Array, w: Weights, y: Array, dy: Array) -> tuple[Array, dict[str, Array]]:
    return dy * (y > 0), {}


@_forward(Sigmoid)
def sigmoid(layer: Sigmoid, x: Array, w: Weights) -> Array:
    small = np.exp(-np.abs(x))  # at most 1, so nothing overflows
    y: Array = np.where(x >= 0, 1, small) / (1 + small)
    return y


@_backward(Sigmoid)
def sigmoid_back(layer: Sigmoid, x: Array, w: Weights, y: Array, dy: Array) -> tuple[Array, dict[str, Array]]:
    return dy * y * (1 - y), {}


@_forward(Tanh)
def tanh(layer: Tanh, x: Array, w: Weights) -> Array:
    return np.tanh(x)


@_backward(Tanh)
def tanh_back(layer: Tanh, x: Array, w: Weights, y: Array, dy: Array) -> tuple[Array, dict[str, Array]]:
    return dy * (1 - y * y), {}


@_forward(Softmax)
def softmax(layer: Softmax, x: Array, w: Weights) -> Array:
    e: Array = np.exp(x - x.max(axis=layer.axis, keepdims=True))
    y: Array = e / e.sum(axis=layer.axis, keepdims=True)
    return y


@_backward(Softmax)
def softmax_back(layer: Softmax, x: Array, w: Weights, y: Array, dy: Array) -> tuple[Array, dict[str, Array]]:
    return y * (dy - (dy * y).sum(axis=layer.axis, keepdims=True)), {}


@_forward(LogSoftmax)
def log_softmax(layer: LogSoftmax, x: Array, w: Weights) -> Array:
    shifted = x - x.max(axis=layer.axis, keepdims=True)
    y: Array = shifted - np.log(np.exp(shifted).sum(axis=layer.axis, keepdims=True))
    return y


@_backward(LogSoftmax)
def log_softmax_back(layer: LogSoftmax, x: Array, w: Weights, y: Array, dy: Array) -> tuple[Array, dict[str, Array]]:
    return dy - np.exp(y) * dy.sum(axis=layer.axis, keepdims=True), {}


@_forward(Reshape)
def reshape(layer: Reshape, x: Array, w: Weights) -> Array:
    if x.shape[0] == 0 and -1 in layer.row_shape:  # NumPy cannot work out -1 when there are no rows
        known = int(np.prod([d for d in layer.row_shape if d != -1]))
        left = int(np.prod(x.shape[1:])) // known
        return x.reshape(0, *(left if d == -1 else d for d in layer.row_shape))
    return x.reshape(x.shape[0], *layer.row_shape)


@_backward(Reshape)
def reshape_back(layer: Reshape, x: Array, w: Weights, y: Array, dy: Array) -> tuple[Array, dict[str, Array]]:
    return dy.reshape(x.shape), {}


# -- whole networks ----------------------------------------------------------------------------------------


def forward_all(net: Network, x: Array, dtype: str = "float64") -> dict[str, Array]:
    """Every value of the network, by name."""
    kept, working = numpy_dtype(dtype), _working(dtype)

    def rounded(value: Array) -> Array:
        return value.astype(kept).astype(working)

    made: dict[str, Array] = {}
    values = {next(iter(net.inputs)): rounded(x)}
    for node in net.nodes:
        w = {role: rounded(materialise(name, net.weights, made)) for role, name in node.weights.items()}
        with np.errstate(all="ignore"):  # NaN and Inf pass through, as everywhere in onchip
            values[node.name] = rounded(FORWARD[type(node.layer)](node.layer, values[node.inputs[0]], w))
    return values


def forward(net: Network, x: Array, dtype: str = "float64") -> Array:
    """Run the network on x (B, ...) in `dtype`; the only output as float64, or float32 for narrower types."""
    return forward_all(net, x, dtype)[net.outputs[0]]


def loss_and_gradients(
    net: Network, x: Array, target: Array, loss: str, dtype: str = "float64"
) -> tuple[float, dict[str, Array]]:
    """The loss of a batch and its gradient by every weight, by name.

    "cross_entropy": the network's output is logits, target (B,) holds classes; mean over the batch.
    "half_sse":      half the sum of squared differences to target (B, D_out), over the whole batch.
    """
    values = forward_all(net, x, dtype)
    y = values[net.outputs[0]]
    value, dy = LOSSES[loss](y, target)
    upstream: dict[str, Array] = {net.outputs[0]: dy}
    gradients: dict[str, Array] = {}
    made: dict[str, Array] = {}
    for node in reversed(net.nodes):
        w = {role: materialise(name, net.weights, made).astype(y.dtype) for role, name in node.weights.items()}
        value_in = values[node.inputs[0]]
        dx, dw = BACKWARD[type(node.layer)](node.layer, value_in, w, values[node.name], upstream[node.name])
        upstream[node.inputs[0]] = upstream.get(node.inputs[0], 0) + dx
        for role, gradient in dw.items():
            name = node.weights[role]
            gradients[name] = gradients.get(name, 0) + gradient
    return value, gradients


def cross_entropy(logits: Array, classes: Array) -> tuple[float, Array]:
    B = len(logits)
    logp = log_softmax(LogSoftmax(), logits, {})
    dy = np.exp(logp)
    dy[np.arange(B), classes] -= 1
    return float(-logp[np.arange(B), classes].mean()), dy / B


def half_sse(y: Array, target: Array) -> tuple[float, Array]:
    return float(0.5 * np.square(y - target).sum()), y - target


LOSSES: dict[str, Callable[[Array, Array], tuple[float, Array]]] = {
    "cross_entropy": cross_entropy,
    "half_sse": half_sse,
}


def sgd_step(
    net: Network, velocity: dict[str, Array], gradients: Mapping[str, Array], lr: float, momentum: float
) -> Network:
    """v = momentum v + g, w = w - lr v; the network after the step, `velocity` updated in place."""
    weights = dict(net.weights)
    for name, g in gradients.items():
        velocity[name] = momentum * velocity.get(name, 0) + g
        weights[name] = materialise(name, net.weights).astype(g.dtype) - lr * velocity[name]
    return net.replace(weights=weights)


def _working(dtype: str) -> np.dtype[Any]:
    if "float" not in dtype or dtype not in DTYPE_BYTES:
        raise InputError("the reference computes in a float dtype", got=dtype)
    return np.dtype(np.float64 if dtype == "float64" else np.float32)
