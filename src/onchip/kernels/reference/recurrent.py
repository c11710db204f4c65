"""Recurrent layers, step by step; backpropagation through time recomputes the steps."""

from __future__ import annotations

import numpy as np

from onchip.kernels.reference.base import Arrays, Gradients, Weights, backward_of, forward_of
from onchip.network.layers import GRU, LSTM, RNN
from onchip.network.layers.recurrent import Recurrent
from onchip.network.recipe import Array


@forward_of(LSTM, GRU, RNN)
def recurrent(layer: Recurrent, xs: Arrays, w: Weights) -> Array:
    outputs = []
    for d, order in enumerate(_orders(layer, xs[0])):
        states = _first_states(layer, xs, w, d)
        steps: list[Array] = [states[0]] * len(order)
        for s in order:
            states = _step(layer, _gate_input(layer, xs[0], w, d, s), states, w, d)
            steps[s] = states[0]
        outputs.append(np.stack(steps, -2) if layer.output == "sequence" else states[_last_state(layer)])
    return np.concatenate(outputs, -1)


@backward_of(LSTM, GRU, RNN)
def recurrent_back(layer: Recurrent, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
    D, _, H = w["recurrence"].shape
    dx, dw = np.zeros_like(xs[0]), {role: np.zeros_like(array) for role, array in w.items()}
    dfirst = [np.zeros((*y.shape[: xs[0].ndim - 2], D, H), dy.dtype) for _ in range(layer.states)]
    for d, order in enumerate(_orders(layer, xs[0])):
        before = [_first_states(layer, xs, w, d)]
        for s in order:
            before.append(_step(layer, _gate_input(layer, xs[0], w, d, s), before[-1], w, d))
        dstates = [np.zeros_like(state) for state in before[0]]
        units = dy[..., d * H : (d + 1) * H]
        if layer.output != "sequence":
            dstates[_last_state(layer)] = units
        for s, states in zip(order[::-1], before[-2::-1], strict=True):
            if layer.output == "sequence":
                dstates[0] = dstates[0] + units[..., s, :]
            gates = _gate_input(layer, xs[0], w, d, s)
            dgates, dstates = _step_back(layer, gates, states, w, d, dstates, dw)
            width = layer.gates * H
            dx[..., s, d * width : (d + 1) * width] = dgates
        for dstate, total in zip(dstates, dfirst, strict=True):
            total[..., d, :] = dstate
    return (dx, *dfirst[: len(xs) - 1]), dw


def _orders(layer: Recurrent, x: Array) -> list[list[int]]:
    """The steps in the order of each direction."""
    steps = list(range(x.shape[-2]))
    orders = {"forward": [steps], "reverse": [steps[::-1]], "bidirectional": [steps, steps[::-1]]}
    return orders[layer.direction]


def _first_states(layer: Recurrent, xs: Arrays, w: Weights, d: int) -> list[Array]:
    zeros = np.zeros((*xs[0].shape[:-2], w["recurrence"].shape[-1]), xs[0].dtype)
    states = [state[..., d, :] for state in xs[1:]]
    return states + [zeros] * (layer.states - len(states))


def _last_state(layer: Recurrent) -> int:
    return 1 if layer.attributes()["output"] == "cell" else 0


def _gate_input(layer: Recurrent, x: Array, w: Weights, d: int, s: int) -> Array:
    """The input contribution to the gates of a step (B, ..., G * H)."""
    width = w["recurrence"].shape[1]
    return x[..., s, d * width : (d + 1) * width]


def _sigmoid(v: Array) -> Array:
    e = np.exp(-np.abs(v))
    return np.asarray(np.where(v >= 0, 1, e) / (1 + e))


def _step(layer: Recurrent, gates: Array, states: list[Array], w: Weights, d: int) -> list[Array]:
    """The states (B, ..., H) after a step."""
    h, R = states[0], w["recurrence"][d]
    H = h.shape[-1]
    if isinstance(layer, LSTM):
        i, o, f, g = np.split(gates + h @ R.T, 4, -1)
        c = _sigmoid(f) * states[1] + _sigmoid(i) * np.tanh(g)
        return [_sigmoid(o) * np.tanh(c), c]
    if isinstance(layer, GRU):
        z, r = np.split(_sigmoid(gates[..., : 2 * H] + h @ R[: 2 * H].T), 2, -1)
        n = np.tanh(gates[..., 2 * H :] + _reset(layer, r, h, R[2 * H :], w, d))
        return [(1 - z) * n + z * h]
    v = gates + h @ R.T
    assert isinstance(layer, RNN)
    return [np.tanh(v) if layer.activation == "tanh" else np.maximum(v, v.dtype.type(0))]


def _reset(layer: GRU, r: Array, h: Array, R: Array, w: Weights, d: int) -> Array:
    if not layer.reset_after:
        return np.asarray((r * h) @ R.T)
    Rh = h @ R.T
    return np.asarray(r * (Rh + w["bias"][d] if "bias" in w else Rh))


def _step_back(
    layer: Recurrent, gates: Array, states: list[Array], w: Weights, d: int, dstates: list[Array], dw: dict[str, Array]
) -> tuple[Array, list[Array]]:
    """The gradients by a step's input and by the states before it; adds those by the weights to dw."""
    h, R = states[0], w["recurrence"][d]
    H = h.shape[-1]
    if isinstance(layer, LSTM):
        i, o, f, g = np.split(gates + h @ R.T, 4, -1)
        i, o, f, g = _sigmoid(i), _sigmoid(o), _sigmoid(f), np.tanh(g)
        t = np.tanh(f * states[1] + i * g)
        dc = dstates[1] + dstates[0] * o * (1 - t * t)
        parts = (dc * g * i * (1 - i), dstates[0] * t * o * (1 - o), dc * states[1] * f * (1 - f), dc * i * (1 - g * g))
        dgates = np.concatenate(parts, -1)
        _add_weight_gradient(dw["recurrence"][d], dgates, h)
        return dgates, [dgates @ R, dc * f]
    if isinstance(layer, GRU):
        z, r = np.split(_sigmoid(gates[..., : 2 * H] + h @ R[: 2 * H].T), 2, -1)
        R_n = R[2 * H :]
        n = np.tanh(gates[..., 2 * H :] + _reset(layer, r, h, R_n, w, d))
        dh = dstates[0] * z
        dn = dstates[0] * (1 - z) * (1 - n * n)
        if layer.reset_after:
            Rh = h @ R_n.T + (w["bias"][d] if "bias" in w else 0)
            dr, dRh = dn * Rh, dn * r
            if "bias" in w:
                dw["bias"][d] += dRh.reshape(-1, H).sum(axis=0)
            _add_weight_gradient(dw["recurrence"][d, 2 * H :], dRh, h)
            dh = dh + dRh @ R_n
        else:
            drh = dn @ R_n
            dr = drh * h
            _add_weight_gradient(dw["recurrence"][d, 2 * H :], dn, r * h)
            dh = dh + drh * r
        dzr = np.concatenate((dstates[0] * (h - n) * z * (1 - z), dr * r * (1 - r)), -1)
        _add_weight_gradient(dw["recurrence"][d, : 2 * H], dzr, h)
        return np.concatenate((dzr, dn), -1), [dh + dzr @ R[: 2 * H]]
    assert isinstance(layer, RNN)
    (h_next,) = _step(layer, gates, states, w, d)
    dgates = dstates[0] * (1 - h_next * h_next if layer.activation == "tanh" else h_next > 0)
    _add_weight_gradient(dw["recurrence"][d], dgates, h)
    return dgates, [dgates @ R]


def _add_weight_gradient(total: Array, dgates: Array, read: Array) -> None:
    total += dgates.reshape(-1, dgates.shape[-1]).T @ read.reshape(-1, read.shape[-1])
