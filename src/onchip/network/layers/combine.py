"""Layers of several inputs: elementwise, concatenated, and the phases of a strided output."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import ClassVar

from onchip.errors import ShapeError
from onchip.network.layers.base import Layer, Types, WeightTypes, as_sizes, need_float, row_axis
from onchip.network.types import Dim, TensorType


class Broadcast(Layer, abstract=True):
    """Elementwise over all inputs, and over a weight (a row's shape, no batch) if there is one: `constant`.

    Broadcasts as NumPy does: sizes of 1 expand, and missing leading axes of the constant are 1. All inputs must have
    the same number of axes.
    """

    arity: ClassVar[int | None] = None
    optional: ClassVar[tuple[str, ...]] = ("constant",)

    def infer(self, inputs: Types, weights: WeightTypes) -> TensorType:
        if len(inputs) + len(weights) < 2:
            raise ShapeError("needs two operands", got="one", expected="two values, or a value and a constant")
        shapes = [operand.row_shape for operand in inputs]
        if len({len(shape) for shape in shapes}) > 1:
            got = ", ".join(str(operand) for operand in inputs)
            raise ShapeError("operands have different ranks", got=got, expected="equal ranks")
        if weights:
            (operand,) = weights.values()
            constant = tuple(int(d) for d in operand.shape)
            shapes.append((1,) * (len(shapes[0]) - len(constant)) + constant)
        dtypes = {operand.dtype for operand in (*inputs, *weights.values())}
        if len(dtypes) > 1:
            raise ShapeError("operands have different dtypes", got=", ".join(sorted(dtypes)), expected="one")
        if "bool" in dtypes:
            raise ShapeError("unsupported dtype", got="bool", expected="a float or int dtype")
        sizes: list[Dim] = []
        if len({len(shape) for shape in shapes}) == 1:
            for column in zip(*shapes, strict=True):
                distinct = {d for d in column if d != 1}
                if len(distinct) > 1:
                    break
                sizes.append(distinct.pop() if distinct else 1)
        if len(sizes) < len(shapes[0]) or len(shapes[-1]) > len(shapes[0]):
            got = " and ".join(str(list(shape)) for shape in shapes)
            raise ShapeError("operands do not fit", got=got, expected="rows of equal sizes, or 1")
        return TensorType((inputs[0].shape[0], *sizes), inputs[0].dtype)

    def row_flop(self, inputs: Types, weights: WeightTypes) -> int:
        return (len(inputs) + len(weights) - 1) * self.infer(inputs, weights).row_size


class Add(Broadcast):
    """x1 + x2 + ... + constant."""


class Mul(Broadcast):
    """x1 * x2 * ... * constant."""


class Max(Broadcast):
    """The largest of x1, x2, ..., constant; NaN if any is NaN."""


class Min(Broadcast):
    """The smallest of x1, x2, ..., constant; NaN if any is NaN."""


class Ordered(Broadcast, abstract=True):
    """Two ordered operands, a and b: two values; or one value and either b, the weight `constant`, or a, the weight
    `first`.
    """

    optional: ClassVar[tuple[str, ...]] = ("constant", "first")
    takes_ints: ClassVar[bool] = False
    flop_each: ClassVar[int] = 1

    def infer(self, inputs: Types, weights: WeightTypes) -> TensorType:
        if len(inputs) + len(weights) != 2:
            got = f"{len(inputs)} values and {len(weights)} constants"
            raise ShapeError("needs two operands", got=got, expected="two values, or a value and a constant")
        if not self.takes_ints:
            need_float(inputs[0])
        return super().infer(inputs, weights)

    def row_flop(self, inputs: Types, weights: WeightTypes) -> int:
        return self.flop_each * self.infer(inputs, weights).row_size


class Sub(Ordered):
    """a - b."""

    takes_ints: ClassVar[bool] = True


class Div(Ordered):
    """a / b; for ints truncated, and an error if b is 0."""

    takes_ints: ClassVar[bool] = True
    flop_each: ClassVar[int] = 8


class Pow(Ordered):
    """a to the power of b; NaN if a < 0 and b is not an integer."""

    flop_each: ClassVar[int] = 60


class PReLU(Ordered):
    """a where a >= 0, else a * b: a LeakyReLU with a slope per channel, or per element."""

    flop_each: ClassVar[int] = 2


class Comparison(Ordered, abstract=True):
    """1 where it is true, else 0, in the dtype of a and b. False if either is NaN."""

    takes_ints: ClassVar[bool] = True


class Greater(Comparison):
    """1 where a > b, else 0."""


class GreaterOrEqual(Comparison):
    """1 where a >= b, else 0."""


class Equal(Comparison):
    """1 where a == b, else 0."""


class Mask(Ordered):
    """a where b is not 0, else 0, even if a is NaN.

    a is a value or the weight `first`, b a value or the weight `mask`.
    """

    takes_ints: ClassVar[bool] = True
    optional: ClassVar[tuple[str, ...]] = ("first", "mask")


@dataclass(frozen=True, eq=False, repr=False)
class Mod(Ordered):
    """The exact remainder of a / b: with the sign of b, or with that of a if `truncated`, which is C's fmod.

    For ints it is an error if b is 0.
    """

    truncated: bool = False
    takes_ints: ClassVar[bool] = True
    flop_each: ClassVar[int] = 8


@dataclass(frozen=True, eq=False, repr=False)
class Concat(Layer):
    """Concatenation along an axis."""

    axis: int = 1
    arity: ClassVar[int | None] = None

    def infer(self, inputs: Types, weights: WeightTypes) -> TensorType:
        first, axis = inputs[0], row_axis(self.axis, inputs[0])
        for other in inputs[1:]:
            resized = TensorType((*other.shape[:axis], first.shape[axis], *other.shape[axis + 1 :]), other.dtype)
            if len(other.shape) != len(first.shape) or resized != first:
                raise ShapeError("operands do not fit", got=str(other), expected=f"{first} except axis {axis}")
        total = sum(int(operand.shape[axis]) for operand in inputs)
        return TensorType((*first.shape[:axis], total, *first.shape[axis + 1 :]), first.dtype)

    def row_flop(self, inputs: Types, weights: WeightTypes) -> int:
        return 0


@dataclass(frozen=True, eq=False, repr=False)
class Interleave(Layer):
    """Interleaves the phases of an output; a rewrite puts it after the phases of a transposed convolution.

    Input p (counted over the strides, the last axis fastest) fills y[..., p0::stride0, p1::stride1].
    """

    stride: tuple[int, ...] = (2, 2)
    arity: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        as_sizes(self, stride=1)

    def phases(self) -> list[tuple[int, ...]]:
        return list(itertools.product(*(range(s) for s in self.stride)))

    def infer(self, inputs: Types, weights: WeightTypes) -> TensorType:
        if len(inputs) != math.prod(self.stride):
            raise ShapeError("wrong number of phases", got=str(len(inputs)), expected=str(math.prod(self.stride)))
        x = inputs[0]
        if len(x.shape) != 2 + len(self.stride):
            raise ShapeError("bad input shape", got=str(x), expected=f"(B, C and {len(self.stride)} more axes)")
        sizes = [0] * len(self.stride)
        for phase, part in zip(self.phases(), inputs, strict=True):
            for axis, (p, s) in enumerate(zip(phase, self.stride, strict=True)):
                if len(part.shape) == len(x.shape):
                    sizes[axis] = max(sizes[axis], (int(part.shape[2 + axis]) - 1) * s + p + 1)
        for phase, part in zip(self.phases(), inputs, strict=True):
            expected = (*x.shape[:2], *(len(range(p, n, s)) for p, n, s in zip(phase, sizes, self.stride, strict=True)))
            if part.shape != expected or part.dtype != x.dtype:
                raise ShapeError("phases do not fit", got=str(part), expected=str(TensorType(expected, x.dtype)))
        return TensorType((*x.shape[:2], *sizes), x.dtype)

    def row_flop(self, inputs: Types, weights: WeightTypes) -> int:
        return 0
