"""Losses with their gradients, and optimiser steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from onchip.network.graph import Network
from onchip.network.layers import LogSoftmax, Sigmoid
from onchip.network.recipe import Array, materialise


def cross_entropy(logits: Array, classes: Array, smoothing: float = 0.0) -> tuple[Array, Array]:
    B, N = logits.shape
    logp = LogSoftmax().forward((logits,), {})
    target = np.full_like(logp, smoothing / N)
    target[np.arange(B), classes] += 1 - smoothing
    return -(target * logp).sum(axis=1), np.exp(logp) - target


def half_sse(y: Array, target: Array) -> tuple[Array, Array]:
    return 0.5 * np.square(y - target).reshape(len(y), -1).sum(axis=1), y - target


def mse(y: Array, target: Array) -> tuple[Array, Array]:
    return np.square(y - target).reshape(len(y), -1).mean(axis=1), 2 * (y - target) / (y.size // len(y))


def bce_with_logits(y: Array, target: Array) -> tuple[Array, Array]:
    losses = target * np.logaddexp(0, -y) + (1 - target) * np.logaddexp(0, y)
    return losses.reshape(len(y), -1).mean(axis=1), (Sigmoid().function(y) - target) / (y.size // len(y))


def mae(y: Array, target: Array) -> tuple[Array, Array]:
    return np.abs(y - target).reshape(len(y), -1).mean(axis=1), np.sign(y - target) / (y.size // len(y))


def huber(y: Array, target: Array) -> tuple[Array, Array]:
    d = y - target
    losses = np.where(np.abs(d) < 1, 0.5 * d * d, np.abs(d) - 0.5)
    return losses.reshape(len(y), -1).mean(axis=1), np.clip(d, -1, 1) / (y.size // len(y))


# (output, target) -> (B,) the loss per row, and (B, D_out) its gradient by the row's output.
LOSSES: dict[str, Callable[..., tuple[Array, Array]]] = {
    "cross_entropy": cross_entropy,
    "half_sse": half_sse,
    "mse": mse,
    "bce_with_logits": bce_with_logits,
    "mae": mae,
    "huber": huber,
}


def batch_loss(
    loss: str, y: Array, target: Array, row_weights: Array | None = None, smoothing: float = 0.0
) -> tuple[float, Array]:
    """The loss of a batch, and its gradient by y: the weighted mean of the rows' losses; for "half_sse" the sum."""
    losses, dy = LOSSES[loss](y, target, smoothing) if smoothing else LOSSES[loss](y, target)
    weights = np.ones(len(y), y.dtype) if row_weights is None else row_weights.astype(y.dtype)
    total = 1.0 if loss == "half_sse" else max(float(weights.sum()), float(np.finfo(y.dtype).tiny))
    return float(losses @ weights) / total, dy * weights.reshape(-1, *[1] * (y.ndim - 1)) / np.asarray(total, y.dtype)


def clip_gradients(gradients: Mapping[str, Array], clip_norm: float) -> dict[str, Array]:
    """The gradients times clip_norm / (global norm + 1e-6), if that is below 1."""
    norm = np.sqrt(sum(float(np.square(gradient).sum()) for gradient in gradients.values()))
    share = min(1.0, clip_norm / (norm + 1e-6))
    return {name: (gradient * share).astype(gradient.dtype) for name, gradient in gradients.items()}


def sgd_step(
    net: Network,
    velocity: dict[str, Array],
    gradients: Mapping[str, Array],
    lr: float,
    momentum: float,
    weight_decay: float | Mapping[str, float] = 0.0,
    nesterov: bool = False,
) -> Network:
    """g += weight_decay w; v = momentum v + g; w -= lr v, or, for Nesterov's momentum, w -= lr (g + momentum v).

    Returns the new network; updates `velocity` in place.
    """
    weights = dict(net.weights)
    for name, gradient in gradients.items():
        w = materialise(name, net.weights).astype(gradient.dtype)
        g = gradient + _decay_of(name, weight_decay) * w
        velocity[name] = momentum * velocity.get(name, 0) + g
        weights[name] = w - lr * (g + momentum * velocity[name] if nesterov else velocity[name])
    return net.replace(weights=weights)


def _decay_of(name: str, weight_decay: float | Mapping[str, float]) -> float:
    """Of all weights, or by name; 0 for another name."""
    return weight_decay.get(name, 0.0) if isinstance(weight_decay, Mapping) else weight_decay


def adam_step(
    net: Network,
    moments: dict[str, tuple[Array, Array]],
    gradients: Mapping[str, Array],
    lr: float,
    step: int,
    weight_decay: float | Mapping[str, float] = 0.0,
    is_decoupled: bool = False,
) -> Network:
    """Step 1, 2, ... of Adam (betas 0.9 and 0.999, eps 1e-8); updates `moments` (m, s by weight) in place.

    g += weight_decay w or, for AdamW, which is decoupled, w -= lr weight_decay w;
    m = 0.9 m + 0.1 g; s = 0.999 s + 0.001 g^2;
    w -= lr m / (1 - 0.9^step) / (sqrt(s / (1 - 0.999^step)) + eps)
    """
    weights = dict(net.weights)
    for name, gradient in gradients.items():
        w = materialise(name, net.weights).astype(gradient.dtype)
        decay = _decay_of(name, weight_decay)
        g = gradient if is_decoupled else gradient + decay * w
        w = w * (1 - lr * decay) if is_decoupled else w
        m, s = moments.get(name, (np.zeros_like(g), np.zeros_like(g)))
        m, s = 0.9 * m + 0.1 * g, 0.999 * s + 0.001 * g * g
        moments[name] = (m, s)
        weights[name] = w - lr * (m / (1 - 0.9**step)) / (np.sqrt(s / (1 - 0.999**step)) + 1e-8)
    return net.replace(weights=weights)
