"""What a training step computes besides the network: losses, gradients of layers, sums over the batch.

The gradient of a weight is a value of one row, whatever the batch: its type is (1, ...).
"""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import numpy as np

from onchip.errors import ShapeError
from onchip.network.layers.activation import LogSoftmax, Sigmoid
from onchip.network.layers.base import (
    Arrays,
    Elementwise,
    Gradients,
    Layer,
    StepLayer,
    Types,
    Weights,
    WeightTypes,
    need_float,
)
from onchip.network.layers.combine import Ordered
from onchip.network.recipe import Array
from onchip.network.types import TensorType

V = TypeVar("V")


@dataclass(frozen=True, eq=False, repr=False)
class _GradientOf(StepLayer, abstract=True):
    """A gradient of `of`, a layer. Inputs: those of the layer and its output y, if `backward` needs them, and the
    gradient dy; its weights."""

    of: Layer
    arity: ClassVar[int | None] = None

    @property
    def required(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.of.required

    @property
    def optional(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.of.optional

    def _check(self, inputs: Types, weights: WeightTypes) -> Types:
        """The types of the layer's inputs; ShapeError if y or dy does not fit them."""
        if not self.of.is_differentiable:
            raise ShapeError(f"a {self.of.kind} has no gradient", got=str(self.of), expected="a layer with a gradient")
        if len(inputs) < 1 + self.of.needs_x + self.of.needs_y:
            raise ShapeError("too few inputs", got=str(len(inputs)), expected="those of the layer, its output and dy")
        xs, y, dy = self._parts(inputs)
        expected = self.of.infer(xs, weights)
        for value in (y, dy):
            if value.row_shape != expected.row_shape:
                raise ShapeError("y or dy does not fit the layer", got=str(value), expected=str(expected))
        return xs

    def _parts(self, inputs: tuple[V, ...]) -> tuple[tuple[V, ...], V, V]:
        """The layer's inputs, y and dy. In place of what `backward` does not read there is another of its type."""
        *xs, dy = inputs
        y = xs.pop() if self.of.needs_y else dy
        return tuple(xs) if self.of.needs_x else (y,), y, dy

    def row_flop(self, inputs: Types, weights: WeightTypes) -> int:
        return self.of.row_flop(self._parts(inputs)[0], weights)

    def _gradients(self, inputs: Arrays, w: Weights) -> Gradients:
        xs, y, dy = self._parts(inputs)
        return self.of.backward(xs, w, y, dy)


@dataclass(frozen=True, eq=False, repr=False)
class InputGrad(_GradientOf):
    """The gradient of one of the layer's inputs: [x1, x2, ...,] [y,] dy -> dx."""

    index: int = 0

    def infer(self, inputs: Types, weights: WeightTypes) -> TensorType:
        xs = self._check(inputs, weights)
        if not 0 <= self.index < len(xs):
            raise ShapeError("no such input", got=str(self.index), expected=f"0 to {len(xs) - 1}")
        return xs[self.index]

    def forward(self, xs: Arrays, w: Weights) -> Array:
        dx = self._gradients(xs, w)[0][self.index]
        assert dx is not None, f"{self.of} has no gradient for input {self.index}"
        return dx


@dataclass(frozen=True, eq=False, repr=False)
class WeightGrad(_GradientOf):
    """The gradient of one of the layer's weights, summed over the batch: [x1, x2, ...,] [y,] dy -> (1, ...)."""

    role: str = "weight"
    crosses_rows: ClassVar[bool] = True

    def infer(self, inputs: Types, weights: WeightTypes) -> TensorType:
        self._check(inputs, weights)
        with_gradient = [role for role in weights if role not in self.of.constants]
        if self.role not in with_gradient:
            expected = ", ".join(with_gradient) or "a layer with weights"
            raise ShapeError("no gradient of such a weight", got=self.role, expected=expected)
        return TensorType((1, *weights[self.role].shape), weights[self.role].dtype)

    def forward(self, xs: Arrays, w: Weights) -> Array:
        return self._gradients(xs, w)[1][self.role][np.newaxis]


@dataclass(frozen=True, eq=False, repr=False)
class ElementwiseGrad(Ordered, StepLayer):
    """The gradient of an elementwise layer's input: x or y, as the layer's `grad_of` says, and dy -> dx."""

    of: Elementwise
    arity: ClassVar[int | None] = 2
    optional: ClassVar[tuple[str, ...]] = ()
    backward = Layer.backward  # none

    @property
    def variant(self) -> str:
        return self.of.variant

    def row_flop(self, inputs: Types, weights: WeightTypes) -> int:
        return (self.of.flop_each + 1) * inputs[0].row_size

    def function(self, a: Array, b: Array) -> Array:
        return np.asarray(b * self.of.derivative(a, a))


class BatchSum(StepLayer):
    """The sum over the batch: (B, ...) -> (1, ...)."""

    crosses_rows: ClassVar[bool] = True

    def infer(self, inputs: Types, weights: WeightTypes) -> TensorType:
        need_float(inputs[0])
        return TensorType((1, *inputs[0].row_shape), inputs[0].dtype)

    def row_flop(self, inputs: Types, weights: WeightTypes) -> int:
        return inputs[0].row_size

    def forward(self, xs: Arrays, w: Weights) -> Array:
        total: Array = xs[0].sum(axis=0, keepdims=True)
        return total


# -- losses: an output of the network and its target -> the loss of each row ------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class CrossEntropy(StepLayer):
    """logits (B, N), classes (B,) -> (B,): -log softmax(logits)[class].

    smoothing  the fraction of the target that is spread evenly over all classes
    """

    smoothing: float = 0.0
    arity: ClassVar[int | None] = 2

    def infer(self, inputs: Types, weights: WeightTypes) -> TensorType:
        logits, classes = inputs
        need_float(logits)
        if len(logits.shape) != 2 or not logits.row_size:
            raise ShapeError("the loss needs logits", got=str(logits), expected="[B, classes]")
        if classes.row_shape or "int" not in classes.dtype:
            raise ShapeError("the loss needs a class per row", got=str(classes), expected="int64[B]")
        return TensorType(logits.shape[:1], logits.dtype)

    def row_flop(self, inputs: Types, weights: WeightTypes) -> int:
        return 4 * inputs[0].row_size

    def forward(self, xs: Arrays, w: Weights) -> Array:
        logp, target = self._parts(xs)
        loss: Array = -(target * logp).sum(axis=1)
        return loss

    def backward(self, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
        logp, target = self._parts(xs)
        return ((np.exp(logp) - target) * dy[:, np.newaxis], None), {}

    def _parts(self, xs: Arrays) -> tuple[Array, Array]:
        """log softmax(logits), and the target's probabilities."""
        logits, classes = xs
        logp = LogSoftmax().forward((logits,), {})
        target = np.full_like(logp, self.smoothing / logits.shape[1])
        target[np.arange(len(logits)), classes] += 1 - self.smoothing
        return logp, target


@dataclass(frozen=True, eq=False, repr=False)
class SquaredError(StepLayer):
    """y, target (B, ...) -> (B,): half the sum of squared differences, or their mean."""

    is_mean: bool = False
    arity: ClassVar[int | None] = 2

    def infer(self, inputs: Types, weights: WeightTypes) -> TensorType:
        return _loss_of_rows(*inputs)

    def row_flop(self, inputs: Types, weights: WeightTypes) -> int:
        return 3 * inputs[0].row_size

    def forward(self, xs: Arrays, w: Weights) -> Array:
        y, target = xs
        squares = np.square(y - target).reshape(len(y), math.prod(y.shape[1:]))
        loss: Array = squares.mean(axis=1) if self.is_mean else squares.sum(axis=1) / 2
        return loss

    def backward(self, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
        output, target = xs
        scale = 2 / (output.size // len(output)) if self.is_mean and len(output) else 1
        dx = (output - target) * (scale * dy).reshape(-1, *[1] * (output.ndim - 1))
        return (dx, -dx), {}


class MeanLoss(StepLayer, abstract=True):
    """y, target (B, ...) -> (B,): the mean of a function of each element and its target."""

    arity: ClassVar[int | None] = 2
    flop_each: ClassVar[int] = 3

    @abc.abstractmethod
    def function(self, y: Array, target: Array) -> Array:
        """The loss of each element."""

    @abc.abstractmethod
    def derivatives(self, y: Array, target: Array) -> tuple[Array, Array]:
        """Of `function`: by y and by the target."""

    def infer(self, inputs: Types, weights: WeightTypes) -> TensorType:
        return _loss_of_rows(*inputs)

    def row_flop(self, inputs: Types, weights: WeightTypes) -> int:
        return self.flop_each * inputs[0].row_size

    def forward(self, xs: Arrays, w: Weights) -> Array:
        y, _ = xs
        losses: Array = self.function(*xs).reshape(len(y), math.prod(y.shape[1:])).mean(axis=1)
        return losses

    def backward(self, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
        output, target = xs
        scale = (dy / max(1, math.prod(output.shape[1:]))).reshape(-1, *[1] * (output.ndim - 1))
        by_output, by_target = self.derivatives(output, target)
        return (by_output * scale, by_target * scale), {}


class BinaryCrossEntropy(MeanLoss):
    """-log p of a target 1 and -log(1 - p) of a target 0, p = sigmoid(y): with any target from 0 to 1 their mixture."""

    flop_each: ClassVar[int] = 40

    def function(self, y: Array, target: Array) -> Array:
        losses: Array = np.maximum(y, 0) - y * target + np.log1p(np.exp(-np.abs(y)))
        return losses

    def derivatives(self, y: Array, target: Array) -> tuple[Array, Array]:
        return Sigmoid().function(y) - target, -y


class AbsoluteError(MeanLoss):
    """|y - target|; its derivative where they are equal is 0."""

    def function(self, y: Array, target: Array) -> Array:
        losses: Array = np.abs(y - target)
        return losses

    def derivatives(self, y: Array, target: Array) -> tuple[Array, Array]:
        sign = np.sign(y - target)
        return sign, -sign


class HuberLoss(MeanLoss):
    """d^2 / 2 for d = |y - target| up to 1, d - 1/2 above."""

    flop_each: ClassVar[int] = 5

    def function(self, y: Array, target: Array) -> Array:
        d = np.abs(y - target)
        inside = np.minimum(d, 1)
        losses: Array = inside * (d - inside / 2)
        return losses

    def derivatives(self, y: Array, target: Array) -> tuple[Array, Array]:
        slope = np.clip(y - target, -1, 1)
        return slope, -slope


def _loss_of_rows(y: TensorType, target: TensorType) -> TensorType:
    """The type of a loss that compares elements."""
    need_float(y)
    if target.row_shape != y.row_shape or target.dtype != y.dtype:
        raise ShapeError("target and output do not fit", got=str(target), expected=str(y))
    return TensorType(y.shape[:1], y.dtype)


class Correct(StepLayer):
    """y (B, N), classes (B,) -> (B,): 1 where the first largest element is the class, else 0; 0 with a NaN."""

    arity: ClassVar[int | None] = 2

    def infer(self, inputs: Types, weights: WeightTypes) -> TensorType:
        return CrossEntropy().infer(inputs, weights)

    def row_flop(self, inputs: Types, weights: WeightTypes) -> int:
        return inputs[0].row_size

    def forward(self, xs: Arrays, w: Weights) -> Array:
        y, classes = xs
        is_number = ~np.isnan(y).any(axis=1)
        correct: Array = ((y.argmax(axis=1) == classes) & is_number).astype(y.dtype)
        return correct
