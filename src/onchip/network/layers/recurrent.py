"""Recurrent layers: sequential steps along a sequence, each from the state of the previous one.

The gemm of x and the input weights does not depend on the state: a Linear before the layer computes it for all steps.
So a layer here has only the recurrent weights.
"""

from __future__ import annotations

import typing
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from onchip.errors import ShapeError
from onchip.network.layers.base import Arrays, Gradients, Layer, Types, Weights, WeightTypes, need_float
from onchip.network.recipe import Array
from onchip.network.types import TensorType

Direction = Literal["forward", "reverse", "bidirectional"]


@dataclass(frozen=True, eq=False, repr=False)
class Recurrent(Layer, abstract=True):
    """x (B, ..., S, D * G * H), recurrence (D, G * H, H) -> (B, ..., S, D * H), or (B, ..., D * H) of the last step.

    x holds the input contribution to each gate, bias included, per step, direction and gate. D is 2 for bidirectional
    layers, G the gates per step, H the hidden units. Axes between the batch and the steps are more sequences. A second
    value (B, ..., D, H) is the initial state, 0 if absent. The last step of a direction is the last one it processes.
    """

    direction: Direction = "forward"
    output: Literal["sequence", "last"] = "sequence"
    gates: ClassVar[int]
    states: ClassVar[int] = 1  # that a step passes to the next
    flop_unit: ClassVar[int]  # per unit and step, besides the gemms
    required: ClassVar[tuple[str, ...]] = ("recurrence",)
    arity: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for name in ("direction", "output"):
            if getattr(self, name) not in (known := typing.get_args(hints[name])):
                raise ShapeError(f"bad {name}", got=repr(getattr(self, name)), expected=" or ".join(known))

    @property
    def directions(self) -> int:
        return 2 if self.direction == "bidirectional" else 1

    def infer(self, inputs: Types, weights: WeightTypes) -> TensorType:
        x, recurrence = inputs[0], weights["recurrence"]
        need_float(x, weights)
        D, G = self.directions, self.gates
        H = int(recurrence.shape[-1]) if recurrence.shape else 0
        if not H or recurrence.shape != (D, G * H, H):
            expected = f"({D}, {G} * H, H)"
            raise ShapeError("bad recurrence shape", got=str(recurrence), expected=expected)
        if len(x.shape) < 3 or x.shape[-2] == 0 or x.shape[-1] != D * G * H:
            raise ShapeError("bad input shape", got=str(x), expected=f"(B, ..., S, {D * G * H}), S at least 1")
        if len(inputs) > 1 + self.states:
            raise ShapeError("too many states", got=str(len(inputs) - 1), expected=f"at most {self.states}")
        before = TensorType((*x.shape[:-2], D, H), x.dtype)
        for state in inputs[1:]:
            if state != before:
                raise ShapeError("bad state shape", got=str(state), expected=str(before))
        steps = (x.shape[-2],) if self.output == "sequence" else ()
        return TensorType((*x.shape[:-2], *steps, D * H), x.dtype)

    def row_flop(self, inputs: Types, weights: WeightTypes) -> int:
        D, _, H = (int(d) for d in weights["recurrence"].shape)
        steps = inputs[0].row_size // (D * self.gates * H)
        return steps * D * H * (2 * self.gates * H + self.flop_unit)

    def forward(self, xs: Arrays, w: Weights) -> Array:
        outputs = []
        for d, order in enumerate(_orders(self, xs[0])):
            states = _first_states(self, xs, w, d)
            steps: list[Array] = [states[0]] * len(order)
            for s in order:
                states = _step(self, _gate_input(xs[0], w, d, s), states, w, d)
                steps[s] = states[0]
            outputs.append(np.stack(steps, -2) if self.output == "sequence" else states[_last_state(self)])
        return np.concatenate(outputs, -1)

    def backward(self, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
        D, _, H = w["recurrence"].shape
        dx, dw = np.zeros_like(xs[0]), {role: np.zeros_like(array) for role, array in w.items()}
        dfirst = [np.zeros((*y.shape[: xs[0].ndim - 2], D, H), dy.dtype) for _ in range(self.states)]
        for d, order in enumerate(_orders(self, xs[0])):
            before = [_first_states(self, xs, w, d)]
            for s in order:
                before.append(_step(self, _gate_input(xs[0], w, d, s), before[-1], w, d))
            dstates = [np.zeros_like(state) for state in before[0]]
            units = dy[..., d * H : (d + 1) * H]
            if self.output != "sequence":
                dstates[_last_state(self)] = units
            for s, states in zip(order[::-1], before[-2::-1], strict=True):
                if self.output == "sequence":
                    dstates[0] = dstates[0] + units[..., s, :]
                gates = _gate_input(xs[0], w, d, s)
                dgates, dstates = _step_back(self, gates, states, w, d, dstates, dw)
                width = self.gates * H
                dx[..., s, d * width : (d + 1) * width] = dgates
            for dstate, total in zip(dstates, dfirst, strict=True):
                total[..., d, :] = dstate
        return (dx, *dfirst[: len(xs) - 1]), dw


@dataclass(frozen=True, eq=False, repr=False)
class RNN(Recurrent):
    """h = activation(x + R h)."""

    activation: Literal["tanh", "relu"] = "tanh"
    gates: ClassVar[int] = 1
    flop_unit: ClassVar[int] = 21

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.activation not in ("tanh", "relu"):
            raise ShapeError("bad activation", got=repr(self.activation), expected="tanh or relu")


@dataclass(frozen=True, eq=False, repr=False)
class GRU(Recurrent):
    """Gates z, r, n in this order: z, r = sigmoid(x + R h), then h = (1 - z) n + z h with

    n = tanh(x_n + r (R_n h + bias)) if reset_after, with a weight bias (D, H), else tanh(x_n + R_n (r h)).
    """

    reset_after: bool = True
    gates: ClassVar[int] = 3
    flop_unit: ClassVar[int] = 70
    optional: ClassVar[tuple[str, ...]] = ("bias",)

    def infer(self, inputs: Types, weights: WeightTypes) -> TensorType:
        output_type = super().infer(inputs, weights)
        D, _, H = weights["recurrence"].shape
        bias = weights.get("bias")
        if bias is not None and (bias.shape != (D, H) or not self.reset_after):
            expected = f"[{D}, {H}], where reset_after" if self.reset_after else "none without reset_after"
            raise ShapeError("bias and recurrence do not fit", got=str(bias), expected=expected)
        return output_type


@dataclass(frozen=True, eq=False, repr=False)
class LSTM(Recurrent):
    """Gates i, o, f, g in this order: c = sigmoid(f) c + sigmoid(i) tanh(g), h = sigmoid(o) tanh(c), each of x + R h.

    A third value is the initial cell state c. The output "cell" is c after the last step.
    """

    output: Literal["sequence", "last", "cell"] = "sequence"  # type: ignore[assignment]  # has one more
    gates: ClassVar[int] = 4
    states: ClassVar[int] = 2
    flop_unit: ClassVar[int] = 110


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


def _gate_input(x: Array, w: Weights, d: int, s: int) -> Array:
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
