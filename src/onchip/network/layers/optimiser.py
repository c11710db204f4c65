"""The optimisers' updates, one per weight: from its gradient g (1, ...) and its state, the new state (1, ...).

`values` holds the optimiser's values of this step, which the caller sets: see STEP_VALUES.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from onchip.errors import ShapeError
from onchip.network.layers.base import Arrays, StepLayer, Types, Weights, WeightTypes, need_float
from onchip.network.recipe import Array
from onchip.network.training import BETA1
from onchip.network.types import TensorType

# lr; weight decay; momentum; 1 - beta^t of Adam's first and second moment
STEP_VALUES = ("lr", "weight_decay", "momentum", "first_correction", "second_correction")
LR, DECAY, MOMENTUM, FIRST, SECOND = range(len(STEP_VALUES))
BETA2, EPS = 0.999, 1e-8  # of Adam


class Update(StepLayer, abstract=True):
    """Elementwise over a gradient, or a moment, and the first of its weights: what it returns has the type of that."""

    flop_each: ClassVar[int] = 3

    def infer(self, inputs: Types, weights: WeightTypes) -> TensorType:
        for value in inputs:
            need_float(value, weights)
        for role, kind in weights.items():
            expected = (len(STEP_VALUES),) if role == "values" else inputs[0].row_shape
            if kind.shape != expected:
                raise ShapeError(f"{role} and gradient do not fit", got=str(kind), expected=str(list(expected)))
        if len({value.row_shape for value in inputs}) > 1:
            raise ShapeError("inputs differ", got=", ".join(map(str, inputs)), expected="one shape")
        return TensorType(inputs[0].shape, weights[self.required[0]].dtype)

    def row_flop(self, inputs: Types, weights: WeightTypes) -> int:
        return self.flop_each * inputs[0].row_size


@dataclass(frozen=True, eq=False, repr=False)
class Decayed(Update):
    """g + decay_factor weight_decay w: a gradient with the decay that belongs to the loss."""

    decay_factor: float = 1.0  # of this weight
    required: ClassVar[tuple[str, ...]] = ("weight", "values")
    flop_each: ClassVar[int] = 2

    def forward(self, xs: Arrays, w: Weights) -> Array:
        g: Array = xs[0] + self.decay_factor * w["values"][DECAY] * w["weight"]
        return g


class Velocity(Update):
    """v = momentum v + g."""

    required: ClassVar[tuple[str, ...]] = ("velocity", "values")
    flop_each: ClassVar[int] = 2

    def forward(self, xs: Arrays, w: Weights) -> Array:
        v: Array = w["values"][MOMENTUM] * w["velocity"] + xs[0]
        return v


class Descent(Update):
    """w - lr v, of a gradient or a velocity v."""

    required: ClassVar[tuple[str, ...]] = ("weight", "values")
    flop_each: ClassVar[int] = 2

    def forward(self, xs: Arrays, w: Weights) -> Array:
        new: Array = w["weight"] - w["values"][LR] * xs[0]
        return new


class NesterovDescent(Update):
    """w - lr (g + momentum v), of a gradient g and the velocity v that it led to: Nesterov's momentum, as in torch."""

    arity: ClassVar[int | None] = 2
    required: ClassVar[tuple[str, ...]] = ("weight", "values")
    flop_each: ClassVar[int] = 4

    def forward(self, xs: Arrays, w: Weights) -> Array:
        (g, v), values = xs, w["values"]
        new: Array = w["weight"] - values[LR] * (g + values[MOMENTUM] * v)
        return new


@dataclass(frozen=True, eq=False, repr=False)
class FirstMoment(Update):
    """m = beta1 m + (1 - beta1) g."""

    beta1: float = BETA1
    required: ClassVar[tuple[str, ...]] = ("moment",)

    def forward(self, xs: Arrays, w: Weights) -> Array:
        m: Array = self.beta1 * w["moment"] + (1 - self.beta1) * xs[0]
        return m


class SecondMoment(Update):
    """s = beta2 s + (1 - beta2) g^2."""

    required: ClassVar[tuple[str, ...]] = ("moment",)
    flop_each: ClassVar[int] = 4

    def forward(self, xs: Arrays, w: Weights) -> Array:
        s: Array = BETA2 * w["moment"] + (1 - BETA2) * xs[0] * xs[0]
        return s


@dataclass(frozen=True, eq=False, repr=False)
class AdamStep(Update):
    """w - lr (m / first_correction) / (sqrt(s / second_correction) + eps), of the moments m and s.

    is_decoupled  of AdamW: the weight first decays, w (1 - lr decay_factor weight_decay)
    """

    is_decoupled: bool = False
    decay_factor: float = 1.0  # of this weight
    arity: ClassVar[int | None] = 2
    required: ClassVar[tuple[str, ...]] = ("weight", "values")
    flop_each: ClassVar[int] = 8

    def forward(self, xs: Arrays, w: Weights) -> Array:
        (m, s), values, weight = xs, w["values"], w["weight"]
        if self.is_decoupled:
            weight = weight * (1 - values[LR] * (self.decay_factor * values[DECAY]))
        new: Array = weight - values[LR] * (m / values[FIRST]) / (np.sqrt(s / values[SECOND]) + EPS)
        return new


@dataclass(frozen=True, eq=False, repr=False)
class RunningAverage(Update):
    """average + momentum (x - average), of a batch norm's statistics or of a weight's new value."""

    momentum: float = 0.1
    required: ClassVar[tuple[str, ...]] = ("average",)

    def forward(self, xs: Arrays, w: Weights) -> Array:
        average: Array = w["average"] + self.momentum * (xs[0] - w["average"])
        return average


@dataclass(frozen=True, eq=False, repr=False)
class ClipScale(StepLayer):
    """From the norms of all gradients, (1,) each: what they are multiplied by, at most 1."""

    clip_norm: float = 1.0
    arity: ClassVar[int | None] = None

    def infer(self, inputs: Types, weights: WeightTypes) -> TensorType:
        for value in inputs:
            need_float(value)
            if value.row_shape:
                raise ShapeError("a norm is one number", got=str(value), expected="[1]")
        return inputs[0]

    def row_flop(self, inputs: Types, weights: WeightTypes) -> int:
        return 2 * len(inputs) + 3

    def forward(self, xs: Arrays, w: Weights) -> Array:
        norm = np.sqrt(sum(x * x for x in xs))
        scale: Array = np.minimum(self.clip_norm / (norm + 1e-6), 1)
        return scale
