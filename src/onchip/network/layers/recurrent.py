"""Recurrent layers: sequential steps along a sequence, each from the state of the previous one.

The gemm of x and the input weights does not depend on the state: a Linear before the layer computes it for all steps.
So a layer here has only the recurrent weights.
"""

from __future__ import annotations

import typing
from dataclasses import dataclass
from typing import ClassVar, Literal

from onchip.errors import ShapeError
from onchip.network.layers.base import Layer, Types, WeightTypes, need_float
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
