"""Losses with their gradients, and the steps that optimisers make of gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from onchip.kernels.reference.activation import log_softmax
from onchip.spec.layers import LogSoftmax
from onchip.spec.network import Network
from onchip.spec.recipe import Array, materialise


def cross_entropy(logits: Array, classes: Array) -> tuple[float, Array]:
    B = len(logits)
    logp = log_softmax(LogSoftmax(), (logits,), {})
    dy = np.exp(logp)
    dy[np.arange(B), classes] -= 1
    return float(-logp[np.arange(B), classes].mean()), dy / B


def half_sse(y: Array, target: Array) -> tuple[float, Array]:
    return float(0.5 * np.square(y - target).sum()), y - target


def mse(y: Array, target: Array) -> tuple[float, Array]:
    return float(np.square(y - target).mean()), 2 * (y - target) / y.size


LOSSES: dict[str, Callable[[Array, Array], tuple[float, Array]]] = {
    "cross_entropy": cross_entropy,
    "half_sse": half_sse,
    "mse": mse,
}


def sgd_step(
    net: Network,
    velocity: dict[str, Array],
    gradients: Mapping[str, Array],
    lr: float,
    momentum: float,
    weight_decay: float = 0.0,
) -> Network:
    """g += weight_decay w; v = momentum v + g; w -= lr v. The network after it; `velocity` changes in place."""
    weights = dict(net.weights)
    for name, gradient in gradients.items():
        w = materialise(name, net.weights).astype(gradient.dtype)
        velocity[name] = momentum * velocity.get(name, 0) + gradient + weight_decay * w
        weights[name] = w - lr * velocity[name]
    return net.replace(weights=weights)


def adam_step(
    net: Network,
    moments: dict[str, tuple[Array, Array]],
    gradients: Mapping[str, Array],
    lr: float,
    step: int,
    weight_decay: float = 0.0,
) -> Network:
    """Step 1, 2, ... of Adam (betas 0.9 and 0.999, eps 1e-8); `moments` (m, s by weight) change in place.

    g += weight_decay w; m = 0.9 m + 0.1 g; s = 0.999 s + 0.001 g^2;
    w -= lr m / (1 - 0.9^step) / (sqrt(s / (1 - 0.999^step)) + eps)
    """
    weights = dict(net.weights)
    for name, gradient in gradients.items():
        w = materialise(name, net.weights).astype(gradient.dtype)
        g = gradient + weight_decay * w
        m, s = moments.get(name, (np.zeros_like(g), np.zeros_like(g)))
        m, s = 0.9 * m + 0.1 * g, 0.999 * s + 0.001 * g * g
        moments[name] = (m, s)
        weights[name] = w - lr * (m / (1 - 0.9**step)) / (np.sqrt(s / (1 - 0.999**step)) + 1e-8)
    return net.replace(weights=weights)
