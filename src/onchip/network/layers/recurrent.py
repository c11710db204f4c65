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
from onchip.network.layers.base import Arrays, Gradients, Layer, StepLayer, Types, Weights, WeightTypes, need_float
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
    needs_y: ClassVar[bool] = False

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
                gates = _gate_input(xs[0], w, d, s)
                states = _next_states(self, gates, _sums(self, gates, states[0], w, d), states)
                steps[s] = states[0]
            outputs.append(np.stack(steps, -2) if self.output == "sequence" else states[_last_state(self)])
        return np.concatenate(outputs, -1)

    def backward(self, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
        x, dw = xs[0], {role: np.zeros_like(array) for role, array in w.items()}
        D, width, H = w["recurrence"].shape
        dx, dfirst = np.zeros_like(x), [np.zeros((*x.shape[:-2], D, H), dy.dtype) for _ in range(self.states)]
        for d, order in enumerate(_orders(self, x)):
            states, before, sums = _first_states(self, xs, w, d), [], []
            for s in order:
                before.append(states)
                sums.append(_sums(self, _gate_input(x, w, d, s), states[0], w, d))
                states = _next_states(self, _gate_input(x, w, d, s), sums[-1], states)
            dstates = _last_gradients(self, dy, states, d)
            for s, states, sum_s in zip(order[::-1], before[::-1], sums[::-1], strict=True):
                dstates[0] = dstates[0] + _step_gradient(self, dy, d, s, H)
                gates = _gate_input(x, w, d, s)
                dsums, dgates, dstates = _step_back(self, gates, sum_s, states, w["recurrence"][d], dstates)
                dx[..., s, d * width : (d + 1) * width] = dgates
                if "bias" in w:
                    dw["bias"][d] += dsums[..., 2 * H :].reshape(-1, H).sum(axis=0)
                read = [states[0]] * self.gates
                if isinstance(self, GRU) and not self.reset_after:
                    read[2] = _sigmoid(gates + sum_s)[..., H : 2 * H] * states[0]
                for gate, each in enumerate(read):
                    rows = slice(gate * H, (gate + 1) * H)
                    dw["recurrence"][d, rows] += dsums[..., rows].reshape(-1, H).T @ each.reshape(-1, H)
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


@dataclass(frozen=True, eq=False, repr=False)
class RecurrentGrad(StepLayer):
    """The gradient of the gates of a recurrent layer, or of an initial state: all that needs its steps in order.

    x, dy; per direction what the states add to the gates, without bias (B, ..., S, G * H); per direction the state h
    before each step (B, ..., S, H); and the initial cell, if the layer reads one.
    -> (B, ..., S, D * G * H). Where a reset scales what h adds to n, also the gradient of that, before the one of x:
    (B, ..., S, D * (z, r, n of h, n of x) * H).

    index  0: the gates; 1, 2: the initial state h or c (B, ..., D, H)
    """

    of: Recurrent
    index: int = 0
    arity: ClassVar[int | None] = None

    @property
    def required(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.of.required

    @property
    def optional(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.of.optional

    @property
    def gates(self) -> int:
        """Per step and direction of the result."""
        return self.of.gates + (isinstance(self.of, GRU) and self.of.reset_after)

    def infer(self, inputs: Types, weights: WeightTypes) -> TensorType:
        x, dy, D = inputs[0], inputs[1], self.of.directions
        y, H = self.of.infer((x,), weights), int(weights["recurrence"].shape[-1])
        state = TensorType((*x.shape[:-2], D, H), x.dtype)
        steps = (TensorType((*x.shape[:-1], width * H), x.dtype) for width in (self.of.gates, 1))
        expected = [y, *(kind for kind in steps for _ in range(D))]
        cells = inputs[2 + 2 * D :]
        if [dy, *inputs[2 : 2 + 2 * D]] != expected or cells not in ((), (state,) * (self.of.states - 1)):
            got = ", ".join(map(str, inputs[1:]))
            raise ShapeError("inputs and layer do not fit", got=got, expected=", ".join(map(str, expected)))
        if not 0 <= self.index <= self.of.states:
            raise ShapeError("no such state", got=str(self.index), expected=f"0 to {self.of.states}")
        return state if self.index else TensorType((*x.shape[:-1], D * self.gates * H), x.dtype)

    def row_flop(self, inputs: Types, weights: WeightTypes) -> int:
        return self.of.row_flop(inputs[:1], weights)

    def forward(self, xs: Arrays, w: Weights) -> Array:
        x, dy, D, H = xs[0], xs[1], self.of.directions, w["recurrence"].shape[-1]
        of_gates = np.zeros((*x.shape[:-1], D * self.gates * H), dy.dtype)
        of_states = np.zeros((*x.shape[:-2], D, H), dy.dtype)
        cells = xs[2 + 2 * D] if len(xs) > 2 + 2 * D else np.zeros_like(of_states)
        for d, order in enumerate(_orders(self.of, x)):
            sums, before = xs[2 + d], xs[2 + D + d]
            if "bias" in w:
                sums = np.concatenate((sums[..., : 2 * H], sums[..., 2 * H :] + w["bias"][d]), -1)
            states, read = [before[..., order[0], :], cells[..., d, :]][: self.of.states], []
            for s in order:
                read.append([before[..., s, :], *states[1:]])
                states = _next_states(self.of, _gate_input(x, w, d, s), sums[..., s, :], read[-1])
            dstates = _last_gradients(self.of, dy, states, d)
            for s, states in zip(order[::-1], read[::-1], strict=True):
                dstates[0] = dstates[0] + _step_gradient(self.of, dy, d, s, H)
                gates = _gate_input(x, w, d, s)
                found = _step_back(self.of, gates, sums[..., s, :], states, w["recurrence"][d], dstates)
                dsums, dgates, dstates = found
                parts = (dsums, dgates[..., 2 * H :]) if self.gates > self.of.gates else (dgates,)
                width = self.gates * H
                of_gates[..., s, d * width : (d + 1) * width] = np.concatenate(parts, -1)
            of_states[..., d, :] = dstates[max(0, self.index - 1)]
        return of_states if self.index else of_gates


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


def _sums(layer: Recurrent, gates: Array, h: Array, w: Weights, d: int) -> Array:
    """What the state h before a step adds to its gates (B, ..., G * H): R h, and the bias inside a reset."""
    R, H = w["recurrence"][d], h.shape[-1]
    if not isinstance(layer, GRU):
        return np.asarray(h @ R.T)
    zr = h @ R[: 2 * H].T
    if layer.reset_after:
        n = h @ R[2 * H :].T + (w["bias"][d] if "bias" in w else 0)
    else:
        n = (_sigmoid(gates[..., H : 2 * H] + zr[..., H:]) * h) @ R[2 * H :].T
    return np.concatenate((zr, n), -1)


def _next_states(layer: Recurrent, gates: Array, sums: Array, states: list[Array]) -> list[Array]:
    """The states (B, ..., H) after a step."""
    if isinstance(layer, LSTM):
        i, o, f, g = np.split(gates + sums, 4, -1)
        c = _sigmoid(f) * states[1] + _sigmoid(i) * np.tanh(g)
        return [_sigmoid(o) * np.tanh(c), c]
    if isinstance(layer, GRU):
        z, _, n = _gru_gates(layer, gates, sums)
        return [(1 - z) * n + z * states[0]]
    v = gates + sums
    assert isinstance(layer, RNN)
    return [np.tanh(v) if layer.activation == "tanh" else np.maximum(v, v.dtype.type(0))]


def _gru_gates(layer: GRU, gates: Array, sums: Array) -> tuple[Array, Array, Array]:
    """z, r, n of a step."""
    H = gates.shape[-1] // 3
    z, r = np.split(_sigmoid(gates[..., : 2 * H] + sums[..., : 2 * H]), 2, -1)
    sum_n = r * sums[..., 2 * H :] if layer.reset_after else sums[..., 2 * H :]
    return z, r, np.tanh(gates[..., 2 * H :] + sum_n)


# -- gradients: backwards through the steps --------------------------------------------------------------------------


def _last_gradients(layer: Recurrent, dy: Array, states: list[Array], d: int) -> list[Array]:
    """The gradients of the states after the last step: of that which is the output."""
    dstates = [np.zeros_like(state) for state in states]
    if layer.attributes()["output"] != "sequence":
        H = states[0].shape[-1]
        dstates[_last_state(layer)] = dy[..., d * H : (d + 1) * H]
    return dstates


def _step_gradient(layer: Recurrent, dy: Array, d: int, s: int, H: int) -> Array:
    """The gradient of the output of a step; 0 if only the last state is the output."""
    return dy[..., s, d * H : (d + 1) * H] if layer.output == "sequence" else np.zeros(1, dy.dtype)


def _step_back(
    layer: Recurrent, gates: Array, sums: Array, states: list[Array], R: Array, dstates: list[Array]
) -> tuple[Array, Array, list[Array]]:
    """The gradients of `sums`, of `gates`, and of the states before a step, from those of the states after it."""
    h, dh = states[0], dstates[0]
    H = h.shape[-1]
    if isinstance(layer, LSTM):
        i, o, f, g = np.split(gates + sums, 4, -1)
        i, o, f, g = _sigmoid(i), _sigmoid(o), _sigmoid(f), np.tanh(g)
        t = np.tanh(f * states[1] + i * g)
        dc = dstates[1] + dh * o * (1 - t * t)
        parts = (dc * g * i * (1 - i), dh * t * o * (1 - o), dc * states[1] * f * (1 - f), dc * i * (1 - g * g))
        dgates = np.concatenate(parts, -1)
        return dgates, dgates, [dgates @ R, dc * f]
    if isinstance(layer, GRU):
        z, r, n = _gru_gates(layer, gates, sums)
        dn = dh * (1 - z) * (1 - n * n)
        dz, dbefore = dh * (h - n) * z * (1 - z), dh * z
        if layer.reset_after:
            dsum_n, dr = dn * r, dn * sums[..., 2 * H :]
            dbefore = dbefore + dsum_n @ R[2 * H :]
        else:
            drh = dn @ R[2 * H :]
            dsum_n, dr, dbefore = dn, drh * h, dbefore + drh * r
        dzr = np.concatenate((dz, dr * r * (1 - r)), -1)
        dbefore = dbefore + dzr @ R[: 2 * H]
        return np.concatenate((dzr, dsum_n), -1), np.concatenate((dzr, dn), -1), [dbefore]
    assert isinstance(layer, RNN)
    (y,) = _next_states(layer, gates, sums, states)
    dgates = dh * (1 - y * y if layer.activation == "tanh" else y > 0)
    return dgates, dgates, [dgates @ R]
