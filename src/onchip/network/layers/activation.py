"""Activations: elementwise; and softmax, over an axis."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from onchip.errors import ShapeError
from onchip.network.layers.base import Elementwise, Layer, Types, WeightTypes, need_float, row_axis
from onchip.network.types import TensorType


class ReLU(Elementwise):
    """max(x, 0); NaN stays NaN."""


@dataclass(frozen=True, eq=False, repr=False)
class LeakyReLU(Elementwise):
    """x where x >= 0, else slope * x."""

    slope: float = 0.01
    flop_each: ClassVar[int] = 2


@dataclass(frozen=True, eq=False, repr=False)
class Clip(Elementwise):
    """min(max(x, low), high), None for no bound; NaN stays NaN. ReLU6 is Clip(0, 6)."""

    low: float | None = None
    high: float | None = None
    flop_each: ClassVar[int] = 2

    def __post_init__(self) -> None:
        if any(bound is not None and math.isnan(bound) for bound in (self.low, self.high)):
            raise ShapeError("bad bounds", got=f"{self.low}, {self.high}", expected="numbers, or None", hint="0, 6")


class Sigmoid(Elementwise):
    """1 / (1 + exp(-x))."""

    flop_each: ClassVar[int] = 20  # an exponential is a polynomial of degree 6 and a division


class Tanh(Elementwise):
    flop_each: ClassVar[int] = 20


class SiLU(Elementwise):
    """x * sigmoid(x)."""

    flop_each: ClassVar[int] = 21


@dataclass(frozen=True, eq=False, repr=False)
class GELU(Elementwise):
    """x * Phi(x), Phi the CDF of the normal distribution: exact by erf, or approximated by

    "tanh": x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))).
    """

    approximate: Literal["none", "tanh"] = "none"
    flop_each: ClassVar[int] = 27


@dataclass(frozen=True, eq=False, repr=False)
class ELU(Elementwise):
    """x where x >= 0, else alpha * (exp(x) - 1)."""

    alpha: float = 1.0
    flop_each: ClassVar[int] = 21


class SELU(Elementwise):
    """1.0507 * ELU(1.6733), both to the last digit of a float32 (`SCALE` and `ALPHA`)."""

    SCALE: ClassVar[float] = 1.05070102214813232421875
    ALPHA: ClassVar[float] = 1.67326319217681884765625
    flop_each: ClassVar[int] = 22


@dataclass(frozen=True, eq=False, repr=False)
class HardSigmoid(Elementwise):
    """min(max(slope * x + shift, 0), 1)."""

    slope: float = 0.2
    shift: float = 0.5
    flop_each: ClassVar[int] = 4


class HardSwish(Elementwise):
    """x * min(max(x / 6 + 1 / 2, 0), 1)."""

    flop_each: ClassVar[int] = 5


class Softplus(Elementwise):
    """log(1 + exp(x))."""

    flop_each: ClassVar[int] = 35


class Softsign(Elementwise):
    """x / (1 + |x|)."""

    flop_each: ClassVar[int] = 10


class Mish(Elementwise):
    """x * tanh(log(1 + exp(x)))."""

    flop_each: ClassVar[int] = 28


@dataclass(frozen=True, eq=False, repr=False)
class _OverAxis(Layer, abstract=True):
    axis: int = -1

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


class LogSoftmax(_OverAxis):
    """x - max - log(sum(exp(x - max))) over an axis."""
